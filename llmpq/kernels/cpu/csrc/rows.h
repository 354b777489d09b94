/* The operators of a step (step.c) that work on each row alone. */
#ifndef LLMPQ_ROWS_H
#define LLMPQ_ROWS_H

#include "step.h"

/* Heads of rows: part of wider ones, or several heads of one tensor by turns. In numbers of a type. */
typedef struct {
    void *data;
    int64_t row, head; /* from one row, and one head of a row, to the next */
} Heads;

typedef struct {
    Norm norm; /* of one head; its x, y and weight are those of the first */
    Heads x, y;
    int64_t heads, weight_head; /* from the weight of one head to that of the next; 0: all the same */
} NormRows;

typedef struct {
    void *x;          /* [rows, columns], becomes x + factor more */
    const void *more; /* null: x becomes factor x */
    int64_t columns;
    float factor;
} AddRows;

typedef struct {
    Heads x;
    const void *cos, *sin; /* [rows, turned] of `table_type`; float32 leaves products unrounded */
    int64_t heads, turned; /* the first `turned` features of a head are rotated */
    int32_t pairs;         /* each feature with its neighbour, not with the one half of them away */
    int32_t table_type;
} RotateRows;

typedef struct {
    const void *gate, *up; /* up may be null */
    void *y;               /* [rows, columns] by a stride */
    int64_t gate_row, up_row, y_row, columns;
    float alpha, limit; /* of CLAMPED, whose `gate` has gate and up in turn */
    int32_t activation;
} GateRows;

typedef struct {
    Heads x, y;
    int64_t heads, columns; /* of each head: y becomes x */
} CopyRows;

void norm_row_heads(const NormRows *o, int64_t m);
void add_row(const AddRows *o, int64_t m, int type);
void rotate_row(const RotateRows *o, int64_t m, int type);
void gate_row(const GateRows *o, int64_t m, int type);
void copy_row(const CopyRows *o, int64_t m, int type);

#endif
