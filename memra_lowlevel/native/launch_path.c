/* The prepared launch path; see launch_path.h. No Python object is touched here. Counts and the ring
 * are written with the interpreter lock held, which makes plain additions enough. */
#include "launch_path.h"

#include <time.h>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#define MAX_PARAMS 64

static __thread uintptr_t current_context;

void mll_note_context(uintptr_t ctx) { current_context = ctx; }

uint64_t mll_raw(void)
{
#if defined(__x86_64__)
    return __rdtsc();
#elif defined(__aarch64__)
    uint64_t v;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(v));
    return v;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
#endif
}

/* A time stamp costs as much as all checks, so the launches of a batch share one. */
static inline void trace(mll_device *d, uint32_t id, uint32_t call, const mll_stream *s,
                         uint64_t raw)
{
    mll_entry *e = &d->ring[d->next++ & d->mask];
    e->raw = raw;
    e->stream = (uint64_t)(uintptr_t)s->handle;
    e->plan = id;
    e->call = call;
}

int mll_has_room(const mll_stream *s, uint64_t n)
{
    return !s->shared && s->issued + n - s->seen <= MLL_KEEP;
}

static int refuse(mll_device *d, int code)
{
    d->n_refused++;
    return code;
}

/* The checks that every launch makes; `s` is null before the first one on a stream. */
static inline int check(mll_device *d, const mll_stream *s, int32_t dead)
{
    if (__builtin_expect(s != NULL && !dead && !s->closed && !s->recording && s->device == d &&
                             !d->closed && current_context == d->ctx, 1))
        return MLL_OK;
    if (dead)
        return refuse(d, MLL_DEAD);
    if (s == NULL)
        return refuse(d, MLL_SLOW);
    if (s->closed || d->closed)
        return refuse(d, MLL_STREAM_CLOSED);
    if (s->device != d)
        return refuse(d, MLL_WRONG_DEVICE);
    return refuse(d, MLL_SLOW);
}

int mll_begin(mll_plan *p)
{
    mll_device *d = p->device;
    mll_stream *s = p->bound;
    int code = check(d, s, p->dead);
    if (code == MLL_OK) {
        s->issued++;
        trace(d, p->id, 0, s, mll_raw());
    }
    return code;
}

int mll_end(const mll_plan *p, const mll_stream *s)
{
    return p->device->launch(p->func, p->grid[0], p->grid[1], p->grid[2], p->block[0], p->block[1],
                             p->block[2], p->shared_bytes, s->handle, p->params, NULL);
}

int mll_many_begin(mll_plan **plans, uint32_t n, mll_stream *s, uint32_t *done)
{
    /* All plans are checked before the first is launched: a refusal leaves nothing half done. */
    for (uint32_t i = 0; i < n; i++) {
        mll_plan *p = plans[i];
        int code = check(p->device, s, p->dead);
        if (code == MLL_OK && p->bound != s)
            code = refuse(p->device, MLL_SLOW);
        if (code) {
            *done = i;
            return code;
        }
    }
    s->issued += n;
    return MLL_OK;
}

int mll_many_end(mll_plan **plans, uint32_t n, const mll_stream *s, uint32_t *done)
{
    int code = MLL_OK;
    for (*done = 0; *done < n && code == MLL_OK; *done += code == MLL_OK)
        code = mll_end(plans[*done], s);
    return code;
}

void mll_many_note(mll_plan **plans, uint32_t n, const mll_stream *s, uint64_t raw)
{
    for (uint32_t i = 0; i < n; i++)
        trace(plans[i]->device, plans[i]->id, 0, s, raw);
}

int mll_site_begin(mll_site *t, mll_stream *s)
{
    int code = check(t->device, s, 0);
    if (code == MLL_OK) {
        s->issued++;
        trace(t->device, t->id, 0, s, mll_raw());
    }
    return code;
}

int mll_site_end(const mll_site *t, const mll_stream *s, const char *block)
{
    void *params[MAX_PARAMS];
    for (uint32_t i = 0; i < t->n_params; i++)
        params[i] = (void *)(block + t->offsets[i]);
    return t->device->launch(t->func, t->grid[0], t->grid[1], t->grid[2], t->block[0], t->block[1],
                             t->block[2], t->shared_bytes, s->handle, params, NULL);
}

static int has_room(const mll_effect *e)
{
    const mll_counter *c = e->counter;
    if (e->need > 0 && c->capacity >= 0 && (!c->bounded || c->upper + e->need > c->capacity))
        return 0;
    return c->lower + e->low >= 0;
}

static void apply(const mll_effect *e)
{
    mll_counter *c = e->counter;
    if (e->has_set) {
        c->lower = c->upper = e->set_to;
        c->known = c->bounded = 1;
    }
    c->lower += e->add_lower;
    c->upper += e->add_upper;
    c->known &= e->known;
    c->bounded &= e->bounded;
    if (c->lower < 0)
        c->lower = 0;
}

int mll_graph_begin(mll_exec *x)
{
    mll_device *d = x->device;
    mll_stream *s = x->bound;
    int code = check(d, s, x->dead);
    if (code)
        return code;
    for (uint32_t i = 0; i < x->n_effects; i++)
        if (!has_room(&x->effects[i]))
            return refuse(d, MLL_ROOM);
    s->issued++;
    d->n_graph_launches++;
    trace(d, x->id, 1, s, mll_raw());
    return MLL_OK;
}

int mll_graph_end(const mll_exec *x, const mll_stream *s)
{
    return x->device->graph_launch(x->exec, s->handle);
}

void mll_graph_note(mll_exec *x)
{
    x->n_done++;
    for (uint32_t i = 0; i < x->n_effects; i++)
        apply(&x->effects[i]);
}

int mll_bare_launches(mll_plan *plan, mll_stream *stream, uint32_t n)
{
    int code = 0;
    for (uint32_t i = 0; i < n && code == 0; ++i)
        code = plan->device->launch(plan->func, plan->grid[0], plan->grid[1], plan->grid[2],
                                    plan->block[0], plan->block[1], plan->block[2],
                                    plan->shared_bytes, stream->handle, plan->params, NULL);
    return code;
}

int mll_bare_graph_launches(mll_exec *exec, mll_stream *stream, uint32_t n)
{
    int code = 0;
    for (uint32_t i = 0; i < n && code == 0; ++i)
        code = exec->device->graph_launch(exec->exec, stream->handle);
    return code;
}

double mll_stamp_ns(uint32_t n)
{
    struct timespec begin, end;
    volatile uint64_t last;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (uint32_t i = 0; i < n; ++i)
        last = mll_raw();
    clock_gettime(CLOCK_MONOTONIC, &end);
    (void)last;
    return ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / n;
}

mll_stub mll_stub_state;

static void stub_block(void)
{
    unsigned ms = mll_stub_state.block_ms;
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    if (ms)
        nanosleep(&t, NULL);
}

static int stub_launch(void *func, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared_bytes, void *stream, void **params, void **extra)
{
    mll_stub *s = &mll_stub_state;
    (void)extra;
    stub_block();
    s->n_launches++;
    s->func = func;
    s->stream = stream;
    s->grid[0] = gx, s->grid[1] = gy, s->grid[2] = gz;
    s->block[0] = bx, s->block[1] = by, s->block[2] = bz;
    s->shared_bytes = shared_bytes;
    for (uint64_t i = 0; i < s->n_params && i < MAX_PARAMS; i++)
        s->params[i] = *(const uint64_t *)params[i];
    return s->answer;
}

static int stub_graph_launch(void *exec, void *stream)
{
    stub_block();
    mll_stub_state.n_graph_launches++;
    mll_stub_state.exec = exec;
    mll_stub_state.stream = stream;
    return mll_stub_state.answer;
}

uintptr_t mll_stub_entry(int graph)
{
    return graph ? (uintptr_t)stub_graph_launch : (uintptr_t)stub_launch;
}
