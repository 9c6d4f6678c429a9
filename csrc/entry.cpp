// Entry and FrameCache: from the call of a compiled function or frame to its graph.
//
// An Entry is one compiled version: a guard program, a graph (a native plan or any callable) and an optional `finish`.
// A FrameCache is the list of entries of one code object with `miss`, which makes a new one. compiled_function.cpp
// makes a Python function of it.
//
// Always holds:
// - Nothing visible outside happens before a graph call has succeeded, so every failure before that can be answered by
// an eager run.
// - The list of entries may change while an entry runs: what is in use is referenced.
#include "frame_cache.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "guards.h"
#include "interruptions.h"
#include "modes.h"
#include "stack.h"
#include "stance.h"

namespace {

using namespace fw;

PyObject *fallback_error = nullptr;  // fusewright.base.errors.RuntimeFallback
PyObject *fell_back =
    nullptr;  // callable(function, exception or None, entry or None): a compiled call is about to be repeated eagerly
PyObject *left_alone = nullptr;  // callable(function): a call runs eagerly in a mode that compiled code is not made for
// --- Entry
// ---------------------------------------------------------------------------------------------------------------------

int entry_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *names[] = {"program", "graph", "finish", "tag", nullptr};
    PyObject *program, *graph, *finish = Py_None, *tag = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|OO", const_cast<char **>(names), fw::guard_program_type(),
                                     &program, &graph, &finish, &tag))
        return -1;
    if (graph != Py_None && !PyCallable_Check(graph) &&
        !(fw_plan_type != nullptr && Py_IS_TYPE(graph, fw_plan_type()))) {
        PyErr_SetString(PyExc_TypeError, "graph must be a Plan, a callable or None");
        return -1;
    }
    if (finish != Py_None && !PyCallable_Check(finish)) {
        PyErr_SetString(PyExc_TypeError, "finish must be a callable or None");
        return -1;
    }
    Entry *self = reinterpret_cast<Entry *>(object);
    Py_XSETREF(self->program, Py_NewRef(program));
    Py_XSETREF(self->graph, Py_NewRef(graph));
    Py_XSETREF(self->finish, Py_NewRef(finish));
    Py_XSETREF(self->tag, Py_NewRef(tag));
    self->is_plan = fw_plan_type != nullptr && fw_plan_run != nullptr && Py_IS_TYPE(graph, fw_plan_type());
    return 0;
}

int entry_traverse(PyObject *object, visitproc visit, void *arg) {
    Entry *self = reinterpret_cast<Entry *>(object);
    Py_VISIT(self->program);
    Py_VISIT(self->graph);
    Py_VISIT(self->finish);
    Py_VISIT(self->tag);
    return 0;
}

int entry_clear(PyObject *object) {
    Entry *self = reinterpret_cast<Entry *>(object);
    Py_CLEAR(self->program);
    Py_CLEAR(self->graph);
    Py_CLEAR(self->finish);
    Py_CLEAR(self->tag);
    return 0;
}

void entry_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    entry_clear(object);
    Py_TYPE(object)->tp_free(object);
}

PyMemberDef entry_members[] = {
    {"program", T_OBJECT_EX, offsetof(Entry, program), READONLY, "The guard program."},
    {"graph", T_OBJECT_EX, offsetof(Entry, graph), READONLY,
     "A Plan, a callable over the graph's inputs that returns a tuple or list, or None."},
    {"finish", T_OBJECT_EX, offsetof(Entry, finish), READONLY,
     "finish(outputs, function, *locals), or None: the single output is the result."},
    {"tag", T_OBJECT_EX, offsetof(Entry, tag), 0, "Whatever the driver wants to remember of this entry."},
    {"retired", T_BOOL, offsetof(Entry, retired), 0, "Whether no call is given to it any more."},
    {"calls", T_ULONGLONG, offsetof(Entry, calls), 0, "How often the entry's guards have passed."},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject entry_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "fusewright._native.Entry";
    type.tp_basicsize = sizeof(Entry);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
    type.tp_doc = "Entry(program, graph, finish=None, tag=None): one compiled version of a frame.";
    type.tp_new = PyType_GenericNew;
    type.tp_init = fw::caught<entry_init>;
    type.tp_dealloc = entry_dealloc;
    type.tp_traverse = entry_traverse;
    type.tp_clear = entry_clear;
    type.tp_members = entry_members;
    return type;
}();

// The tuple that `finish` gets from what the graph returned (stolen).
PyObject *outputs_tuple(PyObject *outputs) {
    if (PyTuple_CheckExact(outputs)) return outputs;
    PyObject *tuple = PyList_Check(outputs)    ? PyList_AsTuple(outputs)
                      : PyTuple_Check(outputs) ? PySequence_Tuple(outputs)
                                               : PyTuple_Pack(1, outputs);
    Py_DECREF(outputs);
    return tuple;
}

PyObject *single_output(PyObject *outputs) {
    bool is_tuple = PyTuple_Check(outputs), is_list = PyList_Check(outputs);
    if (!is_tuple && !is_list) return outputs;  // a plan that returns its output bare
    Py_ssize_t n = is_tuple ? PyTuple_GET_SIZE(outputs) : PyList_GET_SIZE(outputs);
    PyObject *result = nullptr;
    if (n == 1)
        result = Py_NewRef(is_tuple ? PyTuple_GET_ITEM(outputs, 0) : PyList_GET_ITEM(outputs, 0));
    else
        PyErr_Format(PyExc_RuntimeError, "a graph without `finish` must have one output, it returned %zd", n);
    Py_DECREF(outputs);
    return result;
}

PyObject *call_finish(PyObject *finish, PyObject *outputs, PyObject *function, PyObject *const *locals, Py_ssize_t n) {
    if (finish == Py_None) return single_output(outputs);
    Held tuple(outputs_tuple(outputs));
    if (tuple.get() == nullptr) return nullptr;
    PyObject *small[kStackArguments];
    std::vector<PyObject *> large;
    PyObject **arguments = small;
    if (n + 2 > kStackArguments) {
        large.resize(n + 2);
        arguments = large.data();
    }
    arguments[0] = tuple.get();
    arguments[1] = function;
    std::copy(locals, locals + n, arguments + 2);
    return PyObject_Vectorcall(finish, arguments, n + 2, nullptr);
}

// Says that a compiled call is about to be repeated eagerly. False when saying so raised.
bool tell_fallback(PyObject *function, PyObject *error, PyObject *entry) {
    if (fell_back == nullptr) return true;
    PyObject *arguments[] = {function, error == nullptr ? Py_None : error, entry};
    PyObject *answer = PyObject_Vectorcall(fell_back, arguments, 3, nullptr);
    Py_XDECREF(answer);
    return answer != nullptr || fw_no_room();
}

// Runs an entry whose guards have passed; `inputs` is consumed. Returns as fw_cache_run.
int entry_run(Entry *entry, PyObject **inputs, Py_ssize_t n_inputs, PyObject *function, PyObject *const *locals,
              Py_ssize_t n, PyObject **result) {
    entry->calls++;
    PyObject *outputs;
    if (entry->is_plan)
        outputs = fw_plan_run(entry->graph, inputs, n_inputs);
    else if (entry->graph == Py_None)
        outputs = PyTuple_New(0);
    else
        outputs = PyObject_Vectorcall(entry->graph, inputs, n_inputs, nullptr);
    for (Py_ssize_t i = 0; i < n_inputs; i++) Py_DECREF(inputs[i]);
    if (outputs == nullptr) {
        *result = nullptr;
        if (fallback_error != nullptr && PyErr_ExceptionMatches(fallback_error)) {
            PyObject *type, *error, *traceback;
            PyErr_Fetch(&type, &error, &traceback);
            PyErr_NormalizeException(&type, &error, &traceback);
            bool told = tell_fallback(function, error, reinterpret_cast<PyObject *>(entry));
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(traceback);
            return told ? 0 : 1;
        }
        return 1;
    }
    *result = call_finish(entry->finish, outputs, function, locals, n);
    return 1;
}

// --- FrameCache
// ---------------------------------------------------------------------------------------------------------------------

// Whether the entry was made for many sizes: the driver has tagged it.
bool is_general(const Entry *entry) { return entry->tag != nullptr && entry->tag != Py_None; }

// Moves the entry to the front; a general one only to the front of such: what was made for one size is quicker for it.
void move_forward(std::vector<Entry *> &entries, const Entry *entry) {
    auto first = entries.begin(), at = std::find(first, entries.end(), entry);
    // The guards' own Python code, or another thread, may have removed it.
    if (at == first || at == entries.end()) return;
    if (is_general(*at)) first = std::find_if(first, at, is_general);
    std::rotate(first, at, at + 1);
}

// Runs the entry if its guards pass; -1 when they do not.
int try_entry(FrameCache *self, Entry *entry, PyObject *function, PyObject *const *locals, Py_ssize_t n,
              PyObject **result) {
    if (entry->program == nullptr || entry->retired)
        return -1;  // never initialised, or cleared by the garbage collector
    PyObject *small[kStackArguments];
    std::vector<PyObject *> large;
    PyObject **inputs = small;
    Py_ssize_t n_inputs = fw::guard_program_inputs(entry->program);
    if (n_inputs > kStackArguments) {
        large.resize(n_inputs);
        inputs = large.data();
    }
    Held alive(Py_NewRef(reinterpret_cast<PyObject *>(entry)));
    bool passes = fw::guard_program_check(entry->program, locals, n, function, inputs);
    if (fw::interrupted()) {
        for (Py_ssize_t k = 0; passes && k < n_inputs; k++) Py_DECREF(inputs[k]);
        *result = nullptr;
        return 1;
    }
    if (!passes) return -1;
    move_forward(*self->entries, entry);
    return entry_run(entry, inputs, n_inputs, function, locals, n, result);
}

// Tries entry by entry; -1 when none passes. Where guards run Python code, another thread may reorder the entries
// meanwhile and one be left out: `miss` looks again, alone.
int try_entries(FrameCache *self, PyObject *function, PyObject *const *locals, Py_ssize_t n, PyObject **result) {
    int done = -1;
    for (size_t i = 0; done < 0 && i < self->entries->size(); i++)
        done = try_entry(self, (*self->entries)[i], function, locals, n, result);
    return done;
}

void append_entry(FrameCache *self, Entry *entry) {
    for (Entry *known : *self->entries)
        if (known == entry) return;
    self->entries->push_back(entry);
    Py_INCREF(entry);
}

int cache_run(FrameCache *self, PyObject *function, PyObject *const *locals, Py_ssize_t n, PyObject **result) {
    *result = nullptr;
    int done = try_entries(self, function, locals, n, result);
    if (done >= 0) return done;
    if (self->miss == nullptr || self->miss == Py_None) return 0;
    PyObject *tuple = PyTuple_New(n);
    if (tuple == nullptr) return 1;
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(tuple, i, Py_NewRef(locals[i]));
    PyObject *arguments[] = {reinterpret_cast<PyObject *>(self), function, tuple};
    PyObject *miss = Py_NewRef(self->miss), *found = PyObject_Vectorcall(miss, arguments, 3, nullptr);
    Py_DECREF(miss);
    Py_DECREF(tuple);
    if (found == nullptr) return fw_no_room() ? 0 : 1;
    if (found == Py_None) {
        Py_DECREF(found);
        return 0;
    }
    if (!Py_IS_TYPE(found, &entry_type)) {
        PyErr_Format(PyExc_TypeError, "miss must return an Entry or None, not %.100s", Py_TYPE(found)->tp_name);
        Py_DECREF(found);
        return 1;
    }
    Held alive(found);
    append_entry(self, reinterpret_cast<Entry *>(found));
    // The new entry goes through its guards as any other: they find the inputs. When they fail, the capture itself has
    // changed what they look at.
    done = try_entry(self, reinterpret_cast<Entry *>(found), function, locals, n, result);
    if (done < 0) return tell_fallback(function, nullptr, Py_None) ? 0 : 1;
    return done;
}

int cache_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *names[] = {"miss", nullptr};
    PyObject *miss;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", const_cast<char **>(names), &miss)) return -1;
    return cache_init_miss(reinterpret_cast<FrameCache *>(object), miss);
}

void cache_dealloc(PyObject *object) { cache_free(object, cache_clear); }

PyObject *cache_append(PyObject *self, PyObject *entry) {
    if (!Py_IS_TYPE(entry, &entry_type)) {
        PyErr_SetString(PyExc_TypeError, "append takes an Entry");
        return nullptr;
    }
    append_entry(reinterpret_cast<FrameCache *>(self), reinterpret_cast<Entry *>(entry));
    Py_RETURN_NONE;
}

PyObject *cache_remove(PyObject *self, PyObject *entry) {
    std::vector<Entry *> &entries = *reinterpret_cast<FrameCache *>(self)->entries;
    auto at = std::find(entries.begin(), entries.end(), reinterpret_cast<Entry *>(entry));
    if (at == entries.end()) {
        PyErr_SetString(PyExc_ValueError, "no such entry");
        return nullptr;
    }
    entries.erase(at);
    Py_DECREF(entry);
    Py_RETURN_NONE;
}

PyObject *cache_clear_entries(PyObject *self, PyObject *) {
    clear_entries(reinterpret_cast<FrameCache *>(self));
    Py_RETURN_NONE;
}

PyObject *cache_entries(PyObject *self, void *) {
    const std::vector<Entry *> &entries = *reinterpret_cast<FrameCache *>(self)->entries;
    PyObject *tuple = PyTuple_New(static_cast<Py_ssize_t>(entries.size()));
    for (size_t i = 0; tuple != nullptr && i < entries.size(); i++)
        PyTuple_SET_ITEM(tuple, i, Py_NewRef(reinterpret_cast<PyObject *>(entries[i])));
    return tuple;
}

PyObject *cache_get_miss(PyObject *self, void *) {
    PyObject *miss = reinterpret_cast<FrameCache *>(self)->miss;
    return Py_NewRef(miss == nullptr ? Py_None : miss);
}

int cache_set_miss(PyObject *self, PyObject *miss, void *) {
    if (miss == nullptr || (miss != Py_None && !PyCallable_Check(miss))) {
        PyErr_SetString(PyExc_TypeError, "miss must be a callable or None");
        return -1;
    }
    Py_XSETREF(reinterpret_cast<FrameCache *>(self)->miss, Py_NewRef(miss));
    return 0;
}

PyObject *cache_get_frames(PyObject *self, void *) {
    PyObject *frames = reinterpret_cast<FrameCache *>(self)->frames;
    return Py_NewRef(frames == nullptr ? Py_None : frames);
}

int cache_set_frames(PyObject *self, PyObject *frames, void *) {
    if (frames == nullptr || (frames != Py_None && !PyDict_Check(frames))) {
        PyErr_SetString(PyExc_TypeError, "frames must be a dict or None");
        return -1;
    }
    Py_XSETREF(reinterpret_cast<FrameCache *>(self)->frames, frames == Py_None ? nullptr : Py_NewRef(frames));
    return 0;
}

PyMethodDef cache_methods[] = {
    {"append", fw::caught<cache_append>, METH_O, "append(entry): adds it last, if it is not there."},
    {"remove", cache_remove, METH_O, "remove(entry)"},
    {"clear", cache_clear_entries, METH_NOARGS, "Forgets all entries."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef cache_members[] = {
    {"hooked", T_BOOL, offsetof(FrameCache, hooked), 0,
     "Whether eager runs compile the frames that they call (default True)."},
    {"__dictoffset__", T_PYSSIZET, offsetof(FrameCache, dict), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef cache_getset[] = {
    {"entries", cache_entries, nullptr,
     "The entries as a tuple: without a tag first, and the most recently used first.", nullptr},
    {"miss", cache_get_miss, cache_set_miss,
     "miss(cache, function, locals) -> Entry or None, or None: never capture again.", nullptr},
    {"frames", cache_get_frames, cache_set_frames,
     "The table of the frames that its eager runs call, one a compiler (csrc/hook.c), or None.", nullptr},
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject cache_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "fusewright._native.FrameCache";
    type.tp_basicsize = sizeof(FrameCache);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE;
    type.tp_doc = "FrameCache(miss): the compiled versions of one code object, for the frame hook.";
    type.tp_new = fw::caught<cache_new>;
    type.tp_init = fw::caught<cache_init>;
    type.tp_dealloc = cache_dealloc;
    type.tp_traverse = cache_traverse;
    type.tp_clear = cache_clear;
    type.tp_methods = cache_methods;
    type.tp_members = cache_members;
    type.tp_getset = cache_getset;
    type.tp_dictoffset = offsetof(FrameCache, dict);
    type.tp_weaklistoffset = offsetof(FrameCache, weak);
    return type;
}();

// --- module functions
// -------------------------------------------------------------------------------------------------------------------

PyObject *set_fallback_error(PyObject *, PyObject *cls) {
    if (!PyExceptionClass_Check(cls)) {
        PyErr_SetString(PyExc_TypeError, "set_fallback_error takes an exception class");
        return nullptr;
    }
    Py_XSETREF(fallback_error, Py_NewRef(cls));
    Py_RETURN_NONE;
}

PyObject *set_fell_back(PyObject *, PyObject *callable) {
    Py_XSETREF(fell_back, callable == Py_None ? nullptr : Py_NewRef(callable));
    Py_RETURN_NONE;
}

PyObject *set_left_alone(PyObject *, PyObject *callable) {
    Py_XSETREF(left_alone, callable == Py_None ? nullptr : Py_NewRef(callable));
    Py_RETURN_NONE;
}

PyObject *as_method(PyObject *, PyObject *function) { return PyInstanceMethod_New(function); }

PyMethodDef functions[] = {
    {"as_method", as_method, METH_O, "as_method(function): a built-in function as a method of the class that has it."},
    {"set_fallback_error", set_fallback_error, METH_O,
     "set_fallback_error(cls): a graph call that raises it is run eagerly instead."},
    {"set_fell_back", set_fell_back, METH_O,
     "set_fell_back(callable or None): called as callable(function, error or None, entry or None) before a compiled "
     "call is repeated eagerly."},
    {"set_left_alone", set_left_alone, METH_O,
     "set_left_alone(callable or None): called as callable(function) before a call that runs eagerly since "
     "modes_known() is false."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

// --- what a CompiledFunction shares
// ---------------------------------------------------------------------------------------------------

namespace fw {

// Whether a call of `function` may be answered by compiled code now: 1, 0, or -1 with an exception.
int may_compile(PyObject *function) {
    if (fw::forced_eager()) return 0;
    int known = fw::modes_known();
    if (known != 0 || left_alone == nullptr) return known;
    int saved = fw_hook_suspend();
    PyObject *answer = PyObject_CallOneArg(left_alone, function);
    fw_hook_resume(saved);
    Py_XDECREF(answer);
    return answer == nullptr ? -1 : 0;
}

// As fw_cache_run, for a call that may be compiled.
int run_cache(PyObject *cache, PyObject *function, PyObject *const *locals, Py_ssize_t n, PyObject **result) {
    FrameCache *self = reinterpret_cast<FrameCache *>(cache);
    Held frames(Py_XNewRef(self->frames));
    PyObject *before = fw_hook_enter_frames(frames.get());
    int saved = fw_hook_suspend();
    Finally left{[&] {
        fw_hook_resume(saved);
        fw_hook_enter_frames(before);
    }};
    return cache_run(self, function, locals, n, result);
}

void clear_entries(FrameCache *self) {
    if (self->entries == nullptr) return;
    std::vector<Entry *> old;
    old.swap(*self->entries);
    for (Entry *entry : old) Py_DECREF(entry);
}

int cache_init_miss(FrameCache *self, PyObject *miss) {
    if (miss != Py_None && !PyCallable_Check(miss)) {
        PyErr_SetString(PyExc_TypeError, "miss must be a callable or None");
        return -1;
    }
    Py_XSETREF(self->miss, Py_NewRef(miss));
    self->hooked = 1;
    return 0;
}

PyObject *cache_new(PyTypeObject *type, PyObject *, PyObject *) {
    Held object(type->tp_alloc(type, 0));
    if (object.get() != nullptr) reinterpret_cast<FrameCache *>(object.get())->entries = new std::vector<Entry *>;
    return object.release();
}

int cache_traverse(PyObject *object, visitproc visit, void *arg) {
    FrameCache *self = reinterpret_cast<FrameCache *>(object);
    Py_VISIT(self->miss);
    Py_VISIT(self->frames);
    Py_VISIT(self->dict);
    if (self->entries != nullptr)
        for (Entry *entry : *self->entries) Py_VISIT(entry);
    return 0;
}

int cache_clear(PyObject *object) {
    FrameCache *self = reinterpret_cast<FrameCache *>(object);
    Py_CLEAR(self->miss);
    Py_CLEAR(self->frames);
    Py_CLEAR(self->dict);
    clear_entries(self);
    return 0;
}

void cache_free(PyObject *object, inquiry clear) {
    FrameCache *self = reinterpret_cast<FrameCache *>(object);
    PyObject_GC_UnTrack(object);
    if (self->weak != nullptr) PyObject_ClearWeakRefs(object);
    clear(object);
    delete self->entries;
    Py_TYPE(object)->tp_free(object);
}

}  // namespace fw

int fw_no_room(void) {
    if (!PyErr_ExceptionMatches(PyExc_RecursionError) && !PyErr_ExceptionMatches(PyExc_MemoryError)) return 0;
    if (fw::is_programs()) return 0;
    PyErr_Clear();
    return 1;
}

int fw_is_cache(PyObject *object) { return PyObject_TypeCheck(object, &cache_type); }

int fw_cache_run(PyObject *cache, PyObject *function, PyObject *const *locals, Py_ssize_t n, PyObject **result) {
    *result = nullptr;
    // Not told of: the call that entered the mode was, and what it runs are the frames of tracers, as a rule.
    int compiled = fw::forced_eager() ? 0 : fw::modes_known();
    if (compiled <= 0) return compiled < 0;
    int done = fw::caught<fw::run_cache>(cache, function, locals, n, result);
    if (done >= 0) return done;
    *result = nullptr;
    return 1;
}

int fw_entry_init(PyObject *module) {
    if (PyModule_AddFunctions(module, functions) < 0 || fw::interruptions_init(module) < 0 ||
        fw::stance_init(module) < 0 || fw::modes_init(module) < 0 || PyModule_AddType(module, &entry_type) < 0 ||
        PyModule_AddType(module, &cache_type) < 0)
        return -1;
    return fw::compiled_function_init(module, &cache_type);
}
