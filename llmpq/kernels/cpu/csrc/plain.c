/* Weights as torch stores them, [rows, columns], multiplied by a few rows of x of the same type. */
#include "lanes.h"
#include "step.h"

#ifdef __AVX2__
enum { ROWS = 4, AT_ONCE = LANES / 4 }; /* of x, and of the weight, whose sums fit the registers */

INLINE float total_of(vf v) {
    for (int step = LANES / 2; step; step /= 2) v += __builtin_shuffle(v, lane_numbers() ^ step);
    return v[0];
}

#ifdef __AVX512BF16__
INLINE __m512bh pairs_at(const void *from, int64_t at) {
    return (__m512bh)_mm512_loadu_si512((const uint16_t *)from + at);
}

/* Adds products of pairs of bf16 numbers; returns how many columns were taken. */
INLINE int64_t add_pairs(const Product *p, int64_t row, int64_t first, vf (*sum)[AT_ONCE],
                         const int count, const int wide) {
    int64_t columns = p->weight->columns, k = 0;
    for (; k + 2 * LANES <= columns; k += 2 * LANES) {
        __m512bh weight[AT_ONCE];
        for (int n = 0; n < wide; n++) weight[n] = pairs_at(p->weight->tiles, (row + n) * columns + k);
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            __m512bh own = pairs_at(p->x, (first + m) * columns + k);
#pragma GCC unroll 4
            for (int n = 0; n < wide; n++)
                sum[m][n] = (vf)_mm512_dpbf16_ps((__m512)sum[m][n], weight[n], own);
        }
    }
    return k;
}
#endif

INLINE void multiply(const Product *p, int64_t row, int64_t first, int out, const int type,
                     const int count, const int wide) {
    int64_t columns = p->weight->columns, k = 0;
    vf sum[ROWS][AT_ONCE];
    for (int m = 0; m < count; m++)
        for (int n = 0; n < wide; n++) sum[m][n] = (vf){0};
#ifdef __AVX512BF16__
    if (type == TYPE_BF16) k = add_pairs(p, row, first, sum, count, wide);
#endif
    for (; k < columns; k += LANES) {
        vf weight[AT_ONCE];
        for (int n = 0; n < wide; n++)
            weight[n] = load_lanes(p->weight->tiles, (row + n) * columns + k, type);
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            vf own = load_lanes(p->x, (first + m) * columns + k, type);
#pragma GCC unroll 4
            for (int n = 0; n < wide; n++) sum[m][n] += own * weight[n];
        }
    }
    for (int m = 0; m < count; m++)
        for (int n = 0; n < wide; n++) {
            float y = p->bias ? load_one(p->bias, row + n, type) : 0;
            y += total_of(sum[m][n]);
            int64_t at = (first + m) * p->weight->rows + row + n;
            store_typed(p->y, at, 1, typed_bits((vf){0} + y, out), out);
        }
}

INLINE void few(const Product *p, int64_t row, int64_t first, int out, const int type,
                const int wide) {
    switch (p->count - first) {
    case 1: multiply(p, row, first, out, type, 1, wide); break;
    case 2: multiply(p, row, first, out, type, 2, wide); break;
    case 3: multiply(p, row, first, out, type, 3, wide); break;
    default: multiply(p, row, first, out, type, 4, wide);
    }
}

INLINE void part(const Product *p, int64_t row, int64_t end, int out, const int type) {
    for (; row + AT_ONCE <= end; row += AT_ONCE)
        for (int64_t first = 0; first < p->count; first += ROWS)
            few(p, row, first, out, type, AT_ONCE);
    for (; row < end; row++)
        for (int64_t first = 0; first < p->count; first += ROWS) few(p, row, first, out, type, 1);
}

/* Rows [16 item, 16 item + 16) of the weight; `out` is the type of y. */
void plain_part(const Product *p, int out, int64_t item) {
    int64_t row = 16 * item, end = row + 16 < p->weight->rows ? row + 16 : p->weight->rows;
    if (p->weight->bits == 32) part(p, row, end, out, TYPE_F32);
    else if (p->weight->scale_type == TYPE_F16) part(p, row, end, out, TYPE_F16);
    else part(p, row, end, out, TYPE_BF16);
}
#endif
