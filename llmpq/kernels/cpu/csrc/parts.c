/* Threads: torch's own.
 *
 * torch loads its OpenMP runtime into the global scope, and the symbols below find it there: one pool
 * for torch's operators and for these kernels. Without an OpenMP runtime the symbols are absent and
 * the calling thread does all work. */
#include "kernels.h"

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));
extern int omp_get_thread_num(void) __attribute__((weak));

typedef struct {
    void (*part)(void *, int64_t);
    void *data;
    int64_t items;
    int threads;
    Share *shares; /* of each thread */
} Parts;

static void take_parts(void *pointer) {
    Parts *p = pointer;
    int me = p->threads > 1 ? omp_get_thread_num() : 0, passed = 0;
    for (int64_t item; (item = take_item(p->shares, p->threads, me, &passed, p->items)) >= 0;)
        p->part(p->data, item);
}

void run_parts(void (*part)(void *data, int64_t item), void *data, int64_t items, int threads) {
    if (threads > items) threads = (int)items;
    if (threads < 1 || !GOMP_parallel || !omp_get_thread_num) threads = 1;
    Share shares[threads];
    memset(shares, 0, sizeof shares);
    Parts parts = {part, data, items, threads, shares};
    if (threads > 1) GOMP_parallel(take_parts, &parts, (unsigned)threads, 0);
    else take_parts(&parts);
}
