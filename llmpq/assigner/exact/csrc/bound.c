/* Lower bounds: the Lagrangian on the lattice and, with contiguity dropped, on the pool. */
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

static double mean_layer_bytes(const Problem *p) {
    int n = p->groups * p->kinds * p->bits;
    double total = 0;
    for (int j = 0; j < n; j++) total += (double)p->bytes[j];
    return total / n;
}

/* Price of a second of summed decode time: its fixed weight, and what the sum branch of the
 * steady round adds. */
static double sum_price(const Problem *p, const double *x) {
    return p->sum_weight[0] + x[at_sum(p)];
}

static double layer_base(const Problem *p, const double *x, int k, int kind, int b, double unit) {
    int g = k % p->groups, j = (g * p->kinds + kind) * p->bits + b;
    return (1 + x[at_prefill(p, g)]) * p->prefill[j] +
           (sum_price(p, x) + x[at_decode(p, g)]) * p->decode[j] +
           x[at_memory(p, k)] * ((double)p->bytes[j] / unit);
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

static void fill_reach(Field *f) {
    const Problem *p = f->problem;
    int L = p->layers;
    for (int k = 0; k < 2 * p->groups; k++) {
        int32_t *reach = f->reach + (size_t)k * (L + 1);
        int64_t used = 0, capacity = p->capacity[k];
        int end = 0;
        for (int i = 0; i <= L; i++) {
            if (end < i) end = i, used = 0;
            for (; end < L; end++) {
                const int64_t *bytes =
                    p->bytes + ((k % p->groups) * p->kinds + p->kind[end]) * p->bits;
                int64_t least = bytes[0];
                for (int b = 1; b < p->bits; b++) least = bytes[b] < least ? bytes[b] : least;
                if (used + least > capacity) break;
                used += least;
            }
            reach[i] = capacity < 0 ? -1 : end;
            if (end > i) {
                const int64_t *bytes =
                    p->bytes + ((k % p->groups) * p->kinds + p->kind[i]) * p->bits;
                int64_t least = bytes[0];
                for (int b = 1; b < p->bits; b++) least = bytes[b] < least ? bytes[b] : least;
                used -= least;
            }
        }
    }
}

int field_open(Field *f, const Problem *p, const Lattice *g) {
    size_t C = 2 * (size_t)p->groups, L = (size_t)p->layers, V = (size_t)g->nodes;
    memset(f, 0, sizeof *f);
    f->problem = p;
    f->lattice = g;
    f->byte_unit = mean_layer_bytes(p);
    f->layer_price = malloc(C * L * (size_t)p->bits * sizeof(double));
    f->prefix = malloc(C * (L + 1) * sizeof(double));
    f->choice = malloc(C * L);
    f->fixed = malloc(C * sizeof(double));
    f->link = malloc(2 * (size_t)p->groups * (size_t)p->groups * sizeof(double));
    f->reach = malloc(C * (L + 1) * sizeof(int32_t));
    f->entry = malloc(V * (L + 1) * sizeof(double));
    f->to_go = malloc(V * (L + 1) * sizeof(double));
    if (!f->layer_price || !f->prefix || !f->choice || !f->fixed || !f->link || !f->reach ||
        !f->entry || !f->to_go) {
        field_close(f);
        return EXACT_NO_MEMORY;
    }
    fill_reach(f);
    return EXACT_DONE;
}

void field_close(Field *f) {
    free(f->layer_price), free(f->prefix), free(f->choice), free(f->fixed), free(f->link);
    free(f->reach), free(f->entry), free(f->to_go);
    memset(f, 0, sizeof *f);
}

static void fill_prices(Field *f, const double *x) {
    const Problem *p = f->problem;
    int L = p->layers, B = p->bits;
    double quality = p->theta + x[at_budget(p)], base[64];
    for (int k = 0; k < 2 * p->groups; k++) {
        double *prefix = f->prefix + (size_t)k * (L + 1), *prices;
        prefix[0] = 0;
        for (int i = 0; i < L; i++) {
            if (i == 0 || p->kind[i] != p->kind[i - 1])
                for (int b = 0; b < B; b++)
                    base[b] = layer_base(p, x, k, p->kind[i], b, f->byte_unit);
            prices = f->layer_price + ((size_t)k * L + i) * B;
            int best = 0;
            for (int b = 0; b < B; b++) {
                prices[b] = base[b] + quality * p->omega[i * B + b];
                if (prices[b] < prices[best]) best = b;
            }
            f->choice[(size_t)k * L + i] = (int8_t)best;
            prefix[i + 1] = prefix[i] + prices[best];
        }
        int g = k % p->groups;
        f->fixed[k] = (1 + x[at_prefill(p, g)]) * p->master_prefill[k] +
                      (sum_price(p, x) + x[at_decode(p, g)]) * p->master_decode[k] -
                      x[at_memory(p, k)] * ((double)p->capacity[k] / f->byte_unit);
    }
    for (int id = 0; id < 2 * p->groups * p->groups; id++)
        f->link[id] = link_price(p, x, id, link_is_priced(p, f->lattice, id));
}

/* ---- the lattice, backwards ---------------------------------------------------------------- */

/* entry[i] = min over ends c in (i, reach[i]] of the stage's price plus to_go[c]: a sliding
 * minimum. The master's stage starts at 0 and may be empty. */
static void fill_entry(const Field *f, int v, double *scratch, int32_t *queue) {
    int L = f->problem->layers, k = f->lattice->node_class[v];
    const double *prefix = f->prefix + (size_t)k * (L + 1);
    const double *to_go = f->to_go + (size_t)v * (L + 1);
    const int32_t *reach = f->reach + (size_t)k * (L + 1);
    double *entry = f->entry + (size_t)v * (L + 1);
    if (k >= f->problem->groups) {
        double best = HUGE_VAL;
        for (int c = 0; c <= reach[0]; c++)
            if (to_go[c] + prefix[c] < best) best = to_go[c] + prefix[c];
        for (int i = 1; i <= L; i++) entry[i] = HUGE_VAL;
        entry[0] = best + f->fixed[k];
        return;
    }
    int oldest = 0, newest = 0; /* queue[oldest..newest): ends, latest first, values increasing */
    for (int c = 1; c <= L; c++) scratch[c] = to_go[c] + prefix[c];
    entry[L] = HUGE_VAL;
    for (int i = L - 1; i >= 0; i--) {
        while (newest > oldest && scratch[queue[newest - 1]] >= scratch[i + 1]) newest--;
        queue[newest++] = i + 1;
        while (oldest < newest && queue[oldest] > reach[i]) oldest++;
        entry[i] = oldest < newest ? scratch[queue[oldest]] - prefix[i] + f->fixed[k] : HUGE_VAL;
    }
}

static void fill_to_go(const Field *f, int v) {
    const Lattice *g = f->lattice;
    int L = f->problem->layers;
    double *restrict to_go = f->to_go + (size_t)v * (L + 1);
    for (int i = 0; i <= L; i++) to_go[i] = HUGE_VAL;
    for (int e = g->edge_start[v]; e < g->edge_start[v + 1]; e++) {
        const double *restrict entry = f->entry + (size_t)g->edge_target[e] * (L + 1);
        double link = g->edge_link[e] < 0 ? 0 : f->link[g->edge_link[e]];
        for (int i = 0; i < L; i++) {
            double through = entry[i] + link;
            to_go[i] = through < to_go[i] ? through : to_go[i];
        }
    }
    if (v > 0) to_go[L] = g->node_return[v] < 0 ? 0 : f->link[g->node_return[v]];
}

static int best_edge(const Field *f, int v, int i) {
    const Lattice *g = f->lattice;
    int best = -1;
    double least = HUGE_VAL;
    for (int e = g->edge_start[v]; e < g->edge_start[v + 1]; e++) {
        double link = g->edge_link[e] < 0 ? 0 : f->link[g->edge_link[e]];
        double through = f->entry[(size_t)g->edge_target[e] * (f->problem->layers + 1) + i] + link;
        if (through < least) least = through, best = e;
    }
    return best;
}

static int best_end(const Field *f, int v, int i) {
    int L = f->problem->layers, k = f->lattice->node_class[v], best = -1;
    double least = HUGE_VAL;
    int last = f->reach[(size_t)k * (L + 1) + i];
    for (int c = k >= f->problem->groups ? i : i + 1; c <= last; c++) {
        double through = f->to_go[(size_t)v * (L + 1) + c] + f->prefix[(size_t)k * (L + 1) + c];
        if (through < least) least = through, best = c;
    }
    return best;
}

static void add_link(const Field *f, int id, double *gradient) {
    const Problem *p = f->problem;
    if (id < 0) return;
    if (p->links_in_sums) gradient[at_sum(p)] += p->send_decode[id];
    if (!link_is_priced(p, f->lattice, id)) return;
    gradient[at_prefill_link(p, id % p->groups)] += p->send_prefill[id];
    gradient[at_decode_link(p, id % p->groups)] += p->send_decode[id];
}

static void add_stage(const Field *f, int k, int first, int end, double *gradient) {
    const Problem *p = f->problem;
    int g = k % p->groups;
    double prefill = p->master_prefill[k], decode = p->master_decode[k];
    double memory = -(double)p->capacity[k];
    for (int i = first; i < end; i++) {
        int b = f->choice[(size_t)k * p->layers + i];
        int j = (g * p->kinds + p->kind[i]) * p->bits + b;
        prefill += p->prefill[j], decode += p->decode[j], memory += (double)p->bytes[j];
        gradient[at_budget(p)] += p->omega[i * p->bits + b];
    }
    gradient[at_prefill(p, g)] += prefill;
    gradient[at_decode(p, g)] += decode;
    gradient[at_sum(p)] += decode;
    gradient[at_memory(p, k)] += memory / f->byte_unit;
}

static void fill_gradient(const Field *f, double *gradient) {
    const Problem *p = f->problem;
    memset(gradient, 0, (size_t)multipliers(p) * sizeof(double));
    if (isfinite(p->budget)) gradient[at_budget(p)] = -p->budget;
    int v = 0, i = 0;
    while (v == 0 || i < p->layers) {
        int e = best_edge(f, v, i);
        v = f->lattice->edge_target[e];
        int end = best_end(f, v, i);
        add_link(f, f->lattice->edge_link[e], gradient);
        add_stage(f, f->lattice->node_class[v], i, end, gradient);
        i = end;
    }
    add_link(f, f->lattice->node_return[v], gradient);
}

double field_evaluate(Field *f, const double *x, double *gradient) {
    const Problem *p = f->problem;
    int L = p->layers;
    double scratch[L + 1];
    int32_t queue[L + 1];
    fill_prices(f, x);
    for (int v = f->lattice->nodes - 1; v >= 0; v--) {
        fill_to_go(f, v);
        if (v > 0) fill_entry(f, v, scratch, queue);
    }
    double bound = f->to_go[0];
    if (gradient && isfinite(bound)) fill_gradient(f, gradient);
    return isfinite(p->budget) ? bound - x[at_budget(p)] * p->budget : bound;
}

/* ---- the pool: every layer chooses its own device ------------------------------------------ */

typedef struct {
    const Problem *problem;
    const Lattice *lattice;
    double byte_unit;
    int32_t *usable;    /* [T] the group can hold some layer */
    double *floor_link; /* [2] a send that every plan makes at least fewest - 1 times */
    double fewest;      /* devices that every plan uses at least */
} Pool;

static double pool_master(const Pool *o, const double *x, double *gradient) {
    const Problem *p = o->problem;
    int T = p->groups, best = -1;
    double least = HUGE_VAL;
    for (int g = 0; g < T; g++) {
        int k = T + g;
        if (p->capacity[k] < 0) continue;
        double held = ((double)p->capacity[g] - (double)p->capacity[k]) / o->byte_unit;
        double price = (1 + x[at_prefill(p, g)]) * p->master_prefill[k] +
                       (sum_price(p, x) + x[at_decode(p, g)]) * p->master_decode[k] +
                       x[at_memory(p, g)] * held;
        if (price < least) least = price, best = g;
    }
    if (best < 0) return HUGE_VAL;
    int k = T + best;
    gradient[at_prefill(p, best)] += p->master_prefill[k];
    gradient[at_decode(p, best)] += p->master_decode[k];
    gradient[at_sum(p)] += p->master_decode[k];
    gradient[at_memory(p, best)] +=
        ((double)p->capacity[best] - (double)p->capacity[k]) / o->byte_unit;
    return least;
}

static void pool_bases(const Pool *o, const double *x, int kind, double *base, int *who) {
    const Problem *p = o->problem;
    for (int b = 0; b < p->bits; b++) {
        base[b] = HUGE_VAL, who[b] = 0;
        for (int g = 0; g < p->groups; g++) {
            double price = o->usable[g] ? layer_base(p, x, g, kind, b, o->byte_unit) : HUGE_VAL;
            if (price < base[b]) base[b] = price, who[b] = g;
        }
    }
}

static double pool_layers(const Pool *o, const double *x, double *gradient) {
    const Problem *p = o->problem;
    double total = 0, quality = p->theta + x[at_budget(p)], base[64];
    int who[64];
    for (int i = 0; i < p->layers; i++) {
        if (i == 0 || p->kind[i] != p->kind[i - 1]) pool_bases(o, x, p->kind[i], base, who);
        const double *omega = p->omega + (size_t)i * p->bits;
        int best = 0;
        double least = HUGE_VAL;
        for (int b = 0; b < p->bits; b++) {
            double price = base[b] + quality * omega[b];
            if (price < least) least = price, best = b;
        }
        int g = who[best], j = (g * p->kinds + p->kind[i]) * p->bits + best;
        total += least;
        gradient[at_prefill(p, g)] += p->prefill[j];
        gradient[at_decode(p, g)] += p->decode[j];
        gradient[at_sum(p)] += p->decode[j];
        gradient[at_memory(p, g)] += (double)p->bytes[j] / o->byte_unit;
        gradient[at_budget(p)] += omega[best];
    }
    return total;
}

static double pool_evaluate(const Pool *o, const double *x, double *gradient) {
    const Problem *p = o->problem;
    memset(gradient, 0, (size_t)multipliers(p) * sizeof(double));
    double bound = pool_master(o, x, gradient) + pool_layers(o, x, gradient);
    if (o->fewest > 1) { /* the floor link stands in for every link multiplier of group 0 */
        if (p->links_in_sums) {
            bound += (o->fewest - 1) * (o->floor_link[0] + sum_price(p, x) * o->floor_link[1]);
            gradient[at_sum(p)] += (o->fewest - 1) * o->floor_link[1];
        }
        bound += x[at_prefill_link(p, 0)] * o->floor_link[0];
        bound += x[at_decode_link(p, 0)] * o->floor_link[1];
        gradient[at_prefill_link(p, 0)] += o->floor_link[0];
        gradient[at_decode_link(p, 0)] += o->floor_link[1];
    }
    for (int g = 0; g < p->groups; g++) {
        double held = p->capacity[g] > 0 ? (double)p->capacity[g] / o->byte_unit : 0;
        bound -= o->lattice->count[g] * x[at_memory(p, g)] * held;
        gradient[at_memory(p, g)] -= o->lattice->count[g] * held;
    }
    if (!isfinite(p->budget)) return bound;
    gradient[at_budget(p)] -= p->budget;
    return bound - x[at_budget(p)] * p->budget;
}

/* ---- dual ascent --------------------------------------------------------------------------- */

typedef struct {
    const Problem *problem;
    Field *field;     /* one of the two is set */
    const Pool *pool;
    double *weight;   /* per multiplier: its weight in the sum of its block; 0 holds it at 0 */
    double *scale;    /* per multiplier: its natural size */
    double deadline;
} Dual;

static double dual_value(const Dual *d, const double *x, double *gradient) {
    return d->field ? field_evaluate(d->field, x, gradient) : pool_evaluate(d->pool, x, gradient);
}

/* Project x onto { x >= 0, sum weight x = total } by bisection on the shift. */
static void project(double *x, const double *weight, int n, double total) {
    double span = total + 1;
    for (int j = 0; j < n; j++)
        if (weight[j] > 0 && fabs(x[j]) / weight[j] + total + 1 > span)
            span = fabs(x[j]) / weight[j] + total + 1;
    double low = -span, high = span;
    for (int step = 0; step < 60; step++) {
        double shift = 0.5 * (low + high), sum = 0;
        for (int j = 0; j < n; j++) {
            double moved = x[j] - shift * weight[j];
            if (weight[j] > 0 && moved > 0) sum += weight[j] * moved;
        }
        if (sum > total) low = shift;
        else high = shift;
    }
    double sum = 0;
    for (int j = 0; j < n; j++) {
        double moved = x[j] - high * weight[j];
        x[j] = weight[j] > 0 && moved > 0 && total > 0 ? moved : 0;
        sum += weight[j] * x[j];
    }
    if (sum > total) /* never spend more than the total: the bound depends on it */
        for (int j = 0; j < n; j++) x[j] *= total / sum;
}

/* The part of direction[0..n) along the simplex: remove its component on the weights. */
static double tangent(double *direction, const double *weight, const double *scale, int n) {
    double along = 0, square = 0, norm = 0;
    for (int j = 0; j < n; j++) along += weight[j] * direction[j], square += weight[j] * weight[j];
    for (int j = 0; j < n; j++) {
        direction[j] = weight[j] > 0 ? direction[j] - weight[j] * along / square : 0;
        norm += direction[j] * direction[j] * scale[j] * scale[j];
    }
    return norm;
}

static double direct(const Dual *d, const double *x, double *direction) {
    int first = 2 * d->problem->groups, second = at_memory(d->problem, 0);
    double norm = tangent(direction, d->weight, d->scale, first);
    norm += tangent(direction + first, d->weight + first, d->scale + first, second - first);
    for (int j = second; j < multipliers(d->problem); j++) {
        if (d->weight[j] <= 0 || (x[j] <= 0 && direction[j] <= 0)) direction[j] = 0;
        norm += direction[j] * direction[j] * d->scale[j] * d->scale[j];
    }
    return norm;
}

static void move(const Dual *d, double *x, const double *direction, double step) {
    const Problem *p = d->problem;
    int n = multipliers(p), first = 2 * p->groups, second = at_memory(p, 0);
    for (int j = 0; j < n; j++) x[j] += step * direction[j] * d->scale[j] * d->scale[j];
    project(x, d->weight, first, p->peak_prefill);
    project(x + first, d->weight + first, second - first, p->peak_decode);
    for (int j = second; j < n; j++) x[j] = x[j] > 0 && d->weight[j] > 0 ? x[j] : 0;
}

/* Deflected projected subgradient steps of Polyak's length towards best * (1 + step), never
 * beyond target (a known plan's value; HUGE_VAL for none). Leaves the best multipliers in x. */
static double ascend(const Dual *d, double *x, const Ascent *s, double target) {
    int n = multipliers(d->problem), bad = 0;
    double best = -HUGE_VAL, length = s->step;
    double here[n], gradient[n], mean[n], direction[n];
    memcpy(here, x, sizeof here);
    memset(mean, 0, sizeof mean);
    for (int it = 0; it < s->iterations && best < target && now() < d->deadline; it++) {
        double value = dual_value(d, here, gradient);
        if (!isfinite(value)) return it == 0 ? value : best;
        if (value > best + 1e-7 * fabs(best)) {
            if (value > best + 1e-4 * fabs(best)) bad = 0;
            best = value;
            memcpy(x, here, sizeof here);
        } else if (++bad >= s->patience) {
            length *= s->shrink, bad = 0;
            if (length < s->smallest_step) break;
            if (s->restart) {
                memcpy(here, x, sizeof here);
                memset(mean, 0, sizeof mean);
                continue;
            }
        }
        for (int j = 0; j < n; j++)
            direction[j] = mean[j] = s->momentum * mean[j] + (1 - s->momentum) * gradient[j];
        double norm = direct(d, here, direction);
        if (norm < 1e-18) break;
        double aim = best + length * fabs(best);
        double step = ((aim < target ? aim : target) - value) / norm;
        move(d, here, direction, step > 0 ? step : 1e-3 * fabs(best) / norm);
    }
    return best;
}

/* Weights and natural sizes. value: a rough size of the objective. */
static void shape(const Dual *d, const Lattice *g, double value) {
    const Problem *p = d->problem;
    int T = p->groups;
    for (int t = 0; t < T; t++) {
        double arrivals = d->pool ? (t == 0 && d->pool->fewest > 1) : g->arrivals[t];
        d->weight[at_prefill(p, t)] = d->weight[at_decode(p, t)] = g->count[t];
        d->weight[at_prefill_link(p, t)] = d->weight[at_decode_link(p, t)] = arrivals;
    }
    d->weight[at_sum(p)] = p->steady ? p->rounds : 0;
    for (int k = 0; k < 2 * T; k++) d->weight[at_memory(p, k)] = d->pool ? k < T : 1;
    d->weight[at_budget(p)] = isfinite(p->budget);
    for (int j = 0; j < multipliers(p); j++)
        d->scale[j] = j < 2 * T             ? p->peak_prefill
                      : j < at_memory(p, 0) ? p->peak_decode
                      : j < at_budget(p)    ? 0.5 * value / p->layers
                                            : value / (p->budget > 1e-3 ? p->budget : 1e-3);
}

static double run(Dual *d, const Lattice *g, double *x, const Ascent *s, int schedules,
                  double target) {
    int n = multipliers(d->problem);
    double weight[n], scale[n], gradient[n], best = -HUGE_VAL;
    d->weight = weight, d->scale = scale;
    shape(d, g, 1);
    move(d, x, x, 0); /* projects whatever the caller starts from */
    double value = dual_value(d, x, gradient);
    if (!isfinite(value)) return value;
    best = value;
    shape(d, g, fabs(value) > 1e-9 ? fabs(value) : 1);
    for (int j = 0; j < schedules && best < target; j++) {
        double found = ascend(d, x, s + j, target);
        if (found > best) best = found;
    }
    return best;
}

/* Improve x and return the lattice bound it proves; +infinity when no plan fits in memory. */
double exact_lattice_bound(const Problem *p, const Lattice *g, double *x, const Ascent *s,
                           int32_t schedules, double target, double seconds) {
    Field field;
    Dual d = {.problem = p, .field = &field, .deadline = now() + seconds};
    if (field_open(&field, p, g)) return -HUGE_VAL;
    double best = run(&d, g, x, s, schedules, target);
    field_close(&field);
    return best;
}

/* The same for the pool. floor_link[2], fewest: see Pool; usable[T]. */
double exact_pool_bound(const Problem *p, const Lattice *g, const int32_t *usable,
                        const double *floor_link, double fewest, double *x, const Ascent *s) {
    Pool pool = {.problem = p, .lattice = g, .byte_unit = mean_layer_bytes(p)};
    pool.usable = (int32_t *)usable, pool.floor_link = (double *)floor_link, pool.fewest = fewest;
    Dual d = {.problem = p, .pool = &pool, .deadline = HUGE_VAL};
    return run(&d, g, x, s, 1, HUGE_VAL);
}

/* The stages that attain the Lagrangian at x: stages[3 V] node, first, end; choice[L] bitwidths.
 * Their memory may be exceeded. Returns how many, 0 when no plan fits. */
int32_t exact_relaxed_plan(const Problem *p, const Lattice *g, const double *x, int32_t *stages,
                           int32_t *choice) {
    Field f;
    int n = 0, v = 0, i = 0;
    if (field_open(&f, p, g)) return 0;
    if (isfinite(field_evaluate(&f, x, NULL)))
        while (v == 0 || i < p->layers) {
            v = g->edge_target[best_edge(&f, v, i)];
            int end = best_end(&f, v, i), k = g->node_class[v];
            stages[3 * n] = v, stages[3 * n + 1] = i, stages[3 * n + 2] = end;
            for (n++; i < end; i++) choice[i] = f.choice[(size_t)k * p->layers + i];
        }
    field_close(&f);
    return n;
}

int32_t exact_abi(void) { return EXACT_ABI; }
