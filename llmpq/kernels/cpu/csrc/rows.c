/* Norms, residuals, rotary embeddings and activations of single rows of a decode step. Every number
 * is rounded where the operators of torch and transformers round it. */
#include "rows.h"
#include "lanes.h"

#ifdef __AVX512F__
#include <math.h>

enum { SILU, GELU, GELU_TANH, RELU, RELU2 };

INLINE void put(void *to, int64_t at, v16f v, const int type) {
    v16h narrow = narrowed(v);
    if (type == TYPE_F32) store_floats((float *)to + at, v);
    else memcpy((uint16_t *)to + at, &narrow, sizeof narrow);
}

INLINE v16f rounded(v16f v, const int type) {
    if (type == TYPE_F32) return v;
    return (v16f)(__builtin_convertvector(narrowed(v), v16u) << 16);
}

/* ---- norms and residuals --------------------------------------------------------------------- */

static char *head_of(const Heads *h, int64_t m, int64_t head, int type) {
    return (char *)h->data + (m * h->row + head * h->head) * (type == TYPE_F32 ? 4 : 2);
}

void norm_row_heads(const NormRows *o, int64_t m) {
    Norm own = o->norm;
    for (int64_t head = 0; head < o->heads; head++) {
        own.x = head_of(&o->x, m, head, own.type);
        own.y = head_of(&o->y, m, head, own.type);
        if (own.weight) own.weight = (const float *)o->norm.weight + head * o->weight_head;
        norm_rows(&own, 0, 1);
    }
}

INLINE void add_typed(const AddRows *o, int64_t m, const int type) {
    for (int64_t at = m * o->columns; at < (m + 1) * o->columns; at += 16) {
        v16f x = load_typed(o->x, at, type);
        if (o->more) x += rounded(load_typed(o->more, at, type) * o->factor, type);
        else x *= o->factor;
        put(o->x, at, x, type);
    }
}

void add_row(const AddRows *o, int64_t m, int type) {
    if (type == TYPE_F32) add_typed(o, m, TYPE_F32);
    else add_typed(o, m, TYPE_BF16);
}

/* ---- rotary embeddings ----------------------------------------------------------------------- */

/* 16 pairs of features, from pair k on. */
INLINE void turn16(const RotateRows *o, int64_t at, int64_t table, int64_t k, const int type,
                   const int table_type, const int pairs) {
    int64_t half = o->turned / 2, low = at + (pairs ? 2 * k : k);
    int64_t high = pairs ? low + 16 : low + half;
    v16f a = load_typed(o->x.data, low, type), b = load_typed(o->x.data, high, type);
    if (pairs) {
        v16f even = __builtin_shuffle(
            a, b, (v16i){0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30});
        b = __builtin_shuffle(a, b,
                              (v16i){1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
        a = even;
    }
    v16f first = rounded(a * load_typed(o->cos, table + k, table_type), table_type);
    v16f other = rounded(b * load_typed(o->cos, table + half + k, table_type), table_type);
    first -= rounded(b * load_typed(o->sin, table + k, table_type), table_type);
    other += rounded(a * load_typed(o->sin, table + half + k, table_type), table_type);
    if (pairs) {
        v16f left = __builtin_shuffle(first, other,
                                      (v16i){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
        other = __builtin_shuffle(
            first, other, (v16i){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
        first = left;
    }
    put(o->x.data, low, first, type);
    put(o->x.data, high, other, type);
}

INLINE float one(const void *from, int64_t at, const int type) {
    if (type == TYPE_F32) return ((const float *)from)[at];
    uint32_t word = (uint32_t)((const uint16_t *)from)[at] << 16;
    float number;
    memcpy(&number, &word, sizeof number);
    return number;
}

INLINE void put_one(void *to, int64_t at, float number, const int type) {
    if (type == TYPE_F32) ((float *)to)[at] = number;
    else ((uint16_t *)to)[at] = narrowed((v16f){0} + number)[0];
}

INLINE float rounded_one(float number, const int type) {
    return rounded((v16f){0} + number, type)[0];
}

/* A single pair. */
INLINE void turn1(const RotateRows *o, int64_t at, int64_t table, int64_t k, const int type,
                  const int table_type, const int pairs) {
    int64_t half = o->turned / 2, low = at + (pairs ? 2 * k : k);
    int64_t high = pairs ? low + 1 : low + half;
    float a = one(o->x.data, low, type), b = one(o->x.data, high, type);
    float first = rounded_one(a * one(o->cos, table + k, table_type), table_type);
    float other = rounded_one(b * one(o->cos, table + half + k, table_type), table_type);
    first -= rounded_one(b * one(o->sin, table + k, table_type), table_type);
    other += rounded_one(a * one(o->sin, table + half + k, table_type), table_type);
    put_one(o->x.data, low, first, type);
    put_one(o->x.data, high, other, type);
}

INLINE void rotate_typed(const RotateRows *o, int64_t m, const int type, const int table_type,
                         const int pairs) {
    int64_t half = o->turned / 2, table = m * o->turned;
    for (int64_t head = 0; head < o->heads; head++) {
        int64_t at = m * o->x.row + head * o->x.head, k = 0;
        for (; k + 16 <= half; k += 16) turn16(o, at, table, k, type, table_type, pairs);
        for (; k < half; k++) turn1(o, at, table, k, type, table_type, pairs);
    }
}

INLINE void rotate_by(const RotateRows *o, int64_t m, const int type, const int table_type) {
    if (o->pairs) rotate_typed(o, m, type, table_type, 1);
    else rotate_typed(o, m, type, table_type, 0);
}

void rotate_row(const RotateRows *o, int64_t m, int type) {
    if (type == TYPE_F32) rotate_by(o, m, TYPE_F32, TYPE_F32);
    else if (o->table_type == TYPE_F32) rotate_by(o, m, TYPE_BF16, TYPE_F32);
    else rotate_by(o, m, TYPE_BF16, TYPE_BF16);
}

/* ---- activations ----------------------------------------------------------------------------- */

INLINE v16f magnitude(v16f x) {
    return (v16f)((v16i)x & 0x7FFFFFFF);
}

INLINE v16f chosen(v16i is, v16f a, v16f b) {
    return (v16f)((is & (v16i)a) | (~is & (v16i)b));
}

INLINE v16f activated(v16f x, const int activation) {
    if (activation == RELU) return chosen(x < 0, (v16f){0}, x);
    if (activation == RELU2) return chosen(x < 0, (v16f){0}, x * x);
    if (activation == GELU) {
        v16f y;
        for (int i = 0; i < 16; i++) y[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f));
        return y;
    }
    /* Both are x / (1 + e^-u), u = x or twice what the hyperbolic tangent is taken of. */
    v16f u = activation == SILU ? x : x * (1 + 0.044715f * x * x) * 1.59576912f;
    v16f e = exponential(-magnitude(u));
    return x * chosen(u < 0, e, e * 0 + 1) / (1 + e);
}

INLINE void gate_typed(const GateRows *o, int64_t m, const int type, const int activation) {
    for (int64_t k = 0; k < o->columns; k += 16) {
        v16f y = activated(load_typed(o->gate, m * o->gate_row + k, type), activation);
        if (o->up) y = rounded(y, type) * load_typed(o->up, m * o->up_row + k, type);
        put(o->y, m * o->columns + k, y, type);
    }
}

void gate_row(const GateRows *o, int64_t m, int type) {
#define GATED(KIND)                                                                              \
    case KIND:                                                                                   \
        if (type == TYPE_F32) gate_typed(o, m, TYPE_F32, KIND);                                  \
        else gate_typed(o, m, TYPE_BF16, KIND);                                                  \
        break;
    switch (o->activation) { GATED(SILU) GATED(GELU) GATED(GELU_TANH) GATED(RELU) GATED(RELU2) }
}
#endif
