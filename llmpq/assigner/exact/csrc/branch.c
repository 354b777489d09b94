/* Branching on the largest prefill time, where there would be too many labels.
 *
 * Among equal devices, one stage or layer more hardly changes the sums, so many plans lie between
 * the Lagrangian bound and the best plan; they differ in the maximum, which the Lagrangian may mix.
 * Within [low, high] stages above high do not exist and the maximum costs at least low: bounds are
 * much tighter. Every plan is in some branch. */
#include "labels.h"

#include <string.h>

enum { DEEPEST = 7 };

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

int explore(Labels *s, int depth, double bound, int32_t *stages, uint64_t *counts) {
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
