/* What a step (step.c) shares with the kernels whose parts it spreads over threads itself. */
#ifndef LLMPQ_STEP_H
#define LLMPQ_STEP_H

#include "kernels.h"

typedef struct {
    const void *query;                   /* [tokens, heads, dim] by strides, of `type` */
    void *out;                           /* [tokens, heads, dim], of `type` */
    const void *new_key, *new_value;     /* [tokens, kv_heads, dim] by strides, of `type` */
    void *keys, *values;                 /* [blocks, kv_heads, block, dim] by strides, of `stored` */
    void *key_scales, *value_scales;     /* bf16 [blocks, kv_heads, block], for codes alone */
    const int32_t *tables;               /* the block tables of all sequences */
    const int64_t *starts, *lengths;     /* of each token: its table in `tables`; its position + 1 */
    const int64_t *chosen;               /* tokens that attend one by one; NULL for all */
    const int64_t *runs;                 /* [run_count, 2]: first of consecutive tokens, and how many */
    int64_t count, run_count, kv_heads, group, dim, block_bits; /* a block has 2^block_bits tokens */
    int64_t query_token, query_head, key_token, key_head, value_token, value_head; /* in numbers */
    int64_t block_stride, head_stride;   /* in numbers */
    int64_t window;                      /* tokens a query sees, 0 for all */
    int64_t chunk;                       /* it sees those of its chunk of this size, 0 for all */
    const float *bias;                   /* [heads, positions] by a stride, added to the scores */
    int64_t bias_head;                   /* in numbers */
    const float *sinks;                  /* [heads], one more score each, without a value */
    float scaling, softcap;              /* scores are capped to +-softcap, 0 for no cap */
    int32_t type, stored, threads, stores; /* stores: whether new keys and values are put down */
} Attention;

typedef struct {
    const void *x;             /* [rows, columns] of `type` */
    const void *weight, *bias; /* [columns] of `weight_type`; null for none */
    void *y;
    int64_t rows, columns;
    float epsilon;
    int32_t type, weight_type;
    int32_t centers; /* whether the mean is subtracted first, as in a layer norm */
    int32_t rounds;  /* whether rows are rounded to their type before the weight multiplies them */
    int32_t threads;
} Norm;

/* Bytes of a code of x for weights of 8 bits: without VNNI they are multiplied as 16-bit numbers. */
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
enum { CODE_BYTES = 1 };
#else
enum { CODE_BYTES = 2 };
#endif

/* What products by weights with codes need of x [rows, columns], made row by row. */
typedef struct {
    const void *x;
    int64_t columns;
    int64_t block;   /* 3 and 4 bits: columns of a sum */
    float *sums;     /* 3 and 4 bits: [blocks, rows] of x over each block of columns */
    int8_t *codes;   /* x at 8 bits: [rows, columns], CODE_BYTES each; 3 and 4 bits: bytes,
                      * [blocks, rows, block] */
    float *scale;    /* [rows]; 3 and 4 bits: [blocks, rows] */
    int32_t *sum;    /* [rows] of the codes */
    int64_t *start;  /* [rows] where a row's outliers start */
    int64_t *end;    /* [rows] and end */
    int32_t *column; /* of each outlier */
    float *value;    /* of each outlier */
    int64_t *used;   /* of the places for outliers, by the rows of a step so far */
    float threshold;
    int32_t type;    /* of x */
    int32_t bits;    /* of the weight, which decide the order of the codes */
} Prepared;

void store_part(void *attention, int64_t item);
/* The pieces in which single tokens read long sequences. */
typedef struct {
    int64_t *first; /* [tokens + 1], of the pieces of each token; null: all are short */
    int32_t *done;  /* [tokens, kv_heads], pieces that are finished */
    float *partial; /* [pieces, heads, dim + 2] */
} Pieces;

void cut_pieces(Pieces *pieces, const Attention *a, int64_t values);
int64_t attention_items(const Attention *a, const Pieces *pieces);
void attention_part(const Attention *a, const Pieces *pieces, int64_t item);
void norm_rows(const Norm *n, int64_t first, int64_t end);

void plain_part(const Product *p, int out, int64_t item);
void dense_part(const Product *p, int64_t item);

void bf16_sums(const Prepared *q, int64_t rows, int64_t m);
void bf16_part(const Product *p, const Prepared *q, int64_t few_limit, int64_t panel);

void float_sums(const Prepared *q, int64_t rows, int64_t m);
int64_t float_parts(const Product *p);
void float_part(const Product *p, const Prepared *q, int type, int64_t item);

void int8_scan(const Prepared *q, int64_t m);
void int8_quantize(const Prepared *q, int64_t m);
void block_codes(const Prepared *q, int64_t rows, int64_t m);
void packed_int8_part(const Product *p, const Prepared *q, int64_t panel);

/* LLM.int8(): columns of x that hold outliers, when they are few. Many rows share their decoding. */
enum { MOST_SHARED = 64 };
typedef struct {
    int32_t column[MOST_SHARED];
    int32_t count;  /* 0: every row decodes its own */
    uint8_t *place; /* [columns], where each is among these */
} Shared;

void share_columns(Shared *shared, const Prepared *q, int64_t rows);
void int8_part(const Product *p, const Prepared *q, const Shared *shared, int64_t panel);

#endif
