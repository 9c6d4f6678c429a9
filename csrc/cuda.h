// Kernels on a GPU: machine code loaded and launched through the CUDA driver, found at run time.
//
// Always holds: no CUDA header is included and no CUDA library is linked; without a driver every function here gives an error.
#ifndef FUSEWRIGHT_CUDA_H
#define FUSEWRIGHT_CUDA_H

#include <cstdint>
#include <string>

#include "native.h"

namespace fw {

// Starts `grid` programs of `threads` threads on `stream` of `device`. `parameters` holds the address of each parameter's value. False with the reason.
bool cuda_launch(int32_t device, void *function, int64_t grid, int32_t threads, int32_t shared, void *stream, void **parameters,
                 std::string *error);
int cuda_init(PyObject *module);

}  // namespace fw
#endif
