/* Dual ascent, on the lattice or on the noncontiguous relaxation, in which every layer chooses its
 * own device and bitwidth. Any multipliers within their totals prove a bound. */
#include "exact.h"

#include <string.h>

/* ---- the noncontiguous relaxation: every layer chooses its own device ---------------------- */

typedef struct {
    const Problem *problem;
    const Lattice *lattice;
    double byte_unit;
    const int32_t *usable;    /* [T] the group can hold some layer */
    const double *floor_link; /* [2] a send that every plan makes at least fewest - 1 times */
    double fewest;            /* devices that every plan uses at least */
} Relaxation;

static double relaxed_master(const Relaxation *r, const double *x, double *gradient) {
    const Problem *p = r->problem;
    int T = p->groups, best = -1;
    double least = HUGE_VAL;
    for (int g = 0; g < T; g++) {
        int k = T + g;
        if (p->capacity[k] < 0) continue;
        double held = ((double)p->capacity[g] - (double)p->capacity[k]) / r->byte_unit;
        double computed = 1 - p->split[g];
        double price = computed * (1 + x[at_prefill(p, g)]) * p->master_prefill[k] +
                       computed * (sum_price(p, x) + x[at_decode(p, g)]) * p->master_decode[k] +
                       x[at_memory(p, g)] * held;
        if (price < least) least = price, best = g;
    }
    if (best < 0) return HUGE_VAL;
    int k = T + best;
    double computed = 1 - p->split[best];
    gradient[at_prefill(p, best)] += computed * p->master_prefill[k];
    gradient[at_decode(p, best)] += computed * p->master_decode[k];
    gradient[at_sum(p)] += computed * p->master_decode[k];
    gradient[at_memory(p, best)] +=
        ((double)p->capacity[best] - (double)p->capacity[k]) / r->byte_unit;
    return least;
}

static void relaxed_bases(const Relaxation *r, const double *x, int layer, double *base, int *who) {
    const Problem *p = r->problem;
    for (int b = 0; b < p->bits; b++) {
        base[b] = HUGE_VAL, who[b] = 0;
        for (int g = 0; g < p->groups; g++) {
            if (!r->usable[g] || !may_run(p, g, layer, b)) continue;
            Parts parts = layer_parts(p, x, g, p->kind[layer], b, r->byte_unit);
            double price = parts_price(p, x, g, parts, r->byte_unit);
            if (price < base[b]) base[b] = price, who[b] = g;
        }
    }
}

static double relaxed_layers(const Relaxation *r, const double *x, double *gradient) {
    const Problem *p = r->problem;
    double total = 0, quality = p->theta + x[at_budget(p)], base[64];
    int who[64];
    for (int i = 0; i < p->layers; i++) {
        if (i == 0 || p->allowed || p->kind[i] != p->kind[i - 1]) relaxed_bases(r, x, i, base, who);
        const double *omega = p->omega + (size_t)i * p->bits;
        int best = 0;
        double least = HUGE_VAL;
        for (int b = 0; b < p->bits; b++) {
            double price = base[b] + quality * omega[b];
            if (price < least) least = price, best = b;
        }
        int g = who[best];
        Parts parts = layer_parts(p, x, g, p->kind[i], best, r->byte_unit);
        total += least;
        gradient[at_prefill(p, g)] += parts.prefill;
        gradient[at_decode(p, g)] += parts.decode;
        gradient[at_sum(p)] += parts.decode;
        gradient[at_memory(p, g)] += parts.bytes / r->byte_unit;
        gradient[at_host(p, g)] += parts.host / r->byte_unit;
        gradient[at_budget(p)] += omega[best];
    }
    return total;
}

static double relaxed_evaluate(void *context, const double *x, double *gradient) {
    const Relaxation *r = context;
    const Problem *p = r->problem;
    memset(gradient, 0, (size_t)multipliers(p) * sizeof(double));
    double bound = relaxed_master(r, x, gradient) + relaxed_layers(r, x, gradient);
    if (r->fewest > 1) { /* the floor link stands in for every link multiplier of group 0 */
        if (p->links_in_sums) {
            bound += (r->fewest - 1) * (r->floor_link[0] + sum_price(p, x) * r->floor_link[1]);
            gradient[at_sum(p)] += (r->fewest - 1) * r->floor_link[1];
        }
        bound += x[at_prefill_link(p, 0)] * r->floor_link[0];
        bound += x[at_decode_link(p, 0)] * r->floor_link[1];
        gradient[at_prefill_link(p, 0)] += r->floor_link[0];
        gradient[at_decode_link(p, 0)] += r->floor_link[1];
    }
    for (int g = 0; g < p->groups; g++) {
        double held = p->capacity[g] > 0 ? (double)p->capacity[g] / r->byte_unit : 0;
        bound -= r->lattice->count[g] * x[at_memory(p, g)] * held;
        gradient[at_memory(p, g)] -= r->lattice->count[g] * held;
        double host = r->lattice->count[g] * ((double)p->host_capacity[g] / r->byte_unit);
        bound -= x[at_host(p, g)] * host;
        gradient[at_host(p, g)] -= host;
    }
    if (!isfinite(p->budget)) return bound;
    gradient[at_budget(p)] -= p->budget;
    return bound - x[at_budget(p)] * p->budget;
}

/* ---- dual ascent --------------------------------------------------------------------------- */

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

/* The multipliers of the largest prefill time: stages, links, and the floor at the end. */
static void gather_prefill(const Problem *p, const double *x, double *block) {
    memcpy(block, x, 2 * (size_t)p->groups * sizeof *x);
    block[2 * p->groups] = x[at_floor(p)];
}
static void scatter_prefill(const Problem *p, const double *block, double *x) {
    memcpy(x, block, 2 * (size_t)p->groups * sizeof *x);
    x[at_floor(p)] = block[2 * p->groups];
}

static double direct(const Dual *d, const double *x, double *direction) {
    const Problem *p = d->problem;
    int first = 2 * p->groups, second = at_memory(p, 0);
    double block[first + 1], weight[first + 1], scale[first + 1];
    gather_prefill(p, direction, block);
    gather_prefill(p, d->weight, weight), gather_prefill(p, d->scale, scale);
    double norm = tangent(block, weight, scale, first + 1);
    scatter_prefill(p, block, direction);
    norm += tangent(direction + first, d->weight + first, d->scale + first, second - first);
    for (int j = second; j <= at_budget(p); j++) {
        if (d->weight[j] <= 0 || (x[j] <= 0 && direction[j] <= 0)) direction[j] = 0;
        norm += direction[j] * direction[j] * d->scale[j] * d->scale[j];
    }
    return norm;
}

static void move(const Dual *d, double *x, const double *direction, double step) {
    const Problem *p = d->problem;
    int n = multipliers(p), first = 2 * p->groups, second = at_memory(p, 0);
    double block[first + 1], weight[first + 1];
    for (int j = 0; j < n; j++) x[j] += step * direction[j] * d->scale[j] * d->scale[j];
    gather_prefill(p, x, block), gather_prefill(p, d->weight, weight);
    project(block, weight, first + 1, p->peak_prefill);
    scatter_prefill(p, block, x);
    project(x + first, d->weight + first, second - first, p->peak_decode);
    for (int j = second; j <= at_budget(p); j++) x[j] = x[j] > 0 && d->weight[j] > 0 ? x[j] : 0;
}

/* Deflected projected subgradient steps of Polyak's length towards best * (1 + step), never
 * beyond target (a known plan's value; HUGE_VAL for none). Leaves the best multipliers in x. */
static double ascend(const Dual *d, double *x, const Ascent *s, double target) {
    int n = multipliers(d->problem), bad = 0;
    double best = -1e300, length = s->step; /* finite: best + share * |best| is compared */
    double here[n], gradient[n], mean[n], direction[n];
    memcpy(here, x, sizeof here);
    memset(mean, 0, sizeof mean);
    for (int it = 0; it < s->iterations && best < target && now() < d->deadline; it++) {
        double value = d->evaluate(d->context, here, gradient);
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
static void shape(const Dual *d, double value) {
    const Problem *p = d->problem;
    const Lattice *g = d->lattice;
    int T = p->groups;
    for (int t = 0; t < T; t++) {
        double arrivals = d->relaxed_links < 0 ? g->arrivals[t] : t == 0 ? d->relaxed_links : 0;
        d->weight[at_prefill(p, t)] = d->weight[at_decode(p, t)] = g->count[t];
        d->weight[at_prefill_link(p, t)] = d->weight[at_decode_link(p, t)] = arrivals;
    }
    d->weight[at_sum(p)] = p->steady ? p->rounds : 0;
    for (int k = 0; k < 2 * T; k++) d->weight[at_memory(p, k)] = k < d->memory;
    for (int t = 0; t < T; t++) d->weight[at_host(p, t)] = d->memory > 0 && p->host_capacity[t] > 0;
    d->weight[at_budget(p)] = isfinite(p->budget);
    d->weight[at_floor(p)] = d->floor;
    for (int j = 0; j < multipliers(p); j++)
        d->scale[j] = j < 2 * T || j == at_floor(p) ? p->peak_prefill
                      : j < at_memory(p, 0) ? p->peak_decode
                      : j < at_budget(p)    ? 0.5 * value / p->layers
                                            : value / (p->budget > 1e-3 ? p->budget : 1e-3);
}

double dual_ascend(Dual *d, double *x, const Ascent *s, int schedules, double target) {
    int n = multipliers(d->problem);
    double weight[n], scale[n], gradient[n], best = -HUGE_VAL;
    d->weight = weight, d->scale = scale;
    shape(d, 1);
    move(d, x, x, 0); /* projects whatever the caller starts from */
    double value = d->evaluate(d->context, x, gradient);
    if (!isfinite(value)) return value;
    best = value;
    shape(d, fabs(value) > 1e-9 ? fabs(value) : 1);
    for (int j = 0; j < schedules && best < target; j++) {
        double found = ascend(d, x, s + j, target);
        if (found > best) best = found;
    }
    return best;
}

static double lattice_evaluate(void *context, const double *x, double *gradient) {
    return tables_evaluate(context, x, gradient);
}

/* Improve x and return the lattice bound it proves; +infinity when no plan fits in memory. */
double exact_lattice_bound(const Problem *p, const Lattice *g, double *x, const Ascent *s,
                           int32_t schedules, double target, double seconds) {
    LagrangianTables tables;
    Dual d = {.problem = p, .lattice = g, .evaluate = lattice_evaluate, .context = &tables};
    d.relaxed_links = -1, d.memory = 2 * p->groups, d.deadline = now() + seconds;
    if (tables_open(&tables, p, g)) return -HUGE_VAL;
    double best = dual_ascend(&d, x, s, schedules, target);
    tables_close(&tables);
    return best;
}

/* The same without contiguity. floor_link[2], fewest: see Relaxation; usable[T]. */
double exact_noncontiguous_bound(const Problem *p, const Lattice *g, const int32_t *usable,
                        const double *floor_link, double fewest, double *x, const Ascent *s) {
    Relaxation relaxation = {.problem = p, .lattice = g, .byte_unit = mean_layer_bytes(p)};
    relaxation.usable = usable, relaxation.floor_link = floor_link, relaxation.fewest = fewest;
    Dual d = {.problem = p, .lattice = g, .evaluate = relaxed_evaluate, .context = &relaxation};
    d.relaxed_links = fewest > 1, d.memory = p->groups, d.deadline = HUGE_VAL;
    return dual_ascend(&d, x, s, 1, HUGE_VAL);
}
