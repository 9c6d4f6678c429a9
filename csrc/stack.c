// The bounds of a thread's C stack, see stack.h.
#define _GNU_SOURCE
#include "stack.h"

#include <pthread.h>

__thread char *fw_stack_limit = NULL;

static const size_t kMargin =
    256 << 10;  // bytes for what runs without asking: CPython's own recursion, PyTorch's operators

int fw_stack_overflow(char *here) {
    void *lowest = NULL;
    size_t size = 0;
#if defined(__APPLE__)
    size = pthread_get_stacksize_np(pthread_self());
    lowest = (char *)pthread_get_stackaddr_np(pthread_self()) - size;
#else
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
        pthread_attr_getstack(&attributes, &lowest, &size);
        pthread_attr_destroy(&attributes);
    }
#endif
    char *low = (char *)lowest;
    fw_stack_limit = low + (size / 4 < kMargin ? size / 4 : kMargin);
    // A coroutine library may have put this call on a stack of its own, of which nothing is known.
    if (here >= fw_stack_limit || here < low) return 0;
    PyErr_SetString(PyExc_RecursionError,
                    "maximum recursion depth exceeded: the C stack of this thread is nearly used up");
    return 1;
}
