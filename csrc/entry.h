// The cache of compiled versions of one code object, as the frame hook (C) and the compiled function (C++) use it.
#ifndef FUSEWRIGHT_ENTRY_H
#define FUSEWRIGHT_ENTRY_H

#include "native.h"

#ifdef __cplusplus
extern "C" {
#endif

// Whether `object` is a FrameCache (a CompiledFunction is one).
int fw_is_cache(PyObject *object);

// Runs one call of `function` (whose locals at frame entry are locals[0:n], borrowed) from `cache`. 1: done, *result is
// the new result or NULL with an exception. 0: nothing has happened that is visible outside; run the call eagerly. The
// hook is off on this thread meanwhile.
int fw_cache_run(PyObject *cache, PyObject *function, PyObject *const *locals, Py_ssize_t n, PyObject **result);

// Whether what the compiler's Python code has just raised says only that there was no room for it on the stack or in
// memory: the program itself may need less. The exception is gone then.
int fw_no_room(void);

// csrc/hook.c. Number of eager regions open on all threads; the evaluator is ours while it is not 0.
extern int fw_hook_regions;
// Calls fn with the hook on for this thread. With `skip_first`, fn's own frame is left to the default evaluator.
PyObject *fw_hook_call(PyObject *fn, PyObject *const *args, size_t nargsf, PyObject *kwnames, int skip_first);
// From here on frames of this thread's regions are looked up in `table` (borrowed; NULL: at their code objects). Gives
// the table before.
PyObject *fw_hook_enter_frames(PyObject *table);
// Turns the hook off on this thread; the value that it returns goes to fw_hook_resume. Only needed while
// fw_hook_regions is not 0.
int fw_hook_suspend(void);
void fw_hook_resume(int saved);

#ifdef __cplusplus
}
#endif
#endif
