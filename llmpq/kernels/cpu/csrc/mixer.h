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

/* A row: the state in `slot` is read; it has that of the tokens before the drafts afterwards, and
 * `draft_slot` that of all. Without drafts `kept` is `tokens`, and both slots are one. */
typedef struct {
    int64_t first, tokens, slot, is_new, kept, draft_slot;
} MixerRow;

typedef struct {
    const void *input;   /* [tokens, stride], its first `channels` */
    const void *factor;  /* like the input, which it multiplies first; may be NULL */
    const void *gate;    /* like the input, multiplies the sum; may be NULL */
    const float *weight; /* [kernel, channels] */
    const float *bias;   /* [channels]; may be NULL */
    float *states;       /* [slots, channels, kernel]: the last inputs */
    void *out;           /* [tokens, channels] */
    const MixerRow *rows; /* [count] */
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

typedef struct {
    Convolution convolution; /* of queries, keys and values, [tokens, channels] float32 */
    const void *gate, *beta, *decay; /* [tokens, values], [tokens, heads] twice */
    const float *rate, *bias;        /* [heads] */
    const float *norm;               /* [value_dim] */
    float *states;                   /* [slots, heads, key_dim, value_dim] */
    float *factors;                  /* [tokens, heads, 3]: d, b, k q; scratch */
    float *raw;                      /* [tokens, values], scratch */
    void *out;                       /* [tokens, values] */
    int64_t tokens, key_heads, heads, key_dim, value_dim;
    float epsilon;
    int32_t type, threads;
} Delta;

typedef struct {
    Convolution convolution; /* of x, B and C, [tokens, heads head_dim + 2 groups state_dim] float32 */
    const void *gate;        /* [tokens, stride], its first heads head_dim */
    const void *dt;          /* [tokens, stride], its first heads */
    const float *rate, *bias, *skip; /* [heads]: A, of dt, D */
    const float *norm;               /* [heads head_dim] */
    float *states;                   /* [slots, heads, head_dim, state_dim] */
    float *factors;                  /* [tokens, heads, 2], scratch */
    float *raw;                      /* [tokens, heads head_dim], scratch */
    void *out;                       /* [tokens, heads head_dim] */
    int64_t tokens, groups, heads, head_dim, state_dim;
    int64_t normed; /* features that are normed together */
    float epsilon, least, most;
    int32_t type, threads;
} Mamba;

typedef struct {
    const void *values;      /* [tokens, channels], convolved */
    const void *gate;        /* [tokens, stride], its first channels */
    const float *steps;      /* [tokens, channels] */
    const float *in, *read;  /* [tokens, state_dim]: B, C */
    const float *rate;       /* [channels, state_dim]: A */
    const float *skip;       /* [channels]: D */
    float *states;           /* [slots, channels, state_dim] */
    void *out;               /* [tokens, channels] */
    const MixerRow *rows;    /* [count] */
    int64_t count, channels, state_dim, stride;
    int32_t type, threads;   /* of values, gate and out */
} Scan;

/* Parts of either: of some channels of a row, of a token, of a head of a row, of a token. */
int64_t convolution_items(const Convolution *c);
void convolve_part(void *convolution, int64_t item);
void delta_factors(void *delta, int64_t token);
void delta_part(void *delta, int64_t item);
void delta_gate(void *delta, int64_t token);
void mamba_factors(void *mamba, int64_t token);
void mamba_part(void *mamba, int64_t item);
void mamba_norm(void *mamba, int64_t token);

void convolve(const Convolution *c);

#endif
