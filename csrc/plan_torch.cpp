// What the call plan needs of PyTorch, through C functions whose addresses fusewright.runtime.torch_c found and
// verified. Takes addresses and a few Python callables (for versions that lack a symbol); gives handles, wrapped
// tensors and guards. Always holds: no PyTorch header is included; a C++ exception of PyTorch's becomes a Python
// exception here.
#include <cstddef>
#include <cstring>
#include <exception>

#include "plan.h"

namespace fw {

TorchFunctions torch;
TorchConfig config;

namespace {

struct FunctionRow {
    const char *name;
    void **address;
    bool required;
};

// `name` is the key in the dict that torch_c.py passes.
#define ROW(field, required) {#field, reinterpret_cast<void **>(&torch.field), required}
#define SHARED(field, symbol, required) ROW(field, required),
const FunctionRow kFunctions[] = {
    FUSEWRIGHT_TENSOR_CALLS(SHARED)
    ROW(reinterpret, true),        ROW(device_type, true),   ROW(storage_size, true),       ROW(element_size, true),
    ROW(parallel_for, true),       ROW(inference_mode, false), ROW(exclude_keys, false),    ROW(restore_keys, false),
    ROW(wrap_move, false),         ROW(wrap, false),         ROW(bump_version, false),      ROW(cuda_stream, false),
    ROW(cuda_guard, false),        ROW(cuda_guard_set, false), ROW(delete_cuda_guard, false), ROW(version, false),
    ROW(has_callbacks, false),     ROW(record_start, false), ROW(record_end, false),
};
#undef SHARED
#undef ROW

bool read_addresses(PyObject *dict) {
    for (const FunctionRow &row : kFunctions) {
        PyObject *value = PyDict_GetItemString(dict, row.name);
        *row.address = value == nullptr ? nullptr : PyLong_AsVoidPtr(value);
        if (PyErr_Occurred()) return false;
        if (row.required && *row.address == nullptr) {
            PyErr_Format(PyExc_RuntimeError, "this PyTorch lacks the C function %s that call plans need", row.name);
            return false;
        }
    }
    return true;
}

void keep(PyObject **where, PyObject *value) {
    Py_INCREF(value);
    Py_XSETREF(*where, value);
}

// configure_plan(functions: dict, handle_offset, excluded_keys, wrapped_keys, cpu, tensor_type, to_handles,
// from_handles, increment_version, alias_view, clone)
PyObject *configure_plan(PyObject *, PyObject *args) {
    PyObject *functions, *tensor_type, *to_handles, *from_handles, *increment_version, *alias_view, *clone;
    Py_ssize_t offset;
    unsigned long long keys, wrapped;
    int cpu;
    if (!PyArg_ParseTuple(args, "O!nKKiO!OOOOO", &PyDict_Type, &functions, &offset, &keys, &wrapped, &cpu, &PyType_Type,
                          &tensor_type, &to_handles, &from_handles, &increment_version, &alias_view, &clone))
        return nullptr;
    config.ready = false;
    if (!read_addresses(functions)) return nullptr;
    config.handle_offset = offset;
    config.excluded_keys = keys;
    config.wrapped_keys = wrapped;
    config.cpu = cpu;
    Py_INCREF(tensor_type);
    Py_XSETREF(config.tensor_type, reinterpret_cast<PyTypeObject *>(tensor_type));
    keep(&config.to_handles, to_handles);
    keep(&config.from_handles, from_handles);
    keep(&config.increment_version, increment_version);
    keep(&config.alias_view, alias_view);
    keep(&config.clone, clone);
    config.ready = true;
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"configure_plan", configure_plan, METH_VARARGS,
     "Give call plans PyTorch's C functions; see fusewright.runtime.torch_c."},
    {nullptr, nullptr, 0, nullptr},
};

void set_error(const std::exception &error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
}

}  // namespace

int plan_torch_init(PyObject *module) { return PyModule_AddFunctions(module, functions); }

std::string torch_error(const char *what) { return error_of(torch, what); }

std::string allocation_error(const char *what, int32_t device) {
    if (torch.error_text != nullptr) return torch_error(what);
    return what + std::string(device == config.cpu ? ": can't allocate memory" : ": out of memory");
}

Handle handle_of(PyObject *object, bool *owned) {
    if (!PyObject_TypeCheck(object, config.tensor_type)) {
        PyErr_Format(PyExc_TypeError, "expected a tensor, got %s", Py_TYPE(object)->tp_name);
        return nullptr;
    }
    if (config.handle_offset >= 0) {
        *owned = false;
        return reinterpret_cast<char *>(object) + config.handle_offset;
    }
    PyObject *list = Py_BuildValue("[O]", object);
    if (list == nullptr) return nullptr;
    PyObject *capsules = PyObject_CallOneArg(config.to_handles, list);
    Py_DECREF(list);
    if (capsules == nullptr) return nullptr;
    PyObject *capsule = PySequence_GetItem(capsules, 0);
    Py_DECREF(capsules);
    if (capsule == nullptr) return nullptr;
    Handle handle = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
    Py_DECREF(capsule);
    *owned = true;
    return handle;
}

int64_t reach_of(int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t itemsize) {
    int64_t elements = 1, step;
    for (int64_t i = 0; i < ndim; i++) {
        if (sizes[i] <= 0) return 0;
        if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step)) return -1;
        if (__builtin_add_overflow(elements, step, &elements)) return -1;
    }
    return __builtin_mul_overflow(elements, itemsize, &elements) ? -1 : elements;
}

bool holds_slowly(Handle handle, int64_t itemsize, int64_t reach, bool opaque) {
    if (reach < 0) return false;
    if (layout.storage_ready) return opaque && tensor_storage(impl_of(handle)) == nullptr;
    int64_t bytes = 0, offset = 0;
    if (torch.storage_size(handle, &bytes) != 0 || torch.storage_offset(handle, &offset) != 0) return opaque;
    return reach == 0 || offset * itemsize + reach <= bytes;
}

bool is_plain(Handle handle) { return !layout.ready || (tensor_key_set(impl_of(handle)) & config.wrapped_keys) == 0; }

PyObject *wrap_and_delete(Handle handle) {
    if (torch.wrap_move != nullptr) {
        PyObject *object = nullptr;
        try {
            object = torch.wrap_move(handle);
        } catch (const std::exception &error) {
            set_error(error);
        }
        torch.delete_handle(handle);
        if (object == nullptr && !PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "a tensor could not be wrapped");
        return object;
    }
    PyObject *capsule = PyCapsule_New(handle, nullptr, nullptr);
    PyObject *list = capsule == nullptr ? nullptr : Py_BuildValue("[N]", capsule);
    if (list == nullptr) {
        torch.delete_handle(handle);
        return nullptr;
    }
    PyObject *tensors = PyObject_CallOneArg(config.from_handles, list);
    Py_DECREF(list);
    if (tensors == nullptr) return nullptr;
    PyObject *object = PySequence_GetItem(tensors, 0);
    Py_DECREF(tensors);
    return object;
}

PyObject *wrap_handle(Handle handle) {
    if (torch.wrap != nullptr) {
        try {
            return torch.wrap(handle);
        } catch (const std::exception &error) {
            set_error(error);
            return nullptr;
        }
    }
    Handle copy;
    if (torch.new_handle(handle, &copy) != 0) {
        PyErr_SetString(PyExc_RuntimeError, torch_error("a tensor handle").c_str());
        return nullptr;
    }
    return wrap_and_delete(copy);
}

bool bump_version(PyObject *tensor) {
    if (torch.bump_version != nullptr && config.handle_offset >= 0) {
        try {
            torch.bump_version(reinterpret_cast<char *>(tensor) + config.handle_offset);
            return true;
        } catch (const std::exception &error) {
            set_error(error);
            return false;
        }
    }
    PyObject *done = PyObject_CallOneArg(config.increment_version, tensor);
    Py_XDECREF(done);
    return done != nullptr;
}

void raise_fallback(const std::string &message) {
    PyObject *errors = PyImport_ImportModule("fusewright.base.errors");
    PyObject *type = errors == nullptr ? nullptr : PyObject_GetAttrString(errors, "RuntimeFallback");
    Py_XDECREF(errors);
    if (type == nullptr) return;
    PyErr_SetString(type, message.c_str());
    Py_DECREF(type);
}

BelowAutograd::BelowAutograd(bool active) : active_(active) {
    if (!active_) return;
    grad_ = torch.grad_enabled();
    if (grad_) torch.set_grad_enabled(false);
    if (torch.exclude_keys != nullptr) torch.exclude_keys(guard_, config.excluded_keys);
}

BelowAutograd::~BelowAutograd() {
    if (!active_) return;
    if (torch.exclude_keys != nullptr) torch.restore_keys(guard_);
    if (grad_) torch.set_grad_enabled(true);
}

}  // namespace fw
