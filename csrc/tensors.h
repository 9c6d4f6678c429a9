// How native code reads a torch.Tensor and PyTorch's global state without PyTorch's headers.
//
// Takes Python tensor objects; gives fields of the TensorImpl. Offsets are found and verified at import by
// `probe_tensors` on known tensors (capture/probe.py), functions by dlsym.
// Always holds: when `layout.ready` is false nothing here touches a tensor's memory, and callers use their Python
// fallback.
#ifndef FUSEWRIGHT_TENSORS_H
#define FUSEWRIGHT_TENSORS_H

#include <cstdint>

#include "native.h"

namespace fw {

// Byte offsets inside the Python object, the TensorImpl and the StorageImpl.
struct TensorLayout {
    bool ready = false;          // every TensorImpl field below is verified
    bool storage_ready = false;  // those of the storage as well
    int impl = -1;               // TensorImpl* inside the Python tensor object
    int key_set = -1;            // uint64: dispatch key set
    int dtype = -1;              // uint16: c10::ScalarType
    int sizes = -1;              // size_t ndim, then five inline sizes (or a pointer), then five inline strides
    int storage = -1;            // StorageImpl*
    int storage_offset = -1;     // int64, in elements
    int storage_data = -1;       // void*
    int storage_bytes = -1;      // int64
    PyTypeObject *tensor_base = nullptr;  // torch._C.TensorBase
    bool (*requires_grad)(const void *impl) = nullptr;
};
extern TensorLayout layout;

inline const char *tensor_impl(PyObject *tensor) {
    return *reinterpret_cast<char **>(reinterpret_cast<char *>(tensor) + layout.impl);
}
inline uint64_t tensor_key_set(const char *impl) { return *reinterpret_cast<const uint64_t *>(impl + layout.key_set); }
inline int tensor_dtype(const char *impl) { return *reinterpret_cast<const uint16_t *>(impl + layout.dtype); }
inline int64_t tensor_dim(const char *impl) { return *reinterpret_cast<const int64_t *>(impl + layout.sizes); }
// SizesAndStrides keeps up to five dimensions inline, more in one heap block (sizes, then strides).
inline const int64_t *tensor_sizes(const char *impl) {
    const char *at = impl + layout.sizes + 8;
    return tensor_dim(impl) <= 5 ? reinterpret_cast<const int64_t *>(at)
                                 : *reinterpret_cast<const int64_t *const *>(at);
}
inline const int64_t *tensor_strides(const char *impl) {
    int64_t dim = tensor_dim(impl);
    return tensor_sizes(impl) + (dim <= 5 ? 5 : dim);
}
inline bool is_tensor(PyObject *object) {
    return layout.tensor_base != nullptr && PyObject_TypeCheck(object, layout.tensor_base);
}
// The device's index as torch counts (-1 when the device has none); -2 when it cannot be read.
int tensor_device_index(const char *impl);
inline const char *tensor_storage(const char *impl) {
    return *reinterpret_cast<const char *const *>(impl + layout.storage);
}
// Whether the tensor's storage holds `bytes` bytes from its first element on. One without storage (a library's own
// layout) holds nothing.
inline bool storage_holds(const char *impl, int64_t itemsize, int64_t bytes) {
    const char *storage = tensor_storage(impl);
    if (storage == nullptr || bytes < 0) return false;
    if (bytes == 0) return true;  // the first element of none may lie anywhere
    int64_t held = *reinterpret_cast<const int64_t *>(storage + layout.storage_bytes);
    return *reinterpret_cast<const int64_t *>(impl + layout.storage_offset) * itemsize + bytes <= held;
}
// The bytes of the tensor's whole storage: [begin, end). False when it cannot be read.
bool tensor_storage_range(const char *impl, uintptr_t *begin, uintptr_t *end);

// Interpreter-wide settings as plain numbers; see fusewright.capture.guards.GlobalState for their meaning.
constexpr int kAutocastDevices = 2;
struct State {
    int8_t grad, inference, autocast_cache, torch_function, modes, deterministic, warn_only, matmul, default_dtype;
    int8_t autocast_enabled[kAutocastDevices], autocast_dtype[kAutocastDevices];
    int32_t torch_function_modes, num_threads, tensor_class;
};
bool state_ready();
// False when a symbol is missing, PyTorch refused to answer or a class of tensors was changed: use the Python fallback.
bool read_state(State *state);
// From a tuple of ints in the order of `State`'s fields. False with an exception when it does not fit.
bool state_from_tuple(PyObject *tuple, State *state);
bool state_equal(const State &a, const State &b);

int tensors_init(PyObject *module);

}  // namespace fw
#endif
