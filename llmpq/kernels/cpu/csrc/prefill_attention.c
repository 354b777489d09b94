/* Attention of runs of neighbouring tokens, prompts and their chunks, on the blocks of a cache.
 *
 * The queries of a run and of all heads that share a KV head go over the keys in tiles of 64 tokens
 * (FlashAttention-2: Dao 2023). A tile is widened to float32 once for all of them, its keys
 * transposed; six queries at a time are multiplied by it with their sums in registers, become weights
 * (online softmax: Milakov and Gimelshein 2018), and are multiplied by the values. Tiles begin at
 * multiples of 64, so a token's answer depends neither on its run nor on the number of threads. Tiles
 * that no query of a strip sees are skipped.
 *
 * Where the processor can, bf16 queries and keys are multiplied as they are. With AMX likewise keys
 * and values of 8 and 4 bits, as the bf16 numbers that their codes are; weights, and queries that were
 * rotated, are cut into two bf16 numbers, which keeps 16 bits of them. */
#include "amx.h"
#include "attention.h"

enum { TILE = 64, STRIP = 6, MOST_STRIP = 16, MOST_ROWS = 192, ROOM = MOST_ROWS * 128 };
#if defined(__AVX512F__)
enum { WIDE = 4 }; /* vectors of columns at once */
#else
enum { WIDE = 2 };
#endif
enum { RUN = 16 }; /* neighbouring tokens that always share a block */

typedef struct {
    const Attention *a;
    const int32_t *table;
    int64_t kv_head, rows, since, end; /* tokens [since, end) are seen by some row */
    int64_t strip;                     /* rows at once */
    int in_pairs;                      /* whether queries and keys are multiplied as bf16 pairs */
    int64_t first[MOST_ROWS], last[MOST_ROWS]; /* a row sees [first, last) */
    int64_t from[MOST_ROWS], to[MOST_ROWS];    /* where its query is, and its answer goes */
    int64_t head[MOST_ROWS];
    float most[MOST_ROWS];
    vf weight[MOST_ROWS]; /* sums of the weights so far, lane by lane */
    float query[ROOM] __attribute__((aligned(64)));  /* [rows, dim], scaled; pairs: in bf16, as it is;
                                                      * rotated: and what its rounding left, at ROOM */
    float total[ROOM] __attribute__((aligned(64)));  /* [rows, dim] */
    float keys[MOST_DIM * TILE] __attribute__((aligned(64)));   /* [dim, TILE]; AMX: see lay_out; pairs: [dim / 2, TILE, 2] */
    float values[TILE * MOST_DIM] __attribute__((aligned(64))); /* [TILE, dim]; likewise */
    float key_scale[TILE], value_scale[TILE]; /* AMX: what the scores and the weights are times */
} Run;

/* ---- tiles ----------------------------------------------------------------------------------- */

/* Lane i of vector j becomes lane j of vector i. */
INLINE void transpose(vf *v) {
    const vi lane = lane_numbers();
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        const vi moves = (lane & step) != 0;
        const vi low = lane + (moves & (LANES - step)), high = lane + step + (moves & (LANES - step));
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & step)) {
                vf a = v[i], b = v[i + step];
                v[i] = __builtin_shuffle(a, b, low), v[i + step] = __builtin_shuffle(a, b, high);
            }
    }
}

/* Widens LANES tokens of a tile from its token `first` on; one at -1 is seen by no row: zeros. */
INLINE void widen_tokens(Run *r, int64_t first, const int64_t *at, const int type,
                         const int are_seen, const int keeps_keys) {
    const Attention *a = r->a;
    int64_t dim = a->dim;
    float scale[2][LANES];
    if (has_scales(type))
        for (int j = 0; j < LANES; j++) {
            int64_t place = are_seen || at[j] >= 0 ? at[j] / dim : 0;
            scale[0][j] = scale_of(a->key_scales, place);
            scale[1][j] = scale_of(a->value_scales, place);
        }
    for (int64_t k = 0; k < dim; k += LANES) {
        vf key[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            vf value = {0};
            key[j] = (vf){0};
            if (are_seen || at[j] >= 0) {
                if (keeps_keys) key[j] = load_stored(a->keys, at[j] + k, type);
                value = load_stored(a->values, at[j] + k, type);
                if (has_scales(type)) key[j] *= scale[0][j], value *= scale[1][j];
            }
            memcpy(r->values + (first + j) * dim + k, &value, sizeof value);
        }
        if (!keeps_keys) continue;
        transpose(key);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            memcpy(r->keys + (k + i) * TILE + first, key + i, sizeof(vf));
    }
}

#if defined(__AVX512BF16__)
/* Keys of LANES tokens side by side, in pairs of columns. */
INLINE void pair_keys(Run *r, int64_t first, const int64_t *at) {
    for (int64_t k = 0; k < r->a->dim; k += 2 * LANES) {
        vf key[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            key[j] = (vf){0};
            if (at[j] >= 0) memcpy(key + j, (const uint16_t *)r->a->keys + at[j] + k, sizeof *key);
        }
        transpose(key);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            memcpy(r->keys + (k / 2 + i) * TILE + first, key + i, sizeof(vf));
    }
}

/* Scores of a strip of rows. */
static void score_pairs(const Run *r, int64_t row, float *score) {
    int64_t dim = r->a->dim;
    const uint16_t *query = (const uint16_t *)r->query + row * dim;
    __m512 sum[STRIP][WIDE];
#pragma GCC unroll 6
    for (int m = 0; m < STRIP; m++)
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++) sum[m][n] = _mm512_setzero_ps();
    for (int64_t k = 0; k < dim; k += 2) {
        __m512bh key[WIDE];
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++)
            key[n] = (__m512bh)_mm512_load_ps(r->keys + k / 2 * TILE + n * LANES);
#pragma GCC unroll 6
        for (int m = 0; m < STRIP; m++) {
            int32_t pair;
            memcpy(&pair, query + m * dim + k, sizeof pair);
            __m512bh own = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int n = 0; n < WIDE; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], key[n], own);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < STRIP; m++)
#pragma GCC unroll 4
        for (int n = 0; n < WIDE; n++) {
            vf scaled = (vf)sum[m][n] * r->a->scaling;
            memcpy(score + m * TILE + n * LANES, &scaled, sizeof scaled);
        }
}
#endif

/* Whether keys are multiplied as the pairs of bf16 that they are stored as. */
INLINE int has_pairs(const Attention *a) {
#if defined(__AVX512BF16__)
    return a->type == TYPE_BF16 && a->stored == TYPE_BF16 && a->dim % (2 * LANES) == 0;
#else
    (void)a;
    return 0;
#endif
}

/* ---- products -------------------------------------------------------------------------------- */

/* c [STRIP, vectors] = (adds: +=) a [STRIP, depth] b [depth, vectors] */
INLINE void multiply(const float *x, int64_t x_row, const float *y, int64_t y_row, float *c,
                     int64_t c_row, int64_t depth, const int vectors, const int adds) {
    vf sum[STRIP][WIDE];
#pragma GCC unroll 6
    for (int m = 0; m < STRIP; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) {
            sum[m][n] = (vf){0};
            if (adds) memcpy(&sum[m][n], c + m * c_row + n * LANES, sizeof(vf));
        }
    for (int64_t k = 0; k < depth; k++) {
        vf own[WIDE];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) memcpy(own + n, y + k * y_row + n * LANES, sizeof(vf));
#pragma GCC unroll 6
        for (int m = 0; m < STRIP; m++)
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++)
                sum[m][n] += x[m * x_row + k] * own[n];
    }
#pragma GCC unroll 6
    for (int m = 0; m < STRIP; m++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) memcpy(c + m * c_row + n * LANES, &sum[m][n], sizeof(vf));
}

static void score_strip(const Run *r, int64_t row, float *score) {
    int64_t dim = r->a->dim;
    for (int64_t n = 0; n < TILE; n += WIDE * LANES)
        multiply(r->query + row * dim, dim, r->keys + n, TILE, score + n, TILE, dim, WIDE, 0);
}

static void add_strip(Run *r, int64_t row, const float *share, int64_t depth) {
    int64_t dim = r->a->dim, k = 0;
    float *total = r->total + row * dim;
    for (; k + WIDE * LANES <= dim; k += WIDE * LANES)
        multiply(share, TILE, r->values + k, dim, total + k, dim, depth, WIDE, 1);
    for (; k < dim; k += LANES)
        multiply(share, TILE, r->values + k, dim, total + k, dim, depth, 1, 1);
}

/* ---- softmax --------------------------------------------------------------------------------- */

INLINE float most_of(vf v) {
    const vi lane = lane_numbers();
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2) v = greater(v, __builtin_shuffle(v, lane ^ step));
    return v[0];
}

INLINE void change_scores(const Attention *a, int64_t head, int64_t t, int64_t count, float *score) {
    if (a->softcap)
        for (int64_t i = 0; i < TILE; i += LANES) {
            vf y;
            memcpy(&y, score + i, sizeof y);
            y = capped(y, a->softcap);
            memcpy(score + i, &y, sizeof y);
        }
    if (a->bias)
        for (int64_t i = 0; i < count; i++) score[i] += a->bias[head * a->bias_head + t + i];
}

/* Turns the scores [low, high) of a row into weights, all others into zeros. */
INLINE void weigh_some(Run *r, int64_t row, float *score, int low, int high, const int is_whole) {
    const vi lane = lane_numbers();
    vf own[TILE / LANES], top = (vf){0} - INFINITY, sum = r->weight[row];
#pragma GCC unroll 16
    for (int i = 0; i < TILE / LANES; i++) {
        memcpy(own + i, score + i * LANES, sizeof(vf));
        vi seen = (lane + i * LANES >= low) & (lane + i * LANES < high);
        if (!is_whole) own[i] = either(seen, own[i], (vf){0} - INFINITY);
        top = greater(own[i], top); /* what is not a number is kept by the weights */
    }
    float now = most_of(top);
    if (now > r->most[row]) {
        float shrink = expf(r->most[row] - now), *total = r->total + row * r->a->dim;
        r->most[row] = now;
        sum *= shrink;
        for (int64_t k = 0; k < r->a->dim; k++) total[k] *= shrink;
    }
    now = r->most[row];
#pragma GCC unroll 16
    for (int i = 0; i < TILE / LANES; i++) own[i] = exponential(own[i] - now);
#pragma GCC unroll 16
    for (int i = 0; i < TILE / LANES; i++) {
        vi seen = (lane + i * LANES >= low) & (lane + i * LANES < high);
        if (!is_whole) own[i] = either(seen, own[i], (vf){0});
        sum += own[i];
        memcpy(score + i * LANES, own + i, sizeof(vf));
    }
    r->weight[row] = sum;
}

/* Turns a row's scores of the tile at t into weights; 0 for what it does not see. */
static void weigh(Run *r, int64_t row, int64_t t, float *score) {
    int64_t from = r->first[row] - t, to = r->last[row] - t;
    if (from >= TILE || to <= 0) {
        memset(score, 0, TILE * sizeof *score);
        return;
    }
    const int low = from < 0 ? 0 : (int)from, high = to > TILE ? TILE : (int)to;
    if (r->a->softcap || r->a->bias) change_scores(r->a, r->head[row], t, high, score);
    if (low == 0 && high == TILE) weigh_some(r, row, score, 0, TILE, 1);
    else weigh_some(r, row, score, low, high, 0);
}

/* ---- AMX ------------------------------------------------------------------------------------- */

#ifdef __AMX_BF16__
enum { PAIRS = 32, TILE_NUMBERS = AMX_ROWS * PAIRS }; /* columns of bf16 in a tile, and its numbers */

INLINE int has_amx(const Attention *a) {
    int is_known = a->stored == TYPE_BF16 || has_scales(a->stored);
    return a->type == TYPE_BF16 && is_known && a->dim % PAIRS == 0;
}

/* Half of 32 numbers of 16 bits, in 32 bits each. */
INLINE __m512i half_of(__m512i both, const int half) {
    __m256i own = half ? _mm512_extracti64x4_epi64(both, 1) : _mm512_castsi512_si256(both);
    return _mm512_cvtepu16_epi32(own);
}

/* bf16 numbers of 32 columns: codes are bf16 numbers, too. */
INLINE __m512i load_pairs(const void *from, int64_t at, const int type) {
    if (type == TYPE_BF16) return _mm512_loadu_si512((const uint16_t *)from + at);
    vf low = load_stored(from, at, type), high = load_stored(from, at + LANES, type);
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

/* Lays out 16 tokens from token `first` of a tile on: keys with the tokens side by side, pairs of
 * columns below each other; values with the columns side by side, pairs of tokens below each other. */
INLINE void lay_out(Run *r, int64_t first, const int64_t *at, const int type) {
    const Attention *a = r->a;
    int64_t dim = a->dim;
    uint16_t *keys = (uint16_t *)r->keys, *values = (uint16_t *)r->values;
    for (int j = 0; j < LANES; j++) {
        r->key_scale[first + j] = a->scaling, r->value_scale[first + j] = 1;
        if (!has_scales(type) || at[j] < 0) continue;
        r->key_scale[first + j] *= scale_of(a->key_scales, at[j] / dim);
        r->value_scale[first + j] = scale_of(a->value_scales, at[j] / dim);
    }
    for (int64_t k = 0; k < dim; k += PAIRS) {
        vf key[LANES];
        __m512i value[LANES];
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            key[j] = (vf){0}, value[j] = _mm512_setzero_si512();
            if (at[j] < 0) continue;
            key[j] = (vf)load_pairs(a->keys, at[j] + k, type);
            value[j] = load_pairs(a->values, at[j] + k, type);
        }
        transpose(key);
        int64_t group = k / PAIRS * (TILE / AMX_ROWS) + first / AMX_ROWS;
        memcpy(keys + group * TILE_NUMBERS, key, sizeof key);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            int64_t tile = first / PAIRS * (dim / AMX_ROWS) + k / AMX_ROWS + half;
            uint16_t *to = values + tile * TILE_NUMBERS + first % PAIRS / 2 * PAIRS;
#pragma GCC unroll 8
            for (int j = 0; j < LANES; j += 2) {
                __m512i second = _mm512_slli_epi32(half_of(value[j + 1], half), 16);
                __m512i pairs = _mm512_or_si512(half_of(value[j], half), second);
                _mm512_storeu_si512(to + j / 2 * PAIRS, pairs);
            }
        }
    }
}

/* Scores of 16 rows, times their scales. */
static void score_amx(const Run *r, int64_t row, float *score) {
    int64_t dim = r->a->dim;
    const uint16_t *query = (const uint16_t *)r->query + row * dim;
    const uint16_t *keys = (const uint16_t *)r->keys;
    CLEAR_SUMS();
    for (int64_t k = 0; k < dim; k += PAIRS, keys += TILE / AMX_ROWS * TILE_NUMBERS) {
        TILE_LOAD(6, query + k, 2 * dim);
        TILE_LOAD(4, keys, VECTOR_BYTES);
        TILE_MULTIPLY_BF16(0, 6, 4);
        TILE_LOAD(5, keys + TILE_NUMBERS, VECTOR_BYTES);
        TILE_MULTIPLY_BF16(1, 6, 5);
        TILE_LOAD(4, keys + 2 * TILE_NUMBERS, VECTOR_BYTES);
        TILE_MULTIPLY_BF16(2, 6, 4);
        TILE_LOAD(5, keys + 3 * TILE_NUMBERS, VECTOR_BYTES);
        TILE_MULTIPLY_BF16(3, 6, 5);
        if (r->a->stored != TYPE_INT4) continue;
        TILE_LOAD(7, query + ROOM + k, 2 * dim);
        TILE_MULTIPLY_BF16(2, 7, 4);
        TILE_MULTIPLY_BF16(3, 7, 5);
        TILE_LOAD(4, keys, VECTOR_BYTES);
        TILE_MULTIPLY_BF16(0, 7, 4);
        TILE_LOAD(5, keys + TILE_NUMBERS, VECTOR_BYTES);
        TILE_MULTIPLY_BF16(1, 7, 5);
    }
    TILE_STORE(0, score, 4 * TILE);
    TILE_STORE(1, score + LANES, 4 * TILE);
    TILE_STORE(2, score + 2 * LANES, 4 * TILE);
    TILE_STORE(3, score + 3 * LANES, 4 * TILE);
    for (int i = 0; i < TILE; i += LANES) {
        vf scale = load_lanes(r->key_scale, i, TYPE_F32);
        for (int m = 0; m < AMX_ROWS; m++) {
            vf own = load_lanes(score, m * TILE + i, TYPE_F32) * scale;
            memcpy(score + m * TILE + i, &own, sizeof own);
        }
    }
}

/* Adds the values times the weights of 16 rows to their totals. */
static void add_amx(Run *r, int64_t row, const float *share, int64_t depth) {
    uint16_t high[AMX_ROWS * TILE] __attribute__((aligned(64)));
    uint16_t low[AMX_ROWS * TILE] __attribute__((aligned(64)));
    for (int i = 0; i < AMX_ROWS * TILE; i += PAIRS) {
        __m512 weight[2], rest[2];
        for (int half = 0; half < 2; half++) {
            int at = i + half * LANES;
            weight[half] = (__m512)(load_lanes(share, at, TYPE_F32) *
                                    load_lanes(r->value_scale, at % TILE, TYPE_F32));
        }
        __m512i both = (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]);
        _mm512_store_si512(high + i, both);
        for (int half = 0; half < 2; half++) {
            __m512 own = (__m512)_mm512_slli_epi32(half_of(both, half), 16);
            rest[half] = _mm512_sub_ps(weight[half], own);
        }
        _mm512_store_si512(low + i, (__m512i)_mm512_cvtne2ps_pbh(rest[1], rest[0]));
    }
    int64_t dim = r->a->dim;
    for (int64_t k = 0; k < dim; k += PAIRS) {
        float *total = r->total + row * dim + k;
        TILE_LOAD(0, total, 4 * dim);
        TILE_LOAD(1, total + LANES, 4 * dim);
        for (int64_t token = 0; token < depth; token += PAIRS) {
            const uint16_t *values = (const uint16_t *)r->values;
            values += (token / PAIRS * dim + k) / AMX_ROWS * TILE_NUMBERS;
            TILE_LOAD(6, high + token, 2 * TILE);
            TILE_LOAD(4, values, VECTOR_BYTES);
            TILE_MULTIPLY_BF16(0, 6, 4);
            TILE_LOAD(5, values + TILE_NUMBERS, VECTOR_BYTES);
            TILE_MULTIPLY_BF16(1, 6, 5);
            TILE_LOAD(7, low + token, 2 * TILE);
            TILE_MULTIPLY_BF16(0, 7, 4);
            TILE_MULTIPLY_BF16(1, 7, 5);
        }
        TILE_STORE(0, total, 4 * dim);
        TILE_STORE(1, total + LANES, 4 * dim);
    }
}
#else
INLINE int has_amx(const Attention *a) {
    (void)a;
    return 0;
}
#endif

/* ---- runs ------------------------------------------------------------------------------------ */

/* Takes LANES tokens of a tile from its token `first` on; one at -1 is seen by no row. */
INLINE void take_tokens(Run *r, int64_t first, const int64_t *at, const int type, int are_seen) {
#ifdef __AMX_BF16__
    if (r->strip == AMX_ROWS && (type == TYPE_BF16 || has_scales(type))) {
        lay_out(r, first, at, type);
        return;
    }
#endif
#ifdef __AVX512BF16__
    if (r->in_pairs) {
        pair_keys(r, first, at);
        widen_tokens(r, first, at, type, are_seen, 0);
        return;
    }
#endif
    if (are_seen) widen_tokens(r, first, at, type, 1, 1);
    else widen_tokens(r, first, at, type, 0, 1);
}

/* Takes the tokens [t, t + TILE). */
INLINE void take_tile(Run *r, int64_t t, const int type) {
    int64_t place = 0, at[LANES];
    for (int first = 0; first < TILE; first += LANES) {
        int seen = 0;
        if (first % RUN == 0 && t + first < r->end) place = place_of(r->a, r->table, r->kv_head, t + first);
        for (int j = 0; j < LANES; j++) {
            int64_t token = t + first + j;
            int is_seen = token >= r->since && token < r->end;
            at[j] = is_seen ? place + (first % RUN + j) * r->a->dim : -1;
            seen += is_seen;
        }
        take_tokens(r, first, at, type, seen == LANES);
    }
}

static void set_row(Run *r, int64_t row, int64_t token, int64_t head) {
    const Attention *a = r->a;
    r->head[row] = head;
    r->from[row] = token * a->query_token + head * a->query_head;
    r->to[row] = (token * a->kv_heads * a->group + head) * a->dim;
    r->last[row] = a->lengths[token];
    r->first[row] = first_seen(a, a->lengths[token]);
    if (r->first[row] < r->since) r->since = r->first[row];
    if (r->last[row] > r->end) r->end = r->last[row];
    r->most[row] = a->sinks ? a->sinks[head] : -INFINITY;
    r->weight[row] = (vf){0};
    if (a->sinks) r->weight[row][0] = 1;
    memset(r->total + row * a->dim, 0, (size_t)a->dim * sizeof *r->total);
    const int is_narrow = r->strip != STRIP || r->in_pairs;
    if (is_narrow && a->stored != TYPE_INT4) {
        const uint16_t *query = (const uint16_t *)a->query + r->from[row];
        memcpy((uint16_t *)r->query + row * a->dim, query, (size_t)a->dim * sizeof *query);
        return;
    }
    float own[MOST_DIM] __attribute__((aligned(64)));
    float *wide = is_narrow ? own : r->query + row * a->dim;
    for (int64_t k = 0; k < a->dim; k += LANES) {
        vf query = load_any(a->query, r->from[row] + k, a->type);
        if (!is_narrow) query *= a->scaling;
        memcpy(wide + k, &query, sizeof query);
    }
    if (a->stored == TYPE_INT4) rotate(wide, a->dim);
    if (!is_narrow) return;
    uint16_t *high = (uint16_t *)r->query + row * a->dim;
    for (int64_t k = 0; k < a->dim; k += LANES) {
        vf query = load_lanes(own, k, TYPE_F32);
        vu bits = typed_bits(query, TYPE_BF16);
        store_typed(high, k, LANES, bits, TYPE_BF16);
        store_typed(high + ROOM, k, LANES, typed_bits(query - typed_value(bits, TYPE_BF16), TYPE_BF16),
                    TYPE_BF16);
    }
}

/* Rows up to a whole strip: they see nothing. */
static void fill_strip(Run *r) {
    int64_t dim = r->a->dim, count = (r->strip - r->rows % r->strip) % r->strip;
    size_t number = r->strip != STRIP || r->in_pairs ? sizeof(uint16_t) : sizeof *r->query;
    for (int64_t row = r->rows; row < r->rows + count; row++)
        r->first[row] = r->last[row] = 0, r->most[row] = -INFINITY, r->weight[row] = (vf){0};
    memset((char *)r->query + (size_t)(r->rows * dim) * number, 0, (size_t)(count * dim) * number);
    if (number == sizeof(uint16_t) && r->a->stored == TYPE_INT4)
        memset((uint16_t *)r->query + ROOM + r->rows * dim, 0, (size_t)(count * dim) * number);
    memset(r->total + r->rows * dim, 0, (size_t)(count * dim) * sizeof *r->total);
}

static void attend_tile(Run *r, int64_t t) {
    float score[MOST_STRIP * TILE] __attribute__((aligned(64)));
    for (int64_t row = 0; row < r->rows; row += r->strip) {
        int64_t first = INT64_MAX, last = 0;
        for (int64_t m = row; m < row + r->strip && m < r->rows; m++) {
            if (r->first[m] < first) first = r->first[m];
            if (r->last[m] > last) last = r->last[m];
        }
        if (t + TILE <= first || t >= last) continue;
        int64_t depth = last - t < TILE ? last - t : TILE;
#ifdef __AMX_BF16__
        if (r->strip == AMX_ROWS) {
            score_amx(r, row, score);
            for (int m = 0; m < AMX_ROWS; m++) weigh(r, row + m, t, score + m * TILE);
            add_amx(r, row, score, depth);
            continue;
        }
#endif
#ifdef __AVX512BF16__
        if (r->in_pairs) score_pairs(r, row, score);
        else
#endif
            score_strip(r, row, score);
        for (int m = 0; m < STRIP; m++) weigh(r, row + m, t, score + m * TILE);
        add_strip(r, row, score, depth);
    }
}

static void put_rows(Run *r) {
    const Attention *a = r->a;
    for (int64_t row = 0; row < r->rows; row++) {
        if (a->stored == TYPE_INT4) rotate(r->total + row * a->dim, a->dim);
        float weight = 0;
        for (int i = 0; i < LANES; i++) weight += r->weight[row][i];
        for (int64_t k = 0; k < a->dim; k += LANES) {
            vf total;
            memcpy(&total, r->total + row * a->dim + k, sizeof total);
            store_typed(a->out, r->to[row] + k, LANES, typed_bits(total / weight, a->type), a->type);
        }
    }
}

static void attend_rows(Run *r) {
    fill_strip(r);
    for (int64_t t = r->since - r->since % TILE; t < r->end; t += TILE) {
        switch (r->a->stored) {
        case TYPE_F32: take_tile(r, t, TYPE_F32); break;
        case TYPE_F16: take_tile(r, t, TYPE_F16); break;
        case TYPE_BF16: take_tile(r, t, TYPE_BF16); break;
        case TYPE_INT8: take_tile(r, t, TYPE_INT8); break;
        default: take_tile(r, t, TYPE_INT4);
        }
        attend_tile(r, t);
    }
    put_rows(r);
}

/* The queries of one KV head, of `count` tokens of a sequence. */
void run_part(const Attention *a, int64_t token, int64_t count, int64_t head) {
    int64_t all = count * a->group, most = ROOM / a->dim;
    Run r;
    r.strip = has_amx(a) ? MOST_STRIP : STRIP, r.in_pairs = !has_amx(a) && has_pairs(a);
    most = most > MOST_ROWS ? MOST_ROWS : most / r.strip * r.strip;
    r.a = a, r.kv_head = head, r.table = a->tables + a->starts[token];
#ifdef __AMX_BF16__
    if (r.strip == AMX_ROWS) shape_tiles(AMX_ROWS, 4, AMX_ROWS);
#endif
    for (int64_t first = 0; first < all; first += most) {
        r.rows = all - first < most ? all - first : most;
        r.since = INT64_MAX, r.end = 0;
        for (int64_t row = 0; row < r.rows; row++) {
            int64_t i = first + row; /* heads outermost: a strip sees about the same keys */
            set_row(&r, row, token + i % count, head * a->group + i / count);
        }
        attend_rows(&r);
    }
#ifdef __AMX_BF16__
    if (r.strip == AMX_ROWS) clear_tiles();
#endif
}

/* Tokens whose queries of a KV head share the tiles of keys. */
static int64_t part_tokens(const Attention *a) {
    int64_t most = ROOM / a->dim;
    most = (most > MOST_ROWS ? MOST_ROWS : most) / a->group;
    return most ? most : 1;
}

int64_t runs_items(const Attention *a) {
    int64_t parts = 0, tokens = part_tokens(a);
    for (int64_t i = 0; i < a->run_count; i++) parts += (a->runs[2 * i + 1] + tokens - 1) / tokens;
    return parts * a->kv_heads;
}

/* The last tokens of a run come first: they see the most. */
void runs_part(const Attention *a, int64_t item) {
    int64_t tokens = part_tokens(a), part = item / a->kv_heads, parts;
    const int64_t *run = a->runs;
    for (; part >= (parts = (run[1] + tokens - 1) / tokens); run += 2) part -= parts;
    int64_t first = (parts - 1 - part) * tokens, left = run[1] - first;
    run_part(a, run[0] + first, left < tokens ? left : tokens, item % a->kv_heads);
}
