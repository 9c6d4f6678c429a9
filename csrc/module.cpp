// The extension module fusewright._native: takes nothing, gives the types and functions of its parts. It works in the
// main interpreter only: its types and what it remembers are one for the process.
#include "native.h"

namespace {

int fill(PyObject *module) {
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "fusewright works in the main interpreter only, not in subinterpreters");
        return -1;
    }
    static PyObject *first = nullptr;  // imported once more, it is the same again
    if (first != nullptr) return PyDict_Update(PyModule_GetDict(module), PyModule_GetDict(first));
    bool ok = fw_guards_init(module) == 0 && fw_entry_init(module) == 0 && fw_hook_init(module) == 0;
    ok = ok && fw_machine_code_init(module) == 0 && fw_parameters_init(module) == 0 && fw_module_call_init(module) == 0;
    ok = ok && fw_sets_init(module) == 0 && fw_kinds_init(module) == 0;
    if (ok && fw_plan_init != nullptr) ok = fw_plan_init(module) == 0 && fw_differentiable_init(module) == 0;
    if (ok) first = Py_NewRef(module);
    return ok ? 0 : -1;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(fill)},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "fusewright._native",
    "Native parts of fusewright: guards, entry, frame hook, call plan.",
    0,
    nullptr,
    slots,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
