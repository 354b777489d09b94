/* Round-to-nearest in one pass over each group, where torch needs ten: the grid of quant/rtn.py, to
 * the last bit. What it cannot represent it refuses, and torch's way then says what it is. */
#include "kernels.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

typedef struct {
    const void *weight; /* [rows, columns] of `type` */
    uint8_t *codes;     /* [rows, columns * bits / 8], each row a little-endian bit stream */
    void *scales;       /* [rows, columns / group] of scale_type */
    void *zeros;        /* the same, or null: symmetric */
    int64_t rows, columns, group;
    int32_t bits, type, scale_type, threads;
} Rounding;

typedef struct {
    const Rounding *call;
    int32_t refused;
} Work;

typedef uint8_t v16b __attribute__((vector_size(16)));
typedef uint64_t v8u __attribute__((vector_size(64)));

enum { ROWS_OF_PART = 16, GROUPS_AT_ONCE = 16 };
/* Added to a number below 2^22, it leaves the nearest whole one, ties to even, in the low bits. */
static const float MAGIC = 12582912.0f;
enum { MAGIC_BITS = 0x4B400000, INFINITE = 0x7F800000 };

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The nearest number of a type, as its bits. */
INLINE uint32_t typed_bits(float value, int type) {
    uint32_t bits = bits_of(value);
    if (type == TYPE_F32) return bits;
    if (type == TYPE_BF16) return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    _Float16 narrow = (_Float16)value;
    uint16_t half;
    memcpy(&half, &narrow, sizeof half);
    return half;
}

INLINE float typed_value(uint32_t bits, int type) {
    if (type == TYPE_F32) return float_of(bits);
    if (type == TYPE_BF16) return float_of(bits << 16);
    uint16_t half = (uint16_t)bits;
    _Float16 narrow;
    memcpy(&narrow, &half, sizeof narrow);
    return (float)narrow;
}

INLINE void store_typed(void *to, int64_t at, uint32_t bits, int type) {
    if (type == TYPE_F32) memcpy((uint32_t *)to + at, &bits, 4);
    else memcpy((uint16_t *)to + at, &bits, 2);
}

INLINE int is_finite(float value) {
    return (bits_of(value) & INFINITE) != INFINITE;
}

/* The lowest byte of every lane. */
INLINE v16b bytes_of(v16i lanes) {
#ifdef __AVX512F__ /* gcc makes 16 moves of it by itself */
    return (v16b)_mm512_cvtepi32_epi8((__m512i)lanes);
#else
    return __builtin_convertvector(lanes, v16b);
#endif
}

INLINE uint64_t bytes_of_pairs(v8u lanes) {
#ifdef __AVX512F__
    return (uint64_t)_mm_cvtsi128_si64(_mm512_cvtepi64_epi8((__m512i)lanes));
#else
    uint64_t bytes = 0;
    for (int i = 0; i < 8; i++) bytes |= (lanes[i] & 0xFF) << 8 * i;
    return bytes;
#endif
}

/* 16 codes, one a lane, behind each other. */
INLINE void put_codes(uint8_t *to, v16i code, const int bits) {
    if (bits == 8) {
        v16b bytes = bytes_of(code);
        memcpy(to, &bytes, sizeof bytes);
        return;
    }
    v8u pairs = (v8u)code;
    uint64_t word = bytes_of_pairs(pairs | pairs >> (32 - bits)); /* two codes a byte */
    if (bits == 3) {
        word = (word & 0x003F003F003F003F) | (word >> 2 & 0x0FC00FC00FC00FC0);
        word = (word & 0x00000FFF00000FFF) | (word >> 4 & 0x00FFF00000FFF000);
        word = (word & 0x0000000000FFFFFF) | (word >> 8 & 0x0000FFFFFF000000);
    }
    memcpy(to, &word, 2 * (size_t)bits);
}

/* a where `is` says so, else b. */
INLINE v16f either(v16i is, v16f a, v16f b) {
    return (v16f)((is & (v16i)a) | (~is & (v16i)b));
}

INLINE v16f greater(v16f a, v16f b) {
#ifdef __AVX512F__ /* the same to the bit, where gcc makes a mask and a vector of it */
    return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return either(a > b, a, b);
#endif
}

/* The least and the greatest of a group; `finite` is no longer 0 once a number is not. */
INLINE void range_of(const Rounding *r, int64_t at, float *low, float *high, v16f *finite,
                     const int type) {
    v16f most = load_typed(r->weight, at, type), least = -most; /* the least, negated */
    *finite += most * 0;
    for (int64_t k = 16; k < r->group; k += 16) {
        v16f w = load_typed(r->weight, at + k, type);
        most = greater(w, most), least = greater(-w, least);
        *finite += w * 0;
    }
    const v16i front = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, back = front + 8;
    v16f both = greater(__builtin_shuffle(most, least, front), __builtin_shuffle(most, least, back));
    const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int step = 4; step; step /= 2) both = greater(both, __builtin_shuffle(both, lane ^ step));
    *high = both[0], *low = -both[8];
}

/* Chooses and stores the grid of one group, as rtn.fit_grid does; 0 when it overflows. */
INLINE int fit_grid(const Rounding *r, int64_t group, float low, float high, float *scale,
                    float *zero) {
    float half = (float)(1 << (r->bits - 1)), steps = 2 * half - 1, step;
    if (r->zeros) {
        volatile float middle = (high / steps - low / steps) * half; /* rounded: no fused sum */
        uint32_t bits = typed_bits(low + middle, r->scale_type);
        *zero = typed_value(bits, r->scale_type);
        store_typed(r->zeros, group, bits, r->scale_type);
        float above = (high - *zero) / (half - 1), below = (*zero - low) / half;
        step = above > below ? above : below;
    } else {
        *zero = 0;
        step = (high > -low ? high : -low) / (r->bits == 8 ? 127.0f : steps / 2);
    }
    uint32_t bits = typed_bits(step, r->scale_type);
    bits += typed_value(bits, r->scale_type) < step;
    *scale = typed_value(bits, r->scale_type);
    if (*scale == 0) bits = typed_bits(*scale = 1, r->scale_type);
    store_typed(r->scales, group, bits, r->scale_type);
    return is_finite(*zero) && is_finite(*scale);
}

/* Codes of the group that begins at weight `at`. */
INLINE void round_group(const Rounding *r, int64_t at, float scale, float zero, const int type,
                        const int bits) {
    const int32_t half = 1 << (bits - 1);
    uint8_t *to = r->codes + at * bits / 8;
    for (int64_t k = 0; k < r->group; k += 16, to += 2 * bits) {
        v16f steps = (load_typed(r->weight, at + k, type) - zero) / scale + MAGIC;
        v16i code = (v16i)steps - (MAGIC_BITS - half);
        code &= ~(code >> 31); /* at least 0, and at most 2^b - 1 */
        code = (code | ((2 * half - 1 - code) >> 31)) & (2 * half - 1);
        put_codes(to, code, bits);
    }
}

/* Groups [first, end): all ranges, then all grids, then all codes. Within a group every step waits for
 * the one before; those of many overlap. Returns 0 when a weight or a grid is not finite. */
INLINE int round_groups(const Rounding *r, int64_t first, int64_t end, const int type,
                        const int bits) {
    float low[GROUPS_AT_ONCE], high[GROUPS_AT_ONCE], scale[GROUPS_AT_ONCE], zero[GROUPS_AT_ONCE];
    int count = (int)(end - first), done = 1;
    v16f finite = {0};
    for (int i = 0; i < count; i++)
        range_of(r, (first + i) * r->group, low + i, high + i, &finite, type);
    for (int i = 0; i < count; i++)
        done &= fit_grid(r, first + i, low[i], high[i], scale + i, zero + i);
    for (int i = 0; i < count; i++)
        round_group(r, (first + i) * r->group, scale[i], zero[i], type, bits);
    float sum = 0;
    for (int i = 0; i < 16; i++) sum += finite[i];
    return done && sum == 0;
}

INLINE int round_typed_groups(const Rounding *r, int64_t first, int64_t end, const int bits) {
    if (r->type == TYPE_BF16) return round_groups(r, first, end, TYPE_BF16, bits);
    if (r->type == TYPE_F16) return round_groups(r, first, end, TYPE_F16, bits);
    return round_groups(r, first, end, TYPE_F32, bits);
}

static void round_part(void *data, int64_t item) {
    Work *work = data;
    const Rounding *r = work->call;
    int64_t groups = r->columns / r->group, row = ROWS_OF_PART * item;
    int64_t rows = r->rows - row < ROWS_OF_PART ? r->rows - row : ROWS_OF_PART;
    int64_t end = (row + rows) * groups; /* groups of a row, and rows, follow each other */
    for (int64_t first = row * groups, last; first < end; first = last) {
        last = first + GROUPS_AT_ONCE < end ? first + GROUPS_AT_ONCE : end;
        int done = r->bits == 4   ? round_typed_groups(r, first, last, 4)
                   : r->bits == 3 ? round_typed_groups(r, first, last, 3)
                                  : round_typed_groups(r, first, last, 8);
        if (!done) __atomic_store_n(&work->refused, 1, __ATOMIC_RELAXED);
    }
}

/* Columns and groups are multiples of 16. Returns 1 when a weight or a grid is not finite. */
int kernels_round(const Rounding *r) {
    Work work = {r, 0};
    run_parts(round_part, &work, (r->rows + ROWS_OF_PART - 1) / ROWS_OF_PART, r->threads);
    return work.refused;
}
