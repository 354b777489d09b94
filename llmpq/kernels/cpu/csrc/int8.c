/* LLM.int8() (Dettmers et al. 2022): activations at 8 bits, their outliers not.
 *
 * Every row of x is split at a threshold. Numbers below it are rounded to 8 bits with one scale a
 * row and multiplied as integers; those at or above it, and what is not finite, stay as they
 * are and are multiplied by the columns of the weight they meet. The paper splits off a whole column when
 * one row of the batch has an outlier in it; here each row splits on its own, so that a token's
 * answer does not depend on who shares its batch, and no row pays for another's outliers.
 *
 * With VNNI one instruction multiplies four unsigned bytes of a lane, the weight's codes (q + 128),
 * by four signed ones of x. Without it, pairs of 16-bit numbers are multiplied: the codes of even
 * columns, then those of odd ones, which takes a mask and a shift. The instruction for bytes would
 * saturate. The correction for unsigned codes is one number a row of x, its sum, and only the codes
 * are stored. Integer sums are exact, and the float32 operations of an answer are the same, in the
 * same order, at every width of vectors and on AMX's tiles: all processors give the same bits. */
#include "amx.h"
#include "lanes.h"
#include "step.h"

#ifdef __AVX2__
#include <math.h>
#include <stdlib.h>

/* Tiles side by side, and rows of x, of which the registers hold the sums. FEW rows take one tile
 * after the other, as they lie in memory. */
enum { GROUP = LANES == 16 && HAS_VNNI ? 4 : 1, STRIP = 6, FEW = GROUP > 1 ? 3 : 24 };
enum { WIDE = PANEL / TILE_ROWS, PARTS = TILE_ROWS / LANES, DEPTH = 256, AHEAD = 4096 };
enum { WORTH_THREADS = 1 << 15 }; /* numbers of x whose reading takes longer than waking a thread */

typedef struct {
    const Product *product;
    Prepared rows; /* of x; the type is also that of bias and y */
    const Shared *shared;
} Job;

/* ---- rows of x ------------------------------------------------------------------------------- */

INLINE vi is_outlier(const Prepared *q, vf x) {
    vf size = magnitude(x); /* "not below" is true of NaN as well */
    return ~((vi)(size < q->threshold) & (vi)(size < INFINITY));
}

INLINE void scan(const Prepared *q, int64_t m, const int type) {
    vi outliers = {0};
    vf most = {0};
    for (int64_t k = 0; k < q->columns; k += LANES) {
        vf x = load_lanes(q->x, m * q->columns + k, type);
        vi out = is_outlier(q, x);
        outliers -= out;
        most = greater((vf)(~out & (vi)magnitude(x)), most);
    }
    q->scale[m] = greatest(most) / 127;
    q->end[m] = q->start[m] + sum_of_ints(outliers);
}

/* Finds the scale of row m, and how many outliers it has: its end is its start plus so many. */
void int8_scan(const Prepared *q, int64_t m) {
    if (q->type == TYPE_BF16) scan(q, m, TYPE_BF16);
    else if (q->type == TYPE_F16) scan(q, m, TYPE_F16);
    else scan(q, m, TYPE_F32);
}

/* Writes codes of LANES columns as they are multiplied: in bytes, or in 16 bits, those of columns
 * 0, 2, 1 and 3 of every four. */
INLINE void put_codes(int8_t *to, vi code) {
#if defined(__AVX512VNNI__)
    __m128i bytes = _mm512_cvtepi32_epi8((__m512i)code);
    memcpy(to, &bytes, sizeof bytes);
#elif defined(__AVX512BW__)
    code = (vi)_mm512_shuffle_epi32((__m512i)code, _MM_PERM_DBCA);
    __m256i halves = _mm512_cvtepi32_epi16((__m512i)code);
    memcpy(to, &halves, sizeof halves);
#else
    typedef int8_t Bytes __attribute__((vector_size(VECTOR_BYTES)));
#ifdef __AVXVNNI__
    const Bytes order = {0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                         0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const __m256i places = _mm256_setr_epi32(0, 4, 0, 0, 0, 0, 0, 0);
#else
    const Bytes order = {0, 1, 8, 9, 4, 5, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0,
                         0, 1, 8, 9, 4, 5, 12, 13, 0, 0, 0, 0, 0, 0, 0, 0};
    const __m256i places = _mm256_setr_epi32(0, 1, 4, 5, 0, 0, 0, 0);
#endif
    __m256i lanes = _mm256_shuffle_epi8((__m256i)code, (__m256i)order);
    lanes = _mm256_permutevar8x32_epi32(lanes, places);
    memcpy(to, &lanes, LANES * CODE_BYTES);
#endif
}

INLINE void quantize(const Prepared *q, int64_t m, const int type) {
    int64_t columns = q->columns, at = q->start[m];
    const float steps = q->scale[m] > 0 ? 1 / q->scale[m] : 0;
    int8_t *to = q->codes + m * columns * CODE_BYTES;
    vi sum = {0};
    for (int64_t k = 0; k < columns; k += LANES, to += LANES * CODE_BYTES) {
        vf x = load_lanes(q->x, m * columns + k, type);
        vi out = is_outlier(q, x);
        vi code = within(nearest(x * steps), -127, 127) & ~out;
        sum += code;
        put_codes(to, code);
        for (uint32_t left = signs_of(out); left; left &= left - 1, at++) {
            int lane = __builtin_ctz(left);
            q->column[at] = (int32_t)(k + lane);
            q->value[at] = x[lane];
        }
    }
    q->sum[m] = sum_of_ints(sum);
}

/* Writes the codes of row m, and its outliers from its start on. */
void int8_quantize(const Prepared *q, int64_t m) {
    if (q->type == TYPE_BF16) quantize(q, m, TYPE_BF16);
    else if (q->type == TYPE_F16) quantize(q, m, TYPE_F16);
    else quantize(q, m, TYPE_F32);
}

static void scan_part(void *data, int64_t m) {
    const Job *job = data;
    int8_scan(&job->rows, m);
}

static void quantize_part(void *data, int64_t m) {
    const Job *job = data;
    int8_quantize(&job->rows, m);
}

/* ---- sums of products ------------------------------------------------------------------------ */

/* What is multiplied at once of the codes of four columns: all, or those of two as 16-bit numbers.
 * There are CODE_BYTES such pieces. */
INLINE vu piece_of(vu codes, int i) {
#if HAS_VNNI
    (void)i;
    return codes;
#else
    return i ? (vu)((vw)codes >> 8) : codes & 0x00FF00FF;
#endif
}

/* Adds the products of a piece and a word of x in every lane. */
INLINE vi dot(vi sum, vu piece, vi word) {
#if HAS_VNNI
    return dot_bytes(sum, piece, word);
#else
    sum = dot_halves(sum, (vi)piece, word);
#ifndef __AVX512F__
    __asm__("" : "+x"(sum)); /* else GCC keeps more products than there are registers before it adds */
#endif
    return sum;
#endif
}

INLINE vu load_codes(const uint8_t *from) {
    vu codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

/* A word of x: codes of the columns of a piece. */
INLINE vi word_of(const int8_t *from) {
    int32_t word;
    memcpy(&word, from, sizeof word);
    return (vi){0} + word;
}

/* Some columns of a strip of rows of x and of a group of tiles. */
typedef struct {
    const int8_t *x;
    const uint8_t *codes;
    const uint8_t *ahead; /* codes to be fetched meanwhile */
    int32_t *total;       /* [strip, PANEL], to which products are added */
    int64_t columns;
    int64_t across, down; /* bytes from a row of x, and from a row of tiles, to the next */
    int64_t pace;         /* bytes of `ahead` every four columns */
} Block;

/* VNNI's sums wait for themselves, so that there are several of each where they are few. */
INLINE void add_up(const Block *b, const int strip, const int group) {
    const int wide = group * PARTS;
    const int chains = !HAS_VNNI || strip * wide > 6 ? 1 : strip * wide > 3 ? 2 : 4;
    const int8_t *x = b->x;
    const uint8_t *codes = b->codes, *ahead = b->ahead;
    vi sum[STRIP * GROUP * PARTS * 4];
    for (int i = 0; i < strip * wide * chains; i++) sum[i] = (vi){0};
    for (int64_t k = 0; k < b->columns; k += 4 * chains)
#pragma GCC unroll 4
        for (int c = 0; c < chains; c++, codes += 64, ahead += b->pace, x += 4 * CODE_BYTES) {
#pragma GCC unroll 4
            for (int n = 0; n < group; n++) __builtin_prefetch(ahead + n * b->down, 0, ONCE);
#pragma GCC unroll 2
            for (int i = 0; i < CODE_BYTES; i++) {
                vu piece[GROUP * PARTS];
#pragma GCC unroll 4
                for (int n = 0; n < wide; n++) {
                    const uint8_t *at = codes + n / PARTS * b->down + n % PARTS * VECTOR_BYTES;
                    piece[n] = piece_of(load_codes(at), i);
                }
#pragma GCC unroll 6
                for (int m = 0; m < strip; m++) {
                    vi word = word_of(x + m * b->across + 4 * i), *to = sum + (c * strip + m) * wide;
#pragma GCC unroll 4
                    for (int n = 0; n < wide; n++) to[n] = dot(to[n], piece[n], word);
                }
            }
        }
    for (int m = 0; m < strip; m++)
        for (int n = 0; n < wide; n++) {
            int32_t *to = b->total + m * PANEL + n * LANES;
            vu all;
            memcpy(&all, to, sizeof all);
            for (int c = 0; c < chains; c++) all += (vu)sum[(c * strip + m) * wide + n];
            memcpy(to, &all, sizeof all);
        }
}

/* Functions of their own, as the sums take all registers but a few. */
typedef void (*AddUp)(const Block *);
#define ADD_UP(STRIP_, GROUP_)                                                                   \
    static __attribute__((noinline)) void add_up_##STRIP_##_by_##GROUP_(const Block *b) {        \
        add_up(b, STRIP_, GROUP_);                                                               \
    }
#define ADD_UPS(NAME, GROUP_)                                                                    \
    ADD_UP(1, GROUP_) ADD_UP(2, GROUP_) ADD_UP(3, GROUP_)                                        \
    ADD_UP(4, GROUP_) ADD_UP(5, GROUP_) ADD_UP(6, GROUP_)                                        \
    static const AddUp NAME[STRIP + 1] = {                                                       \
        0, add_up_1_by_##GROUP_, add_up_2_by_##GROUP_, add_up_3_by_##GROUP_,                     \
        add_up_4_by_##GROUP_, add_up_5_by_##GROUP_, add_up_6_by_##GROUP_,                        \
    };
ADD_UPS(by_tile, 1)
#ifdef __AVX512VNNI__
ADD_UPS(by_group, 4)
#else
#define by_group by_tile
#endif

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

/* ---- answers --------------------------------------------------------------------------------- */

/* Column k of LANES rows of the weight, in units of its scales. */
INLINE vf column_of(const Weight *w, int64_t row, int64_t k) {
    const uint8_t *vector = tile_at(w, row, k) + k % TILE_COLUMNS / 4 * 64 + row % TILE_ROWS * 4;
    vu code = load_codes(vector) >> (uint32_t)(k % 4 * 8) & 0xFF;
    return __builtin_convertvector((vi)code - 128, vf);
}

/* Adds the outliers of row m times their columns of LANES rows of the weight. */
INLINE vf add_outliers(const Job *job, int64_t m, int64_t row, const float *shared, vf y) {
    const Prepared *q = &job->rows;
    for (int64_t i = q->start[m]; i < q->end[m]; i++) {
        int32_t k = q->column[i];
        vf column = job->shared->count ? load_lanes(shared, job->shared->place[k] * PANEL, TYPE_F32)
                                       : column_of(job->product->weight, row, k);
        y = multiply_add(column, (vf){0} + q->value[i], y);
    }
    return y;
}

/* Writes the answers of row m for LANES rows of the weight. Sums of unsigned codes may have wrapped. */
INLINE void finish(const Job *job, int64_t m, int64_t row, const float *shared, vu total) {
    const Product *p = job->product;
    const Weight *w = p->weight;
    const int type = job->rows.type;
    vi sum = (vi)(total - 128 * (uint32_t)job->rows.sum[m]);
    vf y = __builtin_convertvector(sum, vf) * job->rows.scale[m];
    y = add_outliers(job, m, row, shared, y);
    vf scale = load_any(w->scales, row, w->scale_type);
    y = p->bias ? multiply_add(y, scale, load_any(p->bias, row, type)) : y * scale;
    store_typed(p->y, m * w->rows + row, LANES, typed_bits(y, type), type);
}

/* Rows to multiply at once while so many are left. One alone would wait for its own sums. */
INLINE int64_t strip_of(int64_t left) {
    return left <= STRIP ? left : left < 2 * STRIP ? (left + 1) / 2 : STRIP;
}

/* Rows [m, count) by a group of tiles. Each strip fetches a part of the columns after these: what the
 * first alone fetched, it would wait for. */
INLINE void strips(const Job *job, int64_t row, int64_t first, int64_t m, int64_t count, int64_t from,
                   int64_t end, int32_t *total, const int group) {
    const Weight *w = job->product->weight;
    const int64_t passes = (count - m + STRIP - 1) / STRIP;
    const AddUp *add_ups = group > 1 ? by_group : by_tile;
    Block b = {.codes = tile_at(w, row, from), .columns = end - from, .down = w->columns * TILE_ROWS};
    b.across = w->columns * CODE_BYTES;
    for (int64_t strip, pass = 0; m < count; m += strip, pass++) {
        strip = strip_of(count - m);
        b.x = job->rows.codes + (first + m) * b.across + from * CODE_BYTES;
        b.ahead = b.codes + AHEAD + b.columns * TILE_ROWS * pass / passes;
        b.pace = 64 / passes;
        b.total = total + m * PANEL;
        add_ups[strip](&b);
    }
}

/* `groups` groups of tiles by some rows of x. */
INLINE void panel_rows(const Job *job, int64_t row, int64_t first, int64_t count, int groups,
                       const int group) {
    int32_t total[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    int64_t columns = job->product->weight->columns;
    int64_t depth = count <= STRIP ? columns : DEPTH; /* beyond one strip, codes are read again */
    memset(total, 0, (size_t)count * PANEL * sizeof *total);
#ifdef __AMX_INT8__
    const int on_tiles = count >= AMX_ROWS && columns % AMX_COLUMNS == 0;
    if (on_tiles) shape_tiles(AMX_ROWS, 4, AMX_ROWS);
#endif
    for (int64_t k = 0; k < columns; k += depth) {
        int64_t end = k + depth < columns ? k + depth : columns;
        for (int n = 0; n < groups * group; n += group) {
            int64_t at = row + TILE_ROWS * n, m = 0;
            int32_t *to = total + TILE_ROWS * n;
#ifdef __AMX_INT8__
            for (; on_tiles && m + 2 * AMX_ROWS <= count; m += 2 * AMX_ROWS)
                multiply_amx(job, first + m, at, k, end, to + m * PANEL, 2, group);
            for (; on_tiles && m + AMX_ROWS <= count; m += AMX_ROWS)
                multiply_amx(job, first + m, at, k, end, to + m * PANEL, 1, group);
#endif
            strips(job, at, first, m, count, k, end, to, group);
        }
    }
#ifdef __AMX_INT8__
    if (on_tiles) clear_tiles();
#endif
    const int wide = groups * group * TILE_ROWS;
    float shared[MOST_SHARED * PANEL] __attribute__((aligned(64)));
    for (int i = 0; i < job->shared->count; i++)
        for (int n = 0; n < wide; n += LANES) {
            vf column = column_of(job->product->weight, row + n, job->shared->column[i]);
            memcpy(shared + i * PANEL + n, &column, sizeof column);
        }
    for (int64_t m = 0; m < count; m++)
        for (int n = 0; n < wide; n += LANES) {
            vu sum;
            memcpy(&sum, total + m * PANEL + n, sizeof sum);
            finish(job, first + m, row + n, shared + n, sum);
        }
}

static void panel_part(void *data, int64_t item) {
    const Job *job = data;
    int64_t row = item * PANEL, left = (job->product->weight->rows - row) / TILE_ROWS;
    int64_t all = job->product->count;
    int blocks = left < WIDE ? (int)left : WIDE;
    for (int n = 0; all <= FEW && n < blocks; n++)
        panel_rows(job, row + TILE_ROWS * n, 0, all, 1, 1);
    if (all <= FEW) return;
    for (int64_t first = 0; first < all; first += ROW_BLOCK) {
        int64_t count = all - first < ROW_BLOCK ? all - first : ROW_BLOCK;
        if (GROUP > 1 && blocks == WIDE) panel_rows(job, row, first, count, WIDE / GROUP, GROUP);
        else panel_rows(job, row, first, count, blocks, 1);
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
    q.codes = malloc(count * (size_t)w->columns * CODE_BYTES);
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
