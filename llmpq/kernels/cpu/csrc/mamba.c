/* Mamba 2 between its projections: short convolution, selective state space, gated norm.
 *
 * With S the state [head_dim, state_dim] of a head, for each token: S = e^(A dt) S + (dt x) B^T and
 * out = S C + D x, where x, B and C are convolved and gated by SiLU, dt = softplus(dt + bias) within
 * limits, and the heads of a group share B and C. Source: transformers' mamba2_chunk_scan, and
 * mamba2_selective_state_update for rows of one token that do not begin, which has no limits. */
#include "mixer.h"

enum { ROWS = 4, FACTORS = 2 }; /* rows of a state at once; dt and the decay of a token */

/* Of a token, of which a row has limits unless it goes on with this one alone, or with drafts. */
void mamba_factors(void *data, int64_t t) {
    const Mamba *m = data;
    const MixerRow *row = m->convolution.rows;
    while (t >= row->first + row->tokens) row++;
    int has_limits = (row->tokens > 1 && row->kept == row->tokens) || row->is_new;
    for (int64_t h = 0; h < m->heads; h++) {
        float dt = softplus(load_one(m->dt, t * m->convolution.stride + h, m->type) + m->bias[h]);
        if (has_limits) dt = fminf(fmaxf(dt, m->least), m->most);
        float *factors = m->factors + (t * m->heads + h) * FACTORS;
        factors[0] = dt;
        factors[1] = expf(m->rate[h] * dt);
    }
}

/* Some rows of the state of a head, from the first to the last token of a row: they stay in the first
 * cache. */
void mamba_part(void *data, int64_t item) {
    const Mamba *m = data;
    const MixerRow *row = m->convolution.rows + item / m->heads;
    int64_t head = item % m->heads, dim = m->state_dim, width = m->heads * m->head_dim;
    int64_t channels = m->convolution.channels, group = head / (m->heads / m->groups);
    const float *convolved = m->convolution.out;
    const size_t size = (size_t)(ROWS * dim) * sizeof(float);
    for (int64_t first = 0; first < m->head_dim; first += ROWS) {
        float *state = m->states + ((row->slot * m->heads + head) * m->head_dim + first) * dim;
        float *drafts = m->states + ((row->draft_slot * m->heads + head) * m->head_dim + first) * dim;
        if (row->is_new) memset(state, 0, size);
        for (int64_t t = row->first; t < row->first + row->tokens; t++) {
            if (t == row->first + row->kept) {
                memcpy(drafts, state, size);
                state = drafts;
            }
            const float *x = convolved + t * channels + head * m->head_dim + first;
            const float *b = convolved + t * channels + width + group * dim;
            const float *c = b + m->groups * dim;
            const float *factors = m->factors + (t * m->heads + head) * FACTORS;
            float *raw = m->raw + t * width + head * m->head_dim + first;
            vf sums[ROWS] = {{0}}, scaled[ROWS];
            for (int j = 0; j < ROWS; j++) scaled[j] = (vf){0} + x[j] * factors[0];
            for (int64_t i = 0; i < dim; i += LANES) {
                vf in = load_lanes(b, i, TYPE_F32), read = load_lanes(c, i, TYPE_F32);
                for (int j = 0; j < ROWS; j++) {
                    vf s = load_lanes(state, j * dim + i, TYPE_F32) * factors[1];
                    s = multiply_add(scaled[j], in, s);
                    memcpy(state + j * dim + i, &s, sizeof s);
                    sums[j] = multiply_add(s, read, sums[j]);
                }
            }
            for (int j = 0; j < ROWS; j++) raw[j] = total(sums[j]) + m->skip[head] * x[j];
        }
    }
}

/* Of a token: gated, then normed in parts; the norm is rounded where transformers rounds it. */
void mamba_norm(void *data, int64_t t) {
    const Mamba *m = data;
    int64_t width = m->heads * m->head_dim;
    for (int64_t begin = 0; begin < width; begin += m->normed) {
        vf sum = {0};
        for (int64_t i = begin; i < begin + m->normed; i += LANES) {
            vf x = load_lanes(m->raw, t * width + i, TYPE_F32);
            x *= silu(load_any(m->gate, t * m->convolution.stride + i, m->type));
            memcpy(m->raw + t * width + i, &x, sizeof x);
            sum = multiply_add(x, x, sum);
        }
        float scale = 1 / sqrtf(total(sum) / (float)m->normed + m->epsilon);
        for (int64_t i = begin; i < begin + m->normed; i += LANES) {
            vf x = load_lanes(m->raw, t * width + i, TYPE_F32) * scale;
            x *= load_lanes(m->norm, i, TYPE_F32);
            store_typed(m->out, t * width + i, LANES, typed_bits(x, m->type), m->type);
        }
    }
}

/* Dimensions of states and parts of a norm are multiples of 16, those of heads of ROWS. */
void kernels_mamba(const Mamba *m) {
    convolve(&m->convolution);
    run_parts(mamba_factors, (void *)m, m->tokens, m->threads);
    run_parts(mamba_part, (void *)m, m->convolution.count * m->heads, m->threads);
    run_parts(mamba_norm, (void *)m, m->tokens, m->threads);
}
