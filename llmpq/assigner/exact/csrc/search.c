/* The exact search of one pair below a limit: its columns, their bound, then labels.
 *
 * Where there would be too many labels, it branches on the largest prefill time. Among equal
 * devices, one stage or layer more hardly changes the sums, so many plans lie between the
 * Lagrangian bound and the best plan; they differ in the maximum, which the Lagrangian may mix.
 * Within [low, high] stages above high do not exist and the maximum costs at least low: bounds are
 * much tighter. Every plan is in some branch. */
#include "labels.h"

#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 7, MAX_CANDIDATES = 12, CANDIDATE_BYTES = 1 << 26 };

/* Least width of a branch to split, relative to the open gap. */
static const double LEAST_SHARE = 0.05;

/* Make columns infinite that no plan of the branch below s->best can use. */
static void drop_columns(Labels *s) {
    const Problem *p = s->p;
    double budget = isfinite(p->budget) ? s->x[at_budget(p)] * p->budget : 0;
    for (int k = 0; k < 2 * p->groups; k++)
        for (int a = 0; a <= p->layers; a++)
            for (int c = a; c <= p->layers; c++) {
                int64_t at = column_cell(p, k, a, c);
                double around = s->around[cell_at(p, k, a, c)] + s->x[at_floor(p)] * s->low;
                for (int j = s->columns.start[at]; j < s->columns.start[at + 1]; j++)
                    if (around + s->columns.column[j].price >= s->best + budget)
                        s->columns.column[j].price = HUGE_VAL;
            }
}

/* The largest finite prefill time of any stage or link. */
static double highest(const Labels *s) {
    const Problem *p = s->p;
    double high = 0;
    for (int64_t j = 0; j < s->columns.size; j++) {
        const Column *m = s->columns.column + j;
        if (isfinite(m->price) && m->prefill > high) high = m->prefill;
    }
    for (int id = 0; id < 2 * p->groups * p->groups; id++)
        if (isfinite(s->tables.link[id]) && p->send_prefill[id] > high) high = p->send_prefill[id];
    return high < s->high ? high : s->high;
}

static int explore(Labels *s, int depth, double bound, int32_t *stages, uint64_t *counts);

static int split(Labels *s, int depth, int32_t *stages, uint64_t *counts) {
    size_t n = (size_t)multipliers(s->p);
    double low = s->low, high = s->high, middle = 0.5 * (low + high);
    double x[2][n], bound[2], range[2][2] = {{low, middle}, {middle, high}};
    for (int j = 0; j < 2; j++) {
        memcpy(x[j], s->x, n * sizeof(double));
        double *own = s->x;
        s->x = x[j], s->low = range[j][0], s->high = range[j][1];
        bound[j] = refine(s, s->best);
        s->x = own;
    }
    int status = EXACT_DONE, first = bound[1] < bound[0];
    for (int j = 0; j < 2; j++) {
        int half = j == 0 ? first : !first;
        if (bound[half] >= s->best) continue;
        double *own = s->x;
        s->x = x[half], s->low = range[half][0], s->high = range[half][1];
        price_columns(s);
        int ended = explore(s, depth + 1, bound[half], stages, counts);
        s->x = own;
        if (ended) status = ended;
    }
    s->low = low, s->high = high;
    return status;
}

/* Save the plan of a pass before its labels are freed; return the status. */
static int keep(Labels *s, int status, int32_t *stages, uint64_t *counts) {
    if (s->best_node >= 0) {
        trace(s, stages, counts);
        s->out->value = s->best;
        s->best_node = -1;
    }
    return status;
}

/* Enumerate all plans of the branch below s->best, in parts where needed. */
static int explore(Labels *s, int depth, double bound, int32_t *stages, uint64_t *counts) {
    fill_completions(s);
    fill_around(s, 1);
    drop_columns(s);
    fill_completions(s);
    fill_own(s);
    double low = larger(s->low, s->completion[0].prefill), high = highest(s);
    double width = s->p->peak_prefill * (high - low);
    int may_split = depth < DEEPEST && width > LEAST_SHARE * (s->best - bound) &&
                    s->out->max_labels > s->out->pass_labels && isfinite(s->best);
    s->cap = may_split ? s->out->pass_labels : s->out->max_labels;
    if (depth > 0 && s->out->beam > 0) keep(s, enumerate(s, s->out->beam), stages, counts);
    int status = keep(s, enumerate(s, 0), stages, counts);
    if (status != EXACT_OVERFLOW || !may_split) return status;
    double outer_low = s->low, outer_high = s->high;
    s->low = low, s->high = high;
    status = split(s, depth, stages, counts);
    s->low = outer_low, s->high = outer_high;
    return status;
}

static int labels_open(Labels *s) {
    size_t V = (size_t)s->g->nodes, L = (size_t)s->p->layers;
    size_t cells = cell_at(s->p, 2 * s->p->groups, 0, 0);
    if (tables_open(&s->tables, s->p, s->g)) return EXACT_NO_MEMORY;
    s->arrive = malloc(V * (L + 1) * sizeof *s->arrive);
    s->around = malloc(cells * sizeof *s->around);
    s->cell = malloc(cells * sizeof *s->cell);
    s->completion = malloc(V * (L + 1) * sizeof *s->completion);
    s->entry = malloc(V * (L + 1) * sizeof *s->entry);
    s->own = malloc(2 * V * sizeof *s->own);
    s->head = malloc(V * (L + 1) * sizeof *s->head);
    s->max_candidates = (int32_t)(CANDIDATE_BYTES / (V * (L + 1) * sizeof(Key)));
    if (s->max_candidates < 1) s->max_candidates = 1;
    if (s->max_candidates > MAX_CANDIDATES) s->max_candidates = MAX_CANDIDATES;
    s->candidate = malloc(V * (L + 1) * (size_t)s->max_candidates * sizeof(Key));
    s->num_candidates = malloc(V * (L + 1));
    if (!s->arrive || !s->around || !s->cell || !s->completion || !s->entry || !s->own ||
        !s->head || !s->candidate || !s->num_candidates)
        return EXACT_NO_MEMORY;
    return EXACT_DONE;
}

static void labels_close(Labels *s) {
    tables_close(&s->tables), columns_close(&s->columns);
    free(s->arrive), free(s->around), free(s->cell), free(s->completion), free(s->entry);
    free(s->own), free(s->head), free(s->label), free(s->candidate), free(s->num_candidates);
}

/* Fill the columns below the limit and their bounds; out->bound is the proven bound. */
static int prepare(Labels *s) {
    double limit = s->out->limit;
    double budget = isfinite(s->p->budget) ? s->x[at_budget(s->p)] * s->p->budget : 0;
    tables_evaluate(&s->tables, s->x, NULL);
    fill_around(s, 0);
    s->columns.limit = s->out->max_columns;
    int status =
        columns_fill(&s->columns, &s->tables, s->x, s->around, limit + budget, s->deadline);
    s->out->states = s->columns.states;
    if (status) return status;
    fill_completions(s);
    fill_around(s, 1);
    thin_columns(s, limit + budget);
    s->out->columns = s->columns.size;
    double bound = refine(s, limit);
    s->out->bound = bound < limit ? bound : limit;
    if (bound >= limit) return EXACT_DONE;
    budget = isfinite(s->p->budget) ? s->x[at_budget(s->p)] * s->p->budget : 0;
    fill_completions(s);
    fill_around(s, 1);
    thin_columns(s, limit + budget);
    return EXACT_DONE;
}

/* Find the best plan below out->limit. EXACT_DONE proves that none below it is better; on overflow
 * or deadline the best plan found so far, if any, is returned, and out->bound is proven. x is
 * only read. stages[3 V], counts[V]. */
int32_t exact_search(const Problem *p, const Lattice *g, const double *x, Search *out,
                     int32_t *stages, uint64_t *counts) {
    double own[multipliers(p)];
    memcpy(own, x, sizeof own);
    Labels s = {.p = p, .g = g, .x = own, .out = out, .best = out->limit, .best_node = -1};
    s.high = HUGE_VAL;
    s.deadline = now() + out->seconds;
    out->stages = 0, out->kept = 0, out->labels = 0, out->columns = 0, out->states = 0;
    out->bound = -HUGE_VAL;
    int status = labels_open(&s);
    if (!status) status = prepare(&s);
    if (!status && out->bound < out->limit) {
        if (out->beam > 0) {
            s.best = out->beam_limit, s.cap = out->max_labels;
            fill_completions(&s);
            fill_own(&s);
            enumerate(&s, out->beam);
            if (s.best_node >= 0) trace(&s, stages, counts);
            out->value = s.best;
            if (s.best > out->limit) s.best = out->limit;
            s.best_node = -1;
        }
        status = explore(&s, 0, out->bound, stages, counts);
    }
    labels_close(&s);
    return status;
}
