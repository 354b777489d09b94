/* From rows of packed codes, each a little-endian bit stream, to tiles. */
#include "kernels.h"

typedef struct {
    const uint8_t *codes;
    uint8_t *tiles;
    int64_t columns;
    int32_t bits;
} Packing;

/* Eight nibbles to the four even ones below the four odd ones, by halves. */
INLINE uint32_t split_nibbles(uint32_t word) {
    uint64_t both = (word & 0x0F0F0F0Fu) | (uint64_t)(word >> 4 & 0x0F0F0F0Fu) << 32;
    both = (both | both >> 4) & 0x00FF00FF00FF00FFu;
    both |= both >> 8;
    return (uint32_t)(both & 0xFFFF) | (uint32_t)(both >> 32) << 16;
}

/* Ten 3-bit codes, 30 bits, to the five even ones below the five odd ones. */
INLINE uint32_t split_thirds(uint32_t codes) {
    uint64_t both = (codes & 0x071C71C7u) | (uint64_t)(codes >> 3 & 0x071C71C7u) << 32;
    both = (both | both >> 3) & 0x0703F03F0703F03Fu;
    both = (both | (both >> 6 & 0x00000FC000000FC0u)) & 0x07000FFF07000FFFu;
    both |= both >> 12;
    return (uint32_t)(both & 0x7FFF) | (uint32_t)(both >> 32 & 0x7FFF) << 16;
}

/* The 32 codes of one row of a tile to its lane of every vector. */
INLINE void pack_lanes(const uint8_t *codes, int bits, uint8_t *to) {
    uint32_t word[8];
    memcpy(word, codes, (size_t)bits * 4);
    if (bits == 4)
        for (int v = 0; v < 4; v++) word[v] = split_nibbles(word[v]);
    if (bits == 3) {
        uint64_t low = word[0] | (uint64_t)word[1] << 32, high = word[2];
        uint32_t last = word[2] >> 26;
        word[0] = split_thirds(low & 0x3FFFFFFF);
        word[1] = split_thirds(low >> 30 & 0x3FFFFFFF);
        word[2] = split_thirds((low >> 60 | high << 4) & 0x3FFFFFFF);
        for (int v = 0; v < 3; v++)
            word[v] |= (last >> v & 1) << 15 | (last >> (v + 3) & 1) << 31;
    }
    for (int v = 0; v < bits; v++) memcpy(to + 64 * v, word + v, 4);
}

INLINE void pack_tile_rows(const Packing *p, int64_t item, int bits) {
    int64_t row_bytes = p->columns * bits / 8, step = 4 * bits;
    const uint8_t *from = p->codes + item * TILE_ROWS * row_bytes;
    uint8_t *to = p->tiles + item * TILE_ROWS * row_bytes;
    for (int64_t at = 0; at < row_bytes; at += step, to += 64 * bits)
        for (int64_t r = 0; r < TILE_ROWS; r++)
            pack_lanes(from + r * row_bytes + at, bits, to + 4 * r);
}

static void pack_rows(void *data, int64_t item) {
    const Packing *p = data;
    if (p->bits == 3) pack_tile_rows(p, item, 3);
    if (p->bits == 4) pack_tile_rows(p, item, 4);
    if (p->bits == 8) pack_tile_rows(p, item, 8);
}

void kernels_pack(const uint8_t *codes, uint8_t *tiles, int64_t rows, int64_t columns, int bits,
                  int threads) {
    Packing packing = {codes, tiles, columns, bits};
    run_parts(pack_rows, &packing, rows / TILE_ROWS, threads);
}

int kernels_abi(void) {
    return 1;
}
