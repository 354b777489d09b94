/* The bound of the kept columns, improved by its own multipliers.
 *
 * Below the limit only the kept columns matter, and with them the Lagrangian is a shortest path
 * whose steps are whole stages: memory, bitwidths and counts are exact, only the maxima and the
 * sum of the steady round are relaxed. The bound is much higher than the lattice's, and often above
 * the limit; then nothing is left to enumerate. */
#include "labels.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    Labels *s;
    double *cell;   /* [C, L + 1, L + 1] least price of a column, by class, END and START layer */
    double *entry;  /* [V, L + 1] */
    double *to_go;  /* [V, L + 1] */
} Refined;

static double column_price(const Labels *s, const double *x, int k, const Column *m) {
    const Problem *p = s->p;
    int g = k % p->groups;
    if (m->prefill > s->high) return HUGE_VAL;
    return m->cost + x[at_prefill(p, g)] * m->prefill +
           (sum_price(p, x) + x[at_decode(p, g)]) * m->decode + x[at_budget(p)] * m->degradation;
}

static void price_links(Labels *s, const double *x) {
    tables_price_links(&s->tables, x);
    for (int id = 0; id < 2 * s->p->groups * s->p->groups; id++)
        if (s->p->send_prefill[id] > s->high) s->tables.link[id] = HUGE_VAL;
}

static void price_cells(const Refined *r, const double *x) {
    const Labels *s = r->s;
    const Problem *p = s->p;
    for (int k = 0; k < 2 * p->groups; k++)
        for (int a = 0; a <= p->layers; a++)
            for (int c = a; c <= p->layers; c++) {
                double least = HUGE_VAL;
                int64_t at = column_cell(p, k, a, c);
                for (int j = s->columns.start[at]; j < s->columns.start[at + 1]; j++) {
                    double price = column_price(s, x, k, s->columns.column + j);
                    if (price < least) least = price;
                }
                r->cell[cell_at(p, k, c, a)] = least;
            }
}

static void fill_paths(const Refined *r) {
    const Labels *s = r->s;
    const Lattice *g = s->g;
    int L = s->p->layers;
    for (int v = g->nodes - 1; v >= 0; v--) {
        double *restrict to_go = r->to_go + (size_t)v * (L + 1);
        double *restrict entry = r->entry + (size_t)v * (L + 1);
        for (int i = 0; i <= L; i++) to_go[i] = entry[i] = HUGE_VAL;
        for (int e = g->edge_start[v]; e < g->edge_start[v + 1]; e++) {
            const double *restrict into = r->entry + (size_t)g->edge_target[e] * (L + 1);
            double link = g->edge_link[e] < 0 ? 0 : s->tables.link[g->edge_link[e]];
            for (int i = 0; i < L; i++) {
                double through = into[i] + link;
                to_go[i] = through < to_go[i] ? through : to_go[i];
            }
        }
        if (v == 0) continue;
        if (g->node_final[v])
            to_go[L] = g->node_return[v] < 0 ? 0 : s->tables.link[g->node_return[v]];
        for (int c = 0; c <= L; c++) {
            if (!isfinite(to_go[c])) continue;
            const double *restrict cell = r->cell + cell_at(s->p, g->node_class[v], c, 0);
            double rest = to_go[c];
            for (int a = 0; a <= c; a++) {
                double through = cell[a] + rest;
                entry[a] = through < entry[a] ? through : entry[a];
            }
        }
    }
}

/* Follow the cheapest step from node v, layer i: the next node, and where its stage ends. */
static int step(const Refined *r, int *v, int *i, int *link) {
    const Lattice *g = r->s->g;
    int L = r->s->p->layers, best = -1, end = -1;
    double least = HUGE_VAL;
    for (int e = g->edge_start[*v]; e < g->edge_start[*v + 1]; e++) {
        double through = r->entry[(size_t)g->edge_target[e] * (L + 1) + *i] +
                         (g->edge_link[e] < 0 ? 0 : r->s->tables.link[g->edge_link[e]]);
        if (through < least) least = through, best = e;
    }
    *v = g->edge_target[best], *link = g->edge_link[best], least = HUGE_VAL;
    for (int c = *i; c <= L; c++) {
        double through = r->cell[cell_at(r->s->p, g->node_class[*v], c, *i)] +
                         r->to_go[(size_t)*v * (L + 1) + c];
        if (through < least) least = through, end = c;
    }
    return end;
}

static void add_column(const Labels *s, const double *x, int k, int a, int c, double *gradient) {
    const Problem *p = s->p;
    int64_t at = column_cell(p, k, a, c);
    const Column *best = NULL;
    double least = HUGE_VAL;
    for (int j = s->columns.start[at]; j < s->columns.start[at + 1]; j++) {
        double price = column_price(s, x, k, s->columns.column + j);
        if (price < least) least = price, best = s->columns.column + j;
    }
    gradient[at_prefill(p, k % p->groups)] += best->prefill;
    gradient[at_decode(p, k % p->groups)] += best->decode;
    gradient[at_sum(p)] += best->decode;
    gradient[at_budget(p)] += best->degradation;
}

static double refined_evaluate(void *context, const double *x, double *gradient) {
    const Refined *r = context;
    Labels *s = r->s;
    const Problem *p = s->p;
    price_links(s, x);
    price_cells(r, x);
    fill_paths(r);
    double bound = r->to_go[0];
    memset(gradient, 0, (size_t)multipliers(p) * sizeof(double));
    if (!isfinite(bound)) return bound;
    for (int v = 0, i = 0, link; v == 0 || i < p->layers;) {
        int end = step(r, &v, &i, &link);
        tables_add_link(&s->tables, link, gradient);
        add_column(s, x, s->g->node_class[v], i, end, gradient);
        i = end;
        if (i == p->layers) tables_add_link(&s->tables, s->g->node_return[v], gradient);
    }
    gradient[at_floor(p)] = s->low;
    bound += x[at_floor(p)] * s->low;
    if (!isfinite(p->budget)) return bound;
    gradient[at_budget(p)] -= p->budget;
    return bound - x[at_budget(p)] * p->budget;
}

static const Ascent SCHEDULE = {.iterations = 150,
                                .patience = 12,
                                .restart = 1,
                                .step = 0.01,
                                .shrink = 0.6,
                                .momentum = 0.7,
                                .smallest_step = 2e-5};

static int by_price(const void *a, const void *b) {
    const Column *x = a, *y = b;
    return (x->price > y->price) - (x->price < y->price);
}

double refine(Labels *s, double target) {
    const Problem *p = s->p;
    size_t cells = cell_at(p, 2 * p->groups, 0, 0);
    size_t places = (size_t)s->g->nodes * ((size_t)p->layers + 1);
    Refined r = {.s = s, .cell = malloc(cells * sizeof(double))};
    r.entry = malloc(places * sizeof(double)), r.to_go = malloc(places * sizeof(double));
    double best = -HUGE_VAL;
    if (r.cell && r.entry && r.to_go) {
        Dual d = {.problem = p, .lattice = s->g, .evaluate = refined_evaluate, .context = &r};
        d.relaxed_links = -1, d.deadline = s->deadline, d.floor = s->low > 0;
        best = dual_ascend(&d, s->x, &SCHEDULE, 1, target);
    }
    free(r.cell), free(r.entry), free(r.to_go);
    price_columns(s);
    return best;
}

void price_columns(Labels *s) {
    const Problem *p = s->p;
    price_links(s, s->x);
    for (int k = 0; k < 2 * p->groups; k++)
        for (int a = 0; a <= p->layers; a++)
            for (int c = a; c <= p->layers; c++) {
                int64_t at = column_cell(p, k, a, c), from = s->columns.start[at];
                int64_t size = s->columns.start[at + 1] - from;
                Column *column = s->columns.column + from;
                for (int64_t j = 0; j < size; j++)
                    column[j].price = column_price(s, s->x, k, column + j);
                if (size > 1) qsort(column, (size_t)size, sizeof *column, by_price);
            }
}
