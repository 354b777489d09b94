/* Stage columns: every way a device class can run layers [a, c) that a plan below the limit needs.
 *
 * Time and memory of a stage depend only on how many layers of each kind it has at each bitwidth,
 * so layers are added one at a time and states of equal counts are merged, keeping the least
 * degradation: exact for any omega. A state is dropped once its price (memory relaxed by its
 * multiplier) with the cheapest completion reaches the limit. Of the columns of one cell, those
 * are kept that no other dominates in prefill, decode, cost and (under a budget) degradation. */
#include "exact.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    uint64_t counts;
    int64_t bytes, held; /* all, and at least in memory */
    int64_t host;        /* of the device's host */
    double prefill, decode, degradation, price;
} State;

enum { MAX_STATES = 1 << 17, TABLE = 1 << 19 };

typedef struct {
    State *now, *next;
    int32_t *slot;    /* [TABLE] index into next */
    uint32_t *stamp;  /* [TABLE] the layer that wrote the slot */
    uint32_t turn;
    Column *found;    /* [MAX_STATES] columns of one cell before filtering */
    double *tail;     /* [L + 1] cheapest other part of a plan over all later ends */
    uint64_t *radix;  /* [K, B] what one layer adds to counts; native.py decodes them alike */
} Sweep;

static void fill_radix(const Problem *p, uint64_t *radix) {
    uint64_t place = 1;
    for (int kind = 0; kind < p->kinds; kind++) {
        uint64_t layers = 0;
        for (int i = 0; i < p->layers; i++) layers += p->kind[i] == kind;
        for (int b = 0; b < p->bits; b++) {
            radix[kind * p->bits + b] = b + 1 < p->bits ? place : 0;
            if (b + 1 < p->bits) place *= layers + 1;
        }
    }
}

static void sweep_close(Sweep *w) {
    free(w->now), free(w->next), free(w->slot), free(w->stamp), free(w->found);
    free(w->tail), free(w->radix);
}

static int sweep_open(Sweep *w, const Problem *p) {
    memset(w, 0, sizeof *w);
    w->now = malloc(MAX_STATES * sizeof(State));
    w->next = malloc(MAX_STATES * sizeof(State));
    w->slot = malloc(TABLE * sizeof(int32_t));
    w->stamp = calloc(TABLE, sizeof(uint32_t));
    w->found = malloc(MAX_STATES * sizeof(Column));
    w->tail = malloc(((size_t)p->layers + 2) * sizeof(double));
    w->radix = malloc((size_t)p->kinds * (size_t)p->bits * sizeof(uint64_t));
    if (!w->now || !w->next || !w->slot || !w->stamp || !w->found || !w->tail || !w->radix) {
        sweep_close(w);
        return EXACT_NO_MEMORY;
    }
    fill_radix(p, w->radix);
    return EXACT_DONE;
}

/* Put a state into the table of the next layer, merged with one of equal counts. */
static int merge(Sweep *w, const State *state, uint64_t mask, int *size) {
    uint64_t at = (state->counts * 0x9E3779B97F4A7C15ULL) >> 20 & mask;
    while (w->stamp[at] == w->turn) {
        State *other = w->next + w->slot[at];
        if (other->counts == state->counts) {
            if (state->degradation < other->degradation) *other = *state;
            return EXACT_DONE;
        }
        at = (at + 1) & mask;
    }
    if (*size == MAX_STATES) return EXACT_OVERFLOW;
    w->stamp[at] = w->turn, w->slot[at] = *size;
    w->next[(*size)++] = *state;
    return EXACT_DONE;
}

/* Give layer c to every state, at every bitwidth that can still lead below the limit. */
static int extend(Sweep *w, const LagrangianTables *t, int k, int c, int size, double limit) {
    const Problem *p = t->problem;
    int B = p->bits, grown = 0, cell = ((k % p->groups) * p->kinds + p->kind[c]) * B;
    const double *price = t->layer_price + ((size_t)k * p->layers + c) * B;
    double rest = w->tail[c + 1] - t->prefix[(size_t)k * (p->layers + 1) + c + 1];
    uint64_t mask = 64;
    while (mask < 2 * (uint64_t)size * B && mask < TABLE) mask *= 2;
    w->turn++;
    for (int s = 0; s < size; s++) {
        for (int b = 0; b < B; b++) {
            if (!may_run(p, k, c, b)) continue;
            State state = w->now[s];
            state.price += price[b];
            state.bytes += p->bytes[cell + b];
            state.held += p->bytes[cell + b] - p->streamable[cell + b];
            state.host += p->host[cell + b];
            state.degradation += p->omega[c * B + b];
            if (state.price + rest >= limit || state.held > p->capacity[k] ||
                state.host > p->host_capacity[k % p->groups] || state.degradation > p->budget)
                continue;
            state.prefill += p->prefill[cell + b], state.decode += p->decode[cell + b];
            state.counts += w->radix[p->kind[c] * B + b];
            if (merge(w, &state, mask - 1, &grown)) return -1;
        }
    }
    State *swap = w->now;
    w->now = w->next, w->next = swap;
    return grown;
}

static int by_cost(const void *a, const void *b) {
    const Column *x = a, *y = b;
    return x->cost != y->cost ? (x->cost > y->cost) - (x->cost < y->cost)
                              : (x->prefill > y->prefill) - (x->prefill < y->prefill);
}
static int by_price(const void *a, const void *b) {
    const Column *x = a, *y = b;
    return (x->price > y->price) - (x->price < y->price);
}

/* Keep the undominated columns; returns how many, sorted by price. */
static int filter(Column *found, int size, int budgeted) {
    int kept = 0;
    qsort(found, (size_t)size, sizeof *found, by_cost);
    for (int j = 0; j < size; j++) {
        int dominated = 0;
        for (int q = kept - 1; q >= 0 && !dominated; q--)
            dominated = found[q].prefill <= found[j].prefill &&
                        found[q].decode <= found[j].decode &&
                        (!budgeted || found[q].degradation <= found[j].degradation);
        if (!dominated) found[kept++] = found[j];
    }
    qsort(found, (size_t)kept, sizeof *found, by_price);
    return kept;
}

static int append(Columns *s, const Column *column, int size) {
    if (s->size + size > s->limit) return EXACT_OVERFLOW;
    if (s->size + size > s->capacity) {
        int64_t capacity = 2 * (s->size + size) + 1024;
        Column *grown = realloc(s->column, (size_t)capacity * sizeof *grown);
        if (!grown) return EXACT_NO_MEMORY;
        s->column = grown, s->capacity = capacity;
    }
    memcpy(s->column + s->size, column, (size_t)size * sizeof *column);
    s->size += size;
    return EXACT_DONE;
}

/* Layers of one size whose weights may rest on disk. */
typedef struct {
    int64_t size, count;
} Streamable;

static int by_size(const void *a, const void *b) {
    const Streamable *x = a, *y = b;
    return (x->size < y->size) - (x->size > y->size);
}

/* The fewest bytes, at least `need`, of layers from `first` on; at most `best` is looked for. */
static int64_t fewest(const Streamable *of, int size, int first, int64_t read, int64_t need,
                      int64_t best) {
    if (read >= need) return read < best ? read : best;
    int64_t rest = 0;
    for (int i = first; i < size; i++) rest += of[i].size * of[i].count;
    if (read + rest < need || need >= best) return best;
    int64_t most = (need - read + of[first].size - 1) / of[first].size;
    if (most > of[first].count) most = of[first].count;
    for (int64_t n = most; n >= 0 && best > need; n--)
        best = fewest(of, size, first + 1, read + n * of[first].size, need, best);
    return best;
}

/* The fewest bytes on disk with which layers [a, c) fit; INT64_MAX if they never do. */
static int64_t least_streamed(const Sweep *w, const Problem *p, const State *state, int k, int a,
                              int c) {
    Streamable of[p->kinds * p->bits];
    uint64_t counts = state->counts;
    int size = 0;
    for (int kind = p->kinds - 1; kind >= 0; kind--) {
        int64_t last = 0;
        for (int i = a; i < c; i++) last += p->kind[i] == kind;
        for (int b = p->bits - 2; b >= -1; b--) {
            int width = b < 0 ? p->bits - 1 : b;
            int64_t count = last;
            if (b >= 0) {
                uint64_t radix = w->radix[kind * p->bits + b];
                count = (int64_t)(counts / radix), counts %= radix;
                last -= count;
            }
            int64_t each = p->streamable[((k % p->groups) * p->kinds + kind) * p->bits + width];
            if (count > 0 && each > 0) of[size++] = (Streamable){.size = each, .count = count};
        }
    }
    qsort(of, (size_t)size, sizeof *of, by_size);
    int64_t best = INT64_MAX;
    for (int i = 0; i < size; i++)
        best = fewest(of, size, i, 0, state->bytes - p->capacity[k] + p->buffers * of[i].size, best);
    return best;
}

/* Turn the states that end at c into columns of the cell. */
static int emit(Sweep *w, Columns *s, const LagrangianTables *t, const double *x, int k, int a,
                int c, int size, double allowed) {
    const Problem *p = t->problem;
    int g = k % p->groups, found = 0;
    double memory = x[at_memory(p, k)] / t->byte_unit, host = x[at_host(p, g)] / t->byte_unit;
    for (int j = 0; j < size; j++) {
        State *state = w->now + j;
        double prefill = state->prefill, decode = state->decode;
        double price = state->price + memory * (double)(p->capacity[k] - state->bytes) +
                       host * (double)(p->host_capacity[g] - state->host);
        if (state->held < state->bytes) {
            if (state->bytes > p->capacity[k]) {
                int64_t read = least_streamed(w, p, state, k, a, c);
                if (read == INT64_MAX) continue;
                if ((double)read * p->stream_prefill[g] > prefill)
                    prefill = (double)read * p->stream_prefill[g];
                if ((double)read * p->stream_decode[g] > decode)
                    decode = (double)read * p->stream_decode[g];
            }
            price = (1 + x[at_prefill(p, g)]) * prefill +
                    (sum_price(p, x) + x[at_decode(p, g)]) * decode +
                    (p->theta + x[at_budget(p)]) * state->degradation;
        }
        if (price >= allowed) continue;
        w->found[found++] = (Column){.prefill = prefill,
                                     .decode = decode,
                                     .cost = prefill + p->theta * state->degradation,
                                     .degradation = state->degradation,
                                     .price = price,
                                     .counts = state->counts};
    }
    return append(s, w->found, filter(w->found, found, isfinite(p->budget)));
}

static int sweep(Sweep *w, Columns *s, const LagrangianTables *t, const double *x, int k, int a,
                 const double *best, double limit) {
    const Problem *p = t->problem;
    int L = p->layers, last = t->reach[(size_t)k * (L + 1) + a], size = 1, status = EXACT_DONE;
    const double *prefix = t->prefix + (size_t)k * (L + 1);
    int32_t *start = s->start + column_cell(p, k, a, 0);
    for (int c = 0; c <= a; c++) start[c] = (int32_t)s->size;
    w->tail[L + 1] = HUGE_VAL;
    for (int c = L; c >= a; c--) {
        double here = c <= last ? best[c] + prefix[c] : HUGE_VAL;
        w->tail[c] = w->tail[c + 1] < here ? w->tail[c + 1] : here;
    }
    w->now[0] = (State){.prefill = p->master_prefill[k],
                        .decode = p->master_decode[k],
                        .price = t->fixed[k]};
    for (int c = a; c <= L; c++) {
        start[c] = (int32_t)s->size;
        if (c > a) {
            size = size > 0 && c <= last ? extend(w, t, k, c - 1, size, limit) : 0;
            if (size < 0) return EXACT_OVERFLOW;
            s->states += size;
        }
        if (c - a >= t->lattice->least_layers[k] && size > 0 && c <= last)
            status = emit(w, s, t, x, k, a, c, size, limit - best[c]);
        if (status) return status;
    }
    start[L + 1] = (int32_t)s->size;
    return EXACT_DONE;
}

int columns_fill(Columns *s, const LagrangianTables *t, const double *x, const double *best,
                 double limit, double deadline) {
    const Problem *p = t->problem;
    int L = p->layers, status = EXACT_DONE;
    Sweep w;
    s->problem = p, s->size = 0, s->states = 0;
    s->start = malloc((size_t)column_cell(p, 2 * p->groups, 0, 0) * sizeof(int32_t));
    if (!s->start || sweep_open(&w, p)) return EXACT_NO_MEMORY;
    for (int k = 0; k < 2 * p->groups && !status; k++)
        for (int a = 0; a <= L && !status; a++) {
            int possible = a < L && (k < p->groups || a == 0);
            if (possible && t->reach[(size_t)k * (L + 1) + a] >= a)
                status = sweep(&w, s, t, x, k, a,
                               best + ((size_t)k * (L + 1) + a) * (L + 1), limit);
            else
                for (int c = 0; c <= L + 1; c++)
                    s->start[column_cell(p, k, a, c)] = (int32_t)s->size;
            if (now() > deadline) status = status ? status : EXACT_DEADLINE;
        }
    sweep_close(&w);
    return status;
}

void columns_close(Columns *s) {
    free(s->column), free(s->start);
    memset(s, 0, sizeof *s);
}
