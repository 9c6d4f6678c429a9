// One call of a call plan, and the Python type `fusewright._native.Plan`.
// Takes the graph's inputs (tensors, and integers for symbolic sizes); gives a tuple of outputs, or the single output.
// Always holds: whatever happens, what the call took (a frame, a block of memory, handles) is given back before it
// returns.
#include "cuda.h"
#include "plan.h"

namespace fw {

int plan_torch_init(PyObject *module);

namespace {

struct PlanObject {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Program *program;
};

// Python's division: rounds towards minus infinity. False on a zero divisor, and for what int64 cannot hold.
bool compute(const SizeInstruction &one, std::vector<int64_t> &values) {
    int64_t a = values[one.left], b = values[one.right], result = 0;
    switch (one.op) {
        case SizeOp::Add:
            if (__builtin_add_overflow(a, b, &result)) return false;
            break;
        case SizeOp::Multiply:
            if (__builtin_mul_overflow(a, b, &result)) return false;
            break;
        case SizeOp::FloorDivide:
        case SizeOp::Modulo: {
            if (b == 0 || (a == INT64_MIN && b == -1)) return false;
            int64_t quotient = a / b, rest = a % b;
            bool down = rest != 0 && (rest < 0) != (b < 0);
            result = one.op == SizeOp::FloorDivide ? quotient - down : rest + (down ? b : 0);
            break;
        }
        case SizeOp::Minimum: result = a < b ? a : b; break;
        case SizeOp::Maximum: result = a > b ? a : b; break;
    }
    values[one.target] = result;
    return true;
}

// No size equals this: what depends on sizes is computed afresh at the next call.
void forget_sizes(const Program &p, Frame &frame) {
    for (const SymbolSource &source : p.symbols) frame.values[source.value] = INT64_MIN;
}

// What the storages of inputs and constants must hold for the sizes in `values`: all that kernels may touch.
void measure(const Program &p, Frame &frame, const int64_t *values) {
    for (size_t i = 0; i < p.given.size(); i++) {
        const Slot &slot = p.slots[p.given[i]];
        frame.reach[i] = reach_of(slot.ndim, values + slot.sizes, values + slot.strides, slot.itemsize);
    }
}

Frame *new_frame(const Program &p) {
    auto frame = std::make_unique<Frame>();
    size_t n = p.slots.size();
    frame->handles.resize(n);
    frame->pointers.resize(n);
    frame->objects.resize(n);
    frame->owned.resize(n);
    frame->window_of.resize(n);
    frame->window_epoch.resize(n);
    if (p.dynamic()) frame->values = p.values;
    forget_sizes(p, *frame);
    frame->reach.resize(p.given.size());
    if (!p.dynamic()) measure(p, *frame, p.values.data());
    for (size_t i = 0; i < n; i++) {
        if (p.slots[i].kind != SlotKind::Constant) continue;
        bool owned = false;
        Handle handle = handle_of(PyTuple_GET_ITEM(p.constants, p.slots[i].where), &owned);
        if (handle == nullptr) return nullptr;
        frame->handles[i] = handle;
        frame->owned[i] = owned;
    }
    return frame.release();
}

// One call's hold on a frame and a block.
class Call {
  public:
    Call(Program &program, PyObject *const *inputs) : p(program), inputs_(inputs) {}
    ~Call() {
        if (block_ != nullptr) release_block(block_);
        // The device's queue may still hold work on this memory; PyTorch's allocator gives it out again to the same
        // queue only.
        if (device_block_ != nullptr) torch.delete_handle(device_block_);
        if (frame_ == nullptr) return;
        if (owning_)
            for (const InputSpec &input : p.inputs)
                if (input.slot >= 0) Py_CLEAR(frame_->objects[input.slot]);
        Runner::clean(p, *frame_);
        p.idle.push_back(frame_);
    }
    bool prepare() { return take_frame() && read_inputs() && compute_sizes() && read_memory() && place(); }
    PyObject *execute(std::vector<int64_t> *nanoseconds = nullptr);

    // Whether each tensor that kernels read is as the plan says: no guard has looked at what a saved-tensor hook gives.
    bool check_inputs() {
        for (int32_t number : p.given) {
            const Slot &slot = p.slots[number];
            bool same = false;  // strides
            if (!slot.needs_pointer || (matches(frame_->handles[number], slot, values_, &same) && same)) continue;
            raise_fallback("a saved tensor is not what was saved");
            return false;
        }
        return true;
    }

    // The call takes over a reference to each tensor that it reads: a release step gives it back, or else the end of
    // the call.
    void own_inputs() {
        owning_ = true;
        for (size_t i = 0; i < p.inputs.size(); i++)
            if (p.inputs[i].slot >= 0) frame_->objects[p.inputs[i].slot] = Py_NewRef(inputs_[i]);
    }

  private:
    Program &p;
    PyObject *const *inputs_;
    Frame *frame_ = nullptr;
    Block *block_ = nullptr;
    Handle device_block_ = nullptr;
    const int64_t *values_ = nullptr;
    bool owning_ = false;

    bool take_frame() {
        if (p.idle.empty()) {
            p.idle.reserve(p.frames + 1);
            frame_ = new_frame(p);
            if (frame_ != nullptr) p.frames++;
        } else {
            frame_ = p.idle.back();
            p.idle.pop_back();
        }
        values_ = p.dynamic() && frame_ != nullptr ? frame_->values.data() : p.values.data();
        return frame_ != nullptr;
    }

    // A storage may be freed, shrunk or exchanged at any time (`resize_`, `.data = ...`), and no guard tells: each call
    // looks at it. What holds less than the graph may touch is eager's to refuse.
    bool read_memory() {
        const int64_t *reach = frame_->reach.data();
        for (int32_t number : p.given) {
            const Slot &slot = p.slots[number];
            Handle handle = frame_->handles[number];
            if (slot.needs_pointer && torch.data_ptr(handle, &frame_->pointers[number]) != 0) {
                raise_fallback(torch_error("the data of an input"));
                return false;
            }
            if (holds(handle, slot.itemsize, *reach++, !slot.needs_pointer)) continue;
            raise_fallback("the storage of an input is smaller than the input");
            return false;
        }
        return true;
    }

    bool read_inputs() {
        for (size_t i = 0; i < p.inputs.size(); i++) {
            const InputSpec &input = p.inputs[i];
            if (input.kind != 't' || input.slot < 0) continue;
            bool owned = false;
            Handle handle = handle_of(inputs_[i], &owned);
            if (handle == nullptr) return false;
            frame_->handles[input.slot] = handle;
            frame_->owned[input.slot] = owned;
        }
        return true;
    }

    bool read_symbol(const SymbolSource &source, int64_t *value) {
        PyObject *input = inputs_[source.position];
        if (source.dim == -1) {
            *value = PyLong_AsLongLong(input);
            return *value != -1 || !PyErr_Occurred();
        }
        bool owned = false;
        int32_t slot = p.inputs[source.position].slot;
        Handle handle = slot >= 0 ? frame_->handles[slot] : handle_of(input, &owned);
        if (handle == nullptr) return false;
        int64_t ndim = 0, *sizes = nullptr;
        bool ok = torch.dim(handle, &ndim) == 0 && source.dim < ndim && torch.sizes(handle, &sizes) == 0;
        if (ok) *value = sizes[source.dim];
        if (owned) torch.delete_handle(handle);
        if (!ok) raise_fallback("an input has fewer dimensions than the graph says");
        return ok;
    }

    bool compute_sizes() {
        if (!p.dynamic() || update_sizes()) return true;
        forget_sizes(p, *frame_);
        return false;
    }

    bool update_sizes() {
        bool changed = false;
        for (const SymbolSource &source : p.symbols) {
            int64_t value = 0;
            if (!read_symbol(source, &value)) return false;
            changed |= frame_->values[source.value] != value;
            frame_->values[source.value] = value;
        }
        if (!changed) return true;
        frame_->epoch++;
        frame_->base = nullptr;
        for (const SizeInstruction &one : p.instructions) {
            if (compute(one, frame_->values)) continue;
            raise_fallback("a size is too large, or divided by zero");
            return false;
        }
        measure(p, *frame_, values_);
        return true;
    }

    bool place() {
        if (p.has_windows && torch.inference_mode != nullptr) {
            // A tensor made in inference mode stays an inference tensor: windows belong to the mode that made them.
            bool inference = torch.inference_mode();
            if (inference != frame_->inference) frame_->epoch++;
            frame_->inference = inference;
        }
        int64_t size = values_[p.arena];
        if (p.arena_slots.empty()) return true;
        char *base = nullptr;
        if (!take_memory(size > 0 ? size : 1, &base)) return false;
        if (base == frame_->base) return true;
        frame_->base = base;
        for (const ArenaSlot &one : p.arena_slots) frame_->pointers[one.slot] = base + values_[one.offset];
        return true;
    }

    // The arena, which lies where its tensors do: a block that all plans share, or one allocation of PyTorch's on a
    // GPU.
    bool take_memory(int64_t size, char **base) {
        const Slot &first = p.slots[p.arena_slots[0].slot];
        if (first.device == config.cpu) {
            block_ = acquire_block(static_cast<size_t>(size), p.arena_limit);
            if (block_ != nullptr) *base = block_->base;
            return block_ != nullptr;
        }
        int64_t elements = (size + first.itemsize - 1) / first.itemsize, one = 1;
        void *memory = nullptr;
        if (torch.empty_strided(1, &elements, &one, first.dtype, first.device, first.device_index, &device_block_) !=
                0 ||
            torch.data_ptr(device_block_, &memory) != 0) {
            raise_fallback(allocation_error("allocating temporary memory", first.device));
            return false;
        }
        *base = static_cast<char *>(memory);
        return true;
    }
};

}  // namespace

// What a profile calls the steps. A defect in there costs the names, not the call.
void ask_for_labels(Program &p) {
    if (p.labels == nullptr) return;
    PyObject *asked = p.labels;
    p.labels = nullptr;
    auto made = std::make_unique<std::vector<std::string>>();
    PyObject *labels = asked == Py_None ? PyTuple_New(0) : PyObject_CallNoArgs(asked);
    if (labels != nullptr && !PyTuple_Check(labels))
        PyErr_SetString(PyExc_TypeError, "the labels of a plan are a tuple");
    for (Py_ssize_t i = 0; !PyErr_Occurred() && i < PyTuple_GET_SIZE(labels); i++) {
        const char *text = PyUnicode_AsUTF8(PyTuple_GET_ITEM(labels, i));
        if (text != nullptr) made->emplace_back(text);
    }
    if (PyErr_Occurred()) PyErr_WriteUnraisable(asked);
    p.step_labels = std::move(made);
    Py_XDECREF(labels);
    Py_DECREF(asked);
}

namespace {

PyObject *Call::execute(std::vector<int64_t> *nanoseconds) {
    Runner runner(p, *frame_, inputs_, values_);
    runner.nanoseconds = nanoseconds;
    bool profiled = is_profiled();
    if (profiled) {
        ask_for_labels(p);
        runner.labels = p.step_labels.get();
    }
    Range region(profiled ? ("fusewright: " + p.name).c_str() : "");
    {
        BelowAutograd below(p.dispatches);
        if (!runner.run()) return nullptr;
    }
    for (const OutputSpec &spec : p.outputs)
        if (!runner.show(spec)) return nullptr;
    if (p.single) return runner.output(p.outputs[0]);
    Held results(PyTuple_New(static_cast<Py_ssize_t>(p.outputs.size())));
    for (size_t i = 0; results.get() != nullptr && i < p.outputs.size(); i++) {
        PyObject *one = runner.output(p.outputs[i]);
        if (one == nullptr) return nullptr;
        PyTuple_SET_ITEM(results.get(), static_cast<Py_ssize_t>(i), one);
    }
    return results.release();
}

PyObject *run_plan(PyObject *self, PyObject *const *inputs, Py_ssize_t n, std::vector<int64_t> *nanoseconds = nullptr) {
    Program &p = *reinterpret_cast<PlanObject *>(self)->program;
    if (n != static_cast<Py_ssize_t>(p.inputs.size())) {
        PyErr_Format(PyExc_TypeError, "plan %s takes %zu inputs, got %zd", p.name.c_str(), p.inputs.size(), n);
        return nullptr;
    }
    // The plan may lose its last reference while it runs (a Python step may drop it).
    Held alive(Py_NewRef(self));
    Call call(p, inputs);
    return call.prepare() ? call.execute(nanoseconds) : nullptr;
}

PyObject *run_inputs(PyObject *self, PyObject *const *inputs, Py_ssize_t n) { return run_plan(self, inputs, n); }

// consume(list): a call that empties the list, so that each tensor in it may be freed after its last reader.
PyObject *plan_consume(PyObject *self, PyObject *list) {
    Program &p = *reinterpret_cast<PlanObject *>(self)->program;
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(p.inputs.size())) {
        PyErr_Format(PyExc_TypeError, "plan %s consumes a list of %zu inputs", p.name.c_str(), p.inputs.size());
        return nullptr;
    }
    Py_ssize_t n = PyList_GET_SIZE(list);
    std::vector<PyObject *> inputs(n);
    for (Py_ssize_t i = 0; i < n; i++) inputs[i] = Py_NewRef(PyList_GET_ITEM(list, i));
    if (PyList_SetSlice(list, 0, n, nullptr) < 0) {
        for (PyObject *input : inputs) Py_DECREF(input);
        return nullptr;
    }
    Held alive(Py_NewRef(self));
    Call call(p, inputs.data());
    {
        Finally given_back{[&] {
            for (PyObject *input : inputs) Py_DECREF(input);
        }};
        if (!call.prepare() || !call.check_inputs()) return nullptr;
        call.own_inputs();
    }
    return call.execute();
}

// The name of a step that computes; empty for one that keeps house.
std::string computation(const Program &p, const Step &step) {
    switch (step.kind) {
        case StepKind::Kernel: return p.kernels[step.operand].name;
        case StepKind::Launch: return p.launches[step.operand].name;
        case StepKind::Extern: return p.externs[step.operand].name;
        case StepKind::Python: return p.pythons[step.operand].name;
        case StepKind::Group: {
            std::string names;
            for (const KernelStep &kernel : p.groups[step.operand].kernels)
                names += (names.empty() ? "" : " + ") + kernel.name;
            return names;
        }
        default: return "";
    }
}

// timed(*inputs): the plan's result, and (name, nanoseconds) of each kernel and operator.
PyObject *plan_timed(PyObject *self, PyObject *const *inputs, Py_ssize_t n) {
    const Program &p = *reinterpret_cast<PlanObject *>(self)->program;
    std::vector<int64_t> nanoseconds;
    nanoseconds.reserve(p.steps.size());
    PyObject *result = run_plan(self, inputs, n, &nanoseconds);
    PyObject *times = result == nullptr ? nullptr : PyList_New(0);
    for (size_t i = 0; times != nullptr && i < nanoseconds.size(); i++) {
        std::string name = computation(p, p.steps[i]);
        if (name.empty() || nanoseconds[i] < 0) continue;
        PyObject *row = Py_BuildValue("(sL)", name.c_str(), static_cast<long long>(nanoseconds[i]));
        if (row == nullptr || PyList_Append(times, row) < 0) Py_CLEAR(times);
        Py_XDECREF(row);
    }
    if (times == nullptr) {
        Py_XDECREF(result);
        return nullptr;
    }
    return Py_BuildValue("(NN)", result, times);
}

PyMethodDef plan_methods[] = {
    {"timed", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)(void)>(caught<plan_timed>)), METH_FASTCALL,
     "timed(*inputs) -> (result, [(name, nanoseconds) of each kernel and operator]): one call, measured (a launch on a "
     "GPU: until it is issued)."},
    {"consume", caught<plan_consume>, METH_O,
     "consume(inputs): calls the plan with the tensors of a list, and empties the list."},
    {nullptr, nullptr, 0, nullptr},
};

PyObject *plan_vectorcall(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
    if (names != nullptr && PyTuple_GET_SIZE(names) != 0) {
        PyErr_SetString(PyExc_TypeError, "a plan takes no keyword arguments");
        return nullptr;
    }
    return run_plan(self, args, PyVectorcall_NARGS(flags));
}

PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    std::unique_ptr<Program> program = build_program(args, kwargs);
    if (program == nullptr) return nullptr;
    PlanObject *self = reinterpret_cast<PlanObject *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->vectorcall = caught<plan_vectorcall>;
    self->program = program.release();
    return reinterpret_cast<PyObject *>(self);
}

void plan_dealloc(PyObject *self) {
    delete reinterpret_cast<PlanObject *>(self)->program;
    Py_TYPE(self)->tp_free(self);
}

PyObject *plan_repr(PyObject *self) {
    const Program &p = *reinterpret_cast<PlanObject *>(self)->program;
    return PyUnicode_FromFormat("<fusewright plan %s: %zu steps, %zu kernels, %zu C operators, %zu Python operators>",
                                p.name.c_str(), p.steps.size(), p.kernels.size(), p.externs.size(), p.pythons.size());
}

PyTypeObject plan_type = {
    PyVarObject_HEAD_INIT(nullptr, 0) "fusewright._native.Plan",
};

}  // namespace

}  // namespace fw

extern "C" PyTypeObject *fw_plan_type(void) { return &fw::plan_type; }

extern "C" PyObject *fw_plan_run(PyObject *plan, PyObject *const *inputs, Py_ssize_t n) {
    return fw::caught<fw::run_inputs>(plan, inputs, n);
}

extern "C" PyObject *fw_plan_consume(PyObject *plan, PyObject *list) {
    return fw::caught<fw::plan_consume>(plan, list);
}

extern "C" int fw_plan_init(PyObject *module) {
    PyTypeObject *type = &fw::plan_type;
    type->tp_basicsize = sizeof(fw::PlanObject);
    type->tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    type->tp_doc = "A compiled graph that runs without Python between its steps; see fusewright.codegen.call_plan.";
    type->tp_new = fw::caught<fw::plan_new>;
    type->tp_dealloc = fw::plan_dealloc;
    type->tp_repr = fw::plan_repr;
    type->tp_methods = fw::plan_methods;
    type->tp_call = PyVectorcall_Call;
    type->tp_vectorcall_offset = offsetof(fw::PlanObject, vectorcall);
    if (PyType_Ready(type) < 0) return -1;
    if (fw::plan_torch_init(module) < 0 || fw::memory_init(module) < 0 || fw::cuda_init(module) < 0) return -1;
    return PyModule_AddObjectRef(module, "Plan", reinterpret_cast<PyObject *>(type));
}
