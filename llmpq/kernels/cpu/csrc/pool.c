/* A ring of jobs, and threads that compute them (pool.h). */
#define _GNU_SOURCE
#include "pool.h"

#ifdef __AVX2__
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>

enum { IDLE_SPINS = 4000 };

typedef struct {
    int32_t value __attribute__((aligned(64)));
    int32_t sleepers;
} Counter;

typedef struct {
    Pool *pool;
    int32_t me;
} Member;

struct Pool {
    void (*begin)(void *, const PoolJob *);
    void (*compute)(void *, int);
    void *owner;
    int32_t threads, is_closing;
    Counter submitted; /* jobs put into the ring; one more at the end */
    Counter done;      /* jobs computed */
    Counter begun;     /* jobs that the first thread has prepared; one more at the end */
    Counter ended;     /* parts of other threads */
    int64_t busy_ns, jobs;
    PoolJob ring[RING_JOBS];
    Member members[MOST_POOL_THREADS];
    pthread_t handles[MOST_POOL_THREADS];
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int32_t read_counter(Counter *c) {
    return __atomic_load_n(&c->value, __ATOMIC_ACQUIRE);
}

static void wait_for_change(Counter *c, int32_t value) {
    wait_while(&c->value, value, &c->sleepers, IDLE_SPINS);
}

static void add_one(Counter *c) {
    change(&c->value, &c->sleepers);
}

static int is_closing(Pool *pool) {
    return __atomic_load_n(&pool->is_closing, __ATOMIC_ACQUIRE);
}

/* Waits for jobs, prepares each, and counts it as done when all threads have computed it. */
static void lead(Pool *pool) {
    for (uint32_t number = 0;; number++) { /* unsigned: it may wrap */
        wait_for_change(&pool->submitted, (int32_t)number);
        if (is_closing(pool)) break; /* all jobs were done before */
        int64_t start = now_ns();
        int32_t ended = (int32_t)((uint32_t)read_counter(&pool->ended) + pool->threads - 1);
        pool->begin(pool->owner, &pool->ring[number % RING_JOBS]);
        add_one(&pool->begun);
        pool->compute(pool->owner, 0);
        for (int32_t now; (now = read_counter(&pool->ended)) != ended;)
            wait_for_change(&pool->ended, now);
        __atomic_fetch_add(&pool->busy_ns, now_ns() - start, __ATOMIC_RELAXED);
        __atomic_fetch_add(&pool->jobs, 1, __ATOMIC_RELAXED);
        add_one(&pool->done);
    }
    add_one(&pool->begun);
}

static void follow(Pool *pool, int32_t me) {
    for (uint32_t number = 0;; number++) {
        wait_for_change(&pool->begun, (int32_t)number);
        if (is_closing(pool)) return; /* all jobs were done before */
        pool->compute(pool->owner, me);
        add_one(&pool->ended);
    }
}

static void *work(void *pointer) {
    Member *member = pointer;
    if (member->me == 0) lead(member->pool);
    else follow(member->pool, member->me);
    return 0;
}

static void keep_on(pthread_t thread, int32_t core) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_setaffinity_np(thread, sizeof set, &set); /* where the host allows it */
#else
    (void)thread, (void)core;
#endif
}

Pool *pool_open(const int32_t *cores, int32_t threads, void (*begin)(void *, const PoolJob *),
                void (*compute)(void *, int), void *owner) {
    if (threads < 1 || threads > MOST_POOL_THREADS) return 0;
    Pool *pool = aligned_alloc(64, (sizeof *pool + 63) / 64 * 64);
    if (!pool) return 0;
    memset(pool, 0, sizeof *pool);
    pool->begin = begin, pool->compute = compute, pool->owner = owner, pool->threads = threads;
    for (int32_t i = 0; i < threads; i++) {
        pool->members[i] = (Member){pool, i};
        if (pthread_create(&pool->handles[i], 0, work, &pool->members[i])) {
            pool->threads = i; /* end those that run */
            if (i) pool_close(pool);
            else free(pool);
            return 0;
        }
        if (cores) keep_on(pool->handles[i], cores[i]);
    }
    return pool;
}

int32_t pool_threads(const Pool *pool) {
    return pool->threads;
}

int32_t pool_submit(Pool *pool, const PoolJob *job) {
    uint32_t number = read_counter(&pool->submitted);
    for (int32_t done; number - (uint32_t)(done = read_counter(&pool->done)) >= RING_JOBS;)
        wait_for_change(&pool->done, done);
    pool->ring[number % RING_JOBS] = *job;
    add_one(&pool->submitted);
    return (int32_t)(number + 1);
}

void pool_wait(Pool *pool, int32_t ticket) {
    for (int32_t done; (int32_t)((uint32_t)(done = read_counter(&pool->done)) - (uint32_t)ticket) < 0;)
        wait_for_change(&pool->done, done);
}

void pool_busy(Pool *pool, double *seconds, int64_t *jobs) {
    *seconds = (double)__atomic_load_n(&pool->busy_ns, __ATOMIC_RELAXED) * 1e-9;
    *jobs = __atomic_load_n(&pool->jobs, __ATOMIC_RELAXED);
}

void pool_close(Pool *pool) {
    pool_wait(pool, read_counter(&pool->submitted));
    __atomic_store_n(&pool->is_closing, 1, __ATOMIC_SEQ_CST);
    add_one(&pool->submitted);
    for (int32_t i = 0; i < pool->threads; i++) pthread_join(pool->handles[i], 0);
    free(pool);
}
#endif
