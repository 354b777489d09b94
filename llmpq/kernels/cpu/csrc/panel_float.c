/* Products in float32, on any machine, of activations of any type.
 *
 * A panel of at most 64 rows of the weight is decoded a block of columns at a time into a buffer
 * that stays in the first-level cache; a few rows of x at a time go over it with all their sums in
 * registers. The codes themselves are multiplied: scale and zero come in once a block, so the
 * answer differs from the dequantized weight's by rounding in float32 only. Activations of 16 bits
 * are widened a block at a time, and their answers are rounded once.
 *
 * The vectors of the inner loops are as wide as the machine's registers: wider ones, which compilers
 * do cut up, live in memory (35 times slower with AVX2). */
#include "lanes.h"
#include "step.h"

#include <stdlib.h>

#if defined(__AVX512F__)
enum { WIDE = 4, STRIP = 6, COLUMNS = 128 };
#elif defined(__AVX2__)
enum { WIDE = 1, STRIP = 6, COLUMNS = 128 };
#else
enum { WIDE = 1, STRIP = 2, COLUMNS = 128 };
#endif
enum { PARTS = 16 / LANES }; /* registers that 16 rows of the weight fill */

typedef struct {
    const Product *product;
    const float *sums; /* [blocks, count] of x over each block of columns; not for 16 bits */
    int64_t block;
    int32_t type; /* of x, bias and y */
} Job;

INLINE vf load(const float *from) {
    vf v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE vu load_codes(const uint8_t *tile, int vector, int part) {
    vu v;
    memcpy(&v, tile + 64 * vector + 4 * LANES * part, sizeof v);
    return v;
}

/* Columns `column` and, from the high halves of the lanes, `column + 1`. */
INLINE void put_pair(float *out, int64_t stride, int column, vu words, int shift, int bits) {
    for (int half = 0; half < 2; half++) {
        vi code = (vi)((words >> (shift + 16 * half)) & ((1u << bits) - 1)) - (1 << (bits - 1));
        vf values = __builtin_convertvector(code, vf);
        memcpy(out + (column + half) * stride, &values, sizeof values);
    }
}

static void decode4(const uint8_t *tile, float *out, int64_t stride) {
    for (int part = 0; part < PARTS; part++, out += LANES)
        for (int j = 0; j < 4; j++) {
            vu words = load_codes(tile, j, part);
            for (int p = 0; p < 4; p++) put_pair(out, stride, 8 * j + 2 * p, words, 4 * p, 4);
        }
}

static void decode3(const uint8_t *tile, float *out, int64_t stride) {
    for (int part = 0; part < PARTS; part++, out += LANES) {
        vu last = {0};
        for (int j = 0; j < 3; j++) {
            vu words = load_codes(tile, j, part);
            for (int p = 0; p < 5; p++) put_pair(out, stride, 10 * j + 2 * p, words, 3 * p, 3);
            last |= ((words >> 15) & 0x10001u) << j;
        }
        put_pair(out, stride, 30, last, 0, 3);
    }
}

static void decode8(const uint8_t *tile, float *out, int64_t stride) {
    for (int part = 0; part < PARTS; part++, out += LANES)
        for (int j = 0; j < 8; j++) {
            vu words = load_codes(tile, j, part);
            for (int i = 0; i < 4; i++) {
                vi code = (vi)((words >> (8 * i)) & 255u) - 128;
                vf values = __builtin_convertvector(code, vf);
                memcpy(out + (4 * j + i) * stride, &values, sizeof values);
            }
        }
}

/* bf16 in the panels of dense_bf16.c: pairs of columns of 64 rows side by side. */
static void decode16(const Weight *w, int64_t row, int64_t column, int64_t columns, float *out,
                     int64_t stride) {
    const uint8_t *from = w->tiles + row / PANEL * w->columns * PANEL * 2 + row % PANEL * 4;
    for (int64_t k = 0; k < columns; k += 2)
        for (int part = 0; part < PARTS; part++) {
            vu words = load_codes(from + (column + k) * PANEL * 2, 0, part);
            vu even = words << 16, odd = words & 0xFFFF0000u;
            memcpy(out + k * stride + LANES * part, &even, sizeof even);
            memcpy(out + (k + 1) * stride + LANES * part, &odd, sizeof odd);
        }
}

static void decode(const Weight *w, int64_t row, int64_t column, int64_t columns, float *out,
                   int64_t stride) {
    if (w->bits == 16) {
        decode16(w, row, column, columns, out, stride);
        return;
    }
    for (int64_t k = 0; k < columns; k += TILE_COLUMNS) {
        const uint8_t *tile = tile_at(w, row, column + k);
        if (w->bits == 4) decode4(tile, out + k * stride, stride);
        else if (w->bits == 3) decode3(tile, out + k * stride, stride);
        else decode8(tile, out + k * stride, stride);
    }
}

/* Adds `sum` to 16 rows from `row` on of one row of x, scaled unless the weight is bf16. */
INLINE void add_scaled(const Job *job, const vf *sum, float x_sum, int64_t column, int64_t row,
                       float *to) {
    const Weight *w = job->product->weight;
    float scale[16], zero[16] = {0};
    if (w->bits < 16) store_floats(scale, scale_at(w, column, row));
    if (w->zeros) store_floats(zero, zero_at(w, column, row));
    for (int part = 0; part < PARTS; part++) {
        vf new = load(to + LANES * part);
        if (w->bits < 16)
            new += load(scale + LANES * part) * sum[part] + load(zero + LANES * part) * x_sum;
        else
            new += sum[part];
        memcpy(to + LANES * part, &new, sizeof new);
    }
}

/* Sums of `strip` rows of x over one block, then scaled into `total` [strip, PANEL]. */
INLINE void multiply(const Job *job, const float *panel, const float *x, int64_t stride,
                     int64_t first, int64_t column, int64_t row, float *total, const int strip,
                     const int wide) {
    vf sum[STRIP][WIDE * PARTS];
    for (int m = 0; m < strip; m++)
        for (int n = 0; n < wide * PARTS; n++) sum[m][n] = (vf){0};
    for (int64_t k = 0; k < job->block; k++)
        for (int m = 0; m < strip; m++)
            for (int n = 0; n < wide * PARTS; n++)
                sum[m][n] += x[m * stride + k] * load(panel + k * wide * 16 + n * LANES);
    const float *sums = job->sums + column / job->block * job->product->count + first;
    for (int n = 0; n < wide; n++)
        for (int m = 0; m < strip; m++)
            add_scaled(job, sum[m] + n * PARTS, job->product->weight->zeros ? sums[m] : 0, column,
                       row + 16 * n, total + m * PANEL + 16 * n);
}

/* A block of columns of some rows of x: where it lies, or widened. */
INLINE const float *block_of(const Job *job, int64_t first, int64_t count, int64_t column,
                             float *room, int64_t *stride) {
    const Product *p = job->product;
    int64_t columns = p->weight->columns;
    if (job->type == TYPE_F32) {
        *stride = columns;
        return (const float *)p->x + first * columns + column;
    }
    for (int64_t m = 0; m < count; m++)
        for (int64_t k = 0; k < job->block; k += LANES) {
            vf wide = load_any(p->x, (first + m) * columns + column + k, job->type);
            memcpy(room + m * COLUMNS + k, &wide, sizeof wide);
        }
    *stride = COLUMNS;
    return room;
}

INLINE void put_row(const Job *job, const float *total, int64_t m, int64_t row, int wide) {
    const Product *p = job->product;
    for (int n = 0; n < 16 * wide; n += LANES) {
        vf sum = load(total + n);
        if (p->bias) sum += load_any(p->bias, row + n, job->type);
        store_typed(p->y, m * p->weight->rows + row + n, LANES, typed_bits(sum, job->type), job->type);
    }
}

INLINE void panel_rows(const Job *job, int64_t row, int64_t first, int64_t count, const int wide) {
    const Weight *w = job->product->weight;
    float panel[COLUMNS * WIDE * 16] __attribute__((aligned(64)));
    float total[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    float room[ROW_BLOCK * COLUMNS] __attribute__((aligned(64)));
    memset(total, 0, (size_t)count * PANEL * sizeof *total);
    for (int64_t k = 0; k < w->columns; k += job->block) {
        for (int n = 0; n < wide; n++)
            decode(w, row + 16 * n, k, job->block, panel + 16 * n, 16 * wide);
        int64_t stride, m = 0;
        const float *x = block_of(job, first, count, k, room, &stride);
        for (; m + STRIP <= count; m += STRIP)
            multiply(job, panel, x + m * stride, stride, first + m, k, row, total + m * PANEL, STRIP,
                     wide);
        for (; m < count; m++)
            multiply(job, panel, x + m * stride, stride, first + m, k, row, total + m * PANEL, 1,
                     wide);
    }
    for (int64_t m = 0; m < count; m++) put_row(job, total + m * PANEL, first + m, row, wide);
}

static void panel_part(void *data, int64_t item) {
    const Job *job = data;
    const Weight *w = job->product->weight;
    int64_t row = item * WIDE * 16, end = row + WIDE * 16;
    for (int64_t first = 0; first < job->product->count; first += ROW_BLOCK) {
        int64_t left = job->product->count - first, count = left < ROW_BLOCK ? left : ROW_BLOCK;
        if (end <= w->rows) panel_rows(job, row, first, count, WIDE);
        else
            for (int64_t r = row; r < w->rows; r += 16) panel_rows(job, r, first, count, 1);
    }
}

/* The sums of row m of x over each block of columns. */
void float_sums(const Prepared *q, int64_t rows, int64_t m) {
    for (int64_t k = 0; k < q->columns; k += q->block) {
        vf sum[PARTS] = {{0}};
        for (int64_t i = 0; i < q->block; i += 16)
            for (int part = 0; part < PARTS; part++)
                sum[part] += load_any(q->x, m * q->columns + k + i + LANES * part, q->type);
        float one = 0;
        for (int i = 0; i < 16; i++) one += sum[i / LANES][i % LANES];
        q->sums[k / q->block * rows + m] = one;
    }
}

void float_part(const Product *p, const Prepared *q, int64_t panel) {
    Job job = {p, q->sums, q->block, q->type};
    panel_part(&job, panel);
}

int kernels_float(const Product *p, int type) {
    const Weight *w = p->weight;
    int64_t block = block_columns(w, COLUMNS), blocks = w->columns / block;
    float *sums = malloc((size_t)(blocks * p->count) * sizeof *sums);
    if (!sums) return NO_MEMORY;
    Prepared prepared = {.x = p->x, .columns = w->columns, .block = block, .sums = sums, .type = type};
    for (int64_t m = 0; w->zeros && m < p->count; m++) float_sums(&prepared, p->count, m);
    Job job = {p, sums, block, type};
    run_parts(panel_part, &job, (w->rows + WIDE * 16 - 1) / (WIDE * 16), p->threads);
    free(sums);
    return DONE;
}
