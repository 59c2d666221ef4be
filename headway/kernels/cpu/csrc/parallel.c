/* A parallel loop on the OpenMP threads that torch already has: a second pool would spin against them. */
#include "common.h"

typedef void (*gomp_parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
static gomp_parallel_fn gomp_parallel;

struct loop {
    loop_body body;
    void *context;
    int64_t items, next;
};

static void take_items(void *data) {
    struct loop *loop = data;
    int64_t item;
    while ((item = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED)) < loop->items) loop->body(loop->context, item);
}

void parallel_for(int64_t items, int threads, loop_body body, void *context) {
    struct loop loop = {body, context, items, 0};
    if (items < threads) threads = (int)items;
    if (threads > 1 && gomp_parallel) gomp_parallel(take_items, &loop, (unsigned)threads, 0);
    else take_items(&loop);
}

/* The address of GOMP_parallel in the OpenMP library of this process; without it everything runs on the calling thread. */
EXPORT void headway_set_parallel(void *address) { gomp_parallel = (gomp_parallel_fn)address; }
