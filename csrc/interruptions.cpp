// What handlers of the operating system's signals raise: CPython runs them between any two instructions of Python code
// on the main thread, also of ours. Their exceptions are the program's and reach it, wherever they were met.
//
// Always holds: `drop_error` forgets an exception that is an answer, and keeps one that is not until `interrupted`
// raises it on the same thread; the operating system's own record of a signal (flags, a library's handler in C) is the
// same after `set_handlers`.
#include "interruptions.h"

#include <csignal>

namespace fw {

namespace {

PyObject *by_handler = nullptr;               // raised_by_handler(exception) -> bool
PyObject *get_handler = nullptr;              // signal.getsignal of CPython's own module, which makes no enums
PyObject *put_handler = nullptr;
thread_local PyObject *kept = nullptr;        // the first exception that `drop_error` has kept on this thread

// Takes the exception that is set; a new reference, its traceback with it.
PyObject *take_error() {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (error != nullptr && traceback != nullptr) PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

void raise_error(PyObject *error) {  // takes the reference
    PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject *>(Py_TYPE(error))), error, PyException_GetTraceback(error));
}

bool asked(PyObject *error) {
    if (by_handler == nullptr) return false;
    PyObject *answer = PyObject_CallOneArg(by_handler, error);
    if (answer == nullptr) {  // another signal, or no room: the first one counts
        PyErr_Clear();
        return false;
    }
    Py_DECREF(answer);
    return answer == Py_True;
}

PyObject *set_raised_by_handler(PyObject *, PyObject *callable) {
    Py_XSETREF(by_handler, callable == Py_None ? nullptr : Py_NewRef(callable));
    Py_RETURN_NONE;
}

// [(signal, handler)] of the handlers that Python calls, but for `usual`.
PyObject *handlers(PyObject *, PyObject *usual) {
    PyObject *found = PyList_New(0);
    for (int number = 1; found != nullptr && number < NSIG; number++) {
        PyObject *key = PyLong_FromLong(number);
        PyObject *handler = key == nullptr ? nullptr : PyObject_CallOneArg(get_handler, key);
        bool failed = handler == nullptr;
        if (!failed && handler != usual && PyCallable_Check(handler)) {
            PyObject *pair = PyTuple_Pack(2, key, handler);
            failed = pair == nullptr || PyList_Append(found, pair) < 0;
            Py_XDECREF(pair);
        }
        Py_XDECREF(handler);
        Py_XDECREF(key);
        if (failed) Py_CLEAR(found);
    }
    return found;
}

// 1: `handler` is there; 0: it is not to be, another one than `expected` was; -1: an exception.
int put(int number, PyObject *key, PyObject *expected, PyObject *handler) {
    PyObject *now = PyObject_CallOneArg(get_handler, key);
    Py_XDECREF(now);  // it is compared, not used
    if (now != expected) return now == nullptr ? -1 : 0;
    struct sigaction before;
    if (sigaction(number, nullptr, &before) != 0) return 0;
    PyObject *answer = PyObject_CallFunctionObjArgs(put_handler, key, handler, nullptr);
    Py_XDECREF(answer);
    if (answer == nullptr) return -1;
    sigaction(number, &before, nullptr);
    return 1;
}

// All of them, whatever handlers raise meanwhile; then what the first one has raised.
PyObject *set_handlers(PyObject *, PyObject *list) {
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "set_handlers takes a list of (signal, expected, handler)");
        return nullptr;
    }
    PyObject *first = nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *row = PyList_GET_ITEM(list, i), *key, *expected, *handler;
        int number;
        if (!PyArg_ParseTuple(row, "OOO", &key, &expected, &handler)) return nullptr;
        if ((number = static_cast<int>(PyLong_AsLong(key))) < 0 && PyErr_Occurred()) return nullptr;
        // signal.signal runs the handlers of signals that have come: once more, as often as one raises.
        for (int tries = 0; put(number, key, expected, handler) < 0 && tries < 100; tries++) {
            PyObject *error = take_error();
            if (first == nullptr) first = error;
            else Py_XDECREF(error);
        }
        if (PyErr_Occurred()) PyErr_Clear();
    }
    if (first == nullptr) Py_RETURN_NONE;
    raise_error(first);
    return nullptr;
}

// Between the lock's answer and the call no handler runs: here is no Python code.
PyObject *call_if_free(PyObject *, PyObject *const *args, Py_ssize_t n) {
    if (n < 2) {
        PyErr_SetString(PyExc_TypeError, "call_if_free takes a lock, a callable and its arguments");
        return nullptr;
    }
    Held lock(Py_NewRef(args[0])), taken(PyObject_CallMethod(lock.get(), "acquire", "O", Py_False));
    if (taken.get() != Py_True) return taken.release() == nullptr ? nullptr : Py_NewRef(Py_None);
    PyObject *result = PyObject_Vectorcall(args[1], args + 2, n - 2, nullptr), *error = take_error();
    Held released(PyObject_CallMethod(lock.get(), "release", nullptr));
    if (error == nullptr) return released.get() == nullptr ? (Py_XDECREF(result), nullptr) : result;
    PyErr_Clear();
    raise_error(error);
    return nullptr;
}

PyMethodDef functions[] = {
    {"set_raised_by_handler", set_raised_by_handler, METH_O,
     "set_raised_by_handler(callable): whether an exception comes out of a signal's handler."},
    {"signal_handlers", handlers, METH_O,
     "signal_handlers(usual) -> [(signal, handler)] of the Python handlers that are not `usual`."},
    {"set_signal_handlers", set_handlers, METH_O,
     "set_signal_handlers([(signal, expected, handler)]): puts each handler where `expected` is, even while signals "
     "come;\n"
     "raises what a handler has raised meanwhile. What the operating system knows of the signals stays."},
    {"call_if_free", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_if_free)), METH_FASTCALL,
     "call_if_free(lock, callable, *args) -> the callable's result, called while this thread holds the lock; None,\n"
     "without waiting, where another thread holds it."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool is_programs() {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return true;
    if (PyErr_ExceptionMatches(PyExc_RecursionError)) return false;  // the stack has ended, for whoever asks as well
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    bool python = traceback != nullptr;  // Python code has run: C code has no handlers
    PyErr_Restore(type, error, traceback);
    if (!python || (error = take_error()) == nullptr) return false;
    bool found = asked(error);
    raise_error(error);
    return found;
}

void drop_error() {
    if (!PyErr_Occurred()) return;
    if (kept != nullptr || !is_programs()) PyErr_Clear();
    else kept = take_error();
}

bool interrupted() {
    if (kept == nullptr) return false;
    raise_error(std::exchange(kept, nullptr));
    return true;
}

int interruptions_init(PyObject *module) {
    PyObject *signals = PyImport_ImportModule("_signal");
    if (signals == nullptr) return -1;
    get_handler = PyObject_GetAttrString(signals, "getsignal");
    put_handler = PyObject_GetAttrString(signals, "signal");
    Py_DECREF(signals);
    return get_handler == nullptr || put_handler == nullptr ? -1 : PyModule_AddFunctions(module, functions);
}

}  // namespace fw
