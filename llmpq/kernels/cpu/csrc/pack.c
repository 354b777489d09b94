/* From rows of packed codes, each a little-endian bit stream, to tiles, and from rows of 16-bit numbers
 * to panels; and single rows read back. */
#include "lanes.h"

#include <stdlib.h>

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

/* Where column k lies in a lane of 3-bit codes: the first bit of its byte. */
INLINE int first_bit(int k) {
    return k % 2 * 16 + k % 4 / 2 * 8;
}

/* Fours of columns at bits 0 and 3 of the bytes, the last two in the bits left over. */
INLINE void part_by_three(const uint8_t *from, int64_t row_bytes, uint8_t *to) {
    vu word[3], lane[3] = {{0}, {0}, {0}};
    for (int i = 0; i < 3; i++) word[i] = words_of(from + 4 * i, row_bytes);
    for (int k = 0; k < TILE_COLUMNS; k++) {
        int at = 3 * k / 32, shift = 3 * k % 32, four = k / 4, byte = first_bit(k);
        vu q = word[at] >> shift;
        if (shift > 29) q |= word[at + 1] << (32 - shift);
        q &= 7;
        if (four < 6) {
            lane[four / 2] |= q << (byte + 3 * (four % 2));
        } else {
            lane[four - 6] |= (q & 3) << (byte + 6);
            lane[2] |= q >> 2 << (byte + four);
        }
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

/* ---- panels of 16-bit numbers ----------------------------------------------------------------- */

typedef struct {
    const Weight *weight; /* its tiles are written */
    const uint16_t *plain;
    int32_t failed;
} Ordering;

static void order_panel(void *data, int64_t panel) {
    Ordering *o = data;
    const Weight *w = o->weight;
    const int64_t together = w->scale_type == TYPE_F16 ? 1 : 2; /* columns */
    const int64_t first = panel * w->panel, left = w->rows - first;
    const int64_t rows = left < w->panel ? left : w->panel;
    uint16_t *to = (uint16_t *)w->tiles + first * w->columns;
    const uint16_t *from = o->plain + first * w->columns;
    uint16_t *room = to == from ? malloc((size_t)(rows * w->columns) * 2) : 0;
    if (to == from) {
        if (!room) {
            __atomic_store_n(&o->failed, 1, __ATOMIC_RELAXED);
            return;
        }
        from = memcpy(room, from, (size_t)(rows * w->columns) * 2);
    }
    for (int64_t r = 0; r < w->panel; r++)
        for (int64_t k = 0; k < w->columns; k += together) {
            uint16_t *at = to + k * w->panel + r * together;
            if (r < rows) memcpy(at, from + r * w->columns + k, (size_t)together * 2);
            else memset(at, 0, (size_t)together * 2);
        }
    free(room);
}

/* Writes w->tiles from rows [w->rows, w->columns], which may lie at the same address if they fill the
 * panels; rows missing in the last panel are zeros. */
int kernels_order(const Weight *w, const void *plain, int threads) {
    Ordering ordering = {w, plain, 0};
    run_parts(order_panel, &ordering, (w->rows + w->panel - 1) / w->panel, threads);
    return ordering.failed ? NO_MEMORY : DONE;
}

static void look_up_plain(const Weight *w, int64_t row, uint8_t *out, int64_t item, int type) {
    const int64_t together = w->scale_type == TYPE_F16 ? 1 : 2;
    const uint8_t *from = panel_at(w, row / 16 * 16) + row % 16 * together * 2;
    for (int64_t k = 0; k < w->columns; k++) {
        int64_t at = k / together * together * w->panel + k % together;
        float number = load_one(from, at, w->scale_type);
        store_typed(out, item * w->columns + k, 1, typed_bits((vf){0} + number, type), type);
    }
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
        else if (k < 24) code = word_at(tile, k / 8, lane) >> (first_bit(k) + k / 4 % 2 * 3) & 7;
        else {
            code = word_at(tile, k / 4 - 6, lane) >> (first_bit(k) + 6) & 3;
            code |= (word_at(tile, 2, lane) >> (first_bit(k) + k / 4) & 1) << 2;
        }
        out[k] = (float)((int)code - (1 << (bits - 1)));
    }
}

INLINE void look_up(const Lookup *l, int64_t item, const int bits) {
    const Weight *w = l->weight;
    int64_t row = l->rows[item];
    for (int64_t column = 0; column < w->columns; column += TILE_COLUMNS) {
        float codes[TILE_COLUMNS];
        codes_of(tile_at(w, row, column), row % TILE_ROWS, codes, bits);
        int64_t at = column / w->group * w->rows + row;
        float scale = load_one(w->scales, at, w->scale_type);
        float zero = w->zeros ? load_one(w->zeros, at, w->scale_type) : 0;
        for (int k = 0; k < TILE_COLUMNS; k += LANES) {
            vf value = load_lanes(codes, k, TYPE_F32) * scale + zero;
            int64_t to = item * w->columns + column + k;
            store_typed(l->out, to, LANES, typed_bits(value, l->type), l->type);
        }
    }
}

static void look_up_row(void *data, int64_t item) {
    const Lookup *l = data;
    if (l->weight->bits == 16) look_up_plain(l->weight, l->rows[item], l->out, item, l->type);
    else if (l->weight->bits == 3) look_up(l, item, 3);
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
    return 25;
}
