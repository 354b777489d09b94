/* From rows of packed codes, each a little-endian bit stream, to tiles. */
#include "kernels.h"

typedef struct {
    const uint8_t *codes;
    uint8_t *tiles;
    int64_t columns;
    int32_t bits;
} Packing;

/* The even nibbles of a word into its low half, the odd ones into its high half. */
static uint32_t parted(uint32_t word) {
    uint32_t even = word & 0x0F0F0F0F, odd = word >> 4 & 0x0F0F0F0F;
    even = (even | even >> 4) & 0x00FF00FF, odd = (odd | odd >> 4) & 0x00FF00FF;
    return ((even | even >> 8) & 0xFFFF) | (odd | odd >> 8) << 16;
}

/* Pair p of columns at bit 3 (p % 5) of half lanes of vector p / 5, pair 15 in the bits left over. */
static void part_by_three(const uint8_t *code, uint32_t *lane) {
    uint64_t word[2] = {0, 0}; /* 96 bits, and a code that straddles them is read from both */
    memcpy(word, code, 12);
    memset(lane, 0, 3 * sizeof *lane);
    for (int k = 0; k < TILE_COLUMNS; k++) {
        int bit = 3 * k, pair = k / 2, half = k % 2 * 16;
        uint64_t from = bit < 64 ? word[0] >> bit : word[1] >> (bit - 64);
        if (bit == 63) from |= word[1] << 1;
        uint32_t q = (uint32_t)from & 7;
        if (pair < 15)
            lane[pair / 5] |= q << (half + 3 * (pair % 5));
        else
            for (int i = 0; i < 3; i++) lane[i] |= (q >> i & 1) << (half + 15);
    }
}

static void pack_rows(void *data, int64_t item) {
    const Packing *p = data;
    int64_t row_bytes = p->columns * p->bits / 8;
    const uint8_t *from = p->codes + item * TILE_ROWS * row_bytes;
    uint8_t *to = p->tiles + item * TILE_ROWS * row_bytes;
    uint32_t lane[8];
    for (int64_t byte = 0; byte < row_bytes; byte += 4 * p->bits)
        for (int64_t r = 0; r < TILE_ROWS; r++) {
            const uint8_t *code = from + r * row_bytes + byte;
            if (p->bits == 3) part_by_three(code, lane);
            else memcpy(lane, code, 4 * (size_t)p->bits);
            for (int v = 0; v < p->bits; v++) {
                uint32_t word = p->bits == 4 ? parted(lane[v]) : lane[v];
                memcpy(to + TILE_ROWS * byte + 64 * v + 4 * r, &word, 4);
            }
        }
}

void kernels_pack(const uint8_t *codes, uint8_t *tiles, int64_t rows, int64_t columns, int bits,
                  int threads) {
    Packing packing = {codes, tiles, columns, bits};
    run_parts(pack_rows, &packing, rows / TILE_ROWS, threads);
}

int kernels_abi(void) {
    return 4;
}
