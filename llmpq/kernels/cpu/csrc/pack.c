/* From rows of packed codes, each a little-endian bit stream, to tiles; and single rows read back. */
#include "lanes.h"

typedef struct {
    const uint8_t *codes;
    uint8_t *tiles;
    int64_t columns;
    int32_t bits;
} Packing;

/* One word of each of some rows. */
INLINE vu words_of(const uint8_t *from, int64_t row_bytes) {
    vu words;
    for (int r = 0; r < LANES; r++) {
        uint32_t word;
        memcpy(&word, from + r * row_bytes, sizeof word);
        words[r] = word;
    }
    return words;
}

INLINE void put_words(uint8_t *to, vu words) {
    memcpy(to, &words, sizeof words);
}

/* The even nibbles of every word into its low half, the odd ones into its high half. */
INLINE vu parted(vu words) {
    vu even = words & 0x0F0F0F0F, odd = words >> 4 & 0x0F0F0F0F;
    even = (even | even >> 4) & 0x00FF00FF, odd = (odd | odd >> 4) & 0x00FF00FF;
    return ((even | even >> 8) & 0xFFFF) | (odd | odd >> 8) << 16;
}

/* Pair p of columns at bit 3 (p % 5) of half lanes of vector p / 5, pair 15 in the bits left over. */
INLINE void part_by_three(const uint8_t *from, int64_t row_bytes, uint8_t *to) {
    vu word[3], lane[3] = {{0}, {0}, {0}};
    for (int i = 0; i < 3; i++) word[i] = words_of(from + 4 * i, row_bytes);
    for (int k = 0; k < TILE_COLUMNS; k++) {
        int at = 3 * k / 32, shift = 3 * k % 32, pair = k / 2, half = k % 2 * 16;
        vu q = word[at] >> shift;
        if (shift > 29) q |= word[at + 1] << (32 - shift);
        q &= 7;
        if (pair < 15)
            lane[pair / 5] |= q << (half + 3 * (pair % 5));
        else
            for (int i = 0; i < 3; i++) lane[i] |= (q >> i & 1) << (half + 15);
    }
    for (int i = 0; i < 3; i++) put_words(to + 64 * i, lane[i]);
}

/* The next bytes of 16 rows, as many rows at once as a vector holds. */
INLINE void pack_words(const uint8_t *from, int64_t row_bytes, uint8_t *to, const int bits) {
    for (int row = 0; row < TILE_ROWS; row += LANES, from += LANES * row_bytes, to += VECTOR_BYTES) {
        if (bits == 3) part_by_three(from, row_bytes, to);
        else if (bits == 4) put_words(to, parted(words_of(from, row_bytes)));
        else put_words(to, words_of(from, row_bytes));
    }
}

INLINE void pack_row(const uint8_t *from, int64_t row_bytes, uint8_t *to, const int bits) {
    const int step = bits == 3 ? 12 : 4; /* bytes that fill whole vectors */
    for (int64_t byte = 0; byte < row_bytes; byte += step)
        pack_words(from + byte, row_bytes, to + TILE_ROWS * byte, bits);
}

static void pack_rows(void *data, int64_t item) {
    const Packing *p = data;
    int64_t row_bytes = p->columns * p->bits / 8, at = item * TILE_ROWS * row_bytes;
    if (p->bits == 3) pack_row(p->codes + at, row_bytes, p->tiles + at, 3);
    else if (p->bits == 4) pack_row(p->codes + at, row_bytes, p->tiles + at, 4);
    else pack_row(p->codes + at, row_bytes, p->tiles + at, 8);
}

void kernels_pack(const uint8_t *codes, uint8_t *tiles, int64_t rows, int64_t columns, int bits,
                  int threads) {
    Packing packing = {codes, tiles, columns, bits};
    run_parts(pack_rows, &packing, rows / TILE_ROWS, threads);
}

/* ---- rows, as an embedding looks them up -------------------------------------------------------- */

enum { NO_ROW = 2 };

typedef struct {
    const Weight *weight;
    const int64_t *rows;
    uint8_t *out; /* [count, columns] of `type` */
    int32_t type;
} Lookup;

INLINE uint32_t word_at(const uint8_t *tile, int vector, int64_t lane) {
    uint32_t word;
    memcpy(&word, tile + 64 * vector + 4 * lane, sizeof word);
    return word;
}

/* The signed codes of one row of a tile. */
INLINE void codes_of(const uint8_t *tile, int64_t lane, float *out, const int bits) {
#pragma GCC unroll 32
    for (int k = 0; k < TILE_COLUMNS; k++) {
        const int half = k % 2 * 16;
        uint32_t code = 0;
        if (bits == 8) code = word_at(tile, k / 4, lane) >> (8 * (k % 4)) & 255;
        else if (bits == 4) code = word_at(tile, k / 8, lane) >> (4 * (k % 8 / 2) + half) & 15;
        else if (k < 30) code = word_at(tile, k / 10, lane) >> (3 * (k / 2 % 5) + half) & 7;
        else
            for (int i = 0; i < 3; i++) code |= (word_at(tile, i, lane) >> (15 + half) & 1) << i;
        out[k] = (float)((int)code - (1 << (bits - 1)));
    }
}

INLINE float number_at(const void *from, int64_t at, int type) {
    if (type == TYPE_F32) return ((const float *)from)[at];
    if (type == TYPE_F16) return (float)((const _Float16 *)from)[at];
    uint32_t word = (uint32_t)((const uint16_t *)from)[at] << 16;
    float number;
    memcpy(&number, &word, sizeof number);
    return number;
}

INLINE void look_up(const Lookup *l, int64_t item, const int bits) {
    const Weight *w = l->weight;
    int64_t row = l->rows[item];
    for (int64_t column = 0; column < w->columns; column += TILE_COLUMNS) {
        float codes[TILE_COLUMNS];
        codes_of(tile_at(w, row, column), row % TILE_ROWS, codes, bits);
        int64_t at = column / w->group * w->rows + row;
        float scale = number_at(w->scales, at, w->scale_type);
        float zero = w->zeros ? number_at(w->zeros, at, w->scale_type) : 0;
        for (int k = 0; k < TILE_COLUMNS; k += LANES) {
            vf value = load_lanes(codes, k, TYPE_F32) * scale + zero;
            int64_t to = item * w->columns + column + k;
            store_typed(l->out, to, LANES, typed_bits(value, l->type), l->type);
        }
    }
}

static void look_up_row(void *data, int64_t item) {
    const Lookup *l = data;
    if (l->weight->bits == 3) look_up(l, item, 3);
    else if (l->weight->bits == 4) look_up(l, item, 4);
    else look_up(l, item, 8);
}

int kernels_rows(const Weight *weight, const int64_t *rows, void *out, int64_t count, int type,
                 int threads) {
    for (int64_t i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= weight->rows) return NO_ROW;
    Lookup lookup = {weight, rows, out, type};
    run_parts(look_up_row, &lookup, count, threads);
    return DONE;
}

int kernels_abi(void) {
    return 19;
}
