/* Experts in a step (step.c).
 *
 * A router chooses experts for each row. Every choice has a slot; slots are ordered by expert, so that
 * the rows of an expert lie side by side and its weights are read once. */
#ifndef LLMPQ_EXPERTS_H
#define LLMPQ_EXPERTS_H

#include "rows.h"

enum { MOST_EXPERTS = 1024, MOST_SLOTS = 4096 };

typedef struct {
    const void *logits;      /* [rows, experts] of `type` */
    const float *correction; /* [experts], added to what decides the choice; may be null */
    int32_t *chosen;         /* [rows, count] */
    float *weight;           /* [rows, count] */
    int64_t experts, count;
    float factor; /* of the weights */
    float jitter; /* of a sparse mixer */
    int32_t score, normalizes, type;
    int32_t rounds; /* the type to which weights are rounded */
} RouteRows;

/* The slots of a step: each thread has its own copy. */
typedef struct {
    int64_t count, groups;
    int32_t expert[MOST_EXPERTS], first[MOST_EXPERTS + 1]; /* of each group */
    int32_t row[MOST_SLOTS], group[MOST_SLOTS];        /* of each slot */
    int32_t of_choice[MOST_SLOTS];                     /* [rows, count]; -1: not computed here */
} Slots;

typedef struct {
    Prepared prepared;
    int32_t kernel;
} PrepareRows;

typedef struct {
    const RouteRows *route;
    const void *x; /* [rows, columns] */
    void *y;       /* [slots, columns]; a single row is the same for all its experts and written once */
    int64_t columns;
    const PrepareRows *prepared; /* of y; may be null */
    const uint8_t *here;         /* [experts], whether they are computed here; null: all are */
} GatherRows;

typedef struct {
    GateRows gate;
    const PrepareRows *prepared; /* of its y; may be null */
} ActivateSlots;

typedef struct {
    const Weight *const *weights; /* of each expert */
    const void *const *biases;    /* likewise; null, or each may be null */
    const void *x;
    void *y; /* [slots, rows of a weight] */
    const PrepareRows *prepared;
    int64_t few_limit;
    int32_t kernel, in_float;
    int32_t gathered; /* whether x is that of GatherRows */
} ExpertProducts;

typedef struct {
    const void *x;           /* [slots, columns] */
    const float *weight;     /* [rows, count] */
    void *y;                 /* [rows, columns] */
    const void *shared;      /* [rows, columns], added; may be null */
    const void *shared_gate; /* [rows], whose sigmoid multiplies it; may be null */
    const void *apart;       /* [rows, columns], the sum over experts of other threads; may be null */
    int64_t columns, count;
} CombineRows;

void route_row(const RouteRows *o, int64_t m);
void combine_row(const CombineRows *o, const Slots *s, int64_t m, int type);
void order_slots(Slots *s, const RouteRows *o, const uint8_t *here, int64_t rows);
PrepareRows of_slots(const PrepareRows *o, int64_t first);

#endif
