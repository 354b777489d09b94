/* Threads: torch's own.
 *
 * torch loads its OpenMP runtime into the global scope, and the symbols below find it there: one pool
 * for torch's operators and for these kernels. Without an OpenMP runtime the symbols are absent and
 * the calling thread does all work. */
#include "kernels.h"

extern void GOMP_parallel(void (*)(void *), void *, unsigned, unsigned) __attribute__((weak));

typedef struct {
    void (*part)(void *, int64_t);
    void *data;
    int64_t items, next;
} Parts;

static void take_parts(void *pointer) {
    Parts *p = pointer;
    for (;;) {
        int64_t item = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
        if (item >= p->items) return;
        p->part(p->data, item);
    }
}

void run_parts(void (*part)(void *data, int64_t item), void *data, int64_t items, int threads) {
    Parts parts = {part, data, items, 0};
    if (threads > items) threads = (int)items;
    if (threads > 1 && GOMP_parallel)
        GOMP_parallel(take_parts, &parts, (unsigned)threads, 0);
    else
        take_parts(&parts);
}
