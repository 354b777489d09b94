/* Vectors as wide as the processor's own, and what the compiler has to be told of them: it would take
 * wider ones apart number by number. */
#ifndef LLMPQ_LANES_H
#define LLMPQ_LANES_H

#include "kernels.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { VECTOR_BYTES = 4 * LANES };

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint64_t vl __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t vw __attribute__((vector_size(VECTOR_BYTES)));

/* Whether a b + c is rounded once. */
#ifdef __FMA__
enum { FUSES = 1 };
#else
enum { FUSES = 0 };
#endif

/* 0, 1, 2, ... */
INLINE vi lane_numbers(void) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane;
}

/* a where `is` says so, else b. */
INLINE vf either(vi is, vf a, vf b) {
    return (vf)((is & (vi)a) | (~is & (vi)b));
}

INLINE vf magnitude(vf x) {
    return (vf)((vi)x & 0x7FFFFFFF);
}

/* Of two numbers that are none, or of two zeros: b. */
INLINE vf greater(vf a, vf b) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return either(a > b, a, b);
#endif
}

/* Whole numbers brought to no less than `low` and no more than `high`. */
INLINE vi within(vi value, int low, int high) {
    const vi none = {0}, least = none + low, most = none + high;
#if defined(__AVX512F__)
    return (vi)_mm512_min_epi32(_mm512_max_epi32((__m512i)value, (__m512i)least), (__m512i)most);
#elif defined(__AVX2__)
    return (vi)_mm256_min_epi32(_mm256_max_epi32((__m256i)value, (__m256i)least), (__m256i)most);
#else
    value = (vi)either(value > least, (vf)value, (vf)least);
    return (vi)either(value < most, (vf)value, (vf)most);
#endif
}

/* a b + c; where FUSES says so rounded once, elsewhere as it comes. */
INLINE vf multiply_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* The largest number of a vector. */
INLINE float greatest(vf v) {
    for (int step = LANES / 2; step; step /= 2)
        v = greater(v, __builtin_shuffle(v, lane_numbers() ^ step));
    return v[0];
}

INLINE int32_t sum_of_ints(vi v) {
    for (int step = LANES / 2; step; step /= 2) v += __builtin_shuffle(v, lane_numbers() ^ step);
    return v[0];
}

#ifdef __AVX2__
/* The nearest whole numbers; ties to even. */
INLINE vi nearest(vf x) {
#ifdef __AVX512F__
    return (vi)_mm512_cvtps_epi32((__m512)x);
#else
    return (vi)_mm256_cvtps_epi32((__m256)x);
#endif
}

/* A bit for each lane, its sign. */
INLINE uint32_t signs_of(vi v) {
#ifdef __AVX512F__
    return _mm512_movepi32_mask((__m512i)v);
#else
    return (uint32_t)_mm256_movemask_ps((__m256)v);
#endif
}

/* Adds the products of two 16-bit numbers of either in every lane. */
INLINE vi dot_halves(vi sum, vi a, vi b) {
#ifdef __AVX512F__
    return (vi)_mm512_add_epi32((__m512i)sum, _mm512_madd_epi16((__m512i)a, (__m512i)b));
#else
    return (vi)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b));
#endif
}
#endif

/* Adds the products of four bytes of either, `a` unsigned and `b` signed, in every lane. */
#if defined(__AVX512VNNI__)
#define HAS_VNNI 1
INLINE vi dot_bytes(vi sum, vu a, vi b) {
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
}
#elif defined(__AVXVNNI__)
#define HAS_VNNI 1
INLINE vi dot_bytes(vi sum, vu a, vi b) {
    return (vi)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)a, (__m256i)b);
}
#else
#define HAS_VNNI 0
#endif

/* Numbers of a stored type, from place `at` on. */
INLINE vf load_lanes(const void *from, int64_t at, const int type) {
    vf wide;
    vh narrow;
    if (type == TYPE_F32) {
        memcpy(&wide, (const float *)from + at, sizeof wide);
        return wide;
    }
    memcpy(&narrow, (const uint16_t *)from + at, sizeof narrow);
    if (type == TYPE_BF16) return (vf)(__builtin_convertvector(narrow, vu) << 16);
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)narrow);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)narrow);
#else
    for (int i = 0; i < LANES; i++) {
        _Float16 number;
        memcpy(&number, (const uint16_t *)from + at + i, sizeof number);
        wide[i] = (float)number;
    }
    return wide;
#endif
}

/* The same of a type that the compiler does not know. */
INLINE vf load_any(const void *from, int64_t at, int type) {
    if (type == TYPE_F32) return load_lanes(from, at, TYPE_F32);
    return type == TYPE_BF16 ? load_lanes(from, at, TYPE_BF16) : load_lanes(from, at, TYPE_F16);
}

/* A single number. */
INLINE float load_one(const void *from, int64_t at, int type) {
    if (type == TYPE_F32) return ((const float *)from)[at];
    if (type == TYPE_F16) {
        _Float16 half;
        memcpy(&half, (const uint16_t *)from + at, sizeof half);
        return (float)half;
    }
    uint32_t word = (uint32_t)((const uint16_t *)from)[at] << 16;
    float number;
    memcpy(&number, &word, sizeof number);
    return number;
}

/* The nearest numbers of a type, as their bits. */
INLINE vu typed_bits(vf value, int type) {
    vu bits = (vu)value;
    if (type == TYPE_F32) return bits;
    if (type == TYPE_BF16) return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
#if defined(__AVX512F__)
    return __builtin_convertvector((vh)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT), vu);
#elif defined(__F16C__)
    return __builtin_convertvector((vh)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT), vu);
#else
    for (int i = 0; i < LANES; i++) {
        _Float16 narrow = (_Float16)value[i];
        uint16_t half;
        memcpy(&half, &narrow, sizeof half);
        bits[i] = half;
    }
    return bits;
#endif
}

INLINE vf typed_value(vu bits, int type) {
    if (type == TYPE_F32) return (vf)bits;
    vh narrow = __builtin_convertvector(bits, vh);
    return load_lanes(&narrow, 0, type);
}

/* A number rounded to a type. */
INLINE float rounded_one(float number, int type) {
    return typed_value(typed_bits((vf){0} + number, type), type)[0];
}

/* e^x for x <= 0, within two units of the last place (Cephes); NaN stays NaN. */
INLINE vf exponential(vf x) {
    x = greater((vf){0} - 87.0f, x);
    vf n = x * 1.44269504f + 12582912.0f - 12582912.0f;
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    vf y = p * (r * r) + r + 1.0f;
    return y * (vf)((__builtin_convertvector(n, vi) + 127) << 23);
}

/* The first `count` of them. */
INLINE void store_typed(void *to, int64_t at, int64_t count, vu bits, int type) {
    vh narrow = __builtin_convertvector(bits, vh);
    if (type == TYPE_F32) memcpy((uint32_t *)to + at, &bits, (size_t)count * 4);
    else memcpy((uint16_t *)to + at, &narrow, (size_t)count * 2);
}

#endif
