// Whether compiled code may answer a call at all: only in the states of a thread that it is made for, and that its
// guards tell apart.
#ifndef FUSEWRIGHT_MODES_H
#define FUSEWRIGHT_MODES_H

#include "native.h"

namespace fw {

// 1: nothing but gradients on or off, inference mode, autocast and a default device stands between this thread's calls
// and PyTorch's kernels. 0: something else does (a tracer, a functorch transform, a mode of the user, anomaly
// detection), and is to see every operator: the call is to run eagerly. -1: an exception is set. Asked at each call:
// some reads of memory.
int modes_known();
// The same but for torch-function modes, and only where it is read natively (`read` is false otherwise): runs no Python
// code, sets no exception.
bool plain_modes(bool *read);
// Registers probe_modes, set_modes and modes_known in the module.
int modes_init(PyObject *module);

}  // namespace fw
#endif
