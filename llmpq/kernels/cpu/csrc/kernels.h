/* Products of activations and low-bit weights.
 *
 * Tiles. A weight [rows, columns] is cut into tiles of 16 rows x 32 columns, row blocks outermost; a
 * tile of b bits is b vectors of 64 bytes, which is what its codes weigh and no more. In a vector, 32-bit
 * lane r belongs to row r, so that a decoded vector multiplies one broadcast piece of x and adds to
 * 16 outputs without any shuffle:
 *   4 bits: vector j holds columns 8j..8j+7; the low 16 bits of a lane are columns 8j, 8j+2, 8j+4,
 *           8j+6 from the lowest nibble up, the high 16 bits the odd ones;
 *   3 bits: columns in fours q = 0..7, column i of which is byte 0, 2, 1, 3 of a lane, so that even
 *           columns are in its low half. Four q < 6 lies in vector q / 2 at bit 3 (q % 2) of each
 *           byte; the lower two bits of fours 6 and 7 are bits 6 and 7 of the bytes of vectors 0 and
 *           1, the highest bit is bit q of those of vector 2;
 *   8 bits: vector j holds columns 4j..4j+3 in the bytes of a lane.
 * Weights of 16 bits have panels of `panel` rows: for each pair of columns of bf16, and each column of
 * float16, from the first on, the numbers of these rows side by side.
 * Codes are unsigned; weight = (code - 2^(b-1)) * scale + zero, scales and zeros [groups, rows].
 *
 * The layout is the same on every machine; the files differ in what they multiply with. */
#ifndef LLMPQ_KERNELS_H
#define LLMPQ_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { TILE_ROWS = 16, TILE_COLUMNS = 32, PANEL = 64, BLOCK = 128, ROW_BLOCK = 192 };
enum { TYPE_F32, TYPE_F16, TYPE_BF16 };
enum { DONE, NO_MEMORY };

typedef struct {
    const uint8_t *tiles;
    const void *scales; /* [groups, rows] of scale_type */
    const void *zeros;  /* the same, or null */
    int64_t rows, columns;
    int64_t group; /* columns that share a scale, a multiple of TILE_COLUMNS */
    int32_t bits, scale_type;
    int32_t panel; /* 16 bits: rows of a panel (kernels_panels), the last of which is filled up */
} Weight;

/* One product: y = x weight^T + bias, x [count, weight.columns] and y [count, weight.rows]. */
typedef struct {
    const Weight *weight;
    const void *x;
    const void *bias; /* [weight.rows] in y's type, or null */
    void *y;
    int64_t count;
    int32_t threads;
    int32_t in_float; /* bf16: whether more than few rows are widened and multiplied in float32 */
} Product;

typedef float v16f __attribute__((vector_size(64)));
typedef int32_t v16i __attribute__((vector_size(64)));
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef uint32_t v16u __attribute__((vector_size(64)));

/* How weights that a step reads once are fetched ahead: past the caches on Zen 4 and 5, where a
 * thread then reads up to half as much again; elsewhere into the second level. */
#if defined(__AVX512BF16__) && !defined(__AMX_INT8__)
enum { ONCE = 0 };
#else
enum { ONCE = 2 };
#endif

#define INLINE static inline __attribute__((always_inline))

/* What threads have taken of the items of an operator. Each takes consecutive ones of its own share,
 * which lie one after the other in memory, and at the end of those that other threads have left. */
typedef struct {
    int64_t taken __attribute__((aligned(64)));
} Share;

/* The next item for thread `me` of all, or -1; `passed`: shares without items, 0 at first. */
INLINE int64_t take_item(Share *shares, int threads, int me, int *passed, int64_t all) {
    for (; *passed < threads; ++*passed) {
        int64_t of = (me + *passed) % threads;
        int64_t first = all * of / threads, end = all * (of + 1) / threads;
        int64_t item = first + __atomic_fetch_add(&shares[of].taken, 1, __ATOMIC_RELAXED);
        if (item < end) return item;
    }
    return -1;
}

/* Calls part(data, item) for every item below items, spread over threads. */
void run_parts(void (*part)(void *data, int64_t item), void *data, int64_t items, int threads);

INLINE v16f load_floats(const float *from) {
    v16f v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store_floats(float *to, v16f v) {
    memcpy(to, &v, sizeof v);
}

/* 16 numbers of a stored type, from place `at` on. */
INLINE v16f load_typed(const void *from, int64_t at, int type) {
    if (type == TYPE_F32) return load_floats((const float *)from + at);
    v16f v;
    const uint16_t *half = (const uint16_t *)from + at;
    if (type == TYPE_BF16) {
        v16h narrow;
        memcpy(&narrow, half, sizeof narrow);
        return (v16f)(__builtin_convertvector(narrow, v16u) << 16);
    }
    for (int i = 0; i < 16; i++) {
        _Float16 number;
        memcpy(&number, half + i, sizeof number);
        v[i] = (float)number;
    }
    return v;
}

/* bf16 numbers nearest to y; NaN stays NaN. */
INLINE v16h narrowed(v16f y) {
    v16u bits = (v16u)y;
    v16u rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    v16u is_nan = (v16u)((bits & 0x7FFFFFFF) > 0x7F800000);
    return __builtin_convertvector((is_nan & 0x7FC0) | (~is_nan & rounded), v16h);
}

/* Columns that one step of a product takes: a divisor of the group. */
INLINE int64_t block_columns(const Weight *w, int64_t most) {
    int64_t columns = most;
    while (w->group % columns) columns /= 2;
    return columns;
}

INLINE int64_t tile_bytes(const Weight *w) {
    return 64 * w->bits;
}

INLINE const uint8_t *tile_at(const Weight *w, int64_t row, int64_t column) {
    int64_t across = w->columns / TILE_COLUMNS;
    return w->tiles + (row / TILE_ROWS * across + column / TILE_COLUMNS) * tile_bytes(w);
}

/* Where rows from `row` on start in panels of 16-bit numbers; rows of a panel are side by side. */
INLINE const uint8_t *panel_at(const Weight *w, int64_t row) {
    int64_t each = w->scale_type == TYPE_F16 ? 2 : 4;
    return w->tiles + row / w->panel * w->columns * w->panel * 2 + row % w->panel * each;
}

INLINE v16f scale_at(const Weight *w, int64_t column, int64_t row) {
    return load_typed(w->scales, column / w->group * w->rows + row, w->scale_type);
}

INLINE v16f zero_at(const Weight *w, int64_t column, int64_t row) {
    return load_typed(w->zeros, column / w->group * w->rows + row, w->scale_type);
}

#endif
