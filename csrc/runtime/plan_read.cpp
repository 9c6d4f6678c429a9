// Reads a call plan: see plan.h. plan.cpp performs it.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "../object_code.h"
#include "plan.h"

namespace fw {

const DType kDTypes[10] = {{"float64", 8}, {"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"int64", 8},
                           {"int32", 4},   {"int16", 2},   {"int8", 1},    {"uint8", 1},    {"bool", 1}};

int32_t dtype_of(const std::string &name) {
    for (int32_t i = 0; i < 10; i++)
        if (name == kDTypes[i].name) return i;
    fail("the dtype " + name + " is not for the runtime without Python");
}

namespace {

enum RecordKind {
    kCallPlan, kSlot, kKernel, kCCall, kPythonCall, kSlotStep, kGather, kOutput, kFacts, kGraph, kGroup,
    kLaunch, kPrepacking, kStep, kRef, kTensorType, kSize, kGuarded
};

const Value &record(const Value &value, RecordKind kind, const char *what) {
    require(value.kind == Value::Record && value.integer == kind,
            std::string("a call plan has no ") + what + " where it should");
    return value;
}

}  // namespace

CallPlan::CallPlan(Bytes data, std::vector<PlanInput> inputs, std::vector<size_t> outputs, Library library)
    : inputs_(std::move(inputs)), library_(std::move(library)) {
    Value whole = read_plan(data);
    record(whole, kGraph, "compiled graph");
    if (whole.at(4).kind != Value::Null) {
        const Value &prepacking = record(whole.at(4), kPrepacking, "preparation");
        require(library_.preparation != nullptr,
                "the code prepares weights, and the package does not say how without Python: make it again, or by "
                "standalone=True");
        require(prepacking.at(4).list().items.size() == library_.usual.size(), "usual sizes that do not fit");
        for (int64_t size : library_.usual) inputs_.push_back({PlanInput::Number, 0, 0, size, nullptr, 0});
        for (size_t i = 0; i < library_.preparation->size(); i++)
            inputs_.push_back({PlanInput::Prepared, i, 0, 0, nullptr, 0});
    }
    const Value &plan = record(whole.at(0), kCallPlan, "plan");
    const std::string &kinds = plan.at(1).string();
    require(kinds.size() == inputs_.size(), "the inputs do not fit the plan");
    for (const Value &value : plan.at(2).list().items) values_.push_back(value.number());
    for (const Value &one : plan.at(3).list().items) {
        Symbol made{size_t(one.at(0).within(0, values_.size())), size_t(one.at(1).within(0, kinds.size())),
                    one.at(2).within(-1, FW_MOST_DIMS)};
        PlanInput::Kind kind = inputs_[made.input].kind;
        require((kind == PlanInput::Size || kind == PlanInput::Number) == (made.dim == -1),
                "a size does not fit its input");
        require(kind != PlanInput::Weight && kind != PlanInput::Prepared, "a size of a weight");
        symbols_.push_back(made);
    }
    for (const Value &one : plan.at(4).list().items) {
        size_t n = values_.size();
        instructions_.push_back({int(one.at(0).within(0, 6)), size_t(one.at(1).within(0, n)),
                                 size_t(one.at(2).within(0, n)), size_t(one.at(3).within(0, n))});
    }
    for (const Value &one : plan.at(10).list().items) {
        constants_.emplace_back(one.data.size / 8 + 1);
        if (one.data.size != 0) std::memcpy(constants_.back().data(), one.data.data, one.data.size);
    }
    for (const Value &one : plan.at(5).list().items) read_slot(one);
    for (size_t i = 0; i < slots_.size(); i++) {
        require(slots_[i].kind != kWindow || slots_[i].where < slots_.size(), "a window on nothing");
        if (slots_[i].kind != kConstant) continue;
        const Value &constant = plan.at(10).at(slots_[i].where);
        require(bytes_of(values_.data(), slots_[i]) <= int64_t(constant.data.size),
                "a constant is smaller than its sizes say");
        if (slots_[i].gpu == nullptr) continue;
        on_gpu_.resize(constants_.size());
        const Gpu &gpu = *slots_[i].gpu;
        Owned made(gpu.allocate(int64_t(constant.data.size), gpu.thread_stream()), Free{&gpu, gpu.thread_stream()});
        gpu.upload(made.get(), constant.data.data, int64_t(constant.data.size), gpu.thread_stream());
        on_gpu_[slots_[i].where] = std::move(made);
    }
    std::vector<std::string> keys;
    for (const Value &one : plan.at(6).list().items) read_step(one, &keys);
    arena_ = plan.at(8).within(0, values_.size());
    const std::vector<Value> &given = plan.at(7).list().items;
    for (size_t number : outputs) {
        require(number < given.size(), "there is no such output");
        read_output(given[number]);
    }
    calls_library_ |= library_.preparation != nullptr;
    check_weights();
    if (calls_library_) {
        check_torch_version(library_.made_with);
        hold_fixed();
    }
    load_code(whole.at(1).data, keys);
}

CallPlan::~CallPlan() {
#if FW_LOADS_OBJECTS
    if (code_ != nullptr) munmap(code_, code_size_);
#endif
}

// --- reading
// ------------------------------------------------------------------------------------------------------------

void CallPlan::read_step(const Value &one, std::vector<std::string> *keys) {
    require(one.kind == Value::Record, "a step of another form");
    switch (one.integer) {
        case kSlotStep: read_slot_step(one); break;
        case kKernel:
        case kGroup: {
            size_t first = calls_.size();
            if (one.integer == kKernel) read_call(one, keys);
            else
                for (const Value &call : one.at(0).list().items) read_call(call, keys);
            steps_.push_back({Step::Kernels, first, calls_.size() - first});
            break;
        }
        case kLaunch: read_launch(one); break;
        case kCCall: read_extern(one); break;
        case kPythonCall: read_operator(one); break;
        case kGather: {
            Gathered made{0, {}};
            const std::vector<Value> &sources = one.at(1).list().items;
            for (const Value &source : sources) made.sources.push_back(handled(source));
            made.first = one.at(0).within(0, int64_t(slots_.size()) - int64_t(sources.size()) + 1);
            for (size_t i = 0; i < sources.size(); i++)
                require(slots_[made.first + i].kind == kAlias, "a list of tensors that is none");
            steps_.push_back({Step::Gather, gathers_.size(), 0});
            gathers_.push_back(std::move(made));
            break;
        }
        case kGuarded: {
            size_t place = steps_.size();
            steps_.push_back({Step::Skip, size_t(one.at(0).within(0, values_.size())), 0});
            for (const Value &inner : one.at(1).list().items) {
                require(inner.kind == Value::Record && inner.integer != kGuarded && inner.integer != kKernel &&
                            inner.integer != kGroup && inner.integer != kLaunch,
                        "a step of another form");
                read_step(inner, keys);
            }
            steps_[place].count = steps_.size() - place - 1;
            break;
        }
        default: fail("a step that is not for the runtime without Python");
    }
}

void CallPlan::read_slot_step(const Value &one) {
    const std::string &kind = one.at(0).string();
    size_t slot = one.at(1).within(0, slots_.size());
    int where = slots_[slot].kind;
    require(kind != "mutate" && kind != "change",
            "it writes to an argument or a buffer, which the runtime without Python does not do");
    // A result that an operator returns is made here where a kernel stands in for the operator.
    require(kind != "allocate" || where == kFresh || where == kReturned, "memory for a tensor that has some");
    require(kind != "window" || where == kWindow, "a window on nothing");
    require((kind != "check" && kind != "own") || where == kReturned, "a check of what no operator returned");
    static const std::map<std::string, Step::Kind> kinds = {
        {"allocate", Step::Allocate}, {"window", Step::Window}, {"release", Step::Release},
        {"check", Step::Check},       {"own", Step::Check}};
    auto found = kinds.find(kind);
    require(found != kinds.end(), "a step of another form");
    if (where != kInput && where != kConstant) steps_.push_back({found->second, slot, 0});
}

// A slot whose tensor an operator reads or makes.
size_t CallPlan::handled(const Value &slot) {
    size_t number = slot.within(0, slots_.size());
    require(slots_[number].kind != kArena, "an operator on memory without a tensor");
    slots_[number].needs_handle = true;
    calls_library_ = true;
    return number;
}

void CallPlan::read_extern(const Value &one) {
    static const char *const kinds[] = {"immediate", "value",   "values", "pointer to values",
                                        "handle",    "handles", "bytes",  "pointer to bytes",
                                        "result",    "scratch"};
    static const ArgKind codes[] = {
        ArgKind::Immediate, ArgKind::Value,         ArgKind::ValueAddress, ArgKind::ValueAddressAddress,
        ArgKind::Handle,    ArgKind::HandleAddress, ArgKind::Bytes,        ArgKind::BytesAddress,
        ArgKind::Out,       ArgKind::Scratch};
    ExternStep made{nullptr, {}, {}, {}, {}, one.at(0).string()};
    const std::string &symbol = one.at(1).string();
    require(symbol.compare(0, 11, "aoti_torch_") == 0, "a call of another library: " + symbol);
    const std::vector<Value> &integers = one.at(2).list().items;
    require(integers.size() <= size_t(kMaxIntegers) && one.at(3).list().items.size() <= size_t(kMaxDoubles),
            "too many arguments of " + symbol);
    for (size_t i = 0; i < integers.size(); i++) {
        const std::string &kind = integers[i].at(0).string();
        const Value &payload = integers[i].at(1);
        size_t which = 0;
        while (which < 10 && kind != kinds[which]) which++;
        require(which < 10, "an argument of another form of " + symbol);
        Arg arg{codes[which], 0};
        // How many there are is the next argument of each list.
        bool counted = i + 1 < integers.size() && integers[i + 1].at(0).string() == "immediate";
        int64_t count = counted ? integers[i + 1].at(1).number() : 1;
        switch (arg.kind) {
            case ArgKind::Value: arg.payload = payload.within(0, values_.size()); break;
            case ArgKind::ValueAddress:
            case ArgKind::ValueAddressAddress:
                arg.payload = payload.within(0, values_.size());
                require(count < 0 || count > FW_MOST_DIMS || run_of(payload, size_t(count)) == size_t(arg.payload),
                        "numbers outside of the plan");
                break;
            case ArgKind::HandleAddress:
                arg.payload = handled(payload);
                require(
                    slots_[arg.payload].kind != kAlias || (count > 0 && count <= int64_t(slots_.size()) - arg.payload),
                    "tensors outside of the plan");
                break;
            case ArgKind::Handle: arg.payload = handled(payload); break;
            case ArgKind::Out:
                arg.payload = handled(payload);
                require(slots_[arg.payload].kind == kReturned, "a result that has another memory");
                made.results.push_back(int32_t(arg.payload));
                break;
            case ArgKind::Bytes:
            case ArgKind::BytesAddress:
                arg.payload = int64_t(made.bytes.size());
                made.bytes.emplace_back(reinterpret_cast<const char *>(payload.data.data), payload.data.size);
                made.bytes.back() += std::string(8, char(0));
                break;
            default: arg.payload = payload.number();
        }
        made.integers.push_back(arg);
    }
    for (const Value &value : one.at(3).list().items)
        made.doubles.push_back(value.kind == Value::Real ? value.real : double(value.number()));
    check_torch_version(library_.made_with);
    if (library_.gpu != nullptr) torch_cuda();  // it has the function
    made.function = torch().function(symbol);
    if (made.function == nullptr) fail("this libtorch lacks " + symbol, FW_MACHINE);
    calls_library_ = true;
    steps_.push_back({Step::Extern, externs_.size(), 0});
    externs_.push_back(std::move(made));
}

void CallPlan::read_operator(const Value &one) {
    require(one.at(1).kind == Value::Operator && library_.operators != nullptr,
            "a call of Python's that is not for the runtime without it");
    auto found = library_.operators->find(one.at(1).text);
    require(found != library_.operators->end(), "the package does not describe " + one.at(1).text + ": make it again");
    const std::vector<Value> &constants = one.at(3).list().items;
    std::vector<Argument> stack;
    for (const Value &word : one.at(2).list().items) {
        const std::string &kind = word.at(0).string();
        Argument made;
        if (kind == "constant") {
            made.constant = constants.at(word.at(1).within(0, constants.size()));
        } else if (kind == "tensor" || kind == "private tensor") {
            made.kind = kind == "tensor" ? Argument::Slot : Argument::Private;
            made.number = handled(word.at(1));
        } else if (kind == "value") {
            made.kind = Argument::Entry;
            made.number = word.at(1).within(0, values_.size());
        } else {
            require(kind == "list" || kind == "tuple", "an argument of another form");
            made.kind = Argument::List;
            size_t count = word.at(1).within(0, int64_t(stack.size()) + 1);
            made.items.assign(std::make_move_iterator(stack.end() - count), std::make_move_iterator(stack.end()));
            stack.resize(stack.size() - count);
        }
        stack.push_back(std::move(made));
    }
    std::vector<std::string> keywords;
    for (const Value &word : one.at(4).list().items) keywords.push_back(word.string());
    std::vector<int64_t> results;
    for (const Value &slot : one.at(5).list().items) {
        results.push_back(slot.within(-1, slots_.size()));
        require(results.back() < 0 || slots_[handled(slot)].kind == kReturned, "a result that has another memory");
    }
    check_torch_version(library_.made_with);
    if (library_.gpu != nullptr) torch_cuda();
    calls_library_ = true;
    steps_.push_back({Step::Operator, operators_.size(), 0});
    operators_.push_back(operator_step(found->second, std::move(stack), keywords, std::move(results)));
}

void CallPlan::read_output(const Value &one) {
    record(one, kOutput, "output");
    const std::string &kind = one.at(0).string();
    bool view = kind == "view" || kind == "private view";
    require(view || kind == "buffer", "an output that is no tensor is not for the runtime without Python");
    Output made{view, size_t(one.at(1).within(0, slots_.size())), 0, 0, 0, 0, 0};
    const Slot &slot = slots_[made.slot];
    require(slot.kind != kWindow && slot.kind != kAlias && slot.kind != kArena,
            "a result that has no memory of its own");
    require(slot.kind != kReturned || slot.needs_pointer || slot.needs_handle, "a result that nothing makes");
    slots_[made.slot].needs_pointer = true;
    made.ndim = view ? one.at(3).within(0, FW_MOST_DIMS + 1) : slot.ndim;
    made.sizes = view ? run_of(one.at(4), made.ndim) : slot.sizes;
    made.strides = view ? run_of(one.at(5), made.ndim) : slot.strides;
    made.offset = view ? one.at(6).within(0, values_.size()) : 0;
    made.dtype = slot.dtype;
    require(!view || one.at(2).kind == Value::Null || dtype_of(one.at(2).string()) == slot.dtype,
            "a view of another dtype");
    outputs_.push_back(made);
}

// Handles of weights and constants, which are the same in every call.
void CallPlan::hold_fixed() {
    handles_.resize(slots_.size());
    for (size_t i = 0; i < slots_.size(); i++) {
        const Slot &slot = slots_[i];
        bool weight = slot.kind == kInput && inputs_[slot.where].kind == PlanInput::Weight;
        if (!slot.needs_handle || (!weight && slot.kind != kConstant)) continue;
        void *data = weight                ? const_cast<void *>(inputs_[slot.where].data)
                     : slot.gpu != nullptr ? on_gpu_[slot.where].get()
                                           : static_cast<void *>(constants_[slot.where].data());
        fixed_.emplace_back(around(slot, data, values_.data()));
        handles_[i] = fixed_.back().handle();
    }
}

size_t CallPlan::run_of(const Value &start, size_t count) const {
    return start.within(0, int64_t(values_.size()) - int64_t(count) + 1);
}

void CallPlan::read_slot(const Value &one) {
    record(one, kSlot, "slot");
    static const char *const kinds[] = {"input", "constant", "arena", "fresh", "returned", "window", "alias"};
    const std::string &kind = one.at(1).string();
    Slot made{-1,
              0,
              dtype_of(one.at(4).string()),
              size_t(one.at(7).within(0, FW_MOST_DIMS + 1)),
              0,
              0,
              0,
              one.at(2).integer != 0,
              false,
              nullptr};
    for (int i = 0; i < 7; i++)
        if (kind == kinds[i]) made.kind = i;
    const std::string &device = one.at(5).string();
    require(made.kind >= 0 && (device == "cpu" || (device == "cuda" && library_.gpu != nullptr)),
            "a tensor that is not for the runtime without Python: " + kind + " on " + device);
    if (device == "cuda") {
        made.gpu = library_.gpu;
        require(one.at(6).number() < 0 || one.at(6).number() == made.gpu->index(),
                "a program on several GPUs is not for the runtime without Python");
    }
    auto is_arena = [](const Slot &slot) { return slot.kind == kArena; };
    if (made.kind == kArena && std::none_of(slots_.begin(), slots_.end(), is_arena)) arena_gpu_ = made.gpu;
    require(made.kind != kArena || made.gpu == arena_gpu_, "temporary memory on several devices");
    made.sizes = run_of(one.at(8), made.ndim);
    made.strides = run_of(one.at(9), made.ndim);
    made.offset = one.at(10).within(0, values_.size());
    if (made.kind == kInput) made.where = one.at(3).within(0, inputs_.size());
    if (made.kind == kConstant) made.where = one.at(3).within(0, constants_.size());
    if (made.kind == kWindow) {
        made.where = one.at(3).within(0, INT32_MAX);
        made.needs_handle = calls_library_ = true;
    }
    require(made.kind != kInput ||
                (inputs_[made.where].kind != PlanInput::Size && inputs_[made.where].kind != PlanInput::Number),
            "a tensor that is a number");
    slots_.push_back(made);
}

void CallPlan::read_call(const Value &one, std::vector<std::string> *keys) {
    record(one, kKernel, "kernel");
    Call made{nullptr, one.at(0).string(), {}, {}, size_t(one.at(3).within(0, values_.size())), one.at(4).number()};
    keys->push_back("fw_" + one.at(1).string().substr(0, 16));
    for (const Value &buffer : one.at(2).list().items) made.buffers.push_back(buffer.within(0, slots_.size()));
    for (const Value &size : one.at(5).list().items) made.sizes.push_back(size.within(0, values_.size()));
    calls_.push_back(std::move(made));
}

void CallPlan::read_launch(const Value &one) {
    require(library_.code != nullptr, "a kernel of a GPU, and no code of it");
    const std::string &name = one.at(0).string();
    Launch made{{}, name, {}, {}, {}, size_t(one.at(6).within(0, values_.size())), one.at(8).integer != 0,
                one.at(9).integer != 0};
    for (const Value &buffer : one.at(3).list().items) made.buffers.push_back(buffer.within(0, slots_.size()));
    for (const Value &size : one.at(7).list().items) made.sizes.push_back(size.within(0, values_.size()));
    const std::vector<Value> &by_value = one.at(4).list().items;
    require(by_value.size() == made.buffers.size() && (!made.scratch || !made.buffers.empty()),
            "a kernel of another form");
    for (size_t i = 0; i < made.buffers.size(); i++) {
        made.by_value.push_back(by_value[i].integer != 0);
        require(made.by_value[i] == (slots_[made.buffers[i]].gpu == nullptr),
                name + " reads memory of another device");
    }
    made.function = library_.code->function(one.at(1).string(), name);
    steps_.push_back({Step::Launched, launches_.size(), 0});
    launches_.push_back(std::move(made));
}

// What kernels may touch of a tensor; the strides of results are not negative.
int64_t CallPlan::bytes_of(const int64_t *values, const Slot &slot) const {
    int64_t elements = 1, step;
    for (size_t i = 0; i < slot.ndim; i++) {
        int64_t size = values[slot.sizes + i], stride = values[slot.strides + i];
        if (size <= 0) return 0;
        if (stride < 0 || __builtin_mul_overflow(size - 1, stride, &step) ||
            __builtin_add_overflow(elements, step, &elements) || elements > kMost)
            fail("a tensor is too large", FW_MEMORY);
    }
    return elements * kDTypes[slot.dtype].size;
}

void CallPlan::check_weights() const {
    for (const Slot &slot : slots_)
        if (slot.kind == kInput && inputs_[slot.where].kind == PlanInput::Weight)
            require(bytes_of(values_.data(), slot) <= int64_t(inputs_[slot.where].reach),
                    "a weight is smaller than the plan says");
}

void CallPlan::load_code(Bytes data, const std::vector<std::string> &keys) {
    if (keys.empty()) return;
#if FW_LOADS_OBJECTS
    try {
        bool uses_torch = calls_library_;
        object_code::Loader loader(data.data, data.size, [uses_torch](const char *name, uint64_t *address) {
            static void *const mathematics = dlopen("libm.so.6", RTLD_NOW);  // a part of the C library of its own
            void *found = dlsym(RTLD_DEFAULT, name);
            if (found == nullptr && mathematics != nullptr) found = dlsym(mathematics, name);
            // Packages that are not standalone call vector functions, which libtorch has.
            if (found == nullptr && (uses_torch || std::strncmp(name, "Sleef_", 6) == 0))
                found = torch().function(name);
            *address = reinterpret_cast<uint64_t>(found);
            return true;
        });
        if (data.data == nullptr || !loader.load()) fail("the machine code is missing");
        std::map<std::string, Kernel> found;
        loader.each_function(
            [&](const char *name, uint64_t address) { found[name] = reinterpret_cast<Kernel>(address); });
        for (size_t i = 0; i < keys.size(); i++) {
            require(found.count(keys[i]) != 0, "the machine code has no function " + keys[i]);
            calls_[i].function = found[keys[i]];
        }
        loader.release(&code_, &code_size_);
    } catch (const object_code::Failure &failure) {
        fail("the machine code cannot be loaded: " + failure.text);
    }
#else
    fail("machine code is loaded on Linux, on x86-64 and AArch64, only", FW_MACHINE);
#endif
}

fw_tensor CallPlan::described(size_t result) const {
    const Output &output = outputs_.at(result);
    fw_tensor made{nullptr, output.dtype, int32_t(output.ndim), {}, FW_CPU, 0};
    const Gpu *gpu = slots_[output.slot].gpu;
    if (gpu != nullptr) made.device = FW_CUDA, made.device_index = gpu->index();
    for (size_t i = 0; i < output.ndim; i++) {
        bool varies = false;
        for (const Symbol &symbol : symbols_) varies |= symbol.value == output.sizes + i;
        for (const Instruction &one : instructions_) varies |= one.target == output.sizes + i;
        made.sizes[i] = varies ? -1 : values_[output.sizes + i];
    }
    return made;
}

}  // namespace fw
