/* A parallel loop on threads of our own.
 *
 * OpenMP's threads spin for milliseconds after each loop: beside other busy processes they spend the share of the processor that
 * the next loop needs, and how long they spin cannot be changed once the library is loaded. Ours look for work for a moment and
 * then sleep. Items are claimed one by one, so a thread that has lost its core holds up one item, not its part of the loop.
 *
 * One loop runs at a time; a caller that finds the threads busy runs its loop alone. `ticket` is (workers that may join, items not yet
 * claimed) in one word: a claim that succeeds proves that there is a loop and that it is not over, so what else describes it may
 * be read. */
#define _GNU_SOURCE
#include "common.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MAX_WORKERS 255
#define WORKER_NS 60000 /* a sleeping worker costs the next loop a wake-up, about as long */
#define CALLER_NS 30000
#define LOOKS 32 /* between two looks at the clock */

#define LOAD(x) __atomic_load_n(&(x), __ATOMIC_SEQ_CST)
#define STORE(x, value) __atomic_store_n(&(x), value, __ATOMIC_SEQ_CST)
#define ADD(x, value) __atomic_add_fetch(&(x), value, __ATOMIC_SEQ_CST)

static struct {
    uint64_t ticket __attribute__((aligned(64)));
    uint32_t posted;              /* loops so far; idle workers sleep on it */
    int32_t unfinished __attribute__((aligned(64))); /* items not yet done; the caller sleeps on it */
    int32_t sleepers, caller_sleeps;
    int busy __attribute__((aligned(64)));
    int workers;
    int64_t items;
    loop_body body;
    void *context;
} pool;

INLINE void relax(void) {
#ifdef __x86_64__
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

#ifdef __linux__
static void sleep_while(void *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(void *word, int count) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0); }
#else /* no way to sleep on a word: look again a little later */
static void sleep_while(void *word, uint32_t value) {
    const struct timespec moment = {0, 50000};
    if (LOAD(*(uint32_t *)word) == value) nanosleep(&moment, NULL);
}

static void wake(void *word, int count) { (void)word, (void)count; }
#endif

INLINE int may_join(uint64_t ticket, int worker) { return (uint32_t)ticket != 0 && worker < (int)(ticket >> 32); }

/* Claims and does items until none is left; worker -1 is the caller. Returns whether it did any. */
static int take_items(int worker) {
    int did = 0;
    for (uint64_t ticket = LOAD(pool.ticket); worker < 0 ? (uint32_t)ticket != 0 : may_join(ticket, worker);) {
        if (!__atomic_compare_exchange_n(&pool.ticket, &ticket, ticket - 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
        pool.body(pool.context, pool.items - (uint32_t)ticket);
        did = 1;
        if (ADD(pool.unfinished, -1) == 0 && worker >= 0 && LOAD(pool.caller_sleeps)) wake(&pool.unfinished, 1);
        ticket = LOAD(pool.ticket);
    }
    return did;
}

static void *work(void *argument) {
    const int worker = (int)(intptr_t)argument;
    for (;;) {
        const uint32_t posted = LOAD(pool.posted);
        if (take_items(worker)) continue;
        const int64_t until = now_ns() + WORKER_NS;
        int found;
        do {
            for (int look = 0; look < LOOKS && LOAD(pool.posted) == posted; look++) relax();
            found = LOAD(pool.posted) != posted;
        } while (!found && now_ns() < until);
        if (found) continue;
        ADD(pool.sleepers, 1);
        if (LOAD(pool.posted) == posted) sleep_while(&pool.posted, posted);
        ADD(pool.sleepers, -1);
    }
    return NULL;
}

static void forget_workers(void) { memset(&pool, 0, sizeof pool); } /* a forked child has only the thread that forked */

/* As many workers as can be had, up to `wanted`. Python's signals stay with Python's threads. */
static int ensure_workers(int wanted) {
    static int registered;
    if (pool.workers >= wanted) return wanted;
    if (!registered) registered = pthread_atfork(NULL, NULL, forget_workers) == 0;
    sigset_t all, before;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; pool.workers < wanted; pool.workers++)
        if (pthread_create(&thread, &attributes, work, (void *)(intptr_t)pool.workers)) break;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    return pool.workers;
}

static void wait_for_workers(void) {
    const int64_t until = now_ns() + CALLER_NS;
    do {
        for (int look = 0; look < LOOKS; look++) {
            if (LOAD(pool.unfinished) == 0) return;
            relax();
        }
    } while (now_ns() < until);
    STORE(pool.caller_sleeps, 1);
    for (int32_t left; (left = LOAD(pool.unfinished)) != 0;) sleep_while(&pool.unfinished, (uint32_t)left);
    STORE(pool.caller_sleeps, 0);
}

void parallel_for(int64_t items, int threads, loop_body body, void *context) {
    if (items < threads) threads = (int)items;
    if (threads > MAX_WORKERS + 1) threads = MAX_WORKERS + 1;
    if (threads <= 1 || items > INT32_MAX || __atomic_exchange_n(&pool.busy, 1, __ATOMIC_SEQ_CST)) {
        for (int64_t item = 0; item < items; item++) body(context, item);
        return;
    }
    const int workers = ensure_workers(threads - 1);
    pool.body = body;
    pool.context = context;
    pool.items = items;
    STORE(pool.unfinished, (int32_t)items);
    STORE(pool.ticket, (uint64_t)workers << 32 | (uint64_t)items);
    ADD(pool.posted, 1);
    if (LOAD(pool.sleepers)) wake(&pool.posted, workers < pool.workers ? INT_MAX : workers);
    take_items(-1);
    wait_for_workers();
    STORE(pool.busy, 0);
}
