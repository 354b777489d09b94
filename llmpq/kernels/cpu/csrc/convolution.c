/* Short causal convolutions: alone with gates (LFM2), and before the recurrences of other mixers.
 *
 * Source: transformers' Lfm2ShortConv and causal_conv1d_fn. */
#include "mixer.h"

INLINE void store_inputs(float *stored, const vf *before, int kernel) {
    for (int j = 0; j < kernel; j++)
        for (int i = 0; i < LANES; i++) stored[i * kernel + j] = before[j][i];
}

/* Some channels of a row: their last inputs, then each token's. */
void convolve_part(void *data, int64_t item) {
    const Convolution *c = data;
    int64_t blocks = (c->channels + CHANNELS - 1) / CHANNELS;
    const MixerRow *row = c->rows + item / blocks;
    int64_t begin = item % blocks * CHANNELS;
    int64_t end = begin + CHANNELS < c->channels ? begin + CHANNELS : c->channels;
    const int kernel = (int)c->kernel;
    for (int64_t at = begin; at < end; at += LANES) {
        vf before[MAX_KERNEL] = {{0}}, weights[MAX_KERNEL], bias = {0};
        float *stored = c->states + (row->slot * c->channels + at) * kernel;
        if (c->bias) bias = load_lanes(c->bias, at, TYPE_F32);
        for (int j = 0; j < kernel; j++) {
            weights[j] = load_lanes(c->weight, j * c->channels + at, TYPE_F32);
            if (!row->is_new)
                for (int i = 0; i < LANES; i++) before[j][i] = stored[i * kernel + j];
        }
        for (int64_t t = row->first; t < row->first + row->tokens; t++) {
            vf x = load_any(c->input, t * c->stride + at, c->type);
            if (c->factor) { /* rounded, as transformers does */
                x *= load_any(c->factor, t * c->stride + at, c->type);
                x = typed_value(typed_bits(x, c->type), c->type);
            }
            for (int j = 0; j + 1 < kernel; j++) before[j] = before[j + 1];
            before[kernel - 1] = x;
            vf sum = bias;
            for (int j = 0; j < kernel; j++) sum = multiply_add(before[j], weights[j], sum);
            if (c->is_activated) sum = silu(sum);
            if (c->gate) sum *= load_any(c->gate, t * c->stride + at, c->type);
            store_typed(c->out, t * c->channels + at, LANES, typed_bits(sum, c->out_type), c->out_type);
            if (t + 1 == row->first + row->kept) store_inputs(stored, before, kernel);
        }
        if (row->kept < row->tokens)
            store_inputs(c->states + (row->draft_slot * c->channels + at) * kernel, before, kernel);
    }
}

int64_t convolution_items(const Convolution *c) {
    return c->count * ((c->channels + CHANNELS - 1) / CHANNELS);
}

/* Channels are a multiple of 16, the kernel no longer than MAX_KERNEL. */
void convolve(const Convolution *c) {
    run_parts(convolve_part, (void *)c, convolution_items(c), c->threads);
}

void kernels_convolution(const Convolution *c) {
    convolve(c);
}
