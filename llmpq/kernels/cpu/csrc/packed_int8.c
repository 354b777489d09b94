/* 3- and 4-bit weights, activations at 8 bits (VNNI).
 *
 * Every row of x is cut into pieces of 32 columns, each rounded to 8 bits with a scale of its own, as
 * llama.cpp does. A row's answer depends on no other row, and an outlier costs its own piece alone
 * its precision. Codes of the weight are unsigned bytes after a mask and a shift, four of a row in a
 * lane, so that one instruction adds 64 products. Integer sums become float32 once a piece and meet
 * the scales of the weight once a block:
 *   y = sum over blocks of scale (sum - 2^(b-1) x) + zero x, x the sum of the block's activations.
 * The order in which a tile's bytes come decides the order of x's codes. */
#include "step.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

enum { WIDE = 4, STRIP = 3, QUADS = TILE_COLUMNS / 4, AHEAD = 2048 };
enum { WORTH_THREADS = 1 << 18 }; /* numbers of x whose reading takes longer than waking a thread */

typedef struct {
    const Product *product;
    Prepared rows; /* of x */
} Job;

/* ---- rows of x ------------------------------------------------------------------------------- */

/* Columns of a tile in the order of the bytes of its quads. */
static const int32_t order_of_4[TILE_COLUMNS] = {
    0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,  13, 10, 14, 11, 15,
    16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31,
};
static const int32_t order_of_3[TILE_COLUMNS] = {
    0,  6,  1,  7,  2,  8,  3,  9,  10, 16, 11, 17, 12, 18, 13, 19,
    20, 26, 21, 27, 22, 28, 23, 29, 4,  14, 5,  15, 24, 30, 25, 31,
};

/* Rounds row m to codes, a scale for each tile's columns, and the sums of blocks of the codes times
 * their scales. A row with a number that is not finite has scales that are none. */
void piece_codes(const Prepared *q, int64_t rows, int64_t m) {
    const int32_t *order = q->bits == 3 ? order_of_3 : order_of_4;
    __m512i first = _mm512_loadu_si512(order), second = _mm512_loadu_si512(order + 16);
    float *scale = q->scale + m * (q->columns / TILE_COLUMNS);
    __m512 poison = _mm512_setzero_ps();
    for (int64_t k = 0; k < q->columns; k += q->block) {
        float block_sum = 0;
        for (int64_t t = k; t < k + q->block; t += TILE_COLUMNS) {
            __m512 a = (__m512)load_typed(q->x, m * q->columns + t, q->type);
            __m512 b = (__m512)load_typed(q->x, m * q->columns + t + 16, q->type);
            poison = _mm512_fmadd_ps(a, _mm512_setzero_ps(), poison);
            poison = _mm512_fmadd_ps(b, _mm512_setzero_ps(), poison);
            __m512 most = _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
            float size = _mm512_reduce_max_ps(most);
            __m512 steps = _mm512_set1_ps(size > 0 ? 127 / size : 0);
            __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(a, steps));
            __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(b, steps));
            scale[t / TILE_COLUMNS] = size / 127;
            block_sum += size / 127 * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
            __m512i front = _mm512_permutex2var_epi32(low, first, high);
            __m512i back = _mm512_permutex2var_epi32(low, second, high);
            int8_t *codes = q->codes + m * q->columns + t;
            _mm_storeu_si128((__m128i *)codes, _mm512_cvtsepi32_epi8(front));
            _mm_storeu_si128((__m128i *)(codes + 16), _mm512_cvtsepi32_epi8(back));
        }
        q->sums[k / q->block * rows + m] = block_sum;
    }
    float sum = _mm512_reduce_add_ps(poison);
    if (sum == 0) return;
    for (int64_t t = 0; t < q->columns / TILE_COLUMNS; t++) scale[t] = sum;
}

/* ---- products -------------------------------------------------------------------------------- */

/* The codes of a tile: bytes of four columns for each of its rows, in eight vectors. */
INLINE void decode(const uint8_t *tile, const int bits, __m512i *quad, const int stride) {
    const __m512i *vector = (const __m512i *)tile;
    for (int i = 0; i < bits; i++) __builtin_prefetch(tile + AHEAD + 64 * i, 0, 2);
    if (bits == 4) {
        __m512i low = _mm512_set1_epi8(15);
        for (int j = 0; j < 4; j++) {
            __m512i words = _mm512_loadu_si512(vector + j);
            quad[2 * j * stride] = _mm512_and_si512(words, low);
            quad[(2 * j + 1) * stride] = _mm512_and_si512(_mm512_srli_epi16(words, 4), low);
        }
        return;
    }
    /* A byte from each of two shifted half lanes: the low one's low byte, the other's high byte. */
#define BYTES(LOW, HIGH)                                                                          \
    _mm512_and_si512(low, _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xFF), LOW, HIGH, 0xCA))
    __m512i low = _mm512_set1_epi8(7), words[3];
    for (int j = 0; j < 3; j++) {
        words[j] = _mm512_loadu_si512(vector + j);
        quad[2 * j * stride] = BYTES(words[j], _mm512_srli_epi16(words[j], 1));
        quad[(2 * j + 1) * stride] =
            BYTES(_mm512_srli_epi16(words[j], 3), _mm512_srli_epi16(words[j], 4));
    }
    quad[6 * stride] = BYTES(_mm512_srli_epi16(words[0], 6), _mm512_slli_epi16(words[1], 2));
    __m512i one = _mm512_set1_epi16(1 << 8), two = _mm512_set1_epi16(2 << 8);
    __m512i last = _mm512_and_si512(_mm512_srli_epi16(words[0], 7), one);
    last = _mm512_or_si512(last, _mm512_and_si512(_mm512_srli_epi16(words[1], 6), two));
    __m512i four = _mm512_set1_epi16(4 << 8);
    last = _mm512_or_si512(last, _mm512_and_si512(_mm512_srli_epi16(words[2], 5), four));
    quad[7 * stride] = BYTES(_mm512_srli_epi16(words[2], 6), last);
#undef BYTES
}

INLINE __m512i four_of(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return _mm512_set1_epi32(four);
}

INLINE __m512 scaled(const Weight *w, __m512 sum, float x_sum, int64_t column, int64_t row,
                     __m512 total) {
    __m512 scale = (__m512)scale_at(w, column, row), x = _mm512_set1_ps(x_sum);
    __m512 middle = _mm512_set1_ps((float)(1 << (w->bits - 1)));
    total = _mm512_fmadd_ps(scale, _mm512_fnmadd_ps(middle, x, sum), total);
    return w->zeros ? _mm512_fmadd_ps((__m512)zero_at(w, column, row), x, total) : total;
}

INLINE void finish(const Product *p, __m512 sum, int64_t m, int64_t row) {
    if (p->bias) sum = _mm512_add_ps(sum, (__m512)load_typed(p->bias, row, TYPE_BF16));
    v16h narrow = narrowed((v16f)sum);
    memcpy((uint16_t *)p->y + m * p->weight->rows + row, &narrow, sizeof narrow);
}

/* Up to STRIP rows: multiplied as the codes are decoded. */
INLINE void few_rows(const Job *job, int64_t row, int64_t first, const int count, const int wide,
                     const int bits) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    const int8_t *x = job->rows.codes + first * w->columns;
    int64_t tiles = w->columns / TILE_COLUMNS, down = tiles * 64 * bits;
    const float *x_scale = job->rows.scale + first * tiles;
    __m512 total[STRIP][WIDE];
    for (int m = 0; m < count; m++)
        for (int n = 0; n < wide; n++) total[m][n] = _mm512_setzero_ps();
    for (int64_t b = 0; b < w->columns; b += job->rows.block) {
        __m512 sum[STRIP][WIDE];
        for (int m = 0; m < count; m++)
            for (int n = 0; n < wide; n++) sum[m][n] = _mm512_setzero_ps();
        for (int64_t k = b; k < b + job->rows.block; k += TILE_COLUMNS) {
            const uint8_t *tile = tile_at(w, row, k);
#pragma GCC unroll 4
            for (int n = 0; n < wide; n++) {
                __m512i quad[QUADS], whole[STRIP][2];
                decode(tile + n * down, bits, quad, 1);
                for (int m = 0; m < count; m++)
                    whole[m][0] = whole[m][1] = _mm512_setzero_si512();
#pragma GCC unroll 8
                for (int i = 0; i < QUADS; i++)
#pragma GCC unroll 3
                    for (int m = 0; m < count; m++) /* two sums: each waits for itself */
                        whole[m][i % 2] = _mm512_dpbusd_epi32(
                            whole[m][i % 2], quad[i], four_of(x + m * w->columns + k + 4 * i));
#pragma GCC unroll 3
                for (int m = 0; m < count; m++) {
                    __m512i both = _mm512_add_epi32(whole[m][0], whole[m][1]);
                    __m512 scale = _mm512_set1_ps(x_scale[m * tiles + k / TILE_COLUMNS]);
                    sum[m][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(both), scale, sum[m][n]);
                }
            }
        }
        const float *sums = job->rows.sums + b / job->rows.block * p->count + first;
        for (int n = 0; n < wide; n++)
            for (int m = 0; m < count; m++)
                total[m][n] = scaled(w, sum[m][n], sums[m], b, row + 16 * n, total[m][n]);
    }
    for (int m = 0; m < count; m++)
        for (int n = 0; n < wide; n++) finish(p, total[m][n], first + m, row + 16 * n);
}

#define FEW(COUNT, BITS_)                                                                        \
    static __attribute__((noinline)) void few_##COUNT##_##BITS_(const Job *job, int64_t row,     \
                                                                int64_t first, int blocks) {     \
        if (blocks == WIDE) few_rows(job, row, first, COUNT, WIDE, BITS_);                       \
        else                                                                                     \
            for (int n = 0; n < blocks; n++) few_rows(job, row + 16 * n, first, COUNT, 1, BITS_); \
    }
FEW(1, 3) FEW(2, 3) FEW(3, 3) FEW(1, 4) FEW(2, 4) FEW(3, 4)

typedef void (*Few)(const Job *, int64_t, int64_t, int);
static const Few few[2][STRIP + 1] = {{0, few_1_3, few_2_3, few_3_3}, {0, few_1_4, few_2_4, few_3_4}};

/* More rows: strips of them go over a panel of decoded codes in the first-level cache. */
INLINE void multiply(const Job *job, const __m512i *panel, int64_t first, int64_t column,
                     int64_t row, float *total, const int strip, const int wide) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    int64_t tiles = w->columns / TILE_COLUMNS;
    const int8_t *x = job->rows.codes + first * w->columns + column;
    const float *x_scale = job->rows.scale + first * tiles + column / TILE_COLUMNS;
    __m512 sum[STRIP][WIDE];
    for (int m = 0; m < strip; m++)
        for (int n = 0; n < wide; n++) sum[m][n] = _mm512_setzero_ps();
    for (int64_t t = 0; t < job->rows.block / TILE_COLUMNS; t++) {
        __m512i whole[STRIP][WIDE];
        for (int m = 0; m < strip; m++)
            for (int n = 0; n < wide; n++) whole[m][n] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int i = 0; i < QUADS; i++) {
            const __m512i *quad = panel + (t * QUADS + i) * wide;
#pragma GCC unroll 3
            for (int m = 0; m < strip; m++) {
                __m512i four = four_of(x + m * w->columns + t * TILE_COLUMNS + 4 * i);
#pragma GCC unroll 4
                for (int n = 0; n < wide; n++)
                    whole[m][n] = _mm512_dpbusd_epi32(whole[m][n], quad[n], four);
            }
        }
#pragma GCC unroll 3
        for (int m = 0; m < strip; m++) {
            __m512 scale = _mm512_set1_ps(x_scale[m * tiles + t]);
#pragma GCC unroll 4
            for (int n = 0; n < wide; n++)
                sum[m][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[m][n]), scale, sum[m][n]);
        }
    }
    const float *sums = job->rows.sums + column / job->rows.block * p->count + first;
    for (int n = 0; n < wide; n++)
        for (int m = 0; m < strip; m++) {
            float *to = total + m * PANEL + 16 * n;
            _mm512_store_ps(to, scaled(w, sum[m][n], sums[m], column, row + 16 * n, _mm512_load_ps(to)));
        }
}

INLINE void panel_rows(const Job *job, int64_t row, int64_t first, int64_t count, const int wide) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    __m512i panel[BLOCK / 4 * WIDE];
    float total[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    memset(total, 0, (size_t)count * PANEL * sizeof *total);
    for (int64_t k = 0; k < w->columns; k += job->rows.block) {
        for (int n = 0; n < wide; n++)
            for (int64_t t = 0; t < job->rows.block; t += TILE_COLUMNS) {
                const uint8_t *tile = tile_at(w, row + 16 * n, k + t);
                __m512i *out = panel + t / 4 * wide + n;
                if (w->bits == 4) decode(tile, 4, out, wide);
                else decode(tile, 3, out, wide);
            }
        for (int64_t m = 0; m < count;) {
            /* One row alone would wait for its own sums: two strips of two instead. */
            int64_t left = count - m, now = left == 4 ? 2 : left < STRIP ? left : STRIP;
            float *to = total + m * PANEL;
            if (now == 3) multiply(job, panel, first + m, k, row, to, 3, wide);
            else if (now == 2) multiply(job, panel, first + m, k, row, to, 2, wide);
            else multiply(job, panel, first + m, k, row, to, 1, wide);
            m += now;
        }
    }
    for (int64_t m = 0; m < count; m++)
        for (int n = 0; n < wide; n++)
            finish(p, _mm512_load_ps(total + m * PANEL + 16 * n), first + m, row + 16 * n);
}

void packed_int8_part(const Product *p, const Prepared *q, int64_t panel) {
    Job job = {.product = p, .rows = *q};
    int64_t row = panel * PANEL, left = (p->weight->rows - row) / 16;
    int blocks = left < WIDE ? (int)left : WIDE;
    if (p->count <= STRIP) {
        few[p->weight->bits - 3][p->count](&job, row, 0, blocks);
        return;
    }
    for (int64_t first = 0; first < p->count; first += ROW_BLOCK) {
        int64_t count = p->count - first < ROW_BLOCK ? p->count - first : ROW_BLOCK;
        if (blocks == WIDE) panel_rows(&job, row, first, count, WIDE);
        else
            for (int n = 0; n < blocks; n++) panel_rows(&job, row + 16 * n, first, count, 1);
    }
}

static void codes_part(void *data, int64_t m) {
    const Job *job = data;
    piece_codes(&job->rows, job->product->count, m);
}

static void any_part(void *data, int64_t panel) {
    const Job *job = data;
    packed_int8_part(job->product, &job->rows, panel);
}

int kernels_packed_int8(const Product *p) {
    const Weight *w = p->weight;
    size_t count = (size_t)p->count, columns = (size_t)w->columns;
    int64_t block = block_columns(w, BLOCK);
    Prepared q = {.x = p->x, .columns = w->columns, .block = block, .bits = w->bits,
                  .type = TYPE_BF16};
    q.codes = malloc(count * columns);
    q.scale = malloc(count * columns / TILE_COLUMNS * sizeof *q.scale);
    q.sums = malloc(count * columns / (size_t)block * sizeof *q.sums);
    int ready = q.codes && q.scale && q.sums;
    if (ready) {
        Job job = {.product = p, .rows = q};
        int spread = p->count * w->columns >= WORTH_THREADS;
        run_parts(codes_part, &job, p->count, spread ? p->threads : 1);
        run_parts(any_part, &job, (w->rows + PANEL - 1) / PANEL, p->threads);
    }
    free(q.codes), free(q.scale), free(q.sums);
    return ready ? DONE : NO_MEMORY;
}
#endif
