// A graph with its backward attached, and what one run of its forward leaves for the backward.
//
// Takes the forward's inputs and results; gives the saved values, and what else the backward is compiled for.
// Always holds: `owner` of a ForwardCall is a Differentiable; `kinds` of that is known once a call is attached.
#ifndef FUSEWRIGHT_FORWARD_CALL_H
#define FUSEWRIGHT_FORWARD_CALL_H

#include <vector>

#include "gradient_layout.h"

namespace fw {

struct Differentiable {
    PyObject_HEAD
    PyObject *forward, *back, *apply, *slowly, *repeat, *random, *as_read;
    PyObject *kinds;  // (dtype, device) of each output that has a gradient, known after the first call
    std::vector<int32_t> *saved, *tangents, *row_major, *wanted, *places;  // as halves.Group has them
    std::vector<int32_t> *before;  // results that stand behind the inputs in a ForwardCall (see halves.Halves)
    Py_ssize_t outputs;
    int keeps;
    vectorcallfunc vectorcall;
};

struct ForwardCall {
    PyObject_HEAD
    PyObject *owner, *inputs, *results, *random, *plain;
    std::vector<Layout> *layouts;
    std::vector<int64_t> *versions;
};

extern PyTypeObject call_type;

inline Differentiable *owner_of(const ForwardCall *call) { return reinterpret_cast<Differentiable *>(call->owner); }

ForwardCall *new_call(Differentiable *self, PyObject *const *inputs, Py_ssize_t n);

// Remembers what the outputs are, which is the same at each call.
bool learn_kinds(Differentiable *self, PyObject *results);

// (shape, strides, dtype, device) of the gradient of an output, as halves.py has it.
PyObject *layout_tuple(const ForwardCall *call, size_t place);

// The saved tensors, with None where a value is none; those values are kept in `plain`, which has None for the tensors.
PyObject *saved_values(ForwardCall *call, PyObject *inputs, PyObject *results);

// Puts what written inputs held before the call behind the inputs.
bool add_before(ForwardCall *call, PyObject *results);

// How often each input tensor has been written to (inference tensors do not count).
void read_versions(ForwardCall *call, PyObject *inputs);

int forward_call_init();

}  // namespace fw

#endif
