// Kernels on a GPU, for Python: machine code loaded through the CUDA driver.
#ifndef FUSEWRIGHT_CUDA_H
#define FUSEWRIGHT_CUDA_H

#include "cuda_driver.h"
#include "native.h"

namespace fw {

int cuda_init(PyObject *module);

// Raises an error of PyTorch's or of the driver's by its text: memory that is short on a GPU has a class of PyTorch's.
void raise_by_text(const std::string &text, PyObject *otherwise);

// Has PyTorch give back to the driver what it keeps for later. False, perhaps with an exception, where that cannot be:
// the stream is recorded.
bool give_memory_back(void *stream);

}  // namespace fw
#endif
