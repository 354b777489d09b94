/* From rows of packed codes, each a little-endian bit stream, to tiles. */
#include "kernels.h"

typedef struct {
    const uint8_t *codes;
    uint8_t *tiles;
    int64_t columns;
    int32_t bits;
} Packing;

static void unpack_row(const uint8_t *codes, int bits, int64_t columns, uint8_t *out) {
    uint32_t held = 0, mask = (1u << bits) - 1;
    int have = 0;
    for (int64_t k = 0; k < columns; k++) {
        if (have < bits) held |= (uint32_t)*codes++ << have, have += 8;
        out[k] = (uint8_t)(held & mask);
        held >>= bits, have -= bits;
    }
}

/* lane[v] of vector v: the 32 codes of one row of a tile. */
static void fill_lanes(const uint8_t *code, int bits, uint32_t *lane) {
    memset(lane, 0, 8 * sizeof *lane);
    for (int k = 0; k < TILE_COLUMNS; k++) {
        uint32_t q = code[k];
        int pair = k / 2, half = k % 2 * 16;
        if (bits == 8) {
            lane[k / 4] |= q << (8 * (k % 4));
        } else if (bits == 4) {
            lane[pair / 4] |= q << (half + 4 * (pair % 4));
        } else if (pair < 15) {
            lane[pair / 5] |= q << (half + 3 * (pair % 5));
        } else {
            for (int i = 0; i < 3; i++) lane[i] |= ((q >> i) & 1) << (half + 15);
        }
    }
}

static void pack_rows(void *data, int64_t item) {
    const Packing *p = data;
    int64_t row_bytes = p->columns * p->bits / 8, chunk = 512;
    uint8_t codes[512];
    uint32_t lane[8];
    for (int64_t r = 0; r < TILE_ROWS; r++) {
        const uint8_t *from = p->codes + (item * TILE_ROWS + r) * row_bytes;
        uint8_t *to = p->tiles + item * TILE_ROWS * row_bytes + 4 * r;
        for (int64_t start = 0; start < p->columns; start += chunk) {
            int64_t count = p->columns - start < chunk ? p->columns - start : chunk;
            unpack_row(from + start * p->bits / 8, p->bits, count, codes);
            for (int64_t k = 0; k < count; k += TILE_COLUMNS) {
                fill_lanes(codes + k, p->bits, lane);
                for (int v = 0; v < p->bits; v++, to += 64) memcpy(to, lane + v, 4);
            }
        }
    }
}

void kernels_pack(const uint8_t *codes, uint8_t *tiles, int64_t rows, int64_t columns, int bits,
                  int threads) {
    Packing packing = {codes, tiles, columns, bits};
    run_parts(pack_rows, &packing, rows / TILE_ROWS, threads);
}

int kernels_abi(void) {
    return 1;
}
