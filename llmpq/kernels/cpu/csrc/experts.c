/* Routing of rows to experts, and the sum of what a row's experts return. */
#include "experts.h"
#include "lanes.h"
#include <math.h>

#ifdef __AVX2__
enum { SOFTMAX, SIGMOID, SPARSE_MIXER };

INLINE vf sigmoid(vf x) {
    vf e = exponential(-magnitude(x));
    return either(x < 0, e, e * 0 + 1) / (1 + e);
}

/* The first of the largest numbers that are not taken; of numbers that are none, the first. */
static int64_t best_of(const float *key, const uint8_t *taken, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || key[i] > key[best])) best = i;
    return best;
}

/* The weight of an expert in a softmax over those not taken that are close to it (Phi-3.5-MoE). */
static float mixed(const RouteRows *o, const float *logit, const uint8_t *taken, int64_t best) {
    float most = logit[best], sum = 0;
    for (int64_t i = 0; i < o->experts; i++) {
        float size = fabsf(logit[i]) > most ? fabsf(logit[i]) : most;
        if (!taken[i] && !((most - logit[i]) / size > 2 * o->jitter))
            sum += exponential((vf){0} + (logit[i] - most))[0];
    }
    return 1 / sum;
}

static void scores_of(const RouteRows *o, const float *logit, float *score) {
    float most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < o->experts; i++) most = logit[i] > most ? logit[i] : most;
    for (int64_t i = 0; i < o->experts; i += LANES) {
        vf x = load_lanes(logit, i, TYPE_F32);
        vf y = o->score == SIGMOID ? sigmoid(x) : exponential(x - most);
        memcpy(score + i, &y, sizeof y);
    }
    if (o->score == SIGMOID) return;
    for (int64_t i = 0; i < o->experts; i++) sum += score[i];
    for (int64_t i = 0; i < o->experts; i++) score[i] /= sum;
}

void route_row(const RouteRows *o, int64_t m) {
    float logit[MOST_EXPERTS], score[MOST_EXPERTS], key[MOST_EXPERTS], sum = 0;
    uint8_t taken[MOST_EXPERTS] = {0};
    for (int64_t i = 0; i < o->experts; i++) logit[i] = load_one(o->logits, m * o->experts + i, o->type);
    for (int64_t i = o->experts; i % LANES; i++) logit[i] = 0;
    scores_of(o, logit, score);
    for (int64_t i = 0; i < o->experts; i++)
        key[i] = o->correction ? score[i] + o->correction[i] : logit[i];
    float *weight = o->weight + m * o->count;
    for (int64_t j = 0; j < o->count; j++) {
        int64_t best = best_of(key, taken, o->experts);
        weight[j] = o->score == SPARSE_MIXER ? mixed(o, logit, taken, best) : score[best];
        sum += weight[j];
        taken[best] = 1;
        o->chosen[m * o->count + j] = (int32_t)best;
    }
    for (int64_t j = 0; j < o->count; j++) {
        weight[j] *= o->normalizes ? o->factor / sum : o->factor;
        if (o->rounds != TYPE_F32) weight[j] = rounded_one(weight[j], o->rounds);
    }
}

/* Slots by expert, those of an expert by row. An expert of a number that no expert has is none. */
void order_slots(Slots *s, const RouteRows *o, const uint8_t *here, int64_t rows) {
    int32_t next[MOST_EXPERTS] = {0};
    int64_t choices = rows * o->count;
    s->count = s->groups = 0;
    for (int64_t i = 0; i < choices; i++) {
        int32_t expert = o->chosen[i];
        int is_here = expert >= 0 && expert < o->experts && (!here || here[expert]);
        s->of_choice[i] = is_here ? 0 : -1;
        if (is_here) next[expert]++, s->count++;
    }
    for (int32_t expert = 0, first = 0; expert < o->experts; expert++) {
        int32_t count = next[expert];
        next[expert] = first;
        if (!count) continue;
        s->expert[s->groups] = expert, s->first[s->groups] = first;
        for (int32_t i = first; i < first + count; i++) s->group[i] = (int32_t)s->groups;
        first += count, s->groups++;
    }
    s->first[s->groups] = (int32_t)s->count;
    for (int64_t i = 0; i < choices; i++) {
        if (s->of_choice[i] < 0) continue;
        int32_t slot = next[o->chosen[i]]++;
        s->of_choice[i] = slot, s->row[slot] = (int32_t)(i / o->count);
    }
}

/* What slots from `first` on need, as if they were all rows. */
PrepareRows of_slots(const PrepareRows *o, int64_t first) {
    PrepareRows own = *o;
    Prepared *q = &own.prepared;
    int64_t columns = q->columns;
    q->x = (const char *)q->x + first * columns * (q->type == TYPE_F32 ? 4 : 2);
    if (q->sums) q->sums += first * (columns / q->block);
    if (q->codes) q->codes += first * columns * (q->sums ? 1 : CODE_BYTES);
    if (q->scale) q->scale += q->sums ? first * (columns / q->block) : first;
    if (q->sum) q->sum += first, q->start += first, q->end += first;
    return own;
}

INLINE void combine_typed(const CombineRows *o, const Slots *s, int64_t m, const int type) {
    const int32_t *slot = s->of_choice + m * o->count;
    const float *weight = o->weight + m * o->count;
    vf gate = {0};
    if (o->shared_gate) {
        gate = sigmoid(gate + load_one(o->shared_gate, m, type));
        gate = typed_value(typed_bits(gate, type), type);
    }
    for (int64_t k = 0; k < o->columns; k += LANES) {
        vf sum = {0};
        if (o->apart) sum = load_lanes(o->apart, m * o->columns + k, type);
        for (int64_t j = 0; j < o->count; j++)
            if (slot[j] >= 0) sum += weight[j] * load_lanes(o->x, slot[j] * o->columns + k, type);
        if (o->shared) {
            vf shared = load_lanes(o->shared, m * o->columns + k, type);
            if (o->shared_gate) shared = typed_value(typed_bits(gate * shared, type), type);
            sum = typed_value(typed_bits(sum, type), type) + shared;
        }
        store_typed(o->y, m * o->columns + k, LANES, typed_bits(sum, type), type);
    }
}

void combine_row(const CombineRows *o, const Slots *s, int64_t m, int type) {
    if (type == TYPE_F32) combine_typed(o, s, m, TYPE_F32);
    else if (type == TYPE_F16) combine_typed(o, s, m, TYPE_F16);
    else combine_typed(o, s, m, TYPE_BF16);
}
#endif
