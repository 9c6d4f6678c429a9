#include "plan.h"

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>

#include "../object_code.h"

#ifdef _OPENMP
#include <omp.h>
#endif

namespace fw {

const DType kDTypes[10] = {{"float64", 8}, {"float32", 4}, {"float16", 2}, {"bfloat16", 2}, {"int64", 8},
                           {"int32", 4},   {"int16", 2},   {"int8", 1},    {"uint8", 1},    {"bool", 1}};

int32_t dtype_of(const std::string &name) {
    for (int32_t i = 0; i < 10; i++)
        if (name == kDTypes[i].name) return i;
    fail("the dtype " + name + " is not for standalone packages");
}

namespace {

constexpr size_t kAlignment = 64;
constexpr int64_t kMost = int64_t(1) << 46;  // bytes of one tensor
enum SlotKind { kInput, kConstant, kArena, kFresh };
enum RecordKind { kCallPlan, kSlot, kKernel, kCCall, kPythonCall, kSlotStep, kGather, kOutput, kFacts, kGraph, kGroup };

const Value &record(const Value &value, RecordKind kind, const char *what) {
    require(value.kind == Value::Record && value.integer == kind, std::string("a call plan has no ") + what + " where it should");
    return value;
}

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};
using Owned = std::unique_ptr<void, Free>;

Owned allocate(int64_t bytes) {
    void *memory = nullptr;
    if (bytes < 0 || bytes > kMost || posix_memalign(&memory, kAlignment, bytes < 1 ? 1 : static_cast<size_t>(bytes)) != 0)
        fail("no memory for " + std::to_string(bytes) + " bytes", FW_MEMORY);
    return Owned(memory);
}

// Python's division. False on a zero divisor, and for what int64 cannot hold.
bool calculate(int op, int64_t a, int64_t b, int64_t *result) {
    if (op == 0) return !__builtin_add_overflow(a, b, result);
    if (op == 1) return !__builtin_mul_overflow(a, b, result);
    if (op >= 4) {
        *result = (op == 4) == (a < b) ? a : b;
        return true;
    }
    if (b == 0 || (a == INT64_MIN && b == -1)) return false;
    int64_t quotient = a / b, rest = a % b;
    bool down = rest != 0 && (rest < 0) != (b < 0);
    *result = op == 2 ? quotient - down : rest + (down ? b : 0);
    return true;
}

// The arena of a thread: kept for its next call.
struct Arena {
    Owned memory;
    int64_t size = 0;
    ~Arena() = default;
};
thread_local Arena arena;

}  // namespace

struct CallPlan::Memory {
    std::vector<void *> pointers;
    std::vector<Owned> owned;
};

CallPlan::CallPlan(Bytes data, std::vector<PlanInput> inputs, std::vector<size_t> outputs) : inputs_(std::move(inputs)) {
    Value whole = read_plan(data);
    record(whole, kGraph, "compiled graph");
    require(whole.at(4).kind == Value::Null, "the code prepares weights by PyTorch: the package is not a standalone one");
    const Value &plan = record(whole.at(0), kCallPlan, "plan");
    const std::string &kinds = plan.at(1).string();
    require(kinds.size() == inputs_.size(), "the inputs do not fit the plan");
    for (const Value &value : plan.at(2).list().items) values_.push_back(value.number());
    for (const Value &one : plan.at(3).list().items) {
        Symbol made{size_t(one.at(0).within(0, values_.size())), size_t(one.at(1).within(0, kinds.size())), one.at(2).within(-1, FW_MOST_DIMS)};
        require((inputs_[made.input].kind == PlanInput::Size) == (made.dim == -1), "a size does not fit its input");
        require(inputs_[made.input].kind != PlanInput::Weight, "a size of a weight");
        symbols_.push_back(made);
    }
    for (const Value &one : plan.at(4).list().items) {
        size_t n = values_.size();
        instructions_.push_back({int(one.at(0).within(0, 6)), size_t(one.at(1).within(0, n)), size_t(one.at(2).within(0, n)), size_t(one.at(3).within(0, n))});
    }
    for (const Value &one : plan.at(10).list().items) {
        constants_.emplace_back(one.data.size / 8 + 1);
        if (one.data.size != 0) std::memcpy(constants_.back().data(), one.data.data, one.data.size);
    }
    for (const Value &one : plan.at(5).list().items) read_slot(one);
    for (size_t i = 0; i < slots_.size(); i++)
        if (slots_[i].kind == kConstant) {
            const Value &constant = plan.at(10).at(slots_[i].where);
            require(bytes_of(values_.data(), slots_[i]) <= int64_t(constant.data.size), "a constant is smaller than its sizes say");
        }
    std::vector<std::string> keys;
    for (const Value &one : plan.at(6).list().items) {
        require(one.kind == Value::Record, "a step of another form");
        if (one.integer == kSlotStep) {
            const std::string &kind = one.at(0).string();
            size_t slot = one.at(1).within(0, slots_.size());
            require(kind == "allocate" || kind == "release", "a step that is not for standalone packages");
            require(kind == "release" || slots_[slot].kind == kFresh, "memory for a tensor that has some");
            if (kind == "allocate") steps_.push_back({true, slot, 0});
            continue;
        }
        size_t first = calls_.size();
        if (one.integer == kGroup)
            for (const Value &call : one.at(0).list().items) read_call(call, &keys);
        else
            read_call(one, &keys);
        steps_.push_back({false, first, calls_.size() - first});
    }
    arena_ = plan.at(8).within(0, values_.size());
    const std::vector<Value> &given = plan.at(7).list().items;
    for (size_t number : outputs) {
        require(number < given.size(), "there is no such output");
        const Value &one = record(given[number], kOutput, "output");
        const std::string &kind = one.at(0).string();
        bool view = kind == "view" || kind == "private view";
        require(view || kind == "buffer", "an output that is no tensor is not for standalone packages");
        Output made{view, size_t(one.at(1).within(0, slots_.size())), 0, 0, 0, 0, 0};
        const Slot &slot = slots_[made.slot];
        require(slot.kind == kFresh, "a result that is an argument is not for standalone packages");
        made.ndim = view ? one.at(3).within(0, FW_MOST_DIMS + 1) : slot.ndim;
        made.sizes = view ? run_of(one.at(4), made.ndim) : slot.sizes;
        made.strides = view ? run_of(one.at(5), made.ndim) : slot.strides;
        made.offset = view ? one.at(6).within(0, values_.size()) : 0;
        made.dtype = slot.dtype;
        require(!view || one.at(2).kind == Value::Null || dtype_of(one.at(2).string()) == slot.dtype, "a view of another dtype");
        outputs_.push_back(made);
    }
    check_weights();
    load_code(whole.at(1).data, keys);
}

CallPlan::~CallPlan() {
#if FW_LOADS_OBJECTS
    if (code_ != nullptr) munmap(code_, code_size_);
#endif
}

size_t CallPlan::run_of(const Value &start, size_t count) const { return start.within(0, int64_t(values_.size()) - int64_t(count) + 1); }

void CallPlan::read_slot(const Value &one) {
    record(one, kSlot, "slot");
    static const char *const kinds[] = {"input", "constant", "arena", "fresh"};
    const std::string &kind = one.at(1).string();
    Slot made{-1, 0, dtype_of(one.at(4).string()), size_t(one.at(7).within(0, FW_MOST_DIMS + 1)), 0, 0, 0};
    for (int i = 0; i < 4; i++)
        if (kind == kinds[i]) made.kind = i;
    require(made.kind >= 0 && one.at(5).string() == "cpu", "a tensor that is not for standalone packages: " + kind);
    made.sizes = run_of(one.at(8), made.ndim);
    made.strides = run_of(one.at(9), made.ndim);
    made.offset = one.at(10).within(0, values_.size());
    int64_t limit = made.kind == kInput ? int64_t(inputs_.size()) : made.kind == kConstant ? int64_t(constants_.size()) : 1;
    made.where = one.at(3).within(0, limit);
    require(made.kind != kInput || inputs_[made.where].kind != PlanInput::Size, "a tensor that is a number");
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

// What kernels may touch of a tensor; the strides of results are not negative.
int64_t CallPlan::bytes_of(const int64_t *values, const Slot &slot) const {
    int64_t elements = 1, step;
    for (size_t i = 0; i < slot.ndim; i++) {
        int64_t size = values[slot.sizes + i], stride = values[slot.strides + i];
        if (size <= 0) return 0;
        if (stride < 0 || __builtin_mul_overflow(size - 1, stride, &step) || __builtin_add_overflow(elements, step, &elements) || elements > kMost)
            fail("a tensor is too large", FW_MEMORY);
    }
    return elements * kDTypes[slot.dtype].size;
}

void CallPlan::check_weights() const {
    for (const Slot &slot : slots_)
        if (slot.kind == kInput && inputs_[slot.where].kind == PlanInput::Weight)
            require(bytes_of(values_.data(), slot) <= int64_t(inputs_[slot.where].reach), "a weight is smaller than the plan says");
}

void CallPlan::load_code(Bytes data, const std::vector<std::string> &keys) {
    if (keys.empty()) return;
#if FW_LOADS_OBJECTS
    try {
        object_code::Loader loader(data.data, data.size, [](const char *name, uint64_t *address) {
            *address = reinterpret_cast<uint64_t>(dlsym(RTLD_DEFAULT, name));
            return true;
        });
        if (data.data == nullptr || !loader.load()) fail("the machine code is missing");
        std::map<std::string, Kernel> found;
        loader.each_function([&](const char *name, uint64_t address) { found[name] = reinterpret_cast<Kernel>(address); });
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
    fw_tensor made{nullptr, output.dtype, int32_t(output.ndim), {}};
    for (size_t i = 0; i < output.ndim; i++) {
        bool varies = false;
        for (const Symbol &symbol : symbols_) varies |= symbol.value == output.sizes + i;
        for (const Instruction &one : instructions_) varies |= one.target == output.sizes + i;
        made.sizes[i] = varies ? -1 : values_[output.sizes + i];
    }
    return made;
}

void CallPlan::compute(std::vector<int64_t> *values, const fw_tensor *leaves) const {
    for (const Symbol &symbol : symbols_) {
        const PlanInput &input = inputs_[symbol.input];
        size_t dim = symbol.dim < 0 ? input.dim : symbol.dim;
        if (int32_t(dim) >= leaves[input.leaf].ndim) fail("an argument has too few dimensions", FW_INPUT);
        (*values)[symbol.value] = leaves[input.leaf].sizes[dim];
    }
    for (const Instruction &one : instructions_)
        if (!calculate(one.op, (*values)[one.left], (*values)[one.right], &(*values)[one.target])) fail("a size is too large, or divided by zero", FW_INPUT);
}

void CallPlan::run(const fw_tensor *leaves, fw_tensor *results) const {
    std::vector<int64_t> own;
    if (!symbols_.empty()) {
        own = values_;
        compute(&own, leaves);
    }
    const int64_t *values = symbols_.empty() ? values_.data() : own.data();
    int64_t need = values[arena_];
    if (need > arena.size) {
        arena.size = 0;
        arena.memory.reset();
        arena.memory = allocate(need);
        arena.size = need;
    }
    Memory memory;
    memory.pointers.resize(slots_.size());
    memory.owned.resize(slots_.size());
    for (size_t i = 0; i < slots_.size(); i++) {
        const Slot &slot = slots_[i];
        if (slot.kind == kArena) {
            int64_t offset = values[slot.offset], bytes = bytes_of(values, slot);
            if (offset < 0 || offset > need || bytes > need - offset) fail("temporary memory lies outside of its block");
            memory.pointers[i] = static_cast<char *>(arena.memory.get()) + offset;
        } else if (slot.kind == kConstant) {
            memory.pointers[i] = const_cast<int64_t *>(constants_[slot.where].data());
        } else if (slot.kind == kInput) {
            const PlanInput &input = inputs_[slot.where];
            memory.pointers[i] = input.kind == PlanInput::Weight ? const_cast<void *>(input.data) : leaves[input.leaf].data;
            if (input.kind != PlanInput::Leaf) continue;
            int64_t given = kDTypes[slot.dtype].size;
            for (int32_t k = 0; k < leaves[input.leaf].ndim; k++) given *= leaves[input.leaf].sizes[k];
            if (slot.dtype != leaves[input.leaf].dtype || bytes_of(values, slot) > given) fail("an argument is smaller than the plan says", FW_INPUT);
        }
    }
    for (const Step &step : steps_) {
        if (step.allocates) {
            memory.owned[step.number] = allocate(bytes_of(values, slots_[step.number]));
            memory.pointers[step.number] = memory.owned[step.number].get();
        } else {
            for (size_t i = 0; i < step.count; i++) perform(calls_[step.number + i], memory.pointers.data(), values);
        }
    }
    size_t done = 0;
    try {
        for (; done < outputs_.size(); done++) give(outputs_[done], values, &memory, &results[done]);
    } catch (...) {
        while (done > 0) fw_free(&results[--done]);
        throw;
    }
}

void CallPlan::perform(const Call &call, void *const *pointers, const int64_t *values) const {
    int64_t extent = values[call.extent], status = 0;
    if (extent <= 0) return;
    void *few[32];
    int64_t few_sizes[32];
    std::vector<void *> many;
    std::vector<int64_t> many_sizes;
    void **buffers = few;
    int64_t *sizes = few_sizes;
    if (call.buffers.size() > 32) many.resize(call.buffers.size()), buffers = many.data();
    if (call.sizes.size() > 32) many_sizes.resize(call.sizes.size()), sizes = many_sizes.data();
    for (size_t i = 0; i < call.buffers.size(); i++) {
        buffers[i] = pointers[call.buffers[i]];
        if (buffers[i] == nullptr) fail(call.name + " reads a tensor without memory");
    }
    for (size_t i = 0; i < call.sizes.size(); i++) sizes[i] = values[call.sizes[i]];
#ifdef _OPENMP
    int64_t portions = call.grain > 0 ? extent / call.grain : 1;
    int threads = int(portions < omp_get_max_threads() ? portions : omp_get_max_threads());
    if (threads > 1 && !omp_in_parallel()) {
        int64_t chunk = (extent + threads - 1) / threads, failed = 0;
#pragma omp parallel num_threads(threads) reduction(| : failed)
        for (int64_t i = omp_get_thread_num(); i * chunk < extent; i += omp_get_num_threads()) {
            int64_t own = 0, end = (i + 1) * chunk < extent ? (i + 1) * chunk : extent;
            call.function(buffers, sizes, i * chunk, end, &own);
            failed |= own;
        }
        status = failed;
    } else
#endif
        call.function(buffers, sizes, 0, extent, &status);
    if (status != 0) fail("index out of range in " + call.name, FW_RUN);
}

// The result row by row: the tensor's own memory where it lies so and no other result needs it.
void CallPlan::give(const Output &output, const int64_t *values, Memory *memory, fw_tensor *result) const {
    fw_tensor made{nullptr, output.dtype, int32_t(output.ndim), {}};
    int64_t step = 1, count = 1;
    bool dense = true;
    for (size_t i = output.ndim; i-- > 0;) {
        made.sizes[i] = values[output.sizes + i];
        dense = dense && (made.sizes[i] == 1 || values[output.strides + i] == step);
        step *= made.sizes[i];
    }
    count = step;
    size_t uses = 0;
    for (const Output &other : outputs_) uses += other.slot == output.slot;
    if (dense && uses == 1 && !output.view) {
        made.data = memory->owned[output.slot].release();
        if (made.data == nullptr) fail("a result without memory");
        *result = made;
        return;
    }
    int64_t size = kDTypes[output.dtype].size, start = output.view ? values[output.offset] : 0, reach = start + 1;
    for (size_t i = 0; i < output.ndim; i++) reach += (made.sizes[i] - 1) * values[output.strides + i];
    const char *source = static_cast<const char *>(memory->owned[output.slot].get());
    if (count > 0 && (source == nullptr || start < 0 || reach * size > bytes_of(values, slots_[output.slot]))) fail("a result lies outside of its memory");
    Owned copy = allocate(count * size);
    char *target = static_cast<char *>(copy.get());
    std::vector<int64_t> at(output.ndim);
    for (int64_t n = 0; n < count; n++, target += size) {
        int64_t place = start;
        for (size_t i = 0; i < output.ndim; i++) place += at[i] * values[output.strides + i];
        std::memcpy(target, source + place * size, size);
        for (size_t i = output.ndim; i-- > 0 && ++at[i] == made.sizes[i];) at[i] = 0;
    }
    made.data = copy.release();
    *result = made;
}

}  // namespace fw
