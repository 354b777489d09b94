/* Attention of single tokens on the blocks of a cache of keys and values.
 *
 * A sequence's token at position p lies in block table[p / tokens of a block]. Each query reads the
 * blocks of its own sequence up to its position; nothing is gathered, repeated or masked. The queries
 * of a group share each key and value that is read. New keys and values are put into their blocks by
 * the same call, or by kernels_store before. Sums, the softmax (online: Milakov and Gimelshein 2018)
 * and its weights are float32 whatever is stored; codes of 8 and 4 bits are scaled once a token, not
 * once a number. Keys and values of 4 bits are stored rotated: queries are rotated, too, and the answer
 * is rotated back. Long sequences are read in pieces of PIECE tokens, by several threads; the last one to
 * finish puts the pieces together, in their order (FlashDecoding: Dao et al. 2023). */
#include "attention.h"
#include <stdlib.h>

/* QUERIES times four tokens have their sums in registers. */
enum { STEP = 64, RUNS = STEP / LANES, QUERIES = LANES == 16 ? 4 : 3, PIECE = 1024 };

INLINE vf load(const float *from) {
    return load_lanes(from, 0, TYPE_F32);
}

INLINE void store(float *to, vf v) {
    memcpy(to, &v, sizeof v);
}

/* ---- softmax --------------------------------------------------------------------------------- */

INLINE float lanes_sum(vf v) {
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2) v += __builtin_shuffle(v, lane_numbers() ^ step);
    return v[0];
}

/* Turns scores into weights against the largest so far; returns what earlier sums shrink by. What is
 * not a number is kept by the weights. */
INLINE float weigh(float *score, int64_t count, float *most, vf *weight) {
    vf top = load(score);
    for (int64_t i = LANES; i < count; i += LANES) top = greater(load(score + i), top);
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2) top = greater(top, __builtin_shuffle(top, lane_numbers() ^ step));
    float now = top[0], shrink = 1;
    if (now > *most) shrink = expf(*most - now), *most = now;
    vf sum = *weight * shrink;
    for (int64_t i = 0; i < count; i += LANES) {
        vf share = exponential(load(score + i) - *most);
        store(score + i, share);
        sum += share;
    }
    *weight = sum;
    return shrink;
}

/* ---- attention ------------------------------------------------------------------------------- */

/* Adds the two halves of every 2 `half` lanes of two vectors: the sums of the first, then of the other. */
INLINE vf add_halves(vf a, vf b, const int half) {
    const vi lane = lane_numbers(), low = lane + (lane & -half);
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + half);
}

/* 4 vectors to one with a quarter of the lanes for each. */
INLINE vf fold(const vf *v, const int half) {
    return add_halves(add_halves(v[0], v[1], half), add_halves(v[2], v[3], half), half / 2);
}

/* The sums of LANES vectors, of which every four are folded. */
INLINE vf total_of(const vf *folded) {
#if defined(__AVX512F__)
    return fold(folded, 2);
#elif defined(__AVX2__)
    return add_halves(folded[0], folded[1], 1);
#else
    return folded[0];
#endif
}

/* Numbers of the queries of a KV head; bf16 ones are multiplied as they are by bf16 keys. */
typedef struct {
    float wide[QUERIES][MOST_DIM] __attribute__((aligned(64)));      /* scaled */
    uint16_t narrow[QUERIES][MOST_DIM] __attribute__((aligned(64))); /* not scaled */
} Queries;

INLINE int has_pairs(const Attention *a, const int type) {
#ifdef __AVX512BF16__
    return type == TYPE_BF16 && a->type == TYPE_BF16 && a->dim % 32 == 0;
#else
    (void)a, (void)type;
    return 0;
#endif
}

INLINE int64_t bytes_of(int64_t numbers, const int type) {
    return type == TYPE_F32 ? 4 * numbers : has_scales(type) ? numbers >> (type == TYPE_INT4) : 2 * numbers;
}

/* Fetches `count` numbers of the step after this one. */
INLINE void fetch(const void *from, int64_t at, int64_t count, const int type) {
    const char *line = (const char *)from + bytes_of(at, type), *end = line + bytes_of(count, type);
    for (; line < end; line += 64) __builtin_prefetch(line);
}

/* Scores of LANES tokens from place `at` on, `left` of which exist; those after them are at `next`. */
INLINE void score_lanes(const Attention *a, const Queries *query, int64_t at, int64_t next, int64_t left,
                    float (*score)[STEP], const int n, const int type) {
    const int in_pairs = has_pairs(a, type);
    vf folded[QUERIES][LANES / 4];
#pragma GCC unroll 4
    for (int four = 0; four < LANES / 4; four++) {
        vf sum[QUERIES][4];
        int64_t place[4];
        fetch(a->keys, next + 4 * four * a->dim, 4 * a->dim, type);
        for (int t = 0; t < 4; t++) {
            int64_t token = 4 * four + t < left ? 4 * four + t : left - 1;
            place[t] = at + token * a->dim;
            for (int q = 0; q < n; q++) sum[q][t] = (vf){0};
        }
#ifdef __AVX512BF16__
        for (int64_t k = 0; in_pairs && k < a->dim; k += 32)
#pragma GCC unroll 4
            for (int t = 0; t < 4; t++) {
                const uint16_t *from = (const uint16_t *)a->keys + place[t] + k;
                __m512bh key = (__m512bh)_mm512_loadu_si512(from);
#pragma GCC unroll 4
                for (int q = 0; q < n; q++) {
                    __m512bh own = (__m512bh)_mm512_load_si512(query->narrow[q] + k);
                    sum[q][t] = (vf)_mm512_dpbf16_ps((__m512)sum[q][t], key, own);
                }
            }
#endif
        for (int64_t k = 0; !in_pairs && k < a->dim; k += 16)
#pragma GCC unroll 4
            for (int part = 0; part < 16 / LANES; part++)
#pragma GCC unroll 4
                for (int t = 0; t < 4; t++) {
                    int64_t column = k + part * LANES;
                    vf key = load_part(a->keys, place[t] + column, part, type);
#pragma GCC unroll 4
                    for (int q = 0; q < n; q++) sum[q][t] += key * load(query->wide[q] + column);
                }
        for (int q = 0; q < n; q++) folded[q][four] = fold(sum[q], LANES / 2);
    }
    for (int q = 0; q < n; q++) {
        vf all = total_of(folded[q]);
        store(score[q], in_pairs ? all * a->scaling : all);
        for (int64_t t = left; t < LANES; t++) score[q][t] = -INFINITY;
    }
}

/* Adds the values of the tokens [skip, count) of a step, LANES at each place of `at`; `next` as above. */
INLINE void add_values(const Attention *a, const int64_t *at, const int64_t *next, int64_t skip,
                       int64_t count, const float (*share)[STEP], float (*total)[MOST_DIM],
                       const int n, const int wide, int64_t k, const int type) {
    vf sum[QUERIES][4];
    for (int q = 0; q < n; q++)
        for (int j = 0; j < wide; j++) sum[q][j] = load(total[q] + k + LANES * j);
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t place = at[first / LANES] + k, end = count - first < LANES ? count - first : LANES;
        for (int64_t t = first ? 0 : skip; t < end; t++) {
            fetch(a->values, next[first / LANES] + t * a->dim + k, LANES * wide, type);
#pragma GCC unroll 4
            for (int j = 0; j < wide; j++) {
                int64_t from = place + t * a->dim + LANES * j;
                vf value = wide == 4 ? load_part(a->values, from, LANES * j % 16 / LANES, type)
                                     : load_stored(a->values, from, type);
#pragma GCC unroll 4
                for (int q = 0; q < n; q++) sum[q][j] += value * share[q][first + t];
            }
        }
    }
    for (int q = 0; q < n; q++)
        for (int j = 0; j < wide; j++) store(total[q] + k + LANES * j, sum[q][j]);
}

INLINE void scale_scores(const void *scales, const Attention *a, const int64_t *at, int64_t count,
                         float *score) {
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t place = at[i / LANES] / a->dim;
        if (i + LANES <= count)
            store(score + i, load(score + i) * load_lanes(scales, place, TYPE_BF16));
        else
            for (int64_t t = 0; i + t < count; t++) score[i + t] *= scale_of(scales, place + t);
    }
}

/* Where the result of a query goes: to the answers, or as weight, most and total to `partial`. */
INLINE void put_result(const Attention *a, int64_t token, int64_t head, const float *total,
                       float most, float weight, float *partial) {
    int64_t to = (token * a->kv_heads * a->group + head) * a->dim;
    float back[MOST_DIM] __attribute__((aligned(64)));
    if (a->stored == TYPE_INT4 && !partial) {
        memcpy(back, total, (size_t)a->dim * sizeof *back);
        rotate(back, a->dim);
        total = back;
    }
    if (partial) partial[0] = weight, partial[1] = most, partial += 2;
    for (int64_t k = 0; k < a->dim; k += LANES) {
        vf sum = load(total + k);
        if (partial) store(partial + k, sum);
        else store_typed(a->out, to + k, LANES, typed_bits(sum / weight, a->type), a->type);
    }
}

/* The queries [first, first + n) of a KV head on the tokens [from, to) of those that they see. */
INLINE void attend(const Attention *a, int64_t token, int64_t kv_head, int64_t first, int64_t from,
                   int64_t to, float *partial, const int n, const int type) {
    Queries query;
    float total[QUERIES][MOST_DIM] __attribute__((aligned(64)));
    float score[QUERIES][STEP] __attribute__((aligned(64)));
    float most[QUERIES];
    vf weight[QUERIES]; /* sums lane by lane */
    int64_t head = kv_head * a->group + first, at[RUNS], next[RUNS];
    for (int q = 0; q < n; q++) {
        int64_t place = token * a->query_token + (head + q) * a->query_head;
        for (int64_t k = 0; k < a->dim; k += LANES) {
            store(query.wide[q] + k, load_any(a->query, place + k, a->type) * a->scaling);
            store(total[q] + k, (vf){0});
        }
        if (type == TYPE_INT4) rotate(query.wide[q], a->dim);
        if (has_pairs(a, type))
            memcpy(query.narrow[q], (const uint16_t *)a->query + place, (size_t)a->dim * 2);
        int has_sink = a->sinks && !partial; /* pieces get it when they are put together */
        most[q] = has_sink ? a->sinks[head + q] : -INFINITY;
        weight[q] = (vf){has_sink};
    }
    const int32_t *table = a->tables + a->starts[token];
    int64_t start = first_seen(a, a->lengths[token]), end = to;
    if (start < from) start = from;
    for (int64_t t = start & ~(int64_t)(LANES - 1); t < end; t += STEP) {
        int64_t count = end - t < STEP ? end - t : STEP, skip = t < start ? start - t : 0;
        for (int64_t u = 0; u < count; u += LANES) at[u / LANES] = place_of(a, table, kv_head, t + u);
        for (int64_t u = 0; u < STEP; u += LANES) {
            int64_t later = t + STEP + u;
            next[u / LANES] = later < end ? place_of(a, table, kv_head, later) : at[0];
        }
        for (int64_t u = 0; u < count; u += LANES)
            score_lanes(a, &query, at[u / LANES], next[u / LANES], count - u,
                    (float (*)[STEP])(score[0] + u), n, type);
        for (int q = 0; q < n; q++) {
            if (has_scales(type)) scale_scores(a->key_scales, a, at, count, score[q]);
            if (a->softcap)
                for (int64_t i = 0; i < count; i += LANES)
                    store(score[q] + i, capped(load(score[q] + i), a->softcap));
            if (a->bias)
                for (int i = 0; i < count; i++) score[q][i] += a->bias[(head + q) * a->bias_head + t + i];
            for (int64_t i = 0; i < skip; i++) score[q][i] = -INFINITY;
            if (a->softcap) /* a cap lifts what is not there to -cap */
                for (int64_t i = count; i % LANES; i++) score[q][i] = -INFINITY;
            float shrink = weigh(score[q], count, &most[q], &weight[q]);
            if (shrink != 1)
                for (int64_t k = 0; k < a->dim; k++) total[q][k] *= shrink;
            if (has_scales(type)) scale_scores(a->value_scales, a, at, count, score[q]);
        }
        int64_t k = 0;
        for (; k + 4 * LANES <= a->dim; k += 4 * LANES)
            add_values(a, at, next, skip, count, score, total, n, 4, k, type);
        for (; k < a->dim; k += LANES) add_values(a, at, next, skip, count, score, total, n, 1, k, type);
    }
    for (int q = 0; q < n; q++)
        put_result(a, token, head + q, total[q], most[q], lanes_sum(weight[q]),
                   partial ? partial + (first + q) * (a->dim + 2) : 0);
}

typedef void (*Attend)(const Attention *, int64_t, int64_t, int64_t, int64_t, float *);
#define ATTEND(TYPE)                                                                             \
    static void attend_##TYPE(const Attention *a, int64_t token, int64_t head, int64_t from,     \
                              int64_t to, float *partial) {                                      \
        int64_t q = 0;                                                                           \
        for (; q + QUERIES <= a->group; q += QUERIES)                                            \
            attend(a, token, head, q, from, to, partial, QUERIES, TYPE);                         \
        if (a->group - q == 3) attend(a, token, head, q, from, to, partial, 3, TYPE);            \
        if (a->group - q == 2) attend(a, token, head, q, from, to, partial, 2, TYPE);            \
        if (a->group - q == 1) attend(a, token, head, q, from, to, partial, 1, TYPE);            \
    }
ATTEND(TYPE_F32) ATTEND(TYPE_F16) ATTEND(TYPE_BF16) ATTEND(TYPE_INT8) ATTEND(TYPE_INT4)

static const Attend attends[] = {attend_TYPE_F32, attend_TYPE_F16, attend_TYPE_BF16,
                                 attend_TYPE_INT8, attend_TYPE_INT4};

/* ---- pieces of long sequences ---------------------------------------------------------------- */

/* Puts the pieces of a query together: `partial` is the first, others follow `stride` apart. */
static void join(const Attention *a, int64_t token, int64_t head, const float *partial,
                 int64_t stride, int64_t count) {
    float total[MOST_DIM] __attribute__((aligned(64))) = {0}, sink = a->sinks ? a->sinks[head] : 0;
    float most = a->sinks ? sink : -INFINITY;
    for (int64_t i = 0; i < count; i++) {
        float own = partial[i * stride + 1];
        if (own > most || own != own) most = own;
    }
    float weight = a->sinks ? expf(sink - most) : 0;
    for (int64_t i = 0; i < count; i++, partial += stride) {
        if (partial[0] == 0) continue; /* before the window */
        float share = expf(partial[1] - most);
        weight += partial[0] * share;
        for (int64_t k = 0; k < a->dim; k++) total[k] += partial[2 + k] * share;
    }
    put_result(a, token, head, total, most, weight, 0);
}

static void attend_piece(const Attention *a, const Pieces *pieces, int64_t item, int64_t head) {
    int64_t low = 0, high = a->count; /* of the tokens: first[low] <= item < first[high] */
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (pieces->first[middle] <= item) low = middle;
        else high = middle;
    }
    int64_t token = token_of(a, low), length = a->lengths[token], first = pieces->first[low];
    int64_t count = pieces->first[low + 1] - first, from = (item - first) * PIECE;
    int64_t to = from + PIECE < length ? from + PIECE : length;
    if (a->stores && to == length) keep_token(a, token, head);
    if (count == 1) {
        attends[a->stored](a, token, head, 0, length, 0);
        return;
    }
    int64_t size = a->dim + 2, stride = a->kv_heads * a->group * size;
    float *partial = pieces->partial + first * stride + head * a->group * size;
    attends[a->stored](a, token, head, from, to, partial + (item - first) * stride);
    int32_t *done = pieces->done + low * a->kv_heads + head;
    if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < count) return;
    *done = 0;
    for (int64_t q = 0; q < a->group; q++)
        join(a, token, head * a->group + q, partial + q * size, stride, count);
}

/* One token's queries of one KV head, or a piece of them: item = (token or piece) * kv_heads + head. */
void attention_part(const Attention *a, const Pieces *pieces, int64_t item) {
    int64_t head = item % a->kv_heads;
    if (pieces->first) {
        attend_piece(a, pieces, item / a->kv_heads, head);
        return;
    }
    int64_t token = token_of(a, item / a->kv_heads);
    if (a->stores) keep_token(a, token, head);
    attends[a->stored](a, token, head, 0, a->lengths[token], 0);
}

int64_t attention_items(const Attention *a, const Pieces *pieces) {
    return (pieces->first ? pieces->first[a->count] : a->count) * a->kv_heads;
}

/* Cuts the tokens of a call if a sequence is longer than PIECE tokens; a piece has `values` numbers. */
void cut_pieces(Pieces *pieces, const Attention *a, int64_t values) {
    int64_t all = 0;
    pieces->first = 0;
    for (int64_t i = 0; i < a->count; i++) all += (a->lengths[token_of(a, i)] + PIECE - 1) / PIECE;
    if (all == a->count) return;
    size_t firsts = (size_t)(a->count + 1) * sizeof *pieces->first;
    size_t dones = (size_t)(a->count * a->kv_heads) * sizeof *pieces->done;
    dones = (dones + 63) / 64 * 64;
    char *room = malloc(firsts + dones + (size_t)(all * values) * sizeof(float));
    if (!room) return; /* one thread reads a long sequence */
    pieces->first = (int64_t *)room;
    pieces->done = (int32_t *)(room + firsts);
    pieces->partial = (float *)(room + firsts + dones);
    memset(pieces->done, 0, dones);
    pieces->first[0] = 0;
    for (int64_t i = 0; i < a->count; i++)
        pieces->first[i + 1] = pieces->first[i] + (a->lengths[token_of(a, i)] + PIECE - 1) / PIECE;
}

typedef struct {
    const Attention *attention;
    Pieces pieces;
} Call;

static void call_part(void *data, int64_t item) {
    const Call *call = data;
    const Attention *a = call->attention;
    int64_t runs = runs_items(a);
    if (item < runs) runs_part(a, item);
    else attention_part(a, &call->pieces, item - runs);
}

void kernels_attend(const Attention *a) {
    Call call = {.attention = a};
    cut_pieces(&call.pieces, a, a->kv_heads * a->group * (a->dim + 2));
    int64_t items = runs_items(a) + attention_items(a, &call.pieces);
    run_parts(call_part, &call, items, a->threads);
    free(call.pieces.first);
}
