/* The selective scan of Mamba 1, behind its convolution and what it selects.
 *
 * With S the state [state_dim] of a channel, for each token: S = e^(A dt) S + dt x B and
 * out = (C S + D x) silu(gate); all channels share B and C. Source: transformers'
 * mamba_selective_scan, and Gu and Dao, "Mamba", 2023, Algorithm 2. */
#include "mixer.h"

/* The channels of a vector, from the first to the last token of a row: their states stay in the first
 * cache. */
static void scan_part(void *data, int64_t item) {
    const Scan *s = data;
    int64_t blocks = s->channels / LANES, at = item % blocks * LANES, dim = s->state_dim;
    const MixerRow *row = s->rows + item / blocks;
    float *state = s->states + (row->slot * s->channels + at) * dim;
    float *drafts = s->states + (row->draft_slot * s->channels + at) * dim;
    const size_t size = (size_t)(LANES * dim) * sizeof(float);
    if (row->is_new) memset(state, 0, size);
    for (int64_t t = row->first; t < row->first + row->tokens; t++) {
        if (t == row->first + row->kept) {
            memcpy(drafts, state, size);
            state = drafts;
        }
        const float *in = s->in + t * dim, *read = s->read + t * dim;
        vf x = load_any(s->values, t * s->channels + at, s->type);
        vf step = load_lanes(s->steps, t * s->channels + at, TYPE_F32), added = step * x, out;
        for (int j = 0; j < LANES; j++) {
            vf sum = {0};
            for (int64_t i = 0; i < dim; i += LANES) {
                vf decay = exponential(load_lanes(s->rate, (at + j) * dim + i, TYPE_F32) * step[j]);
                vf kept = load_lanes(state, j * dim + i, TYPE_F32) * decay;
                kept = multiply_add((vf){0} + added[j], load_lanes(in, i, TYPE_F32), kept);
                memcpy(state + j * dim + i, &kept, sizeof kept);
                sum = multiply_add(kept, load_lanes(read, i, TYPE_F32), sum);
            }
            out[j] = total(sum);
        }
        out = multiply_add(load_lanes(s->skip, at, TYPE_F32), x, out);
        out *= silu(load_any(s->gate, t * s->stride + at, s->type));
        store_typed(s->out, t * s->channels + at, LANES, typed_bits(out, s->type), s->type);
    }
}

/* Channels and dimensions of states are multiples of 16. */
void kernels_scan(const Scan *s) {
    run_parts(scan_part, (void *)s, s->count * (s->channels / LANES), s->threads);
}
