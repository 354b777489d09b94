/* Norms, residuals, rotary embeddings and activations of single rows of a step. Every number
 * is rounded where the operators of torch and transformers round it. */
#include "rows.h"
#include "lanes.h"

#ifdef __AVX2__
#include <math.h>

enum { SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, CLAMPED };

INLINE void put(void *to, int64_t at, vf v, const int type) {
    store_typed(to, at, LANES, typed_bits(v, type), type);
}

INLINE vf rounded(vf v, const int type) {
    return typed_value(typed_bits(v, type), type);
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
    for (int64_t at = m * o->columns; at < (m + 1) * o->columns; at += LANES) {
        vf x = load_lanes(o->x, at, type);
        if (o->more) x += rounded(load_lanes(o->more, at, type) * o->factor, type);
        else x *= o->factor;
        put(o->x, at, x, type);
    }
}

void add_row(const AddRows *o, int64_t m, int type) {
    if (type == TYPE_F32) add_typed(o, m, TYPE_F32);
    else if (type == TYPE_F16) add_typed(o, m, TYPE_F16);
    else add_typed(o, m, TYPE_BF16);
}

/* ---- rotary embeddings ----------------------------------------------------------------------- */

/* LANES pairs of features, from pair k on. */
INLINE void turn_lanes(const RotateRows *o, int64_t at, int64_t table, int64_t k, const int type,
                   const int table_type, const int pairs) {
    int64_t half = o->turned / 2, low = at + (pairs ? 2 * k : k);
    int64_t high = pairs ? low + LANES : low + half;
    vf a = load_lanes(o->x.data, low, type), b = load_lanes(o->x.data, high, type);
    if (pairs) {
        const vi evens = 2 * lane_numbers();
        vf even = __builtin_shuffle(a, b, evens);
        b = __builtin_shuffle(a, b, evens + 1);
        a = even;
    }
    vf first = rounded(a * load_lanes(o->cos, table + k, table_type), table_type);
    vf other = rounded(b * load_lanes(o->cos, table + half + k, table_type), table_type);
    first -= rounded(b * load_lanes(o->sin, table + k, table_type), table_type);
    other += rounded(a * load_lanes(o->sin, table + half + k, table_type), table_type);
    if (pairs) {
        const vi lane = lane_numbers(), turns = (lane >> 1) + (lane & 1) * LANES;
        vf left = __builtin_shuffle(first, other, turns);
        other = __builtin_shuffle(first, other, turns + LANES / 2);
        first = left;
    }
    put(o->x.data, low, first, type);
    put(o->x.data, high, other, type);
}

INLINE void put_one(void *to, int64_t at, float number, const int type) {
    if (type == TYPE_F32) ((float *)to)[at] = number;
    else ((uint16_t *)to)[at] = (uint16_t)typed_bits((vf){0} + number, type)[0];
}

/* A single pair. */
INLINE void turn1(const RotateRows *o, int64_t at, int64_t table, int64_t k, const int type,
                  const int table_type, const int pairs) {
    int64_t half = o->turned / 2, low = at + (pairs ? 2 * k : k);
    int64_t high = pairs ? low + 1 : low + half;
    float a = load_one(o->x.data, low, type), b = load_one(o->x.data, high, type);
    float first = rounded_one(a * load_one(o->cos, table + k, table_type), table_type);
    float other = rounded_one(b * load_one(o->cos, table + half + k, table_type), table_type);
    first -= rounded_one(b * load_one(o->sin, table + k, table_type), table_type);
    other += rounded_one(a * load_one(o->sin, table + half + k, table_type), table_type);
    put_one(o->x.data, low, first, type);
    put_one(o->x.data, high, other, type);
}

INLINE void rotate_typed(const RotateRows *o, int64_t m, const int type, const int table_type,
                         const int pairs) {
    int64_t half = o->turned / 2, table = m * o->turned;
    for (int64_t head = 0; head < o->heads; head++) {
        int64_t at = m * o->x.row + head * o->x.head, k = 0;
        for (; k + LANES <= half; k += LANES) turn_lanes(o, at, table, k, type, table_type, pairs);
        for (; k < half; k++) turn1(o, at, table, k, type, table_type, pairs);
    }
}

INLINE void rotate_by(const RotateRows *o, int64_t m, const int type, const int table_type) {
    if (o->pairs) rotate_typed(o, m, type, table_type, 1);
    else rotate_typed(o, m, type, table_type, 0);
}

void rotate_row(const RotateRows *o, int64_t m, int type) {
    if (type == TYPE_F32) rotate_by(o, m, TYPE_F32, TYPE_F32);
    else if (type == TYPE_F16 && o->table_type == TYPE_F32) rotate_by(o, m, TYPE_F16, TYPE_F32);
    else if (type == TYPE_F16) rotate_by(o, m, TYPE_F16, TYPE_F16);
    else if (o->table_type == TYPE_F32) rotate_by(o, m, TYPE_BF16, TYPE_F32);
    else rotate_by(o, m, TYPE_BF16, TYPE_BF16);
}

/* ---- activations ----------------------------------------------------------------------------- */

INLINE vf activated(vf x, const int activation) {
    if (activation == RELU) return either(x < 0, (vf){0}, x);
    if (activation == RELU2) return either(x < 0, (vf){0}, x * x);
    if (activation == GELU) {
        vf y;
        for (int i = 0; i < LANES; i++) y[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f));
        return y;
    }
    /* 1 / (1 + e^-u), or x times it; u = x or twice what the hyperbolic tangent is taken of. */
    vf u = activation == GELU_TANH ? x * (1 + 0.044715f * x * x) * 1.59576912f : x;
    vf e = exponential(-magnitude(u)), share = either(u < 0, e, e * 0 + 1);
    return (activation == SIGMOID ? share : x * share) / (1 + e);
}

INLINE void gate_typed(const GateRows *o, int64_t m, const int type, const int activation) {
    for (int64_t k = 0; k < o->columns; k += LANES) {
        vf y = activated(load_lanes(o->gate, m * o->gate_row + k, type), activation);
        if (o->up) y = rounded(y, type) * load_lanes(o->up, m * o->up_row + k, type);
        put(o->y, m * o->y_row + k, y, type);
    }
}

/* The activation of gpt_oss. */
INLINE void clamp_typed(const GateRows *o, int64_t m, const int type) {
    const vi evens = 2 * lane_numbers();
    const vf most = (vf){0} + o->limit;
    for (int64_t k = 0; k < o->columns; k += LANES) {
        int64_t at = m * o->gate_row + 2 * k;
        vf a = load_lanes(o->gate, at, type), b = load_lanes(o->gate, at + LANES, type);
        vf x = __builtin_shuffle(a, b, evens), up = __builtin_shuffle(a, b, evens + 1);
        x = either(x > most, most, x);
        up = either(up > most, most, either(up < -most, -most, up));
        vf u = o->alpha * x, e = exponential(-magnitude(u));
        vf y = rounded(x * either(u < 0, e, e * 0 + 1) / (1 + e), type);
        put(o->y, m * o->y_row + k, rounded(up + 1, type) * y, type);
    }
}

void gate_row(const GateRows *o, int64_t m, int type) {
#define GATED(KIND)                                                                              \
    case KIND:                                                                                   \
        if (type == TYPE_F32) gate_typed(o, m, TYPE_F32, KIND);                                  \
        else if (type == TYPE_F16) gate_typed(o, m, TYPE_F16, KIND);                             \
        else gate_typed(o, m, TYPE_BF16, KIND);                                                  \
        break;
    switch (o->activation) {
        GATED(SILU) GATED(GELU) GATED(GELU_TANH) GATED(RELU) GATED(RELU2) GATED(SIGMOID)
    case CLAMPED:
        if (type == TYPE_F32) clamp_typed(o, m, TYPE_F32);
        else if (type == TYPE_F16) clamp_typed(o, m, TYPE_F16);
        else clamp_typed(o, m, TYPE_BF16);
    }
}

/* ---- copies ---------------------------------------------------------------------------------- */

void copy_row(const CopyRows *o, int64_t m, int type) {
    const int64_t size = type == TYPE_F32 ? 4 : 2;
    const char *x = (const char *)o->x.data + m * o->x.row * size;
    char *y = (char *)o->y.data + m * o->y.row * size;
    for (int64_t head = 0; head < o->heads; head++)
        memcpy(y + head * o->y.head * size, x + head * o->x.head * size, o->columns * size);
}
#endif
