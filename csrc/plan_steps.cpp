// Performs the steps of a call plan and makes its outputs.
// Takes a Program and a Frame whose inputs, values and memory are in place; gives Python objects or an exception.
// Always holds: before the first change of an input every failure is a RuntimeFallback (the call can be repeated
// eagerly); after it, the error itself. The GIL is dropped around work worth it and held whenever Python objects are
// touched.
#include <sys/mman.h>

#include <chrono>
#include <cstring>

#include "cuda.h"
#include "interruptions.h"
#include "plan.h"

namespace fw {

namespace {

struct KernelCall {
    KernelFunction function;
    void *const *buffers;
    const int64_t *sizes;
    int64_t status;
};

void run_chunk(int64_t begin, int64_t end, void *context) {
    KernelCall *call = static_cast<KernelCall *>(context);
    int64_t status = 0;
    call->function(call->buffers, call->sizes, begin, end, &status);
    if (status != 0) __atomic_store_n(&call->status, status, __ATOMIC_RELAXED);
}

constexpr int64_t kPortions = 16;  // portions of a group's work that are worth a thread

struct Row {
    KernelFunction function;
    void *const *buffers;
    const int64_t *sizes;
    int64_t extent, portion, first;  // iterations; iterations of one portion; number of the kernel's first portion
};

struct GroupCall {
    const Row *rows;
    size_t count;
    int64_t failed;  // the number of a kernel that met an index out of range, or -1
    int64_t status;  // what it said
};

void run_portions(int64_t begin, int64_t end, void *context) {
    GroupCall *call = static_cast<GroupCall *>(context);
    size_t low = 0, high = call->count;  // the last kernel whose first portion is not after `begin`
    while (low + 1 < high) {
        size_t middle = (low + high) / 2;
        if (call->rows[middle].first <= begin) low = middle;
        else high = middle;
    }
    for (size_t i = low; i < call->count && call->rows[i].first < end; i++) {
        const Row &row = call->rows[i];
        int64_t from = (begin > row.first ? begin - row.first : 0) * row.portion, to = (end - row.first) * row.portion,
                status = 0;
        if (to > row.extent) to = row.extent;
        if (from >= to) continue;
        row.function(row.buffers, row.sizes, from, to, &status);
        if (status == 0) continue;
        __atomic_store_n(&call->status, status, __ATOMIC_RELAXED);
        __atomic_store_n(&call->failed, static_cast<int64_t>(i), __ATOMIC_RELAXED);
    }
}

}  // namespace

bool Runner::run() {
    if (!p.written_inputs.empty() && !check_alignment()) return false;
    for (size_t i = 0; i < p.steps.size(); i++) {
        if (!(nanoseconds != nullptr ? timed(p.steps[i]) : labels != nullptr ? named(i) : step(p.steps[i]))) {
            hold_gil();
            if (!outside_.empty()) raise_outside(i);
            return false;
        }
        if (p.steps[i].kind != StepKind::Skip) continue;
        const SkipStep &skip = p.skips[p.steps[i].operand];
        if (v[skip.value] != 0) continue;
        i += skip.count;
        if (nanoseconds != nullptr) nanoseconds->insert(nanoseconds->end(), skip.count, -1);
    }
    hold_gil();
    return true;
}

bool Runner::timed(Step one) {
    using Clock = std::chrono::steady_clock;
    Clock::time_point started = Clock::now();
    bool done = step(one);
    nanoseconds->push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started).count());
    return done;
}

bool Runner::named(size_t number) {
    Range range(number < labels->size() ? (*labels)[number].c_str() : "");
    return step(p.steps[number]);
}

bool Runner::step(Step one) {
    switch (one.kind) {
        case StepKind::Kernel: return kernel(p.kernels[one.operand]);
        case StepKind::Group: return group(p.groups[one.operand]);
        case StepKind::Launch: return launch(p.launches[one.operand]);
        case StepKind::Extern: follows_ = false; return external(p.externs[one.operand]);
        case StepKind::Python: follows_ = false; return python(p.pythons[one.operand]);
        case StepKind::Allocate: return allocate(one.operand);
        case StepKind::Window: return window(one.operand);
        case StepKind::Release: release(one.operand); return true;
        case StepKind::Check: return check(one.operand);
        case StepKind::Own: return check(one.operand, true);
        case StepKind::Mutate: return mutate(one.operand);
        case StepKind::Change: mutated_ = true; return true;
        case StepKind::Skip: return true;  // `run` steps over what follows
        case StepKind::Gather: {
            const GatherStep &gather = p.gathers[one.operand];
            for (size_t i = 0; i < gather.sources.size(); i++)
                f.handles[gather.first + i] = f.handles[gather.sources[i]];
            return true;
        }
    }
    return fail("an unknown step", PyExc_SystemError);
}

bool Runner::fail(const std::string &message, PyObject *error_when_mutated) {
    hold_gil();
    if (PyErr_Occurred()) return fail_with_current_exception(message);
    if (mutated_)
        raise_by_text(message, error_when_mutated);
    else
        raise_fallback(message);
    return false;
}

// The exception that is set becomes the cause of a RuntimeFallback, unless it must reach the user as it is.
bool Runner::fail_with_current_exception(const std::string &name) {
    if (mutated_ || is_programs()) return false;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *text = value == nullptr ? nullptr : PyObject_Str(value);
    const char *characters = text == nullptr ? nullptr : PyUnicode_AsUTF8(text);
    PyErr_Clear();
    raise_fallback(name + ": " + (characters == nullptr ? "an error without text" : characters));
    Py_XDECREF(text);
    PyObject *type2, *fallback, *traceback2;
    PyErr_Fetch(&type2, &fallback, &traceback2);
    PyErr_NormalizeException(&type2, &fallback, &traceback2);
    if (fallback != nullptr && value != nullptr) {
        Py_INCREF(value);
        PyException_SetCause(fallback, value);
    }
    PyErr_Restore(type2, fallback, traceback2);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    return false;
}

// --- kernels and memory
// ------------------------------------------------------------------------------------------------------

bool Runner::kernel(const KernelStep &step) {
    int64_t extent = v[step.extent];
    if (extent <= 0) return true;
    constexpr size_t kInline = 32;
    void *few_buffers[kInline];
    int64_t few_sizes[kInline];
    std::vector<void *> many_buffers;
    std::vector<int64_t> many_sizes;
    void **buffers = few_buffers;
    int64_t *sizes = few_sizes;
    if (step.buffers.size() > kInline) {
        many_buffers.resize(step.buffers.size());
        buffers = many_buffers.data();
    }
    if (step.sizes.size() > kInline) {
        many_sizes.resize(step.sizes.size());
        sizes = many_sizes.data();
    }
    for (size_t i = 0; i < step.buffers.size(); i++) buffers[i] = f.pointers[step.buffers[i]];
    for (size_t i = 0; i < step.sizes.size(); i++) sizes[i] = v[step.sizes[i]];
    KernelCall call{step.function, buffers, sizes, 0};
    // One grain is work worth a thread: less than that is not worth dropping the GIL either, less than two not a
    // parallel region.
    if (extent >= step.grain) drop_gil();
    if (step.grain > 0 && extent / 2 >= step.grain) {
        if (torch.parallel_for(0, extent, step.grain, run_chunk, &call) != 0)
            return fail(torch_error(step.name.c_str()), PyExc_RuntimeError);
    } else {
        run_chunk(0, extent, &call);
    }
    return call.status == 0 || kernel_failed(step, call.status, sizes);
}

// Status 1: an index of the user's was out of range. Another one is of a kernel with checks (codegen/llvm/checked.py):
// bit 1 says that it was a store, bit 2 that the user is to hear of it; then the number of the buffer + 1, 13 bits, and
// the element. The elements of the buffers are the last of its sizes.
bool Runner::kernel_failed(const KernelStep &step, int64_t status, const int64_t *sizes) {
    if (status == 1) return fail("index out of range in " + step.name, PyExc_IndexError);
    size_t buffer = static_cast<size_t>((status >> 3 & 0x1fff) - 1);
    std::string room = "memory of its own";
    if (buffer < step.buffers.size())
        room = "buffer " + std::to_string(buffer) + " of " +
               std::to_string(sizes[step.sizes.size() - step.buffers.size() + buffer]) + " elements";
    std::string message = step.name + " would " + (status & 2 ? "write" : "read") + " element " +
                          std::to_string(status >> 16) + " of " + room;
    if ((status & 4) == 0) return fail(message, PyExc_SystemError);
    outside_ = message;
    return false;
}

void Runner::raise_outside(size_t number) {
    ask_for_labels(p);
    const std::vector<std::string> &labels = *p.step_labels;
    std::string message = outside_ + (number < labels.size() ? ": " + labels[number] : "");
    PyObject *module = PyErr_Occurred() ? nullptr : PyImport_ImportModule("fusewright.base.errors");
    PyObject *error = module == nullptr ? nullptr : PyObject_GetAttrString(module, "OutOfBoundsError");
    if (error != nullptr) PyErr_SetString(error, message.c_str());
    Py_XDECREF(error);
    Py_XDECREF(module);
}

// The kernels' iterations laid end to end, in portions of about equal work: a thread takes a run of portions, wherever
// they belong.
bool Runner::group(const GroupStep &step) {
    std::vector<void *> buffers(step.buffers);
    std::vector<int64_t> sizes(step.sizes);
    std::vector<Row> rows(step.kernels.size());
    size_t next_buffer = 0, next_size = 0;
    int64_t portions = 0;
    for (size_t i = 0; i < rows.size(); i++) {
        const KernelStep &kernel = step.kernels[i];
        int64_t portion = kernel.grain > kPortions ? kernel.grain / kPortions : 1, extent = v[kernel.extent];
        rows[i] = {kernel.function, buffers.data() + next_buffer, sizes.data() + next_size, extent, portion, portions};
        for (int32_t slot : kernel.buffers) buffers[next_buffer++] = f.pointers[slot];
        for (int32_t value : kernel.sizes) sizes[next_size++] = v[value];
        portions += extent > 0 ? (extent + portion - 1) / portion : 0;
    }
    GroupCall call{rows.data(), rows.size(), -1, 0};
    if (portions >= kPortions) drop_gil();
    if (portions >= 2 * kPortions) {
        if (torch.parallel_for(0, portions, kPortions, run_portions, &call) != 0)
            return fail(torch_error("a group of kernels"), PyExc_RuntimeError);
    } else {
        run_portions(0, portions, &call);
    }
    return call.failed < 0 || kernel_failed(step.kernels[call.failed], call.status, rows[call.failed].sizes);
}

// --- kernels on a GPU
// --------------------------------------------------------------------------------------------------------

namespace {
constexpr uintptr_t kPointerMask = 15;  // generated kernels take pointers that are multiples of 16

bool misaligned(const void *pointer) { return (reinterpret_cast<uintptr_t>(pointer) & kPointerMask) != 0; }
}  // namespace

Runner::~Runner() {
    hold_gil();
    for (Handle copy : copies_) torch.delete_handle(copy);
    if (guard_ != nullptr) torch.delete_cuda_guard(guard_);
}

// Makes the device current until the call ends, and finds PyTorch's current stream on it.
bool Runner::enter_device(int32_t device) {
    bool ok = guard_ == nullptr ? torch.cuda_guard(device, &guard_) == 0 : torch.cuda_guard_set(guard_, device) == 0;
    if (!ok || torch.cuda_stream(device, &stream_) != 0)
        return fail(torch_error("the current stream"), PyExc_RuntimeError);
    device_ = device;
    follows_ = false;
    return true;
}

// An input that a kernel writes cannot be replaced by an aligned copy: then the call runs eagerly, from its start.
bool Runner::check_alignment() {
    for (int32_t slot : p.written_inputs)
        if (misaligned(f.pointers[slot]))
            return fail("an input that is written to does not start at a multiple of 16 bytes", PyExc_RuntimeError);
    return true;
}

// Memory with the content of an input that starts at an odd place (a view of some larger tensor).
bool Runner::aligned_copy(int32_t slot, void **pointer) {
    const Slot &s = p.slots[slot];
    int64_t span = 1, one = 1;
    for (int32_t i = 0; i < s.ndim; i++) span += (v[s.sizes + i] - 1) * v[s.strides + i];
    make_room(copies_);
    Handle flat = nullptr, copy = nullptr;
    follows_ = false;
    bool ok = (s.kind == SlotKind::Input || s.kind == SlotKind::Constant) &&
              torch.reinterpret(f.handles[slot], 1, &span, &one, 0, &flat) == 0 &&
              torch.empty_strided(1, &span, &one, s.dtype, s.device, s.device_index, &copy) == 0;
    if (copy != nullptr) copies_.push_back(copy);
    ok = ok && torch.copy(copy, flat, 1) == 0 && torch.data_ptr(copy, pointer) == 0;
    if (flat != nullptr) torch.delete_handle(flat);
    return ok ? true : fail(allocation_error("an aligned copy of an input", s.device), PyExc_RuntimeError);
}

bool Runner::launch(const LaunchStep &step) {
    int64_t grid = v[step.grid];
    if (grid <= 0) return true;
    if (step.device != device_ && !enter_device(step.device)) return false;
    constexpr size_t kMost = 512;  // code generation keeps to MOST_PARAMETERS
    void *pointers[kMost], *parameters[kMost + 2];
    size_t n = step.buffers.size() - step.scratch, all = n + step.sizes.size();
    if (all > kMost) return fail(step.name + " has too many parameters", PyExc_RuntimeError);
    for (size_t i = 0; i < n; i++) {
        int32_t slot = step.buffers[i];
        void *memory = f.pointers[slot];
        if (step.by_value[i]) {
            parameters[i] = memory;
            continue;
        }
        if (misaligned(memory) && !aligned_copy(slot, &memory)) return false;
        pointers[i] = memory;
        parameters[i] = &pointers[i];
    }
    for (size_t i = 0; i < step.sizes.size(); i++) parameters[n + i] = const_cast<int64_t *>(v + step.sizes[i]);
    void *scratch = step.scratch ? f.pointers[step.buffers[n]] : nullptr, *nothing = nullptr;
    parameters[all] =
        &scratch;  // Triton's own memory: descriptions of tensors for the copy engine, and what profiling writes
    parameters[all + 1] = &nothing;
    std::string error;
    DeviceLaunch shape{step.function, grid, step.device, step.threads, step.shared, stream_, step.waits && follows_};
    cuda::Result result = cuda_launch(shape, parameters, &error);
    if (result == cuda::kNoMemory) {  // of the kernel's code or its threads' own: PyTorch may keep what is free
        hold_gil();
        if (give_memory_back(stream_)) result = cuda_launch(shape, parameters, &error);
    }
    if (result != 0) return fail(step.name + ": " + error, PyExc_RuntimeError);
    follows_ = true;
    return true;
}

bool Runner::pointer(int32_t slot) {
    if (!p.slots[slot].needs_pointer) return true;
    if (torch.data_ptr(f.handles[slot], &f.pointers[slot]) == 0) return true;
    return fail(torch_error("the data of a tensor"), PyExc_RuntimeError);
}

void Runner::store(int32_t slot, Handle handle, bool owned, PyObject *object) {
    release(slot);
    f.handles[slot] = handle;
    f.owned[slot] = owned;
    f.objects[slot] = object;
}

void Runner::release(int32_t slot) {
    if (f.objects[slot] != nullptr) {
        hold_gil();
        Py_CLEAR(f.objects[slot]);
    }
    if (f.owned[slot]) torch.delete_handle(f.handles[slot]);
    f.handles[slot] = nullptr;
    f.owned[slot] = 0;
}

namespace {
// The C library maps so large an allocation afresh every time: each of its pages costs a fault at the first write, so
// few large pages.
constexpr int64_t kLargeAllocation = int64_t(32) << 20;
constexpr uintptr_t kHugePage = uintptr_t(2) << 20;

void ask_for_huge_pages(void *memory, int64_t size) {
#ifdef MADV_HUGEPAGE
    uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) & ~(kHugePage - 1);
    uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(size)) & ~(kHugePage - 1);
    if (last > first) madvise(reinterpret_cast<void *>(first), last - first, MADV_HUGEPAGE);
#else
    (void)memory, (void)size;
#endif
}
}  // namespace

bool Runner::allocate(int32_t slot) {
    const Slot &s = p.slots[slot];
    Handle handle = nullptr;
    if (torch.empty_strided(s.ndim, v + s.sizes, v + s.strides, s.dtype, s.device, s.device_index, &handle) != 0)
        return fail(allocation_error("allocating a tensor", s.device), PyExc_RuntimeError);
    store(slot, handle, true, nullptr);
    int64_t size = s.itemsize;
    for (int32_t i = 0; i < s.ndim; i++) size *= v[s.sizes + i];
    void *memory = nullptr;
    if (size >= kLargeAllocation && s.device == config.cpu && torch.data_ptr(handle, &memory) == 0)
        ask_for_huge_pages(memory, size);
    return pointer(slot);
}

bool Runner::window(int32_t slot) {
    const Slot &s = p.slots[slot];
    void *memory = static_cast<char *>(f.pointers[s.where]) + v[s.offset] * s.itemsize;
    f.pointers[slot] = memory;
    if (f.window_of[slot] == memory && f.window_epoch[slot] == f.epoch && f.handles[slot] != nullptr) return true;
    Handle handle = nullptr;
    if (torch.from_blob(memory, s.ndim, v + s.sizes, v + s.strides, 0, s.dtype, s.device, s.device_index, &handle) != 0)
        return fail(torch_error("a window on a buffer"), PyExc_RuntimeError);
    store(slot, handle, true, nullptr);
    f.window_of[slot] = memory;
    f.window_epoch[slot] = f.epoch;
    return true;
}

bool Runner::mutate(int32_t slot) {
    hold_gil();
    PyObject *tensor = object(slot);
    bool counted = tensor != nullptr && bump_version(tensor);
    Py_XDECREF(tensor);
    if (!counted) return fail("an input cannot be changed", PyExc_RuntimeError);
    mutated_ = true;
    return true;
}

// --- library operators through C
// ---------------------------------------------------------------------------------------------

bool Runner::external(const ExternStep &step) {
    for (int32_t slot : step.results) release(slot);
    drop_gil();
    if (call_library(step, f.handles.data(), v) != 0) {
        for (int32_t slot : step.results) f.handles[slot] = nullptr;
        return fail(torch_error(step.name.c_str()), PyExc_RuntimeError);
    }
    for (int32_t slot : step.results) f.owned[slot] = f.handles[slot] != nullptr;
    return true;
}

bool matches(Handle handle, const Slot &slot, const int64_t *v, bool *strides_match) {
    int64_t ndim = -1, *sizes, *strides;
    int32_t dtype = -1, device = -1;
    if (torch.dim(handle, &ndim) != 0 || torch.dtype(handle, &dtype) != 0 || torch.device_type(handle, &device) != 0)
        return false;
    *strides_match = true;
    if (slot.ndim < 0) return dtype == slot.dtype && device == slot.device;  // a shape that the data decide
    // A number that only operators read may lie anywhere: attention keeps its random state where it likes.
    bool anywhere = ndim == 0 && !slot.needs_pointer;
    if (ndim != slot.ndim || dtype != slot.dtype || (device != slot.device && !anywhere)) return false;
    if (!is_plain(handle)) return false;
    if (ndim == 0) return true;
    if (torch.sizes(handle, &sizes) != 0 || torch.strides(handle, &strides) != 0) return false;
    bool empty = false, same = true;
    for (int64_t i = 0; i < ndim; i++) {
        if (sizes[i] != v[slot.sizes + i]) return false;
        empty |= sizes[i] == 0;
        same &= sizes[i] <= 1 || strides[i] == v[slot.strides + i];
    }
    *strides_match = same || empty;
    return true;
}

std::string shape_text(const int64_t *sizes, int64_t ndim, int32_t dtype, int32_t device) {
    std::string text = "(";
    for (int64_t i = 0; i < ndim; i++) text += (i ? ", " : "") + std::to_string(sizes[i]);
    return text + ") of dtype " + std::to_string(dtype) + " on device type " + std::to_string(device);
}

std::string Runner::expected_shape(const Slot &slot) {
    return shape_text(v + slot.sizes, slot.ndim, slot.dtype, slot.device);
}

std::string Runner::found_shape(Handle handle) {
    int64_t ndim = 0, *sizes = nullptr;
    int32_t dtype = -1, device = -1;
    if (handle == nullptr) return "nothing";
    if (torch.dim(handle, &ndim) != 0 || torch.dtype(handle, &dtype) != 0 || torch.device_type(handle, &device) != 0)
        return "no plain tensor";
    if (ndim != 0 && torch.sizes(handle, &sizes) != 0) return "a tensor without sizes";
    return shape_text(sizes, ndim, dtype, device);
}

// What an operator returned must be what the plan assumed: another shape or dtype is an error, other strides are copied
// away. own: it becomes the plan's memory, as if it had been allocated here; a part of a larger storage is copied.
bool Runner::check(int32_t slot, bool own) {
    const Slot &s = p.slots[slot];
    bool strides_match = false;
    if (f.handles[slot] == nullptr || !matches(f.handles[slot], s, v, &strides_match))
        return fail("an operator returned " + found_shape(f.handles[slot]) + ", the graph says " + expected_shape(s),
                    PyExc_RuntimeError);
    int64_t reach = reach_of(s.ndim, v + s.sizes, v + s.strides, s.itemsize), bytes = 0, offset = 0;
    bool whole = !own || (torch.storage_size(f.handles[slot], &bytes) == 0 && bytes == reach &&
                          torch.storage_offset(f.handles[slot], &offset) == 0 && offset == 0);
    if (own && strides_match && whole) {
        // With the strides that the plan says also where a dimension has one element.
        Handle same = nullptr;
        int64_t *strides = nullptr;
        if (torch.strides(f.handles[slot], &strides) != 0) return fail(torch_error("strides"), PyExc_RuntimeError);
        if (std::memcmp(strides, v + s.strides, s.ndim * sizeof(int64_t)) != 0) {
            if (torch.reinterpret(f.handles[slot], s.ndim, v + s.sizes, v + s.strides, 0, &same) != 0)
                return fail(torch_error("the result of an operator"), PyExc_RuntimeError);
            store(slot, same, true, nullptr);
        }
    }
    if (!strides_match || !whole) {
        Handle copy = nullptr;
        if (torch.empty_strided(s.ndim, v + s.sizes, v + s.strides, s.dtype, s.device, s.device_index, &copy) != 0)
            return fail(allocation_error("allocating a tensor", s.device), PyExc_RuntimeError);
        if (torch.copy(copy, f.handles[slot], 0) != 0) {
            torch.delete_handle(copy);
            return fail(torch_error("copying a tensor"), PyExc_RuntimeError);
        }
        store(slot, copy, true, nullptr);
    }
    if (s.needs_pointer && !holds(f.handles[slot], s.itemsize, reach, false))
        return fail("an operator returned a tensor that is larger than its storage", PyExc_RuntimeError);
    return pointer(slot);
}

// --- outputs
// -----------------------------------------------------------------------------------------------------------------

PyObject *Runner::values_tuple(int32_t first, int32_t n) {
    PyObject *tuple = PyTuple_New(n);
    for (int32_t i = 0; tuple != nullptr && i < n; i++) {
        PyObject *value = PyLong_FromLongLong(v[first + i]);
        if (value == nullptr) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, i, value);
    }
    return tuple;
}

// Lets what nobody else can see be the tensor that a result is. Before other results are made, which may be views of it.
bool Runner::show(const OutputSpec &spec) {
    Handle view = nullptr;
    if (spec.kind != OutputKind::PrivateView) return true;
    if (torch.reinterpret(f.handles[spec.slot], spec.ndim, v + spec.sizes, v + spec.strides, v[spec.offset], &view) != 0)
        return fail(torch_error("a view of an output"), PyExc_RuntimeError);
    store(spec.slot, view, true, nullptr);
    return true;
}

PyObject *Runner::output(const OutputSpec &spec) {
    switch (spec.kind) {
        case OutputKind::Value: return Py_NewRef(spec.value);
        case OutputKind::Size: return PyLong_FromLongLong(v[spec.offset]);
        case OutputKind::Buffer:
        case OutputKind::PrivateView: {
            if (f.owned[spec.slot] && f.objects[spec.slot] == nullptr && p.slots[spec.slot].kind != SlotKind::Input &&
                p.slots[spec.slot].kind != SlotKind::Constant) {
                // The common case: the handle is used up, which is cheaper than sharing it.
                f.owned[spec.slot] = 0;
                Handle handle = f.handles[spec.slot];
                f.handles[spec.slot] = nullptr;
                f.objects[spec.slot] = wrap_and_delete(handle);
                return Py_XNewRef(f.objects[spec.slot]);
            }
            return object(spec.slot);
        }
        case OutputKind::View: {
            PyObject *base = object(spec.slot);
            PyObject *sizes = base == nullptr ? nullptr : values_tuple(spec.sizes, spec.ndim);
            PyObject *strides = sizes == nullptr ? nullptr : values_tuple(spec.strides, spec.ndim);
            PyObject *view = nullptr;
            // A view of what has a gradient function would get one. One made without gradients could not be written to
            // with them.
            PyObject *differentiable = strides == nullptr ? nullptr : PyObject_GetAttrString(base, "requires_grad");
            bool grad = torch.grad_enabled(), off = differentiable != Py_False;
            Py_XDECREF(differentiable);
            if (off) torch.set_grad_enabled(false);
            if (differentiable != nullptr)
                view = PyObject_CallFunction(config.alias_view, "OOOLi", base, sizes, strides,
                                             static_cast<long long>(v[spec.offset]), spec.dtype);
            if (off) torch.set_grad_enabled(grad);
            Py_XDECREF(base);
            Py_XDECREF(sizes);
            Py_XDECREF(strides);
            if (view == nullptr) fail_with_current_exception("a view of an output");
            return view;
        }
    }
    return nullptr;
}

void Runner::clean(const Program &program, Frame &frame) {
    for (int32_t slot : program.released) {
        Py_CLEAR(frame.objects[slot]);
        if (frame.owned[slot]) torch.delete_handle(frame.handles[slot]);
        frame.handles[slot] = nullptr;
        frame.owned[slot] = 0;
    }
    if (config.handle_offset >= 0) return;
    for (const InputSpec &input : program.inputs) {
        if (input.slot < 0 || !frame.owned[input.slot]) continue;
        torch.delete_handle(frame.handles[input.slot]);
        frame.handles[input.slot] = nullptr;
        frame.owned[input.slot] = 0;
    }
}

}  // namespace fw
