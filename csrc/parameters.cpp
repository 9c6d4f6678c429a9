// Values that depend on parameters alone: computed once, kept, and computed again when a parameter has changed.
//
// Takes a plan, a Python function `prepare`, and the positions of the inputs that it depends on; gives
// `fusewright._native.PreparedPlan`, callable like the plan without its last inputs, which are the prepared values.
// prepare(*watched, *sizes) -> (values, kept, samples): a tuple of tensors and numbers; what must stay alive as long as
// they are used (a second name of each watched tensor's memory, so that no other tensor can take its address); and for
// each watched tensor a tuple of byte offsets. Always holds: nothing is read outside of a watched input's storage. A
// prepared value is used only while every watched input has the memory, the version counter, and at the sampled places
// the content that it had when the value was computed. The samples are for writes that PyTorch does not count
// (`p.data.mul_(2)`). Values serve any sizes, and those that they were prepared for best: where others come many times
// on end, they are prepared for these.
#include <cstring>
#include <vector>

#include "plan.h"

namespace fw {

namespace {

struct Sample {
    int64_t offset;
    uint32_t content;
};

// Where the content of a tensor lies, and its version counter (-1: it has none); `reach`: bytes from its first element
// to the end of its last.
struct Place {
    void *data = nullptr;
    int64_t version = -1, itemsize = 0, reach = -1;
    bool operator==(const Place &other) const { return data == other.data && version == other.version; }
};

struct Watched {
    Py_ssize_t position = 0;
    Place place;
    std::vector<Sample> samples;
};

// A size that values are prepared for.
struct Usual {
    Py_ssize_t position = 0;
    int64_t prepared = -1, latest = -1;
};

// So many calls with other sizes, all the same, and the values are prepared for these; each time twice as many are
// asked for, so that sizes that change for ever cost little.
constexpr unsigned long long PATIENCE = 8;

struct PreparedPlan {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *plan, *prepare;
    PyObject *values, *kept;  // tuples, or null before the first call
    std::vector<Watched> *watched;
    std::vector<Usual> *usual;
    Py_ssize_t inputs;        // without the prepared values
    unsigned long long prepared, others,
        patience;  // others: calls on end with equal sizes that are not those prepared for
};

// The version counter of a tensor; -1 for one that has none (made in inference mode).
int64_t version_of(Handle handle) {
    try {
        return torch.version(handle);
    } catch (...) {
        return -1;
    }
}

bool measure(Handle handle, Place *place) {
    int64_t ndim = 0, *sizes = nullptr, *strides = nullptr;
    int32_t dtype = -1;
    if (torch.dim(handle, &ndim) != 0 || torch.dtype(handle, &dtype) != 0) return false;
    if (ndim > 0 && (torch.sizes(handle, &sizes) != 0 || torch.strides(handle, &strides) != 0)) return false;
    place->itemsize = static_cast<int64_t>(torch.element_size(dtype));
    place->reach = reach_of(ndim, sizes, strides, place->itemsize);
    return true;
}

// The tensor's place, if its storage holds all of it; false with RuntimeFallback if not. A reach that is known stays:
// guards hold the sizes.
bool read(PyObject *tensor, Place *place) {
    bool owned = false;
    Handle handle = handle_of(tensor, &owned);
    if (handle == nullptr) return false;
    bool ok = (place->reach >= 0 || measure(handle, place)) && torch.data_ptr(handle, &place->data) == 0;
    bool whole = ok && holds(handle, place->itemsize, place->reach, false);
    place->version = version_of(handle);
    if (owned) torch.delete_handle(handle);
    if (!ok) raise_fallback(torch_error("the data of a parameter"));
    else if (!whole) raise_fallback("the storage of a parameter is smaller than the parameter");
    return whole;
}

uint32_t content_at(const void *data, int64_t offset) {
    uint32_t content;
    std::memcpy(&content, static_cast<const char *>(data) + offset, sizeof content);
    return content;
}

// 1: nothing has changed. 0: something has. -1: an exception.
int is_current(const PreparedPlan *self, PyObject *const *inputs) {
    if (self->values == nullptr) return 0;
    const unsigned long long prepared = self->prepared;
    for (const Watched &one :
         *self->watched)  // the samples are misses of all caches, as a rule: not one after the other
        for (const Sample &sample : one.samples)
            __builtin_prefetch(static_cast<const char *>(one.place.data) + sample.offset);
    for (const Watched &one : *self->watched) {
        Place now = one.place;
        if (!read(inputs[one.position], &now)) return -1;
        if (self->prepared != prepared) return 0;  // reading ran Python code that called this plan
        if (!(now == one.place) || now.version < 0) return 0;
        for (const Sample &sample : one.samples)
            if (content_at(now.data, sample.offset) != sample.content) return 0;
    }
    return self->values != nullptr;
}

// Notes the sizes of a call. 1: the values are prepared for them, or should stay as they are. 0: they should be
// prepared for these. -1: an exception.
int are_usual(PreparedPlan *self, PyObject *const *inputs) {
    bool usual = true, same = true;
    for (Usual &one : *self->usual) {
        int64_t size = PyLong_AsLongLong(inputs[one.position]);
        if (size == -1 && PyErr_Occurred()) return -1;
        usual &= size == one.prepared;
        same &= size == one.latest;
        one.latest = size;
    }
    if (usual) {
        self->others = 0;
        return 1;
    }
    self->others = same ? self->others + 1 : 1;
    if (self->others < self->patience) return 1;
    self->patience *= 2;
    return 0;
}

// Notes what the values were prepared from. `before`: the places of the watched inputs when that began; one that has
// changed since then gets no version, so that the values are prepared again.
bool record(PreparedPlan *self, PyObject *const *inputs, const std::vector<Place> &before, PyObject *places) {
    std::vector<Watched> now(before.size());
    for (size_t i = 0; i < now.size(); i++) {
        now[i].position = (*self->watched)[i].position;
        if (!read(inputs[now[i].position], &now[i].place)) return false;
        PyObject *offsets = PyTuple_GET_ITEM(places, static_cast<Py_ssize_t>(i));
        for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(offsets); k++) {
            int64_t offset = PyLong_AsLongLong(PyTuple_GET_ITEM(offsets, k));
            if (offset == -1 && PyErr_Occurred()) return false;
            if (offset < 0 || offset > now[i].place.reach - static_cast<int64_t>(sizeof(uint32_t))) {
                PyErr_SetString(PyExc_ValueError, "a sample lies outside of its parameter");
                return false;
            }
            now[i].samples.push_back({offset, content_at(now[i].place.data, offset)});
        }
        if (!(now[i].place == before[i])) now[i].place.version = -1;
    }
    *self->watched = std::move(now);
    for (Usual &one : *self->usual) one.prepared = one.latest;
    self->others = 0;
    return true;
}

bool is_tuple_of(PyObject *value, Py_ssize_t size) { return PyTuple_Check(value) && PyTuple_GET_SIZE(value) == size; }

// The values, computed and kept: a new reference, or null with an exception.
PyObject *prepare(PreparedPlan *self, PyObject *const *inputs) {
    std::vector<PyObject *> arguments;
    for (const Watched &one : *self->watched) arguments.push_back(inputs[one.position]);
    std::vector<Place> before(arguments.size());
    for (size_t i = 0; i < before.size(); i++)
        if (!read(arguments[i], &before[i])) return nullptr;
    for (const Usual &one : *self->usual) arguments.push_back(inputs[one.position]);
    Held made(PyObject_Vectorcall(self->prepare, arguments.data(), arguments.size(), nullptr));
    PyObject *result = made.get();
    if (result == nullptr) return nullptr;
    Py_ssize_t count = static_cast<Py_ssize_t>(self->watched->size());
    bool ok = is_tuple_of(result, 3) && PyTuple_Check(PyTuple_GET_ITEM(result, 0)) &&
              is_tuple_of(PyTuple_GET_ITEM(result, 2), count);
    for (Py_ssize_t i = 0; ok && i < count; i++) ok = PyTuple_Check(PyTuple_GET_ITEM(PyTuple_GET_ITEM(result, 2), i));
    PyObject *values = nullptr, *old[3] = {};  // let go at the end: that may run Python code
    Finally left{[&] {
        for (PyObject *one : old) Py_XDECREF(one);
    }};
    if (!ok) {
        PyErr_SetString(PyExc_TypeError, "prepare gives (values, kept, offsets of samples)");
    } else {
        std::swap(old[0], self->values);  // whatever happens, old values do not survive a change
        if (record(self, inputs, before, PyTuple_GET_ITEM(result, 2))) {
            values = Py_NewRef(PyTuple_GET_ITEM(result, 0));
            old[1] = self->values;  // another thread may have prepared meanwhile
            old[2] = self->kept;
            self->values = Py_NewRef(values);
            self->kept = Py_NewRef(PyTuple_GET_ITEM(result, 1));
            self->prepared++;
        }
    }
    return values;
}

PyObject *call(PyObject *object, PyObject *const *inputs, size_t flags, PyObject *names) {
    PreparedPlan *self = reinterpret_cast<PreparedPlan *>(object);
    Py_ssize_t n = PyVectorcall_NARGS(flags);
    if (n != self->inputs || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
        PyErr_Format(PyExc_TypeError, "a prepared plan takes %zd inputs, got %zd", self->inputs, n);
        return nullptr;
    }
    int usual = self->usual->empty() ? 1 : are_usual(self, inputs);
    if (usual < 0) return nullptr;
    int current = usual == 0 ? 0 : is_current(self, inputs);
    if (current < 0) return nullptr;
    Held kept(current == 0 ? prepare(self, inputs) : Py_NewRef(self->values)), alive(Py_NewRef(self->plan));
    PyObject *values = kept.get(), *plan = alive.get();
    if (values == nullptr) return nullptr;
    Py_ssize_t extra = PyTuple_GET_SIZE(values);
    std::vector<PyObject *> all(static_cast<size_t>(n + extra));
    std::memcpy(all.data(), inputs, static_cast<size_t>(n) * sizeof(PyObject *));
    for (Py_ssize_t i = 0; i < extra; i++) all[static_cast<size_t>(n + i)] = PyTuple_GET_ITEM(values, i);
    return Py_IS_TYPE(plan, fw_plan_type()) ? fw_plan_run(plan, all.data(), n + extra)
                                            : PyObject_Vectorcall(plan, all.data(), all.size(), nullptr);
}

template <class Place>
bool read_positions(PyObject *tuple, Py_ssize_t inputs, std::vector<Place> *places) {
    for (Py_ssize_t i = 0; tuple != nullptr && i < PyTuple_GET_SIZE(tuple); i++) {
        Place one;
        one.position = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i));
        if (one.position == -1 && PyErr_Occurred()) return false;
        if (one.position < 0 || one.position >= inputs) {
            PyErr_SetString(PyExc_ValueError, "a watched position is no input");
            return false;
        }
        places->push_back(one);
    }
    return true;
}

PyObject *prepared_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *names[] = {"plan", "prepare", "inputs", "watched", "sizes", nullptr};
    PyObject *plan, *prepare, *watched, *sizes = nullptr;
    Py_ssize_t inputs;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOnO!|O!", const_cast<char **>(names), &plan, &prepare, &inputs,
                                     &PyTuple_Type, &watched, &PyTuple_Type, &sizes))
        return nullptr;
    if (torch.version == nullptr) {
        PyErr_SetString(PyExc_NotImplementedError, "this PyTorch does not tell a tensor's version");
        return nullptr;
    }
    auto positions = std::make_unique<std::vector<Watched>>();
    auto usual = std::make_unique<std::vector<Usual>>();
    if (!read_positions(watched, inputs, positions.get()) || !read_positions(sizes, inputs, usual.get()))
        return nullptr;
    PreparedPlan *self = reinterpret_cast<PreparedPlan *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->vectorcall = caught<call>;
    self->plan = Py_NewRef(plan);
    self->prepare = Py_NewRef(prepare);
    self->inputs = inputs;
    self->watched = positions.release();
    self->usual = usual.release();
    self->patience = PATIENCE;
    return reinterpret_cast<PyObject *>(self);
}

int prepared_traverse(PyObject *object, visitproc visit, void *arg) {
    PreparedPlan *self = reinterpret_cast<PreparedPlan *>(object);
    Py_VISIT(self->plan);
    Py_VISIT(self->prepare);
    Py_VISIT(self->values);
    Py_VISIT(self->kept);
    return 0;
}

int prepared_clear(PyObject *object) {
    PreparedPlan *self = reinterpret_cast<PreparedPlan *>(object);
    Py_CLEAR(self->values);
    Py_CLEAR(self->kept);
    return 0;
}

void prepared_dealloc(PyObject *object) {
    PreparedPlan *self = reinterpret_cast<PreparedPlan *>(object);
    PyObject_GC_UnTrack(object);
    prepared_clear(object);
    Py_CLEAR(self->plan);
    Py_CLEAR(self->prepare);
    delete self->watched;
    delete self->usual;
    Py_TYPE(object)->tp_free(object);
}

PyObject *prepared_values(PyObject *object, void *) {
    PyObject *values = reinterpret_cast<PreparedPlan *>(object)->values;
    return values == nullptr ? PyTuple_New(0) : Py_NewRef(values);
}

PyObject *prepared_plan(PyObject *object, void *) { return Py_NewRef(reinterpret_cast<PreparedPlan *>(object)->plan); }

PyObject *prepared_count(PyObject *object, void *) {
    return PyLong_FromUnsignedLongLong(reinterpret_cast<PreparedPlan *>(object)->prepared);
}

PyGetSetDef fields[] = {
    {"plan", prepared_plan, nullptr, "The plan that takes the prepared values as its last inputs.", nullptr},
    {"values", prepared_values, nullptr, "The prepared values; () before the first call.", nullptr},
    {"prepared", prepared_count, nullptr, "How often the values were computed.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject prepared_type = {
    PyVarObject_HEAD_INIT(nullptr, 0) "fusewright._native.PreparedPlan",
};

}  // namespace

}  // namespace fw

extern "C" int fw_parameters_init(PyObject *module) {
    PyTypeObject *type = &fw::prepared_type;
    type->tp_basicsize = sizeof(fw::PreparedPlan);
    type->tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_HAVE_GC;
    type->tp_doc =
        "PreparedPlan(plan, prepare, inputs, watched, sizes=()): a plan whose last inputs are computed from "
        "parameters, once, and again "
        "when the sizes at these positions have been others for a while.";
    type->tp_new = fw::caught<fw::prepared_new>;
    type->tp_dealloc = fw::prepared_dealloc;
    type->tp_traverse = fw::prepared_traverse;
    type->tp_clear = fw::prepared_clear;
    type->tp_getset = fw::fields;
    type->tp_call = PyVectorcall_Call;
    type->tp_vectorcall_offset = offsetof(fw::PreparedPlan, vectorcall);
    if (PyType_Ready(type) < 0) return -1;
    return PyModule_AddObjectRef(module, "PreparedPlan", reinterpret_cast<PyObject *>(type));
}
