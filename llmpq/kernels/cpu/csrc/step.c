/* A decode step: the operators of all layers of a stage in one call.
 *
 * The rows of a step are single tokens, of different sequences or consecutive ones of one sequence.
 * Operators that work on each row alone follow each other in one thread; products and attention are
 * spread over the threads in parts. All rows store their keys and values before any row attends.
 * Between them the threads wait for each other: they spin for some microseconds, as long as a part
 * takes, and then sleep, so that other processes get the core. Every number is rounded where the
 * operators of torch and transformers round it. */
#include "lanes.h"
#include "step.h"

#ifdef __AVX512F__
#include <immintrin.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

enum { NORM, ADD, ROTATE, GATE, PREPARE, STORE, PRODUCTS, ATTEND };
enum { DENSE_BF16, PLAIN_FLOAT, PACKED_BF16, PACKED_FLOAT, LLM_INT8, PACKED_INT8 };
enum { SILU, GELU, GELU_TANH, RELU };
enum { MOST_PRODUCTS = 3, SPINS = 1000 };

typedef struct {
    Norm norm;
    int64_t heads; /* normed apart in each row */
} NormRows;

typedef struct {
    void *x; /* becomes x + more */
    const void *more;
    int64_t columns;
} AddRows;

typedef struct {
    void *x;
    const void *cos, *sin; /* [rows, turned] */
    int64_t heads, dim, turned; /* the first `turned` features of a head are rotated by halves */
} RotateRows;

typedef struct {
    const void *gate, *up;
    void *y;
    int64_t columns;
    int32_t activation;
} GateRows;

typedef struct {
    Prepared prepared;
    int32_t kernel;
} PrepareRows;

typedef struct {
    Product products[MOST_PRODUCTS];
    const PrepareRows *prepared; /* null where the kernel needs none */
    int64_t count, few_limit;
    int32_t kernel;
} Products;

typedef struct {
    int32_t kind;
    const void *what; /* the struct of that kind */
} Operator;

typedef struct {
    const Operator *operators;
    int64_t count, rows;
    const int32_t *tables; /* as in Attention */
    const int64_t *starts, *lengths;
    int32_t type, threads;
} Step;

typedef struct {
    const Step *step;
    int32_t threads;
    int64_t next __attribute__((aligned(64)));    /* the part to be taken next */
    int32_t arrived __attribute__((aligned(64))); /* threads that wait for the others */
    int32_t turn __attribute__((aligned(64)));    /* counts the meetings */
    int32_t sleepers;
    Pieces pieces; /* of all attention operators, one after the other */
} Run;

/* ---- threads --------------------------------------------------------------------------------- */

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_num_threads(void) __attribute__((weak));

static void sleep_until(Run *run, int32_t turn) {
#ifdef __linux__
    __atomic_fetch_add(&run->sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&run->turn, __ATOMIC_SEQ_CST) == turn)
        syscall(SYS_futex, &run->turn, FUTEX_WAIT_PRIVATE, turn, (void *)0, (void *)0, 0);
    __atomic_fetch_sub(&run->sleepers, 1, __ATOMIC_SEQ_CST);
#else
    while (__atomic_load_n(&run->turn, __ATOMIC_ACQUIRE) == turn) sched_yield();
#endif
}

static void wake_all(Run *run) {
#ifdef __linux__
    if (__atomic_load_n(&run->sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &run->turn, FUTEX_WAKE_PRIVATE, INT_MAX, (void *)0, (void *)0, 0);
#else
    (void)run;
#endif
}

/* Returns when all threads have called it; parts are then taken from the first again. */
static void meet(Run *run) {
    int32_t turn = __atomic_load_n(&run->turn, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&run->arrived, 1, __ATOMIC_ACQ_REL) == run->threads) {
        run->next = 0, run->arrived = 0;
        __atomic_store_n(&run->turn, turn + 1, __ATOMIC_SEQ_CST);
        wake_all(run);
        return;
    }
    for (int i = 0; i < SPINS; i++) {
        if (__atomic_load_n(&run->turn, __ATOMIC_ACQUIRE) != turn) return;
        _mm_pause();
    }
    sleep_until(run, turn);
}

INLINE int64_t take(Run *run) {
    return __atomic_fetch_add(&run->next, 1, __ATOMIC_RELAXED);
}

/* ---- operators on rows ----------------------------------------------------------------------- */

INLINE void put(void *to, int64_t at, v16f v, const int type) {
    v16h narrow = narrowed(v);
    if (type == TYPE_F32) store_floats((float *)to + at, v);
    else memcpy((uint16_t *)to + at, &narrow, sizeof narrow);
}

INLINE v16f rounded(v16f v, const int type) {
    if (type == TYPE_F32) return v;
    return (v16f)(__builtin_convertvector(narrowed(v), v16u) << 16);
}

INLINE void add_row(const AddRows *o, int64_t m, const int type) {
    for (int64_t at = m * o->columns; at < (m + 1) * o->columns; at += 16)
        put(o->x, at, load_typed(o->x, at, type) + load_typed(o->more, at, type), type);
}

INLINE void rotate_row(const RotateRows *o, int64_t m, const int type) {
    int64_t half = o->turned / 2, table = m * o->turned;
    for (int64_t head = 0; head < o->heads; head++)
        for (int64_t k = 0; k < half; k += 16) {
            int64_t at = (m * o->heads + head) * o->dim + k;
            v16f a = load_typed(o->x, at, type), b = load_typed(o->x, at + half, type);
            v16f first = rounded(a * load_typed(o->cos, table + k, type), type);
            v16f other = rounded(b * load_typed(o->cos, table + half + k, type), type);
            put(o->x, at, first - rounded(b * load_typed(o->sin, table + k, type), type), type);
            put(o->x, at + half,
                other + rounded(a * load_typed(o->sin, table + half + k, type), type), type);
        }
}

INLINE v16f magnitude(v16f x) {
    return (v16f)((v16i)x & 0x7FFFFFFF);
}

INLINE v16f chosen(v16i is, v16f a, v16f b) {
    return (v16f)((is & (v16i)a) | (~is & (v16i)b));
}

INLINE v16f activated(v16f x, const int activation) {
    if (activation == RELU) return chosen(x < 0, (v16f){0}, x);
    if (activation == GELU) {
        v16f y;
        for (int i = 0; i < 16; i++) y[i] = 0.5f * x[i] * (1 + erff(x[i] * 0.70710678f));
        return y;
    }
    /* Both are x / (1 + e^-u), u = x or twice what the hyperbolic tangent is taken of. */
    v16f u = activation == SILU ? x : x * (1 + 0.044715f * x * x) * 1.59576912f;
    v16f e = exponential(-magnitude(u));
    return x * chosen(u < 0, e, e * 0 + 1) / (1 + e);
}

INLINE void gate_row(const GateRows *o, int64_t m, const int type, const int activation) {
    for (int64_t at = m * o->columns; at < (m + 1) * o->columns; at += 16) {
        v16f y = rounded(activated(load_typed(o->gate, at, type), activation), type);
        put(o->y, at, y * load_typed(o->up, at, type), type);
    }
}

static void gate(const GateRows *o, int64_t m, int type) {
#define GATED(KIND)                                                                              \
    case KIND:                                                                                   \
        if (type == TYPE_F32) gate_row(o, m, TYPE_F32, KIND);                                    \
        else gate_row(o, m, TYPE_BF16, KIND);                                                    \
        break;
    switch (o->activation) { GATED(SILU) GATED(GELU) GATED(GELU_TANH) GATED(RELU) }
}

static void prepare(const PrepareRows *o, int64_t rows, int64_t m) {
    const Prepared *q = &o->prepared;
    if (o->kernel == PACKED_FLOAT) float_sums(q, rows, m);
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    if (o->kernel == PACKED_BF16) bf16_sums(q, rows, m);
    if (o->kernel == PACKED_INT8) piece_codes(q, rows, m);
    if (o->kernel == LLM_INT8) {
        q->start[m] = m * q->columns; /* each row has its own place for them */
        int8_scan(q, m);
        int8_quantize(q, m);
    }
#endif
}

INLINE Attention of_rows(const Step *step, const Attention *what) {
    Attention a = *what;
    a.tables = step->tables, a.starts = step->starts, a.lengths = step->lengths;
    a.count = step->rows;
    return a;
}

static void on_row(const Step *step, const Operator *operator, int64_t m) {
    const void *what = operator->what;
    switch (operator->kind) {
    case NORM: {
        const NormRows *o = what;
        norm_rows(&o->norm, m * o->heads, (m + 1) * o->heads);
        break;
    }
    case ADD:
        if (step->type == TYPE_F32) add_row(what, m, TYPE_F32);
        else add_row(what, m, TYPE_BF16);
        break;
    case ROTATE:
        if (step->type == TYPE_F32) rotate_row(what, m, TYPE_F32);
        else rotate_row(what, m, TYPE_BF16);
        break;
    case GATE: gate(what, m, step->type); break;
    case PREPARE: prepare(what, step->rows, m); break;
    case STORE: {
        Attention a = of_rows(step, what);
        store_part(&a, m);
        break;
    }
    }
}

/* ---- products and attention ------------------------------------------------------------------ */

static int64_t parts_of(const Product *p, int kernel) {
    return kernel == PLAIN_FLOAT ? p->weight->rows / 16 : (p->weight->rows + PANEL - 1) / PANEL;
}

static void product_part(const Products *o, const Product *p, int64_t item) {
    const Prepared *q = o->prepared ? &o->prepared->prepared : 0;
    switch (o->kernel) {
    case PLAIN_FLOAT: plain_part(p, item); break;
    case PACKED_FLOAT: float_part(p, q, item); break;
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
    case DENSE_BF16: dense_part(p, item); break;
    case PACKED_BF16: bf16_part(p, q, o->few_limit, item); break;
    case LLM_INT8: int8_part(p, q, item); break;
    case PACKED_INT8: packed_int8_part(p, q, item); break;
#endif
    }
}

static void multiply(Run *run, const Products *o) {
    Product product[MOST_PRODUCTS];
    int64_t end[MOST_PRODUCTS], all = 0;
    for (int i = 0; i < o->count; i++) {
        product[i] = o->products[i];
        product[i].count = run->step->rows;
        end[i] = all += parts_of(product + i, o->kernel);
    }
    for (int64_t item; (item = take(run)) < all;) {
        int i = 0;
        while (item >= end[i]) i++;
        product_part(o, product + i, item - (i ? end[i - 1] : 0));
    }
}

static void attend(Run *run, const Attention *what) {
    Attention a = of_rows(run->step, what);
    int64_t all = attention_items(&a, &run->pieces);
    for (int64_t item; (item = take(run)) < all;) attention_part(&a, &run->pieces, item);
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

static void take_part(void *pointer) {
    Run *run = pointer;
    const Step *step = run->step;
    const Operator *at = step->operators, *end = at + step->count;
    while (at < end) {
        if (at->kind == PRODUCTS) {
            multiply(run, at++->what);
        } else if (at->kind == ATTEND) {
            attend(run, at++->what);
        } else {
            const Operator *next = at;
            while (next < end && next->kind < PRODUCTS) next++;
            for (int64_t m; (m = take(run)) < step->rows;)
                for (const Operator *o = at; o < next; o++) on_row(step, o, m);
            at = next;
        }
        if (at < end) meet(run);
    }
}

static void take_shared_part(void *pointer) {
    Run *run = pointer; /* the runtime may give fewer threads than were asked for */
    __atomic_store_n(&run->threads, omp_get_num_threads(), __ATOMIC_RELAXED);
    take_part(run);
}

void kernels_step(const Step *step) {
    Run run = {.step = step, .threads = 1};
    cut_all(&run);
    if (step->threads > 1 && GOMP_parallel && omp_get_num_threads)
        GOMP_parallel(take_shared_part, &run, (unsigned)step->threads, 0);
    else
        take_part(&run);
    free(run.pieces.first);
}
#endif
