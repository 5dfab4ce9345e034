/* One step of a decoder of the llama family on the CPU: from token ids to the logits of the rows that sample.
 *
 * Owns: the activations, the threads, and the order of the phases. Never: samples (but for the first of the largest logits),
 * chooses blocks, or knows a file format. library.py binds it and describes the structs once more: keep them alike.
 *
 *     rows of h -> norm, 8 bits -> q k v -> bias, q/k norm, rotary, cache -> attention, 8 bits -> o, + h
 *               -> norm, 8 bits -> gate, up, SiLU, 8 bits -> down, + h                              each line is a few phases
 *
 * Law: what a row gets does not depend on the other rows of the step, the threads or the machine, to the last bit: a row has
 * its own sums, in an order fixed by its own position (matmul.h, attention.h).
 */
#include "vector.h"

#include "attention.h"
#include "matmul.h"
#include "pool.h"

typedef struct {
    const float *attention_norm, *ffn_norm, *q_norm, *k_norm; /* q_norm, k_norm, and biases: NULL where there is none */
    const float *q_bias, *k_bias, *v_bias, *o_bias;
    Matrix q, k, v, o, gate, up, down;
    int32_t window;     /* 0: sees all that came before */
    int32_t is_rotated; /* 0: a layer without positions */
} Layer;

typedef struct {
    int32_t vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, block_size;
    float norm_eps;
    Matrix embedding, head;
    const Layer *layers;
    const float *final_norm, *cos, *sin; /* tables [position][head_dim / 2] */
    uint16_t *cache;
    int64_t cache_layer_halves;
} Model;

typedef struct {
    int32_t num_tokens, num_seqs, num_samples, table_width;
    const int32_t *token_ids, *positions, *kv_slots, *cu_seqlens, *block_table, *sample_rows;
    float *logits; /* [num_samples][head.num_panels * 16] */
    int32_t *greedy; /* [num_samples]: the lowest id of the largest logit, or -1 if one is not finite */
} Step;

/* Query rows of one sequence, attended together. */
typedef struct {
    int32_t seq, first_row, num_rows;
} RowTile;

typedef struct {
    WideBlock4 *wide; /* [4][most groups] */
    AttentionRoom attention;
    float *row; /* [hidden] */
} Room;

typedef struct {
    const Model *model;
    const Step *step;
    Pool *pool;
    Room *rooms;
    int num_threads;
    int hidden_stride, qkv_stride, k_at, v_at, width;
    float *h, *qkv, *attended;
    Rows normed, mixed, acted; /* quantised inputs of q k v, gate, up and the head; of o; of down */
    RowTile *tiles;
    int num_tiles;
} Engine;

/* ---- phases ------------------------------------------------------------------------------------------------------------ */

enum { EMBED, FIRST_OF_LAYERS };
enum { NORM, QKV, ROTARY, ATTEND, QUANTIZE_ATTENDED, OUT, FFN_NORM, GATE_UP, DOWN, PHASES_OF_LAYER };
enum { FINAL_NORM, HEAD, GREEDY, PHASES_OF_END };

/* Units of work (rows, panels) of one item: few enough for balance, enough to pay for the claim. */
static int units_of_item(const Engine *e, int num_units, int64_t cost_of_unit) {
    const int64_t enough = 16384; /* bytes of weights, or as much work; some microseconds */
    int64_t most = (num_units + 3 * e->num_threads - 1) / (3 * e->num_threads);
    int64_t least = (enough + cost_of_unit - 1) / cost_of_unit;
    int64_t units = least < most ? least : most;
    int64_t bound = (num_units >> (ITEM_BITS - 1)) + 1; /* the ticket counts no more items than this allows */
    return (int)(units > bound ? units : bound);
}

static int items_of(int num_units, int units) { return (num_units + units - 1) / units; }

static int units_of_rows(const Engine *e, int num_rows) {
    return units_of_item(e, num_rows, 4 * e->hidden_stride);
}

static int units_of_panels(const Engine *e, const Matrix *m, int num_panels, int num_rows) {
    return units_of_item(e, num_panels, panel_bytes(m) * ((num_rows + TILE_ROWS - 1) / TILE_ROWS));
}

static int qkv_panels(const Layer *l) { return l->q.num_panels + l->k.num_panels + l->v.num_panels; }

/* Do the attended values of one kv head fill whole groups? Then they are quantised where they are made. */
static bool heads_fill_groups(const Model *m) { return m->num_heads / m->num_kv_heads * m->head_dim % GROUP == 0; }

static void rms_norm(const float *x, const float *weight, int n, int padded, float eps, float *out) {
    float scale = 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
    for (int i = 0; i < padded; i += 8)
        store8(out + i, load8(x + i) * scale * load8(weight + i));
}

static void norm_and_quantize(const Engine *e, const Room *room, const float *weight, int64_t source, int64_t target) {
    const Model *m = e->model;
    rms_norm(e->h + source * e->hidden_stride, weight, m->hidden_size, e->hidden_stride, m->norm_eps, room->row);
    for (int g = 0; g < e->normed.num_groups; g++)
        quantize_group(room->row + g * GROUP, &e->normed, target, g);
}

/* out[row][column] = the panel's products, for all rows; added to what is there if `is_added`, with the bias if there is one. */
static void panel_product(const Matrix *m, int panel, const Rows *x, int num_rows, float *out, int64_t stride,
                          bool is_added, const float *bias, WideBlock4 *wide) {
    Panel p = open_panel(m, panel, num_rows, wide);
    float sums[MOST_ROWS][COLUMNS];
    out += panel * COLUMNS;
    for (int row = 0, n; row < num_rows; row += n) {
        n = least_int(rows_of_tile(p), num_rows - row);
        tile(p, n, x, row, sums);
        for (int r = 0; r < n; r++) {
            float *to = out + (row + r) * stride;
            for (int c = 0; c < COLUMNS; c += 8) {
                f32x8 v = load8(sums[r] + c);
                if (bias)
                    v += load8(bias + panel * COLUMNS + c);
                store8(to + c, is_added ? load8(to + c) + v : v);
            }
        }
    }
}

/* 32 columns of gate and up, SiLU(gate) * up, quantised as one group of down's input. */
static void gate_up_group(const Engine *e, const Layer *l, int group, Room *room) {
    const int groups = l->gate.num_groups, num_rows = e->step->num_tokens;
    Panel gate[2], up[2];
    for (int half = 0; half < 2; half++) {
        gate[half] = open_panel(&l->gate, 2 * group + half, num_rows, room->wide + 2 * half * groups);
        up[half] = open_panel(&l->up, 2 * group + half, num_rows, room->wide + (2 * half + 1) * groups);
    }
    float gates[MOST_ROWS][COLUMNS], ups[MOST_ROWS][COLUMNS], acted[MOST_ROWS][GROUP];
    for (int row = 0, n; row < num_rows; row += n) {
        n = least_int(rows_of_tile(gate[0]), num_rows - row);
        for (int half = 0; half < 2; half++) {
            tile(gate[half], n, &e->normed, row, gates);
            tile(up[half], n, &e->normed, row, ups);
            for (int r = 0; r < n; r++)
                for (int c = 0; c < COLUMNS; c += 8) {
                    f32x8 g = load8(gates[r] + c);
                    store8(acted[r] + half * COLUMNS + c, g / (exp8(-g) + 1.0f) * load8(ups[r] + c));
                }
        }
        for (int r = 0; r < n; r++)
            quantize_group(acted[r], &e->acted, row + r, group);
    }
}

static void add_bias(float *x, const float *bias, int n) {
    for (int i = 0; bias && i < n; i++)
        x[i] += bias[i];
}

static void norm_head(float *x, const float *weight, int n, float eps) {
    if (!weight)
        return;
    float scale = 1.0f / sqrtf(sum_of_squares(x, n) / (float)n + eps);
    for (int i = 0; i < n; i++)
        x[i] = x[i] * scale * weight[i];
}

/* Element j turns with element j + half. */
static void rotate_head(float *x, const float *cos, const float *sin, int half) {
    for (int j = 0; j < half; j++) {
        float a = x[j], b = x[j + half];
        x[j] = a * cos[j] - b * sin[j];
        x[j + half] = b * cos[j] + a * sin[j];
    }
}

static void write_cache(const Engine *e, int layer, int slot, const float *keys, const float *values) {
    const Model *m = e->model;
    const int dim = m->head_dim, at = slot % KV_TILE;
    uint16_t *tile = m->cache + layer * m->cache_layer_halves +
                     (int64_t)(slot / KV_TILE) * m->num_kv_heads * (dim + e->width) * KV_TILE;
    for (int head = 0; head < m->num_kv_heads; head++, tile += (dim + e->width) * KV_TILE) {
        uint16_t halves[e->width], *value = tile + dim * KV_TILE + at * e->width;
        store_halves(halves, keys + head * dim, dim);
        for (int d = 0; d < dim; d++)
            tile[d * KV_TILE + at] = halves[d];
        store_halves(value, values + head * dim, dim);
        memset(value + dim, 0, sizeof(uint16_t) * (size_t)(e->width - dim));
    }
}

static void finish_qkv(const Engine *e, int layer, int row) {
    const Model *m = e->model;
    const Layer *l = &m->layers[layer];
    const int dim = m->head_dim, half = dim / 2, position = e->step->positions[row];
    float *q = e->qkv + (int64_t)row * e->qkv_stride, *k = q + e->k_at, *v = q + e->v_at;
    const float *cos = m->cos + (int64_t)position * half, *sin = m->sin + (int64_t)position * half;
    add_bias(q, l->q_bias, m->num_heads * dim);
    add_bias(k, l->k_bias, m->num_kv_heads * dim);
    add_bias(v, l->v_bias, m->num_kv_heads * dim);
    for (int head = 0; head < m->num_heads; head++) {
        norm_head(q + head * dim, l->q_norm, dim, m->norm_eps);
        if (l->is_rotated)
            rotate_head(q + head * dim, cos, sin, half);
    }
    for (int head = 0; head < m->num_kv_heads; head++) {
        norm_head(k + head * dim, l->k_norm, dim, m->norm_eps);
        if (l->is_rotated)
            rotate_head(k + head * dim, cos, sin, half);
    }
    write_cache(e, layer, e->step->kv_slots[row], k, v);
}

static void attend_rows(const Engine *e, int layer, const RowTile *t, int kv_head, const Room *room) {
    const Model *m = e->model;
    const int dim = m->head_dim, shared = m->num_heads / m->num_kv_heads, width = e->width;
    const AttentionShape shape = {
        .head_dim = dim,
        .width = width,
        .num_shared = shared,
        .num_kv_heads = m->num_kv_heads,
        .tiles_per_block = m->block_size / KV_TILE,
        .window = m->layers[layer].window,
        .cache = m->cache + layer * m->cache_layer_halves,
    };
    const float scale = 1.0f / sqrtf((float)dim);
    for (int v = 0; v < t->num_rows * shared; v++) {
        const float *q = e->qkv + (int64_t)(t->first_row + v / shared) * e->qkv_stride + (kv_head * shared + v % shared) * dim;
        for (int d = 0; d < dim; d++)
            room->attention.query[v * width + d] = q[d] * scale;
    }
    attend(&shape, &room->attention, e->step->block_table + (int64_t)t->seq * e->step->table_width, kv_head,
           e->step->positions[t->first_row], t->num_rows);
    const int64_t stride = e->mixed.num_groups * GROUP;
    for (int v = 0; v < t->num_rows * shared; v++) {
        float *out = e->attended + (t->first_row + v / shared) * stride + (kv_head * shared + v % shared) * dim;
        memcpy(out, room->attention.sum + v * width, sizeof(float) * (size_t)dim);
    }
    if (!heads_fill_groups(m))
        return;
    const int groups = shared * dim / GROUP;
    for (int row = t->first_row; row < t->first_row + t->num_rows; row++)
        for (int g = kv_head * groups; g < (kv_head + 1) * groups; g++)
            quantize_group(e->attended + row * stride + g * GROUP, &e->mixed, row, g);
}

static int32_t first_of_largest(const float *logits, int n) {
    f32x8 most = all8(-INFINITY);
    i32x8 not_finite = {0};
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        f32x8 v = load8(logits + i);
        most = select8(v > most, v, most);
        not_finite |= ((i32x8)v & 0x7f800000) == 0x7f800000;
    }
    float largest = max8(most);
    for (int lane = 0; lane < 8; lane++)
        if (not_finite[lane])
            return -1;
    for (; i < n; i++) {
        if (!isfinite(logits[i]))
            return -1;
        largest = logits[i] > largest ? logits[i] : largest;
    }
    for (i = 0; logits[i] != largest; i++)
        ;
    return i;
}

static void embed(const Engine *e, int row) {
    unpack_column(&e->model->embedding, e->step->token_ids[row], e->h + (int64_t)row * e->hidden_stride);
}

/* ---- the order of the phases ------------------------------------------------------------------------------------------- */

static int size_of_layer_phase(const Engine *e, const Layer *l, int phase) {
    const int rows = e->step->num_tokens;
    switch (phase) {
    case QKV: return items_of(qkv_panels(l), units_of_panels(e, &l->q, qkv_panels(l), rows));
    case ATTEND: return e->num_tiles * e->model->num_kv_heads;
    case QUANTIZE_ATTENDED: return heads_fill_groups(e->model) ? 0 : items_of(rows, units_of_rows(e, rows));
    case OUT: return items_of(l->o.num_panels, units_of_panels(e, &l->o, l->o.num_panels, rows));
    case GATE_UP: return items_of(l->gate.num_panels / 2, units_of_panels(e, &l->gate, l->gate.num_panels / 2, 4 * rows));
    case DOWN: return items_of(l->down.num_panels, units_of_panels(e, &l->down, l->down.num_panels, rows));
    default: return items_of(rows, units_of_rows(e, rows));
    }
}

static int phase_size(void *job, int phase) {
    const Engine *e = job;
    const Step *s = e->step;
    const int rows = s->num_tokens, end = FIRST_OF_LAYERS + e->model->num_layers * PHASES_OF_LAYER;
    if (phase == EMBED)
        return items_of(rows, units_of_rows(e, rows));
    if (phase < end) {
        int at = phase - FIRST_OF_LAYERS;
        return size_of_layer_phase(e, &e->model->layers[at / PHASES_OF_LAYER], at % PHASES_OF_LAYER);
    }
    switch (phase - end) {
    case FINAL_NORM: return s->num_samples;
    case HEAD: {
        const Matrix *head = &e->model->head;
        return s->num_samples ? items_of(head->num_panels, units_of_panels(e, head, head->num_panels, s->num_samples)) : 0;
    }
    case GREEDY: return s->num_samples;
    default: return -1;
    }
}

static void qkv_item(const Engine *e, const Layer *l, int panel, WideBlock4 *wide) {
    const Matrix *matrices[] = {&l->q, &l->k, &l->v};
    const int starts[] = {0, e->k_at, e->v_at};
    int which = 0;
    while (panel >= matrices[which]->num_panels)
        panel -= matrices[which++]->num_panels;
    panel_product(matrices[which], panel, &e->normed, e->step->num_tokens, e->qkv + starts[which], e->qkv_stride, false,
                  NULL, wide);
}

static void layer_item(const Engine *e, int layer, int phase, int item, Room *room) {
    const Layer *l = &e->model->layers[layer];
    const int rows = e->step->num_tokens;
    if (phase == ATTEND) { /* the last rows of a prompt see the most: they are begun first */
        int tile = e->num_tiles - 1 - item / e->model->num_kv_heads;
        attend_rows(e, layer, &e->tiles[tile], item % e->model->num_kv_heads, room);
        return;
    }
    int num_units = rows, units = units_of_rows(e, rows);
    switch (phase) {
    case QKV:
        num_units = qkv_panels(l);
        units = units_of_panels(e, &l->q, num_units, rows);
        break;
    case OUT:
        num_units = l->o.num_panels;
        units = units_of_panels(e, &l->o, num_units, rows);
        break;
    case GATE_UP:
        num_units = l->gate.num_panels / 2;
        units = units_of_panels(e, &l->gate, num_units, 4 * rows);
        break;
    case DOWN:
        num_units = l->down.num_panels;
        units = units_of_panels(e, &l->down, num_units, rows);
        break;
    }
    for (int i = item * units; i < least_int((item + 1) * units, num_units); i++)
        switch (phase) {
        case NORM: norm_and_quantize(e, room, l->attention_norm, i, i); break;
        case QKV: qkv_item(e, l, i, room->wide); break;
        case ROTARY: finish_qkv(e, layer, i); break;
        case QUANTIZE_ATTENDED:
            for (int g = 0; g < e->mixed.num_groups; g++)
                quantize_group(e->attended + ((int64_t)i * e->mixed.num_groups + g) * GROUP, &e->mixed, i, g);
            break;
        case OUT:
            panel_product(&l->o, i, &e->mixed, rows, e->h, e->hidden_stride, true, l->o_bias, room->wide);
            break;
        case FFN_NORM: norm_and_quantize(e, room, l->ffn_norm, i, i); break;
        case GATE_UP: gate_up_group(e, l, i, room); break;
        case DOWN: panel_product(&l->down, i, &e->acted, rows, e->h, e->hidden_stride, true, NULL, room->wide); break;
        }
    amx_end();
}

static void phase_item(void *job, int phase, int item, int thread) {
    const Engine *e = job;
    const Step *s = e->step;
    const Model *m = e->model;
    Room *room = &e->rooms[thread];
    const int end = FIRST_OF_LAYERS + m->num_layers * PHASES_OF_LAYER;
    if (phase == EMBED) {
        int units = units_of_rows(e, s->num_tokens);
        for (int row = item * units; row < least_int((item + 1) * units, s->num_tokens); row++)
            embed(e, row);
        return;
    }
    if (phase < end) {
        int at = phase - FIRST_OF_LAYERS;
        layer_item(e, at / PHASES_OF_LAYER, at % PHASES_OF_LAYER, item, room);
        return;
    }
    const int64_t stride = (int64_t)m->head.num_panels * COLUMNS;
    switch (phase - end) {
    case FINAL_NORM: norm_and_quantize(e, room, m->final_norm, s->sample_rows[item], item); break;
    case HEAD: {
        int units = units_of_panels(e, &m->head, m->head.num_panels, s->num_samples);
        for (int i = item * units; i < least_int((item + 1) * units, m->head.num_panels); i++)
            panel_product(&m->head, i, &e->normed, s->num_samples, s->logits, stride, false, NULL, room->wide);
        amx_end();
        break;
    }
    case GREEDY: s->greedy[item] = first_of_largest(s->logits + item * stride, m->vocab_size); break;
    }
}

/* ---- the engine -------------------------------------------------------------------------------------------------------- */

static void *zeroed(int64_t bytes, bool *is_short) {
    void *p = aligned_alloc(64, (size_t)((bytes + 127) / 64 * 64));
    if (p)
        memset(p, 0, (size_t)bytes);
    else
        *is_short = true;
    return p;
}

static Rows rows_for(int num_rows, int num_groups, bool *is_short) {
    const int64_t n = (int64_t)num_rows * num_groups;
    return (Rows){
        .num_groups = num_groups,
        .q = zeroed(n * GROUP, is_short),
        .scale = zeroed(4 * n, is_short),
        .offset = zeroed(4 * n, is_short),
        .total = zeroed(4 * n, is_short),
    };
}

static void free_rows(Rows *rows) {
    free(rows->q);
    free(rows->scale);
    free(rows->offset);
    free(rows->total);
}

void shm_engine_free(Engine *e) {
    if (e->pool)
        pool_close(e->pool);
    for (int i = 0; e->rooms && i < e->num_threads; i++) {
        AttentionRoom *a = &e->rooms[i].attention;
        void *all[] = {e->rooms[i].wide, e->rooms[i].row, a->query, a->scores, a->part, a->sum, a->largest, a->total, a->wide};
        for (size_t at = 0; at < sizeof all / sizeof *all; at++)
            free(all[at]);
    }
    free(e->rooms);
    free_rows(&e->normed);
    free_rows(&e->mixed);
    free_rows(&e->acted);
    free(e->h);
    free(e->qkv);
    free(e->attended);
    free(e->tiles);
    free(e);
}

/* NULL if memory or threads cannot be had. `model` must outlive the engine. */
Engine *shm_engine_new(const Model *model, int32_t max_tokens, int32_t num_threads) {
    Engine *e = calloc(1, sizeof *e);
    if (!e)
        return NULL;
    bool is_short = false;
    const Layer *l = &model->layers[0];
    e->model = model;
    e->num_threads = num_threads;
    e->hidden_stride = l->q.num_groups * GROUP;
    e->k_at = l->q.num_panels * COLUMNS;
    e->v_at = e->k_at + l->k.num_panels * COLUMNS;
    e->qkv_stride = e->v_at + l->v.num_panels * COLUMNS;
    e->width = (model->head_dim + 15) / 16 * 16;
    e->h = zeroed((int64_t)max_tokens * e->hidden_stride * 4, &is_short);
    e->qkv = zeroed((int64_t)max_tokens * e->qkv_stride * 4, &is_short);
    e->attended = zeroed((int64_t)max_tokens * l->o.num_groups * GROUP * 4, &is_short);
    e->normed = rows_for(max_tokens, l->q.num_groups, &is_short);
    e->mixed = rows_for(max_tokens, l->o.num_groups, &is_short);
    e->acted = rows_for(max_tokens, l->down.num_groups, &is_short);
    e->tiles = zeroed((int64_t)max_tokens * (int64_t)sizeof(RowTile), &is_short);
    e->rooms = zeroed((int64_t)num_threads * (int64_t)sizeof(Room), &is_short);
    const int groups = most_int(l->q.num_groups, most_int(l->o.num_groups, l->down.num_groups));
    const int vectors = most_int(TILE_VECTORS, model->num_heads / model->num_kv_heads);
    for (int i = 0; i < num_threads && e->rooms; i++) {
        Room *room = &e->rooms[i];
        room->wide = zeroed(4 * (int64_t)groups * (int64_t)sizeof(WideBlock4), &is_short);
        room->row = zeroed(4 * e->hidden_stride, &is_short);
        room->attention = (AttentionRoom){
            .query = zeroed(4 * (int64_t)vectors * e->width, &is_short),
            .scores = zeroed(4 * (int64_t)vectors * SEGMENT, &is_short),
            .part = zeroed(4 * (int64_t)vectors * e->width, &is_short),
            .sum = zeroed(4 * (int64_t)vectors * e->width, &is_short),
            .largest = zeroed(4 * vectors, &is_short),
            .total = zeroed(4 * vectors, &is_short),
            .wide = zeroed(4 * STRIP * e->width, &is_short),
        };
    }
    e->pool = is_short ? NULL : pool_new(num_threads);
    if (e->pool)
        return e;
    shm_engine_free(e);
    return NULL;
}

/* Computes one step; returns when the logits are there. One call at a time. */
void shm_engine_run(Engine *e, const Step *step) {
    const int shared = e->model->num_heads / e->model->num_kv_heads;
    const int most_rows = most_int(1, TILE_VECTORS / shared);
    e->step = step;
    e->num_tiles = 0;
    for (int seq = 0; seq < step->num_seqs; seq++)
        for (int row = step->cu_seqlens[seq]; row < step->cu_seqlens[seq + 1]; row += most_rows)
            e->tiles[e->num_tiles++] = (RowTile){seq, row, least_int(most_rows, step->cu_seqlens[seq + 1] - row)};
    pool_run(e->pool, e, phase_size, phase_item);
}

/* ---- for the self-test and the tests ----------------------------------------------------------------------------------- */

const char *shm_variant(void) { return SHM_VARIANT; }

/* Whether there is code for AMX here; none of it runs before shm_use_amx. */
int shm_has_amx(void) { return HAS_AMX; }

/* Switches it on or off for all engines of the process, between their steps. 0, or the errno with which the kernel refuses. */
int shm_use_amx(int32_t is_wanted) { return amx_switch(is_wanted); }

/* Sizes of the structs, so that the binding can check its own description. */
void shm_struct_sizes(int32_t sizes[4]) {
    sizes[0] = sizeof(Matrix);
    sizes[1] = sizeof(Layer);
    sizes[2] = sizeof(Model);
    sizes[3] = sizeof(Step);
}

/* out[num_rows][num_panels * 16] = x[num_rows][num_groups * 32], quantised, times the matrix. 0 if memory is short. */
int shm_matmul(const Matrix *m, int32_t num_rows, const float *x, float *out) {
    bool is_short = false;
    Rows rows = rows_for(num_rows, m->num_groups, &is_short);
    WideBlock4 *wide = zeroed((int64_t)m->num_groups * (int64_t)sizeof(WideBlock4), &is_short);
    if (!is_short) {
        for (int row = 0; row < num_rows; row++)
            for (int g = 0; g < m->num_groups; g++)
                quantize_group(x + ((int64_t)row * m->num_groups + g) * GROUP, &rows, row, g);
        for (int panel = 0; panel < m->num_panels; panel++)
            panel_product(m, panel, &rows, num_rows, out, (int64_t)m->num_panels * COLUMNS, false, NULL, wide);
        amx_end();
    }
    free(wide);
    free_rows(&rows);
    return !is_short;
}

void shm_exp(float *x, int32_t n) {
    for (int i = 0; i + 8 <= n; i += 8)
        store8(x + i, exp8(load8(x + i)));
}

void shm_halves(const float *x, uint16_t *out, int32_t n) { store_halves(out, x, n); }

void shm_floats(const uint16_t *x, float *out, int32_t n) {
    for (int i = 0; i + 8 <= n; i += 8)
        store8(out + i, load_halves8(x + i));
}

#include "sampling.h" /* last: it draws by the engine's threads */
