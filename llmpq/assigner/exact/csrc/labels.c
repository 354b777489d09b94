/* Label-setting over the lattice: all plans of one branch below a limit.
 *
 * A label is a partial plan: its largest prefill and decode times so far, its cost (summed prefill
 * plus theta * degradation), its summed decode time and its degradation. Two facts drop labels.
 *
 * Bound. For multipliers within their totals, the value of any completion is at least the label's
 * price plus the cheapest completion: of the weight of the final maximum, the part that devices
 * still to come cannot claim is paid on the label's own maximum.
 *
 * Dominance. At one node and layer, l dominates m when every completion of l costs no more than
 * the same completion of m. With C_l <= C_m that holds if
 *   P_l <= max(P_m, least final P)         both then end at the completion's own maximum;
 *   D_l <= max(D_m, least final D, least final S of m / rounds)
 *                                          or the sum branch of m already pays for it;
 *   C1_l <= C1_m, or most final S of l <= rounds * max(D_m, least final D)
 *                                          or the peak branch of m already pays for it,
 * where C1 = C + sum_weight[1] S. Under a budget, the degradation of l must not be larger either.
 * "Least" and "most" run over completions by kept columns, which is all that matters below the
 * limit. */
#include "labels.h"

#include <stdlib.h>
#include <string.h>

enum { BEAM_COLUMNS = 4 };

void fill_own(Labels *s) {
    const Problem *p = s->p;
    int T = p->groups;
    for (int v = 0; v < s->g->nodes; v++) {
        const double *left = s->g->remaining + (size_t)v * 2 * T;
        double prefill = p->peak_prefill;
        double decode = p->peak_decode - (p->steady ? p->rounds * s->x[at_sum(p)] : 0);
        for (int t = 0; t < T; t++) {
            prefill -= left[t] * s->x[at_prefill(p, t)] + left[T + t] * s->x[at_prefill_link(p, t)];
            decode -= left[t] * s->x[at_decode(p, t)] + left[T + t] * s->x[at_decode_link(p, t)];
        }
        s->own[2 * v] = prefill > 0 ? prefill : 0;
        s->own[2 * v + 1] = decode > 0 ? decode : 0;
    }
}

/* Price of a label at a node without its completion. */
static inline double label_price(const Labels *s, const Label *l, int v,
                                 const Completion *completion) {
    return s->own[2 * v] * larger(l->prefill, completion->prefill) +
           s->own[2 * v + 1] * larger(l->decode, completion->decode) + l->cost +
           price_of_sum(s) * l->sum + s->x[at_budget(s->p)] * l->degradation;
}

static int push(Labels *s, const Label *label) {
    if (s->size >= s->cap) return EXACT_OVERFLOW;
    if (s->size == s->capacity) {
        int64_t capacity = 2 * s->capacity + 4096;
        Label *grown = realloc(s->label, (size_t)capacity * sizeof *grown);
        if (!grown) return EXACT_NO_MEMORY;
        s->label = grown, s->capacity = capacity;
    }
    s->label[s->size++] = *label;
    return EXACT_DONE;
}

/* A label whose last stage ends at the last layer is a plan: price it exactly. */
static void finish(Labels *s, const Label *label) {
    const Problem *p = s->p;
    int id = s->g->node_return[label->node];
    double P = label->prefill, D = label->decode, C = label->cost, S = label->sum;
    if (id >= 0) {
        P = larger(P, p->send_prefill[id]), D = larger(D, p->send_decode[id]);
        if (p->links_in_sums) C += p->send_prefill[id], S += p->send_decode[id];
    }
    double value = p->peak_prefill * P + C +
                   larger(p->peak_decode * D + p->sum_weight[0] * S, p->sum_weight[1] * S);
    if (value >= s->best || label->degradation > p->budget) return;
    s->best = value;
    s->best_parent = label->parent, s->best_column = label->column, s->best_node = label->node;
}

static Key key_of(const Labels *s, const Label *l, const Completion *completion, double bound) {
    return (Key){.cost = l->cost + s->p->sum_weight[0] * l->sum,
                 .prefill = l->prefill,
                 .decode = l->decode,
                 .tail = l->cost + s->p->sum_weight[1] * l->sum,
                 .sum = l->sum,
                 .most = l->sum + completion->most_sum,
                 .degradation = l->degradation,
                 .bound = bound};
}

/* Whether some key of a list dominates this one (conditions above). */
static int dominated(const Labels *s, const Key *list, int size, const Key *key,
                     const Completion *completion) {
    const Problem *p = s->p;
    double P = p->peak_prefill > 0 ? larger(key->prefill, completion->prefill) : HUGE_VAL;
    double D = larger(key->decode, completion->decode), peak = D, q = key->degradation;
    if (p->steady) D = larger(D, (key->sum + completion->least_sum) / p->rounds);
    if (p->peak_decode <= 0) D = HUGE_VAL;
    double covered = p->steady ? p->rounds * peak : -HUGE_VAL;
    int budgeted = isfinite(p->budget);
    for (int j = size - 1; j >= 0; j--)
        if (list[j].cost <= key->cost && list[j].prefill <= P && list[j].decode <= D &&
            (list[j].tail <= key->tail || list[j].most <= covered) &&
            (!budgeted || list[j].degradation <= q))
            return 1;
    return 0;
}

/* Whether a candidate of the place dominates a new label; else the label may become one. */
static int dominated_by_candidates(Labels *s, size_t place, const Key *key,
                                   const Completion *completion) {
    Key *candidate = s->candidate + place * (size_t)s->max_candidates;
    int size = s->num_candidates[place], worst = 0;
    if (dominated(s, candidate, size, key, completion)) return 1;
    if (size < s->max_candidates) {
        candidate[s->num_candidates[place]++] = *key;
        return 0;
    }
    for (int j = 1; j < size; j++)
        if (candidate[j].bound > candidate[worst].bound) worst = j;
    if (key->bound < candidate[worst].bound) candidate[worst] = *key;
    return 0;
}

/* Continue label number `parent` (a copy in l) over one edge with every column. */
static int extend(Labels *s, const Label *l, int32_t parent, int e) {
    const Problem *p = s->p;
    int L = p->layers, v = l->node, w = s->g->edge_target[e], k = s->g->node_class[w], a = l->end;
    int id = s->g->edge_link[e];
    const Completion *completion = s->completion + (size_t)w * (L + 1);
    Completion link = link_completion(s, id), here = s->completion[(size_t)v * (L + 1) + a];
    Label at = *l; /* with the link */
    at.prefill = larger(l->prefill, link.prefill), at.decode = larger(l->decode, link.decode);
    at.sum += link.least_sum;
    if (p->links_in_sums) at.cost += link.prefill;
    at.parent = parent, at.node = w;
    double base = label_price(s, l, v, &here) + link.price;
    double budget = isfinite(p->budget) ? s->x[at_budget(p)] * p->budget : 0;
    for (int c = a; c <= L; c++) {
        double through = base + completion[c].price - budget;
        if (through >= s->best) continue;
        int64_t cell = column_cell(p, k, a, c);
        int32_t from = s->columns.start[cell], to = s->columns.start[cell + 1];
        if (s->beam > 0 && to > from + BEAM_COLUMNS) to = from + BEAM_COLUMNS;
        for (int j = from; j < to; j++) {
            const Column *m = s->columns.column + j;
            if (through + m->price >= s->best) break;
            Label grown = at;
            grown.prefill = larger(at.prefill, m->prefill);
            grown.decode = larger(at.decode, m->decode);
            grown.cost += m->cost, grown.sum += m->decode, grown.degradation += m->degradation;
            grown.column = j, grown.end = c;
            if (c == L) {
                finish(s, &grown);
                continue;
            }
            if (grown.degradation + completion[c].degradation > p->budget) continue;
            double bound = label_price(s, &grown, w, completion + c) + completion[c].price - budget;
            if (bound >= s->best) continue;
            size_t place = (size_t)w * (L + 1) + c;
            Key key = key_of(s, &grown, completion + c, bound);
            if (dominated_by_candidates(s, place, &key, completion + c)) continue;
            int32_t *head = s->head + place;
            grown.next = *head;
            int status = push(s, &grown);
            if (status) return status;
            *head = (int32_t)(s->size - 1);
        }
    }
    return EXACT_DONE;
}

static int by_cost(const void *a, const void *b) {
    const Key *x = a, *y = b;
    if (x->cost != y->cost) return (x->cost > y->cost) - (x->cost < y->cost);
    return (x->tail > y->tail) - (x->tail < y->tail);
}

static int by_bound(const void *a, const void *b) {
    const Key *x = a, *y = b;
    return (x->bound > y->bound) - (x->bound < y->bound);
}

/* Collect the labels of a place that the bound leaves, least cost first. */
static int gather(const Labels *s, int v, int i, Key **keys, int *room) {
    const Completion *completion = s->completion + (size_t)v * (s->p->layers + 1) + i;
    double budget = isfinite(s->p->budget) ? s->x[at_budget(s->p)] * s->p->budget : 0;
    int size = 0;
    for (int32_t j = s->head[(size_t)v * (s->p->layers + 1) + i]; j >= 0; j = s->label[j].next) {
        const Label *l = s->label + j;
        double bound = label_price(s, l, v, completion) + completion->price - budget;
        if (bound >= s->best) continue;
        if (size == *room) {
            *room = 2 * *room + 1024;
            Key *grown = realloc(*keys, (size_t)*room * sizeof *grown);
            if (!grown) return -1;
            *keys = grown;
        }
        (*keys)[size] = key_of(s, l, completion, bound);
        (*keys)[size++].label = j;
    }
    if (s->beam > 0 && size > s->beam) {
        qsort(*keys, (size_t)size, sizeof **keys, by_bound);
        size = s->beam;
    }
    qsort(*keys, (size_t)size, sizeof **keys, by_cost);
    return size;
}

static int settle(Labels *s) {
    int L = s->p->layers, status = EXACT_DONE, room = 0;
    Key *keys = NULL;
    for (int v = 0; v < s->g->nodes && !status; v++)
        for (int i = 0; i < L && !status; i++) {
            int size = gather(s, v, i, &keys, &room), kept = 0;
            const Completion *completion = s->completion + (size_t)v * (L + 1) + i;
            if (size < 0) status = EXACT_NO_MEMORY;
            for (int j = 0; j < size && !status; j++) {
                Key key = keys[j];
                if (dominated(s, keys, kept, &key, completion)) continue;
                keys[kept++] = key;
                s->out->kept++;
                Label copy = s->label[key.label];
                for (int e = s->g->edge_start[v]; e < s->g->edge_start[v + 1] && !status; e++)
                    status = extend(s, &copy, key.label, e);
                if ((s->out->kept & 255) == 0 && now() > s->deadline) status = EXACT_DEADLINE;
            }
        }
    free(keys);
    return status;
}

/* One pass over all labels below s->best. */
int enumerate(Labels *s, int beam) {
    size_t places = (size_t)s->g->nodes * ((size_t)s->p->layers + 1);
    Label origin = {.parent = -1, .column = -1, .next = -1};
    for (size_t j = 0; j < places; j++) s->head[j] = -1;
    memset(s->num_candidates, 0, places);
    s->size = 0, s->beam = beam;
    int status = push(s, &origin);
    s->head[0] = 0;
    if (!status) status = settle(s);
    if (s->size > s->out->labels) s->out->labels = s->size;
    return status;
}

/* Write the stages of the best plan, last first: node, first layer, end layer; counts apart. */
void trace(const Labels *s, int32_t *stages, uint64_t *counts) {
    int32_t node = s->best_node, column = s->best_column, parent = s->best_parent;
    int32_t end = s->p->layers, n = 0;
    for (;;) {
        const Label *before = s->label + parent;
        stages[3 * n] = node, stages[3 * n + 1] = before->end, stages[3 * n + 2] = end;
        counts[n++] = s->columns.column[column].counts;
        if (before->node == 0) break;
        node = before->node, column = before->column, end = before->end, parent = before->parent;
    }
    s->out->stages = n;
}
