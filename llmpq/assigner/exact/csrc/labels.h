/* Declarations shared by the label search and the bounds that use its columns. */
#ifndef LLMPQ_EXACT_LABELS_H
#define LLMPQ_EXACT_LABELS_H

#include "exact.h"

#include <stddef.h>

typedef struct {
    double prefill, decode, cost, sum, degradation;
    int32_t parent, column, node, next;
    int32_t end;
} Label;

/* A label's values for dominance: cost and tail are C + sum_weight[0, 1] S, most is the largest S
 * of its completions, bound their least value. */
typedef struct {
    double cost, prefill, decode, tail, sum, most, degradation, bound;
    int32_t label;
} Key;

/* Bounds of a plan's completion from one node and layer on: least or largest values. */
typedef struct {
    double price, prefill, decode, least_sum, most_sum, degradation;
} Completion;

typedef struct {
    const Problem *p;
    const Lattice *g;
    double *x;       /* a copy of the multipliers, improved once the columns are known */
    Search *out;
    LagrangianTables tables;
    Columns columns;
    double *arrive;  /* [V, L + 1] cheapest start of a plan up to a node whose stage starts at i */
    double *around;  /* [C, L + 1, L + 1] cheapest other part of a plan with a stage */
    Completion *cell;      /* [C, L + 1, L + 1] the extremes of the kept columns of a cell */
    Completion *completion; /* [V, L + 1] from where the node's stage has ended */
    Completion *entry;     /* [V, L + 1] from where the node's stage starts */
    double *own;     /* [V, 2] weight of P and D that later devices cannot claim */
    Label *label;
    int64_t size, capacity;
    int32_t *head;   /* [V, L + 1] labels by node and end */
    Key *candidate; /* [V, L + 1, max_candidates] a few good labels that may dominate new ones */
    uint8_t *num_candidates; /* [V, L + 1] how many of them there are */
    int32_t max_candidates;
    double best;     /* value of the best plan so far, or the limit */
    int32_t best_column, best_node, best_parent;
    double low, high; /* the branch: plans whose largest prefill time is within these */
    int64_t cap;      /* labels a pass may hold */
    double deadline;
    int32_t beam;    /* labels kept at one place; 0 for all undominated ones */
} Labels;

static inline size_t cell_at(const Problem *p, int k, int a, int c) {
    return ((size_t)k * ((size_t)p->layers + 1) + (size_t)a) * ((size_t)p->layers + 1) + (size_t)c;
}
static inline double larger(double a, double b) { return a > b ? a : b; }
static inline double price_of_sum(const Labels *s) {
    return s->p->sum_weight[0] + s->x[at_sum(s->p)];
}

/* Fill arrive forwards, then around: for each class and interval, the cheapest plan about it, by
 * the relaxation or by the kept columns. */
void fill_around(Labels *s, int by_columns);
/* Fill cell from the columns, then completion and entry, and the tables' to_go. */
void fill_completions(Labels *s);
/* Drop the columns that no plan below the limit can use. */
void thin_columns(Labels *s, double limit);
/* Improve x for the kept columns, price them by it, and return the bound of plans below the
 * columns' limit. */
double refine(Labels *s, double target);
/* Price links and columns by x, and sort the columns; above the branch's high: infinite. */
void price_columns(Labels *s);
Completion link_completion(const Labels *s, int id);
/* Fill own: what each node's labels pay on their own maxima. */
void fill_own(Labels *s);
/* One pass over all labels below s->best, `beam` at each place, or all for 0. */
int enumerate(Labels *s, int beam);
/* Write the stages of the best plan, last first: node, first layer, end layer; counts apart. */
void trace(const Labels *s, int32_t *stages, uint64_t *counts);

#endif
