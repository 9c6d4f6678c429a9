// The states in which compiled code may run, see modes.h.
//
// PyTorch keeps for each thread which dispatch keys are switched on and off beside the usual ones. Every tracer,
// transform and dispatch mode needs one to see operators, so one comparison covers those that are known here and those
// that are not. Torch-function modes have a stack of their own; what is a global of a Python module (torch.fx's flag,
// the level of forward-mode differentiation) is read again when the module's dict has changed.
//
// Always holds: nothing is read natively before capture/torch_state.py has seen it agree with PyTorch's own answers;
// otherwise Python is asked.
#include "modes.h"

#include <dlfcn.h>

#include <cstdint>
#include <vector>

#include "dict_versions.h"
#include "entry.h"

namespace fw {
namespace {

// As c10::impl::PODLocalDispatchKeySet: what differs from a new thread's.
struct Keys {
    uint64_t included, excluded;
};

void *c10 = nullptr;
int64_t (*function_modes)() = nullptr;
const bool *anomaly = nullptr;
bool native = false;
Keys inference{};           // what inference mode changes
uint64_t ignored = 0;       // of `excluded`: what autocast changes and named tensors need, in any combination
PyObject *asked = nullptr;  // callable() -> bool: the same by Python, for what is not read here

// A global of a Python module, and the value that it usually has.
struct Global {
    PyObject *names, *name, *usual;
    const uint64_t *place;  // of the dict's version
    uint64_t seen;
    bool holds;
};
std::vector<Global> globals;

// This thread's: the loader knows where.
const Keys *find_keys() { return static_cast<const Keys *>(dlsym(c10, "_ZN3c104impl26raw_local_dispatch_key_setE")); }

bool keys_known() {
    static thread_local const Keys *found = nullptr;
    if (found == nullptr) found = find_keys();
    const uint64_t excluded = found->excluded & ~ignored;
    if (found->included == 0 && excluded == 0) return true;
    return found->included == inference.included && excluded == inference.excluded;
}

bool is_usual(Global &one) {
    if (one.seen != 0 && *one.place == one.seen) return one.holds;
    one.place = dict_version_place(one.names);
    one.seen = one.place == nullptr ? 0 : *one.place;
    one.holds = PyDict_GetItemWithError(one.names, one.name) == one.usual;
    PyErr_Clear();  // a name that is gone is not usual
    return one.holds;
}

PyObject *probe_modes(PyObject *, PyObject *args) {
    const char *c10_path, *cpu_path;
    if (!PyArg_ParseTuple(args, "ss", &c10_path, &cpu_path)) return nullptr;
    // RTLD_NOLOAD: `import torch` has loaded them; another copy would have its own state.
    c10 = dlopen(c10_path, RTLD_LAZY | RTLD_NOLOAD);
    void *torch_cpu = dlopen(cpu_path, RTLD_LAZY | RTLD_NOLOAD);
    if (c10 == nullptr || torch_cpu == nullptr) Py_RETURN_NONE;
    *reinterpret_cast<void **>(&function_modes) = dlsym(torch_cpu, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv");
    anomaly = static_cast<const bool *>(dlsym(torch_cpu, "_ZN5torch8autograd11AnomalyMode8_enabledE"));
    const Keys *keys = find_keys();
    if (keys == nullptr || function_modes == nullptr || anomaly == nullptr) Py_RETURN_NONE;
    return Py_BuildValue("KKLO", keys->included, keys->excluded, static_cast<long long>(function_modes()),
                         *anomaly ? Py_True : Py_False);
}

PyObject *set_modes(PyObject *, PyObject *args) {
    int verified;
    unsigned long long included, excluded, bits;
    PyObject *callable, *rows;
    if (!PyArg_ParseTuple(args, "p(KK)KOO!", &verified, &included, &excluded, &bits, &callable, &PyTuple_Type, &rows))
        return nullptr;
    std::vector<Global> read;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(rows); i++) {
        PyObject *names, *name, *usual;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(rows, i), "O!UO", &PyDict_Type, &names, &name, &usual)) return nullptr;
        read.push_back({names, name, usual, nullptr, 0, false});
    }
    for (Global &one : read) {
        Py_INCREF(one.names);
        Py_INCREF(one.name);
        Py_INCREF(one.usual);
    }
    globals.swap(read);  // what was there before is kept alive: it is set once
    inference = {included, excluded};
    ignored = bits;
    native = verified != 0;
    Py_XSETREF(asked, Py_NewRef(callable));
    Py_RETURN_NONE;
}

PyObject *py_modes_known(PyObject *, PyObject *) {
    int known = modes_known();
    return known < 0 ? nullptr : PyBool_FromLong(known);
}

PyMethodDef functions[] = {
    {"probe_modes", probe_modes, METH_VARARGS,
     "probe_modes(libc10 path, libtorch_cpu path) -> (keys included, keys excluded, torch-function modes, anomaly "
     "detection) of this thread as they\n"
     "are read natively, or None."},
    {"set_modes", set_modes, METH_VARARGS,
     "set_modes(native, inference mode's (included, excluded), ignored's excluded, asked, globals): what modes_known "
     "compares with. `asked() -> bool`\n"
     "where that cannot be read natively; globals: rows (dict, name, usual value), the first of them torch.fx's."},
    {"modes_known", py_modes_known, METH_NOARGS,
     "modes_known() -> whether compiled code may run on this thread now; see csrc/modes.h."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool plain_modes(bool *read) {
    *read = native;
    for (Global &one : globals)
        if (!is_usual(one)) return false;
    return !native || (keys_known() && !*anomaly);
}

int modes_known() {
    bool read;
    if (!plain_modes(&read)) return 0;
    if (read && function_modes() == 0) return 1;
    if (asked == nullptr) return 1;
    int saved = fw_hook_suspend();
    PyObject *answer = PyObject_CallNoArgs(asked);
    fw_hook_resume(saved);
    int known = answer == nullptr ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return known;
}

int modes_init(PyObject *module) { return PyModule_AddFunctions(module, functions); }

}  // namespace fw
