// The process-wide stance of compiled functions: ours (fusewright.set_stance) and the one of torch.compiler.set_stance,
// which is honoured as well.
#ifndef FUSEWRIGHT_STANCE_H
#define FUSEWRIGHT_STANCE_H

#include "native.h"

namespace fw {

// Whether every compiled function is to run eagerly now. Asked at each call: two comparisons while nothing has changed.
// Sets no exception.
bool forced_eager();
// Registers set_stance and torch_stance in the module.
int stance_init(PyObject *module);

}  // namespace fw
#endif
