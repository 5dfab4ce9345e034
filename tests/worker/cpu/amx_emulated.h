/* The tile operations that amx.h uses, in plain C, so that its code can be tested on a CPU without AMX.
 *
 * Each is what Intel's description says, with the checks that raise an exception there: here they count a fault, and the
 * operation does nothing. Tiles and configuration belong to a thread, as on the CPU.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
} EmulatedConfig;

typedef struct {
    EmulatedConfig config; /* palette 0: none */
    int8_t bytes[8][16][64];
} EmulatedTiles;

static _Thread_local EmulatedTiles emulated;
static atomic_int emulated_faults, emulated_products, emulated_configured;

/* Since the library was loaded, in all threads: faults, products of tiles; and the threads that have a configuration now. */
void shm_emulated_counts(int32_t counts[3]) {
    counts[0] = emulated_faults;
    counts[1] = emulated_products;
    counts[2] = emulated_configured;
}

static int tiles_ask(void) { return 0; }

static void tiles_release(void) {
    if (emulated.config.palette)
        emulated_configured--;
    memset(&emulated, 0, sizeof emulated);
}

static void tiles_configure(const void *from) {
    EmulatedConfig c;
    memcpy(&c, from, sizeof c);
    int is_wrong = c.palette != 1;
    for (int i = 0; i < 14; i++)
        is_wrong |= c.reserved[i];
    for (int t = 0; t < 16; t++) {
        is_wrong |= t < 8 ? c.num_rows[t] > 16 || c.row_bytes[t] > 64 : c.num_rows[t] || c.row_bytes[t];
        is_wrong |= !c.num_rows[t] != !c.row_bytes[t];
    }
    if (is_wrong) {
        emulated_faults++;
        return;
    }
    tiles_release();
    emulated.config = c;
    emulated_configured++;
}

static int emulated_is_missing(int tile) {
    const int is_missing = tile < 0 || tile >= 8 || !emulated.config.palette || !emulated.config.num_rows[tile];
    emulated_faults += is_missing;
    return is_missing;
}

static void tile_zero(int tile) {
    if (!emulated_is_missing(tile))
        memset(emulated.bytes[tile], 0, sizeof emulated.bytes[tile]);
}

static void tile_load(int tile, const void *from, int64_t stride) {
    if (emulated_is_missing(tile))
        return;
    memset(emulated.bytes[tile], 0, sizeof emulated.bytes[tile]);
    for (int r = 0; r < emulated.config.num_rows[tile]; r++)
        memcpy(emulated.bytes[tile][r], (const char *)from + r * stride, emulated.config.row_bytes[tile]);
}

static void tile_store(int tile, void *to, int64_t stride) {
    if (emulated_is_missing(tile))
        return;
    for (int r = 0; r < emulated.config.num_rows[tile]; r++)
        memcpy((char *)to + r * stride, emulated.bytes[tile][r], emulated.config.row_bytes[tile]);
}

/* c += a * b: four neighbouring bytes of a row of a, times the four bytes that b has for a column in its row k. */
static void tile_add_dots(int c, int a, int b) {
    if (emulated_is_missing(c) || emulated_is_missing(a) || emulated_is_missing(b))
        return;
    const uint8_t *rows = emulated.config.num_rows;
    const uint16_t *bytes = emulated.config.row_bytes;
    if (c == a || c == b || a == b || bytes[c] % 4 || bytes[a] % 4 || bytes[b] % 4 || rows[a] != rows[c] ||
        bytes[b] != bytes[c] || rows[b] != bytes[a] / 4) {
        emulated_faults++;
        return;
    }
    for (int r = 0; r < rows[c]; r++) {
        int32_t sums[16];
        memcpy(sums, emulated.bytes[c][r], sizeof sums);
        for (int k = 0; k < rows[b]; k++)
            for (int n = 0; n < bytes[c] / 4; n++)
                for (int i = 0; i < 4; i++)
                    sums[n] += emulated.bytes[a][r][4 * k + i] * emulated.bytes[b][k][4 * n + i];
        memcpy(emulated.bytes[c][r], sums, sizeof sums);
    }
    emulated_products++;
}
