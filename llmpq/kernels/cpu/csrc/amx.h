/* AMX: products of tiles of 16 rows. A thread sets the shapes of its eight tiles before it uses them,
 * and clears them after, so that the system need not keep them.
 *
 * These are not the compiler's intrinsics: GCC's do not say that a load reads memory, and stores may be
 * moved behind it. */
#ifndef LLMPQ_AMX_H
#define LLMPQ_AMX_H

#include "kernels.h"

#ifdef __AMX_INT8__
enum { AMX_ROWS = 16, AMX_COLUMNS = 64 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

#ifdef EMULATES_AMX
#include "amx_emulated.h"
#else
INLINE void set_shapes(TileShapes shapes) {
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

INLINE void clear_tiles(void) {
    __asm__ volatile("tilerelease" ::);
}

#define TILE_LOAD(TILE, FROM, STRIDE)                                                            \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #TILE ::"r"(FROM), "r"((int64_t)(STRIDE))      \
                     : "memory")
#define TILE_STORE(TILE, TO, STRIDE)                                                             \
    __asm__ volatile("tilestored %%tmm" #TILE ", (%0,%1,1)" ::"r"(TO), "r"((int64_t)(STRIDE))    \
                     : "memory")
/* Adds products of signed bytes of X and unsigned ones of WEIGHT to SUM. */
#define TILE_MULTIPLY(SUM, X, WEIGHT)                                                            \
    __asm__ volatile("tdpbsud %%tmm" #WEIGHT ", %%tmm" #X ", %%tmm" #SUM ::)
/* Likewise of bf16 pairs, to float32. */
#define TILE_MULTIPLY_BF16(SUM, X, Y)                                                            \
    __asm__ volatile("tdpbf16ps %%tmm" #Y ", %%tmm" #X ", %%tmm" #SUM ::)
#endif

/* The first `sums` tiles hold sums of `count` rows, two more the weight: 4 columns, of bf16 2, of 16
 * rows in each of `depth` rows; the others `count` rows of x of `depth` times so many columns. */
INLINE void shape_tiles(int depth, int sums, int count) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        int is_weight = i >= sums && i < sums + 2, is_x = i >= sums + 2;
        shapes.rows[i] = (uint8_t)(is_weight ? depth : count);
        shapes.row_bytes[i] = (uint16_t)(is_x ? 4 * depth : 64);
    }
    set_shapes(shapes);
}

/* The same row 16 times. Sums do not begin with tilezero: the product after it takes three times as
 * long (measured on Emerald Rapids). */
#define TILE_CLEAR(TILE) TILE_LOAD(TILE, &amx_zeros, 0)
/* The first four tiles, which hold sums. */
#define CLEAR_SUMS()                                                                             \
    do {                                                                                         \
        TILE_CLEAR(0);                                                                           \
        TILE_CLEAR(1);                                                                           \
        TILE_CLEAR(2);                                                                           \
        TILE_CLEAR(3);                                                                           \
    } while (0)
static const v16i amx_zeros;
#endif

#endif
