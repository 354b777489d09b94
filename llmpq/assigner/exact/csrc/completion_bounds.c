/* Completion bounds from the stage columns: the cheapest plan with a stage, and the least and
 * largest values of any completion. Much tighter than the relaxation: memory and bitwidths are
 * exact here. */
#include "labels.h"

/* ---- the cheapest plan through every stage ------------------------------------------------- */

/* depart[c] = cheapest start of a plan whose node v has run layers up to c: by the relaxation. */
static void depart_relaxed(const Labels *s, int v, double *depart) {
    int L = s->p->layers, k = s->g->node_class[v], first = k >= s->p->groups;
    const double *prefix = s->tables.prefix + (size_t)k * (L + 1);
    const int32_t *reach = s->tables.reach + (size_t)k * (L + 1);
    const double *arrive = s->arrive + (size_t)v * (L + 1);
    for (int c = 0; c <= L; c++) depart[c] = HUGE_VAL;
    for (int a = 0; a <= (first ? 0 : L - 1); a++) {
        if (!isfinite(arrive[a])) continue;
        double base = arrive[a] - prefix[a] + s->tables.fixed[k];
        for (int c = a + s->g->least_layers[k]; c <= reach[a]; c++) {
            double through = base + prefix[c];
            depart[c] = through < depart[c] ? through : depart[c];
        }
    }
}

/* The same by the kept columns. */
static void depart_columns(const Labels *s, int v, double *depart) {
    int L = s->p->layers, k = s->g->node_class[v], first = k >= s->p->groups;
    const double *arrive = s->arrive + (size_t)v * (L + 1);
    for (int c = 0; c <= L; c++) depart[c] = HUGE_VAL;
    for (int a = 0; a <= (first ? 0 : L - 1); a++) {
        if (!isfinite(arrive[a])) continue;
        const Completion *cell = s->cell + cell_at(s->p, k, a, 0);
        for (int c = a; c <= L; c++) {
            double through = arrive[a] + cell[c].price;
            depart[c] = through < depart[c] ? through : depart[c];
        }
    }
}

void fill_around(Labels *s, int by_columns) {
    const Lattice *g = s->g;
    int L = s->p->layers;
    size_t cells = cell_at(s->p, 2 * s->p->groups, 0, 0), places = (size_t)g->nodes * (L + 1);
    double depart[L + 1];
    for (size_t j = 0; j < cells; j++) s->around[j] = HUGE_VAL;
    for (size_t j = 0; j < places; j++) s->arrive[j] = HUGE_VAL;
    for (int v = 0; v < g->nodes; v++) {
        if (v == 0) {
            for (int c = 1; c <= L; c++) depart[c] = HUGE_VAL;
            depart[0] = 0;
        } else if (by_columns) depart_columns(s, v, depart);
        else depart_relaxed(s, v, depart);
        for (int e = g->edge_start[v]; e < g->edge_start[v + 1]; e++) {
            double *restrict arrive = s->arrive + (size_t)g->edge_target[e] * (L + 1);
            double link = g->edge_link[e] < 0 ? 0 : s->tables.link[g->edge_link[e]];
            for (int c = 0; c <= L; c++) {
                double through = depart[c] + link;
                arrive[c] = through < arrive[c] ? through : arrive[c];
            }
        }
        if (v == 0) continue;
        for (int a = 0; a <= L; a++) {
            double start = s->arrive[(size_t)v * (L + 1) + a];
            if (!isfinite(start)) continue;
            double *restrict around = s->around + cell_at(s->p, g->node_class[v], a, 0);
            const double *restrict to_go = s->tables.to_go + (size_t)v * (L + 1);
            for (int c = a; c <= L; c++) {
                double through = start + to_go[c];
                around[c] = through < around[c] ? through : around[c];
            }
        }
    }
}

/* ---- completions by the kept columns ------------------------------------------------------- */

static const Completion NOTHING = {HUGE_VAL, HUGE_VAL, HUGE_VAL, HUGE_VAL, -HUGE_VAL, HUGE_VAL};

static inline void widen(Completion *r, const Completion *by) {
    if (by->price < r->price) r->price = by->price;
    if (by->prefill < r->prefill) r->prefill = by->prefill;
    if (by->decode < r->decode) r->decode = by->decode;
    if (by->least_sum < r->least_sum) r->least_sum = by->least_sum;
    if (by->most_sum > r->most_sum) r->most_sum = by->most_sum;
    if (by->degradation < r->degradation) r->degradation = by->degradation;
}

static inline Completion joined(const Completion *a, const Completion *b) {
    return (Completion){a->price + b->price,
                  a->prefill > b->prefill ? a->prefill : b->prefill,
                  a->decode > b->decode ? a->decode : b->decode,
                  a->least_sum + b->least_sum,
                  a->most_sum + b->most_sum,
                  a->degradation + b->degradation};
}

Completion link_completion(const Labels *s, int id) {
    if (id < 0) return (Completion){0, 0, 0, 0, 0, 0};
    double sum = s->p->links_in_sums ? s->p->send_decode[id] : 0;
    return (Completion){.price = s->tables.link[id],
                        .prefill = s->p->send_prefill[id],
                        .decode = s->p->send_decode[id],
                        .least_sum = sum,
                        .most_sum = sum};
}

static void fill_cells(Labels *s) {
    const Problem *p = s->p;
    for (int k = 0; k < 2 * p->groups; k++)
        for (int a = 0; a <= p->layers; a++)
            for (int c = a; c <= p->layers; c++) {
                Completion *cell = s->cell + cell_at(p, k, a, c);
                *cell = NOTHING;
                int64_t at = column_cell(p, k, a, c);
                for (int j = s->columns.start[at]; j < s->columns.start[at + 1]; j++) {
                    const Column *m = s->columns.column + j;
                    if (!isfinite(m->price)) break; /* in order of price: none of the others is */
                    Completion one = {m->price,  m->prefill, m->decode,
                                m->decode, m->decode,  m->degradation};
                    widen(cell, &one);
                }
            }
}

void fill_completions(Labels *s) {
    const Lattice *g = s->g;
    int L = s->p->layers;
    fill_cells(s);
    for (int v = g->nodes - 1; v >= 0; v--) {
        Completion *completion = s->completion + (size_t)v * (L + 1);
        Completion *entry = s->entry + (size_t)v * (L + 1);
        for (int i = 0; i <= L; i++) completion[i] = entry[i] = NOTHING;
        for (int e = g->edge_start[v]; e < g->edge_start[v + 1]; e++) {
            const Completion *into = s->entry + (size_t)g->edge_target[e] * (L + 1);
            Completion link = link_completion(s, g->edge_link[e]);
            if (!isfinite(link.price)) continue;
            for (int i = 0; i < L; i++) {
                if (!isfinite(into[i].price)) continue;
                Completion both = joined(&link, into + i);
                widen(completion + i, &both);
            }
        }
        if (v == 0) continue;
        if (g->node_final[v]) {
            Completion back = link_completion(s, g->node_return[v]);
            if (back.prefill < s->low) back.prefill = s->low;
            if (isfinite(back.price)) completion[L] = back;
        }
        int k = g->node_class[v];
        for (int a = 0; a <= (k >= s->p->groups ? 0 : L - 1); a++)
            for (int c = a; c <= L; c++) {
                const Completion *cell = s->cell + cell_at(s->p, k, a, c);
                if (!isfinite(cell->price) || !isfinite(completion[c].price)) continue;
                Completion both = joined(cell, completion + c);
                widen(entry + a, &both);
            }
    }
    for (size_t j = 0; j < (size_t)g->nodes * (L + 1); j++)
        s->tables.to_go[j] = s->completion[j].price;
}

void thin_columns(Labels *s, double limit) {
    const Problem *p = s->p;
    Columns *t = &s->columns;
    int64_t size = 0;
    for (int k = 0; k < 2 * p->groups; k++)
        for (int a = 0; a <= p->layers; a++) {
            int64_t from = t->start[column_cell(p, k, a, 0)];
            for (int c = 0; c <= p->layers; c++) {
                int64_t at = column_cell(p, k, a, c), to = t->start[at + 1];
                t->start[at] = (int32_t)size;
                for (int64_t j = from; j < to; j++)
                    if (s->around[cell_at(p, k, a, c)] + t->column[j].price < limit)
                        t->column[size++] = t->column[j];
                from = to;
            }
            t->start[column_cell(p, k, a, p->layers + 1)] = (int32_t)size;
        }
    t->size = size;
}
