// Kernels on a GPU: machine code loaded and launched through the CUDA driver, found at run time.
//
// Always holds: no CUDA header is included and no CUDA library is linked; without a driver every function here gives an error.
#ifndef FUSEWRIGHT_CUDA_H
#define FUSEWRIGHT_CUDA_H

#include <cstdint>
#include <string>

#include "native.h"

namespace fw {

// `grid` programs of `threads` threads, with `shared` bytes of dynamic shared memory each. early: before the kernel that is last on the
// stream has ended (the function waits for it itself).
struct DeviceLaunch {
    void *function;
    int64_t grid;
    int32_t device, threads, shared;
    void *stream;
    bool early;
};

// Starts a kernel. `parameters` holds the address of each parameter's value. False with the reason.
bool cuda_launch(const DeviceLaunch &one, void **parameters, std::string *error);
int cuda_init(PyObject *module);

}  // namespace fw
#endif
