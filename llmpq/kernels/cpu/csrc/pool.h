/* Threads that compute beside the caller, on cores of their own: the experts of a layer that are not on
 * its device.
 *
 * The caller submits jobs into a ring and later waits for one by its ticket. Jobs are computed one
 * after the other, each by all threads. Waiting threads spin for a while and then sleep. */
#ifndef LLMPQ_POOL_H
#define LLMPQ_POOL_H

#include "lanes.h"
#include <limits.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

enum { MOST_POOL_THREADS = 256, RING_JOBS = 64 };

typedef struct Pool Pool;
typedef struct ExpertPool ExpertPool;

typedef struct {
    const void *what; /* the layer */
    const void *x;
    const int32_t *chosen;
    const float *weight;
    void *y;
    int64_t rows;
} PoolJob;

/* Opens threads, pinned to cores if `cores` is not null; null if there are none. One of them calls
 * `begin` for a job, then all call `compute` with their number. */
Pool *pool_open(const int32_t *cores, int32_t threads, void (*begin)(void *, const PoolJob *),
                void (*compute)(void *, int), void *owner);
int32_t pool_threads(const Pool *pool);
int32_t pool_submit(Pool *pool, const PoolJob *job);
void pool_wait(Pool *pool, int32_t ticket);
void pool_busy(Pool *pool, double *seconds, int64_t *jobs);
void pool_close(Pool *pool);

ExpertPool *kernels_experts_open(const int32_t *cores, int32_t threads);
int32_t kernels_experts_submit(ExpertPool *own, const void *layer, const void *x, const int32_t *chosen,
                               const float *weight, void *y, int64_t rows);
void kernels_experts_wait(ExpertPool *own, int32_t ticket);
void kernels_experts_busy(ExpertPool *own, double *seconds, int64_t *jobs);
void kernels_experts_close(ExpertPool *own);

#ifdef __AVX2__
/* Returns when the number at `at` is no longer `value`; spins so many times first. */
INLINE void wait_while(int32_t *at, int32_t value, int32_t *sleepers, int spins) {
    for (int i = 0; i < spins; i++) {
        if (__atomic_load_n(at, __ATOMIC_ACQUIRE) != value) return;
        _mm_pause();
    }
#ifdef __linux__
    __atomic_fetch_add(sleepers, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(at, __ATOMIC_SEQ_CST) == value)
        syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, value, (void *)0, (void *)0, 0);
    __atomic_fetch_sub(sleepers, 1, __ATOMIC_SEQ_CST);
#else
    (void)sleepers;
    while (__atomic_load_n(at, __ATOMIC_ACQUIRE) == value) sched_yield();
#endif
}

/* Adds 1 to the number at `at` and wakes who waits for that. */
INLINE void change(int32_t *at, int32_t *sleepers) {
    __atomic_fetch_add(at, 1, __ATOMIC_SEQ_CST);
#ifdef __linux__
    if (__atomic_load_n(sleepers, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, (void *)0, (void *)0, 0);
#else
    (void)sleepers;
#endif
}
#endif

#endif
