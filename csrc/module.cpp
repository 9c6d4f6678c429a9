// The extension module fusewright._native: takes nothing, gives the types and functions of its parts.
#include "native.h"

namespace {

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fusewright._native", "Native parts of fusewright: guards, entry, frame hook, call plan.", -1, nullptr,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject *module = PyModule_Create(&definition);
    if (module == nullptr) return nullptr;
    bool ok = fw_guards_init(module) == 0 && fw_entry_init(module) == 0 && fw_hook_init(module) == 0 && fw_machine_code_init(module) == 0 && fw_parameters_init(module) == 0 && fw_module_call_init(module) == 0;
    if (ok && fw_plan_init != nullptr) ok = fw_plan_init(module) == 0;
    if (!ok) Py_CLEAR(module);
    return module;
}
