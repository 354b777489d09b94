/* Gated DeltaNet between its projections: short convolution, gated delta rule, gated norm.
 *
 * With S the state [key_dim, value_dim] of a value head, for each token: S = d S + k (b (v - d S^T k))^T
 * and out = S^T q, where k and q are convolved, gated by SiLU and of length 1 (q over sqrt(key_dim)),
 * d = exp(rate softplus(a + bias)) and b = sigmoid(beta). Columns of S are independent, so that some of
 * them stay in the first cache for all tokens of a row. Source: transformers'
 * torch_recurrent_gated_delta_rule. */
#include "mixer.h"

enum { MAX_KEY_DIM = 256, FACTORS = 3 };
/* Vectors of columns: of a row of one token, whose state is read once, and of others. */
#ifdef __AVX512F__
enum { ONCE_VECTORS = 8, VECTORS = 2 };
#else
enum { ONCE_VECTORS = 4, VECTORS = 2 };
#endif

INLINE void scale_head(float *head, int64_t dim, float factor) {
    vf sum = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        vf x = load_lanes(head, i, TYPE_F32);
        sum = multiply_add(x, x, sum);
    }
    float scale = factor / sqrtf(total(sum) + 1e-6f);
    for (int64_t i = 0; i < dim; i += LANES) {
        vf x = load_lanes(head, i, TYPE_F32) * scale;
        memcpy(head + i, &x, sizeof x);
    }
}

/* Of a token: queries and keys of length 1, and the factors of each head. */
void delta_factors(void *data, int64_t t) {
    const Delta *d = data;
    float *query = (float *)d->convolution.out + t * d->convolution.channels;
    float *key = query + d->key_heads * d->key_dim;
    for (int64_t h = 0; h < d->key_heads; h++) {
        scale_head(query + h * d->key_dim, d->key_dim, 1 / sqrtf((float)d->key_dim));
        scale_head(key + h * d->key_dim, d->key_dim, 1);
    }
    for (int64_t h = 0; h < d->heads; h++) {
        float dt = softplus(load_one(d->decay, t * d->heads + h, d->type) + d->bias[h]);
        float *factors = d->factors + (t * d->heads + h) * FACTORS;
        int64_t at = h / (d->heads / d->key_heads) * d->key_dim;
        vf both = {0};
        for (int64_t i = at; i < at + d->key_dim; i += LANES)
            both = multiply_add(load_lanes(key, i, TYPE_F32), load_lanes(query, i, TYPE_F32), both);
        factors[0] = expf(d->rate[h] * dt);
        factors[1] = 1 / (1 + expf(-load_one(d->beta, t * d->heads + h, d->type)));
        factors[2] = total(both);
    }
}

/* Some columns of the state of a head of a row, from its first to its last token: the state is
 * changed by a token and read by the next one at once. Those of several tokens lie side by side
 * meanwhile: at the distance of whole rows they would displace one another from the cache. */
INLINE void recur_columns(const Delta *d, const MixerRow *row, int64_t head, int64_t column,
                          const int vectors, const int is_one) {
    int64_t channels = d->convolution.channels, dim = d->value_dim, keys = d->key_heads * d->key_dim;
    int64_t of_key = head / (d->heads / d->key_heads) * d->key_dim, end = row->first + row->tokens;
    float *stored = d->states + (row->slot * d->heads + head) * d->key_dim * dim + column;
    float *last = d->states + (row->draft_slot * d->heads + head) * d->key_dim * dim + column;
    const float *convolved = d->convolution.out;
    const float *query = convolved + row->first * channels + of_key, *key = query + keys;
    float own[is_one ? 1 : MAX_KEY_DIM * VECTORS * LANES] __attribute__((aligned(64)));
    float *state = is_one ? stored : own;
    const int64_t stride = is_one ? dim : vectors * LANES;
    vf read[ONCE_VECTORS] = {{0}}, out[ONCE_VECTORS] = {{0}}, delta[ONCE_VECTORS];
    for (int64_t i = 0; i < d->key_dim; i++)
        for (int j = 0; j < vectors; j++) {
            vf s = {0};
            if (!row->is_new) s = load_lanes(stored, i * dim + j * LANES, TYPE_F32);
            if (!is_one || row->is_new) memcpy(state + i * stride + j * LANES, &s, sizeof s);
            read[j] = multiply_add(s, (vf){0} + key[i], read[j]);
            out[j] = multiply_add(s, (vf){0} + query[i], out[j]);
        }
    for (int64_t t = row->first; t < end; t++) {
        const float *value = convolved + t * channels + 2 * keys + head * dim + column;
        const float *factors = d->factors + (t * d->heads + head) * FACTORS;
        float *raw = d->raw + (t * d->heads + head) * dim + column;
        for (int j = 0; j < vectors; j++) {
            delta[j] = (load_lanes(value, j * LANES, TYPE_F32) - read[j] * factors[0]) * factors[1];
            out[j] = out[j] * factors[0] + delta[j] * factors[2];
            memcpy(raw + j * LANES, &out[j], sizeof out[j]);
            read[j] = out[j] = (vf){0};
        }
        const float *before = key;
        int is_last = is_one || t + 1 == end, is_kept = t + 1 == row->first + row->kept;
        if (!is_last) query += channels, key += channels;
        for (int64_t i = 0; i < d->key_dim; i++)
            for (int j = 0; j < vectors; j++) {
                vf s = load_lanes(state, i * stride + j * LANES, TYPE_F32) * factors[0];
                s = multiply_add(delta[j], (vf){0} + before[i], s);
                memcpy((is_last ? last + i * dim : state + i * stride) + j * LANES, &s, sizeof s);
                if (is_one) continue;
                if (is_kept && !is_last) memcpy(stored + i * dim + j * LANES, &s, sizeof s);
                read[j] = multiply_add(s, (vf){0} + key[i], read[j]);
                out[j] = multiply_add(s, (vf){0} + query[i], out[j]);
            }
    }
}

void delta_part(void *data, int64_t item) {
    const Delta *d = data;
    const MixerRow *row = d->convolution.rows + item / d->heads;
    int64_t head = item % d->heads, column = 0, dim = d->value_dim;
    if (row->tokens == 1 && row->kept) {
        for (; column + ONCE_VECTORS * LANES <= dim; column += ONCE_VECTORS * LANES)
            recur_columns(d, row, head, column, ONCE_VECTORS, 1);
        for (; column < dim; column += LANES) recur_columns(d, row, head, column, 1, 1);
        return;
    }
    for (; column + VECTORS * LANES <= dim; column += VECTORS * LANES)
        recur_columns(d, row, head, column, VECTORS, 0);
    for (; column < dim; column += LANES) recur_columns(d, row, head, column, 1, 0);
}

/* Of a token: the norm of each head, gated; the norm is rounded where transformers rounds it. */
void delta_gate(void *data, int64_t t) {
    const Delta *d = data;
    int64_t dim = d->value_dim;
    for (int64_t h = 0; h < d->heads; h++) {
        int64_t at = (t * d->heads + h) * dim;
        vf sum = {0};
        for (int64_t i = 0; i < dim; i += LANES) {
            vf x = load_lanes(d->raw, at + i, TYPE_F32);
            sum = multiply_add(x, x, sum);
        }
        float scale = 1 / sqrtf(total(sum) / (float)dim + d->epsilon);
        for (int64_t i = 0; i < dim; i += LANES) {
            vf x = load_lanes(d->raw, at + i, TYPE_F32) * scale;
            x *= load_lanes(d->norm, i, TYPE_F32) * silu(load_any(d->gate, at + i, d->type));
            store_typed(d->out, at + i, LANES, typed_bits(x, d->type), d->type);
        }
    }
}

/* Dimensions of heads are multiples of 16, those of keys at most MAX_KEY_DIM. */
void kernels_delta(const Delta *d) {
    convolve(&d->convolution);
    run_parts(delta_factors, (void *)d, d->tokens, d->threads);
    run_parts(delta_part, (void *)d, d->convolution.count * d->heads, d->threads);
    run_parts(delta_gate, (void *)d, d->tokens, d->threads);
}
