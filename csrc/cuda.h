// Kernels on a GPU, for Python: machine code loaded through the CUDA driver.
#ifndef FUSEWRIGHT_CUDA_H
#define FUSEWRIGHT_CUDA_H

#include "cuda_driver.h"
#include "native.h"

namespace fw {

int cuda_init(PyObject *module);

}  // namespace fw
#endif
