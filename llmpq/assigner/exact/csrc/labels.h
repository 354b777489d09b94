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

/* What the rest of a plan takes, at least or at most, from one node and layer on. */
typedef struct {
    double price, prefill, decode, least_sum, most_sum, degradation;
} Rest;

typedef struct {
    const Problem *p;
    const Lattice *g;
    const double *x;
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
    double best;     /* value of the best plan so far, or the limit */
    int32_t best_column, best_node, best_parent;
    double deadline;
} Labels;

static inline size_t cell_at(const Problem *p, int k, int a, int c) {
    return ((size_t)k * ((size_t)p->layers + 1) + (size_t)a) * ((size_t)p->layers + 1) + (size_t)c;
}
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
Rest link_rest(const Labels *s, int id);

#endif
