// What a FrameCache is made of, for what is one (compiled_function.cpp).
#ifndef FUSEWRIGHT_FRAME_CACHE_H
#define FUSEWRIGHT_FRAME_CACHE_H

#include <vector>

#include "entry.h"

namespace fw {

constexpr Py_ssize_t kStackArguments = 32;

struct Entry {
    PyObject_HEAD
    PyObject *program, *graph, *finish, *tag;
    unsigned long long calls;
    bool is_plan;
    char retired;  // no call is given to it any more
};

struct FrameCache {
    PyObject_HEAD
    PyObject *miss;  // callable(cache, function, locals tuple) -> Entry or None; None: never capture
    std::vector<Entry *> *entries;
    PyObject *dict, *weak;
    PyObject *frames;  // the compiler's table of the frames that eager runs call, or NULL
    char hooked;       // eager runs compile the frames that they call
};

// Whether a call of `function` may be answered by compiled code now: 1, 0, or -1 with an exception.
int may_compile(PyObject *function);
// As fw_cache_run, for a call that may be compiled.
int run_cache(PyObject *cache, PyObject *function, PyObject *const *locals, Py_ssize_t n, PyObject **result);
void clear_entries(FrameCache *self);

// The parts of the type's slots.
PyObject *cache_new(PyTypeObject *type, PyObject *, PyObject *);
int cache_init_miss(FrameCache *self, PyObject *miss);
int cache_traverse(PyObject *object, visitproc visit, void *arg);
int cache_clear(PyObject *object);
void cache_free(PyObject *object, inquiry clear);

// Adds the type CompiledFunction; `base` is FrameCache's.
int compiled_function_init(PyObject *module, PyTypeObject *base);

}  // namespace fw

#endif
