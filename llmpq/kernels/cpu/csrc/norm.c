/* Root mean square norm or layer norm of each row: sums are float32, and rows are rounded where
 * transformers rounds them. */
#include "lanes.h"
#include "step.h"
#include <math.h>

INLINE float sum_of(vf v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

INLINE void norm_row(const Norm *n, int64_t row, const int type, const int weight_type) {
    int64_t at = row * n->columns;
    float mean = 0;
    vf sum = {0};
    if (n->centers) {
        for (int64_t k = 0; k < n->columns; k += LANES) sum += load_lanes(n->x, at + k, type);
        mean = sum_of(sum) / (float)n->columns;
        sum = (vf){0};
    }
    for (int64_t k = 0; k < n->columns; k += LANES) {
        vf x = load_lanes(n->x, at + k, type) - mean;
        sum += x * x;
    }
    float scale = 1 / sqrtf(sum_of(sum) / (float)n->columns + n->epsilon);
    for (int64_t k = 0; k < n->columns; k += LANES) {
        vf x = (load_lanes(n->x, at + k, type) - mean) * scale;
        if (n->rounds && type != TYPE_F32)
            x = typed_value(typed_bits(x, type), type);
        if (n->weight) x *= load_lanes(n->weight, k, weight_type);
        if (n->bias) x += load_lanes(n->bias, k, weight_type);
        store_typed(n->y, at + k, LANES, typed_bits(x, type), type);
    }
}

/* Columns are a multiple of 16. */
void norm_rows(const Norm *n, int64_t first, int64_t end) {
    for (int64_t row = first; row < end; row++)
        if (n->type == TYPE_F32) norm_row(n, row, TYPE_F32, TYPE_F32);
        else if (n->type == TYPE_F16 && n->weight_type == TYPE_F32) norm_row(n, row, TYPE_F16, TYPE_F32);
        else if (n->type == TYPE_F16) norm_row(n, row, TYPE_F16, TYPE_F16);
        else if (n->weight_type == TYPE_F32) norm_row(n, row, TYPE_BF16, TYPE_F32);
        else norm_row(n, row, TYPE_BF16, TYPE_BF16);
}

static void norm_part(void *data, int64_t item) {
    const Norm *n = data;
    norm_rows(n, 16 * item, 16 * (item + 1) < n->rows ? 16 * (item + 1) : n->rows);
}

void kernels_norm(const Norm *n) {
    run_parts(norm_part, (void *)n, (n->rows + 15) / 16, n->threads);
}
