// How the gradient of an output must be laid out for a compiled backward; differentiable.cpp asks.
// Takes tensors; gives their layouts, and copies in one. Always holds: `layout` is ready (tensors.h).
#ifndef FUSEWRIGHT_GRADIENT_LAYOUT_H
#define FUSEWRIGHT_GRADIENT_LAYOUT_H

#include <algorithm>
#include <vector>

#include "plan.h"

namespace fw {

// keys: the output's dispatch keys but for autograd's.
struct Layout {
    uint64_t keys;
    int dtype, device;
    std::vector<int64_t> sizes, strides;
};

inline uint64_t keys_of(const char *impl) { return tensor_key_set(impl) & ~config.excluded_keys; }

inline Layout layout_of(PyObject *tensor, bool row_major) {
    const char *impl = tensor_impl(tensor);
    const int64_t ndim = tensor_dim(impl), *sizes = tensor_sizes(impl), *strides = tensor_strides(impl);
    Layout made{keys_of(impl), tensor_dtype(impl), tensor_device_index(impl), {}, {strides, strides + ndim}};
    made.sizes.assign(sizes, sizes + ndim);
    int64_t step = 1;
    for (int64_t i = ndim; row_major && i-- > 0; step *= std::max<int64_t>(sizes[i], 1)) made.strides[i] = step;
    return made;
}

// A copy in the layout of a tensor that is alike. Null, without an exception, where PyTorch refuses.
inline PyObject *copy_of(PyObject *tensor, const Layout &wanted) {
    bool owned = false, made = false;
    Handle source = handle_of(tensor, &owned), copy = nullptr;  // not owned: it lies in the object
    Py_BEGIN_ALLOW_THREADS;
    int32_t device = 0;
    made = torch.device_type(source, &device) == 0 &&
           torch.empty_strided(static_cast<int64_t>(wanted.sizes.size()), wanted.sizes.data(), wanted.strides.data(),
                               wanted.dtype, device, wanted.device, &copy) == 0 &&
           torch.copy(copy, source, 0) == 0;
    Py_END_ALLOW_THREADS;
    if (made) return wrap_and_delete(copy);
    if (copy != nullptr) torch.delete_handle(copy);
    return nullptr;
}

}  // namespace fw

#endif
