// Exceptions that a signal's handler has raised while Python code ran for us, where an exception is taken for an
// answer.
#ifndef FUSEWRIGHT_INTERRUPTIONS_H
#define FUSEWRIGHT_INTERRUPTIONS_H

#include "native.h"

namespace fw {

// Whether the exception that is set says nothing of what was tried: no Exception (KeyboardInterrupt, SystemExit), or
// out of a signal's handler.
bool is_programs();
// As PyErr_Clear, where an exception is an answer; one that is the program's is kept for `interrupted`.
void drop_error();
// Whether `drop_error` has kept an exception on this thread: it is set now.
bool interrupted();

int interruptions_init(PyObject *module);

}  // namespace fw
#endif
