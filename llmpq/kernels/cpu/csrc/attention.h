/* What the two kernels of attention on blocks share. */
#ifndef LLMPQ_ATTENTION_H
#define LLMPQ_ATTENTION_H

#include "lanes.h"
#include "step.h"
#include <math.h>

enum { MOST_DIM = 576, TYPE_INT8 = 3, TYPE_INT4 = 4 };

/* Where 16 tokens from position `at` (a multiple of 16) of a head begin. */
INLINE int64_t place_of(const Attention *a, const int32_t *table, int64_t head, int64_t at) {
    int64_t inside = at & (((int64_t)1 << a->block_bits) - 1);
    return table[at >> a->block_bits] * a->block_stride + head * a->head_stride + inside * a->dim;
}

INLINE int64_t token_of(const Attention *a, int64_t item) {
    return a->chosen ? a->chosen[item] : item;
}

/* Whether keys and values are codes, with a scale for each token and head. */
INLINE int has_scales(const int type) {
    return type == TYPE_INT8 || type == TYPE_INT4;
}

/* Codes of 4 bits, a number is 2 code - 15. Eight bytes have 16 of them: even ones are the nibbles of
 * the first word, odd ones those of the second, lower bits first. `part` is (at % 16) / LANES. */
INLINE vf load_nibbles(const void *from, int64_t at, int part) {
    const uint8_t *codes = (const uint8_t *)from + (at >> 4 << 3);
    const vi lane = lane_numbers();
    (void)lane, (void)part;
#if defined(__AVX512F__)
    const __m512 numbers = _mm512_setr_ps(-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15);
    int64_t words;
    memcpy(&words, codes, sizeof words);
    __m512i own = _mm512_srlv_epi32(_mm512_set1_epi64(words), (__m512i)(lane >> 1 << 2));
    return (vf)_mm512_permutexvar_ps(own, numbers); /* reads the lowest 4 bits */
#elif defined(__AVX2__)
    int64_t words;
    memcpy(&words, codes, sizeof words);
    __m256i shift = (__m256i)((lane >> 1 << 2) + 16 * part);
    __m256i own = _mm256_srlv_epi32(_mm256_set1_epi64x(words), shift);
    own = _mm256_and_si256(own, _mm256_set1_epi32(15));
    return (vf)_mm256_cvtepi32_ps(own) * 2 - 15;
#else
    uint32_t words[2];
    memcpy(words, codes, sizeof words);
    int shift = 8 * part;
    vi own = {(int)(words[0] >> shift), (int)(words[1] >> shift), (int)(words[0] >> shift >> 4),
              (int)(words[1] >> shift >> 4)};
    return __builtin_convertvector((own & 15) * 2 - 15, vf);
#endif
}

INLINE vf load_stored(const void *from, int64_t at, const int type) {
    if (type == TYPE_INT4) return load_nibbles(from, at, (int)(at % 16 / LANES));
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

/* The same of a part that the compiler knows. */
INLINE vf load_part(const void *from, int64_t at, const int part, const int type) {
    return type == TYPE_INT4 ? load_nibbles(from, at, part) : load_stored(from, at, type);
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

/* Multiplies [dim] numbers by a Hadamard matrix of the largest power of two that divides dim, in blocks
 * of it. The matrix is symmetric and its own inverse. */
INLINE void rotate(float *x, int64_t dim) {
    const vi lane = lane_numbers();
    int64_t size = dim & -dim;
    for (int64_t k = 0; k < dim; k += LANES) {
        vf own;
        memcpy(&own, x + k, sizeof own);
#pragma GCC unroll 4
        for (int step = 1; step < LANES; step *= 2) {
            vf other = __builtin_shuffle(own, lane ^ step);
            own = other + either((lane & step) != 0, -own, own);
        }
        memcpy(x + k, &own, sizeof own);
    }
    for (int64_t step = LANES; step < size; step *= 2)
        for (int64_t k = 0; k < dim; k += LANES) {
            if (k & step) continue;
            vf a, b, sum, rest;
            memcpy(&a, x + k, sizeof a);
            memcpy(&b, x + k + step, sizeof b);
            sum = a + b, rest = a - b;
            memcpy(x + k, &sum, sizeof sum);
            memcpy(x + k + step, &rest, sizeof rest);
        }
    const float norm = 1 / sqrtf((float)size);
    for (int64_t k = 0; k < dim; k++) x[k] *= norm;
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
