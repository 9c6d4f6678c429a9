// PyTorch's C functions on tensors that both runtimes call: the extension's call plans and a package without Python.
// Always holds: no PyTorch header is needed; each runtime finds the addresses by its own means and adds its own rows.
#ifndef FUSEWRIGHT_TORCH_CALLS_H
#define FUSEWRIGHT_TORCH_CALLS_H

#include <cstdint>

#include "library_call.h"

namespace fw {

// Each gives 0, or another number after an error; what is asked for goes to the last argument.
struct TensorCalls {
    int32_t (*empty_strided)(int64_t ndim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device,
                             int32_t index, Handle *);
    int32_t (*from_blob)(void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t offset,
                         int32_t dtype, int32_t device, int32_t index, Handle *);
    int32_t (*copy)(Handle self, Handle source, int32_t non_blocking);
    int32_t (*new_handle)(Handle, Handle *);
    int32_t (*delete_handle)(Handle);
    int32_t (*data_ptr)(Handle, void **);
    int32_t (*dim)(Handle, int64_t *);
    int32_t (*sizes)(Handle, int64_t **);
    int32_t (*strides)(Handle, int64_t **);
    int32_t (*dtype)(Handle, int32_t *);
    int32_t (*storage_offset)(Handle, int64_t *);
    bool (*grad_enabled)();
    void (*set_grad_enabled)(bool);
    const char *(*error_text)();  // of the thread's last error; null where this PyTorch lacks it
};

// ROW(field, symbol, required) of each.
#define FUSEWRIGHT_TENSOR_CALLS(ROW)                                                 \
    ROW(empty_strided, "aoti_torch_empty_strided", true)                             \
    ROW(from_blob, "aoti_torch_create_tensor_from_blob", true)                       \
    ROW(copy, "aoti_torch_copy_", true)                                              \
    ROW(new_handle, "aoti_torch_new_tensor_handle", true)                            \
    ROW(delete_handle, "aoti_torch_delete_tensor_object", true)                      \
    ROW(data_ptr, "aoti_torch_get_data_ptr", true)                                   \
    ROW(dim, "aoti_torch_get_dim", true)                                             \
    ROW(sizes, "aoti_torch_get_sizes", true)                                         \
    ROW(strides, "aoti_torch_get_strides", true)                                     \
    ROW(dtype, "aoti_torch_get_dtype", true)                                         \
    ROW(storage_offset, "aoti_torch_get_storage_offset", true)                       \
    ROW(grad_enabled, "aoti_torch_grad_mode_is_enabled", true)                       \
    ROW(set_grad_enabled, "aoti_torch_grad_mode_set_enabled", true)                  \
    ROW(error_text, "torch_exception_get_what_without_backtrace", false)

// What `what` failed by, in words.
inline std::string error_of(const TensorCalls &calls, const std::string &what) {
    const char *text = calls.error_text == nullptr ? nullptr : calls.error_text();
    return what + (text == nullptr || *text == 0 ? " failed" : std::string(": ") + text);
}

}  // namespace fw

#endif
