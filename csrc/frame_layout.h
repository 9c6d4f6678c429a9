// What differs between CPython's versions in the frames that its evaluator gets, for the frame hook (PEP 523).
//
// The one file that knows how a frame is laid out. It includes CPython's internal headers, so it comes first.
#ifndef FUSEWRIGHT_FRAME_LAYOUT_H
#define FUSEWRIGHT_FRAME_LAYOUT_H

#define Py_BUILD_CORE 1
#include <Python.h>

// Before headers that may be others there.
#if PY_VERSION_HEX < 0x030B0000 || PY_VERSION_HEX >= 0x030F0000 || defined(Py_GIL_DISABLED)
#error "the frame hook knows CPython 3.11 to 3.14, with the global interpreter lock"
#endif

#include <frameobject.h>
#include <internal/pycore_frame.h>
#include <internal/pycore_interp.h>
#if PY_VERSION_HEX >= 0x030E0000
#include <internal/pycore_interpframe.h>
#endif
#include <opcode.h>

#include <stdbool.h>

typedef struct _PyInterpreterFrame Frame;

#if PY_VERSION_HEX < 0x030C0000
#define PyUnstable_Code_GetExtra _PyCode_GetExtra
#define PyUnstable_Code_SetExtra _PyCode_SetExtra
#define PyUnstable_Eval_RequestCodeExtraIndex _PyEval_RequestCodeExtraIndex
#endif

static inline PyCodeObject *frame_code(Frame *frame) {
#if PY_VERSION_HEX >= 0x030E0000
    return _PyFrame_GetCode(frame);
#elif PY_VERSION_HEX >= 0x030D0000
    return (PyCodeObject *)frame->f_executable;
#else
    return frame->f_code;
#endif
}

static inline PyObject *frame_function(Frame *frame) {
#if PY_VERSION_HEX >= 0x030E0000
    return PyStackRef_IsNull(frame->f_funcobj) ? NULL : PyStackRef_AsPyObjectBorrow(frame->f_funcobj);
#elif PY_VERSION_HEX >= 0x030C0000
    return frame->f_funcobj;
#else
    return (PyObject *)frame->f_func;
#endif
}

// What a local variable of the frame holds, borrowed.
static inline PyObject *frame_local(Frame *frame, Py_ssize_t slot) {
#if PY_VERSION_HEX >= 0x030E0000
    return PyStackRef_AsPyObjectBorrow(frame->localsplus[slot]);
#else
    return frame->localsplus[slot];
#endif
}

// The first `count` local variables, borrowed; NULL with an exception where there is no room. `few`: room for 32 of
// them. What is neither `few` nor the frame's own is to be freed by PyMem_Free.
static inline PyObject **frame_locals(Frame *frame, Py_ssize_t count, PyObject **few) {
#if PY_VERSION_HEX >= 0x030E0000  // they are tagged references
    PyObject **locals = count <= 32 ? few : PyMem_New(PyObject *, count);
    if (locals == NULL) PyErr_NoMemory();
    else for (Py_ssize_t i = 0; i < count; i++) locals[i] = frame_local(frame, i);
    return locals;
#else
    return frame->localsplus;
#endif
}

static inline bool own_locals(Frame *frame, PyObject **locals, PyObject **few) {
    return locals != few && (void *)locals != (void *)frame->localsplus;
}

// Whether the frame is a call of a Python function. `but`: of which kinds it is not.
static inline bool is_call_of_function(PyCodeObject *code, PyObject *function, Frame *frame, int but) {
    const int wanted = CO_OPTIMIZED | CO_NEWLOCALS;
    const int unwanted = but | CO_COROUTINE | CO_ASYNC_GENERATOR | CO_ITERABLE_COROUTINE;
    return (code->co_flags & wanted) == wanted && !(code->co_flags & unwanted) && frame->f_locals == NULL &&
           frame->owner == FRAME_OWNED_BY_THREAD && function != NULL && PyFunction_Check(function);
}

// One that runs to its end without a stop.
static inline bool is_plain_function(PyCodeObject *code, PyObject *function, Frame *frame) {
    return is_call_of_function(code, function, frame, CO_GENERATOR);
}

#if PY_VERSION_HEX >= 0x030C0000
static inline bool any_tool(const uint8_t *tools) {
    uint8_t found = 0;
    for (int event = 0; event < _PY_MONITORING_LOCAL_EVENTS; event++) found |= tools[event];
    return found != 0;
}
#endif

// Whether a debugger, a profiler or a coverage tool wants to hear of what the frame does (only Python code tells it),
// or the frame is part of such a tool, or of an audit hook.
static inline bool is_traced(PyThreadState *tstate, PyCodeObject *code) {
    if (tstate->tracing != 0 || tstate->c_tracefunc != NULL || tstate->c_profilefunc != NULL) return true;
#if PY_VERSION_HEX >= 0x030C0000  // sys.monitoring: for all code, or for this
    return any_tool(tstate->interp->monitors.tools) ||
           (code->_co_monitoring != NULL && any_tool(code->_co_monitoring->local_monitors.tools));
#else
    return false;
#endif
}

// The frame's answer is `result` (NULL: an exception is set). 3.11: the caller clears the frame. Later the callee does,
// so the evaluator gets a frame that is about to return `result`, or into which the exception is thrown before its
// first instruction.
static inline PyObject *finish_frame(PyThreadState *tstate, Frame *frame, PyObject *result) {
#if PY_VERSION_HEX < 0x030C0000
    (void)tstate;
    (void)frame;
    return result;
#else
    // Two units: the evaluator may look at the one before the instruction that it starts with.
    static _Py_CODEUNIT return_value[2] = {{.op = {.code = RETURN_VALUE}}, {.op = {.code = RETURN_VALUE}}};
    if (result == NULL) return _PyEval_EvalFrameDefault(tstate, frame, 1);
#if PY_VERSION_HEX >= 0x030E0000
    *frame->stackpointer++ = PyStackRef_FromPyObjectSteal(result);
#else
    frame->localsplus[frame->stacktop++] = result;
#endif
#if PY_VERSION_HEX >= 0x030D0000
    frame->instr_ptr = &return_value[1];
#else
    frame->prev_instr = &return_value[0];
#endif
    return _PyEval_EvalFrameDefault(tstate, frame, 0);
#endif
}

#endif
