/* Attention of one new token a row, straight on the slots of a cache of keys and values.
 *
 * Every row reads as many tokens as it has, wherever its slot is; nothing is gathered, repeated or
 * masked. The queries of a group share each key and value that is read. The new key and value are
 * put into the slot by the same call. Sums, the softmax (online: Milakov and Gimelshein 2018) and
 * its weights are float32 whatever is stored; 8-bit codes are scaled once a token, not once a number. */
#include "kernels.h"
#ifdef __AVX512F__
#include <math.h>

enum { STEP = 64, QUERIES = 4, MOST_DIM = 256, TYPE_INT8 = 3 };

typedef struct {
    const void *query;                   /* [rows, heads, dim] by strides, of `type` */
    void *out;                           /* [rows, heads, dim], of `type` */
    const void *new_key, *new_value;     /* [rows, kv_heads, dim] by strides, of `type` */
    void *keys, *values;                 /* [slots, kv_heads, tokens, dim] by strides, of `stored` */
    void *key_scales, *value_scales;     /* bf16 [slots, kv_heads, tokens], for 8-bit codes alone */
    const int64_t *slots, *lengths;      /* [rows]; a length counts the new token */
    int64_t rows, kv_heads, group, dim;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head; /* in numbers */
    int64_t slot_stride, head_stride;                                        /* in numbers */
    int64_t window; /* tokens a query sees, 0 for all */
    const float *bias; /* [heads, tokens] by a stride, added to the scaled scores; NULL for none */
    int64_t bias_head; /* in numbers */
    float scaling;
    int32_t type, stored, threads;
} Attention;

INLINE v16f load_stored(const void *from, int64_t at, const int type) {
    if (type != TYPE_INT8) return load_typed(from, at, type);
    typedef int8_t v16b __attribute__((vector_size(16)));
    v16b codes;
    memcpy(&codes, (const int8_t *)from + at, sizeof codes);
    return __builtin_convertvector(codes, v16f);
}

INLINE void store_typed(void *to, int64_t at, v16f v, int type) {
    if (type == TYPE_F32) {
        store_floats((float *)to + at, v);
    } else if (type == TYPE_BF16) {
        v16h narrow = narrowed(v);
        memcpy((uint16_t *)to + at, &narrow, sizeof narrow);
    } else {
        for (int i = 0; i < 16; i++) {
            _Float16 number = (_Float16)v[i];
            memcpy((uint16_t *)to + at + i, &number, sizeof number);
        }
    }
}

INLINE float scale_of(const void *scales, int64_t at) {
    uint32_t word = (uint32_t)((const uint16_t *)scales)[at] << 16;
    float scale;
    memcpy(&scale, &word, sizeof scale);
    return scale;
}

/* ---- the new token --------------------------------------------------------------------------- */

static void keep_codes(const Attention *a, const void *new, int64_t from, void *store, int64_t to,
                       uint16_t *scale) {
    float x[MOST_DIM] __attribute__((aligned(64))), peak = 0;
    for (int64_t k = 0; k < a->dim; k += 16) store_floats(x + k, load_typed(new, from + k, a->type));
    for (int64_t k = 0; k < a->dim; k++) {
        float size = fabsf(x[k]);
        if (size > peak || size != size) peak = size; /* what is not a number stays one */
    }
    v16f spread = (v16f){0} + peak * (float)(1.0 / 127);
    *scale = narrowed(spread)[0];
    float step = scale_of(scale, 0);
    if (step < 1.17549435e-38f) step = 1.17549435e-38f;
    for (int64_t k = 0; k < a->dim; k++) {
        float code = rintf(x[k] / step);
        ((int8_t *)store)[to + k] = code == code ? (int8_t)code : 0;
    }
}

static void keep(const Attention *a, const void *new, int64_t from, void *store, int64_t to,
                 void *scales) {
    if (a->stored == TYPE_INT8) {
        keep_codes(a, new, from, store, to, (uint16_t *)scales + to / a->dim);
        return;
    }
    for (int64_t k = 0; k < a->dim; k += 16)
        store_typed(store, to + k, load_typed(new, from + k, a->type), a->stored);
}

/* ---- softmax --------------------------------------------------------------------------------- */

/* e^x for x <= 0, within two units of the last place (Cephes); NaN stays NaN. */
INLINE v16f exponential(v16f x) {
    v16i low = x < -87.0f;
    x = (v16f)((low & (v16i)((v16f){0} - 87.0f)) | (~low & (v16i)x));
    v16f n = x * 1.44269504f + 12582912.0f - 12582912.0f;
    v16f r = x - n * 0.693359375f + n * 2.12194440e-4f;
    v16f p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    v16f y = p * (r * r) + r + 1.0f;
    return y * (v16f)((__builtin_convertvector(n, v16i) + 127) << 23);
}

INLINE float lanes_most(v16f v) {
    float most = v[0];
    for (int i = 1; i < 16; i++) most = v[i] > most || v[i] != v[i] ? v[i] : most;
    return most;
}

INLINE float lanes_sum(v16f v) {
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += v[i];
    return sum;
}

/* Turns scores into weights against the largest so far; returns what earlier sums shrink by. */
INLINE float weigh(float *score, int64_t count, float *most, float *weight) {
    v16f top = load_floats(score);
    for (int64_t i = 16; i < count; i += 16) {
        v16f next = load_floats(score + i);
        v16i more = (next > top) | (next != next);
        top = (v16f)((more & (v16i)next) | (~more & (v16i)top));
    }
    float now = lanes_most(top), shrink = 1;
    if (now > *most || now != now) shrink = expf(*most - now), *most = now;
    v16f sum = {0};
    for (int64_t i = 0; i < count; i += 16) {
        v16f share = exponential(load_floats(score + i) - *most);
        store_floats(score + i, share);
        sum += share;
    }
    *weight = *weight * shrink + lanes_sum(sum);
    return shrink;
}

/* ---- attention ------------------------------------------------------------------------------- */

#define HALVES(A, B, ...)                                                                        \
    (__builtin_shuffle(A, B, (v16i){__VA_ARGS__}))

/* Adds neighbours among lanes: 4 vectors of 16 to one of 4 sums each, and 4 of those to one of 16. */
INLINE v16f fold(const v16f *v, const int last) {
    v16f pair[2];
    for (int i = 0; i < 2; i++) {
        v16f a = v[2 * i], b = v[2 * i + 1];
        pair[i] = last ? HALVES(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
                             HALVES(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31)
                       : HALVES(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                             HALVES(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    v16f a = pair[0], b = pair[1];
    return last ? HALVES(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
                      HALVES(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
                : HALVES(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                      HALVES(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

/* Scores of 16 tokens from place `at` on, `left` of which exist. */
INLINE void score16(const Attention *a, const float (*query)[MOST_DIM], int64_t at, int64_t left,
                    float (*score)[STEP], const int n, const int type) {
    v16f folded[QUERIES][4];
#pragma GCC unroll 4
    for (int four = 0; four < 4; four++) {
        v16f sum[QUERIES][4];
        int64_t place[4];
        for (int t = 0; t < 4; t++) {
            int64_t token = 4 * four + t < left ? 4 * four + t : left - 1;
            place[t] = at + token * a->dim;
            for (int q = 0; q < n; q++) sum[q][t] = (v16f){0};
        }
        for (int64_t k = 0; k < a->dim; k += 16)
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) {
                v16f key = load_stored(a->keys, place[t] + k, type);
#pragma GCC unroll 4
                for (int q = 0; q < n; q++) sum[q][t] += key * load_floats(query[q] + k);
            }
        for (int q = 0; q < n; q++) folded[q][four] = fold(sum[q], 0);
    }
    for (int q = 0; q < n; q++) {
        store_floats(score[q], fold(folded[q], 1));
        for (int64_t t = left; t < 16; t++) score[q][t] = -INFINITY;
    }
}

INLINE void add_values(const Attention *a, int64_t at, int64_t count, const float (*share)[STEP],
                       float (*total)[MOST_DIM], const int n, const int wide, int64_t k,
                       const int type) {
    v16f sum[QUERIES][4];
    for (int q = 0; q < n; q++)
        for (int j = 0; j < wide; j++) sum[q][j] = load_floats(total[q] + k + 16 * j);
    for (int64_t t = 0; t < count; t++)
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) {
            v16f value = load_stored(a->values, at + t * a->dim + k + 16 * j, type);
#pragma GCC unroll 4
            for (int q = 0; q < n; q++) sum[q][j] += value * share[q][t];
        }
    for (int q = 0; q < n; q++)
        for (int j = 0; j < wide; j++) store_floats(total[q] + k + 16 * j, sum[q][j]);
}

INLINE void attend(const Attention *a, int64_t row, int64_t kv_head, int64_t first, const int n,
                   const int type) {
    float query[QUERIES][MOST_DIM] __attribute__((aligned(64)));
    float total[QUERIES][MOST_DIM] __attribute__((aligned(64)));
    float score[QUERIES][STEP] __attribute__((aligned(64)));
    float most[QUERIES], weight[QUERIES];
    int64_t head = kv_head * a->group + first;
    for (int q = 0; q < n; q++) {
        int64_t from = row * a->query_row + (head + q) * a->query_head;
        for (int64_t k = 0; k < a->dim; k += 16) {
            store_floats(query[q] + k, load_typed(a->query, from + k, a->type) * a->scaling);
            store_floats(total[q] + k, (v16f){0});
        }
        most[q] = -INFINITY, weight[q] = 0;
    }
    int64_t base = a->slots[row] * a->slot_stride + kv_head * a->head_stride;
    int64_t end = a->lengths[row], start = a->window && end > a->window ? end - a->window : 0;
    for (int64_t t = start; t < end; t += STEP) {
        int64_t count = end - t < STEP ? end - t : STEP, at = base + t * a->dim;
        for (int64_t u = 0; u < count; u += 16)
            score16(a, query, at + u * a->dim, count - u, (float (*)[STEP])(score[0] + u), n, type);
        for (int q = 0; q < n; q++) {
            if (type == TYPE_INT8)
                for (int i = 0; i < count; i++) score[q][i] *= scale_of(a->key_scales, at / a->dim + i);
            if (a->bias)
                for (int i = 0; i < count; i++) score[q][i] += a->bias[(head + q) * a->bias_head + t + i];
            float shrink = weigh(score[q], count, &most[q], &weight[q]);
            if (shrink != 1)
                for (int64_t k = 0; k < a->dim; k++) total[q][k] *= shrink;
            if (type == TYPE_INT8)
                for (int i = 0; i < count; i++) score[q][i] *= scale_of(a->value_scales, at / a->dim + i);
        }
        int64_t k = 0;
        for (; k + 64 <= a->dim; k += 64) add_values(a, at, count, score, total, n, 4, k, type);
        for (; k < a->dim; k += 16) add_values(a, at, count, score, total, n, 1, k, type);
    }
    for (int q = 0; q < n; q++)
        for (int64_t k = 0; k < a->dim; k += 16) {
            int64_t to = (row * a->kv_heads * a->group + head + q) * a->dim + k;
            store_typed(a->out, to, load_floats(total[q] + k) / weight[q], a->type);
        }
}

#define ATTEND(TYPE)                                                                             \
    static void attend_##TYPE(const Attention *a, int64_t row, int64_t head) {                   \
        int64_t q = 0;                                                                           \
        for (; q + 4 <= a->group; q += 4) attend(a, row, head, q, 4, TYPE);                      \
        if (a->group - q == 3) attend(a, row, head, q, 3, TYPE);                                 \
        if (a->group - q == 2) attend(a, row, head, q, 2, TYPE);                                 \
        if (a->group - q == 1) attend(a, row, head, q, 1, TYPE);                                 \
    }
ATTEND(TYPE_F32) ATTEND(TYPE_F16) ATTEND(TYPE_BF16) ATTEND(TYPE_INT8)

typedef void (*Attend)(const Attention *, int64_t, int64_t);
static const Attend attends[] = {attend_TYPE_F32, attend_TYPE_F16, attend_TYPE_BF16,
                                 attend_TYPE_INT8};

static void attend_part(void *data, int64_t item) {
    const Attention *a = data;
    int64_t row = item / a->kv_heads, head = item % a->kv_heads;
    int64_t newest = a->slots[row] * a->slot_stride + head * a->head_stride +
                     (a->lengths[row] - 1) * a->dim;
    keep(a, a->new_key, row * a->key_row + head * a->key_head, a->keys, newest, a->key_scales);
    keep(a, a->new_value, row * a->value_row + head * a->value_head, a->values, newest,
         a->value_scales);
    attends[a->stored](a, row, head);
}

void kernels_attend(const Attention *a) {
    run_parts(attend_part, (void *)a, a->rows * a->kv_heads, a->threads);
}
#endif
