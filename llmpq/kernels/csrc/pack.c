/* From rows of packed codes, each a little-endian bit stream, to tiles. */
#include "kernels.h"

typedef struct {
    const uint8_t *codes;
    uint8_t *tiles;
    int64_t columns;
    int32_t bits;
} Packing;

/* One word of each of 16 rows. */
INLINE v16u words_of(const uint8_t *from, int64_t row_bytes) {
    v16u words;
    for (int r = 0; r < TILE_ROWS; r++) {
        uint32_t word;
        memcpy(&word, from + r * row_bytes, sizeof word);
        words[r] = word;
    }
    return words;
}

INLINE void put_words(uint8_t *to, v16u words) {
    memcpy(to, &words, sizeof words);
}

/* The even nibbles of every word into its low half, the odd ones into its high half. */
INLINE v16u parted(v16u words) {
    v16u even = words & 0x0F0F0F0F, odd = words >> 4 & 0x0F0F0F0F;
    even = (even | even >> 4) & 0x00FF00FF, odd = (odd | odd >> 4) & 0x00FF00FF;
    return ((even | even >> 8) & 0xFFFF) | (odd | odd >> 8) << 16;
}

/* Pair p of columns at bit 3 (p % 5) of half lanes of vector p / 5, pair 15 in the bits left over. */
INLINE void part_by_three(const uint8_t *from, int64_t row_bytes, uint8_t *to) {
    v16u word[3], lane[3] = {{0}, {0}, {0}};
    for (int i = 0; i < 3; i++) word[i] = words_of(from + 4 * i, row_bytes);
    for (int k = 0; k < TILE_COLUMNS; k++) {
        int at = 3 * k / 32, shift = 3 * k % 32, pair = k / 2, half = k % 2 * 16;
        v16u q = word[at] >> shift;
        if (shift > 29) q |= word[at + 1] << (32 - shift);
        q &= 7;
        if (pair < 15)
            lane[pair / 5] |= q << (half + 3 * (pair % 5));
        else
            for (int i = 0; i < 3; i++) lane[i] |= (q >> i & 1) << (half + 15);
    }
    for (int i = 0; i < 3; i++) put_words(to + 64 * i, lane[i]);
}

static void pack_rows(void *data, int64_t item) {
    const Packing *p = data;
    int64_t row_bytes = p->columns * p->bits / 8;
    const uint8_t *from = p->codes + item * TILE_ROWS * row_bytes;
    uint8_t *to = p->tiles + item * TILE_ROWS * row_bytes;
    if (p->bits == 3)
        for (int64_t byte = 0; byte < row_bytes; byte += 12)
            part_by_three(from + byte, row_bytes, to + TILE_ROWS * byte);
    else
        for (int64_t byte = 0; byte < row_bytes; byte += 4) {
            v16u words = words_of(from + byte, row_bytes);
            put_words(to + TILE_ROWS * byte, p->bits == 4 ? parted(words) : words);
        }
}

void kernels_pack(const uint8_t *codes, uint8_t *tiles, int64_t rows, int64_t columns, int bits,
                  int threads) {
    Packing packing = {codes, tiles, columns, bits};
    run_parts(pack_rows, &packing, rows / TILE_ROWS, threads);
}

int kernels_abi(void) {
    return 6;
}
