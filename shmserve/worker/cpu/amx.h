/* Products of many rows, as those of a prompt, by AMX: tiles of 16 rows by 16 columns. A part of matmul.h, behind its types.
 *
 * Owns: the switch, and the tile configuration of each thread. Never: an arithmetic of its own. The sums of a group are exact
 * integers, and the floats that follow come in matmul.h's order: the bits are those of tile4 and tile8.
 *
 *     A    16 rows of activations, the 32 bytes of one group      read where they lie, num_groups * 32 bytes apart
 *     B    8 words of 16 columns: w of a Block8 or a WideBlock4   read where it lies: pack.py's words are in the order of tiles
 *     C    A times B, signed by signed                            4-bit weights are bytes of 0..15 here
 *
 * 8-bit blocks are loaded as they are. 4-bit blocks are widened a panel at a time into the thread's own memory, which all rows
 * of the step then share: bytes for the whole model would double its memory, and the decode rows' traffic if they read them.
 *
 * A group has its own scale, so the integers leave their tile after each group, where a product without scales would add on
 * for all of K. What that costs shapes the code. The float sums of a tile are 16 registers, which no second tile would fit
 * beside; so the tiles run DEPTH groups ahead into a buffer of 8 KiB, which stays in L1, and then one tile after the other
 * takes up its sums, adds DEPTH groups from the buffer (the load is part of the conversion) and lays them down again:
 *
 *     for DEPTH groups:  load B, two A; zero, multiply and store two C      two groups in turn have their own B and C
 *     for two tiles:     16 sums; for DEPTH groups: d, m; for 16 rows: convert, d * scale, fma, fma
 *
 * By count, for a tile and a group: 64 vector instructions (48 with 8 bits) and 20 loads of tile rows + 48 others on two ports
 * each, 16 cycles of the tile unit, 20 stores. So the float part bounds it, at about a third of what the rows cost by VNNI (8
 * products and the same floats each). Two panels at a time (the usual 2 x 2 of tiles) would save 8 of the 68 loads and nothing
 * else. Counted, not measured: this has never run on a CPU that has AMX, only over the tests' emulation.
 */
#ifndef SHM_AMX_H
#define SHM_AMX_H

#include <errno.h>

#if defined(SHM_AVX512_VNNI) && defined(SHM_AMX)

#ifdef SHM_AMX_EMULATION /* the tests': the same operations on tiles in plain C */
#include SHM_AMX_EMULATION
#else

#include <sys/syscall.h>
#include <unistd.h>

/* The kernel gives tiles to a process that asks, since they make its threads' saved states 8 KiB larger. 0, or an errno. */
static int tiles_ask(void) {
    enum { GET_PERMITTED = 0x1022, REQUEST = 0x1023, TILE_DATA = 18 }; /* arch_prctl(2); Linux 5.16 and later */
    unsigned long permitted = 0;
    if (syscall(SYS_arch_prctl, REQUEST, TILE_DATA) || syscall(SYS_arch_prctl, GET_PERMITTED, &permitted))
        return errno;
    return permitted >> TILE_DATA & 1 ? 0 : EPERM;
}

/* Tiles are named by literal digits: the compilers' own macros put them into the instruction. */
#define tiles_configure(config) _tile_loadconfig(config)
#define tiles_release() _tile_release()
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride) _tile_loadd(tile, from, stride)
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)
#define tile_add_dots(c, a, b) _tile_dpbssd(c, a, b)

#endif

/* As the instruction reads it. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} TileConfig;

_Static_assert(sizeof(TileConfig) == 64, "ldtilecfg reads 64 bytes");

/* Steps of fewer rows are decode steps, which wait for memory and not for products. */
enum { HAS_AMX = 1, AMX_TILE = 16, AMX_ROWS = 2 * AMX_TILE, AMX_DEPTH = 4 };

static bool amx_is_on;                  /* changes between steps only */
static _Thread_local bool amx_is_begun; /* this thread's tiles are configured */

/* 0, or the errno with which the kernel refuses. */
static int amx_switch(bool is_wanted) {
    int refused = is_wanted ? tiles_ask() : 0;
    amx_is_on = is_wanted && !refused;
    return refused;
}

static bool amx_serves(int num_rows) { return amx_is_on && num_rows >= AMX_ROWS; }

/* Before a thread's first product. The configuration is a constant: gcc 12 believes that the instruction reads 8 bytes, and
 * would drop the stores that fill in the rest of one on the stack. */
static void amx_begin(void) {
    static const TileConfig config = {
        .palette = 1,
        .row_bytes = {64, 64, 64, 64, GROUP, GROUP, 64, 64}, /* C: 0 to 3; A: 4, 5; B: 6, 7 */
        .num_rows = {AMX_TILE, AMX_TILE, AMX_TILE, AMX_TILE, AMX_TILE, AMX_TILE, GROUP / 4, GROUP / 4},
    };
    if (amx_is_begun)
        return;
    tiles_configure(&config);
    amx_is_begun = true;
}

/* After an item of work: a thread that sleeps, or is put aside, has no tiles to be saved. */
static void amx_end(void) {
    if (!amx_is_begun)
        return;
    tiles_release();
    amx_is_begun = false;
}

typedef int32_t AmxDots[AMX_DEPTH][AMX_TILE][COLUMNS];

#define DOTS_OF_GROUP(g, first_c, second_c, b)                                                                                 \
    do {                                                                                                                       \
        tile_load(b, w + (g) * block_bytes, COLUMNS * 4);                                                                      \
        tile_load(4, q + (g) * GROUP, stride);                                                                                 \
        tile_zero(first_c);                                                                                                    \
        tile_add_dots(first_c, 4, b);                                                                                          \
        if (num_tiles == 2) {                                                                                                  \
            tile_load(5, q + AMX_TILE * stride + (g) * GROUP, stride);                                                         \
            tile_zero(second_c);                                                                                               \
            tile_add_dots(second_c, 5, b);                                                                                     \
        }                                                                                                                      \
        tile_store(first_c, dots[0][g], COLUMNS * 4);                                                                          \
        if (num_tiles == 2)                                                                                                    \
            tile_store(second_c, dots[1][g], COLUMNS * 4);                                                                     \
    } while (0)

/* The integers of one or two tiles and of `num_groups` groups, from w and q on. */
INLINE void amx_dots(int num_tiles, int num_groups, const uint8_t *w, int64_t block_bytes, const int8_t *q, int64_t stride,
                     AmxDots dots[2]) {
    int g = 0;
    for (; g + 2 <= num_groups; g += 2) {
        DOTS_OF_GROUP(g, 0, 1, 6);
        DOTS_OF_GROUP(g + 1, 2, 3, 7);
    }
    if (g < num_groups)
        DOTS_OF_GROUP(g, 0, 1, 6);
}

/* The sums of one tile go on by `num_groups` groups; scale and offset are those of its first row. */
INLINE void amx_add(const bool has_minimum, int num_groups, const uint8_t *block, const float *scale, const float *offset,
                    int64_t stride, const AmxDots dots, float (*sums)[COLUMNS]) {
    __m512 sum[AMX_TILE];
#pragma GCC unroll 16
    for (int r = 0; r < AMX_TILE; r++)
        sum[r] = _mm512_loadu_ps(sums[r]);
    for (int g = 0; g < num_groups; g++, block += has_minimum ? sizeof(WideBlock4) : sizeof(Block8)) {
        const float *scales = scale + g, *offsets = offset + g;
        __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const WideBlock4 *)block)->d));
        __m512 m = d;
        if (has_minimum)
            m = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const WideBlock4 *)block)->m));
#pragma GCC unroll 4
        for (int r = 0; r < AMX_TILE; r += 4, scales += 4 * stride, offsets += 4 * stride) {
            /* gcc would otherwise keep the addresses of all 16 rows, on the stack */
            __asm__("" : "+r"(scales), "+r"(offsets));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __m512 dot = _mm512_cvtepi32_ps(_mm512_loadu_si512(dots[g][r + i]));
                sum[r + i] = _mm512_fmadd_ps(_mm512_mul_ps(d, _mm512_set1_ps(scales[i * stride])), dot, sum[r + i]);
                if (has_minimum)
                    sum[r + i] = _mm512_fmadd_ps(m, _mm512_set1_ps(offsets[i * stride]), sum[r + i]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < AMX_TILE; r++)
        _mm512_storeu_ps(sums[r], sum[r]);
}

/* Each in registers of its own, once for 4 bits and once for 8. */
static __attribute__((noinline)) void amx_add4(int num_groups, const uint8_t *block, const float *scale, const float *offset,
                                               int64_t stride, const AmxDots dots, float (*sums)[COLUMNS]) {
    amx_add(true, num_groups, block, scale, offset, stride, dots, sums);
}

static __attribute__((noinline)) void amx_add8(int num_groups, const uint8_t *block, const float *scale, const float *offset,
                                               int64_t stride, const AmxDots dots, float (*sums)[COLUMNS]) {
    amx_add(false, num_groups, block, scale, offset, stride, dots, sums);
}

/* What `tile` gives, for up to AMX_ROWS rows, of 8-bit or wide blocks, in a step of at least AMX_ROWS rows. Rows that are not
 * a whole tile are computed with those before them. */
static __attribute__((noinline)) void amx_tile(int bits, const uint8_t *blocks, int n, const Rows *x, int64_t row,
                                               float (*out)[COLUMNS]) {
    const int groups = x->num_groups, num_tiles = n > AMX_TILE ? 2 : 1, num_rows = num_tiles * AMX_TILE;
    const int64_t block_bytes = bits == 4 ? sizeof(WideBlock4) : sizeof(Block8);
    const uint8_t *w = blocks + (bits == 4 ? offsetof(WideBlock4, w) : offsetof(Block8, w));
    const int64_t first = (row + n - num_rows) * groups;
    _Alignas(64) AmxDots dots[2];
    _Alignas(64) float sums[AMX_ROWS][COLUMNS];
    memset(sums, 0, sizeof sums[0] * (size_t)num_rows);
    for (int g = 0; g < groups; g += AMX_DEPTH) {
        const int depth = groups - g < AMX_DEPTH ? groups - g : AMX_DEPTH;
        __asm__ volatile("" ::: "memory"); /* gcc 12 does not know that a load of a tile reads memory */
        amx_dots(num_tiles, depth, w + g * block_bytes, block_bytes, x->q + (first + g) * GROUP, (int64_t)groups * GROUP, dots);
        for (int t = 0; t < num_tiles; t++) {
            const int64_t at = first + g + (int64_t)t * AMX_TILE * groups;
            (bits == 4 ? amx_add4 : amx_add8)(depth, blocks + g * block_bytes, x->scale + at, x->offset + at, groups, dots[t],
                                              sums + t * AMX_TILE);
        }
    }
    memcpy(out, sums[num_rows - n], sizeof sums[0] * (size_t)n);
}

#else

enum { HAS_AMX = 0, AMX_ROWS = 0 };

static int amx_switch(bool is_wanted) { return is_wanted ? ENOSYS : 0; }
INLINE bool amx_serves(int num_rows) { return (void)num_rows, false; }
INLINE void amx_begin(void) {}
INLINE void amx_end(void) {}
INLINE void amx_tile(int bits, const uint8_t *blocks, int n, const Rows *x, int64_t row, float (*out)[COLUMNS]) {
    (void)bits, (void)blocks, (void)n, (void)x, (void)row, (void)out;
}

#endif

#endif
