/* Attention of query rows over a paged cache of half-precision keys and values.
 *
 * The cache of a layer is a run of KV tiles of 16 tokens; a block of the scheduler is block_size / 16 of them. A tile holds
 * for each kv head the keys, transposed [head_dim][16 tokens], and then the values [16 tokens][width], where width is head_dim
 * rounded up to 16. So scores and weighted sums are both products of the same form, 16 lanes wide.
 *
 * A row's result depends on its own query, position and cache content alone. Its context is cut into segments of 256 tokens
 * by absolute position; each has a softmax of its own (scores, largest, sum, weighted values, tokens ascending), and segments
 * are merged in ascending order. Which rows are computed together changes nothing. What lies outside of a row's
 * view is never multiplied, since 0 * NaN is NaN.
 */
#ifndef SHM_ATTENTION_H
#define SHM_ATTENTION_H

#include "vector.h"

#include <stdbool.h>

enum {
    KV_TILE = 16,
    SEGMENT = 256,
    FEW_VECTORS = 3, /* so few take two products at a time */
    MOST_VECTORS = 6, /* query vectors that share one pass over keys or values: 12 sums of 8 lanes fit the registers */
    TILE_VECTORS = 48 /* query vectors of one work item, unless the query heads of one kv head are more */
};

typedef struct {
    int head_dim, width, num_shared; /* num_shared: query heads for each kv head */
    int num_kv_heads, tiles_per_block, window;
    const uint16_t *cache; /* of the layer */
} AttentionShape;

/* One thread's memory for a work item of n query vectors; vector = row * num_shared + head. */
typedef struct {
    float *query;  /* [n][width], scaled */
    float *scores; /* [n][SEGMENT]: then weights */
    float *part;   /* [n][width]: weighted values of one segment */
    float *sum;    /* [n][width]: of the segments so far */
    float *largest, *total; /* [n] of the segments so far */
} AttentionRoom;

INLINE int least_int(int a, int b) { return a < b ? a : b; }
INLINE int most_int(int a, int b) { return a > b ? a : b; }

INLINE const uint16_t *keys_of_tile(const AttentionShape *s, const int32_t *blocks, int token, int kv_head) {
    int tile = token / KV_TILE;
    int64_t physical = (int64_t)blocks[tile / s->tiles_per_block] * s->tiles_per_block + tile % s->tiles_per_block;
    return s->cache + (physical * s->num_kv_heads + kv_head) * (s->head_dim + s->width) * KV_TILE;
}

INLINE const uint16_t *values_of_tile(const AttentionShape *s, const int32_t *blocks, int token, int kv_head) {
    return keys_of_tile(s, blocks, token, kv_head) + s->head_dim * KV_TILE;
}

/* One product of 16 lanes: c[v][0..15] += sum over k of a[v][k] * b[k][0..15], k ascending, one fused multiply-add each. */
typedef struct {
    const uint16_t *b;
    float *c;
} Product;

/* `w` products with one `a`: few query vectors alone would leave the multipliers waiting for their own sums. `ahead` is
 * fetched meanwhile, a row for each k; sums begin at zero if `is_first`. */
INLINE void add_product_of(const int n, const int w, const float *a, int64_t a_stride, const Product *p, int64_t b_stride,
                           int depth, int64_t c_stride, bool is_first, const uint16_t *ahead) {
#if defined(SHM_AVX512_VNNI)
    __m512 sums[MOST_VECTORS][2];
#pragma GCC unroll 6
    for (int v = 0; v < n; v++)
#pragma GCC unroll 2
        for (int i = 0; i < w; i++)
            sums[v][i] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(p[i].c + v * c_stride);
    for (int k = 0; k < depth; k++) {
        __m512 row[2];
#pragma GCC unroll 2
        for (int i = 0; i < w; i++)
            row[i] = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p[i].b + k * b_stride)));
        __builtin_prefetch(ahead + k * b_stride);
#pragma GCC unroll 6
        for (int v = 0; v < n; v++) {
            __m512 factor = _mm512_set1_ps(a[v * a_stride + k]);
#pragma GCC unroll 2
            for (int i = 0; i < w; i++)
                sums[v][i] = _mm512_fmadd_ps(factor, row[i], sums[v][i]);
        }
    }
#pragma GCC unroll 6
    for (int v = 0; v < n; v++)
#pragma GCC unroll 2
        for (int i = 0; i < w; i++)
            _mm512_storeu_ps(p[i].c + v * c_stride, sums[v][i]);
#else
    f32x8 sums[MOST_VECTORS][4];
#pragma GCC unroll 6
    for (int v = 0; v < n; v++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * w; i++)
            sums[v][i] = is_first ? all8(0.0f) : load8(p[i / 2].c + v * c_stride + i % 2 * 8);
    for (int k = 0; k < depth; k++) {
        f32x8 row[4];
#pragma GCC unroll 4
        for (int i = 0; i < 2 * w; i++)
            row[i] = load_halves8(p[i / 2].b + k * b_stride + i % 2 * 8);
        __builtin_prefetch(ahead + k * b_stride);
#pragma GCC unroll 6
        for (int v = 0; v < n; v++) {
            f32x8 factor = all8(a[v * a_stride + k]);
#pragma GCC unroll 4
            for (int i = 0; i < 2 * w; i++)
                sums[v][i] = fma8(factor, row[i], sums[v][i]);
        }
    }
#pragma GCC unroll 6
    for (int v = 0; v < n; v++)
#pragma GCC unroll 4
        for (int i = 0; i < 2 * w; i++)
            store8(p[i / 2].c + v * c_stride + i % 2 * 8, sums[v][i]);
#endif
}

/* `w` is 2 only for n <= FEW_VECTORS, so that all sums fit the registers. */
static __attribute__((noinline)) void add_products(int n, int w, const float *a, int64_t a_stride, const Product *p,
                                                   int64_t b_stride, int depth, int64_t c_stride, bool is_first,
                                                   const uint16_t *ahead) {
#define CALL(N, W) add_product_of(N, W, a, a_stride, p, b_stride, depth, c_stride, is_first, ahead)
    switch (2 * n + w) {
    case 3: CALL(1, 1); break;
    case 4: CALL(1, 2); break;
    case 5: CALL(2, 1); break;
    case 6: CALL(2, 2); break;
    case 7: CALL(3, 1); break;
    case 8: CALL(3, 2); break;
    case 9: CALL(4, 1); break;
    case 11: CALL(5, 1); break;
    default: CALL(6, 1); break;
    }
#undef CALL
}

/* The scores of vectors [first, first + n) with the tokens of the segment's tiles from `tile` on: 1 or 2 tiles. */
static void add_scores(const AttentionShape *s, const AttentionRoom *room, const int32_t *blocks, int kv_head, int first,
                       int n, int tile, int num_tiles, const uint16_t *ahead) {
    Product products[2];
    for (int i = 0; i < num_tiles; i++) {
        int token = tile + i * KV_TILE;
        products[i] = (Product){keys_of_tile(s, blocks, token, kv_head), room->scores + first * SEGMENT + token % SEGMENT};
    }
    add_products(n, num_tiles, room->query + first * s->width, s->width, products, KV_TILE, s->head_dim, SEGMENT, true, ahead);
}

/* scores[begin..end) become weights e^(score - largest). Lanes go by absolute position, so that sums have one order. */
static void softmax_of_segment(float *scores, int begin, int end, float *largest, float *total) {
    int first = begin & ~7, last = (end + 7) & ~7;
    for (int t = first; t < begin; t++)
        scores[t] = -INFINITY;
    for (int t = end; t < last; t++)
        scores[t] = -INFINITY;
    f32x8 most = all8(-INFINITY), totals = all8(0.0f);
    for (int t = first; t < last; t += 8) {
        f32x8 s = load8(scores + t);
        most = select8(s > most, s, most);
    }
    *largest = max8(most);
    for (int t = first; t < last; t += 8) {
        f32x8 s = load8(scores + t);
        f32x8 weight = select8(s == -INFINITY, all8(0.0f), exp8(s - *largest));
        store8(scores + t, weight);
        totals += weight;
    }
    *total = sum8(totals);
}

/* part[v] += weighted values of tokens [begin, end), for vectors first .. first + n - 1. */
static void add_values(const AttentionShape *s, const AttentionRoom *room, const int32_t *blocks, int kv_head, int first,
                       int n, int begin, int end) {
    const int most = n <= FEW_VECTORS ? 2 : 1;
    for (int tile = begin & ~(KV_TILE - 1); tile < end; tile += KV_TILE) {
        int from = most_int(begin, tile), to = least_int(end, tile + KV_TILE);
        const uint16_t *values = values_of_tile(s, blocks, tile, kv_head) + (from - tile) * s->width;
        const uint16_t *ahead = tile + KV_TILE < end ? values_of_tile(s, blocks, tile + KV_TILE, kv_head) : values;
        const float *weights = room->scores + first * SEGMENT + from % SEGMENT;
        float *part = room->part + first * s->width;
        for (int at = 0; at < s->width; at += 16 * most) {
            const Product products[2] = {{values + at, part + at}, {values + at + 16, part + at + 16}};
            int w = least_int(most, (s->width - at) / 16);
            add_products(n, w, weights, SEGMENT, products, s->width, to - from, s->width, false, ahead + at);
        }
    }
}

INLINE int first_seen(const AttentionShape *s, int position) {
    return s->window > 0 ? most_int(0, position - s->window + 1) : 0;
}

/* The segment's weighted values of vectors [first, first + n): what all of them see in one pass, the rest one by one. */
static void weigh_values(const AttentionShape *s, const AttentionRoom *room, const int32_t *blocks, int kv_head,
                         int position, int begin, int end, int first, int n) {
    int from[MOST_VECTORS], to[MOST_VECTORS], shared_from = begin, shared_to = end;
    for (int i = 0; i < n; i++) {
        int at = position + (first + i) / s->num_shared;
        from[i] = most_int(first_seen(s, at), begin);
        to[i] = least_int(at + 1, end);
        shared_from = most_int(shared_from, from[i]);
        shared_to = least_int(shared_to, to[i]);
    }
    if (shared_from >= shared_to)
        shared_from = shared_to = begin; /* nothing is shared: all is "the rest" */
    for (int i = 0; i < n && shared_from < shared_to; i++)
        add_values(s, room, blocks, kv_head, first + i, 1, from[i], shared_from);
    add_values(s, room, blocks, kv_head, first, n, shared_from, shared_to);
    for (int i = 0; i < n; i++)
        add_values(s, room, blocks, kv_head, first + i, 1, most_int(from[i], shared_to), to[i]);
}

/* The vectors of `num_rows` rows of one sequence at positions `position`, `position` + 1, ...: room->query in, room->sum out. */
static void attend(const AttentionShape *s, const AttentionRoom *room, const int32_t *blocks, int kv_head, int position,
                   int num_rows) {
    const int shared = s->num_shared, n = num_rows * shared, width = s->width;
    const int oldest = first_seen(s, position), newest = position + num_rows - 1;
    for (int v = 0; v < n; v++)
        room->total[v] = 0.0f;
    for (int segment = oldest / SEGMENT * SEGMENT; segment <= newest; segment += SEGMENT) {
        int begin = most_int(segment, oldest), end = least_int(segment + SEGMENT, newest + 1);
        for (int tile = begin & ~(KV_TILE - 1), count; tile < end; tile += count * KV_TILE) {
            count = n <= FEW_VECTORS && tile + KV_TILE < end ? 2 : 1;
            int row = most_int(0, tile - position), row_end = num_rows; /* the rows that see a token of the tiles */
            while (row_end > row && first_seen(s, position + row_end - 1) >= tile + count * KV_TILE)
                row_end--;
            int next = tile + count * KV_TILE;
            const uint16_t *ahead = next < end ? keys_of_tile(s, blocks, next, kv_head)
                                               : values_of_tile(s, blocks, begin, kv_head);
            for (int v = row * shared; v < row_end * shared; v += MOST_VECTORS)
                add_scores(s, room, blocks, kv_head, v, least_int(MOST_VECTORS, row_end * shared - v), tile, count, ahead);
        }
        float largest[n], total[n];
        for (int v = 0; v < n; v++) {
            int at = position + v / shared;
            int from = most_int(first_seen(s, at), begin), to = least_int(at + 1, end);
            total[v] = 0.0f;
            if (from < to)
                softmax_of_segment(room->scores + v * SEGMENT, from - segment, to - segment, &largest[v], &total[v]);
        }
        memset(room->part, 0, sizeof(float) * (size_t)(n * width));
        for (int v = 0; v < n; v += MOST_VECTORS)
            weigh_values(s, room, blocks, kv_head, position, begin, end, v, least_int(MOST_VECTORS, n - v));
        for (int v = 0; v < n; v++) {
            float *sum = room->sum + v * width, *part = room->part + v * width;
            if (total[v] == 0.0f)
                continue; /* the row sees nothing of this segment */
            if (room->total[v] == 0.0f) {
                memcpy(sum, part, sizeof(float) * (size_t)width);
                room->total[v] = total[v];
                room->largest[v] = largest[v];
                continue;
            }
            float most = largest[v] > room->largest[v] ? largest[v] : room->largest[v];
            f32x8 keep = exp8(all8(room->largest[v] - most)), take = exp8(all8(largest[v] - most));
            for (int d = 0; d < width; d += 8)
                store8(sum + d, fma8(take, load8(part + d), keep * load8(sum + d)));
            room->total[v] = __builtin_fmaf(take[0], total[v], keep[0] * room->total[v]);
            room->largest[v] = most;
        }
    }
    for (int v = 0; v < n; v++) {
        float *sum = room->sum + v * width, share = 1.0f / room->total[v];
        for (int d = 0; d < width; d += 8)
            store8(sum + d, load8(sum + d) * share);
    }
}

#endif
