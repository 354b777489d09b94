/* The tiles of amx.h in plain C, slow: with it the tests run on processors without AMX what AMX runs.
 * Compiled with -DEMULATES_AMX. */
#ifndef LLMPQ_AMX_EMULATED_H
#define LLMPQ_AMX_EMULATED_H

#include "kernels.h"

static _Thread_local struct {
    TileShapes shapes;
    uint8_t tile[8][16][64];
} amx;

INLINE void set_shapes(TileShapes shapes) {
    amx.shapes = shapes;
}

static void load_tile(int t, const void *from, int64_t stride) {
    memset(amx.tile[t], 0, sizeof amx.tile[t]);
    for (int m = 0; m < amx.shapes.rows[t]; m++)
        memcpy(amx.tile[t][m], (const uint8_t *)from + m * stride, amx.shapes.row_bytes[t]);
}

static void store_tile(int t, void *to, int64_t stride) {
    for (int m = 0; m < amx.shapes.rows[t]; m++)
        memcpy((uint8_t *)to + m * stride, amx.tile[t][m], amx.shapes.row_bytes[t]);
}

static void multiply_bytes(int sum, int x, int weight) {
    for (int m = 0; m < amx.shapes.rows[sum]; m++)
        for (int n = 0; n < amx.shapes.row_bytes[sum] / 4; n++) {
            int32_t total;
            memcpy(&total, amx.tile[sum][m] + 4 * n, 4);
            for (int k = 0; k < amx.shapes.row_bytes[x]; k++)
                total += (int8_t)amx.tile[x][m][k] * amx.tile[weight][k / 4][4 * n + k % 4];
            memcpy(amx.tile[sum][m] + 4 * n, &total, 4);
        }
}

INLINE float wide_bf16(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    uint32_t word = (uint32_t)half << 16;
    float number;
    memcpy(&number, &word, 4);
    return number;
}

static void multiply_pairs(int sum, int x, int y) {
    for (int m = 0; m < amx.shapes.rows[sum]; m++)
        for (int n = 0; n < amx.shapes.row_bytes[sum] / 4; n++) {
            float total;
            memcpy(&total, amx.tile[sum][m] + 4 * n, 4);
            for (int k = 0; k < amx.shapes.row_bytes[x] / 2; k++)
                total += wide_bf16(amx.tile[x][m] + 2 * k) *
                         wide_bf16(amx.tile[y][k / 2] + 4 * n + k % 2 * 2);
            memcpy(amx.tile[sum][m] + 4 * n, &total, 4);
        }
}

INLINE void clear_tiles(void) {
    memset(&amx, 0, sizeof amx); /* a tile used before its shape is set holds nothing */
}

#define TILE_LOAD(TILE, FROM, STRIDE) load_tile(TILE, FROM, STRIDE)
#define TILE_STORE(TILE, TO, STRIDE) store_tile(TILE, TO, STRIDE)
#define TILE_MULTIPLY(SUM, X, WEIGHT) multiply_bytes(SUM, X, WEIGHT)
#define TILE_MULTIPLY_BF16(SUM, X, Y) multiply_pairs(SUM, X, Y)

#endif
