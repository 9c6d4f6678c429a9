// The CUDA driver's functions, found in libcuda.so.1 when first needed.
// Takes machine code (a cubin) for the current context; gives function handles, and launches them.
// Always holds: a module stays loaded until the process ends (call plans hold its functions); the caller has made the device current.
#include "cuda.h"

#include <dlfcn.h>

namespace fw {

namespace {

using Result = int;  // CUresult; 0 is success

struct Attribute {  // CUlaunchAttribute
    int id;
    int unused;
    union {
        int allowed;
        char all[64];
    } value;
};
struct Config {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56, "as the driver's interface has them");
constexpr int kProgrammaticSerialization = 6;  // CUlaunchAttributeID
constexpr int kLeastVersion = 12030;           // of a driver that records such launches into CUDA graphs

struct Driver {
    Result (*init)(unsigned flags);
    Result (*error_string)(Result, const char **);
    Result (*module_load)(void **module, const void *image);
    Result (*module_function)(void **function, void *module, const char *name);
    Result (*function_set)(void *function, int attribute, int value);
    Result (*function_get)(int *value, int attribute, void *function);
    Result (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                     void **parameters, void **extra);
    Result (*launch_with)(const Config *config, void *function, void **parameters, void **extra) = nullptr;
    Result (*version)(int *);
    Result (*retain_context)(void **context, int device);
    Result (*set_context)(void *context);
    bool found = false;
};
Driver driver;

constexpr Result kInvalidContext = 201;
constexpr int kMaxDynamicShared = 8, kLocalBytes = 3, kRegisters = 4;  // CUfunction_attribute
constexpr int32_t kPlainShared = 48 * 1024;                            // more dynamic shared memory than this must be asked for

template <typename F>
bool find(void *library, const char *name, F *function) {
    *function = reinterpret_cast<F>(dlsym(library, name));
    return *function != nullptr;
}

bool find_driver() {
    if (driver.found) return true;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    driver.found = find(library, "cuInit", &driver.init) && find(library, "cuGetErrorString", &driver.error_string) &&
                   find(library, "cuModuleLoadData", &driver.module_load) && find(library, "cuModuleGetFunction", &driver.module_function) &&
                   find(library, "cuFuncSetAttribute", &driver.function_set) && find(library, "cuFuncGetAttribute", &driver.function_get) &&
                   find(library, "cuLaunchKernel", &driver.launch) && find(library, "cuDriverGetVersion", &driver.version) &&
                   find(library, "cuDevicePrimaryCtxRetain", &driver.retain_context) && find(library, "cuCtxSetCurrent", &driver.set_context) &&
                   driver.init(0) == 0;
    int version = 0;
    if (!driver.found || driver.version(&version) != 0 || version < kLeastVersion || !find(library, "cuLaunchKernelEx", &driver.launch_with))
        driver.launch_with = nullptr;
    return driver.found;
}

std::string describe(const char *what, Result result) {
    const char *text = nullptr;
    if (driver.error_string(result, &text) != 0 || text == nullptr) text = "unknown error";
    return std::string(what) + ": " + text;
}

// cuda_load(code: bytes, name: str, shared: int) -> (function, registers, local bytes)
PyObject *cuda_load(PyObject *, PyObject *args) {
    PyObject *code;
    const char *name;
    int shared;
    if (!PyArg_ParseTuple(args, "Ssi", &code, &name, &shared)) return nullptr;
    if (!find_driver()) {
        PyErr_SetString(PyExc_RuntimeError, "no CUDA driver (libcuda.so.1) is usable");
        return nullptr;
    }
    void *module = nullptr, *function = nullptr;
    const char *what = "loading a kernel";
    Result result = driver.module_load(&module, PyBytes_AS_STRING(code));
    if (result == 0) {
        what = "finding a kernel in its module";
        result = driver.module_function(&function, module, name);
    }
    if (result == 0 && shared > kPlainShared) {
        what = "asking for shared memory";
        result = driver.function_set(function, kMaxDynamicShared, shared);
    }
    int registers = 0, local = 0;
    if (result == 0) result = driver.function_get(&registers, kRegisters, function);
    if (result == 0) result = driver.function_get(&local, kLocalBytes, function);
    if (result != 0) {
        PyErr_SetString(PyExc_RuntimeError, describe(what, result).c_str());
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

bool cuda_launch(const DeviceLaunch &one, void **parameters, std::string *error) {
    if (one.grid > INT32_MAX) {
        *error = "a kernel of too many programs";
        return false;
    }
    unsigned grid = static_cast<unsigned>(one.grid), threads = static_cast<unsigned>(one.threads), shared = static_cast<unsigned>(one.shared);
    auto start = [&] {
        if (!one.early || driver.launch_with == nullptr)
            return driver.launch(one.function, grid, 1, 1, threads, 1, 1, shared, one.stream, parameters, nullptr);
        Attribute attribute{kProgrammaticSerialization, 0, {1}};
        Config config{{grid, 1, 1}, {threads, 1, 1}, shared, one.stream, &attribute, 1};
        return driver.launch_with(&config, one.function, parameters, nullptr);
    };
    Result result = start();
    if (result == kInvalidContext) {
        // A thread that has not called the CUDA runtime yet has no context, though the runtime says that its device is this one.
        void *context = nullptr;
        result = driver.retain_context(&context, one.device);  // as the runtime holds it, until the process ends
        if (result == 0) result = driver.set_context(context);
        if (result == 0) result = start();
    }
    if (result == 0) return true;
    *error = describe("launching a kernel", result);
    return false;
}

int cuda_init(PyObject *module) { return PyModule_AddFunctions(module, functions); }

}  // namespace fw
