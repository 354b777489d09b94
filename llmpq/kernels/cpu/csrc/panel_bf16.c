/* bf16 activations on processors that add products of bf16 pairs (AVX512-BF16).
 *
 * Codes become the bf16 numbers code - 2^(b-1), exactly, by one table lookup for 32 of them; scale and
 * zero come in once a block of columns, in float32. So the answer is at least as exact as a product
 * by the weight dequantized to bf16. Few rows of x are multiplied as the codes are decoded; for more
 * rows a panel of decoded codes stays in the first-level cache while all rows go over it. Some
 * processors multiply bf16 pairs at half the rate of float32: there panel_float.c takes more rows. */
#include "step.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#include <stdlib.h>

enum { WIDE = 4, STRIP = 6, FEW_AT_ONCE = 8, AHEAD = 2048 };

typedef struct {
    const Product *product;
    const float *sums; /* [blocks, count] of x over each block of columns */
    int64_t block;
} Job;

typedef union {
    uint16_t number[32];
    __m512i vector;
} Table;

/* A lookup reads five bits of each half lane: the table repeats, and no code need be masked. */
static Table code_table(int bits) {
    Table t;
    for (int i = 0; i < 32; i++) {
        float value = (float)((i & ((1 << bits) - 1)) - (1 << (bits - 1)));
        uint32_t word;
        memcpy(&word, &value, 4);
        t.number[i] = (uint16_t)(word >> 16);
    }
    return t;
}

INLINE __m512bh lookup(__m512i words, __m512i table) {
    return (__m512bh)_mm512_permutexvar_epi16(words, table);
}

/* The codes of vector `index` (0..15: a pair of columns for each of 16 rows) of a tile. */
INLINE __m512bh decoded(const uint8_t *tile, const int index, const int bits, __m512i table) {
    const __m512i *vectors = (const __m512i *)tile;
    if (bits == 4) {
        __m512i words = _mm512_loadu_si512(vectors + index / 4);
        return lookup(_mm512_srli_epi16(words, 4 * (index % 4)), table);
    }
    const int four = index / 2, byte = index % 2 * 8;
    if (four < 6) {
        __m512i words = _mm512_loadu_si512(vectors + four / 2);
        return lookup(_mm512_srli_epi16(words, four % 2 * 3 + byte), table);
    }
    __m512i low = _mm512_srli_epi16(_mm512_loadu_si512(vectors + four - 6), 6 + byte);
    __m512i high = _mm512_srli_epi16(_mm512_loadu_si512(vectors + 2), four - 2 + byte);
    low = _mm512_and_si512(low, _mm512_set1_epi16(3));
    return lookup(_mm512_or_si512(low, _mm512_and_si512(high, _mm512_set1_epi16(4))), table);
}

/* 8 bits: codes below 256 are exact in bf16 too, but no table holds them. */
INLINE void decode8(const uint8_t *tile, __m512bh *out, const int stride) {
    __m512i low_bytes = _mm512_set1_epi32(0xFF);
    for (int j = 0; j < 8; j++) {
        __m512i words = _mm512_loadu_si512((const __m512i *)tile + j);
        __m512 number[4];
        for (int i = 0; i < 4; i++) {
            __m512i code = _mm512_and_si512(_mm512_srli_epi32(words, 8 * i), low_bytes);
            number[i] = _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(128)));
        }
        for (int i = 0; i < 2; i++) { /* exact: cutting a float of an integer below 129 loses nothing */
            __m512i even = _mm512_srli_epi32(_mm512_castps_si512(number[2 * i]), 16);
            __m512i odd = _mm512_castps_si512(number[2 * i + 1]);
            out[(2 * j + i) * stride] = (__m512bh)_mm512_mask_blend_epi16(0xAAAAAAAA, even, odd);
        }
    }
}

/* A tile further on: several rows of tiles are read at once, more than the processor foresees. */
INLINE void fetch_ahead(const uint8_t *tile, const int bits) {
    for (int i = 0; i < bits; i++) __builtin_prefetch(tile + AHEAD + 64 * i, 0, 2);
}

INLINE __m512bh pair_of(const uint16_t *x) {
    int32_t pair;
    memcpy(&pair, x, 4);
    return (__m512bh)_mm512_set1_epi32(pair);
}

INLINE __m512 scaled(const Weight *w, __m512 sum, float x_sum, int64_t column, int64_t row,
                     __m512 total) {
    total = _mm512_fmadd_ps((__m512)scale_at(w, column, row), sum, total);
    if (!w->zeros) return total;
    return _mm512_fmadd_ps((__m512)zero_at(w, column, row), _mm512_set1_ps(x_sum), total);
}

INLINE void finish(const Product *p, __m512 sum, int64_t m, int64_t row) {
    if (p->bias) sum = _mm512_add_ps(sum, (__m512)load_typed(p->bias, row, TYPE_BF16));
    uint16_t *y = (uint16_t *)p->y + m * p->weight->rows + row;
    _mm256_storeu_si256((__m256i *)y, (__m256i)_mm512_cvtneps_pbh(sum));
}

/* ---- few rows: multiplied as they are decoded ------------------------------------------------ */

INLINE void few(const Job *job, int64_t row, int64_t first, const int count, const int wide,
                const int bits) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    const uint16_t *x = (const uint16_t *)p->x + first * w->columns;
    __m512i table = code_table(bits).vector;
    __m512 total[FEW_AT_ONCE][WIDE];
    for (int m = 0; m < count; m++)
        for (int n = 0; n < wide; n++) total[m][n] = _mm512_setzero_ps();
    for (int64_t b = 0; b < w->columns; b += job->block) {
        __m512 sum[FEW_AT_ONCE][WIDE];
        for (int m = 0; m < count; m++)
            for (int n = 0; n < wide; n++) sum[m][n] = _mm512_setzero_ps();
        for (int64_t k = b; k < b + job->block; k += TILE_COLUMNS) {
            const uint8_t *tile = tile_at(w, row, k);
            int64_t down = w->columns / TILE_COLUMNS * 64 * bits;
            for (int n = 0; n < wide; n++) fetch_ahead(tile + n * down, bits);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
#pragma GCC unroll 4
                for (int n = 0; n < wide; n++) {
                    __m512bh code = decoded(tile + n * down, i, bits, table);
#pragma GCC unroll 8
                    for (int m = 0; m < count; m++)
                        sum[m][n] = _mm512_dpbf16_ps(sum[m][n], code,
                                                     pair_of(x + m * w->columns + k + 2 * i));
                }
        }
        const float *sums = job->sums + b / job->block * p->count + first;
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
        int n = 0, pairs = COUNT > 4; /* more rows leave registers for fewer columns */          \
        if (!pairs && blocks == WIDE) few(job, row, first, COUNT, WIDE, BITS_), n = WIDE;        \
        for (; pairs && n + 2 <= blocks; n += 2)                                                 \
            few(job, row + 16 * n, first, COUNT, 2, BITS_);                                      \
        for (; n < blocks; n++) few(job, row + 16 * n, first, COUNT, 1, BITS_);                  \
    }
FEW(1, 3) FEW(2, 3) FEW(3, 3) FEW(4, 3) FEW(5, 3) FEW(6, 3) FEW(7, 3) FEW(8, 3)
FEW(1, 4) FEW(2, 4) FEW(3, 4) FEW(4, 4) FEW(5, 4) FEW(6, 4) FEW(7, 4) FEW(8, 4)

typedef void (*Few)(const Job *, int64_t, int64_t, int);
static const Few few_rows[2][FEW_AT_ONCE + 1] = {
    {0, few_1_3, few_2_3, few_3_3, few_4_3, few_5_3, few_6_3, few_7_3, few_8_3},
    {0, few_1_4, few_2_4, few_3_4, few_4_4, few_5_4, few_6_4, few_7_4, few_8_4},
};

static int blocks_from(const Weight *w, int64_t row) {
    int64_t left = (w->rows - row) / 16;
    return left < WIDE ? (int)left : WIDE;
}

static void few_part(void *data, int64_t item) {
    const Job *job = data;
    const Weight *w = job->product->weight;
    int64_t row = item * PANEL, count = job->product->count;
    for (int64_t m = 0, now; m < count; m += now) {
        now = count - m < FEW_AT_ONCE ? count - m : FEW_AT_ONCE;
        few_rows[w->bits - 3][now](job, row, m, blocks_from(w, row));
    }
}

/* ---- many rows: a panel of decoded codes ----------------------------------------------------- */

INLINE void decode_tile(const uint8_t *tile, __m512bh *out, const int bits, const int stride) {
    fetch_ahead(tile, bits);
    if (bits == 8) {
        decode8(tile, out, stride);
        return;
    }
    __m512i table = code_table(bits).vector;
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) out[i * stride] = decoded(tile, i, bits, table);
}

INLINE void multiply(const Job *job, const __m512bh *panel, int64_t first, int64_t column,
                     int64_t row, float *total, const int strip, const int wide) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    const uint16_t *x = (const uint16_t *)p->x + first * w->columns + column;
    __m512 sum[STRIP][WIDE];
    for (int m = 0; m < strip; m++)
        for (int n = 0; n < wide; n++) sum[m][n] = _mm512_setzero_ps();
    for (int64_t k = 0; k < job->block / 2; k++)
#pragma GCC unroll 6
        for (int m = 0; m < strip; m++) {
            __m512bh pair = pair_of(x + m * w->columns + 2 * k);
#pragma GCC unroll 4
            for (int n = 0; n < wide; n++)
                sum[m][n] = _mm512_dpbf16_ps(sum[m][n], panel[k * wide + n], pair);
        }
    const float *sums = job->sums + column / job->block * p->count + first;
    for (int n = 0; n < wide; n++)
        for (int m = 0; m < strip; m++) {
            float *to = total + m * PANEL + 16 * n;
            _mm512_store_ps(to, scaled(w, sum[m][n], sums[m], column, row + 16 * n, _mm512_load_ps(to)));
        }
}

INLINE void panel_rows(const Job *job, int64_t row, int64_t first, int64_t count, const int wide) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    __m512bh panel[BLOCK / 2 * WIDE];
    float total[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    memset(total, 0, (size_t)count * PANEL * sizeof *total);
    for (int64_t k = 0; k < w->columns; k += job->block) {
        for (int n = 0; n < wide; n++)
            for (int64_t t = 0; t < job->block; t += TILE_COLUMNS) {
                const uint8_t *tile = tile_at(w, row + 16 * n, k + t);
                __m512bh *out = panel + t / 2 * wide + n;
                if (w->bits == 4) decode_tile(tile, out, 4, wide);
                else if (w->bits == 3) decode_tile(tile, out, 3, wide);
                else decode_tile(tile, out, 8, wide);
            }
        int64_t m = 0;
        for (; m + STRIP <= count; m += STRIP)
            multiply(job, panel, first + m, k, row, total + m * PANEL, STRIP, wide);
        switch (count - m) { /* codes are read once for them, whatever their number */
        case 1: multiply(job, panel, first + m, k, row, total + m * PANEL, 1, wide); break;
        case 2: multiply(job, panel, first + m, k, row, total + m * PANEL, 2, wide); break;
        case 3: multiply(job, panel, first + m, k, row, total + m * PANEL, 3, wide); break;
        case 4: multiply(job, panel, first + m, k, row, total + m * PANEL, 4, wide); break;
        case 5: multiply(job, panel, first + m, k, row, total + m * PANEL, 5, wide); break;
        }
    }
    for (int64_t m = 0; m < count; m++)
        for (int n = 0; n < wide; n++)
            finish(p, _mm512_load_ps(total + m * PANEL + 16 * n), first + m, row + 16 * n);
}

static void panel_part(void *data, int64_t item) {
    const Job *job = data;
    int64_t row = item * PANEL, all = job->product->count;
    int blocks = blocks_from(job->product->weight, row);
    for (int64_t first = 0; first < all; first += ROW_BLOCK) {
        int64_t count = all - first < ROW_BLOCK ? all - first : ROW_BLOCK;
        if (blocks == WIDE) panel_rows(job, row, first, count, WIDE);
        else
            for (int n = 0; n < blocks; n++) panel_rows(job, row + 16 * n, first, count, 1);
    }
}

/* The sums of row m of x over each block of columns. */
void bf16_sums(const Prepared *q, int64_t rows, int64_t m) {
    __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3F80);
    for (int64_t k = 0; k < q->columns; k += q->block) {
        const uint16_t *x = (const uint16_t *)q->x + m * q->columns + k;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < q->block; i += 32)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(x + i), ones);
        q->sums[k / q->block * rows + m] = _mm512_reduce_add_ps(sum);
    }
}

/* One panel; up to few_limit rows are multiplied as the codes are decoded. */
void bf16_part(const Product *p, const Prepared *q, int64_t few_limit, int64_t panel) {
    Job job = {p, q->sums, q->block};
    if (p->weight->bits < 8 && p->count <= few_limit) few_part(&job, panel);
    else if (p->in_float) float_part(p, q, TYPE_BF16, panel);
    else panel_part(&job, panel);
}

typedef struct {
    const Product *product;
    const Prepared *rows;
    int64_t few_limit;
} Call;

static void any_part(void *data, int64_t panel) {
    const Call *c = data;
    bf16_part(c->product, c->rows, c->few_limit, panel);
}

/* Up to few_limit rows are multiplied as the codes are decoded. */
int kernels_bf16(const Product *p, int64_t few_limit) {
    const Weight *w = p->weight;
    int64_t block = block_columns(w, BLOCK);
    float *sums = malloc((size_t)(w->columns / block * p->count) * sizeof *sums);
    if (!sums) return NO_MEMORY;
    Prepared prepared = {
        .x = p->x, .columns = w->columns, .block = block, .sums = sums, .type = TYPE_BF16};
    for (int64_t m = 0; m < p->count; m++) bf16_sums(&prepared, p->count, m);
    Call call = {p, &prepared, few_limit};
    run_parts(any_part, &call, (w->rows + PANEL - 1) / PANEL, p->threads);
    free(sums);
    return DONE;
}
#endif
