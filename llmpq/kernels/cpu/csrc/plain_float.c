/* float32 weights as torch stores them, [rows, columns], multiplied by a few rows of x. */
#include "lanes.h"
#include "step.h"

#ifdef __AVX2__
enum { ROWS = 4, AT_ONCE = LANES / 4 }; /* of x, and of the weight, whose sums fit the registers */

INLINE void multiply(const Product *p, int64_t row, int64_t first, const int count) {
    int64_t columns = p->weight->columns;
    const float *x = (const float *)p->x + first * columns;
    const float *weight = (const float *)p->weight->tiles + row * columns;
    vf sum[ROWS][AT_ONCE];
    for (int m = 0; m < count; m++)
        for (int n = 0; n < AT_ONCE; n++) sum[m][n] = (vf){0};
    for (int64_t k = 0; k < columns; k += LANES)
#pragma GCC unroll 4
        for (int m = 0; m < count; m++) {
            vf own = load_lanes(x, m * columns + k, TYPE_F32);
#pragma GCC unroll 4
            for (int n = 0; n < AT_ONCE; n++)
                sum[m][n] += own * load_lanes(weight, n * columns + k, TYPE_F32);
        }
    for (int m = 0; m < count; m++)
        for (int n = 0; n < AT_ONCE; n++) {
            float y = p->bias ? ((const float *)p->bias)[row + n] : 0;
            for (int i = 0; i < LANES; i++) y += sum[m][n][i];
            ((float *)p->y)[(first + m) * p->weight->rows + row + n] = y;
        }
}

/* Rows [16 item, 16 item + 16) of the weight. */
void plain_part(const Product *p, int64_t item) {
    for (int64_t first = 0; first < p->count; first += ROWS)
        for (int64_t row = 16 * item; row < 16 * item + 16; row += AT_ONCE)
            switch (p->count - first) {
            case 1: multiply(p, row, first, 1); break;
            case 2: multiply(p, row, first, 2); break;
            case 3: multiply(p, row, first, 3); break;
            default: multiply(p, row, first, 4);
            }
}
#endif
