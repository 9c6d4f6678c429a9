// CompiledFunction: a FrameCache that stands for a Python function. It binds arguments to the locals that CPython would
// give the frame, and is called, bound as a method, inspected and weakly referenced like it.
//
// Always holds: nothing visible outside happens before a graph call has succeeded, so a call that cannot be answered by
// compiled code runs eagerly.
#include "frame_cache.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "modes.h"
#include "stack.h"
#include "stance.h"

namespace {

using namespace fw;

struct CompiledFunction {
    FrameCache cache;
    PyObject *function, *code;
    PyObject *plainly;  // what a call runs in a mode that compiled code is not made for, or NULL: the function
    vectorcallfunc vectorcall;
    int arguments, positional;  // argument slots of the code; positional parameters
    bool plain;                 // positional parameters only
};

void read_code(CompiledFunction *self) {
    PyCodeObject *code =
        reinterpret_cast<PyCodeObject *>(reinterpret_cast<PyFunctionObject *>(self->function)->func_code);
    Py_XSETREF(self->code, Py_NewRef(reinterpret_cast<PyObject *>(code)));
    self->positional = code->co_argcount;
    self->arguments = code->co_argcount + code->co_kwonlyargcount + !!(code->co_flags & CO_VARARGS) +
                      !!(code->co_flags & CO_VARKEYWORDS);
    self->plain = self->arguments == self->positional;
}

bool same_name(PyObject *a, PyObject *b) { return a == b || PyUnicode_Compare(a, b) == 0; }

// Index of the parameter called `name` that may be given by keyword, or -1.
Py_ssize_t find_parameter(PyCodeObject *code, PyObject *name) {
    Py_ssize_t n = code->co_argcount + code->co_kwonlyargcount;
    for (Py_ssize_t i = code->co_posonlyargcount; i < n; i++)
        if (PyTuple_GET_ITEM(code->co_localsplusnames, i) == name) return i;
    for (Py_ssize_t i = code->co_posonlyargcount; i < n; i++)
        if (same_name(PyTuple_GET_ITEM(code->co_localsplusnames, i), name)) return i;
    return -1;
}

// Binds a call's arguments to out[0:arguments] (new references, NULL where unset) as CPython does. False, with or
// without an exception, when that fails.
bool bind(CompiledFunction *self, PyFunctionObject *function, PyObject *const *args, Py_ssize_t n_args,
          PyObject *kwnames, PyObject **out) {
    PyCodeObject *code = reinterpret_cast<PyCodeObject *>(self->code);
    Py_ssize_t positional = code->co_argcount, named = positional + code->co_kwonlyargcount;
    bool has_args = code->co_flags & CO_VARARGS, has_kwargs = code->co_flags & CO_VARKEYWORDS;
    PyObject *kwargs = nullptr;
    if (has_kwargs) {
        kwargs = out[named + has_args] = PyDict_New();
        if (kwargs == nullptr) return false;
    }
    for (Py_ssize_t i = 0; i < std::min(n_args, positional); i++) out[i] = Py_NewRef(args[i]);
    if (has_args) {
        Py_ssize_t extra = std::max<Py_ssize_t>(n_args - positional, 0);
        PyObject *rest = out[named] = PyTuple_New(extra);
        if (rest == nullptr) return false;
        for (Py_ssize_t i = 0; i < extra; i++) PyTuple_SET_ITEM(rest, i, Py_NewRef(args[positional + i]));
    } else if (n_args > positional) {
        return false;
    }
    for (Py_ssize_t i = 0; kwnames != nullptr && i < PyTuple_GET_SIZE(kwnames); i++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, i), *value = args[n_args + i];
        if (!PyUnicode_Check(name)) return false;
        Py_ssize_t at = find_parameter(code, name);
        if (at >= 0) {
            if (out[at] != nullptr) return false;
            out[at] = Py_NewRef(value);
        } else if (kwargs == nullptr || PyDict_SetItem(kwargs, name, value) < 0) {
            return false;
        }
    }
    PyObject *defaults = function->func_defaults;
    Py_ssize_t first_default = positional - (defaults == nullptr ? 0 : PyTuple_GET_SIZE(defaults));
    for (Py_ssize_t i = 0; i < named; i++) {
        if (out[i] != nullptr) continue;
        PyObject *value = nullptr;
        if (i >= positional)
            value = function->func_kwdefaults ? PyDict_GetItemWithError(function->func_kwdefaults,
                                                                        PyTuple_GET_ITEM(code->co_localsplusnames, i))
                                              : nullptr;
        else if (i >= first_default)
            value = PyTuple_GET_ITEM(defaults, i - first_default);
        if (value == nullptr) return false;
        out[i] = Py_NewRef(value);
    }
    return true;
}

PyObject *run_eagerly(CompiledFunction *self, PyObject *function, PyObject *const *args, size_t nargsf,
                      PyObject *kwnames) {
    Py_INCREF(function);
    PyObject *frames = Py_XNewRef(self->cache.frames), *before = fw_hook_enter_frames(frames);
    PyObject *result = self->cache.hooked ? fw_hook_call(function, args, nargsf, kwnames, 1)
                                          : PyObject_Vectorcall(function, args, nargsf, kwnames);
    fw_hook_enter_frames(before);
    Py_XDECREF(frames);
    Py_DECREF(function);
    return result;
}

// A call of `function`, whose code is the compiled one's.
PyObject *call_over(CompiledFunction *self, PyObject *function, PyObject *const *args, size_t nargsf,
                    PyObject *kwnames) {
    PyObject *object = reinterpret_cast<PyObject *>(self);
    Py_ssize_t n_args = PyVectorcall_NARGS(nargsf);
    PyObject *result = nullptr;
    // The caller's reference to `self` need not outlive the call (a compiled function may replace itself).
    Held alive(Py_NewRef(object));
    int done;
    if (self->plain && kwnames == nullptr && n_args == self->positional) {
        done = run_cache(object, function, args, n_args, &result);
    } else {
        PyObject *small[kStackArguments];
        std::vector<PyObject *> large;
        PyObject **locals = small;
        const Py_ssize_t n = self->arguments;
        if (n > kStackArguments) {
            large.resize(n);
            locals = large.data();
        }
        std::fill_n(locals, n, nullptr);
        Finally given_back{[&] {
            for (Py_ssize_t i = 0; i < n; i++) Py_XDECREF(locals[i]);
        }};
        if (bind(self, reinterpret_cast<PyFunctionObject *>(function), args, n_args, kwnames, locals)) {
            done = run_cache(object, function, locals, n, &result);
        } else {
            PyErr_Clear();  // the function itself raises CPython's own error
            done = 0;
        }
    }
    return done ? result : run_eagerly(self, function, args, nargsf, kwnames);
}

PyObject *function_call(PyObject *object, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    CompiledFunction *self = reinterpret_cast<CompiledFunction *>(object);
    if (self->function == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "this compiled function has been cleared by the garbage collector");
        return nullptr;
    }
    if (fw_stack_is_short()) return nullptr;
    int compiled = may_compile(self->function);
    if (compiled < 0) return nullptr;
    if (compiled == 0) {
        bool plainly = self->plainly != nullptr && self->plainly != Py_None && !fw::forced_eager();
        PyObject *eager = plainly ? self->plainly : self->function;
        return PyObject_Vectorcall(eager, args, nargsf, kwnames);
    }
    if (reinterpret_cast<PyFunctionObject *>(self->function)->func_code != self->code) {
        clear_entries(&self->cache);
        read_code(self);
    }
    return call_over(self, self->function, args, nargsf, kwnames);
}

// call_as(function, *args): the same code over other cells finds the versions that there are.
PyObject *function_call_as(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    CompiledFunction *self = reinterpret_cast<CompiledFunction *>(object);
    if (nargs < 1 || !PyFunction_Check(args[0]) ||
        reinterpret_cast<PyFunctionObject *>(args[0])->func_code != self->code) {
        PyErr_SetString(PyExc_TypeError, "call_as takes a function of the same code, and its arguments");
        return nullptr;
    }
    if (fw_stack_is_short()) return nullptr;
    int compiled = may_compile(args[0]);
    if (compiled < 0) return nullptr;
    if (compiled == 0) return PyObject_Vectorcall(args[0], args + 1, nargs - 1, nullptr);
    return call_over(self, args[0], args + 1, nargs - 1, nullptr);
}

// What functools.update_wrapper would set, so that the compiled function reads like the function.
int copy_identity(CompiledFunction *self) {
    static const char *const names[] = {"__module__", "__name__",        "__qualname__",
                                        "__doc__",    "__annotations__", nullptr};
    PyObject *object = reinterpret_cast<PyObject *>(self);
    PyObject *dict = PyObject_GenericGetDict(object, nullptr);
    if (dict == nullptr) return -1;
    PyObject *attributes = PyObject_GetAttrString(self->function, "__dict__");
    int failed = attributes == nullptr || PyDict_Update(dict, attributes) < 0 ||
                 PyDict_SetItemString(dict, "__wrapped__", self->function) < 0;
    Py_XDECREF(attributes);
    for (const char *const *name = names; !failed && *name != nullptr; name++) {
        PyObject *value = PyObject_GetAttrString(self->function, *name);
        failed = value == nullptr || PyDict_SetItemString(dict, *name, value) < 0;
        Py_XDECREF(value);
    }
    Py_DECREF(dict);
    return failed ? -1 : 0;
}

int function_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *names[] = {"function", "miss", nullptr};
    PyObject *function, *miss;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", const_cast<char **>(names), &PyFunction_Type, &function,
                                     &miss))
        return -1;
    CompiledFunction *self = reinterpret_cast<CompiledFunction *>(object);
    if (cache_init_miss(&self->cache, miss) < 0) return -1;
    Py_XSETREF(self->function, Py_NewRef(function));
    self->vectorcall = fw::caught<function_call>;
    read_code(self);
    return copy_identity(self);
}

int function_traverse(PyObject *object, visitproc visit, void *arg) {
    CompiledFunction *self = reinterpret_cast<CompiledFunction *>(object);
    Py_VISIT(self->function);
    Py_VISIT(self->code);
    Py_VISIT(self->plainly);
    return cache_traverse(object, visit, arg);
}

int function_clear(PyObject *object) {
    CompiledFunction *self = reinterpret_cast<CompiledFunction *>(object);
    Py_CLEAR(self->function);
    Py_CLEAR(self->code);
    Py_CLEAR(self->plainly);
    return cache_clear(object);
}

void function_dealloc(PyObject *object) { cache_free(object, function_clear); }

PyObject *function_bind(PyObject *self, PyObject *instance, PyObject *) {
    return instance == nullptr || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

PyObject *function_repr(PyObject *object) {
    return PyUnicode_FromFormat("<compiled %R>", reinterpret_cast<CompiledFunction *>(object)->function);
}

PyObject *function_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *object = cache_new(type, args, kwargs);
    if (object != nullptr) reinterpret_cast<CompiledFunction *>(object)->vectorcall = fw::caught<function_call>;
    return object;
}

// Copies of a function are the function.
PyObject *function_copy(PyObject *self, PyObject *) { return Py_NewRef(self); }

PyMethodDef function_methods[] = {
    {"call_as", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fw::caught<function_call_as>)),
     METH_FASTCALL, "call_as(function, *args): a call of a function that has the same code, by the same versions."},
    {"__copy__", function_copy, METH_NOARGS, nullptr},
    {"__deepcopy__", function_copy, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// It says that it is a function, which `inspect`, `pydoc` and torch.fx ask before they look at these parts of one.
PyObject *function_class(PyObject *, void *) { return Py_NewRef(reinterpret_cast<PyObject *>(&PyFunction_Type)); }

PyObject *function_part(PyObject *self, void *name) {
    PyObject *function = reinterpret_cast<CompiledFunction *>(self)->function;
    return function == nullptr ? Py_NewRef(Py_None) : PyObject_GetAttrString(function, static_cast<const char *>(name));
}

int set_function_part(PyObject *self, PyObject *value, void *name) {
    PyObject *function = reinterpret_cast<CompiledFunction *>(self)->function;
    return function == nullptr ? 0 : PyObject_SetAttrString(function, static_cast<const char *>(name), value);
}

#define FW_PART(name) {name, function_part, set_function_part, "The function's.", const_cast<char *>(name)}
PyGetSetDef function_getset[] = {
    {"__class__", function_class, nullptr, nullptr, nullptr},
    FW_PART("__code__"),
    FW_PART("__globals__"),
    FW_PART("__defaults__"),
    FW_PART("__kwdefaults__"),
    FW_PART("__closure__"),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
#undef FW_PART

PyMemberDef function_members[] = {
    {"function", T_OBJECT_EX, offsetof(CompiledFunction, function), READONLY, "The original function."},
    {"plainly", T_OBJECT, offsetof(CompiledFunction, plainly), 0,
     "What a call runs where modes_known() is false, or None: the function."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CompiledFunction, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject function_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "fusewright._native.CompiledFunction";
    type.tp_basicsize = sizeof(CompiledFunction);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_VECTORCALL |
                    Py_TPFLAGS_METHOD_DESCRIPTOR;
    type.tp_doc = "CompiledFunction(function, miss): calls `function` through its compiled versions.";
    type.tp_new = fw::caught<function_new>;
    type.tp_init = fw::caught<function_init>;
    type.tp_dealloc = function_dealloc;
    type.tp_traverse = function_traverse;
    type.tp_clear = function_clear;
    type.tp_descr_get = function_bind;
    type.tp_repr = function_repr;
    type.tp_call = PyVectorcall_Call;
    type.tp_methods = function_methods;
    type.tp_members = function_members;
    type.tp_getset = function_getset;
    type.tp_vectorcall_offset = offsetof(CompiledFunction, vectorcall);
    type.tp_dictoffset = offsetof(FrameCache, dict);
    type.tp_weaklistoffset = offsetof(FrameCache, weak);
    return type;
}();

}  // namespace

int fw::compiled_function_init(PyObject *module, PyTypeObject *base) {
    function_type.tp_base = base;
    return PyModule_AddType(module, &function_type);
}
