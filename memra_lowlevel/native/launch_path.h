/* The prepared launch path: structures shared by launch_path.c and the cffi build script.
 *
 * Everything that can be decided before a launch is decided in Python and stored here, so that a
 * launch is a few loads and compares, one ring entry and one call of the driver.
 */
#ifndef MEMRA_LAUNCH_PATH_H
#define MEMRA_LAUNCH_PATH_H

#include <stddef.h>
#include <stdint.h>

/* Raised with every change of the structures, so that a stale build is noticed. */
enum { MLL_VERSION = 8 };

/* Answers below zero are ours, above zero the driver's. */
enum {
    MLL_OK = 0,
    MLL_STREAM_CLOSED = -1,
    MLL_DEAD = -2,         /* the plan, or an operand of it, was closed */
    MLL_WRONG_DEVICE = -3,
    MLL_SLOW = -4,         /* capture, first use on this stream or thread: Python must look */
    MLL_ROOM = -5,         /* a counter has no room, or its bounds are unknown */
    MLL_ARGUMENT = -6      /* an argument of a kind that only Python knows, or a wrong one */
};

typedef int (*mll_launch_fn)(void *func, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                             unsigned by, unsigned bz, unsigned shared_bytes, void *stream,
                             void **params, void **extra);
typedef int (*mll_graph_fn)(void *exec, void *stream);

typedef struct {
    uint64_t raw;    /* raw time counter */
    uint64_t stream; /* driver handle */
    uint32_t plan;   /* id of the plan, site or executable */
    uint32_t call;   /* 0 cuLaunchKernel, 1 cuGraphLaunch */
} mll_entry;

typedef struct {
    mll_launch_fn launch;
    mll_graph_fn graph_launch;
    uintptr_t ctx;
    uint64_t next; /* entries written to the ring so far: all launches of both kinds */
    uint64_t n_graph_launches, n_refused;
    uint64_t n_unlocked; /* times that the interpreter lock was given away around a launch */
    uint64_t mask;
    mll_entry *ring;
    int32_t closed;
} mll_device;

/* `issued - seen` calls may still be queued; while that is at most MLL_KEEP, a launch cannot find the
 * queue full (1,021 calls fit on an H200 with driver 580, graphs of 1 to 300 nodes or kernels). */
enum { MLL_KEEP = 256 };

typedef struct {
    void *handle;
    mll_device *device;
    int32_t closed, recording;
    uint64_t issued, seen; /* all so far, and those that somebody has waited for */
    int32_t shared; /* others put work on it too: nobody knows how full its queue is */
} mll_stream;

typedef struct {
    mll_device *device;
    void *func;
    unsigned grid[3], block[3], shared_bytes;
    uint32_t id, n_params;
    int32_t dead;
    mll_stream *bound; /* stream that it is launched on; its use of the operands is noted */
    void **params;
    void *bound_object; /* the Python object of `bound` */
} mll_plan;

/* What an argument must be to be packed without asking Python. */
enum { MLL_POINTER, MLL_SIGNED, MLL_UNSIGNED, MLL_F32, MLL_F64, MLL_BYTES };

typedef struct {
    int32_t kind, nullable;
    uint32_t offset, size;
    void *dtype; /* of a pointer: the NumPy object, or null for any */
} mll_param;

/* Bytes of parameters up to which C packs them. */
enum { MLL_BLOCK = 4096 };

typedef struct {
    mll_device *device;
    void *func;
    unsigned grid[3], block[3], shared_bytes;
    uint32_t id, n_params;
    const uint32_t *offsets;
    const mll_param *params; /* null where only Python can pack them */
    void *context, *buffer_type; /* Python objects: the context, the class Buffer */
} mll_site;

/* Host mirror of a device counter: the value lies in [lower, upper]. */
typedef struct {
    int64_t lower, upper, capacity; /* capacity < 0: none */
    int32_t known, bounded;
} mll_counter;

/* What one launch of an executable does to one counter. */
typedef struct {
    mll_counter *counter;
    int64_t need, low; /* largest and smallest excursion before the first set */
    int64_t set_to, add_lower, add_upper;
    int32_t has_set, bounded, known;
} mll_effect;

typedef struct {
    mll_device *device;
    void *exec;
    uint32_t id, n_effects;
    int32_t dead;
    mll_stream *bound;
    mll_effect *effects;
    uint64_t n_done; /* launches that the driver accepted */
    void *bound_object;
    int32_t has_checks; /* Python must ask before each launch */
} mll_exec;

/* A driver that does nothing but note its arguments: for tests, and to measure our own cost. */
typedef struct {
    uint64_t n_launches, n_graph_launches;
    void *func, *stream, *exec;
    unsigned grid[3], block[3], shared_bytes;
    uint64_t n_params; /* to read; set by the test */
    uint64_t params[64]; /* first 8 bytes of each */
    int answer; /* result code to give */
    unsigned block_ms; /* time that a call takes, as if the queue were full */
} mll_stub;

extern mll_stub mll_stub_state;
uintptr_t mll_stub_entry(int graph);

void mll_note_context(uintptr_t ctx);
uint64_t mll_raw(void);
int mll_has_room(const mll_stream *stream, uint64_t n);
/* A launch has two halves: begin, with the interpreter lock, checks and counts; end calls the driver
 * and may do so without the lock, while others bind the plan to another stream. */
int mll_begin(mll_plan *plan);
int mll_end(const mll_plan *plan, const mll_stream *stream);
int mll_graph_begin(mll_exec *exec);
int mll_graph_end(const mll_exec *exec, const mll_stream *stream);
void mll_graph_note(mll_exec *exec);
/* Address of a Python type (a new reference) whose instances hold a plan, or an executable, and
 * have the method launch(stream), and of plans launch_all(stream, plans); and of what an instance
 * holds. See launch_object.c. */
uintptr_t mll_object_type(int graph);
uintptr_t mll_object_address(uintptr_t object);
/* The same for the bases of buffers (0) and of their allocations (1), whose attributes C reads. */
uintptr_t mll_held_type(int storage);
/* Of a batch, `done` is the number of the plan that was refused or failed; noted afterwards. */
int mll_many_begin(mll_plan **plans, uint32_t n, mll_stream *stream, uint32_t *done);
int mll_many_end(mll_plan **plans, uint32_t n, const mll_stream *stream, uint32_t *done);
void mll_many_note(mll_plan **plans, uint32_t n, const mll_stream *stream, uint64_t raw);
int mll_site_begin(mll_site *site, mll_stream *stream);
int mll_site_end(const mll_site *site, const mll_stream *stream, const char *block);

/* The driver call alone, n times, as a C program would make it: the yardstick of the benchmark. */
int mll_bare_launches(mll_plan *plan, mll_stream *stream, uint32_t n);
int mll_bare_graph_launches(mll_exec *exec, mll_stream *stream, uint32_t n);
/* Nanoseconds that one mll_raw() takes, of n in a row. */
double mll_stamp_ns(uint32_t n);

#endif
