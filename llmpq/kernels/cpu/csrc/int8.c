/* LLM.int8() (Dettmers et al. 2022): activations at 8 bits, their outliers not.
 *
 * Every row of x is split at a threshold. Numbers below it are rounded to 8 bits with one scale a
 * row and multiplied as integers (VNNI); those at or above it, and what is not finite, stay as they
 * are and are multiplied by the columns of the weight they meet. The paper splits off a whole column when
 * one row of the batch has an outlier in it; here each row splits on its own, so that a token's
 * answer does not depend on who shares its batch, and no row pays for another's outliers.
 *
 * Integer products need one unsigned side. That is the weight's (code = q + 128), so the correction
 * is one number a row of x, its sum, and only the codes are stored. */
#include "amx.h"
#include "step.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>

enum { WIDE = 4, STRIP = 6, FEW = 3, CHAINS = 4, DEPTH = 256, AHEAD = 4096 };
enum { WORTH_THREADS = 1 << 15 }; /* numbers of x whose reading takes longer than waking a thread */

typedef struct {
    const Product *product;
    Prepared rows; /* of x; the type is also that of bias and y */
    const Shared *shared;
} Job;

/* ---- rows of x ------------------------------------------------------------------------------- */

INLINE __m512 load_x(const Prepared *q, int64_t m, int64_t k) {
    return (__m512)load_typed(q->x, m * q->columns + k, q->type);
}

INLINE __mmask16 is_outlier(const Prepared *q, __m512 x) {
    __m512 size = _mm512_abs_ps(x); /* "not below" is true of NaN as well */
    return _mm512_cmp_ps_mask(size, _mm512_set1_ps(q->threshold), _CMP_NLT_UQ) |
           _mm512_cmp_ps_mask(size, _mm512_set1_ps(INFINITY), _CMP_NLT_UQ);
}

/* Finds the scale of row m, and how many outliers it has: its end is its start plus so many. */
void int8_scan(const Prepared *q, int64_t m) {
    int64_t outliers = 0;
    __m512 most = _mm512_setzero_ps();
    for (int64_t k = 0; k < q->columns; k += 16) {
        __m512 x = load_x(q, m, k);
        __mmask16 out = is_outlier(q, x);
        outliers += __builtin_popcount(out);
        most = _mm512_mask_max_ps(most, (__mmask16)~out, most, _mm512_abs_ps(x));
    }
    q->scale[m] = _mm512_reduce_max_ps(most) / 127;
    q->end[m] = q->start[m] + outliers;
}

/* Writes the codes of row m, and its outliers from its start on. */
void int8_quantize(const Prepared *q, int64_t m) {
    int64_t columns = q->columns, at = q->start[m];
    __m512 steps = _mm512_set1_ps(q->scale[m] > 0 ? 1 / q->scale[m] : 0);
    __m512i sum = _mm512_setzero_si512(), most = _mm512_set1_epi32(127);
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t k = 0; k < columns; k += 16) {
        __m512 x = load_x(q, m, k);
        __mmask16 out = is_outlier(q, x);
        __m512i code = _mm512_maskz_cvtps_epi32((__mmask16)~out, _mm512_mul_ps(x, steps));
        code = _mm512_max_epi32(_mm512_min_epi32(code, most), _mm512_set1_epi32(-127));
        sum = _mm512_add_epi32(sum, code);
        _mm_storeu_si128((__m128i *)(q->codes + m * columns + k), _mm512_cvtepi32_epi8(code));
        if (out) {
            __m512i column = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)k));
            _mm512_mask_compressstoreu_epi32(q->column + at, out, column);
            _mm512_mask_compressstoreu_ps(q->value + at, out, x);
            at += __builtin_popcount(out);
        }
    }
    q->sum[m] = _mm512_reduce_add_epi32(sum);
}

static void scan_part(void *data, int64_t m) {
    const Job *job = data;
    int8_scan(&job->rows, m);
}

static void quantize_part(void *data, int64_t m) {
    const Job *job = data;
    int8_quantize(&job->rows, m);
}

/* ---- products -------------------------------------------------------------------------------- */

INLINE void multiply(const Job *job, int64_t first, int64_t row, int64_t from, int64_t end,
                     int32_t *total, const int strip, const int wide) {
    const Weight *w = job->product->weight;
    const int8_t *x = job->rows.codes + first * w->columns;
    int64_t down = w->columns * TILE_ROWS;
    __m512i sum[STRIP][WIDE];
    for (int m = 0; m < strip; m++)
        for (int n = 0; n < wide; n++) sum[m][n] = _mm512_load_si512(total + m * PANEL + 16 * n);
    const uint8_t *tile = tile_at(w, row, from);
    for (int64_t k = from; k < end; k += 4, tile += 64) {
        __m512i code[WIDE];
        for (int n = 0; n < wide; n++) {
            code[n] = _mm512_loadu_si512(tile + n * down);
            __builtin_prefetch(tile + n * down + AHEAD, 0, ONCE);
        }
#pragma GCC unroll 6
        for (int m = 0; m < strip; m++) {
            int32_t four;
            memcpy(&four, x + m * w->columns + k, 4);
            __m512i spread = _mm512_set1_epi32(four);
#pragma GCC unroll 4
            for (int n = 0; n < wide; n++)
                sum[m][n] = _mm512_dpbusd_epi32(sum[m][n], code[n], spread);
        }
    }
    for (int m = 0; m < strip; m++)
        for (int n = 0; n < wide; n++) _mm512_store_si512(total + m * PANEL + 16 * n, sum[m][n]);
}

#ifdef __AMX_INT8__
/* 32 rows on tiles, or 16: columns in steps of 64, which are whole tiles of the weight side by side. */
INLINE void multiply_amx(const Job *job, int64_t first, int64_t row, int64_t from, int64_t end,
                         int32_t *total, const int strips, const int wide) {
    const Weight *w = job->product->weight;
    const int8_t *x = job->rows.codes + first * w->columns, *below = x + AMX_ROWS * w->columns;
    int32_t *lower = total + AMX_ROWS * PANEL;
    int64_t down = w->columns * TILE_ROWS;
    for (int n = 0; n < wide; n += 2) {
        const uint8_t *tile = tile_at(w, row + 16 * n, from);
        int32_t *to = total + 16 * n, *lower_to = lower + 16 * n;
        TILE_LOAD(0, to, 4 * PANEL);
        if (wide > 1) TILE_LOAD(1, to + 16, 4 * PANEL);
        if (strips > 1) TILE_LOAD(2, lower_to, 4 * PANEL);
        if (strips > 1 && wide > 1) TILE_LOAD(3, lower_to + 16, 4 * PANEL);
        for (int64_t k = from; k < end; k += AMX_COLUMNS, tile += AMX_COLUMNS * TILE_ROWS) {
            TILE_LOAD(6, x + k, w->columns);
            TILE_LOAD(4, tile, 64);
            TILE_MULTIPLY(0, 6, 4);
            if (wide > 1) {
                TILE_LOAD(5, tile + down, 64);
                TILE_MULTIPLY(1, 6, 5);
            }
            if (strips > 1) {
                TILE_LOAD(7, below + k, w->columns);
                TILE_MULTIPLY(2, 7, 4);
                if (wide > 1) TILE_MULTIPLY(3, 7, 5);
            }
        }
        TILE_STORE(0, to, 4 * PANEL);
        if (wide > 1) TILE_STORE(1, to + 16, 4 * PANEL);
        if (strips > 1) TILE_STORE(2, lower_to, 4 * PANEL);
        if (strips > 1 && wide > 1) TILE_STORE(3, lower_to + 16, 4 * PANEL);
    }
}
#endif

INLINE __m512 column_of(const Weight *w, int64_t row, int64_t k) {
    const uint8_t *vector = tile_at(w, row, k) + k % TILE_COLUMNS / 4 * 64;
    __m512i words = _mm512_srl_epi32(_mm512_loadu_si512(vector), _mm_cvtsi32_si128(k % 4 * 8));
    __m512i code = _mm512_and_si512(words, _mm512_set1_epi32(0xFF));
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(128)));
}

/* Adds the outliers of row m times their columns of 16 rows of the weight, in units of its scales. */
INLINE __m512 add_outliers(const Job *job, int64_t m, int64_t row, const float *shared, __m512 y) {
    const Prepared *q = &job->rows;
    for (int64_t i = q->start[m]; i < q->end[m]; i++) {
        int32_t k = q->column[i];
        __m512 column = job->shared->count ? _mm512_load_ps(shared + job->shared->place[k] * PANEL)
                                           : column_of(job->product->weight, row, k);
        y = _mm512_fmadd_ps(column, _mm512_set1_ps(q->value[i]), y);
    }
    return y;
}

INLINE void finish(const Job *job, int64_t m, int64_t row, const float *shared, __m512i total) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    total = _mm512_sub_epi32(total, _mm512_set1_epi32(128 * job->rows.sum[m]));
    __m512 y = _mm512_mul_ps(_mm512_cvtepi32_ps(total), _mm512_set1_ps(job->rows.scale[m]));
    y = _mm512_mul_ps(add_outliers(job, m, row, shared, y), (__m512)scale_at(w, 0, row));
    if (p->bias) y = _mm512_add_ps(y, (__m512)load_typed(p->bias, row, job->rows.type));
    int64_t at = m * w->rows + row;
    if (job->rows.type == TYPE_F32) _mm512_storeu_ps((float *)p->y + at, y);
    else _mm256_storeu_si256((__m256i *)((uint16_t *)p->y + at), (__m256i)narrowed((v16f)y));
}

/* Up to FEW rows take one row of tiles after the other, as they lie in memory; sums of every fourth
 * vector of codes do not wait for each other. */
INLINE void few_rows(const Job *job, int64_t row, const int count) {
    const int64_t columns = job->product->weight->columns;
    const uint8_t *tile = tile_at(job->product->weight, row, 0);
    __m512i sum[FEW][CHAINS];
    for (int m = 0; m < count; m++)
        for (int c = 0; c < CHAINS; c++) sum[m][c] = _mm512_setzero_si512();
    for (int64_t k = 0; k < columns; k += 4 * CHAINS, tile += 64 * CHAINS)
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; c++) {
            __m512i code = _mm512_loadu_si512(tile + 64 * c);
            __builtin_prefetch(tile + 64 * c + AHEAD, 0, ONCE);
#pragma GCC unroll 3
            for (int m = 0; m < count; m++) {
                int32_t four;
                memcpy(&four, job->rows.codes + m * columns + k + 4 * c, 4);
                sum[m][c] = _mm512_dpbusd_epi32(sum[m][c], code, _mm512_set1_epi32(four));
            }
        }
    for (int m = 0; m < count; m++) {
        __m512i front = _mm512_add_epi32(sum[m][0], sum[m][1]);
        __m512i back = _mm512_add_epi32(sum[m][2], sum[m][3]);
        finish(job, m, row, 0, _mm512_add_epi32(front, back));
    }
}

INLINE void panel_rows(const Job *job, int64_t row, int64_t first, int64_t count, const int wide) {
    int32_t total[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    int64_t columns = job->product->weight->columns;
    int64_t depth = count <= STRIP ? columns : DEPTH; /* beyond one strip, codes are read again */
    memset(total, 0, (size_t)count * PANEL * sizeof *total);
#ifdef __AMX_INT8__
    const int on_tiles = count >= AMX_ROWS && columns % AMX_COLUMNS == 0;
    if (on_tiles) shape_tiles(AMX_ROWS, 4, AMX_ROWS);
#endif
    for (int64_t k = 0; k < columns; k += depth) {
        int64_t end = k + depth < columns ? k + depth : columns, m = 0;
#ifdef __AMX_INT8__
        for (; on_tiles && m + 2 * AMX_ROWS <= count; m += 2 * AMX_ROWS)
            multiply_amx(job, first + m, row, k, end, total + m * PANEL, 2, wide);
        for (; on_tiles && m + AMX_ROWS <= count; m += AMX_ROWS)
            multiply_amx(job, first + m, row, k, end, total + m * PANEL, 1, wide);
#endif
        for (; m + STRIP <= count; m += STRIP)
            multiply(job, first + m, row, k, end, total + m * PANEL, STRIP, wide);
        switch (count - m) { /* codes are read once for them, whatever their number */
        case 1: multiply(job, first + m, row, k, end, total + m * PANEL, 1, wide); break;
        case 2: multiply(job, first + m, row, k, end, total + m * PANEL, 2, wide); break;
        case 3: multiply(job, first + m, row, k, end, total + m * PANEL, 3, wide); break;
        case 4: multiply(job, first + m, row, k, end, total + m * PANEL, 4, wide); break;
        case 5: multiply(job, first + m, row, k, end, total + m * PANEL, 5, wide); break;
        }
    }
#ifdef __AMX_INT8__
    if (on_tiles) clear_tiles();
#endif
    float shared[MOST_SHARED * PANEL] __attribute__((aligned(64)));
    for (int i = 0; i < job->shared->count; i++)
        for (int n = 0; n < wide; n++) {
            __m512 column = column_of(job->product->weight, row + 16 * n, job->shared->column[i]);
            _mm512_store_ps(shared + i * PANEL + 16 * n, column);
        }
    for (int64_t m = 0; m < count; m++)
        for (int n = 0; n < wide; n++) {
            __m512i sum = _mm512_load_si512(total + m * PANEL + 16 * n);
            finish(job, first + m, row + 16 * n, shared + 16 * n, sum);
        }
}

static void panel_part(void *data, int64_t item) {
    const Job *job = data;
    int64_t row = item * PANEL, rows = job->product->weight->rows, all = job->product->count;
    int64_t end = row + PANEL < rows ? row + PANEL : rows;
    for (int64_t r = row; all <= FEW && r < end; r += TILE_ROWS)
        switch (all) {
        case 1: few_rows(job, r, 1); break;
        case 2: few_rows(job, r, 2); break;
        case 3: few_rows(job, r, 3); break;
        }
    if (all <= FEW) return;
    for (int64_t first = 0; first < all; first += ROW_BLOCK) {
        int64_t count = all - first < ROW_BLOCK ? all - first : ROW_BLOCK;
        if (row + PANEL <= rows) panel_rows(job, row, first, count, WIDE);
        else
            for (int64_t r = row; r < end; r += TILE_ROWS) panel_rows(job, r, first, count, 1);
    }
}

static int row_threads(const Product *p) {
    return p->count * p->weight->columns < WORTH_THREADS ? 1 : p->threads;
}

static int find_outliers(Job *job) {
    Prepared *q = &job->rows;
    int64_t count = job->product->count, found = 0;
    memset(q->start, 0, (size_t)count * sizeof *q->start);
    run_parts(scan_part, job, count, row_threads(job->product));
    for (int64_t m = 0; m < count; m++) {
        q->start[m] = found;
        q->end[m] = found += q->end[m];
    }
    q->column = malloc((size_t)(found + 1) * sizeof *q->column);
    q->value = malloc((size_t)(found + 1) * sizeof *q->value);
    return q->column && q->value;
}

/* Outliers sit in the same columns of most rows: number those columns, unless they are many. */
void share_columns(Shared *shared, const Prepared *q, int64_t rows) {
    enum { NONE = 255 };
    shared->count = 0;
    if (rows <= STRIP) return;
    int32_t places = 0;
    int64_t all = 0;
    memset(shared->place, NONE, (size_t)q->columns);
    for (int64_t m = 0; m < rows; m++) {
        all += q->end[m] - q->start[m];
        for (int64_t i = q->start[m]; i < q->end[m]; i++) {
            int32_t k = q->column[i];
            if (shared->place[k] != NONE) continue;
            if (places == MOST_SHARED) return;
            shared->column[places] = k, shared->place[k] = (uint8_t)places++;
        }
    }
    if (all >= rows) shared->count = places;
}

void int8_part(const Product *p, const Prepared *q, const Shared *shared, int64_t panel) {
    Job job = {.product = p, .rows = *q, .shared = shared};
    panel_part(&job, panel);
}

int kernels_int8(const Product *p, float threshold, int type) {
    const Weight *w = p->weight;
    size_t count = (size_t)p->count;
    Prepared q = {.x = p->x, .columns = w->columns, .threshold = threshold, .type = type};
    Shared shared = {.place = malloc((size_t)w->columns)};
    q.codes = malloc(count * (size_t)w->columns);
    q.scale = malloc(count * sizeof *q.scale);
    q.sum = malloc(count * sizeof *q.sum);
    q.start = malloc(count * sizeof *q.start);
    q.end = malloc(count * sizeof *q.end);
    Job job = {.product = p, .rows = q, .shared = &shared};
    int ready = shared.place && q.codes && q.scale && q.sum && q.start && q.end;
    ready = ready && find_outliers(&job);
    if (ready) {
        run_parts(quantize_part, &job, p->count, row_threads(p));
        share_columns(&shared, &job.rows, p->count);
        run_parts(panel_part, &job, (w->rows + PANEL - 1) / PANEL, p->threads);
    }
    free(q.codes), free(q.scale), free(q.sum), free(q.start), free(q.end), free(shared.place);
    free(job.rows.column), free(job.rows.value);
    return ready ? DONE : NO_MEMORY;
}
#endif
