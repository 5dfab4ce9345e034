/* Threads that share the work of one step, phase by phase.
 *
 * A phase is a number of items that may be done in any order by anyone. Threads claim items from one ticket word; who does
 * the last item opens the next phase. Nobody ever waits for a thread, only for items that were claimed: a thread that the
 * kernel has put aside, or that is not awake yet, costs its share of the work and nothing else.
 *
 *     ticket = [phase number : 24][items : 20][next item : 20]
 *
 * A claim is a compare-and-swap, so a thread that was asleep for a whole step cannot take an item of a phase it has not
 * seen. All other words belong to the phase, and are stable while one of its items is claimed and not done.
 * Waiting threads look again SPINS times (some 20 us: most phases are shorter), then sleep on the futex `bell`.
 */
#ifndef SHM_POOL_H
#define SHM_POOL_H

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ITEM_BITS = 20, SPINS = 600 };
#define ITEM_MASK ((UINT64_C(1) << ITEM_BITS) - 1)

/* How many items phase `phase` has; -1 after the last phase. Called by one thread at a time. */
typedef int (*PhaseSize)(void *job, int phase);
typedef void (*PhaseItem)(void *job, int phase, int item, int thread);

typedef struct Pool Pool;

typedef struct {
    Pool *pool;
    int index;
    pthread_t id;
} PoolThread;

struct Pool {
    _Alignas(64) _Atomic uint64_t ticket;
    _Alignas(64) _Atomic uint32_t num_done;
    _Alignas(64) _Atomic uint32_t bell; /* rung after each change of the ticket by a phase */
    _Atomic int num_sleeping;
    _Atomic bool is_finished, is_closing;
    /* written by who opens a phase, before the ticket */
    int phase;
    void *job;
    PhaseSize size_of;
    PhaseItem do_item;
    int num_threads; /* the caller of pool_run is thread 0 */
    PoolThread *threads;
};

INLINE void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void pool_ring(Pool *pool) {
    atomic_fetch_add(&pool->bell, 1);
    if (atomic_load(&pool->num_sleeping))
        syscall(SYS_futex, &pool->bell, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* Called by the one thread that knows that no item is claimed. */
static void pool_open_phase(Pool *pool, int phase) {
    int size;
    while ((size = pool->size_of(pool->job, phase)) == 0)
        phase++;
    uint64_t number = (atomic_load(&pool->ticket) >> (2 * ITEM_BITS)) + 1;
    pool->phase = phase;
    atomic_store(&pool->num_done, 0);
    if (size < 0) {
        atomic_store(&pool->ticket, number << (2 * ITEM_BITS));
        atomic_store(&pool->is_finished, true);
    } else {
        atomic_store(&pool->ticket, (number << (2 * ITEM_BITS)) | ((uint64_t)size << ITEM_BITS));
    }
    pool_ring(pool);
}

/* Do one item, if there is one to claim. */
static bool pool_try_item(Pool *pool, int thread) {
    uint64_t ticket = atomic_load(&pool->ticket);
    do {
        if ((ticket & ITEM_MASK) >= ((ticket >> ITEM_BITS) & ITEM_MASK))
            return false;
    } while (!atomic_compare_exchange_weak(&pool->ticket, &ticket, ticket + 1));
    pool->do_item(pool->job, pool->phase, (int)(ticket & ITEM_MASK), thread);
    if (atomic_fetch_add(&pool->num_done, 1) + 1 == ((ticket >> ITEM_BITS) & ITEM_MASK))
        pool_open_phase(pool, pool->phase + 1);
    return true;
}

/* Returns when the ticket may have changed since `bell` was read. */
static void pool_wait(Pool *pool, uint32_t bell) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&pool->bell, memory_order_relaxed) != bell)
            return;
        relax();
    }
    atomic_fetch_add(&pool->num_sleeping, 1);
    syscall(SYS_futex, &pool->bell, FUTEX_WAIT_PRIVATE, bell, NULL, NULL, 0);
    atomic_fetch_sub(&pool->num_sleeping, 1);
}

static void *pool_thread_main(void *argument) {
    PoolThread *self = argument;
    Pool *pool = self->pool;
    for (;;) {
        uint32_t bell = atomic_load(&pool->bell);
        if (atomic_load(&pool->is_closing))
            return NULL;
        if (!pool_try_item(pool, self->index))
            pool_wait(pool, bell);
    }
}

/* Runs all phases of `job`; returns when the last item is done. One call at a time. */
static void pool_run(Pool *pool, void *job, PhaseSize size_of, PhaseItem do_item) {
    pool->job = job;
    pool->size_of = size_of;
    pool->do_item = do_item;
    atomic_store(&pool->is_finished, false);
    pool_open_phase(pool, 0);
    for (;;) {
        uint32_t bell = atomic_load(&pool->bell);
        if (atomic_load(&pool->is_finished))
            return;
        if (!pool_try_item(pool, 0))
            pool_wait(pool, bell);
    }
}

static void pool_close(Pool *pool) {
    atomic_store(&pool->is_closing, true);
    pool_ring(pool);
    for (int i = 1; i < pool->num_threads; i++)
        pthread_join(pool->threads[i].id, NULL);
    free(pool->threads);
    free(pool);
}

/* NULL if memory or threads cannot be had. */
static Pool *pool_new(int num_threads) {
    Pool *pool = aligned_alloc(64, sizeof(Pool));
    if (!pool)
        return NULL;
    memset(pool, 0, sizeof *pool);
    pool->threads = calloc((size_t)num_threads, sizeof(PoolThread));
    pool->num_threads = 1;
    sigset_t all, before; /* signals are for the threads of the interpreter */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; pool->threads && i < num_threads; i++) {
        pool->threads[i] = (PoolThread){.pool = pool, .index = i};
        if (pthread_create(&pool->threads[i].id, NULL, pool_thread_main, &pool->threads[i]))
            break;
        pool->num_threads = i + 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->num_threads == num_threads && pool->threads)
        return pool;
    pool_close(pool);
    return NULL;
}

#endif
