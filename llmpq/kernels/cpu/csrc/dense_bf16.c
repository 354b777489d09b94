/* bf16 weights in panels of 64 rows, or of 32 for AMX (AVX512-BF16).
 *
 * Nothing is decoded, and 64 rows are read in one stream or two, so one row costs what reading the
 * weight costs. Columns are added in an order of their own, in float32, whatever the threads and the
 * number of rows. AMX multiplies 16 rows in the time of one. */
#include "amx.h"
#include "step.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>

enum { VECTORS = PANEL / 16 };

/* Puts 16 outputs of a row of x down; the last panel may have fewer. */
INLINE void finish(const Product *p, __m512 sum, int64_t m, int64_t row) {
    int64_t left = p->weight->rows - row;
    __mmask16 is = left >= 16 ? 0xFFFF : left > 0 ? (__mmask16)((1 << left) - 1) : 0;
    if (p->bias) {
        __m256i bias = _mm256_maskz_loadu_epi16(is, (const uint16_t *)p->bias + row);
        sum = _mm512_add_ps(sum, _mm512_cvtpbh_ps((__m256bh)bias));
    }
    uint16_t *y = (uint16_t *)p->y + m * p->weight->rows + row;
    _mm256_mask_storeu_epi16(y, is, (__m256i)_mm512_cvtneps_pbh(sum));
}

#ifdef __AMX_BF16__
enum { PAIRS = 32 }; /* columns of a tile */

INLINE void finish_amx(const Product *p, const float *sum, int64_t row, int64_t first, int64_t count,
                       const int vectors) {
    for (int64_t m = 0; m < count; m++)
        for (int n = 0; n < vectors; n++)
            finish(p, _mm512_load_ps(sum + m * PANEL + 16 * n), first + m, row + 16 * n);
}

/* One strip of rows of x by 64 rows of the weight. */
static void one_strip(const Product *p, int64_t row, int64_t count) {
    const Weight *w = p->weight;
    float sum[AMX_ROWS * PANEL] __attribute__((aligned(64)));
    const uint8_t *from[VECTORS];
    const uint16_t *x = p->x;
    int64_t pair_bytes = 4 * w->panel;
    for (int n = 0; n < VECTORS; n++) from[n] = panel_at(w, row + 16 * n);
    CLEAR_SUMS();
    for (int64_t k = 0; k < w->columns; k += PAIRS) {
        int64_t at = k / 2 * pair_bytes;
        TILE_LOAD(6, x + k, 2 * w->columns);
        TILE_LOAD(4, from[0] + at, pair_bytes);
        TILE_MULTIPLY_BF16(0, 6, 4);
        TILE_LOAD(5, from[1] + at, pair_bytes);
        TILE_MULTIPLY_BF16(1, 6, 5);
        TILE_LOAD(4, from[2] + at, pair_bytes);
        TILE_MULTIPLY_BF16(2, 6, 4);
        TILE_LOAD(5, from[3] + at, pair_bytes);
        TILE_MULTIPLY_BF16(3, 6, 5);
    }
    TILE_STORE(0, sum, 4 * PANEL);
    TILE_STORE(1, sum + 16, 4 * PANEL);
    TILE_STORE(2, sum + 32, 4 * PANEL);
    TILE_STORE(3, sum + 48, 4 * PANEL);
    finish_amx(p, sum, row, 0, count, VECTORS);
}

/* Two strips of rows of x by 32 rows of the weight. */
static void two_strips(const Product *p, int64_t row, int64_t first, int64_t second, int64_t count) {
    const Weight *w = p->weight;
    float sum[2][AMX_ROWS * PANEL] __attribute__((aligned(64)));
    const uint8_t *left = panel_at(w, row), *right = panel_at(w, row + 16);
    const uint16_t *x = (const uint16_t *)p->x + first * w->columns;
    const uint16_t *below = (const uint16_t *)p->x + second * w->columns;
    int64_t pair_bytes = 4 * w->panel;
    CLEAR_SUMS();
    for (int64_t k = 0; k < w->columns; k += PAIRS) {
        int64_t at = k / 2 * pair_bytes;
        TILE_LOAD(6, x + k, 2 * w->columns);
        TILE_LOAD(4, left + at, pair_bytes);
        TILE_MULTIPLY_BF16(0, 6, 4);
        TILE_LOAD(5, right + at, pair_bytes);
        TILE_MULTIPLY_BF16(1, 6, 5);
        TILE_LOAD(7, below + k, 2 * w->columns);
        TILE_MULTIPLY_BF16(2, 7, 4);
        TILE_MULTIPLY_BF16(3, 7, 5);
    }
    TILE_STORE(0, sum[0], 4 * PANEL);
    TILE_STORE(1, sum[0] + 16, 4 * PANEL);
    TILE_STORE(2, sum[1], 4 * PANEL);
    TILE_STORE(3, sum[1] + 16, 4 * PANEL);
    finish_amx(p, sum[0], row, first, count, 2);
    finish_amx(p, sum[1], row, second, count, 2);
}

/* Strips are equally high, so that all have the tiles' shape; the last two may share rows. */
void dense_part(const Product *p, int64_t item) {
    int64_t pairs = (p->count + 2 * AMX_ROWS - 1) / (2 * AMX_ROWS), row = item * PANEL;
    int64_t height = p->count <= AMX_ROWS ? p->count : (p->count + 2 * pairs - 1) / (2 * pairs);
    shape_tiles(AMX_ROWS, 4, (int)height);
    if (height == p->count) one_strip(p, row, height);
    for (int64_t m = 0; height < p->count && m < p->count; m += 2 * height)
        for (int64_t side = 0; side < PANEL; side += PANEL / 2) {
            int64_t last = p->count - height, second = m + height;
            two_strips(p, row + side, m < last ? m : last, second < last ? second : last, height);
        }
    clear_tiles();
}
#else
enum { AT_ONCE = 6, AHEAD = 4096, HALF = PANEL / 2, DEPTH = 2048 };

INLINE __m512bh pair_of(const uint16_t *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* Adds the columns [from, end); `panel` rows of the weight side by side. */
INLINE void multiply(const Product *p, int64_t row, int64_t first, int64_t from, int64_t end,
                     float *total, const int count, const int panel) {
    const int per = panel / 16;
    int64_t columns = p->weight->columns, next = columns * panel * 2;
    const uint8_t *weight = panel_at(p->weight, row) + from * panel * 2;
    const uint16_t *x = (const uint16_t *)p->x + first * columns;
    __m512 sum[AT_ONCE][VECTORS];
    for (int m = 0; m < count; m++)
        for (int n = 0; n < VECTORS; n++) sum[m][n] = _mm512_load_ps(total + m * PANEL + 16 * n);
    for (int64_t k = from; k < end; k += 2, weight += panel * 4) {
        for (int n = 0; n < VECTORS; n++)
            __builtin_prefetch(weight + n / per * next + n % per * 64 + AHEAD, 0, 2);
#pragma GCC unroll 6
        for (int m = 0; m < count; m++) {
            __m512bh pair = pair_of(x + m * columns + k);
#pragma GCC unroll 4
            for (int n = 0; n < VECTORS; n++) {
                const uint8_t *at = weight + n / per * next + n % per * 64;
                __m512bh own = (__m512bh)_mm512_loadu_si512(at);
                sum[m][n] = _mm512_dpbf16_ps(sum[m][n], own, pair);
            }
        }
    }
    for (int m = 0; m < count; m++)
        for (int n = 0; n < VECTORS; n++) _mm512_store_ps(total + m * PANEL + 16 * n, sum[m][n]);
}

#define ROWS(COUNT)                                                                               \
    static __attribute__((noinline)) void rows_##COUNT(const Product *p, int64_t row,             \
                                                       int64_t first, int64_t from, int64_t end,  \
                                                       float *total) {                            \
        if (p->weight->panel == PANEL) multiply(p, row, first, from, end, total, COUNT, PANEL);   \
        else multiply(p, row, first, from, end, total, COUNT, HALF);                              \
    }
ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)

typedef void (*Rows)(const Product *, int64_t, int64_t, int64_t, int64_t, float *);
static const Rows rows[AT_ONCE + 1] = {0, rows_1, rows_2, rows_3, rows_4, rows_5, rows_6};

/* More rows than registers hold take even strips; the columns that one strip has read are still in
 * the cache for the next. */
static void block_rows(const Product *p, int64_t row, int64_t first, int64_t count) {
    float total[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    int64_t strips = (count + AT_ONCE - 1) / AT_ONCE, columns = p->weight->columns;
    int64_t depth = strips > 1 ? DEPTH : columns;
    memset(total, 0, (size_t)(count * PANEL) * sizeof *total);
    for (int64_t k = 0; k < columns; k += depth)
        for (int64_t i = 0; i < strips; i++) {
            int64_t from = i * count / strips, end = (i + 1) * count / strips;
            rows[end - from](p, row, first + from, k, k + depth < columns ? k + depth : columns,
                             total + from * PANEL);
        }
    for (int64_t m = 0; m < count; m++)
        for (int n = 0; n < VECTORS; n++)
            finish(p, _mm512_load_ps(total + m * PANEL + 16 * n), first + m, row + 16 * n);
}

void dense_part(const Product *p, int64_t item) {
    for (int64_t first = 0; first < p->count; first += ROW_BLOCK) {
        int64_t left = p->count - first;
        block_rows(p, item * PANEL, first, left < ROW_BLOCK ? left : ROW_BLOCK);
    }
}
#endif

static void multiply_part(void *data, int64_t item) {
    dense_part(data, item);
}

int kernels_dense(const Product *p) {
    run_parts(multiply_part, (void *)p, (p->weight->rows + PANEL - 1) / PANEL, p->threads);
    return DONE;
}
#endif
