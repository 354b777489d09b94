/* What the two kernels of attention on blocks share. */
#ifndef LLMPQ_ATTENTION_H
#define LLMPQ_ATTENTION_H

#include "lanes.h"
#include "step.h"
#include <math.h>

enum { MOST_DIM = 512, TYPE_INT8 = 3 };

/* Where 16 tokens from position `at` (a multiple of 16) of a head begin. */
INLINE int64_t place_of(const Attention *a, const int32_t *table, int64_t head, int64_t at) {
    int64_t inside = at & (((int64_t)1 << a->block_bits) - 1);
    return table[at >> a->block_bits] * a->block_stride + head * a->head_stride + inside * a->dim;
}

INLINE int64_t token_of(const Attention *a, int64_t item) {
    return a->chosen ? a->chosen[item] : item;
}

INLINE vf load_stored(const void *from, int64_t at, const int type) {
    if (type != TYPE_INT8) return load_lanes(from, at, type);
    const int8_t *codes = (const int8_t *)from + at; /* GCC 12 would convert them one by one */
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
    typedef int8_t vb __attribute__((vector_size(LANES)));
    vb own;
    memcpy(&own, codes, sizeof own);
    return __builtin_convertvector(own, vf);
#endif
}

INLINE float scale_of(const void *scales, int64_t at) {
    uint32_t word = (uint32_t)((const uint16_t *)scales)[at] << 16;
    float scale;
    memcpy(&scale, &word, sizeof scale);
    return scale;
}

/* The first position that the last of `length` tokens sees. */
INLINE int64_t first_seen(const Attention *a, int64_t length) {
    int64_t first = a->window && length > a->window ? length - a->window : 0;
    if (a->chunk && (length - 1) / a->chunk * a->chunk > first)
        first = (length - 1) / a->chunk * a->chunk;
    return first;
}

/* Puts the new key and value of a token into their block. */
void keep_token(const Attention *a, int64_t token, int64_t head);
/* Runs are cut into parts, each a KV head's queries of some tokens. */
void run_part(const Attention *a, int64_t first, int64_t count, int64_t head);
int64_t runs_items(const Attention *a);
void runs_part(const Attention *a, int64_t item);

/* cap * tanh(x / cap) */
INLINE vf capped(vf x, float cap) {
    vf doubled = x * (-2 / cap);
    vi flips = doubled > 0;
    vf e = exponential(either(flips, -doubled, doubled)), y = (1 - e) / (1 + e) * cap;
    return either(flips, -y, y);
}

#endif
