/* 3- and 4-bit weights, activations at 8 bits.
 *
 * Every row of x is cut into blocks of up to 128 columns, as far as a scale of the weight goes, each
 * rounded to 8 bits with a scale of its own. A row's answer depends on no other row, and an outlier
 * costs its own block alone its precision. Codes of the weight are unsigned bytes after a mask and a
 * shift, four of a row in a 32-bit lane. Integer sums become float32 once a block:
 *   y = sum over blocks of scale (sum - 2^(b-1) x) + zero x, x the sum of the block's activations.
 * The order in which a tile's bytes come decides the order of x's codes.
 *
 * With VNNI one instruction adds the four products of every lane. Without it, half lanes of 16 bits
 * add the 16 products of 32 columns that fall to them: at most 16 * 15 * 128 = 30,720, below 2^15, so
 * that none saturates. Integer sums are exact either way, and the float32 operations of an output are
 * the same, in the same order, at every width of vectors and on AMX's tiles: all processors give the
 * same bits. */
#include "amx.h"
#include "lanes.h"
#include "step.h"

#ifdef __AVX2__
#include <math.h>
#include <stdlib.h>

/* Tiles side by side, and rows of x, of which the registers hold the sums. FEW rows take one tile
 * after the other, as they lie in memory; up to MOST_FEW do so several times, as a row of tiles stays
 * in the first-level cache. */
#if defined(__AMX_INT8__)
enum { GROUP = 4, STRIP = 3, FEW = 8, MOST_FEW = AMX_ROWS - 1, SIDE_BY_SIDE = 0 };
#elif defined(__AVX512BW__)
enum { GROUP = 4, STRIP = 3, FEW = 8, MOST_FEW = 24, SIDE_BY_SIDE = 0 };
#else
enum { GROUP = 1, STRIP = 6, FEW = 4, MOST_FEW = 4, SIDE_BY_SIDE = 1 };
#endif
enum { WIDE = PANEL / TILE_ROWS, PARTS = TILE_ROWS / LANES, PIECE = TILE_COLUMNS / LANES };
enum { QUADS = TILE_COLUMNS / 4, AHEAD = 3072 };
enum { WORTH_THREADS = 1 << 15 }; /* numbers of x whose reading takes longer than waking a thread */

typedef struct {
    const Product *product;
    Prepared rows; /* of x */
} Job;

typedef int8_t Codes __attribute__((vector_size(TILE_COLUMNS)));

/* ---- rows of x ------------------------------------------------------------------------------- */

/* Where `together` leaves a column. */
#define AT(COLUMN) (LANES == 16 ? COLUMN : 16 * (COLUMN % 8 / 4) + 4 * (COLUMN / 8) + COLUMN % 4)
#define FOUR(A, B, C, D) AT(A), AT(B), AT(C), AT(D)

/* Columns of a tile in the order of the bytes of its quads. */
static const Codes order_of_4 = {
    FOUR(0, 4, 1, 5),     FOUR(2, 6, 3, 7),     FOUR(8, 12, 9, 13),   FOUR(10, 14, 11, 15),
    FOUR(16, 20, 17, 21), FOUR(18, 22, 19, 23), FOUR(24, 28, 25, 29), FOUR(26, 30, 27, 31),
};
static const Codes order_of_3 = {
    FOUR(0, 2, 1, 3),     FOUR(4, 6, 5, 7),     FOUR(8, 10, 9, 11),   FOUR(12, 14, 13, 15),
    FOUR(16, 18, 17, 19), FOUR(20, 22, 21, 23), FOUR(24, 26, 25, 27), FOUR(28, 30, 29, 31),
};

/* The codes of 32 columns as bytes, in an order of their own. */
INLINE Codes together(const vi *code) {
#ifdef __AVX512F__
    __m128i front = _mm512_cvtsepi32_epi8((__m512i)code[0]);
    return (Codes)_mm256_set_m128i(_mm512_cvtsepi32_epi8((__m512i)code[1]), front);
#else
    __m256i front = _mm256_packs_epi32((__m256i)code[0], (__m256i)code[1]);
    __m256i back = _mm256_packs_epi32((__m256i)code[2], (__m256i)code[3]);
    return (Codes)_mm256_packs_epi16(front, back);
#endif
}

/* Codes of row m, a scale for each block, and the sums of the blocks' codes times their scales. All
 * rows of a block lie together, as a product reads them. */
INLINE void codes_of(const Prepared *q, int64_t rows, int64_t m, const int type) {
    const Codes order = q->bits == 3 ? order_of_3 : order_of_4;
    const int64_t blocks = q->columns / q->block;
    vf finite = {0};
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t from = m * q->columns + b * q->block;
        int8_t *to = q->codes + (b * rows + m) * q->block;
        vf most = {0};
        for (int64_t k = 0; k < q->block; k += LANES) {
            vf x = load_lanes(q->x, from + k, type);
            finite += x * 0;
            most = greater(magnitude(x), most);
        }
        float size = greatest(most), steps = size > 0 ? 127 / size : 0;
        vi sum = {0};
        for (int64_t k = 0; k < q->block; k += TILE_COLUMNS) {
            vi code[PIECE];
            for (int i = 0; i < PIECE; i++)
                sum += code[i] = nearest(load_lanes(q->x, from + k + LANES * i, type) * steps);
            Codes codes = __builtin_shuffle(together(code), order);
            memcpy(to + k, &codes, sizeof codes);
        }
        q->scale[b * rows + m] = size / 127;
        q->sums[b * rows + m] = size / 127 * (float)sum_of_ints(sum);
    }
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += finite[i];
    if (sum == 0) return;
    for (int64_t b = 0; b < blocks; b++) q->scale[b * rows + m] = sum;
}

/* Rounds row m. A row with a number that is not finite has scales that are none. */
void block_codes(const Prepared *q, int64_t rows, int64_t m) {
    if (q->type == TYPE_BF16) codes_of(q, rows, m, TYPE_BF16);
    else if (q->type == TYPE_F16) codes_of(q, rows, m, TYPE_F16);
    else codes_of(q, rows, m, TYPE_F32);
}

/* ---- sums of products ------------------------------------------------------------------------ */

/* Sums of integers come in the order in which they are written: the compiler would keep all products
 * on the stack to add them as a tree, which takes up to 1.5 times as long. */
INLINE vi in_order(vi sum) {
    __asm__("" : "+v"(sum));
    return sum;
}

/* Adds products of four codes and four of x in every lane: the 8 quads of 32 columns, from 0 on. */
INLINE vi dot(vi sum, vu codes, vi four) {
#if HAS_VNNI
    return dot_bytes(sum, codes, four);
#elif defined(__AVX512BW__)
    __m512i pairs = _mm512_maddubs_epi16((__m512i)codes, (__m512i)four);
    return in_order((vi)_mm512_add_epi16((__m512i)sum, pairs));
#else
    __m256i pairs = _mm256_maddubs_epi16((__m256i)codes, (__m256i)four);
    return in_order((vi)_mm256_add_epi16((__m256i)sum, pairs));
#endif
}

/* Those of 32 columns in 32 bits, exact. */
INLINE vi widened(vi sum) {
    return HAS_VNNI ? sum : dot_halves((vi){0}, sum, (vi){0} + 0x00010001);
}

/* Sums of one to three rows: VNNI's each wait for themselves, so there are two of them. */
enum { CHAINS = HAS_VNNI ? 2 : 1, IS_NARROW = !HAS_VNNI };

INLINE vu load_codes(const uint8_t *from, int vector) {
    vu words;
    memcpy(&words, from + 64 * vector, sizeof words);
    return words;
}

/* The codes of LANES rows of a tile: bytes of four columns of each row, in eight vectors. */
INLINE void decode(const uint8_t *tile, const int bits, vu *quad, const int stride) {
    if (bits == 4) {
        for (int j = 0; j < 4; j++) {
            vu words = load_codes(tile, j);
            quad[2 * j * stride] = words & 0x0F0F0F0F;
            quad[(2 * j + 1) * stride] = words >> 4 & 0x0F0F0F0F;
        }
        return;
    }
    vu words[3];
    for (int j = 0; j < 3; j++) {
        words[j] = load_codes(tile, j);
        quad[2 * j * stride] = words[j] & 0x07070707;
        quad[(2 * j + 1) * stride] = words[j] >> 3 & 0x07070707;
    }
    for (int j = 0; j < 2; j++)
        quad[(6 + j) * stride] = (words[j] >> 6 & 0x03030303) | (words[2] >> (4 + j) & 0x04040404);
}

INLINE void fetch(const uint8_t *tile, const int bits) {
    for (int i = 0; i < bits; i++) __builtin_prefetch(tile + AHEAD + 64 * i, 0, ONCE);
}

/* Subtracting 0 leaves every number as it is, so that no instruction is needed. */
INLINE vf spread(float number) {
    return number - (vf){0};
}

INLINE vi four_of(const int8_t *codes) {
    int32_t four;
    memcpy(&four, codes, 4);
    return (vi){0} + four;
}

typedef struct {
    vf scale, zero;
} Scales;

/* Of LANES rows of the weight from `row` on, for a block of columns. */
INLINE Scales scales_at(const Weight *w, int64_t column, int64_t row) {
    int64_t at = column / w->group * w->rows + row;
    Scales scales = {load_any(w->scales, at, w->scale_type), {0}};
    if (w->zeros) scales.zero = load_any(w->zeros, at, w->scale_type);
    return scales;
}

/* Adds the sums of a block, `stride` apart, to those of some rows of x. */
INLINE void add_scaled(const Weight *w, Scales scales, const vi *sum, const float *x_scale,
                       const float *x_sum, float *total, const int count, const int stride) {
    vf less = spread(-(float)(1 << (w->bits - 1)));
    for (int m = 0; m < count; m++) {
        vf x = spread(x_sum[m]), new = load_lanes(total, m * PANEL, TYPE_F32);
        vf own = __builtin_convertvector(sum[m * stride], vf) * spread(x_scale[m]);
        new = multiply_add(scales.scale, multiply_add(less, x, own), new);
        if (w->zeros) new = multiply_add(scales.zero, x, new);
        memcpy(total + m * PANEL, &new, sizeof new);
    }
}

INLINE void finish(const Job *job, const float *total, int64_t m, int64_t row, int blocks) {
    const Product *p = job->product;
    const int type = job->rows.type;
    for (int n = 0; n < TILE_ROWS * blocks; n += LANES) {
        vf y = load_lanes(total, n, TYPE_F32);
        if (p->bias) y += load_any(p->bias, row + n, type);
        store_typed(p->y, m * p->weight->rows + row + n, LANES, typed_bits(y, type), type);
    }
}

/* Up to FEW rows, from `first` on, by `wide` rows of tiles: multiplied as the codes are decoded. */
INLINE void few_rows(const Job *job, int64_t row, int64_t first, const int count, const int bits,
                     const int wide) {
    const Weight *w = job->product->weight;
    const int64_t block = job->rows.block, rows = job->product->count;
    const int64_t down = w->columns / TILE_COLUMNS * 64 * bits;
    const int chains = count < 4 ? CHAINS : 1, across = wide * PARTS;
    const uint8_t *tile = tile_at(w, row, 0);
    float total[FEW * PANEL] __attribute__((aligned(64)));
    memset(total, 0, (size_t)count * PANEL * sizeof *total);
    for (int64_t b = 0; b < w->columns; b += block) {
        const int8_t *x = job->rows.codes + b * rows + first * block;
        vi sum[FEW * WIDE * PARTS];
#pragma GCC unroll 8
        for (int i = 0; i < count * across; i++) sum[i] = (vi){0};
        for (int64_t k = 0; k < block; k += TILE_COLUMNS, tile += 64 * bits) {
#pragma GCC unroll 4
            for (int s = 0; s < wide; s++) fetch(tile + s * down, bits);
#pragma GCC unroll 8
            for (int n = 0; n < across; n++) {
                vu quad[QUADS];
                vi own[FEW][CHAINS];
                decode(tile + n / PARTS * down + n % PARTS * VECTOR_BYTES, bits, quad, 1);
#pragma GCC unroll 8
                for (int m = 0; m < count; m++)
                    for (int c = 0; c < chains; c++) own[m][c] = (vi){0};
#pragma GCC unroll 8
                for (int i = 0; i < QUADS; i++)
#pragma GCC unroll 8
                    for (int m = 0; m < count; m++)
                        own[m][i % chains] = dot(own[m][i % chains], quad[i],
                                                 four_of(x + m * block + k + 4 * i));
#pragma GCC unroll 8
                for (int m = 0; m < count; m++) {
                    vi both = chains == 2 ? own[m][0] + own[m][chains - 1] : own[m][0];
                    sum[m * across + n] += widened(both);
                }
            }
        }
        const float *sums = job->rows.sums + b / block * rows + first;
        const float *x_scale = job->rows.scale + b / block * rows + first;
        for (int n = 0; n < across; n++)
            add_scaled(w, scales_at(w, b, row + LANES * n), sum + n, x_scale, sums,
                       total + LANES * n, count, across);
    }
    for (int m = 0; m < count; m++) finish(job, total + m * PANEL, first + m, row, wide);
}

#define FEW_ROWS(COUNT, BITS_)                                                                   \
    static __attribute__((noinline)) void few_##COUNT##_##BITS_(const Job *job, int64_t row,     \
                                                                int64_t first) {                 \
        few_rows(job, row, first, COUNT, BITS_, 1);                                              \
    }
#define FEW_BITS(COUNT) FEW_ROWS(COUNT, 3) FEW_ROWS(COUNT, 4)
FEW_BITS(1) FEW_BITS(2) FEW_BITS(3) FEW_BITS(4)

/* One row reads a whole panel's rows of tiles side by side where that is faster: the processor then
 * fetches ahead more than one page. */
static __attribute__((noinline)) void one_of_3(const Job *job, int64_t row) {
    few_rows(job, row, 0, 1, 3, WIDE);
}

static __attribute__((noinline)) void one_of_4(const Job *job, int64_t row) {
    few_rows(job, row, 0, 1, 4, WIDE);
}

typedef void (*Few)(const Job *, int64_t, int64_t);
#ifdef __AVX512BW__
FEW_BITS(5) FEW_BITS(6) FEW_BITS(7) FEW_BITS(8)
static const Few few[2][FEW + 1] = {
    {0, few_1_3, few_2_3, few_3_3, few_4_3, few_5_3, few_6_3, few_7_3, few_8_3},
    {0, few_1_4, few_2_4, few_3_4, few_4_4, few_5_4, few_6_4, few_7_4, few_8_4},
};
#else
static const Few few[2][FEW + 1] = {
    {0, few_1_3, few_2_3, few_3_3, few_4_3},
    {0, few_1_4, few_2_4, few_3_4, few_4_4},
};
#endif

/* More rows: strips of them go over a panel of decoded codes in the first-level cache. */
INLINE void multiply(const Job *job, const vu *panel, const Scales *scales, int64_t first,
                     int64_t column, float *total, const int strip, const int group) {
    const Weight *w = job->product->weight;
    const int wide = group * PARTS;
    const int64_t block = job->rows.block, rows = job->product->count;
    const int8_t *x = job->rows.codes + column * rows + first * block;
    vi sum[STRIP * GROUP * PARTS];
#pragma GCC unroll 12
    for (int i = 0; i < strip * wide; i++) sum[i] = (vi){0};
    for (int64_t t = 0; t < block / TILE_COLUMNS; t++) {
        vi own[STRIP * GROUP * PARTS]; /* 32 columns where sums are narrow, else the block so far */
#pragma GCC unroll 12
        for (int i = 0; i < strip * wide; i++) own[i] = IS_NARROW ? (vi){0} : sum[i];
#pragma GCC unroll 8
        for (int i = 0; i < QUADS; i++) {
            const vu *quad = panel + (t * QUADS + i) * wide;
#pragma GCC unroll 6
            for (int m = 0; m < strip; m++) {
                vi four = four_of(x + m * block + t * TILE_COLUMNS + 4 * i);
#pragma GCC unroll 4
                for (int n = 0; n < wide; n++)
                    own[m * wide + n] = dot(own[m * wide + n], quad[n], four);
            }
        }
#pragma GCC unroll 12
        for (int i = 0; i < strip * wide; i++)
            sum[i] = IS_NARROW ? sum[i] + widened(own[i]) : own[i];
    }
    const float *sums = job->rows.sums + column / block * rows + first;
    const float *x_scale = job->rows.scale + column / block * rows + first;
    for (int n = 0; n < wide; n++)
        add_scaled(w, scales[n], sum + n, x_scale, sums, total + LANES * n, strip, wide);
}

#ifdef __AMX_INT8__
/* 16 rows on tiles: codes of x in rows of 32 bytes, quads of the panel in 8 rows of 64. */
INLINE void multiply_amx(const Job *job, const vu *panel, const Scales *scales, int64_t first,
                         int64_t column, float *total, const int group) {
    const Weight *w = job->product->weight;
    const int64_t block = job->rows.block, rows = job->product->count;
    const int64_t pieces = block / TILE_COLUMNS;
    const int8_t *x = job->rows.codes + column * rows + first * block;
    const float *x_scale = job->rows.scale + column / block * rows + first;
    const float *sums = job->rows.sums + column / block * rows + first;
#define EACH_PIECE(DO)                                                                           \
    DO(0, 4)                                                                                     \
    if (pieces > 1) DO(1, 5)                                                                     \
    if (pieces > 2) DO(2, 6)                                                                     \
    if (pieces > 3) DO(3, 7)
#define LOAD_X(PIECE_, X) TILE_LOAD(X, x + TILE_COLUMNS * PIECE_, block);
#define ADD_UP(PIECE_, X)                                                                        \
    {                                                                                            \
        const vu *quads = panel + PIECE_ * QUADS * group + n;                                    \
        TILE_LOAD(2, quads, VECTOR_BYTES * group);                                               \
        TILE_MULTIPLY(0, X, 2);                                                                  \
        if (group > 1) {                                                                         \
            TILE_LOAD(3, quads + 1, VECTOR_BYTES * group);                                       \
            TILE_MULTIPLY(1, X, 3);                                                              \
        }                                                                                        \
    }
    EACH_PIECE(LOAD_X)
    for (int n = 0; n < group; n += 2) { /* two of 16 rows of the weight at once */
        vi sum[2][AMX_ROWS];
        TILE_CLEAR(0);
        if (group > 1) TILE_CLEAR(1);
        EACH_PIECE(ADD_UP)
        TILE_STORE(0, sum[0], VECTOR_BYTES);
        if (group > 1) TILE_STORE(1, sum[1], VECTOR_BYTES);
        for (int i = 0; i < 2 && i < group; i++)
            add_scaled(w, scales[n + i], sum[i], x_scale, sums, total + LANES * (n + i), AMX_ROWS, 1);
    }
#undef ADD_UP
#undef LOAD_X
#undef EACH_PIECE
}
#endif

/* Rows to multiply at once while so many are left. One alone would wait for its own sums. */
INLINE int64_t strip_of(int64_t left) {
    return left == STRIP + 1 ? STRIP - 1 : left < STRIP ? left : STRIP;
}

INLINE void multiply_strip(const Job *job, const vu *panel, const Scales *scales, int64_t first,
                           int64_t count, int64_t column, float *total, const int group) {
#define ROWS(COUNT)                                                                              \
    case COUNT:                                                                                  \
        if (COUNT <= STRIP) multiply(job, panel, scales, first, column, total, COUNT, group);    \
        break;
    switch (count) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
#undef ROWS
}

/* `groups` groups of tiles by some rows of x. */
INLINE void panel_rows(const Job *job, int64_t row, int64_t first, int64_t count, int groups,
                       const int group) {
    const Weight *w = job->product->weight;
    const int wide = group * PARTS, across = BLOCK / 4 * wide;
    vu panel[BLOCK / 4 * WIDE * PARTS];
    float total[ROW_BLOCK * PANEL] __attribute__((aligned(64)));
    memset(total, 0, (size_t)count * PANEL * sizeof *total);
#ifdef __AMX_INT8__
    if (count >= AMX_ROWS) shape_tiles(QUADS, 2, AMX_ROWS);
#endif
    for (int64_t k = 0; k < w->columns; k += job->rows.block) {
        Scales scales[WIDE * PARTS];
        for (int n = 0; n < groups * wide; n++) {
            scales[n] = scales_at(w, k, row + LANES * n);
            for (int64_t t = 0; t < job->rows.block; t += TILE_COLUMNS) {
                const uint8_t *tile = tile_at(w, row + LANES * n, k + t) + n % PARTS * VECTOR_BYTES;
                vu *out = panel + n / wide * across + t / 4 * wide + n % wide;
                if (n % PARTS == 0) fetch(tile, w->bits);
                if (w->bits == 4) decode(tile, 4, out, wide);
                else decode(tile, 3, out, wide);
            }
        }
        int64_t m = 0;
#ifdef __AMX_INT8__
        for (; m + AMX_ROWS <= count; m += AMX_ROWS)
            for (int g = 0; g < groups; g++) {
                int64_t side = TILE_ROWS * group * g;
                multiply_amx(job, panel + g * across, scales + g * wide, first + m, k,
                             total + m * PANEL + side, group);
            }
#endif
        while (m < count) {
            int64_t now = strip_of(count - m);
            for (int g = 0; g < groups; g++) {
                int64_t side = TILE_ROWS * group * g;
                multiply_strip(job, panel + g * across, scales + g * wide, first + m, now, k,
                               total + m * PANEL + side, group);
            }
            m += now;
        }
    }
#ifdef __AMX_INT8__
    if (count >= AMX_ROWS) clear_tiles();
#endif
    for (int64_t m = 0; m < count; m++)
        finish(job, total + m * PANEL, first + m, row, groups * group);
}

void packed_int8_part(const Product *p, const Prepared *q, int64_t panel) {
    Job job = {.product = p, .rows = *q};
    int64_t row = panel * PANEL, left = (p->weight->rows - row) / TILE_ROWS;
    int blocks = left < WIDE ? (int)left : WIDE;
    if (SIDE_BY_SIDE && p->count == 1 && blocks == WIDE) {
        if (p->weight->bits == 3) one_of_3(&job, row);
        else one_of_4(&job, row);
        return;
    }
    if (p->count <= MOST_FEW) {
        int64_t strips = (p->count + FEW - 1) / FEW;
        for (int n = 0; n < blocks; n++)
            for (int64_t i = 0; i < strips; i++) {
                int64_t first = i * p->count / strips, end = (i + 1) * p->count / strips;
                few[p->weight->bits - 3][end - first](&job, row + TILE_ROWS * n, first);
            }
        return;
    }
    for (int64_t first = 0; first < p->count; first += ROW_BLOCK) {
        int64_t count = p->count - first < ROW_BLOCK ? p->count - first : ROW_BLOCK;
        if (GROUP > 1 && blocks == WIDE)
            panel_rows(&job, row, first, count, WIDE / GROUP, GROUP);
        else panel_rows(&job, row, first, count, blocks, 1);
    }
}

static void codes_part(void *data, int64_t m) {
    const Job *job = data;
    block_codes(&job->rows, job->product->count, m);
}

static void any_part(void *data, int64_t panel) {
    const Job *job = data;
    packed_int8_part(job->product, &job->rows, panel);
}

int kernels_packed_int8(const Product *p, int type) {
    const Weight *w = p->weight;
    size_t count = (size_t)p->count, columns = (size_t)w->columns;
    int64_t block = block_columns(w, BLOCK);
    Prepared q = {.x = p->x, .columns = w->columns, .block = block, .bits = w->bits, .type = type};
    q.codes = malloc(count * columns);
    q.scale = malloc(count * columns / (size_t)block * sizeof *q.scale);
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
