// Reading tensors and global state through verified offsets and exported symbols: see tensors.h.
//
// Sources of the facts: c10::TensorImpl, c10::StorageImpl and c10::impl::SizesAndStrides (which fields exist; where
// they stand is measured), and the symbol tables of libc10.so and libtorch_cpu.so.
#include "tensors.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "modes.h"
#include "values.h"

namespace fw {

TensorLayout layout;

namespace {

// sizeof(c10::TensorImpl) is 176 in torch 2.13 and 184 in 2.11. The key set is its last field: it is looked for first,
// and nothing behind it is read.
constexpr int kImplBytes = 184;
constexpr int kStorageBytes = 64;
constexpr int kObjectBytes = 40;

int (*get_device_index)(void *tensor, int32_t *out) = nullptr;

struct Symbols {
    bool (*grad)() = nullptr;
    bool (*inference)() = nullptr;
    int8_t (*default_dtype)() = nullptr;
    int64_t (*torch_function_modes)() = nullptr;
    int8_t (*torch_function_state)() = nullptr;
    bool (*autocast_enabled)(int8_t) = nullptr;
    int8_t (*autocast_dtype)(int8_t) = nullptr;
    bool (*autocast_cache)() = nullptr;
    int (*num_threads)() = nullptr;
    bool (*deterministic)(const void *) = nullptr;
    bool (*warn_only)(const void *) = nullptr;
    int8_t (*matmul)(const void *) = nullptr;
    void *(*context)() = nullptr;
} symbols;
void *global_context = nullptr;
int autocast_devices = 0;  // how many of State's devices this PyTorch has
bool state_verified = false;

template <typename F>
bool find(void *library, const char *name, F *out) {
    *reinterpret_cast<void **>(out) = dlsym(library, name);
    return *out != nullptr;
}

bool find_symbols(void *c10, void *torch_cpu) {
    bool ok = find(torch_cpu, "aoti_torch_get_device_index", &get_device_index);
    ok &= find(c10, "_ZNK3c1010TensorImpl13requires_gradEv", &layout.requires_grad);
    return ok;
}

bool find_state_symbols(void *c10, void *torch_cpu) {
    Symbols &s = symbols;
    bool ok = find(c10, "_ZN3c108GradMode10is_enabledEv", &s.grad);
    ok &= find(c10, "_ZN3c1013InferenceMode10is_enabledEv", &s.inference);
    ok &= find(c10, "_ZN3c1031get_default_dtype_as_scalartypeEv", &s.default_dtype);
    ok &= find(torch_cpu, "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv", &s.torch_function_modes);
    ok &= find(torch_cpu, "_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv", &s.torch_function_state);
    ok &= find(torch_cpu, "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE", &s.autocast_enabled);
    ok &= find(torch_cpu, "_ZN2at8autocast18get_autocast_dtypeEN3c1010DeviceTypeE", &s.autocast_dtype);
    ok &= find(torch_cpu, "_ZN2at8autocast25is_autocast_cache_enabledEv", &s.autocast_cache);
    ok &= find(torch_cpu, "_ZN2at15get_num_threadsEv", &s.num_threads);
    ok &= find(torch_cpu, "_ZNK2at7Context23deterministicAlgorithmsEv", &s.deterministic);
    ok &= find(torch_cpu, "_ZNK2at7Context31deterministicAlgorithmsWarnOnlyEv", &s.warn_only);
    ok &= find(torch_cpu, "_ZNK2at7Context22float32MatmulPrecisionEv", &s.matmul);
    ok &= find(torch_cpu, "_ZN2at13globalContextEv", &s.context);
    if (ok) global_context = s.context();
    return ok;
}

// One known tensor, as Python's own accessors describe it.
struct Sample {
    PyObject *tensor;
    const char *impl;
    uint64_t key_set;
    long dtype;
    const char *storage;
    const char *data;
    long long bytes, offset;
    PyObject *shape, *stride;
    int requires_grad, device_index;
};

template <typename T>
bool stands_at(const char *base, int offset, T value) {
    return std::memcmp(base + offset, &value, sizeof value) == 0;
}

// The only offset below `limit` (multiples of `step`) at which `test(sample, offset)` holds for all samples, or -1.
template <typename Test>
int unique_offset(const Sample *samples, Py_ssize_t n, int limit, int step, Test test) {
    int found = -1;
    for (int offset = 0; offset + step <= limit; offset += step) {
        bool all = true;
        for (Py_ssize_t i = 0; all && i < n; i++) all = test(samples[i], offset);
        if (!all) continue;
        if (found >= 0) return -1;
        found = offset;
    }
    return found;
}

// The first offset at which `test` holds: what lies behind is not looked at.
template <typename Test>
int first_offset(const Sample *samples, Py_ssize_t n, int limit, Test test) {
    for (int offset = 0; offset + 8 <= limit; offset += 8) {
        bool all = n > 0;
        for (Py_ssize_t i = 0; all && i < n; i++) all = test(samples[i], offset);
        if (all) return offset;
    }
    return -1;
}

bool equals_longs(const int64_t *values, PyObject *tuple) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
        if (values[i] != PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i))) return false;
    return true;
}

bool sizes_stand_at(const Sample &s, int offset, int limit) {
    constexpr int kInline = 5;
    int64_t dim = PyTuple_GET_SIZE(s.shape);
    if (offset + 8 + 2 * kInline * 8 > limit || !stands_at(s.impl, offset, dim)) return false;
    const char *at = s.impl + offset + 8;
    if (dim <= kInline)
        return equals_longs(reinterpret_cast<const int64_t *>(at), s.shape) &&
               equals_longs(reinterpret_cast<const int64_t *>(at) + kInline, s.stride);
    const int64_t *block = *reinterpret_cast<const int64_t *const *>(at);
    // The pointer is followed only where samples of few dimensions, which come first, have confirmed this offset.
    return equals_longs(block, s.shape) && equals_longs(block + dim, s.stride);
}

bool parse_sample(PyObject *tuple, Sample *s) {
    unsigned long long impl, storage, data, key_set;
    if (!PyArg_ParseTuple(tuple, "OKKlKKLLO!O!ii", &s->tensor, &impl, &key_set, &s->dtype, &storage, &data, &s->bytes,
                          &s->offset, &PyTuple_Type, &s->shape, &PyTuple_Type, &s->stride, &s->requires_grad,
                          &s->device_index))
        return false;
    s->impl = reinterpret_cast<const char *>(impl);
    s->storage = reinterpret_cast<const char *>(storage);
    s->data = reinterpret_cast<const char *>(data);
    s->key_set = key_set;
    return true;
}

bool functions_agree(const Sample &s) {
    return layout.requires_grad(s.impl) == (s.requires_grad != 0) && tensor_device_index(s.impl) == s.device_index;
}

// probe_tensors(libc10 path, libtorch_cpu path, TensorBase, samples) -> dict of offsets
// The first samples must have at most five dimensions; dtypes, key sets and shapes must differ enough to make each
// field unique.
PyObject *probe_tensors(PyObject *, PyObject *args) {
    const char *c10_path, *cpu_path;
    PyObject *base, *list;
    if (!PyArg_ParseTuple(args, "ssO!O!", &c10_path, &cpu_path, &PyType_Type, &base, &PyList_Type, &list))
        return nullptr;
    Py_ssize_t n = PyList_GET_SIZE(list);
    Sample *samples = static_cast<Sample *>(PyMem_Calloc(n + 1, sizeof(Sample)));
    if (samples == nullptr) return PyErr_NoMemory();
    bool parsed = true;
    for (Py_ssize_t i = 0; parsed && i < n; i++) parsed = parse_sample(PyList_GET_ITEM(list, i), &samples[i]);
    if (!parsed) {
        PyMem_Free(samples);
        return nullptr;
    }
    layout.ready = layout.storage_ready = false;
    // RTLD_NOLOAD: `import torch` has loaded them; another copy would have its own state.
    void *c10 = dlopen(c10_path, RTLD_LAZY | RTLD_NOLOAD);
    void *torch_cpu = dlopen(cpu_path, RTLD_LAZY | RTLD_NOLOAD);
    bool ok = c10 != nullptr && torch_cpu != nullptr && n > 0 && find_symbols(c10, torch_cpu);
    auto impl = [](const Sample &s, int o) { return stands_at(reinterpret_cast<char *>(s.tensor), o, s.impl); };
    auto key_set = [](const Sample &s, int o) { return stands_at(s.impl, o, s.key_set); };
    auto dtype = [](const Sample &s, int o) { return stands_at(s.impl, o, static_cast<uint16_t>(s.dtype)); };
    auto storage = [](const Sample &s, int o) { return stands_at(s.impl, o, s.storage); };
    auto offset = [](const Sample &s, int o) { return stands_at(s.impl, o, static_cast<int64_t>(s.offset)); };
    auto data = [](const Sample &s, int o) { return stands_at(s.storage, o, s.data); };
    auto bytes = [](const Sample &s, int o) { return stands_at(s.storage, o, static_cast<int64_t>(s.bytes)); };
    layout.impl = unique_offset(samples, n, kObjectBytes, 8, impl);
    layout.key_set = first_offset(samples, n, kImplBytes, key_set);
    const int limit = layout.key_set + 8;  // no field is found where the key set is not
    auto sizes = [limit](const Sample &s, int o) { return sizes_stand_at(s, o, limit); };
    layout.dtype = unique_offset(samples, n, limit, 2, dtype);
    layout.sizes = unique_offset(samples, n, limit, 8, sizes);
    layout.storage = unique_offset(samples, n, limit, 8, storage);
    layout.storage_offset = unique_offset(samples, n, limit, 8, offset);
    layout.storage_data = unique_offset(samples, n, kStorageBytes, 8, data);
    layout.storage_bytes = unique_offset(samples, n, kStorageBytes, 8, bytes);
    ok = ok && layout.impl > 0 && layout.key_set > 0 && layout.dtype > 0 && layout.sizes > 0;
    if (ok) {
        for (Py_ssize_t i = 0; ok && i < n; i++) ok = functions_agree(samples[i]);
        Py_INCREF(base);
        Py_XSETREF(layout.tensor_base, reinterpret_cast<PyTypeObject *>(base));
    }
    PyMem_Free(samples);
    if (PyErr_Occurred()) return nullptr;
    layout.ready = ok;
    ok = ok && layout.storage > 0 && layout.storage_offset > 0 && layout.storage_data > 0 && layout.storage_bytes > 0;
    layout.storage_ready = ok;
    return Py_BuildValue("{s:N,s:N,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}",
                         "ready", PyBool_FromLong(layout.ready), "storage_ready", PyBool_FromLong(layout.storage_ready),
                         "impl", layout.impl, "key_set", layout.key_set, "dtype", layout.dtype, "sizes", layout.sizes,
                         "storage", layout.storage, "storage_offset", layout.storage_offset,
                         "storage_data", layout.storage_data, "storage_bytes", layout.storage_bytes);
}

PyObject *state_to_tuple(const State &s) {
    return Py_BuildValue("(iiiiiiiii(ii)(ii)iii)", s.grad, s.inference, s.autocast_cache, s.torch_function, s.modes,
                         s.deterministic, s.warn_only, s.matmul, s.default_dtype, s.autocast_enabled[0],
                         s.autocast_enabled[1], s.autocast_dtype[0], s.autocast_dtype[1], s.torch_function_modes,
                         s.num_threads, s.tensor_class);
}

// The class whose version changes with it and its bases, and the number that Python has given to what they hold.
PyTypeObject *tensor_class = nullptr;
unsigned tensor_class_version = 0;
int32_t tensor_class_number = -1;

int32_t read_tensor_class() {
    return tensor_class != nullptr && tensor_class_version != 0 && type_version(tensor_class) == tensor_class_version
               ? tensor_class_number
               : -1;
}

PyObject *py_tensor_class(PyObject *, PyObject *) { return PyLong_FromLong(read_tensor_class()); }

PyObject *note_tensor_class(PyObject *, PyObject *args) {
    PyObject *type;
    int number;
    if (!PyArg_ParseTuple(args, "O!i", &PyType_Type, &type, &number)) return nullptr;
    Held name(PyUnicode_FromString("__dict__"));
    if (name.get() == nullptr) return nullptr;
    Py_INCREF(type);
    Py_XSETREF(tensor_class, reinterpret_cast<PyTypeObject *>(type));
    _PyType_Lookup(tensor_class, name.get());  // gives the class a version
    tensor_class_version = type_version(tensor_class);
    tensor_class_number = number;
    Py_RETURN_NONE;
}

// probe_state(libc10 path, libtorch_cpu path, number of autocast devices, expected tuple) -> bool: whether state is
// read natively from now on.
PyObject *probe_state(PyObject *, PyObject *args) {
    const char *c10_path, *cpu_path;
    int devices;
    PyObject *expected;
    if (!PyArg_ParseTuple(args, "ssiO!", &c10_path, &cpu_path, &devices, &PyTuple_Type, &expected)) return nullptr;
    State want, have;
    if (!state_from_tuple(expected, &want)) return nullptr;
    autocast_devices = std::min(devices, kAutocastDevices);
    void *c10 = dlopen(c10_path, RTLD_LAZY | RTLD_NOLOAD);
    void *torch_cpu = dlopen(cpu_path, RTLD_LAZY | RTLD_NOLOAD);
    state_verified = c10 != nullptr && torch_cpu != nullptr && find_state_symbols(c10, torch_cpu);
    state_verified = state_verified && read_state(&have) && state_equal(want, have);
    return PyBool_FromLong(state_verified);
}

PyObject *py_read_state(PyObject *, PyObject *) {
    State state;
    if (!state_verified || !read_state(&state)) Py_RETURN_NONE;
    return state_to_tuple(state);
}

PyMethodDef functions[] = {
    {"probe_tensors", probe_tensors, METH_VARARGS,
     "Find and verify the offsets of a tensor's fields; see capture/probe.py."},
    {"probe_state", probe_state, METH_VARARGS,
     "Find and verify the symbols that read global state; see capture/probe.py."},
    {"tensor_class", py_tensor_class, METH_NOARGS,
     "The number of what the classes of tensors hold, or -1 when they have changed since it was given."},
    {"note_tensor_class", note_tensor_class, METH_VARARGS,
     "note_tensor_class(class, number): what it and its bases hold now has this number."},
    {"read_state", py_read_state, METH_NOARGS,
     "The global state as a tuple of ints, or None when it cannot be read natively."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int tensor_device_index(const char *impl) {
    // An at::Tensor is one pointer to its TensorImpl, so the address of that pointer is a handle; nothing is retained.
    const void *tensor = impl;
    int32_t index = -2;
    return get_device_index(&tensor, &index) == 0 ? index : -2;
}

bool tensor_storage_range(const char *impl, uintptr_t *begin, uintptr_t *end) {
    const char *storage = tensor_storage(impl);
    if (storage == nullptr) return false;
    *begin = *reinterpret_cast<const uintptr_t *>(storage + layout.storage_data);
    *end = *begin + *reinterpret_cast<const uintptr_t *>(storage + layout.storage_bytes);
    return true;
}

bool state_ready() { return state_verified; }

bool read_state(State *s) try {
    *s = State{};
    s->grad = symbols.grad();
    s->inference = symbols.inference();
    s->autocast_cache = symbols.autocast_cache();
    s->torch_function = symbols.torch_function_state();
    bool modes_read;
    s->modes = plain_modes(&modes_read);
    s->deterministic = symbols.deterministic(global_context);
    s->warn_only = symbols.warn_only(global_context);
    s->matmul = symbols.matmul(global_context);
    s->default_dtype = symbols.default_dtype();
    for (int device = 0; device < autocast_devices; device++) {
        s->autocast_enabled[device] = symbols.autocast_enabled(static_cast<int8_t>(device));
        s->autocast_dtype[device] = symbols.autocast_dtype(static_cast<int8_t>(device));
    }
    s->torch_function_modes = static_cast<int32_t>(symbols.torch_function_modes());
    s->num_threads = symbols.num_threads();
    s->tensor_class = read_tensor_class();
    return modes_read && s->tensor_class >= 0;
} catch (...) {
    return false;  // float32MatmulPrecision throws on contradictory settings; the Python fallback decides
}

bool state_from_tuple(PyObject *tuple, State *s) {
    int v[13];
    if (!PyArg_ParseTuple(tuple, "iiiiiiiii(ii)(ii)iii", &v[0], &v[1], &v[2], &v[3], &v[4], &v[5], &v[6], &v[7], &v[8],
                          &v[9], &v[10], &v[11], &v[12], &s->torch_function_modes, &s->num_threads, &s->tensor_class))
        return false;
    int8_t *fields[] = {&s->grad,
                        &s->inference,
                        &s->autocast_cache,
                        &s->torch_function,
                        &s->modes,
                        &s->deterministic,
                        &s->warn_only,
                        &s->matmul,
                        &s->default_dtype,
                        &s->autocast_enabled[0],
                        &s->autocast_enabled[1],
                        &s->autocast_dtype[0],
                        &s->autocast_dtype[1]};
    for (int i = 0; i < 13; i++) *fields[i] = static_cast<int8_t>(v[i]);
    return true;
}

bool state_equal(const State &a, const State &b) {
    return a.grad == b.grad && a.inference == b.inference && a.autocast_cache == b.autocast_cache &&
           a.torch_function == b.torch_function && a.modes == b.modes && a.deterministic == b.deterministic &&
           a.warn_only == b.warn_only && a.matmul == b.matmul && a.default_dtype == b.default_dtype &&
           std::memcmp(a.autocast_enabled, b.autocast_enabled, sizeof a.autocast_enabled) == 0 &&
           std::memcmp(a.autocast_dtype, b.autocast_dtype, sizeof a.autocast_dtype) == 0 &&
           a.torch_function_modes == b.torch_function_modes && a.num_threads == b.num_threads &&
           a.tensor_class == b.tensor_class;
}

int tensors_init(PyObject *module) { return PyModule_AddFunctions(module, functions); }

}  // namespace fw
