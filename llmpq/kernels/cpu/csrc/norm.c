/* Root mean square norm of each row, rounded where transformers rounds: the mean is float32, the row
 * is rounded to its type before the weight multiplies it, and the product again. */
#include "kernels.h"
#include <math.h>

typedef struct {
    const void *x, *weight; /* [rows, columns] and [columns] of `type` */
    void *y;
    int64_t rows, columns;
    float epsilon;
    int32_t type, threads;
} Norm;

INLINE void norm_row(const Norm *n, int64_t row, const int type) {
    int64_t at = row * n->columns;
    v16f sum = {0};
    for (int64_t k = 0; k < n->columns; k += 16) {
        v16f x = load_typed(n->x, at + k, type);
        sum += x * x;
    }
    float total = 0;
    for (int i = 0; i < 16; i++) total += sum[i];
    float scale = 1 / sqrtf(total / (float)n->columns + n->epsilon);
    for (int64_t k = 0; k < n->columns; k += 16) {
        v16f x = load_typed(n->x, at + k, type) * scale;
        v16f weight = load_typed(n->weight, k, type);
        if (type == TYPE_F32) {
            store_floats((float *)n->y + at + k, x * weight);
            continue;
        }
        v16u wide = __builtin_convertvector(narrowed(x), v16u) << 16;
        v16h y = narrowed((v16f)wide * weight);
        memcpy((uint16_t *)n->y + at + k, &y, sizeof y);
    }
}

static void norm_part(void *data, int64_t item) {
    const Norm *n = data;
    int64_t end = 16 * (item + 1) < n->rows ? 16 * (item + 1) : n->rows;
    for (int64_t row = 16 * item; row < end; row++)
        if (n->type == TYPE_F32) norm_row(n, row, TYPE_F32);
        else norm_row(n, row, TYPE_BF16);
}

/* Float32 or bf16; columns a multiple of 16. */
void kernels_norm(const Norm *n) {
    run_parts(norm_part, (void *)n, (n->rows + 15) / 16, n->threads);
}
