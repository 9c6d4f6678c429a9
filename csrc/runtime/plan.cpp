#include "plan.h"

#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace fw {

namespace {

constexpr size_t kAlignment = 64, kKernelAlignment = 16;  // kKernelAlignment: of what kernels on a GPU take

Owned allocate(int64_t bytes, const Gpu *gpu = nullptr, void *stream = nullptr) {
    if (gpu != nullptr && bytes <= kMost) return Owned(gpu->allocate(bytes, stream), Free{gpu, stream});
    void *memory = nullptr;
    if (bytes < 0 || bytes > kMost ||
        posix_memalign(&memory, kAlignment, bytes < 1 ? 1 : static_cast<size_t>(bytes)) != 0)
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
    std::vector<int64_t> values;
    std::vector<void *> pointers;
    std::vector<Owned> owned;
    std::vector<Handle> handles;
    std::vector<uint8_t> own_handle;
    std::vector<Owned> more;      // of the GPU: temporary memory, and aligned copies of arguments
    void *stream = nullptr;       // of the GPU
    bool follows = false;         // what was put on the stream last is a kernel of this call
    ~Memory() {
        for (size_t slot = 0; slot < handles.size(); slot++) drop(slot);
    }
    void drop(size_t slot) {
        if (own_handle[slot] && handles[slot] != nullptr) torch().delete_handle(handles[slot]);
        handles[slot] = nullptr;
        own_handle[slot] = 0;
    }
    void hold(size_t slot, Handle handle) {
        drop(slot);
        handles[slot] = handle;
        own_handle[slot] = 1;
    }
};

void CallPlan::compute(std::vector<int64_t> *values, const fw_tensor *leaves) const {
    for (const Symbol &symbol : symbols_) {
        const PlanInput &input = inputs_[symbol.input];
        if (input.kind == PlanInput::Number) {
            (*values)[symbol.value] = input.number;
            continue;
        }
        size_t dim = symbol.dim < 0 ? input.dim : symbol.dim;
        if (int32_t(dim) >= leaves[input.leaf].ndim) fail("an argument has too few dimensions", FW_INPUT);
        (*values)[symbol.value] = leaves[input.leaf].sizes[dim];
    }
    for (const Instruction &one : instructions_)
        if (!calculate(one.op, (*values)[one.left], (*values)[one.right], &(*values)[one.target]))
            fail("a size is too large, or divided by zero", FW_INPUT);
}

// Fills in what a call begins with: values, memory and handles.
const int64_t *CallPlan::start(const fw_tensor *leaves, Memory *memory) const {
    if (!symbols_.empty()) {
        memory->values = values_;
        compute(&memory->values, leaves);
    }
    const int64_t *values = symbols_.empty() ? values_.data() : memory->values.data();
    int64_t need = values[arena_];
    char *temporary = nullptr;
    if (arena_gpu_ != nullptr && need > 0) {
        memory->more.push_back(allocate(need, arena_gpu_, memory->stream));
        temporary = static_cast<char *>(memory->more.back().get());
    } else if (arena_gpu_ == nullptr && need > arena.size) {
        arena.size = 0;
        arena.memory.reset();
        arena.memory = allocate(need);
        arena.size = need;
    }
    if (arena_gpu_ == nullptr) temporary = static_cast<char *>(arena.memory.get());
    memory->pointers.resize(slots_.size());
    memory->owned.resize(slots_.size());
    memory->own_handle.resize(slots_.size());
    memory->handles = handles_;
    memory->handles.resize(slots_.size());
    const std::vector<Kept> *prepared = library_.preparation == nullptr ? nullptr : &library_.preparation->get();
    for (size_t i = 0; i < slots_.size(); i++) {
        const Slot &slot = slots_[i];
        if (slot.kind == kArena) {
            int64_t offset = values[slot.offset], bytes = bytes_of(values, slot);
            if (offset < 0 || offset > need || bytes > need - offset)
                fail("temporary memory lies outside of its block");
            memory->pointers[i] = temporary + offset;
        } else if (slot.kind == kConstant) {
            memory->pointers[i] = slot.gpu == nullptr ? const_cast<int64_t *>(constants_[slot.where].data())
                                                      : on_gpu_[slot.where].get();
        } else if (slot.kind == kInput) {
            const PlanInput &input = inputs_[slot.where];
            if (input.kind == PlanInput::Prepared) {
                memory->handles[i] = (*prepared)[input.leaf].handle();
                if (slot.needs_pointer) check_result(i, values, memory);
                continue;
            }
            if (input.kind == PlanInput::Weight) memory->pointers[i] = const_cast<void *>(input.data);
            else give_leaf(i, leaves[input.leaf], values, memory);
        }
    }
    return values;
}

// An argument's memory, on the GPU where the plan reads it there.
void CallPlan::give_leaf(size_t number, const fw_tensor &leaf, const int64_t *values, Memory *memory) const {
    const Slot &slot = slots_[number];
    int64_t given = kDTypes[slot.dtype].size;
    for (int32_t k = 0; k < leaf.ndim; k++) given *= leaf.sizes[k];
    if (slot.dtype != leaf.dtype || bytes_of(values, slot) > given)
        fail("an argument is smaller than the plan says", FW_INPUT);
    if (slot.gpu == nullptr && leaf.device != FW_CPU) fail("an argument must lie on the CPU", FW_INPUT);
    memory->pointers[number] = leaf.data;
    bool odd = reinterpret_cast<uintptr_t>(leaf.data) % kKernelAlignment != 0;
    if (slot.gpu != nullptr && given > 0 && (leaf.device == FW_CPU || odd)) {
        memory->more.push_back(allocate(given, slot.gpu, memory->stream));
        void *copy = memory->pointers[number] = memory->more.back().get();
        if (leaf.device == FW_CPU) slot.gpu->upload(copy, leaf.data, given, memory->stream);
        else slot.gpu->copy(copy, leaf.data, given, memory->stream);
    }
    if (slot.needs_handle) memory->hold(number, around(slot, memory->pointers[number], values));
}

void CallPlan::perform(const int64_t *values, Memory *memory) const {
    for (size_t i = 0; i < steps_.size(); i++) {
        const Step &step = steps_[i];
        size_t n = step.number;
        switch (step.kind) {
            case Step::Kernels:
                for (size_t k = 0; k < step.count; k++) perform(calls_[n + k], memory->pointers.data(), values);
                break;
            case Step::Launched: launch(launches_[n], values, memory); break;
            case Step::Allocate: {
                const Slot &slot = slots_[n];
                memory->drop(n);
                memory->owned[n] = allocate(bytes_of(values, slot), slot.gpu, memory->stream);
                memory->pointers[n] = memory->owned[n].get();
                if (slot.needs_handle) memory->hold(n, around(slot, memory->pointers[n], values));
                break;
            }
            case Step::Window: {
                const Slot &slot = slots_[n], &base = slots_[slot.where];
                int64_t start = values[slot.offset] * kDTypes[slot.dtype].size;
                char *memory_of = static_cast<char *>(memory->pointers[slot.where]);
                if (memory_of == nullptr || start < 0 || start + bytes_of(values, slot) > bytes_of(values, base))
                    fail("a window lies outside of its memory");
                memory->pointers[n] = memory_of + start;
                memory->hold(n, around(slot, memory->pointers[n], values));
                break;
            }
            case Step::Release:
                memory->drop(n);
                memory->owned[n].reset();
                if (slots_[n].kind == kFresh || slots_[n].kind == kReturned) memory->pointers[n] = nullptr;
                break;
            case Step::Check: check_result(n, values, memory); break;
            case Step::Gather:
                for (size_t k = 0; k < gathers_[n].sources.size(); k++)
                    memory->handles[gathers_[n].first + k] = memory->handles[gathers_[n].sources[k]];
                break;
            case Step::Extern: {
                const ExternStep &call = externs_[n];
                memory->follows = false;
                for (int32_t slot : call.results) memory->drop(slot);
                int32_t status = call_library(call, memory->handles.data(), values);
                for (int32_t slot : call.results) memory->own_handle[slot] = status == 0;
                torch().check(status, call.name);
                break;
            }
            case Step::Operator: {
                const OperatorStep &call = operators_[n];
                memory->follows = false;
                for (int64_t slot : call.results)
                    if (slot >= 0) memory->drop(slot);
                call_operator(call, memory->handles.data(), values);
                for (int64_t slot : call.results)
                    if (slot >= 0) memory->own_handle[slot] = 1;
                break;
            }
            case Step::Skip:
                if (values[n] == 0) i += step.count;
                break;
        }
    }
}

void CallPlan::run(const fw_tensor *leaves, fw_tensor *results, void *stream) const {
    OnGpu current(library_.gpu);
    OperatorScope scope(calls_library_, library_.gpu, stream);
    Memory memory;
    memory.stream = stream;
    const int64_t *values = start(leaves, &memory);
    perform(values, &memory);
    size_t done = 0;
    try {
        for (; done < outputs_.size(); done++) give(outputs_[done], values, &memory, &results[done]);
    } catch (...) {
        while (done > 0) fw_free(&results[--done]);
        throw;
    }
}

std::vector<Kept> CallPlan::run_kept() const {
    void *stream = library_.gpu == nullptr ? nullptr : library_.gpu->thread_stream();
    OperatorScope scope(true, library_.gpu, stream);
    Memory memory;
    memory.stream = stream;
    const int64_t *values = start(nullptr, &memory);
    perform(values, &memory);
    std::map<size_t, std::shared_ptr<void>> shared;
    std::vector<Kept> made;
    for (const Output &output : outputs_) {
        char *data = static_cast<char *>(memory.pointers[output.slot]);
        const Slot &slot = slots_[output.slot];
        int64_t reach = 1, offset = output.view ? values[output.offset] : 0;
        for (size_t i = 0; i < output.ndim; i++) reach += (values[output.sizes + i] - 1) * values[output.strides + i];
        if (data == nullptr || offset < 0 || (offset + reach) * kDTypes[slot.dtype].size > bytes_of(values, slot))
            fail("a prepared value lies outside of its memory");
        Slot view = slot;
        view.ndim = output.ndim, view.sizes = output.sizes, view.strides = output.strides;
        made.emplace_back(around(view, data + offset * kDTypes[slot.dtype].size, values));
        std::shared_ptr<void> &memory_of = shared[output.slot];
        if (memory_of == nullptr && memory.owned[output.slot] != nullptr)
            memory_of = std::move(memory.owned[output.slot]);
        if (memory_of == nullptr && memory.own_handle[output.slot]) {
            memory_of = std::make_shared<Kept>(memory.handles[output.slot]);
            memory.own_handle[output.slot] = 0;
        }
        made.back().memory = memory_of;
    }
    return made;
}

// What an operator returned must be what the plan assumed: another shape or dtype is an error, other strides are copied
// away.
void CallPlan::check_result(size_t number, const int64_t *values, Memory *memory) const {
    const Torch &t = torch();
    const Slot &slot = slots_[number];
    Handle handle = memory->handles[number];
    int64_t ndim = -1, *sizes = nullptr, *strides = nullptr;
    int32_t dtype = -1;
    bool good = handle != nullptr && t.is_strided(handle) && t.dim(handle, &ndim) == 0 &&
                t.dtype(handle, &dtype) == 0 && dtype == t.dtypes[slot.dtype] && ndim == int64_t(slot.ndim) &&
                t.sizes(handle, &sizes) == 0 && t.strides(handle, &strides) == 0;
    bool empty = false, same = true;
    for (int64_t i = 0; good && i < ndim; i++) {
        good = sizes[i] == values[slot.sizes + i];
        empty |= sizes[i] == 0;
        same &= sizes[i] <= 1 || strides[i] == values[slot.strides + i];
    }
    if (!good) fail("an operator returned another tensor than the plan says", FW_RUN);
    if (!same && !empty) {
        Handle copy = nullptr;
        int32_t device = slot.gpu == nullptr ? t.cpu : torch_cuda().device;
        int32_t index = slot.gpu == nullptr ? 0 : slot.gpu->index();
        t.check(t.empty_strided(ndim, values + slot.sizes, values + slot.strides, t.dtypes[slot.dtype], device, index,
                                &copy),
                "allocating a tensor");
        int32_t status = t.copy(copy, handle, 0);
        memory->hold(number, copy);
        t.check(status, "copying a tensor");
    }
    if (slot.needs_pointer)
        t.check(t.data_ptr(memory->handles[number], &memory->pointers[number]), "the data of a tensor");
}

const std::vector<Kept> &Preparation::get() const {
    std::lock_guard<std::mutex> guard(mutex_);
    if (made_ != nullptr) return *made_;
    std::vector<Kept> values = plan_->run_kept();
    if (values.size() != values_) fail("the preparation gives other values");
    void *stream = plan_->gpu() == nullptr ? nullptr : plan_->gpu()->thread_stream();
    OperatorScope scope(true, plan_->gpu(), stream);
    std::vector<Handle> handles;
    for (const Kept &value : values) handles.push_back(value.handle());
    handles.push_back(nullptr);  // of a result
    auto made = std::make_unique<std::vector<Kept>>();
    for (const Result &result : results_) {
        if (result.step != nullptr) {
            call_operator(*result.step, handles.data(), nullptr);
            made->emplace_back(handles.back());
        } else {
            Handle again = nullptr;
            torch().check(torch().new_handle(handles[result.value], &again), "a tensor's handle");
            made->emplace_back(again);
            made->back().memory = values[result.value].memory;
        }
    }
    if (plan_->gpu() != nullptr) plan_->gpu()->wait(stream);  // other streams read them
    made_ = std::move(made);
    return *made_;
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

void CallPlan::launch(const Launch &call, const int64_t *values, Memory *memory) const {
    int64_t grid = values[call.grid];
    if (grid <= 0) return;
    size_t n = call.buffers.size() - call.scratch, all = n + call.sizes.size();
    std::vector<void *> pointers(n + 2), parameters(all + 2);
    for (size_t i = 0; i < n; i++) {
        pointers[i] = memory->pointers[call.buffers[i]];
        if (pointers[i] == nullptr) fail(call.name + " reads a tensor without memory");
        if (!call.by_value[i] && reinterpret_cast<uintptr_t>(pointers[i]) % kKernelAlignment != 0)
            fail(call.name + ": memory that does not start at a multiple of 16 bytes", FW_RUN);
        parameters[i] = call.by_value[i] ? pointers[i] : &pointers[i];
    }
    for (size_t i = 0; i < call.sizes.size(); i++) parameters[n + i] = const_cast<int64_t *>(values + call.sizes[i]);
    // Triton's own memory: descriptions of tensors for the copy engine, and what profiling writes.
    pointers[n] = call.scratch ? memory->pointers[call.buffers[n]] : nullptr;
    pointers[n + 1] = nullptr;
    parameters[all] = &pointers[n];
    parameters[all + 1] = &pointers[n + 1];
    std::string error;
    const DeviceFunction &code = call.function;
    DeviceLaunch shape{code.function, grid,           library_.gpu->index(),        code.threads,
                       code.shared,   memory->stream, call.waits && memory->follows};
    cuda::Result result = cuda_launch(shape, parameters.data(), &error);
    if (result != 0) fail(call.name + ": " + error, result == cuda::kNoMemory ? FW_MEMORY : FW_RUN);
    memory->follows = true;
}

// A handle of memory that it does not own.
Handle CallPlan::around(const Slot &slot, void *data, const int64_t *values) const {
    const Torch &t = torch();
    Handle made = nullptr;
    int32_t device = slot.gpu == nullptr ? t.cpu : torch_cuda().device;
    t.check(t.from_blob(data, int64_t(slot.ndim), values + slot.sizes, values + slot.strides, 0, t.dtypes[slot.dtype],
                        device, slot.gpu == nullptr ? 0 : slot.gpu->index(), &made),
            "a tensor around memory");
    return made;
}

// The result row by row: the tensor's own memory where it lies so and no other result needs it.
void CallPlan::give(const Output &output, const int64_t *values, Memory *memory, fw_tensor *result) const {
    const Gpu *gpu = slots_[output.slot].gpu;
    fw_tensor made{nullptr, output.dtype, int32_t(output.ndim), {}, FW_CPU, 0};
    if (gpu != nullptr) made.device = FW_CUDA, made.device_index = gpu->index();
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
    bool whole = !output.view || (values[output.offset] == 0 &&
                                  count * kDTypes[output.dtype].size == bytes_of(values, slots_[output.slot]));
    if (dense && uses == 1 && whole && memory->owned[output.slot] != nullptr) {
        made.data = memory->owned[output.slot].release();
        *result = made;
        return;
    }
    int64_t size = kDTypes[output.dtype].size, start = output.view ? values[output.offset] : 0, reach = start + 1;
    for (size_t i = 0; i < output.ndim; i++) reach += (made.sizes[i] - 1) * values[output.strides + i];
    const char *source = static_cast<const char *>(memory->pointers[output.slot]);
    if (count > 0 && (source == nullptr || start < 0 || reach * size > bytes_of(values, slots_[output.slot])))
        fail("a result lies outside of its memory");
    Owned copy = allocate(count * size, gpu, memory->stream);
    if (gpu != nullptr) {
        gpu->pack(copy.get(), source + start * size, size, made.ndim, made.sizes, values + output.strides,
                  memory->stream);
        made.data = copy.release();
        *result = made;
        return;
    }
    char *target = static_cast<char *>(copy.get());
    std::vector<int64_t> at(output.ndim);
    if (dense && count > 0) std::memcpy(target, source + start * size, count * size);
    for (int64_t n = dense ? count : 0; n < count; n++, target += size) {
        int64_t place = start;
        for (size_t i = 0; i < output.ndim; i++) place += at[i] * values[output.strides + i];
        std::memcpy(target, source + place * size, size);
        for (size_t i = output.ndim; i-- > 0 && ++at[i] == made.sizes[i];) at[i] = 0;
    }
    made.data = copy.release();
    *result = made;
}

}  // namespace fw
