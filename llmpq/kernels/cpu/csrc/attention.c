/* Attention of single tokens on the blocks of a cache of keys and values.
 *
 * A sequence's token at position p lies in block table[p / tokens of a block]. Each query reads the
 * blocks of its own sequence up to its position; nothing is gathered, repeated or masked. The queries
 * of a group share each key and value that is read. New keys and values are put into their blocks by
 * the same call, or by kernels_store before. Sums, the softmax (online: Milakov and Gimelshein 2018)
 * and its weights are float32 whatever is stored; 8-bit codes are scaled once a token, not once a
 * number. */
#include "step.h"
#ifdef __AVX512F__
#include <math.h>

enum { LANES = 16, STEP = 64, RUNS = STEP / LANES, QUERIES = 4, MOST_DIM = 512, TYPE_INT8 = 3 };

/* Where 16 tokens from position `at` (a multiple of 16) of a head begin. */
INLINE int64_t place_of(const Attention *a, const int32_t *table, int64_t head, int64_t at) {
    int64_t inside = at & (((int64_t)1 << a->block_bits) - 1);
    return table[at >> a->block_bits] * a->block_stride + head * a->head_stride + inside * a->dim;
}

INLINE int64_t token_of(const Attention *a, int64_t item) {
    return a->chosen ? a->chosen[item] : item;
}

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

static void keep_token(const Attention *a, int64_t token, int64_t head) {
    int64_t at = a->lengths[token] - 1, inside = at & (LANES - 1);
    int64_t to = place_of(a, a->tables + a->starts[token], head, at - inside) + inside * a->dim;
    keep(a, a->new_key, token * a->key_token + head * a->key_head, a->keys, to, a->key_scales);
    keep(a, a->new_value, token * a->value_token + head * a->value_head, a->values, to,
         a->value_scales);
}

/* ---- softmax --------------------------------------------------------------------------------- */

/* cap * tanh(x / cap) */
INLINE v16f capped(v16f x, float cap) {
    v16f doubled = x * (-2 / cap);
    v16i flips = doubled > 0;
    v16f low = (v16f)((flips & (v16i)-doubled) | (~flips & (v16i)doubled));
    v16f e = exponential(low), y = (1 - e) / (1 + e) * cap;
    return (v16f)((flips & (v16i)-y) | (~flips & (v16i)y));
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
        for (int64_t t = left; t < LANES; t++) score[q][t] = -INFINITY;
    }
}

/* Adds the values of the tokens [skip, count) of a step, 16 at each place of `at`. */
INLINE void add_values(const Attention *a, const int64_t *at, int64_t skip, int64_t count,
                       const float (*share)[STEP], float (*total)[MOST_DIM], const int n,
                       const int wide, int64_t k, const int type) {
    v16f sum[QUERIES][4];
    for (int q = 0; q < n; q++)
        for (int j = 0; j < wide; j++) sum[q][j] = load_floats(total[q] + k + 16 * j);
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t place = at[first / LANES] + k, end = count - first < LANES ? count - first : LANES;
        for (int64_t t = first ? 0 : skip; t < end; t++)
#pragma GCC unroll 4
            for (int j = 0; j < wide; j++) {
                v16f value = load_stored(a->values, place + t * a->dim + 16 * j, type);
#pragma GCC unroll 4
                for (int q = 0; q < n; q++) sum[q][j] += value * share[q][first + t];
            }
    }
    for (int q = 0; q < n; q++)
        for (int j = 0; j < wide; j++) store_floats(total[q] + k + 16 * j, sum[q][j]);
}

INLINE void scale_scores(const void *scales, const Attention *a, const int64_t *at, int64_t count,
                         float *score) {
    for (int64_t i = 0; i < count; i++)
        score[i] *= scale_of(scales, at[i / LANES] / a->dim + i % LANES);
}

/* The beginning of a block is fetched ahead; the processor itself follows from there. */
INLINE void fetch(const Attention *a, int64_t at, const int type) {
    const int64_t bytes = type == TYPE_INT8 ? 1 : type == TYPE_F32 ? 4 : 2;
    for (int line = 0; line < 16; line++) {
        __builtin_prefetch((const char *)a->keys + at * bytes + 64 * line);
        __builtin_prefetch((const char *)a->values + at * bytes + 64 * line);
    }
}

INLINE void attend(const Attention *a, int64_t token, int64_t kv_head, int64_t first, const int n,
                   const int type) {
    float query[QUERIES][MOST_DIM] __attribute__((aligned(64)));
    float total[QUERIES][MOST_DIM] __attribute__((aligned(64)));
    float score[QUERIES][STEP] __attribute__((aligned(64)));
    float most[QUERIES], weight[QUERIES];
    int64_t head = kv_head * a->group + first, at[RUNS];
    for (int q = 0; q < n; q++) {
        int64_t from = token * a->query_token + (head + q) * a->query_head;
        for (int64_t k = 0; k < a->dim; k += 16) {
            store_floats(query[q] + k, load_typed(a->query, from + k, a->type) * a->scaling);
            store_floats(total[q] + k, (v16f){0});
        }
        most[q] = a->sinks ? a->sinks[head + q] : -INFINITY;
        weight[q] = a->sinks ? 1 : 0;
    }
    const int32_t *table = a->tables + a->starts[token];
    int64_t end = a->lengths[token], start = a->window && end > a->window ? end - a->window : 0;
    if (a->chunk && (end - 1) / a->chunk * a->chunk > start) start = (end - 1) / a->chunk * a->chunk;
    for (int64_t t = start & ~(int64_t)(LANES - 1); t < end; t += STEP) {
        int64_t count = end - t < STEP ? end - t : STEP, skip = t < start ? start - t : 0;
        for (int64_t u = 0; u < count; u += LANES) at[u / LANES] = place_of(a, table, kv_head, t + u);
        for (int64_t u = t + STEP; u < end && u < t + 2 * STEP; u += LANES)
            fetch(a, place_of(a, table, kv_head, u), type);
        for (int64_t u = 0; u < count; u += LANES) {
            score16(a, query, at[u / LANES], count - u, (float (*)[STEP])(score[0] + u), n, type);
        }
        for (int q = 0; q < n; q++) {
            if (type == TYPE_INT8) scale_scores(a->key_scales, a, at, count, score[q]);
            if (a->softcap)
                for (int64_t i = 0; i < count; i += LANES)
                    store_floats(score[q] + i, capped(load_floats(score[q] + i), a->softcap));
            if (a->bias)
                for (int i = 0; i < count; i++) score[q][i] += a->bias[(head + q) * a->bias_head + t + i];
            for (int64_t i = 0; i < skip; i++) score[q][i] = -INFINITY;
            if (a->softcap) /* a cap lifts what is not there to -cap */
                for (int64_t i = count; i % LANES; i++) score[q][i] = -INFINITY;
            float shrink = weigh(score[q], count, &most[q], &weight[q]);
            if (shrink != 1)
                for (int64_t k = 0; k < a->dim; k++) total[q][k] *= shrink;
            if (type == TYPE_INT8) scale_scores(a->value_scales, a, at, count, score[q]);
        }
        int64_t k = 0;
        for (; k + 64 <= a->dim; k += 64) add_values(a, at, skip, count, score, total, n, 4, k, type);
        for (; k < a->dim; k += 16) add_values(a, at, skip, count, score, total, n, 1, k, type);
    }
    for (int q = 0; q < n; q++)
        for (int64_t k = 0; k < a->dim; k += 16) {
            int64_t to = (token * a->kv_heads * a->group + head + q) * a->dim + k;
            store_typed(a->out, to, load_floats(total[q] + k) / weight[q], a->type);
        }
}

#define ATTEND(TYPE)                                                                             \
    static void attend_##TYPE(const Attention *a, int64_t token, int64_t head) {                 \
        int64_t q = 0;                                                                           \
        for (; q + 4 <= a->group; q += 4) attend(a, token, head, q, 4, TYPE);                      \
        if (a->group - q == 3) attend(a, token, head, q, 3, TYPE);                                 \
        if (a->group - q == 2) attend(a, token, head, q, 2, TYPE);                                 \
        if (a->group - q == 1) attend(a, token, head, q, 1, TYPE);                                 \
    }
ATTEND(TYPE_F32) ATTEND(TYPE_F16) ATTEND(TYPE_BF16) ATTEND(TYPE_INT8)

typedef void (*Attend)(const Attention *, int64_t, int64_t);
static const Attend attends[] = {attend_TYPE_F32, attend_TYPE_F16, attend_TYPE_BF16,
                                 attend_TYPE_INT8};

/* One token's queries of one KV head: item = token * kv_heads + head. */
void attention_part(const Attention *a, int64_t item) {
    int64_t token = token_of(a, item / a->kv_heads), head = item % a->kv_heads;
    if (a->stores) keep_token(a, token, head);
    attends[a->stored](a, token, head);
}

static void attend_part(void *data, int64_t item) {
    attention_part(data, item);
}

void kernels_attend(const Attention *a) {
    run_parts(attend_part, (void *)a, a->count * a->kv_heads, a->threads);
}

/* ---- whole sequences ------------------------------------------------------------------------- */

/* Puts the new keys and values of one token into their block. */
void store_part(void *data, int64_t item) {
    const Attention *a = data;
    for (int64_t head = 0; head < a->kv_heads; head++) keep_token(a, token_of(a, item), head);
}

/* Puts the new keys and values of the tokens of a call into their blocks. */
void kernels_store(const Attention *a) {
    run_parts(store_part, (void *)a, a->count, a->threads);
}

INLINE void read_run(const Attention *a, const void *stored, const void *scales, int64_t from,
                     void *out, int64_t to, int64_t count) {
    if (a->stored != TYPE_INT8) {
        int64_t bytes = a->stored == TYPE_F32 ? 4 : 2;
        memcpy((char *)out + to * bytes, (const char *)stored + from * bytes, count * a->dim * bytes);
        return;
    }
    for (int64_t t = 0; t < count; t++) {
        float scale = scale_of(scales, from / a->dim + t);
        for (int64_t k = 0; k < a->dim; k += 16) {
            int64_t i = t * a->dim + k;
            store_typed(out, to + i, load_stored(stored, from + i, TYPE_INT8) * scale, a->type);
        }
    }
}

/* Reads all keys and values of the sequence of token `chosen[0]`, up to that token: `query` is
 * [kv_heads, length, dim] of `type` for the keys, `out` the same for the values. */
static void read_part(void *data, int64_t item) {
    const Attention *a = data;
    int64_t token = token_of(a, 0), length = a->lengths[token];
    int64_t runs = (length + LANES - 1) / LANES, head = item / runs, at = item % runs * LANES;
    int64_t count = length - at < LANES ? length - at : LANES;
    int64_t from = place_of(a, a->tables + a->starts[token], head, at);
    int64_t to = (head * length + at) * a->dim;
    read_run(a, a->keys, a->key_scales, from, (void *)a->query, to, count);
    read_run(a, a->values, a->value_scales, from, a->out, to, count);
}

void kernels_read(const Attention *a) {
    int64_t runs = (a->lengths[token_of(a, 0)] + LANES - 1) / LANES;
    run_parts(read_part, (void *)a, runs * a->kv_heads, a->threads);
}
#endif
