// The steps of a call plan that call library operators through Python.
// Takes tensors and numbers by slot; gives results by slot, as the plan assumed them (plan_steps.cpp performs the other
// steps). Always holds: the GIL is held here; a result never shares memory that the plan will use again.
#include "plan.h"

namespace fw {

namespace {

void drop_references(std::vector<PyObject *> &objects) {
    for (PyObject *object : objects) Py_DECREF(object);
    objects.clear();
}

}  // namespace

PyObject *Runner::object(int32_t slot) {
    const Slot &s = p.slots[slot];
    if (s.kind == SlotKind::Input) return Py_NewRef(inputs_[s.where]);
    if (s.kind == SlotKind::Constant) return Py_NewRef(PyTuple_GET_ITEM(p.constants, s.where));
    if (f.objects[slot] == nullptr) {
        if (f.handles[slot] == nullptr) {
            PyErr_SetString(PyExc_SystemError, "a call plan reads a tensor that does not exist yet");
            return nullptr;
        }
        f.objects[slot] = wrap_handle(f.handles[slot]);
    }
    return Py_XNewRef(f.objects[slot]);
}

PyObject *Runner::private_copy(int32_t slot) {
    PyObject *original = object(slot);
    if (original == nullptr) return nullptr;
    PyObject *copy = PyObject_CallOneArg(config.clone, original);
    Py_DECREF(original);
    return copy;
}

PyObject *Runner::call_python(const PythonStep &step) {
    std::vector<PyObject *> stack;
    stack.reserve(step.program.size());
    for (const PyArg &arg : step.program) {
        PyObject *made = nullptr;
        switch (arg.kind) {
            case PyArgKind::Constant: made = Py_NewRef(PyTuple_GET_ITEM(step.constants, arg.operand)); break;
            case PyArgKind::Tensor: made = object(arg.operand); break;
            case PyArgKind::PrivateTensor: made = private_copy(arg.operand); break;
            case PyArgKind::Value: made = PyLong_FromLongLong(v[arg.operand]); break;
            case PyArgKind::List:
            case PyArgKind::Tuple: {
                bool list = arg.kind == PyArgKind::List;
                made = list ? PyList_New(arg.operand) : PyTuple_New(arg.operand);
                if (made == nullptr) break;
                size_t first = stack.size() - arg.operand;
                for (int32_t i = 0; i < arg.operand; i++) {
                    if (list)
                        PyList_SET_ITEM(made, i, stack[first + i]);
                    else
                        PyTuple_SET_ITEM(made, i, stack[first + i]);
                }
                stack.resize(first);
                break;
            }
        }
        if (made == nullptr) {
            drop_references(stack);
            return nullptr;
        }
        stack.push_back(made);
    }
    size_t named = step.keywords == nullptr ? 0 : PyTuple_GET_SIZE(step.keywords);
    PyObject *result = PyObject_Vectorcall(step.callable, stack.data(), stack.size() - named, step.keywords);
    drop_references(stack);
    return result;
}

bool Runner::python(const PythonStep &step) {
    hold_gil();
    mutated_ |= step.collective;
    PyObject *result = call_python(step);
    if (result == nullptr) return fail_with_current_exception(step.name);
    Held alive(result);
    size_t position = 0;
    bool ok = take_results(step, result, &position);
    if (ok && position < step.results.size())
        ok = fail(step.name + " returned fewer results than the graph says", PyExc_RuntimeError);
    return ok;
}

// Walks nested tuples and lists of results; those that nobody reads, and those after the last that is read, are
// dropped.
bool Runner::take_results(const PythonStep &step, PyObject *result, size_t *position) {
    if (PyTuple_Check(result) || PyList_Check(result)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); i++)
            if (!take_results(step, PySequence_Fast_GET_ITEM(result, i), position)) return false;
        return true;
    }
    if (*position >= step.results.size()) return true;
    int32_t slot = step.results[(*position)++];
    if (slot < 0) return true;
    if (!PyObject_TypeCheck(result, config.tensor_type))
        return fail(step.name + " returned " + Py_TYPE(result)->tp_name + " where the graph has a tensor",
                    PyExc_RuntimeError);
    return take_tensor(step, slot, result);
}

char *Runner::storage_base(int32_t slot, Handle handle) {
    void *data = nullptr;
    int64_t offset = 0;
    if (torch.data_ptr(handle, &data) != 0 || torch.storage_offset(handle, &offset) != 0) return nullptr;
    return static_cast<char *>(data) - offset * p.slots[slot].itemsize;
}

bool Runner::shares_argument(const PythonStep &step, char *base) {
    for (int32_t slot : step.tensors)
        if (f.handles[slot] != nullptr && storage_base(slot, f.handles[slot]) == base) return true;
    return false;
}

// A result that shares its argument's memory (an operator may return its input) gets memory of its own: the argument's
// will be reused.
bool Runner::take_tensor(const PythonStep &step, int32_t slot, PyObject *tensor) {
    Py_INCREF(tensor);
    bool owned = false;
    Handle handle = handle_of(tensor, &owned);
    char *base = handle == nullptr ? nullptr : storage_base(slot, handle);
    if (base != nullptr && shares_argument(step, base)) {
        if (owned) torch.delete_handle(handle);
        Py_SETREF(tensor, PyObject_CallOneArg(config.clone, tensor));
        handle = tensor == nullptr ? nullptr : handle_of(tensor, &owned);
    }
    if (handle == nullptr) {
        Py_XDECREF(tensor);
        return fail_with_current_exception(step.name);
    }
    store(slot, handle, owned, tensor);
    return true;
}

}  // namespace fw
