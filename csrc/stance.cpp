// The stance, see stance.h.
//
// torch.compiler.set_stance keeps its stance in a global of the module that implements it, which its first call
// imports. That module is looked for in sys.modules, never imported here: as long as it is not there, nobody has set a
// stance. Always holds: what is remembered is good for one version of the dict that it was read from; where a dict has
// no version, it is read again.
#include "stance.h"

#include "dict_versions.h"
#include "values.h"

namespace fw {
namespace {

int ours = 0;  // 1: force_eager
PyObject *module_name, *global_name, *field_name, *force_eager;
PyObject *holder = nullptr;  // the namespace of the module
uint64_t modules_seen = 0, holder_seen = 0;
bool forced = false;  // by PyTorch's stance, in version holder_seen

// The namespace with PyTorch's stance, borrowed; NULL while there is none.
PyObject *torch_namespace() {
    if (holder != nullptr) return holder;
    PyObject *modules = PyImport_GetModuleDict();
    uint64_t version = dict_version(modules);
    if (version != 0 && version == modules_seen) return nullptr;
    PyObject *found = PyDict_GetItemWithError(modules, module_name);
    if (found != nullptr && PyModule_Check(found)) holder = Py_NewRef(PyModule_GetDict(found));
    modules_seen = version;
    return holder;
}

// The name of PyTorch's stance, a new reference; NULL without an exception while it has none.
PyObject *torch_stance_name() {
    PyObject *names = torch_namespace();
    PyObject *object = names == nullptr ? nullptr : PyDict_GetItemWithError(names, global_name);
    PyObject *name = object == nullptr ? nullptr : PyObject_GetAttr(object, field_name);
    PyErr_Clear();
    return name;
}

PyObject *set_stance(PyObject *, PyObject *value) {
    long wanted = PyLong_AsLong(value);
    if (wanted != 0 && wanted != 1) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "stance is 0 (default) or 1 (force eager)");
        return nullptr;
    }
    PyObject *before = PyLong_FromLong(ours);
    ours = static_cast<int>(wanted);
    return before;
}

PyObject *torch_stance(PyObject *, PyObject *) {
    PyObject *name = torch_stance_name();
    return name != nullptr && PyUnicode_Check(name) ? name : (Py_XDECREF(name), PyUnicode_FromString("default"));
}

PyMethodDef functions[] = {
    {"set_stance", set_stance, METH_O, "set_stance(0 or 1) -> the one before. 1: compiled functions run eagerly."},
    {"torch_stance", torch_stance, METH_NOARGS,
     "torch_stance() -> the name of the stance that torch.compiler.set_stance has set."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool forced_eager() {
    if (ours == 1) return true;
    PyObject *names = torch_namespace();
    if (names == nullptr) return false;
    uint64_t version = dict_version(names);
    if (version != 0 && version == holder_seen) return forced;
    PyObject *name = torch_stance_name();
    forced = name != nullptr && PyUnicode_Check(name) && PyUnicode_Compare(name, force_eager) == 0;
    Py_XDECREF(name);
    holder_seen = version;
    return forced;
}

int stance_init(PyObject *module) {
    module_name = PyUnicode_InternFromString("torch._dynamo.eval_frame");
    global_name = PyUnicode_InternFromString("_stance");
    field_name = PyUnicode_InternFromString("stance");
    force_eager = PyUnicode_InternFromString("force_eager");
    return module_name && global_name && field_name && force_eager ? PyModule_AddFunctions(module, functions) : -1;
}

}  // namespace fw
