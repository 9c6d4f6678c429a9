// Builds a Program from the plain tuples that fusewright.codegen.call_plan makes (runtime/launch.py hands them over).
// Takes the keyword arguments of `Plan`; gives a Program or an exception. Always holds: every slot index, value index
// and input position in a built Program is in range, so that running it needs no further checks of its own structure.
#include "plan.h"

namespace fw {

namespace {

// Reads integers from a tuple one after the other; after the first mistake `ok()` is false and an exception is set.
class Reader {
  public:
    explicit Reader(PyObject *tuple) : tuple_(tuple) {
        if (tuple == nullptr || !PyTuple_Check(tuple)) fail("expected a tuple");
    }
    bool ok() const { return ok_; }
    bool done() const { return !ok_ || at_ == PyTuple_GET_SIZE(tuple_); }
    PyObject *object() {
        if (!ok_ || at_ >= PyTuple_GET_SIZE(tuple_)) {
            fail("a tuple of the plan is too short");
            return nullptr;
        }
        return PyTuple_GET_ITEM(tuple_, at_++);
    }
    int64_t integer() {
        PyObject *item = object();
        if (item == nullptr) return 0;
        int64_t value = PyLong_AsLongLong(item);
        if (value == -1 && PyErr_Occurred()) ok_ = false;
        return value;
    }
    // An integer in [low, high).
    int32_t index(int64_t low, int64_t high) {
        int64_t value = integer();
        if (ok_ && (value < low || value >= high)) {
            PyErr_Format(PyExc_ValueError, "index %lld of the plan is out of range [%lld, %lld)", (long long)value,
                         (long long)low, (long long)high);
            ok_ = false;
        }
        return ok_ ? static_cast<int32_t>(value) : 0;
    }
    void fail(const char *message) {
        if (ok_ && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, message);
        ok_ = false;
    }
    std::string text() {
        PyObject *item = object();
        Py_ssize_t length = 0;
        const char *characters = item == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(item, &length);
        if (characters == nullptr) ok_ = false;
        return characters == nullptr ? std::string() : std::string(characters, length);
    }

  private:
    PyObject *tuple_;
    Py_ssize_t at_ = 0;
    bool ok_ = true;
};

struct Limits {
    int64_t values, slots, inputs, constants, steps;
};

bool read_indices(PyObject *tuple, int64_t low, int64_t high, std::vector<int32_t> *out) {
    Reader reader(tuple);
    while (reader.ok() && !reader.done()) out->push_back(reader.index(low, high));
    return reader.ok();
}

// A run of `ndim` values starting at a value index.
int32_t read_run(Reader &reader, int64_t ndim, int64_t values) {
    return reader.index(0, ndim <= 0 ? values + 1 : values - ndim + 1);
}

// (kind, needs pointer, where, dtype, itemsize, device type, device index, ndim or -1, sizes, strides, offset)
bool read_slot(PyObject *tuple, const Limits &limits, Slot *slot) {
    Reader r(tuple);
    slot->kind = static_cast<SlotKind>(r.index(0, 7));
    slot->needs_pointer = r.index(0, 2) != 0;
    int64_t where[] = {limits.inputs, limits.constants, 1, 1, 1, limits.slots, 1};
    slot->where = r.index(0, where[static_cast<int>(slot->kind)]);
    slot->dtype = r.index(-1, 256);
    slot->itemsize = r.index(0, 65);
    slot->device = r.index(0, 256);
    slot->device_index = r.index(-1, 4096);
    slot->ndim = r.index(slot->kind == SlotKind::Returned ? -1 : 0, 65);
    slot->sizes = read_run(r, slot->ndim, limits.values);
    slot->strides = read_run(r, slot->ndim, limits.values);
    slot->offset = r.index(0, limits.values);
    return r.ok();
}

bool read_kernel(Reader &r, const Limits &limits, KernelStep *step) {
    step->name = r.text();
    PyObject *address = r.object();
    if (!r.ok()) return false;
    step->function = reinterpret_cast<KernelFunction>(PyLong_AsVoidPtr(address));
    if (PyErr_Occurred()) return false;
    if (step->function == nullptr) r.fail("a kernel without an address");
    step->extent = r.index(0, limits.values);
    step->grain = r.integer();
    return r.ok() && read_indices(r.object(), 0, limits.slots, &step->buffers) &&
           read_indices(r.object(), 0, limits.values, &step->sizes);
}

// (name, function, device, grid, threads, shared, whether the last buffer is Triton's, whether it waits, buffers, by
// value, written, sizes)
bool read_launch(Reader &r, const Limits &limits, LaunchStep *step) {
    step->name = r.text();
    PyObject *function = r.object();
    if (!r.ok()) return false;
    step->function = PyLong_AsVoidPtr(function);
    if (PyErr_Occurred()) return false;
    if (step->function == nullptr) r.fail("a kernel without a function");
    if (torch.cuda_stream == nullptr || torch.cuda_guard == nullptr || torch.cuda_guard_set == nullptr ||
        torch.delete_cuda_guard == nullptr)
        r.fail("this PyTorch has no CUDA functions");
    step->device = r.index(0, 4096);
    step->grid = r.index(0, limits.values);
    step->threads = r.index(1, 1025);
    step->shared = r.index(0, 1 << 20);
    step->scratch = r.index(0, 2) != 0;
    step->waits = r.index(0, 2) != 0;
    std::vector<int32_t> by_value, written;
    if (!r.ok() || !read_indices(r.object(), 0, limits.slots, &step->buffers) ||
        !read_indices(r.object(), 0, 2, &by_value) || !read_indices(r.object(), 0, 2, &written) ||
        !read_indices(r.object(), 0, limits.values, &step->sizes))
        return false;
    if (step->scratch && step->buffers.empty()) r.fail("scratch memory that is not among the buffers");
    if (by_value.size() != step->buffers.size() || written.size() != step->buffers.size())
        r.fail("a kernel's parameters do not fit together");
    step->by_value.assign(by_value.begin(), by_value.end());
    step->written.assign(written.begin(), written.end());
    return r.ok();
}

bool read_extern_args(PyObject *tuple, const Limits &limits, ExternStep *step) {
    Reader r(tuple);
    while (r.ok() && !r.done()) {
        Reader arg(r.object());
        Arg made;
        made.kind = static_cast<ArgKind>(arg.index(0, 10));
        switch (made.kind) {
            case ArgKind::Scratch:
            case ArgKind::Immediate: made.payload = arg.integer(); break;
            case ArgKind::Value:
            case ArgKind::ValueAddress:
            case ArgKind::ValueAddressAddress: made.payload = arg.index(0, limits.values); break;
            case ArgKind::Handle:
            case ArgKind::HandleAddress:
            case ArgKind::Out: made.payload = arg.index(0, limits.slots); break;
            case ArgKind::Bytes:
            case ArgKind::BytesAddress: {
                PyObject *bytes = arg.object();
                if (bytes == nullptr || !PyBytes_Check(bytes)) {
                    arg.fail("expected bytes");
                    break;
                }
                made.payload = static_cast<int64_t>(step->bytes.size());
                step->bytes.emplace_back(PyBytes_AS_STRING(bytes), PyBytes_GET_SIZE(bytes));
                break;
            }
        }
        if (!arg.ok()) return false;
        if (made.kind == ArgKind::Out) step->results.push_back(static_cast<int32_t>(made.payload));
        step->integers.push_back(made);
    }
    if (step->integers.size() > kMaxIntegers) r.fail("a C function with too many arguments");
    return r.ok();
}

bool read_extern(Reader &r, const Limits &limits, ExternStep *step) {
    step->name = r.text();
    PyObject *address = r.object();
    if (!r.ok()) return false;
    step->function = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return false;
    if (step->function == nullptr) r.fail("an operator without an address");
    if (!r.ok() || !read_extern_args(r.object(), limits, step)) return false;
    Reader doubles(r.object());
    while (doubles.ok() && !doubles.done()) {
        step->doubles.push_back(PyFloat_AsDouble(doubles.object()));
        if (PyErr_Occurred()) return false;
    }
    if (step->doubles.size() > kMaxDoubles) r.fail("a C function with too many floating-point arguments");
    return r.ok() && doubles.ok();
}

bool read_python(Reader &r, const Limits &limits, PythonStep *step) {
    step->name = r.text();
    step->callable = r.object();
    step->constants = r.object();
    PyObject *program = r.object();
    step->keywords = r.object();
    if (!r.ok()) return false;
    if (!PyTuple_Check(step->constants) || (step->keywords != Py_None && !PyTuple_Check(step->keywords))) {
        PyErr_SetString(PyExc_ValueError, "constants and keywords of a Python step must be tuples");
        return false;
    }
    int64_t tops[] = {PyTuple_GET_SIZE(step->constants), limits.slots, limits.values, 1 << 20, 1 << 20, limits.slots};
    Reader ops(program);
    int64_t depth = 0;
    while (ops.ok() && !ops.done()) {
        Reader op(ops.object());
        PyArg arg;
        arg.kind = static_cast<PyArgKind>(op.index(0, 6));
        arg.operand = op.index(0, tops[static_cast<int>(arg.kind)]);
        if (!op.ok()) return false;
        bool group = arg.kind == PyArgKind::List || arg.kind == PyArgKind::Tuple;
        depth += group ? 1 - arg.operand : 1;
        if (depth < 0 || (group && depth < 1)) ops.fail("the argument program of a Python step underflows");
        if (arg.kind == PyArgKind::Tensor || arg.kind == PyArgKind::PrivateTensor) step->tensors.push_back(arg.operand);
        step->program.push_back(arg);
    }
    if (ops.ok() && step->keywords != Py_None && depth < PyTuple_GET_SIZE(step->keywords))
        ops.fail("fewer arguments than keywords");
    if (!ops.ok() || !read_indices(r.object(), -1, limits.slots, &step->results)) return false;
    Py_INCREF(step->callable);
    Py_INCREF(step->constants);
    if (step->keywords == Py_None || PyTuple_GET_SIZE(step->keywords) == 0)
        step->keywords = nullptr;
    else
        Py_INCREF(step->keywords);
    return true;
}

bool read_step(PyObject *tuple, const Limits &limits, Program *p) {
    Reader r(tuple);
    Step step;
    step.kind = static_cast<StepKind>(r.index(0, static_cast<int64_t>(StepKind::Change) + 1));
    if (!r.ok()) return false;
    switch (step.kind) {
        case StepKind::Kernel: {
            KernelStep kernel;
            if (!read_kernel(r, limits, &kernel)) return false;
            step.operand = static_cast<int32_t>(p->kernels.size());
            p->kernels.push_back(std::move(kernel));
            break;
        }
        case StepKind::Launch: {
            LaunchStep launch;
            if (!read_launch(r, limits, &launch)) return false;
            for (size_t i = 0; i < launch.buffers.size(); i++) {
                SlotKind kind = p->slots[launch.buffers[i]].kind;
                if (launch.written[i] && (kind == SlotKind::Input || kind == SlotKind::Constant))
                    p->written_inputs.push_back(launch.buffers[i]);
            }
            step.operand = static_cast<int32_t>(p->launches.size());
            p->launches.push_back(std::move(launch));
            break;
        }
        case StepKind::Extern: {
            ExternStep external;
            if (!read_extern(r, limits, &external)) return false;
            step.operand = static_cast<int32_t>(p->externs.size());
            p->externs.push_back(std::move(external));
            p->dispatches = true;
            break;
        }
        case StepKind::Python: {
            PythonStep python;
            make_room(p->pythons);
            if (!read_python(r, limits, &python)) return false;
            python.collective =
                python.name.rfind("_c10d_functional::", 0) == 0 || python.name.rfind("fusewright_c10d::", 0) == 0;
            step.operand = static_cast<int32_t>(p->pythons.size());
            p->pythons.push_back(std::move(python));
            p->dispatches = true;
            break;
        }
        case StepKind::Group: {
            GroupStep group;
            while (r.ok() && !r.done()) {
                Reader one(r.object());
                KernelStep kernel;
                if (!read_kernel(one, limits, &kernel)) return false;
                group.buffers += kernel.buffers.size();
                group.sizes += kernel.sizes.size();
                group.kernels.push_back(std::move(kernel));
            }
            step.operand = static_cast<int32_t>(p->groups.size());
            p->groups.push_back(std::move(group));
            break;
        }
        case StepKind::Gather: {
            GatherStep gather;
            gather.first = r.index(0, limits.slots);
            if (!r.ok() || !read_indices(r.object(), 0, limits.slots, &gather.sources)) return false;
            if (gather.first + static_cast<int64_t>(gather.sources.size()) > limits.slots)
                r.fail("a tensor list runs past the slots");
            step.operand = static_cast<int32_t>(p->gathers.size());
            p->gathers.push_back(std::move(gather));
            break;
        }
        case StepKind::Skip: {
            SkipStep skip{r.index(0, limits.values), r.index(0, limits.steps - static_cast<int64_t>(p->steps.size()))};
            step.operand = static_cast<int32_t>(p->skips.size());
            p->skips.push_back(skip);
            break;
        }
        default: step.operand = r.index(0, limits.slots);
    }
    p->steps.push_back(step);
    return r.ok();
}

// (kind, slot, ndim, sizes, strides, offset, dtype, value)
bool read_output(PyObject *tuple, const Limits &limits, Program *p) {
    Reader r(tuple);
    OutputSpec output{};
    output.kind = static_cast<OutputKind>(r.index(0, 5));
    output.slot = r.index(0, limits.slots + 1);
    output.ndim = r.index(0, 65);
    output.sizes = read_run(r, output.ndim, limits.values);
    output.strides = read_run(r, output.ndim, limits.values);
    output.offset = r.index(0, limits.values);
    output.dtype = r.index(-1, 256);
    output.value = r.object();
    if (!r.ok()) return false;
    bool tensor = output.kind <= OutputKind::PrivateView;
    if (tensor && output.slot >= limits.slots) r.fail("an output without a slot");
    if (tensor && r.ok()) {
        SlotKind kind = p->slots[output.slot].kind;
        if (kind == SlotKind::Arena || kind == SlotKind::Window || kind == SlotKind::Alias)
            r.fail("temporary memory cannot be an output");
    }
    make_room(p->outputs);
    Py_INCREF(output.value);
    p->outputs.push_back(output);
    return r.ok();
}

template <typename Read>
bool read_each(PyObject *tuple, Read read) {
    Reader r(tuple);
    while (r.ok() && !r.done()) {
        if (!read(r.object())) return false;
    }
    return r.ok();
}

bool read_tables(Program *p, PyObject *symbols, PyObject *instructions, PyObject *slots, const Limits &limits) {
    auto symbol = [&](PyObject *item) {
        Reader r(item);
        SymbolSource source{r.index(0, limits.values), r.index(0, limits.inputs), r.index(-1, 64)};
        p->symbols.push_back(source);
        if (r.ok() && (p->inputs[source.position].kind == 'i') != (source.dim == -1))
            r.fail("a size symbol does not fit its input");
        return r.ok();
    };
    auto instruction = [&](PyObject *item) {
        Reader r(item);
        SizeInstruction made;
        made.op = static_cast<SizeOp>(r.index(0, 6));
        made.target = r.index(0, limits.values);
        made.left = r.index(0, limits.values);
        made.right = r.index(0, limits.values);
        p->instructions.push_back(made);
        return r.ok();
    };
    auto slot = [&](PyObject *item) {
        Slot made;
        if (!read_slot(item, limits, &made)) return false;
        p->slots.push_back(made);
        return true;
    };
    return read_each(symbols, symbol) && read_each(instructions, instruction) && read_each(slots, slot);
}

bool index_slots(Program *p) {
    for (size_t i = 0; i < p->slots.size(); i++) {
        const Slot &slot = p->slots[i];
        int32_t index = static_cast<int32_t>(i);
        if (slot.kind == SlotKind::Input) {
            InputSpec &input = p->inputs[slot.where];
            if (input.kind != 't' || input.slot >= 0) {
                PyErr_SetString(PyExc_ValueError, "an input of the plan has two slots, or is no tensor");
                return false;
            }
            input.slot = index;
        }
        if (slot.kind == SlotKind::Window && !p->slots[slot.where].needs_pointer) {
            PyErr_SetString(PyExc_ValueError, "a window on memory that nobody looks up");
            return false;
        }
        if (slot.kind == SlotKind::Input || slot.kind == SlotKind::Constant) p->given.push_back(index);
        if (slot.kind == SlotKind::Arena) p->arena_slots.push_back({index, slot.offset});
        if (slot.kind == SlotKind::Fresh || slot.kind == SlotKind::Returned) p->released.push_back(index);
        if (slot.kind == SlotKind::Window) p->has_windows = true;
    }
    return true;
}

}  // namespace

Program::~Program() {
    for (Frame *frame : idle) {
        Runner::clean(*this, *frame);
        for (size_t i = 0; i < slots.size(); i++) {
            if (slots[i].kind == SlotKind::Input || slots[i].kind == SlotKind::Alias) continue;
            Py_XDECREF(frame->objects[i]);
            if (frame->owned[i]) torch.delete_handle(frame->handles[i]);
        }
        delete frame;
    }
    for (PythonStep &step : pythons) {
        Py_XDECREF(step.callable);
        Py_XDECREF(step.constants);
        Py_XDECREF(step.keywords);
    }
    for (OutputSpec &output : outputs) Py_XDECREF(output.value);
    Py_XDECREF(constants);
    Py_XDECREF(owner);
    Py_XDECREF(labels);
}

std::unique_ptr<Program> build_program(PyObject *args, PyObject *kwargs) {
    static const char *names[] = {"name",  "inputs", "values", "symbols", "instructions", "slots", "steps", "outputs",
                                  "arena", "constants", "single", "arena_limit", "owner", "labels", nullptr};
    const char *name, *kinds;
    Py_ssize_t n_inputs;
    int arena, single;
    unsigned long long arena_limit;
    PyObject *values, *symbols, *instructions, *slots, *steps, *outputs, *constants, *owner = nullptr;
    PyObject *labels = nullptr;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "ss#O!O!O!O!O!O!iO!pK|OO", const_cast<char **>(names), &name, &kinds, &n_inputs,
            &PyTuple_Type, &values, &PyTuple_Type, &symbols, &PyTuple_Type, &instructions, &PyTuple_Type, &slots,
            &PyTuple_Type, &steps, &PyTuple_Type, &outputs, &arena, &PyTuple_Type, &constants, &single, &arena_limit,
            &owner, &labels))
        return nullptr;
    if (!config.ready) {
        PyErr_SetString(PyExc_RuntimeError, "call plans are not configured: import fusewright.runtime.torch_c first");
        return nullptr;
    }
    auto p = std::make_unique<Program>();
    p->name = name;
    p->single = single != 0;
    p->arena_limit = arena_limit;
    for (Py_ssize_t i = 0; i < n_inputs; i++) {
        if (kinds[i] != 't' && kinds[i] != 'i' && kinds[i] != 'x') {
            PyErr_SetString(PyExc_ValueError, "the kind of an input is 't', 'i' or 'x'");
            return nullptr;
        }
        p->inputs.push_back({kinds[i], -1});
    }
    Reader reader(values);
    while (reader.ok() && !reader.done()) p->values.push_back(reader.integer());
    if (!reader.ok()) return nullptr;
    Limits limits{static_cast<int64_t>(p->values.size()), PyTuple_GET_SIZE(slots), n_inputs,
                  PyTuple_GET_SIZE(constants), PyTuple_GET_SIZE(steps)};
    if (arena < 0 || arena >= limits.values) {
        PyErr_SetString(PyExc_ValueError, "the arena's size is no value of the plan");
        return nullptr;
    }
    p->arena = arena;
    for (Py_ssize_t i = 0; i < limits.constants; i++) {
        if (PyObject_TypeCheck(PyTuple_GET_ITEM(constants, i), config.tensor_type)) continue;
        PyErr_SetString(PyExc_TypeError, "the constants of a plan are tensors");
        return nullptr;
    }
    Py_INCREF(constants);
    p->constants = constants;
    Py_XINCREF(owner);
    p->owner = owner;
    Py_XINCREF(labels);
    p->labels = labels;
    if (!read_tables(p.get(), symbols, instructions, slots, limits)) return nullptr;
    if (!index_slots(p.get())) return nullptr;
    if (!read_each(steps, [&](PyObject *item) { return read_step(item, limits, p.get()); })) return nullptr;
    if (!read_each(outputs, [&](PyObject *item) { return read_output(item, limits, p.get()); })) return nullptr;
    if (p->single && p->outputs.size() != 1) {
        PyErr_SetString(PyExc_ValueError, "a plan of a single output must have one");
        return nullptr;
    }
    return p;
}

}  // namespace fw
