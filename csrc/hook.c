// The PEP 523 frame hook: compiles the frames that an eager run calls.
//
// Takes frames from CPython's evaluator while some thread is inside an eager region (fw_hook_call, hook_region). A
// frame of a plain Python function whose code has a FrameCache is answered by a compiled entry; every other frame
// goes to the evaluator that was installed before. Each compiler has a table of its own, a dict {address of the code
// object: (code object, FrameCache or None)}; a region without one keeps its caches at the code objects.
//
// The same evaluator watches native calls that capture makes (call_watched): a Python function that native code runs
// meanwhile (an `__eq__` of a list's element, a `__hash__`, an `__index__`) is given to the thread's interceptor, so
// that it is interpreted, and what it reads is guarded. What merely happens meanwhile is no part of the program and
// runs unwatched: finalizers of garbage, trace functions, audit hooks.
//
// There is one evaluator in an interpreter, and a debugger or torch.compile may put its own there, or back, at any
// moment and in any order. Each calls the one that it found, so these calls could form a ring; ours is never part of
// one: a frame that comes back goes to CPython's own evaluator.
//
// Always holds: the evaluator is ours only while fw_hook_regions > 0, or until the next frame after another one has
// put it back; on a thread without a region, under a debugger, profiler or coverage tool (sys.settrace,
// sys.setprofile, sys.monitoring), for generators (their making, by native code that is watched, apart), coroutines,
// class bodies and throws, the earlier evaluator decides. `previous_evaluator` is never our own.
#include "frame_layout.h"

#include "entry.h"
#include "stack.h"

int fw_hook_regions = 0;

static __thread int depth = 0;                       // regions open on this thread; 0 while suspended
static __thread PyCodeObject *skip_code = NULL;      // the next frame of this code is the eager run itself
static _PyFrameEvalFunction previous_evaluator = NULL;  // whose place ours took; NULL: CPython's own
static __thread Frame *handed = NULL;  // the frame that `previous_evaluator` has now
// A function that does nothing: whether its frame comes to ours tells who calls whom.
static PyObject *probe = NULL;
static __thread bool probed = false;                 // it came
// Borrowed: the table of the compiler whose cache runs or opened the region; NULL: of no one.
static __thread PyObject *frames = NULL;
// policy(code, function) or policy(code, function, table) -> FrameCache or None
static PyObject *policy = NULL;
// Owned; interceptor(function, locals) -> (result,), None or False, of this thread's capture.
static __thread PyObject *interceptor = NULL;
static __thread bool watching = false;               // inside call_watched, and not inside the interceptor
static __thread int watched_from = 0;                // interruptions() where call_watched began
static Py_ssize_t extra_index = -1;

// What a code object's extra points to. Records form a list so that hook_reset finds them all.
typedef struct Record {
    PyObject *cache;  // NULL: asked, and never to be compiled
    bool asked;
    char unwatched;   // the interceptor leaves frames of this code alone: 'L' goes on watching below them, 'Q' does not
    struct Record *next, **link;
} Record;
static Record *records = NULL;

static void free_record(void *pointer) {
    Record *record = pointer;
    if (record == NULL) return;
    *record->link = record->next;
    if (record->next != NULL) record->next->link = record->link;
    PyObject *cache = record->cache;
    PyMem_Free(record);
    Py_XDECREF(cache);
}

static Record *record_of(PyCodeObject *code) {
    void *found = NULL;
    if (PyUnstable_Code_GetExtra((PyObject *)code, extra_index, &found) == 0 && found != NULL) return found;
    Record *record = PyMem_Calloc(1, sizeof(Record));
    if (record == NULL) return NULL;
    record->next = records;
    record->link = &records;
    if (records != NULL) records->link = &record->next;
    records = record;
    if (PyUnstable_Code_SetExtra((PyObject *)code, extra_index, record)) {
        PyErr_Clear();
        free_record(record);
        return NULL;
    }
    return record;
}

int fw_hook_suspend(void) {
    int saved = depth;
    depth = 0;
    return saved;
}

void fw_hook_resume(int saved) { depth = saved; }

static Py_ssize_t argument_slots(PyCodeObject *code) {
    return code->co_argcount + code->co_kwonlyargcount + ((code->co_flags & CO_VARARGS) != 0) +
           ((code->co_flags & CO_VARKEYWORDS) != 0);
}

// The policy's answer about a code object: a FrameCache or None, or NULL with an exception.
static PyObject *ask_policy(PyCodeObject *code, PyObject *function, PyObject *table) {
    PyObject *ask = Py_NewRef(policy);
    int saved = fw_hook_suspend();
    // A NULL table ends the arguments.
    PyObject *answer = PyObject_CallFunctionObjArgs(ask, (PyObject *)code, function, table, NULL);
    fw_hook_resume(saved);
    Py_DECREF(ask);
    if (answer != NULL && answer != Py_None && !fw_is_cache(answer)) {
        PyErr_Format(PyExc_TypeError, "the hook's policy must return a FrameCache or None, not %.100s",
                     Py_TYPE(answer)->tp_name);
        Py_CLEAR(answer);
    }
    return answer;
}

// The FrameCache of a code object in a compiler's table, the policy having been asked once. A new reference; NULL:
// none, or an exception is set.
static PyObject *cache_in_table(PyObject *table, PyCodeObject *code, PyObject *function) {
    PyObject *key = PyLong_FromVoidPtr(code);
    if (key == NULL) return NULL;
    PyObject *row = PyDict_GetItemWithError(table, key), *cache = NULL;
    if (row != NULL) {
        cache = Py_NewRef(PyTuple_GET_ITEM(row, 1));
    } else if (!PyErr_Occurred()) {
        Py_INCREF(table);
        cache = ask_policy(code, function, table);
        row = cache == NULL ? NULL : PyTuple_Pack(2, (PyObject *)code, cache);
        if (row == NULL || PyDict_SetItem(table, key, row) < 0) Py_CLEAR(cache);
        Py_XDECREF(row);
        Py_DECREF(table);
    }
    Py_DECREF(key);
    if (cache == Py_None) Py_CLEAR(cache);
    return cache;
}

// As cache_in_table, for a region of no compiler.
static PyObject *cache_at_code(PyCodeObject *code, PyObject *function) {
    Record *record = record_of(code);
    if (record == NULL) return NULL;
    if (!record->asked) {
        record->asked = true;  // before the call: the policy's own frames must not ask again
        PyObject *answer = ask_policy(code, function, NULL);
        if (answer == NULL) {
            record->asked = false;
            return NULL;
        }
        Py_XSETREF(record->cache, answer == Py_None ? NULL : Py_NewRef(answer));
        Py_DECREF(answer);
    }
    return Py_XNewRef(record->cache);
}

// How deep this thread is in what the interpreter does by itself, in the middle of whatever runs.
static int interruptions(PyThreadState *tstate) { return tstate->tracing + (tstate->interp->gc.collecting != 0); }

// A frame that native code runs inside call_watched. False: it is left alone.
static bool intercept(PyCodeObject *code, PyObject *function, Frame *frame, PyObject **result, bool *quiet) {
    if (!is_call_of_function(code, function, frame, 0)) return false;  // (the call of a generator's makes it)
    Record *record = record_of(code);
    if (record == NULL) return false;
    if (record->unwatched) {
        *quiet = record->unwatched == 'Q';
        return false;
    }
    Py_ssize_t n = argument_slots(code);
    PyObject *locals = PyTuple_New(n);
    *result = NULL;
    if (locals == NULL) return true;
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(locals, i, Py_NewRef(frame_local(frame, i)));
    PyObject *ask = Py_NewRef(interceptor);
    watching = false;
    PyObject *answer = PyObject_CallFunctionObjArgs(ask, function, locals, NULL);
    watching = true;
    Py_DECREF(ask);
    Py_DECREF(locals);
    if (answer == Py_None || answer == Py_False) {  // for good: it depends on the code alone
        record->unwatched = answer == Py_None ? 'L' : 'Q';
        *quiet = answer == Py_False;
        Py_DECREF(answer);
        return false;
    }
    if (answer != NULL && PyTuple_Check(answer) && PyTuple_GET_SIZE(answer) == 1) {
        *result = Py_NewRef(PyTuple_GET_ITEM(answer, 0));
    } else if (answer != NULL) {
        PyErr_SetString(PyExc_TypeError, "an interceptor returns a tuple of one, None or False");
    }
    Py_XDECREF(answer);
    return true;
}

// The frame to whoever was there before; if that evaluator gives it back to ours, to CPython's own.
static PyObject *hand_on(PyThreadState *tstate, Frame *frame, int throwflag) {
    Frame *before = handed;
    if (previous_evaluator == NULL || before == frame) return _PyEval_EvalFrameDefault(tstate, frame, throwflag);
    handed = frame;
    PyObject *result = previous_evaluator(tstate, frame, throwflag);
    handed = before;
    return result;
}

static PyObject *evaluate(PyThreadState *tstate, Frame *frame, int throwflag);

// Gives the place back, if it is ours, and gives the evaluator that has it now. One that came after us keeps it, and
// still calls ours, which hands on.
static _PyFrameEvalFunction leave(void) {
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
    if (now == evaluate) {
        now = previous_evaluator != NULL ? previous_evaluator : _PyEval_EvalFrameDefault;
        _PyInterpreterState_SetEvalFrameFunc(interpreter, now);
        previous_evaluator = NULL;  // should it call ours, CPython's own is next
    } else if (now == _PyEval_EvalFrameDefault) {
        previous_evaluator = NULL;  // it is gone
    }
    return now;
}

// fw_cache_run for a frame: the frame keeps function and locals alive.
static int run_cache(PyObject *cache, PyObject *function, Frame *frame, Py_ssize_t count, PyObject **result) {
    PyObject *few[32], **locals = frame_locals(frame, count, few);
    *result = NULL;
    if (locals == NULL) return 1;
    int done = fw_cache_run(cache, function, locals, count, result);
    if (own_locals(frame, locals, few)) PyMem_Free(locals);
    return done;
}

static PyObject *evaluate(PyThreadState *tstate, Frame *frame, int throwflag) {
    if (fw_hook_regions == 0) {
        // Another evaluator has put ours back after we had gone, or still calls it.
        bool ours = _PyInterpreterState_GetEvalFrameFunc(tstate->interp) == evaluate;
        return ours ? leave()(tstate, frame, throwflag) : hand_on(tstate, frame, throwflag);
    }
    if (handed == frame) return hand_on(tstate, frame, throwflag);
    if (!throwflag && fw_stack_is_short()) return finish_frame(tstate, frame, NULL);
    PyCodeObject *code = frame_code(frame);
    PyObject *function = frame_function(frame);
    if (function == probe) {
        probed = true;
        return _PyEval_EvalFrameDefault(tstate, frame, throwflag);
    }
    if (watching && !throwflag) {
        PyObject *answer;
        bool quiet = interruptions(tstate) > watched_from;
        if (!quiet && intercept(code, function, frame, &answer, &quiet)) return finish_frame(tstate, frame, answer);
        watching = !quiet;
        answer = hand_on(tstate, frame, throwflag);
        watching = true;
        return answer;
    }
    if (depth == 0 || throwflag || is_traced(tstate, code)) return hand_on(tstate, frame, throwflag);
    if (skip_code == code) {
        skip_code = NULL;
        return hand_on(tstate, frame, throwflag);
    }
    if (policy == NULL || !is_plain_function(code, function, frame)) return hand_on(tstate, frame, throwflag);
    PyObject *cache = frames != NULL ? cache_in_table(frames, code, function) : cache_at_code(code, function), *result;
    if (cache == NULL) {
        bool failed = PyErr_Occurred() && !fw_no_room();
        return failed ? finish_frame(tstate, frame, NULL) : hand_on(tstate, frame, throwflag);
    }
    // The cache is ours, since a reset may drop it.
    PyCodeObject *skipped = skip_code;
    skip_code = NULL;
    int done = run_cache(cache, function, frame, argument_slots(code), &result);
    skip_code = skipped;
    Py_DECREF(cache);
    return done ? finish_frame(tstate, frame, result) : hand_on(tstate, frame, throwflag);
}

PyObject *fw_hook_enter_frames(PyObject *table) {
    PyObject *before = frames;
    frames = table;
    return before;
}

// 1: frames come to our evaluator, although another one has the place; 0: they do not; -1: an exception (a signal's
// handler has raised).
static int is_called(void) {
    probed = false;
    PyObject *none = PyObject_CallNoArgs(probe);
    Py_XDECREF(none);
    return none == NULL ? -1 : probed;
}

// Has frames come to our evaluator. One that calls ours keeps the place: in front of it, ours would be put there
// again when that one has gone.
static int take_place(void) {
    PyInterpreterState *interpreter = PyInterpreterState_Get();
    for (;;) {
        _PyFrameEvalFunction now = _PyInterpreterState_GetEvalFrameFunc(interpreter);
        if (now == evaluate) return 0;
        if (now != _PyEval_EvalFrameDefault) {
            int called = is_called();
            if (called != 0) return called < 0 ? -1 : 0;
            if (_PyInterpreterState_GetEvalFrameFunc(interpreter) != now) continue;  // another thread ran meanwhile
        }
        previous_evaluator = now == _PyEval_EvalFrameDefault ? NULL : now;
        _PyInterpreterState_SetEvalFrameFunc(interpreter, evaluate);
        return 0;
    }
}

static void uninstall(void) {
    if (--fw_hook_regions == 0) leave();
}

static int install(void) {
    fw_hook_regions++;
    if (take_place() == 0) return 0;
    uninstall();
    return -1;
}

PyObject *fw_hook_call(PyObject *fn, PyObject *const *args, size_t nargsf, PyObject *kwnames, int skip_first) {
    if (policy == NULL) return PyObject_Vectorcall(fn, args, nargsf, kwnames);
    int saved = depth;
    PyCodeObject *skipped = skip_code;
    if (install() < 0) return NULL;
    depth = 1;
    skip_code = skip_first && PyFunction_Check(fn) ? (PyCodeObject *)PyFunction_GET_CODE(fn) : NULL;
    PyObject *result = PyObject_Vectorcall(fn, args, nargsf, kwnames);
    depth = saved;
    skip_code = skipped;
    uninstall();
    return result;
}

static PyObject *call_eager(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (nargs < 1) {
        PyErr_SetString(PyExc_TypeError, "call_eager(fn, *args, **kwargs) takes a callable");
        return NULL;
    }
    return fw_hook_call(args[0], args + 1, nargs - 1, kwnames, 0);
}

static PyObject *call_paused(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (nargs < 1) {
        PyErr_SetString(PyExc_TypeError, "call_paused(fn, *args, **kwargs) takes a callable");
        return NULL;
    }
    int saved = fw_hook_suspend();
    PyObject *result = PyObject_Vectorcall(args[0], args + 1, nargs - 1, kwnames);
    fw_hook_resume(saved);
    return result;
}

static PyObject *call_handling(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (nargs < 2 || !PyExceptionInstance_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "call_handling(error, fn, *args, **kwargs) takes an exception and a callable");
        return NULL;
    }
    PyObject *before = PyErr_GetHandledException();
    PyErr_SetHandledException(args[0]);
    PyObject *result = PyObject_Vectorcall(args[1], args + 2, nargs - 2, kwnames);
    PyErr_SetHandledException(before);
    Py_XDECREF(before);
    return result;
}

static PyObject *traceback_frame(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyCode_Check(args[0]) || !PyDict_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "traceback_frame(code, globals) takes a code object and a dict");
        return NULL;
    }
    return (PyObject *)PyFrame_New(PyThreadState_Get(), (PyCodeObject *)args[0], args[1], NULL);
}

static PyObject *set_interceptor(PyObject *self, PyObject *callable) {
    if (callable != Py_None && !PyCallable_Check(callable)) {
        PyErr_SetString(PyExc_TypeError, "the interceptor is a callable or None");
        return NULL;
    }
    PyObject *old = interceptor;
    interceptor = callable == Py_None ? NULL : Py_NewRef(callable);
    return old != NULL ? old : Py_NewRef(Py_None);
}

// Another evaluator came meanwhile, on another thread: if it does not call ours, functions may have run that nobody
// was told of. `result` is consumed.
static PyObject *say_unwatched(PyObject *result) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    int called = is_called();
    if (called > 0) {
        PyErr_Restore(type, error, traceback);
        return result;
    }
    Py_XDECREF(result);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    if (called < 0) return NULL;
    PyObject *ask = Py_NewRef(interceptor), *answer = PyObject_CallFunctionObjArgs(ask, Py_None, Py_None, NULL);
    Py_DECREF(ask);
    Py_XDECREF(answer);
    if (answer != NULL) PyErr_SetString(PyExc_RuntimeError, "another frame evaluator took the place of fusewright's");
    return NULL;
}

static PyObject *call_watched(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames) {
    if (nargs < 1) {
        PyErr_SetString(PyExc_TypeError, "call_watched(fn, *args, **kwargs) takes a callable");
        return NULL;
    }
    if (interceptor == NULL) return PyObject_Vectorcall(args[0], args + 1, nargs - 1, kwnames);
    bool before = watching;
    int saved = fw_hook_suspend(), from = watched_from;
    watching = false;
    watched_from = interruptions(PyThreadState_Get());
    PyObject *result = NULL;
    if (install() == 0) {
        _PyFrameEvalFunction first = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
        watching = true;
        result = PyObject_Vectorcall(args[0], args + 1, nargs - 1, kwnames);
        watching = false;
        if (_PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) != first) result = say_unwatched(result);
        uninstall();
    }
    watching = before;
    watched_from = from;
    fw_hook_resume(saved);
    return result;
}

static PyObject *hook_region(PyObject *self, PyObject *enter) {
    int entering = PyObject_IsTrue(enter);
    if (entering < 0) return NULL;
    if (entering) {
        if (install() < 0) return NULL;
        depth++;
    } else {
        if (depth == 0 || fw_hook_regions == 0) {
            PyErr_SetString(PyExc_RuntimeError, "hook_region(False) without hook_region(True) on this thread");
            return NULL;
        }
        depth--;
        uninstall();
    }
    Py_RETURN_NONE;
}

static PyObject *set_policy(PyObject *self, PyObject *callable) {
    if (callable != Py_None && !PyCallable_Check(callable)) {
        PyErr_SetString(PyExc_TypeError, "the policy is a callable or None");
        return NULL;
    }
    PyObject *old = policy;
    policy = callable == Py_None ? NULL : Py_NewRef(callable);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *hook_reset(PyObject *self, PyObject *unused) {
    // Dropping a cache may free code objects and so unlink records: start over after each.
    for (;;) {
        Record *record = records;
        while (record != NULL && record->cache == NULL) {
            record->asked = false;
            record = record->next;
        }
        if (record == NULL) Py_RETURN_NONE;
        record->asked = false;
        Py_CLEAR(record->cache);
    }
}

static PyObject *hook_state(PyObject *self, PyObject *unused) {
    bool ours = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == evaluate;
    Py_ssize_t n = 0;
    for (Record *record = records; record != NULL; record = record->next) n += record->cache != NULL;
    return Py_BuildValue("{s:O,s:i,s:i,s:n}", "installed", ours ? Py_True : Py_False, "regions", fw_hook_regions,
                         "depth", depth, "caches", n);
}

static PyObject *hook_cache(PyObject *self, PyObject *code) {
    void *found = NULL;
    if (!PyCode_Check(code)) {
        PyErr_SetString(PyExc_TypeError, "hook_cache takes a code object");
        return NULL;
    }
    PyUnstable_Code_GetExtra(code, extra_index, &found);
    Record *record = found;
    return Py_NewRef(record != NULL && record->cache != NULL ? record->cache : Py_None);
}

static PyMethodDef functions[] = {
    {"call_eager", (PyCFunction)(void (*)(void))call_eager, METH_FASTCALL | METH_KEYWORDS,
     "call_eager(fn, /, *args, **kwargs): calls fn with the frame hook on for this thread, so that the frames it runs "
     "are compiled."},
    {"call_paused", (PyCFunction)(void (*)(void))call_paused, METH_FASTCALL | METH_KEYWORDS,
     "call_paused(fn, /, *args, **kwargs): calls fn with the frame hook off for this thread."},
    {"call_handling", (PyCFunction)(void (*)(void))call_handling, METH_FASTCALL | METH_KEYWORDS,
     "call_handling(error, fn, /, *args, **kwargs): calls fn while error is the exception being handled."},
    {"traceback_frame", (PyCFunction)(void (*)(void))traceback_frame, METH_FASTCALL,
     "traceback_frame(code, globals) -> a frame that never runs, for a line of a traceback."},
    {"set_interceptor", set_interceptor, METH_O,
     "set_interceptor(callable or None) -> the one before. interceptor(function, locals) -> (result,), or for all\n"
     "frames of this code None: run natively; False: run natively, and so does what they call.\n"
     "interceptor(None, None) says that functions may have run without being offered."},
    {"call_watched", (PyCFunction)(void (*)(void))call_watched, METH_FASTCALL | METH_KEYWORDS,
     "call_watched(fn, /, *args, **kwargs): calls fn; Python functions that it runs are offered to this thread's "
     "interceptor."},
    {"hook_region", hook_region, METH_O,
     "hook_region(True) opens an eager region on this thread, hook_region(False) closes it; they nest."},
    {"hook_set_policy", set_policy, METH_O,
     "hook_set_policy(callable or None): policy(code, function) -> FrameCache or None (never), asked once a code."},
    {"hook_reset", hook_reset, METH_NOARGS, "Forgets every code object's cache; the policy will be asked again."},
    {"hook_state", hook_state, METH_NOARGS,
     "What the hook is doing, as a dict: installed, regions (all threads), depth (this thread), caches."},
    {"hook_cache", hook_cache, METH_O, "hook_cache(code) -> its FrameCache or None."},
    {NULL, NULL, 0, NULL},
};

int fw_hook_init(PyObject *module) {
    extra_index = PyUnstable_Eval_RequestCodeExtraIndex(free_record);
    if (extra_index < 0) {
        PyErr_SetString(PyExc_ImportError, "CPython has no code extra left for fusewright");
        return -1;
    }
    // No function of Python's own library will do: another evaluator may know those.
    PyObject *names = PyDict_New();
    PyObject *made = names == NULL ? NULL : PyRun_String("def probe(): pass", Py_file_input, names, names);
    probe = made == NULL ? NULL : Py_XNewRef(PyDict_GetItemString(names, "probe"));
    Py_XDECREF(made);
    Py_XDECREF(names);
    return probe == NULL ? -1 : PyModule_AddFunctions(module, functions);
}
