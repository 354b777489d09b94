/* New keys and values of tokens, put into their blocks: as they are, or as codes and a scale. */
#include "attention.h"

/* Writes the codes of a number's steps; a number that is none is written as 0. */
INLINE void put_codes(const float *x, float step, int64_t dim, void *store, int64_t to, const int type) {
    if (type == TYPE_INT8) {
        for (int64_t k = 0; k < dim; k++) {
            float code = rintf(x[k] / step);
            ((int8_t *)store)[to + k] = code == code ? (int8_t)code : 0;
        }
        return;
    }
    uint8_t *codes = (uint8_t *)store + to / 2;
    memset(codes, 0, (size_t)dim / 2);
    for (int64_t k = 0; k < dim; k++) {
        float code = rintf((x[k] / step + 15) * 0.5f);
        code = code > 15 ? 15 : code > 0 ? code : 0;
        int64_t byte = k / 16 * 8 + (k & 1) * 4 + (k & 15) / 4; /* see load_nibbles */
        codes[byte] |= (uint8_t)((int)code << (k & 2) * 2);
    }
}

INLINE void keep_codes(const Attention *a, const void *new, int64_t from, void *store, int64_t to,
                       uint16_t *scale, const int type) {
    float x[MOST_DIM] __attribute__((aligned(64))), peak = 0;
    for (int64_t k = 0; k < a->dim; k += LANES) {
        vf wide = load_any(new, from + k, a->type);
        memcpy(x + k, &wide, sizeof wide);
    }
    if (type == TYPE_INT4) rotate(x, a->dim);
    for (int64_t k = 0; k < a->dim; k++) {
        float size = fabsf(x[k]);
        if (size > peak || size != size) peak = size; /* what is not a number stays one */
    }
    *scale = narrowed((v16f){0} + peak * (type == TYPE_INT8 ? (float)(1.0 / 127) : 1.0f / 16))[0];
    float step = scale_of(scale, 0);
    if (step < 1.17549435e-38f) step = 1.17549435e-38f;
    put_codes(x, step, a->dim, store, to, type);
}

static void keep(const Attention *a, const void *new, int64_t from, void *store, int64_t to,
                 void *scales) {
    uint16_t *scale = (uint16_t *)scales + to / a->dim;
    if (a->stored == TYPE_INT8) {
        keep_codes(a, new, from, store, to, scale, TYPE_INT8);
        return;
    }
    if (a->stored == TYPE_INT4) {
        keep_codes(a, new, from, store, to, scale, TYPE_INT4);
        return;
    }
    for (int64_t k = 0; k < a->dim; k += LANES)
        store_typed(store, to + k, LANES, typed_bits(load_any(new, from + k, a->type), a->stored),
                    a->stored);
}

void keep_token(const Attention *a, int64_t token, int64_t head) {
    int64_t to = place_of(a, a->tables + a->starts[token], head, a->lengths[token] - 1);
    keep(a, a->new_key, token * a->key_token + head * a->key_head, a->keys, to, a->key_scales);
    keep(a, a->new_value, token * a->value_token + head * a->value_head, a->values, to,
         a->value_scales);
}

/* Puts the new keys and values of one token into their block. */
void store_part(void *data, int64_t item) {
    const Attention *a = data;
    for (int64_t head = 0; head < a->kv_heads; head++) keep_token(a, token_of(a, item), head);
}

/* Puts the new keys and values of the tokens of a call into their blocks. */
void kernels_store(const Attention *a) {
    run_parts(store_part, (void *)a, a->count, a->threads);
}
