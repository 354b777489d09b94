/* What the mixers of layers with a recurrent state have in common: a causal convolution of each channel
 * by itself, and functions of a number.
 *
 * Rows are tokens of one sequence each, which follow one another; the states of all sequences are in
 * slots and are changed in place. All is computed in float32. */
#ifndef LLMPQ_MIXER_H
#define LLMPQ_MIXER_H

#include "lanes.h"
#include <math.h>

enum { CHANNELS = 64, MAX_KERNEL = 8 };

typedef struct {
    const void *input;   /* [tokens, stride], its first `channels` */
    const void *factor;  /* like the input, which it multiplies first; may be NULL */
    const void *gate;    /* like the input, multiplies the sum; may be NULL */
    const float *weight; /* [kernel, channels] */
    const float *bias;   /* [channels]; may be NULL */
    float *states;       /* [slots, channels, kernel]: the last inputs */
    void *out;           /* [tokens, channels] */
    const int64_t *rows; /* [count, 4]: first token, tokens, slot, is new */
    int64_t count, channels, kernel, stride;
    int32_t type, out_type; /* of input, factor and gate; of `out` */
    int32_t is_activated;   /* by SiLU, before the gate */
    int32_t threads;
} Convolution;

INLINE float total(vf v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

INLINE vf sigmoid(vf x) {
    vf e = exponential((vf){0} - magnitude(x));
    return either(x < 0, e, (vf){0} + 1.0f) / (1.0f + e);
}

INLINE vf silu(vf x) {
    return x * sigmoid(x);
}

INLINE float softplus(float x) {
    return x > 20 ? x : log1pf(expf(x)); /* torch's threshold */
}

void convolve(const Convolution *c);

#endif
