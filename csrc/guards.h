// The guard program as the entry sees it.
#ifndef FUSEWRIGHT_GUARDS_H
#define FUSEWRIGHT_GUARDS_H

#include "native.h"

namespace fw {

PyTypeObject *guard_program_type();
Py_ssize_t guard_program_inputs(PyObject *program);
// Checks `program` (of guard_program_type() or a subclass) on a frame's locals and function. 1: it passes, and inputs[0
// : guard_program_inputs()] are new references to the graph's inputs. 0: it does not. An exception is the answer 0,
// unless it is the program's (interruptions.h): `interrupted` raises it.
int guard_program_check(PyObject *program, PyObject *const *locals, Py_ssize_t n, PyObject *function,
                        PyObject **inputs);

}  // namespace fw
#endif
