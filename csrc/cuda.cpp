// Machine code of GPU kernels, loaded for Python.
// Takes machine code (a cubin, or PTX) for the current context; gives function handles.
// Always holds: a module stays loaded until the process ends (call plans hold its functions), unless an error was
// raised; the caller has made the device current.
#include "cuda.h"

namespace fw {

namespace {

// The error of memory that is short is PyTorch's own, as an allocation on that GPU would raise it.
PyObject *raise(const std::string &text, cuda::Result result) {
    PyObject *torch = result == cuda::kNoMemory ? PyImport_ImportModule("torch") : nullptr;
    PyObject *error = torch == nullptr ? nullptr : PyObject_GetAttrString(torch, "OutOfMemoryError");
    if (!PyErr_Occurred()) PyErr_SetString(error == nullptr ? PyExc_RuntimeError : error, text.c_str());
    Py_XDECREF(error);
    Py_XDECREF(torch);
    return nullptr;
}

// cuda_load(code: bytes, name: str, shared: int) -> (function, registers, local bytes)
PyObject *cuda_load(PyObject *, PyObject *args) {
    PyObject *code;
    const char *name;
    int shared;
    if (!PyArg_ParseTuple(args, "Ssi", &code, &name, &shared)) return nullptr;
    if (!cuda::find_driver()) {
        PyErr_SetString(PyExc_RuntimeError, "no CUDA driver (libcuda.so.1) is usable");
        return nullptr;
    }
    void *module = nullptr, *function = nullptr;
    cuda::Result result = 0;
    const char *what = cuda::load_kernel(PyBytes_AS_STRING(code), name, shared, &module, &function, &result);
    int registers = 0, local = 0;
    if (result == 0) {
        what = "asking about a kernel";
        result = cuda::driver().function_get(&registers, cuda::kRegisters, function);
    }
    if (result == 0) result = cuda::driver().function_get(&local, cuda::kLocalBytes, function);
    if (result != 0) {
        if (module != nullptr) cuda::driver().module_unload(module);
        return raise(cuda::describe(what, result), result);
    }
    return Py_BuildValue("(Nii)", PyLong_FromVoidPtr(function), registers, local);
}

PyMethodDef functions[] = {
    {"cuda_load", caught<cuda_load>, METH_VARARGS,
     "Load machine code into the current CUDA context; gives (function, registers, bytes of local memory a thread)."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int cuda_init(PyObject *module) { return PyModule_AddFunctions(module, functions); }

}  // namespace fw
