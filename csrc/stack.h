// Whether a thread's C stack is nearly used up.
//
// CPython counts Python's frames and runs those of plain functions without C stack. A compiled call and a frame under
// the hook take some, so with a raised recursion limit a deep recursion would end the process. Where too little is left
// they raise RecursionError.
#ifndef FUSEWRIGHT_STACK_H
#define FUSEWRIGHT_STACK_H

#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

extern __thread char *fw_stack_limit;  // below this address little is left; NULL: not looked up yet on this thread
// Looks the limit up. Whether `here` is below it, and on the thread's own stack; then RecursionError is set.
int fw_stack_overflow(char *here);

static inline int fw_stack_is_short(void) {
    char *here = (char *)__builtin_frame_address(0);
    return (fw_stack_limit == NULL || here < fw_stack_limit) && fw_stack_overflow(here);
}

#ifdef __cplusplus
}
#endif
#endif
