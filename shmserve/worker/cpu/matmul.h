/* Products of 8-bit activations with 4-bit or 8-bit weights.
 *
 * A matrix is cut into panels of 16 output columns; a panel is a run of blocks, each 16 columns by a group of 32 inputs.
 * Word w[j][n] of a block is four neighbouring inputs of column n, so that one instruction multiplies four inputs of 8 or 16
 * columns. pack.py writes this layout.
 *
 *     Block4: weight = d * u + m,  u in 0..15: low nibbles are inputs 4j..4j+3 of the group, high nibbles inputs 4j+16..4j+19
 *     Block8: weight = d * s,      s in -128..127
 *
 * An activation row is x = scale * q for each group, q in -127..127. For each group, in ascending order,
 *
 *     sum = fma(d * scale, dot, sum);  sum = fma(m, scale * total, sum)           dot = sum of u * q,  total = sum of q
 *
 * The integer part is exact and the floats come in this order in every variant: all variants give the same bits, for any
 * number of rows.
 */
#ifndef SHM_MATMUL_H
#define SHM_MATMUL_H

#include "vector.h"

#include <stdbool.h>
#include <stddef.h>

enum { COLUMNS = 16, GROUP = 32 };

typedef struct {
    uint16_t d[COLUMNS], m[COLUMNS];
    uint8_t w[4][COLUMNS * 4];
} Block4;

typedef struct {
    uint16_t d[COLUMNS];
    int8_t w[8][COLUMNS * 4];
} Block8;

/* A Block4 with a byte for each weight: made once for a panel that many rows go through. */
typedef struct {
    uint16_t d[COLUMNS], m[COLUMNS];
    uint8_t w[8][COLUMNS * 4];
} WideBlock4;

typedef struct {
    int32_t num_panels, num_groups, bits;
    const uint8_t *blocks;
} Matrix;

/* Quantised activations: rows of num_groups groups. offset = scale * total. */
typedef struct {
    int32_t num_groups;
    int8_t *q;
    float *scale, *offset;
    int32_t *total;
} Rows;

INLINE int64_t panel_bytes(const Matrix *m) {
    return (int64_t)m->num_groups * (int64_t)(m->bits == 4 ? sizeof(Block4) : sizeof(Block8));
}

INLINE const uint8_t *panel_of(const Matrix *m, int panel) { return m->blocks + panel * panel_bytes(m); }

/* Quantises the 32 floats of one group. A group that is not finite gets the scale NaN, which no product hides. */
static void quantize_group(const float *x, const Rows *rows, int64_t row, int group) {
    int64_t at = row * rows->num_groups + group;
    i32x8 largest = {0};
    for (int i = 0; i < GROUP; i += 8) {
        i32x8 magnitude = (i32x8)load8(x + i) & 0x7fffffff; /* the bits of floats without sign are ordered as they are */
        largest = (i32x8)select8(magnitude > largest, (f32x8)magnitude, (f32x8)largest);
    }
    int32_t bits = max_of_integers(largest);
    float most = float_of_bits((uint32_t)bits);
    if (bits >= 0x7f800000 || most < 1e-30f) { /* below, 127 / most would not be finite */
        memset(rows->q + at * GROUP, 0, GROUP);
        rows->total[at] = 0;
        rows->scale[at] = rows->offset[at] = bits >= 0x7f800000 ? NAN : 0.0f;
        return;
    }
    float per_unit = 127.0f / most, scale = most / 127.0f;
    i32x8 q[4], totals = {0};
    for (int i = 0; i < 4; i++) {
        q[i] = (i32x8)(load8(x + 8 * i) * per_unit + ROUNDER) - ROUNDER_BITS;
        totals += q[i];
    }
    store_bytes32(rows->q + at * GROUP, q);
    int32_t total = sum_of_integers(totals);
    rows->total[at] = total;
    rows->scale[at] = scale;
    rows->offset[at] = scale * (float)total;
}

#if defined(SHM_AVX512_VNNI)

enum { TILE_ROWS = 8, USES_WIDE_BLOCKS = 0 };
#define SHM_VARIANT "avx512-vnni"

INLINE __m512i dot_words(const __m512i w[8], const int8_t *x, __m512i start) {
    __m512i even = start, odd = _mm512_setzero_si512();
    for (int j = 0; j < 8; j += 2) {
        int32_t x0, x1;
        memcpy(&x0, x + 4 * j, 4);
        memcpy(&x1, x + 4 * j + 4, 4);
        even = _mm512_dpbusd_epi32(even, w[j], _mm512_set1_epi32(x0));
        odd = _mm512_dpbusd_epi32(odd, w[j + 1], _mm512_set1_epi32(x1));
    }
    return _mm512_add_epi32(even, odd);
}

INLINE void tile4(const int n, bool is_wide, const uint8_t *panel, const Rows *x, int64_t row, float (*out)[COLUMNS]) {
    (void)is_wide;
    const int groups = x->num_groups;
    const Block4 *block = (const Block4 *)panel;
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sum[TILE_ROWS];
    for (int r = 0; r < n; r++)
        sum[r] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, block++) {
        __m512i w[8];
        for (int j = 0; j < 4; j++) {
            __m512i words = _mm512_loadu_si512(block->w[j]);
            w[j] = _mm512_and_si512(words, low);
            w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(words, 4), low);
        }
        __builtin_prefetch((const char *)block + 6 * sizeof(Block4));
        __builtin_prefetch((const char *)block + 6 * sizeof(Block4) + 128);
        __builtin_prefetch((const char *)block + 6 * sizeof(Block4) + 256);
        __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)block->d));
        __m512 m = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)block->m));
        for (int r = 0; r < n; r++) {
            int64_t at = (row + r) * groups + g;
            __m512 dot = _mm512_cvtepi32_ps(dot_words(w, x->q + at * GROUP, _mm512_setzero_si512()));
            sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(x->scale[at])), dot, sum[r]);
            sum[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(x->offset[at]), sum[r]);
        }
    }
    for (int r = 0; r < n; r++)
        _mm512_storeu_ps(out[r], sum[r]);
}

INLINE void tile8(const int n, const uint8_t *panel, const Rows *x, int64_t row, float (*out)[COLUMNS]) {
    const int groups = x->num_groups;
    const Block8 *block = (const Block8 *)panel;
    __m512 sum[TILE_ROWS];
    for (int r = 0; r < n; r++)
        sum[r] = _mm512_setzero_ps();
    for (int g = 0; g < groups; g++, block++) {
        __m512i w[8];
        for (int j = 0; j < 8; j++) /* the instruction wants unsigned weights: s + 128, made good by the start value */
            w[j] = _mm512_xor_si512(_mm512_loadu_si512(block->w[j]), _mm512_set1_epi8((char)0x80));
        __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)block->d));
        for (int r = 0; r < n; r++) {
            int64_t at = (row + r) * groups + g;
            __m512i start = _mm512_set1_epi32(-128 * x->total[at]);
            __m512 dot = _mm512_cvtepi32_ps(dot_words(w, x->q + at * GROUP, start));
            sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(x->scale[at])), dot, sum[r]);
        }
    }
    for (int r = 0; r < n; r++)
        _mm512_storeu_ps(out[r], sum[r]);
}

#elif defined(SHM_AVX2)

enum { TILE_ROWS = 4, USES_WIDE_BLOCKS = 1 };

#if defined(__AVXVNNI__)
#define SHM_VARIANT "avx-vnni"
INLINE __m256i add_dot4(__m256i sum, __m256i w, __m256i x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
INLINE __m256i finish_dot4(__m256i sum) { return sum; }
INLINE __m256i add_dot8(__m256i sum, __m256i w, __m256i x) { return add_dot4(sum, w, x); }
#else
#define SHM_VARIANT "avx2"
/* Two products are at most 2 * 15 * 127, the eight of a group 30,480: they fit 16 bits and nothing saturates. */
INLINE __m256i add_dot4(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));
}
INLINE __m256i finish_dot4(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
/* |w| <= 128: two products are at most 32,512 and fit 16 bits, four do not. */
INLINE __m256i add_dot8(__m256i sum, __m256i w, __m256i x) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
#endif

INLINE __m256i word_of(const int8_t *x, int j) {
    int32_t word;
    memcpy(&word, x + 4 * j, 4);
    return _mm256_set1_epi32(word);
}

INLINE __m256 halves_at(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

INLINE void tile4(const int n, const bool is_wide, const uint8_t *panel, const Rows *x, int64_t row, float (*out)[COLUMNS]) {
    const int groups = x->num_groups;
    const __m256i low = _mm256_set1_epi8(15);
    __m256 sum[TILE_ROWS][2];
#pragma GCC unroll 4
    for (int r = 0; r < n; r++)
        sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int g = 0; g < groups; g++) {
        const uint8_t *block = panel + g * (is_wide ? sizeof(WideBlock4) : sizeof(Block4));
        const uint16_t *d = ((const Block4 *)block)->d, *m = ((const Block4 *)block)->m;
        const uint8_t *w = block + offsetof(Block4, w);
        const int8_t *q = x->q + (row * groups + g) * GROUP;
        const int64_t stride = (int64_t)groups * GROUP;
        __m256i dot[TILE_ROWS][2];
#pragma GCC unroll 4
        for (int r = 0; r < n; r++)
            dot[r][0] = dot[r][1] = _mm256_setzero_si256();
        if (is_wide) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++) {
                __m256i w0 = _mm256_loadu_si256((const __m256i *)(w + 64 * j));
                __m256i w1 = _mm256_loadu_si256((const __m256i *)(w + 64 * j + 32));
#pragma GCC unroll 4
                for (int r = 0; r < n; r++) {
                    __m256i word = word_of(q + r * stride, j);
                    dot[r][0] = add_dot4(dot[r][0], w0, word);
                    dot[r][1] = add_dot4(dot[r][1], w1, word);
                }
            }
        } else {
            for (int line = 0; line < 5; line++)
                __builtin_prefetch(block + 6 * sizeof(Block4) + 64 * line);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m256i w0 = _mm256_loadu_si256((const __m256i *)(w + 64 * j));
                __m256i w1 = _mm256_loadu_si256((const __m256i *)(w + 64 * j + 32));
                __m256i low0 = _mm256_and_si256(w0, low), high0 = _mm256_and_si256(_mm256_srli_epi16(w0, 4), low);
                __m256i low1 = _mm256_and_si256(w1, low), high1 = _mm256_and_si256(_mm256_srli_epi16(w1, 4), low);
#pragma GCC unroll 4
                for (int r = 0; r < n; r++) {
                    __m256i first = word_of(q + r * stride, j), second = word_of(q + r * stride, j + 4);
                    dot[r][0] = add_dot4(add_dot4(dot[r][0], low0, first), high0, second);
                    dot[r][1] = add_dot4(add_dot4(dot[r][1], low1, first), high1, second);
                }
            }
        }
        __m256 d0 = halves_at(d), d1 = halves_at(d + 8), m0 = halves_at(m), m1 = halves_at(m + 8);
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            int64_t at = (row + r) * groups + g;
            __m256 scale = _mm256_set1_ps(x->scale[at]), offset = _mm256_set1_ps(x->offset[at]);
            __m256 f0 = _mm256_cvtepi32_ps(finish_dot4(dot[r][0])), f1 = _mm256_cvtepi32_ps(finish_dot4(dot[r][1]));
            sum[r][0] = _mm256_fmadd_ps(m0, offset, _mm256_fmadd_ps(_mm256_mul_ps(d0, scale), f0, sum[r][0]));
            sum[r][1] = _mm256_fmadd_ps(m1, offset, _mm256_fmadd_ps(_mm256_mul_ps(d1, scale), f1, sum[r][1]));
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        _mm256_storeu_ps(out[r], sum[r][0]);
        _mm256_storeu_ps(out[r] + 8, sum[r][1]);
    }
}

INLINE void tile8(const int n, const uint8_t *panel, const Rows *x, int64_t row, float (*out)[COLUMNS]) {
    const int groups = x->num_groups;
    const Block8 *block = (const Block8 *)panel;
    __m256 sum[TILE_ROWS][2];
#pragma GCC unroll 4
    for (int r = 0; r < n; r++)
        sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int g = 0; g < groups; g++, block++) {
        const int8_t *q = x->q + (row * groups + g) * GROUP;
        const int64_t stride = (int64_t)groups * GROUP;
        __m256i dot[TILE_ROWS][2];
#pragma GCC unroll 4
        for (int r = 0; r < n; r++)
            dot[r][0] = dot[r][1] = _mm256_setzero_si256();
        for (int line = 0; line < 9; line++)
            __builtin_prefetch((const char *)block + 4 * sizeof(Block8) + 64 * line);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            __m256i w0 = _mm256_loadu_si256((const __m256i *)block->w[j]);
            __m256i w1 = _mm256_loadu_si256((const __m256i *)(block->w[j] + 32));
            __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
#pragma GCC unroll 4
            for (int r = 0; r < n; r++) { /* the unsigned operand is |w|; its sign goes over to x */
                __m256i word = word_of(q + r * stride, j);
                dot[r][0] = add_dot8(dot[r][0], size0, _mm256_sign_epi8(word, w0));
                dot[r][1] = add_dot8(dot[r][1], size1, _mm256_sign_epi8(word, w1));
            }
        }
        __m256 d0 = halves_at(block->d), d1 = halves_at(block->d + 8);
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            __m256 scale = _mm256_set1_ps(x->scale[(row + r) * groups + g]);
            sum[r][0] = _mm256_fmadd_ps(_mm256_mul_ps(d0, scale), _mm256_cvtepi32_ps(dot[r][0]), sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(_mm256_mul_ps(d1, scale), _mm256_cvtepi32_ps(dot[r][1]), sum[r][1]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        _mm256_storeu_ps(out[r], sum[r][0]);
        _mm256_storeu_ps(out[r] + 8, sum[r][1]);
    }
}

#else

enum { TILE_ROWS = 4, USES_WIDE_BLOCKS = 0 };
#define SHM_VARIANT "portable"

INLINE void add_scaled(float *sum, const uint16_t *factor, float scale, const int32_t *dot) {
    for (int n = 0; n < COLUMNS; n++)
        sum[n] = __builtin_fmaf(float_of_half(factor[n]) * scale, (float)dot[n], sum[n]);
}

INLINE void tile4(const int n, bool is_wide, const uint8_t *panel, const Rows *x, int64_t row, float (*out)[COLUMNS]) {
    (void)is_wide;
    const int groups = x->num_groups;
    const Block4 *block = (const Block4 *)panel;
    for (int r = 0; r < n; r++)
        memset(out[r], 0, sizeof out[r]);
    for (int g = 0; g < groups; g++, block++)
        for (int r = 0; r < n; r++) {
            int64_t at = (row + r) * groups + g;
            const int8_t *q = x->q + at * GROUP;
            int32_t dot[COLUMNS] = {0};
            for (int j = 0; j < 4; j++)
                for (int c = 0; c < COLUMNS; c++)
                    for (int k = 0; k < 4; k++) {
                        int w = block->w[j][4 * c + k];
                        dot[c] += (w & 15) * q[4 * j + k] + (w >> 4) * q[4 * j + 16 + k];
                    }
            add_scaled(out[r], block->d, x->scale[at], dot);
            for (int c = 0; c < COLUMNS; c++)
                out[r][c] = __builtin_fmaf(float_of_half(block->m[c]), x->offset[at], out[r][c]);
        }
}

INLINE void tile8(const int n, const uint8_t *panel, const Rows *x, int64_t row, float (*out)[COLUMNS]) {
    const int groups = x->num_groups;
    const Block8 *block = (const Block8 *)panel;
    for (int r = 0; r < n; r++)
        memset(out[r], 0, sizeof out[r]);
    for (int g = 0; g < groups; g++, block++)
        for (int r = 0; r < n; r++) {
            int64_t at = (row + r) * groups + g;
            const int8_t *q = x->q + at * GROUP;
            int32_t dot[COLUMNS] = {0};
            for (int j = 0; j < 8; j++)
                for (int c = 0; c < COLUMNS; c++)
                    for (int k = 0; k < 4; k++)
                        dot[c] += block->w[j][4 * c + k] * q[4 * j + k];
            add_scaled(out[r], block->d, x->scale[at], dot);
        }
}

#endif

#include "amx.h"

/* The row count is a constant in each call, so that the compiler keeps the sums in registers. */
#define FOR_ROW_COUNT(n, CALL)                                                                                                 \
    switch (n) {                                                                                                               \
    case 1: CALL(1); break;                                                                                                    \
    case 2: CALL(2); break;                                                                                                    \
    case 3: CALL(3); break;                                                                                                    \
    case 4: CALL(4); break;                                                                                                    \
    case 5: CALL(TILE_ROWS > 4 ? 5 : 4); break;                                                                                \
    case 6: CALL(TILE_ROWS > 4 ? 6 : 4); break;                                                                                \
    case 7: CALL(TILE_ROWS > 4 ? 7 : 4); break;                                                                                \
    default: CALL(TILE_ROWS); break;                                                                                           \
    }

/* A panel as `tile` reads it: its blocks, or wide blocks in a thread's own memory. */
typedef struct {
    const uint8_t *blocks;
    int bits;
    bool is_wide, uses_amx;
} Panel;

/* Rows that `tile` computes at once: at most MOST_ROWS. */
enum { MOST_ROWS = HAS_AMX ? AMX_ROWS : TILE_ROWS };

INLINE int rows_of_tile(Panel p) { return HAS_AMX && p.uses_amx ? AMX_ROWS : TILE_ROWS; }

/* Widening costs a pass over the panel and saves a fifth of each tile: it pays from about this many rows on. */
enum { WIDE_ROWS = 32 };
_Static_assert(!HAS_AMX || (int)AMX_ROWS >= (int)WIDE_ROWS, "AMX reads 4-bit blocks where they are wide");

/* For the rows 0 .. num_rows - 1. `room` holds num_groups wide blocks. */
static Panel open_panel(const Matrix *m, int panel, int num_rows, WideBlock4 *room) {
    const Block4 *block = (const Block4 *)panel_of(m, panel);
    const bool uses_amx = amx_serves(num_rows);
    if (uses_amx)
        amx_begin();
    if (!(USES_WIDE_BLOCKS || uses_amx) || m->bits != 4 || num_rows < WIDE_ROWS)
        return (Panel){(const uint8_t *)block, m->bits, false, uses_amx};
    for (int g = 0; g < m->num_groups; g++) {
        for (int line = 0; line < 5; line++)
            __builtin_prefetch((const char *)(block + g + 6) + 64 * line);
        memcpy(room[g].d, block[g].d, sizeof room[g].d + sizeof room[g].m);
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < COLUMNS * 4; i++) {
                room[g].w[j][i] = block[g].w[j][i] & 15;
                room[g].w[j + 4][i] = block[g].w[j][i] >> 4;
            }
    }
    return (Panel){(const uint8_t *)room, 4, true, uses_amx};
}

/* out[r] = the panel's 16 columns for rows row .. row + n - 1; 1 <= n <= rows_of_tile. */
static __attribute__((noinline)) void tile(Panel p, int n, const Rows *x, int64_t row, float (*out)[COLUMNS]) {
    if (HAS_AMX && p.uses_amx) {
        amx_tile(p.bits, p.blocks, n, x, row, out);
    } else if (p.bits == 8) {
#define CALL(N) tile8(N, p.blocks, x, row, out)
        FOR_ROW_COUNT(n, CALL)
#undef CALL
    } else if (USES_WIDE_BLOCKS && p.is_wide) {
#define CALL(N) tile4(N, true, p.blocks, x, row, out)
        FOR_ROW_COUNT(n, CALL)
#undef CALL
    } else {
#define CALL(N) tile4(N, false, p.blocks, x, row, out)
        FOR_ROW_COUNT(n, CALL)
#undef CALL
    }
}

/* Row `column` of the matrix as floats: the embedding of a token. */
static void unpack_column(const Matrix *m, int column, float *out) {
    int c = column % COLUMNS;
    const uint8_t *panel = panel_of(m, column / COLUMNS);
    for (int g = 0; g < m->num_groups; g++, out += GROUP) {
        if (m->bits == 8) {
            const Block8 *block = (const Block8 *)panel + g;
            float d = float_of_half(block->d[c]);
            for (int i = 0; i < GROUP; i++)
                out[i] = d * (float)block->w[i / 4][4 * c + i % 4];
        } else {
            const Block4 *block = (const Block4 *)panel + g;
            float d = float_of_half(block->d[c]), least = float_of_half(block->m[c]);
            for (int i = 0; i < GROUP / 2; i++) {
                int w = block->w[i / 4][4 * c + i % 4];
                out[i] = d * (float)(w & 15) + least;
                out[i + 16] = d * (float)(w >> 4) + least;
            }
        }
    }
}

#endif
