/* Values shared by the parts of the exact search; native.py mirrors the first four structs.
 *
 * Array legend: T groups of equal devices, K kinds of layers, B bitwidths, L layers, V lattice
 * nodes, C = 2T device classes (a group; then the same group as the first device, the master).
 * Seconds and bytes throughout. "Price" is a cost under Lagrangian multipliers, never a real cost.
 */
#ifndef LLMPQ_EXACT_H
#define LLMPQ_EXACT_H

#include <math.h>
#include <stdint.h>

#define EXACT_ABI 4
enum { EXACT_DONE = 0, EXACT_OVERFLOW = 1, EXACT_DEADLINE = 2, EXACT_NO_MEMORY = 3 };

/* One micro-batch pair. With P and D the largest prefill and decode times of stages and links,
 * C the summed prefill times (and links) plus theta * degradation, S the summed decode times (and
 * links), the value of a plan is  peak_prefill P + max(peak_decode D + sum_weight[0] S + C,
 * sum_weight[1] S + C).  The paper's formula has sum_weight[0] == sum_weight[1]. */
typedef struct {
    int32_t groups, kinds, bits, layers;
    const int32_t *kind;                           /* [L] */
    const double *prefill, *decode;                /* [T, K, B] seconds of one layer */
    const int64_t *bytes;                          /* [T, K, B] */
    const int64_t *capacity;                       /* [C] */
    /* What layers take of the memory of a device's host, and how much it has for a device. */
    const int64_t *host;                           /* [T, K, B] bytes */
    const int64_t *host_capacity;                  /* [T] */
    /* Weights that may rest on disk. A stage that does not fit reads the least bytes of whole
     * layers that let it fit, beside `buffers` of the largest of them; its times are then at least
     * those of reading. */
    const int64_t *streamable;                     /* [T, K, B] bytes, 0 for none */
    const double *stream_prefill, *stream_decode;  /* [T] seconds of a byte */
    const double *split;                           /* [T] share of the reading in bounds, 0 to 1 */
    int64_t buffers;
    const double *master_prefill, *master_decode;  /* [C] seconds; 0 unless first */
    const double *send_prefill, *send_decode;      /* [2, T, T] forward, then back to the master */
    const double *omega;                           /* [L, B] degradation */
    const int32_t *allowed;                        /* [T, L, B] manual decisions; NULL for none */
    double theta, budget;                          /* budget: INFINITY for none */
    double peak_prefill, peak_decode;
    double sum_weight[2];
    double rounds;                                 /* decode micro-batches, steady formula */
    int32_t steady, links_in_sums;
} Problem;

/* The orders of devices as the paths of an acyclic graph. Node 0 is the start; any other node
 * stands for one used device of its class; nodes are numbered in topological order and edges are
 * sorted by source. A link is an index into send_*: from * T + to, plus T * T on the way back. */
typedef struct {
    int32_t nodes, edges;
    const int32_t *node_class;    /* [V] */
    const int32_t *node_return;   /* [V] link back to the master, -1 for none */
    const int32_t *node_final;    /* [V] whether a plan may end with this device */
    const int32_t *least_layers;  /* [C] layers a used device holds at least: 0 for most masters */
    const int32_t *edge_start;    /* [V + 1] */
    const int32_t *edge_target;   /* [edges] */
    const int32_t *edge_link;     /* [edges] -1 for none */
    const double *remaining;      /* [V, 2T] devices, then priced arrivals, that may still follow */
    const double *count;          /* [T] devices of a group */
    const double *arrivals;       /* [T] largest number of priced arrivals at a group */
    int32_t price_inner_links;    /* whether links within a group carry a multiplier */
} Lattice;

static inline int may_run(const Problem *p, int k, int i, int b) {
    return !p->allowed || p->allowed[((k % p->groups) * p->layers + i) * p->bits + b];
}

/* One schedule of the dual ascent. */
typedef struct {
    int32_t iterations, patience, restart;
    double step, shrink, momentum, smallest_step;
} Ascent;

/* Limits and answers of one label search: all plans below limit. */
typedef struct {
    double limit, seconds;
    double beam_limit; /* how high the beam looks for a first plan */
    int64_t max_columns, max_labels;
    int64_t pass_labels; /* labels at which a pass is split by the largest prefill time */
    int32_t beam;      /* labels the beam keeps at one node and layer; 0 for no beam */
    /* answers */
    int32_t stages;
    double value, bound;
    int64_t columns, labels, kept, states;
} Search;

/* Multipliers: [T] prefill stages, [T] prefill links, [T] decode stages, [T] decode links,
 * [1] decode sum, [C] memory (seconds per mean layer), [T] memory of hosts (the same), [1] quality
 * budget, [1] prefill floor. */
static inline int at_prefill(const Problem *p, int g) { return (void)p, g; }
static inline int at_prefill_link(const Problem *p, int g) { return p->groups + g; }
static inline int at_decode(const Problem *p, int g) { return 2 * p->groups + g; }
static inline int at_decode_link(const Problem *p, int g) { return 3 * p->groups + g; }
static inline int at_sum(const Problem *p) { return 4 * p->groups; }
static inline int at_memory(const Problem *p, int k) { return 4 * p->groups + 1 + k; }
static inline int at_host(const Problem *p, int g) { return 6 * p->groups + 1 + g; }
static inline int at_budget(const Problem *p) { return 7 * p->groups + 1; }
static inline int at_floor(const Problem *p) { return 7 * p->groups + 2; }
static inline int multipliers(const Problem *p) { return 7 * p->groups + 3; }

/* The Lagrangian of one pair on the lattice, at given multipliers. */
typedef struct {
    const Problem *problem;
    const Lattice *lattice;
    double byte_unit;    /* bytes of a mean layer: memory is priced per unit of it */
    double *layer_price; /* [C, L, B] */
    double *prefix;      /* [C, L + 1] price of layers [0, i) at their best bitwidths */
    int8_t *choice;      /* [C, L] those bitwidths */
    double *fixed;       /* [C] price of using the device at all (master work less its memory) */
    double *link;        /* [2 T T] price of a link */
    int32_t *reach;      /* [C, L + 1] last end of a stage that starts at i by memory; -1 none */
    double *entry;       /* [V, L + 1] cheapest completion when the node's stage starts at i */
    double *to_go;       /* [V, L + 1] cheapest completion when the node's stage has ended at i */
} LagrangianTables;

int tables_open(LagrangianTables *t, const Problem *p, const Lattice *g);
void tables_close(LagrangianTables *t);
/* Fill every table for multipliers x and return the bound; gradient may be NULL. */
double tables_evaluate(LagrangianTables *t, const double *x, double *gradient);
void tables_price_links(LagrangianTables *t, const double *x);
/* Add what a link, by its index, takes to a gradient. */
void tables_add_link(const LagrangianTables *t, int id, double *gradient);

/* A bound to improve by its multipliers. */
typedef struct {
    const Problem *problem;
    const Lattice *lattice;
    double (*evaluate)(void *context, const double *x, double *gradient);
    void *context;
    double relaxed_links; /* noncontiguous: 1 when the floor link has a multiplier; else -1 */
    int32_t floor;       /* whether the largest prefill time has a floor with a multiplier */
    int32_t memory;      /* how many classes have their memory priced */
    double deadline;
    double *weight;      /* per multiplier: its weight in the sum of its block; 0 holds it at 0 */
    double *scale;       /* per multiplier: its natural size */
} Dual;

/* Improve x until the bound reaches target or the schedules end; return the bound. */
double dual_ascend(Dual *d, double *x, const Ascent *s, int schedules, double target);

/* Stage columns: the ways a device class can run layers [a, c). */
typedef struct {
    double prefill, decode, cost, degradation, price; /* cost: prefill + theta * degradation */
    uint64_t counts;                                  /* layers per (kind, bitwidth), mixed radix */
} Column;

typedef struct {
    const Problem *problem;
    Column *column;
    int64_t size, capacity, limit, states;
    int32_t *start; /* [C, L + 1, L + 2] first column of (class, a, c) */
} Columns;

static inline int64_t column_cell(const Problem *p, int k, int a, int c) {
    return ((int64_t)k * (p->layers + 1) + a) * (p->layers + 2) + c;
}
/* best[C, L + 1, L + 1]: cheapest other part of a plan with a stage. deadline: see now(). */
int columns_fill(Columns *s, const LagrangianTables *t, const double *x, const double *best,
                 double limit, double deadline);
void columns_close(Columns *s);

double now(void);
double mean_layer_bytes(const Problem *p);
/* Price of a second of summed decode time: its fixed weight, and what the sum branch of the
 * steady round adds. */
double sum_price(const Problem *p, const double *x);
/* What a layer counts for in a bound, its degradation apart. The larger of computing and reading
 * is at least (1 - split) of the one and split of the other; a layer is on disk where that is
 * cheaper than its memory. */
typedef struct {
    double prefill, decode, bytes, host;
} Parts;
Parts layer_parts(const Problem *p, const double *x, int k, int kind, int b, double unit);
/* Price of such parts on class k. */
double parts_price(const Problem *p, const double *x, int k, Parts parts, double unit);

#endif
