/* The Lagrangian on the lattice: prices under multipliers, and the shortest path they make.
 *
 * "No stage or link is slower than the maximum" and "a stage fits in its device" are priced; what
 * is left is additive over stages, layers and links. Slots are not priced but cut: a stage never
 * holds more layers than fit at their narrowest. */
#include "exact.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- prices of layers, devices and links --------------------------------------------------- */

double mean_layer_bytes(const Problem *p) {
    int n = p->groups * p->kinds * p->bits;
    double total = 0;
    for (int j = 0; j < n; j++) total += (double)p->bytes[j];
    return total / n;
}

double sum_price(const Problem *p, const double *x) {
    return p->sum_weight[0] + x[at_sum(p)];
}

double parts_price(const Problem *p, const double *x, int k, Parts parts, double unit) {
    int g = k % p->groups;
    return (1 + x[at_prefill(p, g)]) * parts.prefill +
           (sum_price(p, x) + x[at_decode(p, g)]) * parts.decode +
           x[at_memory(p, k)] * (parts.bytes / unit) + x[at_host(p, g)] * (parts.host / unit);
}

Parts layer_parts(const Problem *p, const double *x, int k, int kind, int b, double unit) {
    int g = k % p->groups, j = (g * p->kinds + kind) * p->bits + b;
    Parts parts = {.prefill = p->prefill[j], .decode = p->decode[j]};
    parts.bytes = (double)p->bytes[j], parts.host = (double)p->host[j];
    double share = p->split[g], read = (double)p->streamable[j];
    parts.prefill *= 1 - share, parts.decode *= 1 - share;
    if (p->streamable[j] == 0) return parts;
    Parts on_disk = {.prefill = parts.prefill + share * p->stream_prefill[g] * read,
                     .decode = parts.decode + share * p->stream_decode[g] * read,
                     .bytes = parts.bytes - read,
                     .host = parts.host};
    int is_cheaper = parts_price(p, x, k, on_disk, unit) < parts_price(p, x, k, parts, unit);
    return is_cheaper ? on_disk : parts;
}

static double link_price(const Problem *p, const double *x, int id, int priced) {
    int to = id % p->groups;
    double prefill = p->links_in_sums ? 1 : 0, decode = p->links_in_sums ? sum_price(p, x) : 0;
    if (priced) {
        prefill += x[at_prefill_link(p, to)];
        decode += x[at_decode_link(p, to)];
    }
    return prefill * p->send_prefill[id] + decode * p->send_decode[id];
}

/* The way back to the master carries no multiplier (it is small, and orders that share it are
 * merged); links inside a group carry one only where the lattice says so. */
static int link_is_priced(const Problem *p, const Lattice *g, int id) {
    if (id >= p->groups * p->groups) return 0;
    return id / p->groups != id % p->groups || g->price_inner_links;
}

static int64_t least_bytes(const Problem *p, int k, int layer) {
    int first = ((k % p->groups) * p->kinds + p->kind[layer]) * p->bits;
    int64_t least = INT64_MAX;
    for (int b = 0; b < p->bits; b++) {
        int64_t held = p->bytes[first + b] - p->streamable[first + b];
        if (may_run(p, k, layer, b) && held < least) least = held;
    }
    return least;
}

static void fill_reach(LagrangianTables *t) {
    const Problem *p = t->problem;
    int L = p->layers;
    for (int k = 0; k < 2 * p->groups; k++) {
        int32_t *reach = t->reach + (size_t)k * (L + 1);
        int64_t used = 0;
        int end = 0;
        for (int i = 0; i <= L; i++) {
            while (end < L && least_bytes(p, k, end) <= p->capacity[k] - used)
                used += least_bytes(p, k, end++);
            reach[i] = p->capacity[k] < 0 ? -1 : end;
            if (end > i) used -= least_bytes(p, k, i);
            else end = i + 1;
        }
    }
}

int tables_open(LagrangianTables *t, const Problem *p, const Lattice *g) {
    size_t C = 2 * (size_t)p->groups, L = (size_t)p->layers, V = (size_t)g->nodes;
    memset(t, 0, sizeof *t);
    t->problem = p;
    t->lattice = g;
    t->byte_unit = mean_layer_bytes(p);
    t->layer_price = malloc(C * L * (size_t)p->bits * sizeof(double));
    t->prefix = malloc(C * (L + 1) * sizeof(double));
    t->choice = malloc(C * L);
    t->fixed = malloc(C * sizeof(double));
    t->link = malloc(2 * (size_t)p->groups * (size_t)p->groups * sizeof(double));
    t->reach = malloc(C * (L + 1) * sizeof(int32_t));
    t->entry = malloc(V * (L + 1) * sizeof(double));
    t->to_go = malloc(V * (L + 1) * sizeof(double));
    if (!t->layer_price || !t->prefix || !t->choice || !t->fixed || !t->link || !t->reach ||
        !t->entry || !t->to_go) {
        tables_close(t);
        return EXACT_NO_MEMORY;
    }
    fill_reach(t);
    return EXACT_DONE;
}

void tables_close(LagrangianTables *t) {
    free(t->layer_price), free(t->prefix), free(t->choice), free(t->fixed), free(t->link);
    free(t->reach), free(t->entry), free(t->to_go);
    memset(t, 0, sizeof *t);
}

void tables_price_links(LagrangianTables *t, const double *x) {
    const Problem *p = t->problem;
    for (int id = 0; id < 2 * p->groups * p->groups; id++)
        t->link[id] = link_price(p, x, id, link_is_priced(p, t->lattice, id));
}

static void fill_prices(LagrangianTables *t, const double *x) {
    const Problem *p = t->problem;
    int L = p->layers, B = p->bits;
    double quality = p->theta + x[at_budget(p)], base[64];
    for (int k = 0; k < 2 * p->groups; k++) {
        double *prefix = t->prefix + (size_t)k * (L + 1), *prices;
        prefix[0] = 0;
        for (int i = 0; i < L; i++) {
            if (i == 0 || p->kind[i] != p->kind[i - 1])
                for (int b = 0; b < B; b++)
                    base[b] = parts_price(
                        p, x, k, layer_parts(p, x, k, p->kind[i], b, t->byte_unit), t->byte_unit);
            prices = t->layer_price + ((size_t)k * L + i) * B;
            int best = 0;
            for (int b = 0; b < B; b++) {
                int may = may_run(p, k, i, b);
                prices[b] = may ? base[b] + quality * p->omega[i * B + b] : HUGE_VAL;
                if (prices[b] < prices[best]) best = b;
            }
            /* A layer that the class may not run ends every stage's reach. */
            t->choice[(size_t)k * L + i] = (int8_t)best;
            prefix[i + 1] = prefix[i] + (isfinite(prices[best]) ? prices[best] : 0);
        }
        int g = k % p->groups;
        double computed = 1 - p->split[g];
        t->fixed[k] = computed * (1 + x[at_prefill(p, g)]) * p->master_prefill[k] +
                      computed * (sum_price(p, x) + x[at_decode(p, g)]) * p->master_decode[k] -
                      x[at_memory(p, k)] * ((double)p->capacity[k] / t->byte_unit) -
                      x[at_host(p, g)] * ((double)p->host_capacity[g] / t->byte_unit);
    }
    tables_price_links(t, x);
}

/* ---- the lattice, backwards ---------------------------------------------------------------- */

/* entry[i] = min over ends c in (i, reach[i]] of the stage's price plus to_go[c]: a sliding
 * minimum. The master's stage starts at 0 and may be empty. */
static void fill_entry(const LagrangianTables *t, int v, double *scratch, int32_t *queue) {
    int L = t->problem->layers, k = t->lattice->node_class[v];
    const double *prefix = t->prefix + (size_t)k * (L + 1);
    const double *to_go = t->to_go + (size_t)v * (L + 1);
    const int32_t *reach = t->reach + (size_t)k * (L + 1);
    double *entry = t->entry + (size_t)v * (L + 1);
    if (k >= t->problem->groups) {
        double best = HUGE_VAL;
        for (int c = t->lattice->least_layers[k]; c <= reach[0]; c++)
            if (to_go[c] + prefix[c] < best) best = to_go[c] + prefix[c];
        for (int i = 1; i <= L; i++) entry[i] = HUGE_VAL;
        entry[0] = best + t->fixed[k];
        return;
    }
    int oldest = 0, newest = 0; /* queue[oldest..newest): ends, latest first, values increasing */
    for (int c = 1; c <= L; c++) scratch[c] = to_go[c] + prefix[c];
    entry[L] = HUGE_VAL;
    for (int i = L - 1; i >= 0; i--) {
        while (newest > oldest && scratch[queue[newest - 1]] >= scratch[i + 1]) newest--;
        queue[newest++] = i + 1;
        while (oldest < newest && queue[oldest] > reach[i]) oldest++;
        entry[i] = oldest < newest ? scratch[queue[oldest]] - prefix[i] + t->fixed[k] : HUGE_VAL;
    }
}

static void fill_to_go(const LagrangianTables *t, int v) {
    const Lattice *g = t->lattice;
    int L = t->problem->layers;
    double *restrict to_go = t->to_go + (size_t)v * (L + 1);
    for (int i = 0; i <= L; i++) to_go[i] = HUGE_VAL;
    for (int e = g->edge_start[v]; e < g->edge_start[v + 1]; e++) {
        const double *restrict entry = t->entry + (size_t)g->edge_target[e] * (L + 1);
        double link = g->edge_link[e] < 0 ? 0 : t->link[g->edge_link[e]];
        for (int i = 0; i < L; i++) {
            double through = entry[i] + link;
            to_go[i] = through < to_go[i] ? through : to_go[i];
        }
    }
    if (v > 0 && g->node_final[v])
        to_go[L] = g->node_return[v] < 0 ? 0 : t->link[g->node_return[v]];
}

static int best_edge(const LagrangianTables *t, int v, int i) {
    const Lattice *g = t->lattice;
    int best = -1;
    double least = HUGE_VAL;
    for (int e = g->edge_start[v]; e < g->edge_start[v + 1]; e++) {
        double link = g->edge_link[e] < 0 ? 0 : t->link[g->edge_link[e]];
        double through = t->entry[(size_t)g->edge_target[e] * (t->problem->layers + 1) + i] + link;
        if (through < least) least = through, best = e;
    }
    return best;
}

static int best_end(const LagrangianTables *t, int v, int i) {
    int L = t->problem->layers, k = t->lattice->node_class[v], best = -1;
    double least = HUGE_VAL;
    int last = t->reach[(size_t)k * (L + 1) + i];
    for (int c = i + t->lattice->least_layers[k]; c <= last; c++) {
        double through = t->to_go[(size_t)v * (L + 1) + c] + t->prefix[(size_t)k * (L + 1) + c];
        if (through < least) least = through, best = c;
    }
    return best;
}

void tables_add_link(const LagrangianTables *t, int id, double *gradient) {
    const Problem *p = t->problem;
    if (id < 0) return;
    if (p->links_in_sums) gradient[at_sum(p)] += p->send_decode[id];
    if (!link_is_priced(p, t->lattice, id)) return;
    gradient[at_prefill_link(p, id % p->groups)] += p->send_prefill[id];
    gradient[at_decode_link(p, id % p->groups)] += p->send_decode[id];
}

static void add_stage(const LagrangianTables *t, const double *x, int k, int first, int end,
                      double *gradient) {
    const Problem *p = t->problem;
    int g = k % p->groups;
    double computed = 1 - p->split[g];
    double prefill = computed * p->master_prefill[k], decode = computed * p->master_decode[k];
    double memory = -(double)p->capacity[k], host = -(double)p->host_capacity[g];
    for (int i = first; i < end; i++) {
        int b = t->choice[(size_t)k * p->layers + i];
        Parts parts = layer_parts(p, x, k, p->kind[i], b, t->byte_unit);
        prefill += parts.prefill, decode += parts.decode;
        memory += parts.bytes, host += parts.host;
        gradient[at_budget(p)] += p->omega[i * p->bits + b];
    }
    gradient[at_prefill(p, g)] += prefill;
    gradient[at_decode(p, g)] += decode;
    gradient[at_sum(p)] += decode;
    gradient[at_memory(p, k)] += memory / t->byte_unit;
    gradient[at_host(p, g)] += host / t->byte_unit;
}

static void fill_gradient(const LagrangianTables *t, const double *x, double *gradient) {
    const Problem *p = t->problem;
    memset(gradient, 0, (size_t)multipliers(p) * sizeof(double));
    if (isfinite(p->budget)) gradient[at_budget(p)] = -p->budget;
    int v = 0, i = 0;
    while (v == 0 || i < p->layers) {
        int e = best_edge(t, v, i);
        v = t->lattice->edge_target[e];
        int end = best_end(t, v, i);
        tables_add_link(t, t->lattice->edge_link[e], gradient);
        add_stage(t, x, t->lattice->node_class[v], i, end, gradient);
        i = end;
    }
    tables_add_link(t, t->lattice->node_return[v], gradient);
}

double tables_evaluate(LagrangianTables *t, const double *x, double *gradient) {
    const Problem *p = t->problem;
    int L = p->layers;
    double scratch[L + 1];
    int32_t queue[L + 1];
    fill_prices(t, x);
    for (int v = t->lattice->nodes - 1; v >= 0; v--) {
        fill_to_go(t, v);
        if (v > 0) fill_entry(t, v, scratch, queue);
    }
    double bound = t->to_go[0];
    if (gradient && isfinite(bound)) fill_gradient(t, x, gradient);
    return isfinite(p->budget) ? bound - x[at_budget(p)] * p->budget : bound;
}

/* The stages that attain the Lagrangian at x: stages[3 V] node, first, end; choice[L] bitwidths.
 * They may exceed memory. Returns how many, 0 when no plan fits. */
int32_t exact_relaxed_plan(const Problem *p, const Lattice *g, const double *x, int32_t *stages,
                           int32_t *choice) {
    LagrangianTables t;
    int n = 0, v = 0, i = 0;
    if (tables_open(&t, p, g)) return 0;
    if (isfinite(tables_evaluate(&t, x, NULL)))
        while (v == 0 || i < p->layers) {
            v = g->edge_target[best_edge(&t, v, i)];
            int end = best_end(&t, v, i), k = g->node_class[v];
            stages[3 * n] = v, stages[3 * n + 1] = i, stages[3 * n + 2] = end;
            for (n++; i < end; i++) choice[i] = t.choice[(size_t)k * p->layers + i];
        }
    tables_close(&t);
    return n;
}

int32_t exact_abi(void) { return EXACT_ABI; }
