// Machine code of GPU kernels, loaded for Python.
// Takes machine code (a cubin, or PTX) for the current context; gives function handles.
// Always holds: a module stays loaded until the process ends (call plans hold its functions), unless an error was
// raised; the caller has made the device current.
#include "cuda.h"

namespace fw {

void raise_by_text(const std::string &text, PyObject *otherwise) {
    bool is_short = text.find("out of memory") != std::string::npos;
    PyObject *torch = is_short ? PyImport_ImportModule("torch") : nullptr;
    PyObject *error = torch == nullptr ? nullptr : PyObject_GetAttrString(torch, "OutOfMemoryError");
    if (!PyErr_Occurred()) PyErr_SetString(error == nullptr ? otherwise : error, text.c_str());
    Py_XDECREF(error);
    Py_XDECREF(torch);
}

bool give_memory_back(void *stream) {
    int status = 0;
    auto is_capturing = cuda::driver().is_capturing;
    if (stream != nullptr && is_capturing != nullptr && (is_capturing(stream, &status) != 0 || status != 0))
        return false;
    PyObject *torch = PyImport_ImportModule("torch.cuda");
    PyObject *done = torch == nullptr ? nullptr : PyObject_CallMethod(torch, "empty_cache", nullptr);
    Py_XDECREF(done);
    Py_XDECREF(torch);
    return done != nullptr;
}

namespace {

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
        raise_by_text(cuda::describe(what, result), PyExc_RuntimeError);
        return nullptr;
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
