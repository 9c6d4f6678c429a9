// Differentiable: the compiled forward of a graph with its backward attached, where that needs no Python: both halves
// are native plans, and one node of autograd's graph stands for the graph. autograd/function.py does the same in
// Python, for every case.
//
// Takes the forward's inputs; gives its outputs, whose gradient function is the node of a torch.autograd.Function that
// has `attach` and `backward` of this file for its methods. What one run of the forward leaves for the backward is a
// ForwardCall (forward_call.h).
//
// Always holds: what differs from the plain case (gradients of gradients, an output without a gradient, hooks on saved
// tensors, transforms, a plan that could not finish) is left to Python; gradients are disabled while the forward runs,
// and enabled when it returns.
#include "forward_call.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <vector>

namespace fw {

namespace {

// The names that are looked up.
struct Names {
    PyObject *call, *to_save, *saved_tensors, *materialize, *clear;
} names;

// What is asked of PyTorch, and `lay_out` of halves.py; see `configure_differentiable`.
struct Asked {
    PyObject *transforms, *hooks, *keeps_graph, *lay_out, *tensor, *parameter;
} asked;

// --- layouts -------------------------------------------------------------------------------------------------------

// Whether nothing but strides may keep the tensor from having the layout.
bool is_alike(PyObject *tensor, const Layout &wanted) {
    PyObject *type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
    if (type != asked.tensor && type != asked.parameter) return false;
    const char *impl = tensor_impl(tensor);
    const int64_t ndim = tensor_dim(impl);
    return keys_of(impl) == wanted.keys && tensor_dtype(impl) == wanted.dtype &&
           ndim == static_cast<int64_t>(wanted.sizes.size()) && tensor_device_index(impl) == wanted.device &&
           std::equal(wanted.sizes.begin(), wanted.sizes.end(), tensor_sizes(impl));
}

// --- the forward ---------------------------------------------------------------------------------------------------

// attach(ctx, call, *inputs): the forward of the autograd function, called by PyTorch.
PyObject *attach(PyObject *, PyObject *const *args, Py_ssize_t n) {
    if (n < 2 || !Py_IS_TYPE(args[1], &call_type)) {
        PyErr_SetString(PyExc_TypeError, "attach takes a context and a ForwardCall");
        return nullptr;
    }
    PyObject *ctx = args[0];
    ForwardCall *call = reinterpret_cast<ForwardCall *>(args[1]);
    Differentiable *self = owner_of(call);
    if (call->results == nullptr || call->inputs == nullptr)
        return PyErr_Format(PyExc_RuntimeError, "a ForwardCall is attached once");
    Held results(std::exchange(call->results, nullptr)), inputs(Py_NewRef(call->inputs));
    Held held(saved_values(call, inputs.get(), results.get()));
    PyObject *saved = held.get();
    if (saved == nullptr || !learn_kinds(self, results.get())) return nullptr;
    const size_t tangents = self->tangents->size();
    Held outputs(PyTuple_New(static_cast<Py_ssize_t>(tangents)));
    if (outputs.get() == nullptr) return nullptr;
    for (size_t i = 0; i < tangents; i++) {
        PyObject *output = PyTuple_GET_ITEM(results.get(), (*self->tangents)[i]);
        call->layouts->push_back(layout_of(output, (*self->row_major)[i] != 0));
        PyTuple_SET_ITEM(outputs.get(), static_cast<Py_ssize_t>(i), Py_NewRef(output));
    }
    if (!self->keeps)
        Py_CLEAR(call->inputs);
    else if (!add_before(call, results.get()))
        return nullptr;
    else
        read_versions(call, call->inputs);
    if (PyObject_SetAttr(ctx, names.call, args[1]) < 0 || PyObject_SetAttr(ctx, names.to_save, saved) < 0 ||
        PyObject_SetAttr(ctx, names.materialize, Py_False) < 0)
        return nullptr;
    return outputs.release();
}

// Whether anybody stands between this call and plain autograd; -1 with an exception.
int is_watched() {
    Held transforms(PyObject_CallNoArgs(asked.transforms));
    if (transforms.get() == nullptr) return -1;
    int active = PyObject_IsTrue(transforms.get());
    if (active != 0) return active;
    Held hooks(PyObject_CallOneArg(asked.hooks, Py_False));
    return hooks.get() == nullptr ? -1 : hooks.get() != Py_None;
}

// The graph's outputs: those with a gradient as the autograd function gives them, the others as they are.
PyObject *outputs_of(const Differentiable *self, PyObject *results, PyObject *made) {
    Held outputs(PyTuple_GetSlice(results, 0, self->outputs));
    if (outputs.get() == nullptr) return nullptr;
    for (size_t i = 0; i < self->tangents->size(); i++) {
        PyObject *one = PyTuple_GET_ITEM(made, static_cast<Py_ssize_t>(i));
        PyObject *before = PyTuple_GET_ITEM(outputs.get(), (*self->tangents)[i]);
        PyTuple_SET_ITEM(outputs.get(), (*self->tangents)[i], Py_NewRef(one));
        Py_DECREF(before);
    }
    return outputs.release();
}

PyObject *run_forward(Differentiable *self, PyObject *const *inputs, Py_ssize_t n) {
    Held held(reinterpret_cast<PyObject *>(new_call(self, inputs, n)));
    ForwardCall *call = reinterpret_cast<ForwardCall *>(held.get());
    if (call == nullptr) return nullptr;
    PyObject *results = nullptr;
    {
        // Python code that runs in here may raise at any time.
        torch.set_grad_enabled(false);
        Finally enabled{[] { torch.set_grad_enabled(true); }};
        if (self->random != Py_None) {
            PyObject *states = PyObject_CallNoArgs(self->random);
            if (states == nullptr) return nullptr;
            Py_SETREF(call->random, states);
        }
        results = fw_plan_run(self->forward, inputs, n);
    }
    Held alive(results);
    if (results == nullptr) return nullptr;
    if (!PyTuple_CheckExact(results)) {
        PyErr_SetString(PyExc_TypeError, "a forward's plan gives a tuple");
        return nullptr;
    }
    const Py_ssize_t made_there = PyTuple_GET_SIZE(results);
    bool fits = self->outputs <= made_there;
    for (int32_t place : *self->saved) fits &= place >= 0 ? place < n : ~place < made_there;
    for (int32_t place : *self->before) fits &= place >= 0 && place < made_there;
    if (!fits) {
        PyErr_SetString(PyExc_TypeError, "a saved value is no input, and no result of the forward");
        return nullptr;
    }
    call->results = Py_NewRef(results);
    std::vector<PyObject *> arguments;
    arguments.reserve(self->wanted->size() + 1);
    arguments.push_back(held.get());
    for (int32_t position : *self->wanted) arguments.push_back(inputs[position]);
    Held made(PyObject_Vectorcall(self->apply, arguments.data(), arguments.size(), nullptr));
    if (made.get() == nullptr) return nullptr;
    if (!PyTuple_Check(made.get()) || PyTuple_GET_SIZE(made.get()) != static_cast<Py_ssize_t>(self->tangents->size())) {
        PyErr_SetString(PyExc_TypeError, "the autograd function gave other outputs");
        return nullptr;
    }
    return outputs_of(self, results, made.get());
}

PyObject *differentiable_call(PyObject *object, PyObject *const *inputs, size_t flags, PyObject *keywords) {
    Differentiable *self = reinterpret_cast<Differentiable *>(object);
    const Py_ssize_t n = PyVectorcall_NARGS(flags);
    for (int32_t position : *self->wanted) {
        if (position >= 0 && position < n) continue;
        PyErr_Format(PyExc_TypeError, "this graph takes more than %zd inputs", n);
        return nullptr;
    }
    int watched = torch.grad_enabled() ? is_watched() : 1;
    if (watched < 0) return nullptr;
    Held alive(Py_NewRef(object));
    if (watched) return PyObject_Vectorcall(self->slowly, inputs, static_cast<size_t>(n), keywords);
    return run_forward(self, inputs, n);
}

// --- the backward --------------------------------------------------------------------------------------------------

// What Python's backward gives: `repeat(ctx, call, gradients of the outputs, error)`; `error` (stolen, or null) is what
// the plan raised.
PyObject *by_python(PyObject *ctx, ForwardCall *call, PyObject *const *given, Py_ssize_t n, PyObject *error) {
    Held alive(error), tangents(PyTuple_New(n));
    if (tangents.get() == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(tangents.get(), i, Py_NewRef(given[i]));
    PyObject *arguments[] = {ctx, reinterpret_cast<PyObject *>(call), tangents.get(), error ? error : Py_None};
    return PyObject_Vectorcall(owner_of(call)->repeat, arguments, 4, nullptr);
}

PyObject *raised() {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

// The gradient of an output as the backward was compiled for it.
PyObject *laid_out(const ForwardCall *call, PyObject *given, size_t place) {
    const Layout &wanted = (*call->layouts)[place];
    if (is_alike(given, wanted)) {
        if (std::equal(wanted.strides.begin(), wanted.strides.end(), tensor_strides(tensor_impl(given))))
            return Py_NewRef(given);
        PyObject *copy = copy_of(given, wanted);
        if (copy != nullptr || PyErr_Occurred()) return copy;  // else Python's own raises what PyTorch says
    }
    Held tuple(layout_tuple(call, place));
    PyObject *arguments[] = {given, tuple.get()};
    return tuple.get() == nullptr ? nullptr : PyObject_Vectorcall(asked.lay_out, arguments, 2, nullptr);
}

// A list of what the backward's plan takes: the saved values, and the gradients of the outputs as it was compiled for.
PyObject *values_for(ForwardCall *call, PyObject *ctx, PyObject *const *given, Py_ssize_t n) {
    Held saved(PyObject_GetAttr(ctx, names.saved_tensors));
    if (saved.get() == nullptr) return nullptr;
    const Py_ssize_t kept = static_cast<Py_ssize_t>(owner_of(call)->saved->size());
    if (!PyTuple_Check(saved.get()) || PyTuple_GET_SIZE(saved.get()) != kept) {
        PyErr_SetString(PyExc_RuntimeError, "the saved tensors are not those of this graph");
        return nullptr;
    }
    Held values(PyList_New(kept + n));
    if (values.get() == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < kept; i++) {
        PyObject *plain = call->plain == nullptr ? Py_None : PyTuple_GET_ITEM(call->plain, i);
        PyList_SET_ITEM(values.get(), i, Py_NewRef(plain == Py_None ? PyTuple_GET_ITEM(saved.get(), i) : plain));
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *tangent = laid_out(call, given[i], static_cast<size_t>(i));
        if (tangent == nullptr) return nullptr;
        PyList_SET_ITEM(values.get(), kept + i, tangent);
    }
    return values.release();
}

// The node's results: nothing for the ForwardCall, then the gradients of the inputs; of `found`, or all None.
PyObject *gradients_of(const Differentiable *self, PyObject *found) {
    const std::vector<int32_t> &places = *self->places;
    Held own(PyTuple_New(static_cast<Py_ssize_t>(places.size()) + 1));
    if (own.get() == nullptr) return nullptr;
    PyTuple_SET_ITEM(own.get(), 0, Py_NewRef(Py_None));
    for (size_t i = 0; i < places.size(); i++) {
        PyObject *one = Py_None;
        if (found != nullptr && places[i] >= 0) one = PySequence_Fast_GET_ITEM(found, places[i]);
        PyTuple_SET_ITEM(own.get(), static_cast<Py_ssize_t>(i) + 1, Py_NewRef(one));
    }
    return own.release();
}

// Unless the graph is kept, nothing is left for another backward. -1 with an exception.
int release_inputs(ForwardCall *call) {
    Held answer(PyObject_CallNoArgs(asked.keeps_graph));
    int kept = answer.get() == nullptr ? -1 : PyObject_IsTrue(answer.get());
    if (kept == 0) Py_CLEAR(call->inputs);
    return kept < 0 ? -1 : 0;
}

// backward(ctx, *gradients of the outputs): called by PyTorch's engine.
PyObject *backward(PyObject *, PyObject *const *args, Py_ssize_t n) {
    Held held(n < 1 ? nullptr : PyObject_GetAttr(args[0], names.call));
    if (held.get() == nullptr || !Py_IS_TYPE(held.get(), &call_type)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "backward takes the context of a compiled graph");
        return nullptr;
    }
    PyObject *ctx = args[0], *const *given = args + 1;
    ForwardCall *call = reinterpret_cast<ForwardCall *>(held.get());
    Differentiable *self = owner_of(call);
    Held alive(Py_NewRef(call->owner));
    n--;
    if (n != static_cast<Py_ssize_t>(call->layouts->size())) {
        PyErr_SetString(PyExc_TypeError, "a gradient for each output");
        return nullptr;
    }
    const Py_ssize_t missing = std::count(given, given + n, Py_None);
    if (missing == n) return gradients_of(self, nullptr);
    if (missing != 0 || torch.grad_enabled()) return by_python(ctx, call, given, n, nullptr);
    if (self->as_read != Py_None) {
        Held answer(PyObject_CallNoArgs(self->as_read));
        if (answer.get() == nullptr) return nullptr;
        if (answer.get() != Py_True) return by_python(ctx, call, given, n, nullptr);  // which asks, too
    }
    Held values(values_for(call, ctx, given, n));
    if (values.get() == nullptr) return nullptr;
    // Each saved tensor is freed after its last use in the backward.
    Held cleared(PyObject_CallMethodNoArgs(ctx, names.clear));
    if (cleared.get() == nullptr) return nullptr;
    Held found(fw_plan_consume(self->back, values.get()));
    if (found.get() == nullptr) return by_python(ctx, call, given, n, raised());
    const bool listed = PyTuple_Check(found.get()) || PyList_Check(found.get());
    for (int32_t place : *self->places) {
        if (listed && place < PySequence_Fast_GET_SIZE(found.get())) continue;
        PyErr_SetString(PyExc_TypeError, "the backward's plan gives too few gradients");
        return nullptr;
    }
    if (release_inputs(call) < 0) return nullptr;
    return gradients_of(self, found.get());
}

// --- Differentiable ------------------------------------------------------------------------------------------------

bool read_places(PyObject *tuple, std::vector<int32_t> *places) {
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "places are tuples of ints");
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        places->push_back(static_cast<int32_t>(PyLong_AsLong(PyTuple_GET_ITEM(tuple, i))));
        if (PyErr_Occurred()) return false;
    }
    return true;
}

PyObject *differentiable_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *keywords[] = {"forward", "backward", "apply",   "slowly", "repeat",
                                     "random",  "places",   "outputs", "keeps",  "as_read", nullptr};
    PyObject *forward, *back, *apply, *slowly, *repeat, *random, *places, *as_read = Py_None;
    Py_ssize_t outputs;
    int keeps;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!OOOOO!np|O", const_cast<char **>(keywords), fw_plan_type(),
                                     &forward, fw_plan_type(), &back, &apply, &slowly, &repeat, &random, &PyTuple_Type,
                                     &places, &outputs, &keeps, &as_read))
        return nullptr;
    if (!layout.ready || config.handle_offset < 0 || torch.version == nullptr || asked.lay_out == nullptr) {
        PyErr_SetString(PyExc_NotImplementedError, "this PyTorch's tensors cannot be read natively");
        return nullptr;
    }
    std::unique_ptr<std::vector<int32_t>> read[6];
    if (PyTuple_GET_SIZE(places) != 6) {
        PyErr_SetString(PyExc_TypeError, "places: (saved, tangents, row_major, wanted, gradients, before)");
        return nullptr;
    }
    for (int i = 0; i < 6; i++) {
        read[i] = std::make_unique<std::vector<int32_t>>();
        if (!read_places(PyTuple_GET_ITEM(places, i), read[i].get())) return nullptr;
    }
    for (int32_t position : *read[1]) {
        if (position >= 0 && position < outputs) continue;
        PyErr_SetString(PyExc_ValueError, "an output with a gradient is no output");
        return nullptr;
    }
    if (read[1]->size() != read[2]->size() || read[3]->size() != read[4]->size() || read[1]->empty()) {
        PyErr_SetString(PyExc_ValueError, "one layout an output, one gradient an input");
        return nullptr;
    }
    Differentiable *self = reinterpret_cast<Differentiable *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->forward = Py_NewRef(forward);
    self->back = Py_NewRef(back);
    self->apply = Py_NewRef(apply);
    self->slowly = Py_NewRef(slowly);
    self->repeat = Py_NewRef(repeat);
    self->random = Py_NewRef(random);
    self->as_read = Py_NewRef(as_read);
    self->saved = read[0].release();
    self->tangents = read[1].release();
    self->row_major = read[2].release();
    self->wanted = read[3].release();
    self->places = read[4].release();
    self->before = read[5].release();
    self->outputs = outputs;
    self->keeps = keeps;
    self->vectorcall = caught<differentiable_call>;
    return reinterpret_cast<PyObject *>(self);
}

using Parts = std::array<PyObject *, 8>;
Parts parts_of(const Differentiable *self) {
    return {self->forward, self->back,   self->apply,   self->slowly,
            self->repeat,  self->random, self->as_read, self->kinds};
}

int differentiable_traverse(PyObject *object, visitproc visit, void *arg) {
    for (PyObject *part : parts_of(reinterpret_cast<Differentiable *>(object))) Py_VISIT(part);
    return 0;
}

void differentiable_dealloc(PyObject *object) {
    Differentiable *self = reinterpret_cast<Differentiable *>(object);
    PyObject_GC_UnTrack(object);
    for (PyObject *part : parts_of(self)) Py_XDECREF(part);
    for (auto *places : {self->saved, self->tangents, self->row_major, self->wanted, self->places, self->before})
        delete places;
    Py_TYPE(object)->tp_free(object);
}

PyTypeObject differentiable_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "fusewright._native.Differentiable";
    type.tp_basicsize = sizeof(Differentiable);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
    type.tp_doc = "A compiled forward with its backward attached; see csrc/differentiable.cpp.";
    type.tp_new = caught<differentiable_new>;
    type.tp_dealloc = differentiable_dealloc;
    type.tp_traverse = differentiable_traverse;
    type.tp_call = PyVectorcall_Call;
    type.tp_vectorcall_offset = offsetof(Differentiable, vectorcall);
    return type;
}();

// configure_differentiable(transforms, hooks, keeps_graph, lay_out, tensor, parameter)
PyObject *configure_differentiable(PyObject *, PyObject *const *args, Py_ssize_t n) {
    PyObject **places[] = {&asked.transforms, &asked.hooks,  &asked.keeps_graph,
                           &asked.lay_out,    &asked.tensor, &asked.parameter};
    for (Py_ssize_t i = 0; i < std::min<Py_ssize_t>(n, std::size(places)); i++)
        Py_XSETREF(*places[i], Py_NewRef(args[i]));
    Py_RETURN_NONE;
}

template <auto function>
PyCFunction fast() { return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(caught<function>)); }

PyMethodDef functions[] = {
    {"attach", fast<attach>(), METH_FASTCALL, "attach(ctx, call, *inputs): the forward of the autograd function."},
    {"backward", fast<backward>(), METH_FASTCALL, "backward(ctx, *gradients): the backward of the autograd function."},
    {"configure_differentiable", fast<configure_differentiable>(), METH_FASTCALL,
     "What Differentiable asks; see autograd/function.py."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

}  // namespace fw

int fw_differentiable_init(PyObject *module) {
    using namespace fw;
    const char *texts[] = {"call", "to_save", "saved_tensors", "materialize_grads", "maybe_clear_saved_tensors"};
    PyObject **places[] = {&names.call, &names.to_save, &names.saved_tensors, &names.materialize, &names.clear};
    for (size_t i = 0; i < std::size(texts); i++)
        if ((*places[i] = PyUnicode_InternFromString(texts[i])) == nullptr) return -1;
    if (forward_call_init() < 0 || PyModule_AddFunctions(module, functions) < 0) return -1;
    return PyModule_AddType(module, &differentiable_type);
}
