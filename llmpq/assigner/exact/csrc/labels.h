/* What the label search shares with the bounds that know its columns. */
#ifndef LLMPQ_EXACT_LABELS_H
#define LLMPQ_EXACT_LABELS_H

#include "exact.h"

#include <stddef.h>

typedef struct {
    double prefill, decode, cost, sum, degradation;
    int32_t parent, column, node, next;
    int32_t end;
} Label;

/* A label as dominance sees it: cost and tail are C + sum_weight[0, 1] S, most is the largest S of
 * its completions, bound the least value of them. */
typedef struct {
    double cost, prefill, decode, tail, sum, most, degradation, bound;
    int32_t label;
} Key;

/* What the rest of a plan takes, at least or at most, from one node and layer on. */
typedef struct {
    double price, prefill, decode, least_sum, most_sum, degradation;
} Rest;

typedef struct {
    const Problem *p;
    const Lattice *g;
    double *x;       /* a copy of the multipliers, improved once the columns are known */
    Search *out;
    Field field;
    Columns columns;
    double *arrive;  /* [V, L + 1] cheapest start of a plan up to a node whose stage starts at i */
    double *around;  /* [C, L + 1, L + 1] cheapest rest of a plan around a stage */
    Rest *cell;      /* [C, L + 1, L + 1] the extremes of the kept columns of a cell */
    Rest *rest;      /* [V, L + 1] from where the node's stage has ended */
    Rest *entry;     /* [V, L + 1] from where the node's stage starts */
    double *own;     /* [V, 2] weight of P and D that later devices cannot claim */
    Label *label;
    int64_t size, capacity;
    int32_t *head;   /* [V, L + 1] labels by node and end */
    Key *champion;   /* [V, L + 1, champions] a few good labels of a place, to beat new ones early */
    uint8_t *crowned; /* [V, L + 1] how many of them there are */
    int32_t champions;
    double best;     /* value of the best plan so far, or the limit */
    int32_t best_column, best_node, best_parent;
    double low, high; /* the branch: plans whose largest prefill time is within these */
    int64_t cap;      /* labels a pass may hold */
    double deadline;
    int32_t beam;    /* labels kept at one place; 0 for all that are not beaten */
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
/* Fill cell from the columns, then rest and entry, and the field's to_go. */
void fill_rest(Labels *s);
/* Drop the columns that no plan below the limit can use. */
void thin_columns(Labels *s, double limit);
/* Improve x for the kept columns, price them by it, and return the bound it proves for plans below
 * the columns' limit. */
double refine(Labels *s, double target);
/* Price links, and columns in order, by x; what is over the branch's high is not to be had. */
void price_columns(Labels *s);
/* Enumerate all plans of the branch below s->best, in parts if need be. */
int explore(Labels *s, int depth, double bound, int32_t *stages, uint64_t *counts);
int enumerate(Labels *s, int beam);
void fill_own(Labels *s);
void trace(const Labels *s, int32_t *stages, uint64_t *counts);
Rest link_rest(const Labels *s, int id);

#endif
