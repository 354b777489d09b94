/* Products in float32, on any machine, of activations of any type, by weights of any bits.
 *
 * A panel of at most 64 rows of the weight is decoded a block of columns at a time into a buffer
 * that stays in the first-level cache; a few rows of x at a time go over it with all their sums in
 * registers. The codes themselves are multiplied: scale and zero come in once a block, so the
 * answer differs from the dequantized weight's by rounding in float32 only. Activations of 16 bits
 * are widened a block at a time, and their answers are rounded once.
 *
 * A few rows of x meet weights of 16 bits without a panel: these are widened in registers, 16 rows as
 * one plain stream, which is what reading the weight costs. Sums are added in the same order, so a
 * row's answer has the same bits in any number of rows.
 *
 * The vectors of the inner loops are as wide as the machine's registers: wider ones, which compilers
 * do cut up, live in memory (35 times slower with AVX2). */
#include "lanes.h"
#include "step.h"

#include <stdlib.h>

#if defined(__AVX512F__)
enum { WIDE = 4, STRIP = 6, FEW_STRIP = 12, COLUMNS = 128 };
#elif defined(__AVX2__)
enum { WIDE = 1, STRIP = 6, FEW_STRIP = 5, COLUMNS = 128 };
#else
enum { WIDE = 1, STRIP = 2, FEW_STRIP = 2, COLUMNS = 128 };
#endif
enum { PARTS = 16 / LANES }; /* registers that 16 rows of the weight fill */
/* Rows of x that meet 16-bit weights without a panel, FEW_STRIP at a time; their numbers that are widened
 * at a time; and registers of sums. */
enum { FEW = 36, FEW_NUMBERS = 24 * 512, MOST_SUMS = 12 };

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
        vu words[3];
        for (int j = 0; j < 3; j++) {
            words[j] = load_codes(tile, j, part);
            for (int p = 0; p < 4; p++)
                put_pair(out, stride, 8 * j + 2 * p, words[j], p / 2 * 3 + p % 2 * 8, 3);
        }
        for (int j = 0; j < 2; j++) {
            vu codes = (words[j] >> 6 & 0x03030303u) | (words[2] >> (4 + j) & 0x04040404u);
            for (int p = 0; p < 2; p++) put_pair(out, stride, 24 + 4 * j + 2 * p, codes, 8 * p, 3);
        }
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

/* Column i of a pair, for LANES rows of 16-bit weights from row `LANES part` of 16 on. */
INLINE vf widened(const uint8_t *from, int64_t panel, int part, const int i, const int type) {
    if (type == TYPE_F16) return load_lanes(from + i * panel * 2, LANES * part, TYPE_F16);
    vu words = load_codes(from, 0, part);
    return i ? (vf)(words & 0xFFFF0000u) : (vf)(words << 16);
}

INLINE void decode16(const Weight *w, int64_t row, int64_t column, int64_t columns, float *out,
                     int64_t stride, const int type) {
    const uint8_t *from = panel_at(w, row) + column * w->panel * 2;
    for (int64_t k = 0; k < columns; k += 2, from += 4 * w->panel)
        for (int i = 0; i < 2; i++)
            for (int part = 0; part < PARTS; part++) {
                vf wide = widened(from, w->panel, part, i, type);
                memcpy(out + (k + i) * stride + LANES * part, &wide, sizeof wide);
            }
}

static void decode(const Weight *w, int64_t row, int64_t column, int64_t columns, float *out,
                   int64_t stride) {
    if (w->bits == 16) {
        if (w->scale_type == TYPE_F16) decode16(w, row, column, columns, out, stride, TYPE_F16);
        else decode16(w, row, column, columns, out, stride, TYPE_BF16);
        return;
    }
    for (int64_t k = 0; k < columns; k += TILE_COLUMNS) {
        const uint8_t *tile = tile_at(w, row, column + k);
        if (w->bits == 4) decode4(tile, out + k * stride, stride);
        else if (w->bits == 3) decode3(tile, out + k * stride, stride);
        else decode8(tile, out + k * stride, stride);
    }
}

/* Adds sums of LANES rows from `row` on, `stride` apart for rows of x, scaled unless they are bf16's. */
INLINE void add_scaled(const Job *job, const vf *sum, const float *x_sum, int64_t column,
                       int64_t row, float *total, int64_t strip, const int stride) {
    const Weight *w = job->product->weight;
    int64_t at = w->bits < 16 ? column / w->group * w->rows + row : 0;
    vf scale = {0}, zero = {0};
    if (w->bits < 16) scale = load_any(w->scales, at, w->scale_type);
    if (w->zeros) zero = load_any(w->zeros, at, w->scale_type);
    for (int64_t m = 0; m < strip; m++) {
        vf new = load(total + m * PANEL);
        vf x = zero * (w->zeros ? x_sum[m] : 0); /* rounded alike for any number of rows */
        if (w->bits < 16) new += multiply_add(scale, sum[m * stride], x);
        else new += sum[m * stride];
        memcpy(total + m * PANEL, &new, sizeof new);
    }
}

/* Sums of `strip` rows of x over one block of columns. */
INLINE void add_up(const float *panel, const float *x, int64_t stride, int64_t block, vf *out,
                   const int strip, const int across) {
    vf sum[STRIP * WIDE * PARTS];
#pragma GCC unroll 24
    for (int i = 0; i < strip * across; i++) sum[i] = (vf){0};
    for (int64_t k = 0; k < block; k++)
        for (int m = 0; m < strip; m++)
            for (int n = 0; n < across; n++)
                sum[m * across + n] += x[m * stride + k] * load(panel + (k * across + n) * LANES);
#pragma GCC unroll 24
    for (int i = 0; i < strip * across; i++) out[i] = sum[i];
}

/* Functions of their own, as the sums take all registers but those of one column. */
#define ROWS(COUNT)                                                                              \
    static __attribute__((noinline)) void add_up_##COUNT(                                        \
        const float *panel, const float *x, int64_t stride, int64_t block, vf *out, int wide) {  \
        if (WIDE == 1 || wide == WIDE) add_up(panel, x, stride, block, out, COUNT, WIDE * PARTS);             \
        else add_up(panel, x, stride, block, out, COUNT, PARTS);                                 \
    }
ROWS(1) ROWS(2)
#if defined(__AVX2__)
ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#endif
#undef ROWS

typedef void (*AddUp)(const float *, const float *, int64_t, int64_t, vf *, int);
#if defined(__AVX2__)
static const AddUp add_ups[STRIP + 1] = {0, add_up_1, add_up_2, add_up_3, add_up_4, add_up_5, add_up_6};
#else
static const AddUp add_ups[STRIP + 1] = {0, add_up_1, add_up_2};
#endif

/* A block of columns of some rows of x: where it lies, or widened; or many of them side by side, as
 * rows of x far apart take each other's place in the cache. */
INLINE const float *block_of(const Job *job, int64_t first, int64_t count, int64_t column,
                             float *room, int64_t *stride) {
    const Product *p = job->product;
    int64_t columns = p->weight->columns;
    if (job->type == TYPE_F32 && count <= STRIP) {
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

INLINE void put_row(const Job *job, const float *total, int64_t m, int64_t row, int64_t rows) {
    const Product *p = job->product;
    int64_t at = m * p->weight->rows + row, n = 0;
    for (; n + LANES <= rows; n += LANES) {
        vf sum = load(total + n);
        if (p->bias) sum += load_any(p->bias, row + n, job->type);
        store_typed(p->y, at + n, LANES, typed_bits(sum, job->type), job->type);
    }
    for (; n < rows; n++) { /* of 16-bit weights, whose last panel may be filled up */
        float sum = total[n] + (p->bias ? load_one(p->bias, row + n, job->type) : 0);
        store_typed(p->y, at + n, 1, typed_bits((vf){0} + sum, job->type), job->type);
    }
}

/* One block of columns of 16 `wide` rows from `row` on. */
INLINE void block_rows(const Job *job, const float *x, int64_t stride, int64_t column, int64_t row,
                       int64_t first, int64_t count, float *total, const int wide) {
    float panel[COLUMNS * WIDE * 16] __attribute__((aligned(64)));
    for (int n = 0; n < wide; n++)
        decode(job->product->weight, row + 16 * n, column, job->block, panel + 16 * n, 16 * wide);
    for (int64_t m = 0; m < count; m += STRIP) {
        vf sum[STRIP * WIDE * PARTS];
        int64_t strip = count - m < STRIP ? count - m : STRIP;
        add_ups[strip](panel, x + m * stride, stride, job->block, sum, wide);
        const float *sums = job->sums + column / job->block * job->product->count + first + m;
        for (int n = 0; n < wide * PARTS; n++)
            add_scaled(job, sum + n, sums, column, row + LANES * n, total + m * PANEL + LANES * n,
                       strip, wide * PARTS);
    }
}

/* ---- few rows by 16-bit weights --------------------------------------------------------------- */

/* 16 rows of a weight on their way through the registers. */
typedef struct {
    const Weight *weight;
    const uint8_t *panel;
    const uint8_t *ahead; /* what is fetched meanwhile, `ahead_step` bytes for every two columns */
    int64_t ahead_step;
    int64_t from, end, block; /* columns, and how many of them have one sum */
    const float *x;           /* rows of numbers from column `from` on, `stride` apart */
    int64_t stride;
} Streamed;

/* Blocks of columns that are summed at once, for as many independent sums as the processor can add. */
INLINE int across_of(int64_t strip) {
    int64_t sums = strip * PARTS; /* registers of a block */
    return sums == 1 ? 8 : sums == 2 ? 4 : sums <= 6 ? 2 : 1;
}

/* Adds `across` blocks of columns from column `first` on, times `strip` rows of x. The sums of a block
 * are added one after the other: those of several at once keep the processor busy meanwhile. `block`,
 * `panel` and `step` are those of s, as constants where they are the usual ones. */
INLINE void stream_blocks(const Streamed *s, int64_t first, const uint8_t *ahead, float *total,
                          const int strip, const int across, const int type, const int64_t block,
                          const int64_t panel, const int64_t step) {
    vf sum[MOST_SUMS];
    const int64_t stride = s->stride;
    const float *x = s->x + first - s->from;
    const uint8_t *from = s->panel + first * panel * 2;
#pragma GCC unroll 24
    for (int i = 0; i < across * strip * PARTS; i++) sum[i] = (vf){0};
    for (int64_t k = 0; k < block; k += 2, x += 2, from += 4 * panel, ahead += step)
#pragma GCC unroll 8
        for (int b = 0; b < across; b++) {
            const float *at = x + b * block;
            vf *into = sum + b * strip * PARTS;
            __builtin_prefetch(ahead + b * (block / 2 * step), 0, ONCE);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                vf wide[PARTS];
#pragma GCC unroll 4
                for (int part = 0; part < PARTS; part++)
                    wide[part] = widened(from + b * block * panel * 2, panel, part, i, type);
#pragma GCC unroll 12
                for (int m = 0; m < strip; m++)
#pragma GCC unroll 4
                    for (int part = 0; part < PARTS; part++) {
                        into[m * PARTS + part] += at[m * stride + i] * wide[part];
                        /* In this order: else GCC keeps sums on the stack, each add waiting for a store. */
                        if (PARTS > 1 && strip > 2) __asm__("" : "+v"(into[m * PARTS + part]));
                    }
            }
        }
#pragma GCC unroll 24
    for (int i = 0; i < across * strip * PARTS; i++) {
        float *to = total + i / PARTS % strip * PANEL + LANES * (i % PARTS);
        vf new = load(to) + sum[i];
        memcpy(to, &new, sizeof new);
    }
}

INLINE void stream_columns(const Streamed *s, float *total, const int strip, const int type,
                           const int64_t block, const int64_t panel, const int64_t step) {
    const int across = across_of(strip);
    const uint8_t *ahead = s->ahead;
    int64_t first = s->from;
    for (; first + across * block <= s->end; first += across * block, ahead += across * block / 2 * step)
        stream_blocks(s, first, ahead, total, strip, across, type, block, panel, step);
    for (; first < s->end; first += block, ahead += block / 2 * step)
        stream_blocks(s, first, ahead, total, strip, 1, type, block, panel, step);
}

/* Adds these columns times `strip` rows of x. */
INLINE void stream(const Streamed *s, float *total, const int strip, const int type) {
    int64_t panel = s->weight->panel;
    int is_usual = s->block == COLUMNS && panel == 16;
    if (is_usual && s->ahead_step == 64) stream_columns(s, total, strip, type, COLUMNS, 16, 64);
    else if (is_usual) stream_columns(s, total, strip, type, COLUMNS, 16, s->ahead_step);
    else stream_columns(s, total, strip, type, s->block, panel, s->ahead_step);
}

#define STREAM(COUNT)                                                                             \
    static __attribute__((noinline)) void stream_##COUNT(const Streamed *s, float *total) {        \
        if (s->weight->scale_type == TYPE_F16) stream(s, total, COUNT, TYPE_F16);                  \
        else stream(s, total, COUNT, TYPE_BF16);                                                   \
    }
STREAM(1) STREAM(2)
#if defined(__AVX2__)
STREAM(3) STREAM(4) STREAM(5)
#endif
#if defined(__AVX512F__)
STREAM(6) STREAM(7) STREAM(8) STREAM(9) STREAM(10) STREAM(11) STREAM(12)
#endif
#undef STREAM

typedef void (*Stream)(const Streamed *, float *);
static const Stream streams[FEW_STRIP + 1] = {
    0, stream_1, stream_2,
#if defined(__AVX2__)
    stream_3, stream_4, stream_5,
#endif
#if defined(__AVX512F__)
    stream_6, stream_7, stream_8, stream_9, stream_10, stream_11, stream_12,
#endif
};

/* Whether rows of x meet the weight without a panel. */
INLINE int is_few(const Product *p) {
    return p->weight->bits == 16 && p->count <= FEW;
}

/* 16 rows of the weight by all rows of x. One strip of these fetches what it reads next; several fetch
 * `next`, which all of them read later, a share each. */
static void stream_strips(Streamed *s, int64_t count, const uint8_t *next, float *total) {
    int64_t strips = (count + FEW_STRIP - 1) / FEW_STRIP, line = s->weight->panel * 4;
    const float *x = s->x;
    s->ahead = s->panel + (s->from + across_of(count) * s->block) * (line / 2);
    s->ahead_step = strips > 1 ? line / strips : line;
    for (int64_t i = 0; i < strips; i++) {
        int64_t m = i * count / strips, rows = (i + 1) * count / strips - m; /* even strips */
        s->x = x + m * s->stride;
        if (strips > 1) s->ahead = next + i * ((s->end - s->from) / 2 * line / strips);
        streams[rows](s, total + m * PANEL);
    }
    s->x = x;
}

static void few_rows(const Job *job, int64_t row, int64_t end) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    float total[FEW * PANEL] __attribute__((aligned(64)));
    float x[FEW_NUMBERS] __attribute__((aligned(64)));
    int64_t most = FEW_NUMBERS / p->count / COLUMNS * COLUMNS;
    int64_t width = w->columns < most ? w->columns : most;
    memset(total, 0, (size_t)p->count * PANEL * sizeof *total);
    Streamed s = {.weight = w, .block = job->block, .x = x, .stride = width};
    for (s.from = 0; s.from < w->columns; s.from = s.end) {
        s.end = s.from + width < w->columns ? s.from + width : w->columns;
        for (int64_t m = 0; m < p->count; m++)
            for (int64_t k = s.from; k < s.end; k += LANES) {
                vf wide = load_any(p->x, m * w->columns + k, job->type);
                memcpy(x + m * width + k - s.from, &wide, sizeof wide);
            }
        for (int64_t r = row; r < end; r += 16) {
            s.panel = panel_at(w, r);
            int64_t at = r + 16 < end ? s.from : s.end < w->columns ? s.end : 0;
            int64_t next = r + 16 < w->rows && (r + 16 < end || !at) ? r + 16 : row;
            stream_strips(&s, p->count, panel_at(w, next) + at * w->panel * 2, total + r - row);
        }
    }
    for (int64_t m = 0; m < p->count; m++) put_row(job, total + m * PANEL, m, row, end - row);
}

/* ---- any number of rows ----------------------------------------------------------------------- */

static void panel_rows(const Job *job, int64_t row, int64_t end, int64_t first, int64_t count) {
    float total[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    float room[ROW_BLOCK * COLUMNS] __attribute__((aligned(64)));
    memset(total, 0, (size_t)count * PANEL * sizeof *total);
    for (int64_t k = 0; k < job->product->weight->columns; k += job->block) {
        int64_t stride, r = row;
        const float *x = block_of(job, first, count, k, room, &stride);
        for (; r + 16 * WIDE <= end; r += 16 * WIDE)
            block_rows(job, x, stride, k, r, first, count, total + r - row, WIDE);
        for (; r < end; r += 16) /* the last panel of 16 bits is filled up */
            block_rows(job, x, stride, k, r, first, count, total + r - row, 1);
    }
    for (int64_t m = 0; m < count; m++) put_row(job, total + m * PANEL, first + m, row, end - row);
}

/* Rows of the weight in a part: more of them where rows of x are moved or widened for each part. */
INLINE int64_t part_rows(const Product *p) {
    return p->weight->bits < 16 && p->count <= STRIP ? 16 * WIDE : PANEL;
}

static void panel_part(void *data, int64_t item) {
    const Job *job = data;
    const Product *p = job->product;
    int64_t row = item * part_rows(p), end = row + part_rows(p);
    if (end > p->weight->rows) end = p->weight->rows;
    if (is_few(p)) {
        few_rows(job, row, end);
        return;
    }
    for (int64_t first = 0; first < p->count; first += ROW_BLOCK) {
        int64_t left = p->count - first;
        panel_rows(job, row, end, first, left < ROW_BLOCK ? left : ROW_BLOCK);
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

int64_t float_parts(const Product *p) {
    return (p->weight->rows + part_rows(p) - 1) / part_rows(p);
}

/* `q`: null for 16 bits; `type`: of x, bias and y. */
void float_part(const Product *p, const Prepared *q, int type, int64_t item) {
    Job job = {p, q ? q->sums : 0, block_columns(p->weight, COLUMNS), type};
    panel_part(&job, item);
}

int kernels_float(const Product *p, int type) {
    const Weight *w = p->weight;
    int64_t block = block_columns(w, COLUMNS), blocks = w->columns / block;
    float *sums = malloc((size_t)(blocks * p->count) * sizeof *sums);
    if (!sums) return NO_MEMORY;
    Prepared prepared = {.x = p->x, .columns = w->columns, .block = block, .sums = sums, .type = type};
    for (int64_t m = 0; w->zeros && m < p->count; m++) float_sums(&prepared, p->count, m);
    Job job = {p, sums, block, type};
    run_parts(panel_part, &job, float_parts(p), p->threads);
    free(sums);
    return DONE;
}
