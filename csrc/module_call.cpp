// ModuleCall: the `__call__` of the classes of compiled modules. Takes the module and the call's arguments; calls the
// compiled `forward` at once while a call of the module comes to just that, and the Python function that it stands for
// (CompiledModuleBase.__call__) otherwise.
//
// Always holds: each call looks at what torch.nn.Module._call_impl looks at. `forward` is called at once only if the
// module's class has nn.Module's own `__call__` and object's `__getattribute__`, `forward` is the class's and the very
// function that was compiled, and the module and the process have no hooks.
#include "native.h"

#include <structmember.h>

#include <cstddef>
#include <vector>

#include "interruptions.h"
#include "modes.h"

namespace {

// The names that are looked up, made once.
struct Names {
    PyObject *caller, *fast, *forward, *module, *call, *call_impl, *getattribute, *method;
    PyObject *hooks[4], *global_hooks[4];
} names;

struct ModuleCall {
    PyObject_HEAD
    PyObject *function;      // the Python function for all other cases
    PyObject *module_call;   // nn.Module.__call__
    PyObject *call_impl;     // nn.Module._call_impl
    PyObject *global_hooks;  // the dict of torch.nn.modules.module
    PyObject *object_getattribute;
    vectorcallfunc vectorcall;
};

int module_call_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    static const char *keywords[] = {"function", "module_call", "call_impl", "global_hooks", nullptr};
    PyObject *function, *module_call, *call_impl, *global_hooks;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO!", const_cast<char **>(keywords), &function, &module_call,
                                     &call_impl, &PyDict_Type, &global_hooks))
        return -1;
    ModuleCall *self = reinterpret_cast<ModuleCall *>(object);
    PyObject *own = PyObject_GetAttr(reinterpret_cast<PyObject *>(&PyBaseObject_Type), names.getattribute);
    if (own == nullptr) return -1;
    Py_XSETREF(self->function, Py_NewRef(function));
    Py_XSETREF(self->module_call, Py_NewRef(module_call));
    Py_XSETREF(self->call_impl, Py_NewRef(call_impl));
    Py_XSETREF(self->global_hooks, Py_NewRef(global_hooks));
    Py_XSETREF(self->object_getattribute, own);
    return 0;
}

// Whether the dict holds an empty container under each of four names. Anything strange is "no": Python then decides.
bool all_empty(PyObject *dict, PyObject *const *keys) {
    for (int i = 0; i < 4; ++i) {
        PyObject *table = PyDict_GetItemWithError(dict, keys[i]);
        if (table == nullptr || !PyDict_Check(table) || PyDict_GET_SIZE(table) != 0) return false;
    }
    return true;
}

// Whether `type.name` is `wanted`, for a class whose own class is `type` (others may answer as they like).
bool class_has(PyTypeObject *type, PyObject *name, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(reinterpret_cast<PyObject *>(type), name);
    bool same = found == wanted;
    Py_XDECREF(found);
    return same;
}

// The compiled `forward` and the module to call it on, if a call of the compiled module `object` comes to that. New
// references.
bool find_fast(ModuleCall *self, PyObject *object, PyObject **fast, PyObject **module) {
    *fast = *module = nullptr;
    PyObject *caller = PyObject_GetAttr(object, names.caller), *function = nullptr, *dict = nullptr;
    bool found = false;
    if (caller != nullptr && (*module = PyObject_GetAttr(caller, names.module)) != nullptr &&
        (function = PyObject_GetAttr(caller, names.forward)) != nullptr && PyFunction_Check(function) &&
        (*fast = PyObject_GetAttr(caller, names.fast)) != nullptr && *fast != Py_None) {
        PyTypeObject *type = Py_TYPE(*module);
        dict = Py_TYPE(type) == &PyType_Type ? PyObject_GenericGetDict(*module, nullptr) : nullptr;
        found = dict != nullptr && PyDict_Check(dict) && all_empty(dict, names.hooks) &&
                all_empty(self->global_hooks, names.global_hooks) &&
                PyDict_GetItemWithError(dict, names.method) == nullptr &&
                PyDict_GetItemWithError(dict, names.call_impl) == nullptr && !PyErr_Occurred() &&
                class_has(type, names.call, self->module_call) &&
                _PyType_Lookup(type, names.call_impl) == self->call_impl && class_has(type, names.method, function) &&
                class_has(type, names.getattribute, self->object_getattribute);
    }
    Py_XDECREF(dict);
    Py_XDECREF(function);
    Py_XDECREF(caller);
    if (!found) {
        fw::drop_error();  // whatever it was, Python's way of the call meets it again
        Py_CLEAR(*fast);
        Py_CLEAR(*module);
    }
    return found;
}

PyObject *module_call_vectorcall(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    ModuleCall *self = reinterpret_cast<ModuleCall *>(callable);
    Py_ssize_t n = PyVectorcall_NARGS(nargsf);
    PyObject *fast, *module;
    if (self->function == nullptr) {
        PyErr_SetString(PyExc_TypeError, "a ModuleCall that was not initialised");
        return nullptr;
    }
    int known = fw::modes_known();  // else a tracer may look for the module itself
    if (known < 0) return nullptr;
    if (known == 0 || n == 0 || !find_fast(self, args[0], &fast, &module))
        return fw::interrupted() ? nullptr : PyObject_Vectorcall(self->function, args, nargsf, kwnames);
    fw::Held function(fast), instance(module);
    Py_ssize_t total = n + (kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames));
    PyObject *few[16];
    std::vector<PyObject *> many;
    PyObject **values = few;
    if (total > 16) {
        many.resize(static_cast<size_t>(total));
        values = many.data();
    }
    for (Py_ssize_t i = 0; i < total; ++i) values[i] = args[i];
    values[0] = module;
    return PyObject_Vectorcall(fast, values, static_cast<size_t>(n), kwnames);
}

PyObject *module_call_new(PyTypeObject *type, PyObject *, PyObject *) {
    PyObject *object = type->tp_alloc(type, 0);
    if (object != nullptr) reinterpret_cast<ModuleCall *>(object)->vectorcall = fw::caught<module_call_vectorcall>;
    return object;
}

PyObject *module_call_get(PyObject *object, PyObject *instance, PyObject *) {
    return instance == nullptr || instance == Py_None ? Py_NewRef(object) : PyMethod_New(object, instance);
}

int module_call_traverse(PyObject *object, visitproc visit, void *arg) {
    ModuleCall *self = reinterpret_cast<ModuleCall *>(object);
    Py_VISIT(self->function);
    Py_VISIT(self->module_call);
    Py_VISIT(self->call_impl);
    Py_VISIT(self->global_hooks);
    Py_VISIT(self->object_getattribute);
    return 0;
}

int module_call_clear(PyObject *object) {
    ModuleCall *self = reinterpret_cast<ModuleCall *>(object);
    Py_CLEAR(self->function);
    Py_CLEAR(self->module_call);
    Py_CLEAR(self->call_impl);
    Py_CLEAR(self->global_hooks);
    Py_CLEAR(self->object_getattribute);
    return 0;
}

void module_call_dealloc(PyObject *object) {
    PyObject_GC_UnTrack(object);
    module_call_clear(object);
    Py_TYPE(object)->tp_free(object);
}

PyMemberDef module_call_members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(ModuleCall, function), READONLY, "The Python function that this stands for."},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject module_call_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "fusewright._native.ModuleCall";
    type.tp_basicsize = sizeof(ModuleCall);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
    type.tp_doc = "ModuleCall(function, module_call, call_impl, global_hooks): the `__call__` of compiled modules.";
    type.tp_vectorcall_offset = offsetof(ModuleCall, vectorcall);
    type.tp_call = PyVectorcall_Call;
    type.tp_new = fw::caught<module_call_new>;
    type.tp_init = fw::caught<module_call_init>;
    type.tp_dealloc = module_call_dealloc;
    type.tp_traverse = module_call_traverse;
    type.tp_clear = module_call_clear;
    type.tp_descr_get = module_call_get;
    type.tp_members = module_call_members;
    return type;
}();

bool make_names() {
    static const char *hooks[] = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"};
    static const char *global_hooks[] = {"_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
                                         "_global_backward_pre_hooks"};
    struct {
        PyObject **place;
        const char *text;
    } rows[] = {{&names.caller, "_fusewright_caller"},
                {&names.fast, "_fast"},
                {&names.forward, "_forward"},
                {&names.module, "module"},
                {&names.call, "__call__"},
                {&names.call_impl, "_call_impl"},
                {&names.getattribute, "__getattribute__"},
                {&names.method, "forward"}};
    for (auto &row : rows)
        if ((*row.place = PyUnicode_InternFromString(row.text)) == nullptr) return false;
    for (int i = 0; i < 4; ++i) {
        if ((names.hooks[i] = PyUnicode_InternFromString(hooks[i])) == nullptr) return false;
        if ((names.global_hooks[i] = PyUnicode_InternFromString(global_hooks[i])) == nullptr) return false;
    }
    return true;
}

}  // namespace

int fw_module_call_init(PyObject *module) {
    if (!make_names() || PyType_Ready(&module_call_type) < 0) return -1;
    return PyModule_AddObjectRef(module, "ModuleCall", reinterpret_cast<PyObject *>(&module_call_type));
}
