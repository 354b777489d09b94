/* Continuous batching of one engine, iteration by iteration; native.py mirrors the two structs.
 *
 * Iterations with an unchanged set of decoding sequences are advanced in closed form: every sequence
 * grows by one token an iteration, so their seconds are an arithmetic series. tests/multillm has the
 * same rules one iteration at a time.
 *
 * Legend: n requests, B sequences of an iteration, S their total length, s the longest of them.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define ENGINE_ABI 1
#define POINTS 512
enum { ENGINE_DONE = 0, ENGINE_NO_MEMORY = 1, ENGINE_TOO_LONG = 2 };

/* Limits and seconds of an engine. */
typedef struct {
    int32_t mixed;          /* steps of decode tokens and chunks of prompts; else iterations of one phase */
    int32_t max_sequences;
    int64_t token_budget;   /* mixed: tokens of a step; else padded tokens of a prefill iteration */
    int64_t num_blocks, block_size, watermark_blocks;
    const double *prefill;  /* [max_sequences + 1, 2] weights of 1 and B s */
    const double *decode;   /* [max_sequences + 1, 3] weights of 1, S and B s */
    const double *packed;   /* [token_budget + 1] mixed: seconds of a step by its tokens */
    double attention;       /* mixed: seconds of a chunk [f, f + k) over (f + k)^2 - f^2 */
    double flops_token, flops_key;  /* of a decoded token, and of each key that it attends to */
} Engine;

/* Requests of one engine, and what became of them. */
typedef struct {
    int64_t count, order_count;
    const int64_t *order;    /* [order_count] requests by the time when they become ready */
    const double *ready;     /* [n] seconds */
    const int64_t *prompt;   /* [n] tokens to prefill */
    const int64_t *answer;   /* [n] tokens to generate, at least 1 */
    const int64_t *next;     /* [n] request that becomes ready when this one finishes, or -1 */
    const double *work;      /* [n] operations that the first prefill of a request counts */
    double start_s, end_s;   /* no iteration begins at or after the end */
    double *finish;          /* [n] seconds; left as it is where a request does not finish */
    int64_t *made;           /* [n] tokens generated */
    double *curve;           /* [POINTS, 3] time, operations and busy seconds so far */
    int64_t points, iterations, preemptions;
} Requests;

typedef struct {
    int64_t request;
    int64_t length;    /* prompt and generated tokens */
    int64_t computed;  /* of them with keys and values */
    int64_t blocks;
} Sequence;

typedef struct {
    const Engine *e;
    Requests *q;
    Sequence *running;
    int64_t count;
    int64_t *waiting, waiting_first, waiting_count;  /* ring of n places */
    int64_t *released, released_first, released_count;
    double *released_s;
    int64_t arrived;    /* of order */
    char *is_prefilled;
    int64_t free_blocks;
    double now, work, busy;
    int64_t stride, skipped;  /* of the curve */
} State;

static int64_t blocks_of(const Engine *e, int64_t tokens) {
    return (tokens + e->block_size - 1) / e->block_size;
}

static void mark(State *s) {
    Requests *q = s->q;
    if (++s->skipped < s->stride) return;
    s->skipped = 0;
    if (q->points == POINTS) {
        for (int64_t i = 0; i < POINTS / 2; i++)
            for (int k = 0; k < 3; k++) q->curve[3 * i + k] = q->curve[6 * i + k];
        q->points = POINTS / 2;
        s->stride *= 2;
    }
    double *point = q->curve + 3 * q->points++;
    point[0] = s->now, point[1] = s->work, point[2] = s->busy;
}

static void spend(State *s, double seconds) {
    s->now += seconds;
    s->busy += seconds;
}

static void push_back(State *s, int64_t request) {
    s->waiting[(s->waiting_first + s->waiting_count++) % s->q->count] = request;
}

static int64_t front(const State *s) { return s->waiting[s->waiting_first]; }

static void pop_front(State *s) {
    s->waiting_first = (s->waiting_first + 1) % s->q->count;
    s->waiting_count--;
}

static double next_arrival(const State *s) {
    const Requests *q = s->q;
    double found = INFINITY;
    if (s->arrived < q->order_count) found = q->ready[q->order[s->arrived]];
    if (s->released_first < s->released_count && s->released_s[s->released_first] < found)
        found = s->released_s[s->released_first];
    return found;
}

/* Move all requests that are ready into the queue, first come first. */
static void arrive(State *s) {
    const Requests *q = s->q;
    while (next_arrival(s) <= s->now) {
        double own = s->arrived < q->order_count ? q->ready[q->order[s->arrived]] : INFINITY;
        if (s->released_first < s->released_count && s->released_s[s->released_first] < own)
            push_back(s, s->released[s->released_first++]);
        else
            push_back(s, q->order[s->arrived++]);
    }
}

static void finish(State *s, const Sequence *one) {
    Requests *q = s->q;
    int64_t after = q->next[one->request];
    q->finish[one->request] = s->now;
    s->free_blocks += one->blocks;
    if (after >= 0) {
        s->released[s->released_count] = after;
        s->released_s[s->released_count++] = s->now;
    }
}

/* Remove the sequences that have their whole answer. */
static void drop_finished(State *s) {
    int64_t kept = 0;
    for (int64_t i = 0; i < s->count; i++) {
        Sequence *one = s->running + i;
        if (s->q->made[one->request] == s->q->answer[one->request]) finish(s, one);
        else s->running[kept++] = *one;
    }
    s->count = kept;
}

/* The sequence admitted last gives its blocks back and is prefilled anew, with its tokens. */
static void preempt_last(State *s) {
    const Sequence *last = s->running + --s->count;
    s->free_blocks += last->blocks;
    s->waiting_first = (s->waiting_first + s->q->count - 1) % s->q->count;
    s->waiting[s->waiting_first] = last->request;
    s->waiting_count++;
    s->q->preemptions++;
}

static int fits(const State *s, int64_t length) {
    int64_t left = s->free_blocks - blocks_of(s->e, length);
    return left >= (s->count ? s->e->watermark_blocks : 0);
}

static Sequence *admit(State *s, int64_t length) {
    Sequence *one = s->running + s->count++;
    one->request = front(s);
    one->length = length;
    one->computed = 0;
    one->blocks = blocks_of(s->e, length);
    s->free_blocks -= one->blocks;
    pop_front(s);
    return one;
}

/* A sequence whose tokens are all computed makes one more. */
static void make_token(State *s, Sequence *one) {
    const Engine *e = s->e;
    if (!s->is_prefilled[one->request]) s->work += s->q->work[one->request];
    else s->work += e->flops_token + e->flops_key * (double)one->length;
    s->is_prefilled[one->request] = 1;
    one->length++;
    s->q->made[one->request]++;
}

/* One iteration of waiting prompts, all padded to the longest; returns whether any was admitted. */
static int prefill_iteration(State *s) {
    const Engine *e = s->e;
    Requests *q = s->q;
    int64_t first = s->count, longest = 0;
    while (s->waiting_count && s->count < e->max_sequences) {
        int64_t length = q->prompt[front(s)] + q->made[front(s)];
        int64_t most = length > longest ? length : longest, rows = s->count - first + 1;
        if ((rows > 1 && rows * most > e->token_budget) || !fits(s, length)) break;
        admit(s, length);
        longest = most;
    }
    int64_t rows = s->count - first;
    if (!rows) return 0;
    const double *w = e->prefill + 2 * rows;
    spend(s, w[0] + w[1] * (double)(rows * longest));
    for (int64_t i = first; i < s->count; i++) {
        Sequence *one = s->running + i;
        one->computed = one->length;
        make_token(s, one);
    }
    q->iterations++;
    drop_finished(s);
    mark(s);
    return 1;
}

static double decode_s(const Engine *e, int64_t rows, double total, double longest) {
    const double *w = e->decode + 3 * rows;
    return w[0] + w[1] * total + w[2] * (double)rows * longest;
}

/* Blocks that all sequences need in addition for their next k tokens. */
static int64_t blocks_ahead(const State *s, int64_t k) {
    int64_t needed = 0;
    for (int64_t i = 0; i < s->count; i++)
        needed += blocks_of(s->e, s->running[i].computed + k) - s->running[i].blocks;
    return needed;
}

/* Iterations that all decoding sequences make alike; preempts when there is no block for one. */
static void decode_run(State *s) {
    const Engine *e = s->e;
    Requests *q = s->q;
    int64_t most = INT64_MAX, total = 0, longest = 0, before = s->count;
    while (s->count > 1 && blocks_ahead(s, 1) > s->free_blocks) preempt_last(s);
    for (int64_t i = 0; i < s->count; i++) {
        const Sequence *one = s->running + i;
        int64_t left = q->answer[one->request] - q->made[one->request];
        most = left < most ? left : most;
        total += one->length;
        longest = one->length > longest ? one->length : longest;
    }
    /* A preempted sequence may be admitted again after one iteration. */
    int64_t low = 1, high = s->count < before ? 1 : most;
    while (low < high) {  /* the last k for which there are blocks */
        int64_t middle = low + (high - low + 1) / 2;
        if (blocks_ahead(s, middle) <= s->free_blocks) low = middle;
        else high = middle - 1;
    }
    most = low;
    double rows = (double)s->count, first = decode_s(e, s->count, (double)total, (double)longest);
    double more = (e->decode[3 * s->count + 1] + e->decode[3 * s->count + 2]) * rows;
    /* A queue that could not be admitted waits for the end of a sequence anyway. */
    double until = s->waiting_count ? q->end_s : fmin(q->end_s, next_arrival(s));
    low = 1, high = most;
    while (low < high) {  /* the first k that reaches the moment */
        int64_t middle = low + (high - low) / 2;
        double k = (double)middle;
        if (s->now + k * first + more * k * (k - 1) / 2 >= until) high = middle;
        else low = middle + 1;
    }
    double k = (double)low;
    spend(s, k * first + more * k * (k - 1) / 2);
    s->work += k * rows * e->flops_token;
    s->work += e->flops_key * (k * (double)total + rows * k * (k - 1) / 2);
    for (int64_t i = 0; i < s->count; i++) {
        Sequence *one = s->running + i;
        q->made[one->request] += low;
        one->length += low;
        one->computed += low;
        int64_t blocks = blocks_of(e, one->computed);
        s->free_blocks -= blocks - one->blocks;
        one->blocks = blocks;
    }
    q->iterations += low;
    drop_finished(s);
    mark(s);
}

/* Give a sequence the blocks of its next tokens; preempts later ones. Returns whether it has them. */
static int grow(State *s, int64_t place, int64_t count) {
    Sequence *one = s->running + place;
    int64_t blocks = blocks_of(s->e, one->computed + count);
    while (blocks - one->blocks > s->free_blocks && s->count > place + 1) preempt_last(s);
    if (blocks - one->blocks > s->free_blocks) return 0;
    if (blocks > one->blocks) s->free_blocks -= blocks - one->blocks, one->blocks = blocks;
    return 1;
}

static int is_decoding(const State *s) {
    for (int64_t i = 0; i < s->count; i++) {
        const Sequence *one = s->running + i;
        if (one->computed + 1 < one->length || !s->is_prefilled[one->request]) return 0;
    }
    return s->count > 0;
}

static int may_admit(const State *s) {
    if (!s->waiting_count || s->count >= s->e->max_sequences || s->count >= s->e->token_budget) return 0;
    return fits(s, s->q->prompt[front(s)] + s->q->made[front(s)]);
}

/* One step: a token of each decoding sequence, and chunks of prompts up to the budget. */
static void mixed_step(State *s, int64_t *chunk) {
    const Engine *e = s->e;
    Requests *q = s->q;
    int64_t left = e->token_budget, place = 0;
    int has_preempted = 0;
    for (; place < s->count && left; place++) {
        int64_t missing = s->running[place].length - s->running[place].computed;
        int64_t before = s->count;
        chunk[place] = missing < left ? missing : left;
        if (!grow(s, place, chunk[place])) {
            preempt_last(s);
            has_preempted = 1;
            break;
        }
        has_preempted |= s->count < before;
        left -= chunk[place];
    }
    while (left && place == s->count && !has_preempted && may_admit(s)) {
        Sequence *one = admit(s, q->prompt[front(s)] + q->made[front(s)]);
        chunk[place++] = one->length < left ? one->length : left;
        left -= chunk[place - 1];
    }
    int64_t rows = 0, total = 0, longest = 0, tokens = 0, in_step = place < s->count ? place : s->count;
    double attention = 0;
    for (int64_t i = 0; i < in_step; i++) {
        Sequence *one = s->running + i;
        tokens += chunk[i];
        if (chunk[i] == 1) {
            rows++;
            total += one->computed + 1;
            longest = one->computed + 1 > longest ? one->computed + 1 : longest;
        } else {
            double f = (double)one->computed, end = f + (double)chunk[i];
            attention += end * end - f * f;
        }
    }
    double seconds = rows ? decode_s(e, rows, (double)total, (double)longest) : 0;
    if (tokens > rows) {
        double linear = e->packed[tokens];
        if (rows) {
            double thin = decode_s(e, rows, (double)rows, 1.0);
            linear = fmax(linear, thin) + fmax(0.0, seconds - thin);
        }
        seconds = linear + e->attention * attention;
    }
    spend(s, seconds);
    for (int64_t i = 0; i < in_step; i++) {
        Sequence *one = s->running + i;
        one->computed += chunk[i];
        if (one->computed == one->length) make_token(s, one);
    }
    q->iterations++;
    drop_finished(s);
    mark(s);
}

static void play(State *s, int64_t *chunk) {
    Requests *q = s->q;
    for (;;) {
        arrive(s);
        if (!s->count && !s->waiting_count) {
            double ready = next_arrival(s);
            if (!(ready < q->end_s)) return;
            mark(s);
            s->now = ready;
            mark(s);
            continue;
        }
        if (s->now >= q->end_s) return;
        if (s->e->mixed) {
            if (is_decoding(s) && s->count <= s->e->token_budget && !may_admit(s)) decode_run(s);
            else mixed_step(s, chunk);
        } else if (!prefill_iteration(s)) {
            decode_run(s);
        }
    }
}

int32_t engine_abi(void) { return ENGINE_ABI; }

/* Play until all requests are finished or the end; `made` is set to 0 at first. */
int32_t engine_play(const Engine *e, Requests *q) {
    int64_t n = q->count, wide = e->max_sequences + 1;
    for (int64_t i = 0; i < n; i++) {
        q->made[i] = 0;
        if (blocks_of(e, q->prompt[i] + q->answer[i]) > e->num_blocks) return ENGINE_TOO_LONG;
    }
    State s = {.e = e, .q = q, .now = q->start_s, .free_blocks = e->num_blocks, .stride = 1};
    q->points = q->iterations = q->preemptions = 0;
    s.running = malloc((size_t)wide * sizeof *s.running);
    s.waiting = malloc((size_t)(n + 1) * sizeof *s.waiting);
    s.released = malloc((size_t)(n + 1) * sizeof *s.released);
    s.released_s = malloc((size_t)(n + 1) * sizeof *s.released_s);
    s.is_prefilled = calloc((size_t)n + 1, 1);
    int64_t *chunk = malloc((size_t)wide * sizeof *chunk);
    int32_t status = ENGINE_NO_MEMORY;
    if (s.running && s.waiting && s.released && s.released_s && s.is_prefilled && chunk) {
        mark(&s);
        play(&s, chunk);
        s.skipped = s.stride;
        mark(&s);
        status = ENGINE_DONE;
    }
    free(s.running), free(s.waiting), free(s.released), free(s.released_s), free(s.is_prefilled);
    free(chunk);
    return status;
}
