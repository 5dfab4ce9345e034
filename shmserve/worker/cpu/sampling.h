/* A token for each row of logits, and the log-probabilities that were asked for: what sampler.py says, row by row, by the
 * engine's threads. sampler.py is the definition and the tests hold the two together.
 *
 * Owns: the choice. Never: changes the logits, allocates, sorts a vocabulary where a few candidates settle the draw, or keeps
 * anything from one row to the next: a row's token is a function of the row alone.
 *
 * Candidates are ordered by logit, then by lower id. Most rows are settled by the HEAD_SIZE most likely ones: no fewer lie at or
 * above the HEAD_SIZE-th largest maximum of SPAN neighbours, so those are gathered and sorted. A row that keeps more is sorted whole.
 */
#ifndef SHM_SAMPLING_H
#define SHM_SAMPLING_H

#include <float.h>

enum { HEAD_SIZE = 256, BUCKET_SIZE = 256, SPAN = 16 };

/* One row: parameters, then edits (NULL where there are none), then results. sampling.py describes it once more. */
typedef struct {
    uint64_t seed;
    const float *logits;
    const int32_t *bias_ids;
    const float *bias;
    const int32_t *seen_ids, *seen_counts; /* with the counts of what was generated; for the penalties */
    const int32_t *banned_ids;
    const uint32_t *mask; /* bit b of word w: token 32 w + b may come */
    int32_t *top_ids;     /* [num_top] */
    float *top_logprobs;
    int32_t position, top_k, num_bias, num_seen, num_banned;
    int32_t num_top;  /* -1: no logprobs at all */
    int32_t is_given; /* `token` is given: it is scored, none is drawn */
    float temperature, top_p, min_p, frequency, presence, repetition;
    int32_t token; /* -1: a logit was not finite, or nothing was left to choose from */
    float logprob;
} Draw;

typedef struct {
    uint32_t key; /* ascending keys are descending logits */
    int32_t id;
} Candidate;

typedef struct {
    float *row, *weights; /* [vocabulary, padded to whole buckets] */
    float *maxima;        /* [spans] */
    Candidate *candidates, *spare;
} DrawRoom;

typedef struct {
    int32_t num_draws, vocab_size;
    Draw *draws;
    uint8_t *rooms; /* one of shm_draw_room_bytes for each thread */
    int64_t room_bytes;
} Draws;

INLINE int64_t padded_vocab(int n) { return ((int64_t)n + BUCKET_SIZE - 1) / BUCKET_SIZE * BUCKET_SIZE; }

int64_t shm_draw_room_bytes(int32_t vocab_size) {
    int64_t n = padded_vocab(vocab_size);
    return n * (2 * (int64_t)sizeof(float) + 2 * (int64_t)sizeof(Candidate)) + n / SPAN * (int64_t)sizeof(float) + 64;
}

static DrawRoom draw_room(const Draws *d, int thread) {
    int64_t n = padded_vocab(d->vocab_size);
    uint8_t *at = d->rooms + thread * d->room_bytes;
    DrawRoom room = {.candidates = (Candidate *)at, .spare = (Candidate *)at + n};
    room.row = (float *)(room.spare + n);
    room.weights = room.row + n;
    room.maxima = room.weights + n;
    return room;
}

/* ---- random numbers: philox.py ----------------------------------------------------------------------------------------- */

/* A standard Gumbel variate of Philox4x32-10 at (id, position, domain, 0) under the seed. */
static double gumbel(uint64_t seed, uint32_t position, uint32_t id, uint32_t domain) {
    uint32_t c0 = id, c1 = position, c2 = domain, c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * 0xD2511F53u, p1 = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    uint64_t bits = ((uint64_t)c0 << 20) | (c1 >> 12);
    return -log(-log(((double)bits + 0.5) * 0x1p-52));
}

/* ---- candidates, in order ---------------------------------------------------------------------------------------------- */

INLINE uint32_t key_of(float x) {
    uint32_t bits = bits_of_float(x + 0.0f); /* -0 is 0 */
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}

/* Radix sort by key; what is alike keeps its order, so the lower id comes first. */
static void sort_candidates(DrawRoom *room, int n) {
    for (int shift = 0; shift < 32; shift += 8) {
        int starts[257] = {0};
        for (int i = 0; i < n; i++)
            starts[((room->candidates[i].key >> shift) & 255) + 1]++;
        for (int digit = 1; digit < 256; digit++)
            starts[digit] += starts[digit - 1];
        for (int i = 0; i < n; i++)
            room->spare[starts[(room->candidates[i].key >> shift) & 255]++] = room->candidates[i];
        Candidate *sorted = room->spare;
        room->spare = room->candidates;
        room->candidates = sorted;
    }
}

/* The maximum of each span of neighbours; returns the largest. Lanes beyond the vocabulary count for nothing. */
static float span_maxima(const float *x, int n, float *maxima) {
    float largest = -INFINITY;
    for (int start = 0; start < n; start += SPAN) {
        float most = -INFINITY;
        if (start + SPAN <= n) {
            f32x8 a = load8(x + start), b = load8(x + start + 8);
            most = max8(select8(a > b, a, b));
        } else {
            for (int i = start; i < n; i++)
                most = x[i] > most ? x[i] : most;
        }
        maxima[start / SPAN] = most;
        largest = most > largest ? most : largest;
    }
    return largest;
}

/* The rank-th largest of n values (rank from 1); `x` is left in another order. */
static float nth_largest(float *x, int n, int rank) {
    int low = 0, high = n - 1, at = rank - 1;
    while (low < high) {
        float pivot = x[low + (high - low) / 2];
        int i = low, j = high;
        while (i <= j) {
            while (x[i] > pivot)
                i++;
            while (x[j] < pivot)
                j--;
            if (i <= j) {
                float t = x[i];
                x[i++] = x[j];
                x[j--] = t;
            }
        }
        if (at <= j)
            high = j;
        else if (at >= i)
            low = i;
        else
            break;
    }
    return x[at];
}

/* All ids whose logit is at least `cut`, into the room's candidates, in order. -infinity is no candidate. */
static int gather(const float *x, int n, float cut, DrawRoom *room) {
    int count = 0;
    if (cut == -INFINITY)
        cut = -FLT_MAX;
    for (int start = 0; start < n; start += 8) {
        if (start + 8 <= n) {
            i32x8 is_in = load8(x + start) >= cut;
            int64_t any[4];
            memcpy(any, &is_in, sizeof any);
            if (!(any[0] | any[1] | any[2] | any[3]))
                continue;
        }
        for (int i = start; i < least_int(start + 8, n); i++)
            if (x[i] >= cut)
                room->candidates[count++] = (Candidate){key_of(x[i]), i};
    }
    sort_candidates(room, count);
    return count;
}

/* ---- weights ----------------------------------------------------------------------------------------------------------- */

/* exp((x - most) / temperature) of all; 0 below e^-87. */
static void all_weights(const float *x, int n, float most, float temperature, float *weights) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        f32x8 v = (load8(x + i) - most) / temperature;
        store8(weights + i, select8(v < -87.0f, all8(0.0f), exp8(v)));
    }
    for (; i < n; i++) {
        float v = (x[i] - most) / temperature;
        weights[i] = v < -87.0f ? 0.0f : exp8(all8(v))[0];
    }
    memset(weights + n, 0, sizeof(float) * (size_t)(padded_vocab(n) - n));
}

static float weight_of(float x, float most, float temperature) {
    float v = (x - most) / temperature;
    return v < -87.0f ? 0.0f : exp8(all8(v))[0];
}

static float bucket_sum(const float *weights) {
    f32x8 sums = all8(0.0f);
    for (int i = 0; i < BUCKET_SIZE; i += 8)
        sums += load8(weights + i);
    return sum8(sums);
}

static double sum_of_buckets(const float *weights, int n) {
    double sum = 0;
    for (int64_t start = 0; start < n; start += BUCKET_SIZE)
        sum += bucket_sum(weights + start);
    return sum;
}

/* ---- the draw ---------------------------------------------------------------------------------------------------------- */

/* First a bucket of neighbouring ids by its weight, then an id in it. */
static int32_t draw_by_buckets(const Draw *d, const float *weights, int n) {
    const int num_buckets = (int)(padded_vocab(n) / BUCKET_SIZE);
    int chosen = 0, best = 0;
    double most = -INFINITY;
    for (int b = 0; b < num_buckets; b++) {
        float mass = bucket_sum(weights + (int64_t)b * BUCKET_SIZE);
        if (mass == 0.0f)
            continue;
        double key = log((double)mass) + gumbel(d->seed, (uint32_t)d->position, (uint32_t)b, 1);
        if (key > most) {
            most = key;
            chosen = b;
        }
    }
    most = -INFINITY;
    for (int i = chosen * BUCKET_SIZE; i < (chosen + 1) * BUCKET_SIZE; i++) {
        if (weights[i] == 0.0f)
            continue;
        double key = log((double)weights[i]) + gumbel(d->seed, (uint32_t)d->position, (uint32_t)i, 0);
        if (key > most) {
            most = key;
            best = i;
        }
    }
    return best;
}

/* How many of the ordered candidates are kept, or -1 if more would have to be known. `is_all`: there are no others. */
static int num_kept(const Draw *d, const float *x, int n, float most, int count, bool is_all, double least_log, DrawRoom *room) {
    int kept = count;
    if (d->min_p > 0) {
        kept = 0;
        while (kept < count && ((double)x[room->candidates[kept].id] - most) / d->temperature >= least_log)
            kept++;
        is_all |= kept < count;
    }
    if (d->top_k > 0 && d->top_k <= kept) {
        kept = d->top_k;
        is_all = true;
    }
    if (d->top_p >= 1)
        return is_all ? kept : -1;
    if (!is_all && (d->top_k > 0 || d->min_p > 0))
        return -1;
    double total = 0, before = 0;
    if (is_all)
        for (int i = 0; i < kept; i++)
            total += weight_of(x[room->candidates[i].id], most, d->temperature);
    else {
        all_weights(x, n, most, d->temperature, room->weights);
        total = sum_of_buckets(room->weights, n);
    }
    for (int i = 0; i < kept; i++) {
        if (i > 0 && before >= (double)d->top_p * total)
            return i;
        before += weight_of(x[room->candidates[i].id], most, d->temperature);
    }
    return is_all || before >= (double)d->top_p * total ? kept : -1;
}

static int32_t draw_limited(const Draw *d, const float *x, int n, float most, int num_spans, DrawRoom *room) {
    const double least_log = d->min_p > 0 ? log((double)d->min_p) : -INFINITY;
    /* Above what min-p leaves by a hair, so that rounding here decides nothing. */
    double least = most + d->temperature * least_log;
    const float floor = d->min_p > 0 ? (float)(least - 1e-6 * fabs(least) - 1e-30) : -INFINITY;
    float cut = num_spans > HEAD_SIZE ? nth_largest(room->maxima, num_spans, HEAD_SIZE) : floor;
    cut = cut > floor ? cut : floor;
    int count = gather(x, n, cut, room);
    int kept = num_kept(d, x, n, most, count, cut <= floor, least_log, room);
    if (kept < 0) {
        count = gather(x, n, floor, room);
        kept = num_kept(d, x, n, most, count, true, least_log, room);
    }
    if (kept > HEAD_SIZE) {
        memset(room->weights, 0, sizeof(float) * (size_t)padded_vocab(n));
        for (int i = 0; i < kept; i++) {
            int32_t id = room->candidates[i].id;
            room->weights[id] = weight_of(x[id], most, d->temperature);
        }
        return draw_by_buckets(d, room->weights, n);
    }
    int32_t best = room->candidates[0].id;
    double largest = -INFINITY;
    for (int i = 0; i < kept; i++) {
        int32_t id = room->candidates[i].id;
        double key = ((double)x[id] - most) / d->temperature + gumbel(d->seed, (uint32_t)d->position, (uint32_t)id, 0);
        if (key > largest) {
            largest = key;
            best = id;
        }
    }
    return best;
}

/* ---- edits and logprobs ------------------------------------------------------------------------------------------------ */

static bool has_edits(const Draw *d) { return d->num_bias || d->num_seen || d->num_banned || d->mask; }

static void edit_row(const Draw *d, float *x, int n) {
    for (int i = 0; i < d->num_bias; i++)
        x[d->bias_ids[i]] += d->bias[i];
    for (int i = 0; i < d->num_seen; i++) {
        float *v = &x[d->seen_ids[i]];
        *v = *v > 0 ? *v / d->repetition : *v * d->repetition;
        if (d->seen_counts[i])
            *v = *v - d->frequency * (float)d->seen_counts[i] - d->presence;
    }
    for (int i = 0; i < d->num_banned; i++)
        x[d->banned_ids[i]] = -INFINITY;
    for (int i = 0; d->mask && i < n; i++)
        if (!(d->mask[i / 32] >> (i % 32) & 1))
            x[i] = -INFINITY;
}

static bool all_finite(const float *x, int n) {
    i32x8 wrong = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8)
        wrong |= ((i32x8)load8(x + i) & 0x7f800000) == 0x7f800000;
    for (int lane = 0; lane < 8; lane++)
        if (wrong[lane])
            return false;
    for (; i < n; i++)
        if (!isfinite(x[i]))
            return false;
    return true;
}

static void score(Draw *d, const float *x, int n, DrawRoom *room) {
    int num_spans = (n + SPAN - 1) / SPAN;
    float most = span_maxima(x, n, room->maxima);
    all_weights(x, n, most, 1.0f, room->weights);
    float log_sum = (float)(most + log(sum_of_buckets(room->weights, n)));
    d->logprob = x[d->token] - log_sum;
    int num_top = least_int(d->num_top, n);
    if (num_top <= 0)
        return;
    gather(x, n, num_spans > num_top ? nth_largest(room->maxima, num_spans, num_top) : -INFINITY, room);
    for (int i = 0; i < num_top; i++) {
        d->top_ids[i] = room->candidates[i].id;
        d->top_logprobs[i] = x[d->top_ids[i]] - log_sum;
    }
}

static void draw_row(Draw *d, int n, DrawRoom *room) {
    const float *x = d->logits;
    if (!all_finite(x, n)) {
        d->token = -1;
        return;
    }
    if (!d->is_given) {
        if (has_edits(d)) {
            memcpy(room->row, x, sizeof(float) * (size_t)n);
            edit_row(d, room->row, n);
            x = room->row;
        }
        float most = span_maxima(x, n, room->maxima);
        bool is_open = d->top_k == 0 && d->top_p >= 1 && d->min_p <= 0;
        if (!isfinite(most))
            d->token = -1;
        else if (d->temperature < 1e-5f || d->top_k == 1) {
            for (d->token = 0; x[d->token] != most; d->token++)
                ;
        } else if (is_open && n > HEAD_SIZE) {
            all_weights(x, n, most, d->temperature, room->weights);
            d->token = draw_by_buckets(d, room->weights, n);
        } else
            d->token = draw_limited(d, x, n, most, (n + SPAN - 1) / SPAN, room);
    }
    if (d->token >= 0 && d->num_top >= 0)
        score(d, d->logits, n, room);
}

static int draws_size(void *job, int phase) { return phase ? -1 : ((const Draws *)job)->num_draws; }

static void draws_item(void *job, int phase, int item, int thread) {
    (void)phase;
    const Draws *d = job;
    DrawRoom room = draw_room(d, thread);
    draw_row(&d->draws[item], d->vocab_size, &room);
}

/* Draws for all rows; by the engine's threads, or by the caller alone if `e` is NULL. */
void shm_sample(const Engine *e, Draws *d) {
    if (e && d->num_draws > 1)
        pool_run(e->pool, d, draws_size, draws_item);
    else
        for (int i = 0; i < d->num_draws; i++)
            draws_item(d, 0, i, 0);
}

int32_t shm_draw_bytes(void) { return sizeof(Draw); }

/* ---- logits of other rows ---------------------------------------------------------------------------------------------- */

static int head_size(void *job, int phase) {
    const Engine *e = job;
    return phase_size(job, FIRST_OF_LAYERS + e->model->num_layers * PHASES_OF_LAYER + phase);
}

static void head_item(void *job, int phase, int item, int thread) {
    const Engine *e = job;
    phase_item(job, FIRST_OF_LAYERS + e->model->num_layers * PHASES_OF_LAYER + phase, item, thread);
}

/* Logits of rows of the step that was just computed: the sample_rows of `asked`, in which nothing else counts. */
void shm_engine_head(Engine *e, const Step *asked) {
    e->step = asked;
    pool_run(e->pool, e, head_size, head_item);
}

#endif
