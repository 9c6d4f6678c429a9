// ForwardCall: what one run of a compiled forward leaves for its backward; see forward_call.h.
#include "forward_call.h"

#include <structmember.h>

#include <cstddef>
#include <memory>

namespace fw {

namespace {

// The names that are looked up.
struct {
    PyObject *dtype, *device;
} names;

PyObject *tuple_of(const std::vector<int64_t> &values) {
    Held tuple(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; tuple.get() != nullptr && i < values.size(); i++) {
        PyObject *one = PyLong_FromLongLong(values[i]);
        if (one == nullptr) return nullptr;
        PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), one);
    }
    return tuple.release();
}

}  // namespace

ForwardCall *new_call(Differentiable *self, PyObject *const *inputs, Py_ssize_t n) {
    auto layouts = std::make_unique<std::vector<Layout>>();
    auto versions = std::make_unique<std::vector<int64_t>>();
    layouts->reserve(self->tangents->size());
    versions->reserve(static_cast<size_t>(n));
    Held tuple(PyTuple_New(n));
    if (tuple.get() == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < n; i++) PyTuple_SET_ITEM(tuple.get(), i, Py_NewRef(inputs[i]));
    ForwardCall *call = PyObject_GC_New(ForwardCall, &call_type);
    if (call == nullptr) return nullptr;
    call->owner = Py_NewRef(reinterpret_cast<PyObject *>(self));
    call->inputs = tuple.release();
    call->results = call->plain = nullptr;
    call->random = Py_NewRef(Py_None);
    call->layouts = layouts.release();
    call->versions = versions.release();
    PyObject_GC_Track(reinterpret_cast<PyObject *>(call));
    return call;
}

bool learn_kinds(Differentiable *self, PyObject *results) {
    if (self->kinds != nullptr) return true;
    Held kinds(PyTuple_New(static_cast<Py_ssize_t>(self->tangents->size())));
    if (kinds.get() == nullptr) return false;
    for (size_t i = 0; i < self->tangents->size(); i++) {
        PyObject *output = PyTuple_GET_ITEM(results, (*self->tangents)[i]);
        Held dtype(PyObject_GetAttr(output, names.dtype)), device(PyObject_GetAttr(output, names.device));
        if (dtype.get() == nullptr || device.get() == nullptr) return false;
        PyObject *pair = PyTuple_Pack(2, dtype.get(), device.get());
        if (pair == nullptr) return false;
        PyTuple_SET_ITEM(kinds.get(), static_cast<Py_ssize_t>(i), pair);
    }
    Py_XSETREF(self->kinds, kinds.release());
    return true;
}

void read_versions(ForwardCall *call, PyObject *inputs) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); i++) {
        PyObject *input = PyTuple_GET_ITEM(inputs, i);
        if (!is_tensor(input)) continue;
        try {
            call->versions->push_back(torch.version(reinterpret_cast<char *>(input) + config.handle_offset));
        } catch (const std::bad_alloc &) {
            throw;
        } catch (const std::exception &) {  // an inference tensor has none
        }
    }
}

bool add_before(ForwardCall *call, PyObject *results) {
    const std::vector<int32_t> &before = *owner_of(call)->before;
    if (before.empty()) return true;
    const Py_ssize_t n = PyTuple_GET_SIZE(call->inputs), more = static_cast<Py_ssize_t>(before.size());
    Held all(PyTuple_New(n + more));
    for (Py_ssize_t i = 0; all.get() != nullptr && i < n + more; i++) {
        PyObject *one = i < n ? PyTuple_GET_ITEM(call->inputs, i) : PyTuple_GET_ITEM(results, before[i - n]);
        PyTuple_SET_ITEM(all.get(), i, Py_NewRef(one));
    }
    if (all.get() == nullptr) return false;
    Py_SETREF(call->inputs, all.release());
    return true;
}

PyObject *saved_values(ForwardCall *call, PyObject *inputs, PyObject *results) {
    const std::vector<int32_t> &places = *owner_of(call)->saved;
    const Py_ssize_t n = static_cast<Py_ssize_t>(places.size());
    Held saved(PyTuple_New(n));
    for (Py_ssize_t i = 0; saved.get() != nullptr && i < n; i++) {
        const int32_t place = places[i];
        PyObject *value = place >= 0 ? PyTuple_GET_ITEM(inputs, place) : PyTuple_GET_ITEM(results, ~place);
        if (!is_tensor(value)) {
            if (call->plain == nullptr && (call->plain = PyTuple_New(n)) == nullptr) return nullptr;
            PyTuple_SET_ITEM(call->plain, i, Py_NewRef(value));
            value = Py_None;
        }
        PyTuple_SET_ITEM(saved.get(), i, Py_NewRef(value));
    }
    for (Py_ssize_t i = 0; call->plain != nullptr && i < n; i++)
        if (PyTuple_GET_ITEM(call->plain, i) == nullptr) PyTuple_SET_ITEM(call->plain, i, Py_NewRef(Py_None));
    return saved.release();
}

PyObject *layout_tuple(const ForwardCall *call, size_t place) {
    const Layout &wanted = (*call->layouts)[place];
    PyObject *kinds = PyTuple_GET_ITEM(owner_of(call)->kinds, static_cast<Py_ssize_t>(place));
    Held sizes(tuple_of(wanted.sizes)), strides(tuple_of(wanted.strides));
    if (sizes.get() == nullptr || strides.get() == nullptr) return nullptr;
    return PyTuple_Pack(4, sizes.get(), strides.get(), PyTuple_GET_ITEM(kinds, 0), PyTuple_GET_ITEM(kinds, 1));
}

// --- the type ------------------------------------------------------------------------------------------------------

namespace {

int call_traverse(PyObject *object, visitproc visit, void *arg) {
    ForwardCall *self = reinterpret_cast<ForwardCall *>(object);
    for (PyObject *part : {self->owner, self->inputs, self->results, self->random, self->plain}) Py_VISIT(part);
    return 0;
}

int call_clear(PyObject *object) {
    ForwardCall *self = reinterpret_cast<ForwardCall *>(object);
    for (PyObject **part : {&self->inputs, &self->results, &self->random, &self->plain}) Py_CLEAR(*part);
    return 0;
}

void call_dealloc(PyObject *object) {
    ForwardCall *self = reinterpret_cast<ForwardCall *>(object);
    PyObject_GC_UnTrack(object);
    call_clear(object);
    Py_CLEAR(self->owner);
    delete self->layouts;
    delete self->versions;
    PyObject_GC_Del(object);
}

PyObject *call_layouts(PyObject *object, void *) {
    ForwardCall *self = reinterpret_cast<ForwardCall *>(object);
    Held list(PyList_New(0));
    for (size_t i = 0; list.get() != nullptr && i < self->layouts->size(); i++) {
        Held one(layout_tuple(self, i));
        if (one.get() == nullptr || PyList_Append(list.get(), one.get()) < 0) return nullptr;
    }
    return list.release();
}

PyObject *call_versions(PyObject *object, void *) {
    return tuple_of(*reinterpret_cast<ForwardCall *>(object)->versions);
}

PyMemberDef call_members[] = {
    {"inputs", T_OBJECT, offsetof(ForwardCall, inputs), 0, "The forward's inputs, and `before`, while needed."},
    {"random", T_OBJECT, offsetof(ForwardCall, random), READONLY, "The random generators' states before it."},
    {"plain", T_OBJECT, offsetof(ForwardCall, plain), READONLY, "The saved values that are no tensors."},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef call_getset[] = {
    {"layouts", call_layouts, nullptr, "(shape, strides, dtype, device) of each output that has a gradient.", nullptr},
    {"versions", call_versions, nullptr, "How often each tensor of `inputs` had been written to.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

}  // namespace

PyTypeObject call_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "fusewright._native.ForwardCall";
    type.tp_basicsize = sizeof(ForwardCall);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    type.tp_doc = "What one run of a compiled forward leaves for its backward.";
    type.tp_dealloc = call_dealloc;
    type.tp_traverse = call_traverse;
    type.tp_clear = call_clear;
    type.tp_members = call_members;
    type.tp_getset = call_getset;
    return type;
}();

int forward_call_init() {
    if ((names.dtype = PyUnicode_InternFromString("dtype")) == nullptr) return -1;
    if ((names.device = PyUnicode_InternFromString("device")) == nullptr) return -1;
    return PyType_Ready(&call_type);
}

}  // namespace fw
