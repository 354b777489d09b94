/* A step: the operators of all layers of a stage in one call.
 *
 * The rows of a step are tokens, of different sequences or consecutive ones of one sequence.
 * Operators that work on each row alone follow each other in one thread; products and attention are
 * spread over the threads in parts, those of experts in parts of all experts that some row visits. All
 * rows store their keys and values before any row attends. Parts of weights that lie one after the
 * other are taken by one thread.
 * Between them the threads wait for each other: they spin for some microseconds, as long as a part
 * takes, and then sleep, so that other processes get the core.
 *
 * Experts apart are computed by the threads of a pool (pool.h), by the same operators: a step submits
 * its rows once they have chosen, goes on, and collects their sum. */
#include "attention.h"
#include "experts.h"
#include "lanes.h"
#include "mixer.h"
#include "pool.h"

#ifdef __AVX2__
#include <stdlib.h>

enum { NORM, ADD, ROTATE, GATE, PREPARE, STORE, ROUTE, COMBINE };
enum { DELTA_FACTORS = COMBINE + 1, DELTA_GATE, MAMBA_FACTORS, MAMBA_NORM, COPY };
enum { PRODUCTS = COPY + 1, ATTEND, GATHER, ACTIVATE, EXPERTS, CONVOLVE, DELTA, MAMBA };
enum { SUBMIT = MAMBA + 1, COLLECT };
enum { DENSE_BF16, PLAIN, PACKED_BF16, PACKED_FLOAT, LLM_INT8, PACKED_INT8 };
enum { MOST_PRODUCTS = 4, SPINS = 1000 };

typedef struct {
    Product products[MOST_PRODUCTS];
    const PrepareRows *prepared; /* null where the kernel needs none */
    int64_t count, few_limit;
    int32_t kernel, out; /* out: the type of y, which plain weights may have of their own */
} Products;

typedef struct {
    int32_t kind;
    const void *what; /* the struct of that kind */
} Operator;

typedef struct {
    const Operator *operators;
    int64_t count, rows;
    const int32_t *tables; /* these as in Attention */
    const int64_t *starts, *lengths, *chosen, *runs;
    const int32_t *window_tables; /* of layers with windows */
    int64_t chosen_count, run_count;
    const MixerRow *sequences; /* [sequence_count] */
    int64_t sequence_count;
    int32_t type, threads;
} Step;

typedef struct {
    const Step *step;
    int32_t threads;
    Share *shares; /* of each thread, of the parts of products */
    int64_t next __attribute__((aligned(64)));    /* the other part to be taken next */
    int32_t arrived __attribute__((aligned(64))); /* threads that wait for the others */
    int32_t turn __attribute__((aligned(64)));    /* counts the meetings */
    int32_t sleepers;
    Pieces pieces; /* of all attention operators, one after the other */
} Run;

/* ---- threads --------------------------------------------------------------------------------- */

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));

/* Returns when all threads have called it; parts are then taken from the first again. */
static void meet(Run *run) {
    int32_t turn = __atomic_load_n(&run->turn, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&run->arrived, 1, __ATOMIC_ACQ_REL) == run->threads) {
        run->next = 0, run->arrived = 0;
        for (int32_t i = 0; i < run->threads; i++) run->shares[i].taken = 0;
        change(&run->turn, &run->sleepers);
        return;
    }
    wait_while(&run->turn, turn, &run->sleepers, SPINS);
}

INLINE int64_t take(Run *run) {
    return __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED);
}

/* ---- operators on rows ----------------------------------------------------------------------- */

static void prepare(const PrepareRows *o, int64_t rows, int64_t m) {
    const Prepared *q = &o->prepared;
    if (o->kernel == PACKED_FLOAT) float_sums(q, rows, m);
    if (o->kernel == PACKED_INT8) block_codes(q, rows, m);
#ifdef __AVX512BF16__
    if (o->kernel == PACKED_BF16) bf16_sums(q, rows, m);
#endif
    if (o->kernel == LLM_INT8) {
        q->start[m] = 0;
        int8_scan(q, m);
        int64_t outliers = q->end[m]; /* one row's after another's, whichever comes first */
        q->start[m] = __atomic_fetch_add(q->used, outliers, __ATOMIC_RELAXED);
        q->end[m] = q->start[m] + outliers;
        int8_quantize(q, m);
    }
}

INLINE Attention of_rows(const Step *step, const Attention *what) {
    Attention a = *what;
    a.tables = a.window ? step->window_tables : step->tables;
    a.starts = step->starts, a.lengths = step->lengths;
    a.chosen = step->chosen, a.count = step->chosen_count;
    a.runs = step->runs, a.run_count = step->run_count;
    return a;
}

INLINE Convolution of_sequences(const Step *step, const Convolution *what) {
    Convolution c = *what;
    c.rows = step->sequences, c.count = step->sequence_count;
    return c;
}

INLINE Delta delta_of(const Step *step, const Delta *what) {
    Delta d = *what;
    d.convolution = of_sequences(step, &what->convolution);
    return d;
}

INLINE Mamba mamba_of(const Step *step, const Mamba *what) {
    Mamba m = *what;
    m.convolution = of_sequences(step, &what->convolution);
    return m;
}

static void on_row(const Step *step, const Slots *slots, const Operator *operator, int64_t m) {
    const void *what = operator->what;
    switch (operator->kind) {
    case NORM: norm_row_heads(what, m); break;
    case ADD: add_row(what, m, step->type); break;
    case ROTATE: rotate_row(what, m, step->type); break;
    case GATE: gate_row(what, m, step->type); break;
    case PREPARE: prepare(what, step->rows, m); break;
    case ROUTE: route_row(what, m); break;
    case COMBINE: combine_row(what, slots, m, step->type); break;
    case DELTA_FACTORS: delta_factors((void *)what, m); break;
    case DELTA_GATE: delta_gate((void *)what, m); break;
    case MAMBA_NORM: mamba_norm((void *)what, m); break;
    case COPY: copy_row(what, m, step->type); break;
    case MAMBA_FACTORS: {
        Mamba own = mamba_of(step, what);
        mamba_factors(&own, m);
        break;
    }
    case STORE: {
        Attention a = of_rows(step, what);
        a.chosen = 0;
        store_part(&a, m);
        break;
    }
    }
}

/* ---- products and attention ------------------------------------------------------------------ */

static int64_t parts_of(const Product *p, int kernel) {
    if (kernel == PLAIN) return (p->weight->rows + 15) / 16;
    return kernel == PACKED_FLOAT ? float_parts(p) : (p->weight->rows + PANEL - 1) / PANEL;
}

typedef struct {
    int64_t few_limit;
    int32_t kernel, out;
} How;

/* Bytes that a thread needs to share the columns of outliers. */
static int64_t shared_bytes(const Product *p, int kernel) {
    return kernel == LLM_INT8 ? p->weight->columns : 1;
}

static void product_part(How how, const Product *p, const Prepared *q, const Shared *shared,
                         int64_t item) {
    switch (how.kernel) {
    case PLAIN: plain_part(p, how.out, item); break;
    case PACKED_FLOAT: float_part(p, q, how.out, item); break;
    case LLM_INT8: int8_part(p, q, shared, item); break;
    case PACKED_INT8: packed_int8_part(p, q, item); break;
#ifdef __AVX512BF16__
    case DENSE_BF16:
        if (how.few_limit && p->count > how.few_limit) float_part(p, 0, how.out, item);
        else dense_part(p, item);
        break;
    case PACKED_BF16: bf16_part(p, q, how.few_limit, item); break;
#endif
    }
}

static void share(Shared *shared, const Prepared *q, int kernel, int64_t rows) {
    if (kernel == LLM_INT8) share_columns(shared, q, rows);
}

static void multiply(Run *run, int me, const Products *o) {
    Product product[MOST_PRODUCTS];
    const Prepared *q = o->prepared ? &o->prepared->prepared : 0;
    How how = {o->few_limit, o->kernel, o->out};
    int64_t end[MOST_PRODUCTS], all = 0;
    for (int i = 0; i < o->count; i++) {
        product[i] = o->products[i];
        product[i].count = run->step->rows;
        end[i] = all += parts_of(product + i, o->kernel);
    }
    uint8_t place[shared_bytes(product, o->kernel)];
    Shared shared = {.place = place};
    int is_shared = 0, passed = 0;
    for (int64_t item; (item = take_item(run->shares, run->threads, me, &passed, all)) >= 0;) {
        if (!is_shared) share(&shared, q, o->kernel, run->step->rows), is_shared = 1;
        int i = 0;
        while (item >= end[i]) i++;
        product_part(how, product + i, q, &shared, item - (i ? end[i - 1] : 0));
    }
}

/* ---- experts --------------------------------------------------------------------------------- */

static void prepare_slot(const PrepareRows *o, const Slots *s, int64_t slot) {
    if (!o) return;
    int64_t group = s->group[slot], first = s->first[group];
    PrepareRows own = of_slots(o, first);
    prepare(&own, s->first[group + 1] - first, slot - first);
}

static void gather(Run *run, const GatherRows *o, Slots *s) {
    int64_t bytes = o->columns * (run->step->type == TYPE_F32 ? 4 : 2);
    order_slots(s, o->route, o->here, run->step->rows);
    int64_t all = run->step->rows == 1 && s->count ? 1 : s->count;
    for (int64_t slot; (slot = take(run)) < all;) {
        const char *from = (const char *)o->x + s->row[slot] * bytes;
        memcpy((char *)o->y + slot * bytes, from, (size_t)bytes);
        prepare_slot(o->prepared, s, slot);
    }
}

static void activate(Run *run, const ActivateSlots *o, const Slots *s) {
    for (int64_t slot; (slot = take(run)) < s->count;) {
        gate_row(&o->gate, slot, run->step->type);
        prepare_slot(o->prepared, s, slot);
    }
}

/* The product of a group of slots, and what it needs of x. */
static Product of_group(const Step *step, const ExpertProducts *o, const Slots *s, int64_t group,
                        PrepareRows *prepared) {
    int64_t size = step->type == TYPE_F32 ? 4 : 2, expert = s->expert[group];
    const Weight *w = o->weights[expert];
    int64_t first = s->first[group], from = o->gathered && step->rows == 1 ? 0 : first;
    if (o->prepared) *prepared = of_slots(o->prepared, from);
    return (Product){
        .weight = w,
        .x = (const char *)o->x + from * w->columns * size,
        .bias = o->biases ? o->biases[expert] : 0,
        .y = (char *)o->y + first * w->rows * size,
        .count = s->first[group + 1] - first,
        .in_float = o->in_float,
    };
}

static void multiply_experts(Run *run, int me, const ExpertProducts *o, const Slots *s) {
    const Step *step = run->step;
    How how = {o->few_limit, o->kernel, step->type};
    PrepareRows prepared = {.kernel = o->kernel};
    Product product;
    int64_t all = 0, start = 0, end = 0, group = s->groups;
    if (!group) return;
    while (group) {
        product = of_group(step, o, s, --group, &prepared);
        all += parts_of(&product, o->kernel);
    }
    uint8_t place[shared_bytes(&product, o->kernel)];
    Shared shared = {.place = place};
    int passed = 0;
    for (int64_t item; (item = take_item(run->shares, run->threads, me, &passed, all)) >= 0;) {
        int is_other = item < start || item >= end;
        if (item < start) group = 0, end = 0; /* of another thread's share */
        for (; item >= end; group++) {
            product = of_group(step, o, s, group, &prepared);
            start = end, end += parts_of(&product, o->kernel);
        }
        if (is_other) share(&shared, &prepared.prepared, o->kernel, product.count);
        product_part(how, &product, &prepared.prepared, &shared, item - start);
    }
}

static void attend(Run *run, const Attention *what) {
    Attention a = of_rows(run->step, what);
    int64_t runs = runs_items(&a), all = runs + attention_items(&a, &run->pieces);
    for (int64_t item; (item = take(run)) < all;) {
        if (item < runs) runs_part(&a, item);
        else attention_part(&a, &run->pieces, item - runs);
    }
}

/* ---- mixers ---------------------------------------------------------------------------------- */

static void convolve_all(Run *run, const Convolution *what) {
    Convolution c = of_sequences(run->step, what);
    int64_t all = convolution_items(&c);
    for (int64_t item; (item = take(run)) < all;) convolve_part(&c, item);
}

static void delta_all(Run *run, const Delta *what) {
    Delta d = delta_of(run->step, what);
    int64_t all = d.convolution.count * d.heads;
    for (int64_t item; (item = take(run)) < all;) delta_part(&d, item);
}

static void mamba_all(Run *run, const Mamba *what) {
    Mamba m = mamba_of(run->step, what);
    int64_t all = m.convolution.count * m.heads;
    for (int64_t item; (item = take(run)) < all;) mamba_part(&m, item);
}

/* ---- experts apart --------------------------------------------------------------------------- */

/* Experts of a layer that a pool computes, as a step of their own; buffers are those of the pool. */
typedef struct {
    const Operator *operators; /* gather, experts, activate, experts, combine */
    int64_t count;
    RouteRows *route; /* these get the rows of a job */
    GatherRows *gather;
    CombineRows *combine;
    int64_t most_rows;
    int32_t type;
} HostLayer;

/* Rows of a step for the experts of a layer that a pool computes. */
typedef struct {
    ExpertPool *pool;
    const HostLayer *layer;
    const void *x;         /* [rows, columns] */
    const int32_t *chosen; /* [rows, count] */
    const float *weight;   /* [rows, count] */
    void *y;               /* [rows, columns], the sum over these experts */
    int32_t ticket;
} ApartRows;

struct ExpertPool {
    Pool *threads;
    Step step;
    Run run;
    Share shares[MOST_POOL_THREADS];
};

static void forget_outliers(const PrepareRows *o) {
    if (o && o->prepared.used) *o->prepared.used = 0;
}

static void forget_all_outliers(const Step *step) {
    for (int64_t i = 0; i < step->count; i++) {
        const Operator *o = step->operators + i;
        if (o->kind == PREPARE) forget_outliers(o->what);
        if (o->kind == GATHER) forget_outliers(((const GatherRows *)o->what)->prepared);
        if (o->kind == ACTIVATE) forget_outliers(((const ActivateSlots *)o->what)->prepared);
    }
}

/* Room for the pieces of the largest attention operator. */
static void cut_all(Run *run) {
    Attention largest = {.kv_heads = 0};
    int64_t values = 0;
    for (int64_t i = 0; i < run->step->count; i++) {
        const Operator *o = run->step->operators + i;
        if (o->kind != ATTEND) continue;
        Attention a = of_rows(run->step, o->what);
        int64_t own = a.kv_heads * a.group * (a.dim + 2);
        if (a.kv_heads > largest.kv_heads) largest = a;
        if (own > values) values = own;
    }
    if (values) cut_pieces(&run->pieces, &largest, values);
}

static void submit_rows(ApartRows *o, int64_t rows) {
    o->ticket = kernels_experts_submit(o->pool, o->layer, o->x, o->chosen, o->weight, o->y, rows);
}

static void collect_rows(const ApartRows *o) {
    kernels_experts_wait(o->pool, o->ticket);
}

static void take_part(Run *run, int me) {
    const Step *step = run->step;
    const Operator *at = step->operators, *end = at + step->count;
    Slots slots;
    while (at < end) {
        const Operator *next = at + 1;
        switch (at->kind) {
        case PRODUCTS: multiply(run, me, at->what); break;
        case ATTEND: attend(run, at->what); break;
        case GATHER: gather(run, at->what, &slots); break;
        case ACTIVATE: activate(run, at->what, &slots); break;
        case EXPERTS: multiply_experts(run, me, at->what, &slots); break;
        case CONVOLVE: convolve_all(run, at->what); break;
        case DELTA: delta_all(run, at->what); break;
        case MAMBA: mamba_all(run, at->what); break;
        case SUBMIT:
            if (take(run) == 0) submit_rows((void *)at->what, step->rows);
            break;
        case COLLECT:
            if (take(run) == 0) collect_rows(at->what);
            break;
        default:
            while (next < end && next->kind < PRODUCTS) next++;
            for (int64_t m; (m = take(run)) < step->rows;)
                for (const Operator *o = at; o < next; o++) on_row(step, &slots, o, m);
        }
        at = next;
        if (at < end) meet(run);
    }
}

static void take_shared_part(void *pointer) {
    Run *run = pointer; /* the runtime may give fewer threads than were asked for */
    __atomic_store_n(&run->threads, omp_get_num_threads(), __ATOMIC_RELAXED);
    take_part(run, omp_get_thread_num());
}

void kernels_step(const Step *step) {
    int can_share = step->threads > 1 && GOMP_parallel && omp_get_num_threads && omp_get_thread_num;
    int threads = can_share ? step->threads : 1;
    Share shares[threads];
    memset(shares, 0, sizeof shares);
    Run run = {.step = step, .threads = 1, .shares = shares};
    forget_all_outliers(step);
    cut_all(&run);
    if (threads > 1) GOMP_parallel(take_shared_part, &run, (unsigned)threads, 0);
    else take_part(&run, 0);
    free(run.pieces.first);
}

/* ---- threads of experts apart ---------------------------------------------------------------- */

/* A thread of the pool prepares a job before all of them compute it. */
static void begin_job(void *owner, const PoolJob *job) {
    ExpertPool *own = owner;
    const HostLayer *layer = job->what;
    layer->route->chosen = (int32_t *)job->chosen;
    layer->gather->x = job->x;
    layer->combine->weight = job->weight;
    layer->combine->y = job->y;
    own->step = (Step){
        .operators = layer->operators,
        .count = layer->count,
        .rows = job->rows,
        .type = layer->type,
    };
    memset(own->shares, 0, sizeof own->shares);
    own->run = (Run){.step = &own->step, .threads = pool_threads(own->threads), .shares = own->shares};
    forget_all_outliers(&own->step);
}

static void compute_job(void *owner, int me) {
    ExpertPool *own = owner;
    take_part(&own->run, me);
}

ExpertPool *kernels_experts_open(const int32_t *cores, int32_t threads) {
    ExpertPool *own = aligned_alloc(64, (sizeof *own + 63) / 64 * 64);
    if (!own) return 0;
    memset(own, 0, sizeof *own);
    own->threads = pool_open(cores, threads, begin_job, compute_job, own);
    if (own->threads) return own;
    free(own);
    return 0;
}

/* Computes at most the layer's most rows at a time, one part after the other; returns a ticket. */
int32_t kernels_experts_submit(ExpertPool *own, const void *what, const void *x, const int32_t *chosen,
                               const float *weight, void *y, int64_t rows) {
    const HostLayer *layer = what;
    int64_t bytes = layer->gather->columns * (layer->type == TYPE_F32 ? 4 : 2);
    int64_t count = layer->route->count;
    int32_t ticket = 0;
    for (int64_t first = 0; first < rows; first += layer->most_rows) {
        int64_t left = rows - first;
        PoolJob job = {
            .what = layer,
            .x = (const char *)x + first * bytes,
            .chosen = chosen + first * count,
            .weight = weight + first * count,
            .y = (char *)y + first * bytes,
            .rows = left < layer->most_rows ? left : layer->most_rows,
        };
        ticket = pool_submit(own->threads, &job);
    }
    return ticket;
}

void kernels_experts_wait(ExpertPool *own, int32_t ticket) {
    pool_wait(own->threads, ticket);
}

/* Seconds that the pool has computed, and its jobs so far. */
void kernels_experts_busy(ExpertPool *own, double *seconds, int64_t *jobs) {
    pool_busy(own->threads, seconds, jobs);
}

/* Ends the threads, which first compute what was submitted. */
void kernels_experts_close(ExpertPool *own) {
    pool_close(own->threads);
    free(own);
}
#endif
