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
    STRIP = 64, /* tokens whose values are widened together: the longer, the fewer loads and stores of sums */
    AHEAD = 4 * KV_TILE, /* tokens between what is computed and what is fetched: some hundred ns */
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
    float *wide;   /* [STRIP][width]: keys of a tile or values of a strip as floats */
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
    const void *b; /* halves, or floats that were widened before */
    float *c;
    const uint16_t *ahead; /* fetched meanwhile, as many rows as b has; not with floats */
} Product;

#if defined(SHM_AVX512_VNNI)
typedef __m512 Lanes;
enum { LANES = 16 };
INLINE Lanes lanes_at(const float *p) { return _mm512_loadu_ps(p); }
INLINE Lanes halves_lanes_at(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE void put_lanes(float *p, Lanes v) { _mm512_storeu_ps(p, v); }
INLINE Lanes all_lanes(float x) { return _mm512_set1_ps(x); }
INLINE Lanes fma_lanes(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
#else
typedef f32x8 Lanes;
enum { LANES = 8 };
INLINE Lanes lanes_at(const float *p) { return load8(p); }
INLINE Lanes halves_lanes_at(const uint16_t *p) { return load_halves8(p); }
INLINE void put_lanes(float *p, Lanes v) { store8(p, v); }
INLINE Lanes all_lanes(float x) { return all8(x); }
INLINE Lanes fma_lanes(Lanes a, Lanes b, Lanes c) { return fma8(a, b, c); }
#endif

INLINE Lanes lanes_of(const Product *p, bool is_wide, int64_t at) {
    return is_wide ? lanes_at((const float *)p->b + at) : halves_lanes_at((const uint16_t *)p->b + at);
}

/* `w` products with one `a`: few query vectors alone would leave the multipliers waiting for their own sums. Sums begin at
 * zero if `is_first`. */
INLINE void add_product_of(const int n, const int w, const bool is_wide, const float *a, int64_t a_stride, const Product *p,
                           int64_t b_stride, int depth, int64_t c_stride, bool is_first) {
    const int parts = 16 / LANES, count = w * parts;
    Lanes sums[MOST_VECTORS][4];
#pragma GCC unroll 6
    for (int v = 0; v < n; v++)
#pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            sums[v][i] = is_first ? all_lanes(0.0f) : lanes_at(p[i / parts].c + v * c_stride + i % parts * LANES);
    for (int k = 0; k < depth; k++) {
#pragma GCC unroll 2
        for (int i = 0; i < w && !is_wide; i++)
            __builtin_prefetch(p[i].ahead + k * b_stride);
        Lanes factor[MOST_VECTORS], row[4]; /* what there is less of is held, the other is loaded one by one: 16 registers */
        if (n < count) {
#pragma GCC unroll 6
            for (int v = 0; v < n; v++)
                factor[v] = all_lanes(a[v * a_stride + k]);
#pragma GCC unroll 4
            for (int i = 0; i < count; i++) {
                row[i] = lanes_of(p + i / parts, is_wide, k * b_stride + i % parts * LANES);
#pragma GCC unroll 6
                for (int v = 0; v < n; v++)
                    sums[v][i] = fma_lanes(factor[v], row[i], sums[v][i]);
            }
        } else {
#pragma GCC unroll 4
            for (int i = 0; i < count; i++)
                row[i] = lanes_of(p + i / parts, is_wide, k * b_stride + i % parts * LANES);
#pragma GCC unroll 6
            for (int v = 0; v < n; v++) {
                factor[v] = all_lanes(a[v * a_stride + k]);
#pragma GCC unroll 4
                for (int i = 0; i < count; i++)
                    sums[v][i] = fma_lanes(factor[v], row[i], sums[v][i]);
            }
        }
    }
#pragma GCC unroll 6
    for (int v = 0; v < n; v++)
#pragma GCC unroll 4
        for (int i = 0; i < count; i++)
            put_lanes(p[i / parts].c + v * c_stride + i % parts * LANES, sums[v][i]);
}

/* `w` is 2 only for n <= FEW_VECTORS, so that all sums fit the registers. */
static __attribute__((noinline)) void add_products(int n, int w, bool is_wide, const float *a, int64_t a_stride,
                                                   const Product *p, int64_t b_stride, int depth, int64_t c_stride,
                                                   bool is_first) {
#define CALL(N, W, WIDE) add_product_of(N, W, WIDE, a, a_stride, p, b_stride, depth, c_stride, is_first)
    if (is_wide)
        switch (n) {
        case 1: CALL(1, 1, true); return;
        case 2: CALL(2, 1, true); return;
        case 3: CALL(3, 1, true); return;
        case 4: CALL(4, 1, true); return;
        case 5: CALL(5, 1, true); return;
        default: CALL(6, 1, true); return;
        }
    switch (2 * n + w) {
    case 3: CALL(1, 1, false); return;
    case 4: CALL(1, 2, false); return;
    case 5: CALL(2, 1, false); return;
    case 6: CALL(2, 2, false); return;
    case 7: CALL(3, 1, false); return;
    case 8: CALL(3, 2, false); return;
    case 9: CALL(4, 1, false); return;
    case 11: CALL(5, 1, false); return;
    default: CALL(6, 1, false); return;
    }
#undef CALL
}

static const float *widen(float *to, const uint16_t *from, int count) {
    for (int i = 0; i < count; i += 8)
        store8(to + i, load_halves8(from + i));
    return to;
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

INLINE int first_seen(const AttentionShape *s, int position) {
    return s->window > 0 ? most_int(0, position - s->window + 1) : 0;
}

/* An item of work: the vectors of `num_rows` rows of one sequence, at positions `position`, `position` + 1, ... */
typedef struct {
    const AttentionShape *shape;
    const AttentionRoom *room;
    const int32_t *blocks;
    int kv_head, position, num_rows;
    bool is_wide; /* many vectors: keys and values are widened once for all of them */
} Attention;

/* Scores of all vectors with the tokens of the tiles [tile, end): one pass for each MOST_VECTORS of them. */
static void score_tiles(const Attention *t, int begin, int end) {
    const AttentionShape *s = t->shape;
    const AttentionRoom *room = t->room;
    const int shared = s->num_shared, few = t->num_rows * shared <= FEW_VECTORS;
    for (int tile = begin & ~(KV_TILE - 1), next; tile < end; tile = next) {
        const int count = few && tile + KV_TILE < end ? 2 : 1;
        next = tile + count * KV_TILE;
        int row = most_int(0, tile - t->position), row_end = t->num_rows; /* the rows that see a token of the tiles */
        while (row_end > row && first_seen(s, t->position + row_end - 1) >= next)
            row_end--;
        const void *keys[2];
        const uint16_t *ahead[2];
        for (int i = 0; i < count; i++) {
            int at = tile + i * KV_TILE, later = at + AHEAD;
            keys[i] = keys_of_tile(s, t->blocks, at, t->kv_head);
            ahead[i] = later < end ? keys_of_tile(s, t->blocks, later, t->kv_head)
                                   : values_of_tile(s, t->blocks, least_int(begin + later - end, end - 1), t->kv_head);
        }
        if (t->is_wide)
            keys[0] = widen(room->wide, keys[0], s->head_dim * KV_TILE);
        for (int v = row * shared; v < row_end * shared; v += MOST_VECTORS) {
            float *scores = room->scores + v * SEGMENT + tile % SEGMENT;
            const Product products[2] = {{keys[0], scores, ahead[0]}, {keys[count - 1], scores + KV_TILE, ahead[count - 1]}};
            add_products(least_int(MOST_VECTORS, row_end * shared - v), count, t->is_wide, room->query + v * s->width,
                         s->width, products, KV_TILE, s->head_dim, SEGMENT, true);
        }
    }
}

/* part[v] += weights times values for tokens [from, to) of a tile or strip, whose values are at `values`; vectors
 * first .. + n - 1. */
static void weigh_tokens(const Attention *t, const void *values, const uint16_t *ahead, int first, int n, int from, int to) {
    const int width = t->shape->width, most = n <= FEW_VECTORS && !t->is_wide ? 2 : 1;
    const int skipped = from % (t->is_wide ? STRIP : KV_TILE) * width;
    if (from >= to)
        return;
    float *part = t->room->part + first * width;
    for (int at = 0; at < width; at += 16 * most) {
        const void *b[2];
        for (int i = 0; i < 2; i++)
            b[i] = t->is_wide ? (const void *)((const float *)values + skipped + at + 16 * i)
                              : (const void *)((const uint16_t *)values + skipped + at + 16 * i);
        const Product products[2] = {{b[0], part + at, ahead + at}, {b[1], part + at + 16, ahead + at + 16}};
        add_products(n, least_int(most, (width - at) / 16), t->is_wide, t->room->scores + first * SEGMENT + from % SEGMENT,
                     SEGMENT, products, width, to - from, width, false);
    }
}

/* Vectors first .. first + n - 1 over a tile or strip: the tokens that all of them see in one pass, the others one by one. */
static void weigh_tile(const Attention *t, const void *values, const uint16_t *ahead, int first, int n, int begin, int end) {
    int from[MOST_VECTORS], to[MOST_VECTORS], shared_from = begin, shared_to = end;
    for (int i = 0; i < n; i++) {
        int at = t->position + (first + i) / t->shape->num_shared;
        from[i] = most_int(first_seen(t->shape, at), begin);
        to[i] = least_int(at + 1, end);
        shared_from = most_int(shared_from, from[i]);
        shared_to = least_int(shared_to, to[i]);
    }
    if (shared_from >= shared_to) { /* nothing is shared */
        for (int i = 0; i < n; i++)
            weigh_tokens(t, values, ahead, first + i, 1, from[i], to[i]);
        return;
    }
    for (int i = 0; i < n; i++)
        weigh_tokens(t, values, ahead, first + i, 1, from[i], shared_from);
    weigh_tokens(t, values, ahead, first, n, shared_from, shared_to);
    for (int i = 0; i < n; i++)
        weigh_tokens(t, values, ahead, first + i, 1, shared_to, to[i]);
}

static void weigh_tiles(const Attention *t, int begin, int end) {
    const AttentionShape *s = t->shape;
    const int n = t->num_rows * s->num_shared, step = t->is_wide ? STRIP : KV_TILE;
    memset(t->room->part, 0, sizeof(float) * (size_t)(n * s->width));
    for (int tile = begin & ~(step - 1); tile < end; tile += step) {
        const int from = most_int(begin, tile), to = least_int(end, tile + step), later = tile + AHEAD;
        const uint16_t *halves = values_of_tile(s, t->blocks, from, t->kv_head), *ahead = halves;
        if (t->is_wide)
            for (int at = from & ~(KV_TILE - 1); at < to; at += KV_TILE)
                widen(t->room->wide + (at - tile) * s->width, values_of_tile(s, t->blocks, at, t->kv_head), s->width * KV_TILE);
        else if (later < end)
            ahead = values_of_tile(s, t->blocks, later, t->kv_head);
        else if (later < t->position + t->num_rows) /* the keys of the next segment */
            ahead = keys_of_tile(s, t->blocks, later, t->kv_head);
        const void *values = t->is_wide ? (const void *)t->room->wide : (const void *)halves;
        int row = most_int(0, tile - t->position);
        for (int v = row * s->num_shared; v < n; v += MOST_VECTORS)
            weigh_tile(t, values, ahead, v, least_int(MOST_VECTORS, n - v), from, to);
    }
}

/* Adds the segment's part, with its own largest score and total, to a vector's sum of the segments before. */
static void merge_segment(const Attention *t, int v, float largest, float total) {
    const AttentionRoom *room = t->room;
    const int width = t->shape->width;
    float *sum = room->sum + v * width, *part = room->part + v * width;
    if (room->total[v] == 0.0f) { /* the first that it sees */
        memcpy(sum, part, sizeof(float) * (size_t)width);
        room->total[v] = total;
        room->largest[v] = largest;
        return;
    }
    float most = largest > room->largest[v] ? largest : room->largest[v];
    f32x8 keep = exp8(all8(room->largest[v] - most)), take = exp8(all8(largest - most));
    for (int d = 0; d < width; d += 8)
        store8(sum + d, fma8(take, load8(part + d), keep * load8(sum + d)));
    room->total[v] = __builtin_fmaf(take[0], total, keep[0] * room->total[v]);
    room->largest[v] = most;
}

/* room->query in, room->sum out. */
static void attend(const AttentionShape *s, const AttentionRoom *room, const int32_t *blocks, int kv_head, int position,
                   int num_rows) {
    const int n = num_rows * s->num_shared, width = s->width;
    const Attention t = {s, room, blocks, kv_head, position, num_rows, n >= 4 * MOST_VECTORS};
    const int oldest = first_seen(s, position), newest = position + num_rows - 1;
    memset(room->total, 0, sizeof(float) * (size_t)n);
    for (int segment = oldest / SEGMENT * SEGMENT; segment <= newest; segment += SEGMENT) {
        int begin = most_int(segment, oldest), end = least_int(segment + SEGMENT, newest + 1);
        score_tiles(&t, begin, end);
        float largest[n], total[n];
        for (int v = 0; v < n; v++) {
            int at = position + v / s->num_shared;
            int from = most_int(first_seen(s, at), begin), to = least_int(at + 1, end);
            largest[v] = total[v] = 0.0f;
            if (from < to)
                softmax_of_segment(room->scores + v * SEGMENT, from - segment, to - segment, &largest[v], &total[v]);
        }
        weigh_tiles(&t, begin, end);
        for (int v = 0; v < n; v++)
            if (total[v] != 0.0f) /* else the row sees nothing of the segment */
                merge_segment(&t, v, largest[v], total[v]);
    }
    for (int v = 0; v < n; v++) {
        float *sum = room->sum + v * width, share = 1.0f / room->total[v];
        for (int d = 0; d < width; d += 8)
            store8(sum + d, load8(sum + d) * share);
    }
}

#endif
