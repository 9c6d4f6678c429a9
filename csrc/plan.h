// The native call plan: one compiled graph as a list of steps that runs without Python between kernels.
//
// plan_torch.cpp knows PyTorch's C functions, plan_memory.cpp the temporary memory, plan_build.cpp turns the plain
// tuples made by codegen/call_plan.py into a `Plan`, plan_steps.cpp performs steps, plan.cpp is one call and the Python
// type.
//
// Always holds:
// - A Plan is immutable once built. What changes during a call lives in a Frame; a Frame serves one call at a time.
// - Every integer that a step needs (a size, a stride, an offset, an extent) is an index into the value table:
// constants are
//   there from the start, symbolic ones are computed once at the start of a call.
// - Every tensor is a slot. A window slot is a tensor around memory that it does not own; it never leaves the plan.
#ifndef FUSEWRIGHT_PLAN_H
#define FUSEWRIGHT_PLAN_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "native.h"
#include "tensors.h"
#include "torch_calls.h"

namespace fw {

// --- PyTorch (plan_torch.cpp)
// ------------------------------------------------------------------------------------------------

// Functions found in PyTorch's libraries; what each does is said by its name in
// torch/csrc/inductor/aoti_torch/c/shim.h.
struct TorchFunctions : TensorCalls {
    int32_t (*reinterpret)(Handle, int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t offset,
                           Handle *);
    int32_t (*device_type)(Handle, int32_t *);
    int32_t (*storage_size)(Handle, int64_t *);  // in bytes
    size_t (*element_size)(int32_t dtype);
    int32_t (*parallel_for)(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void *),
                            void *context);
    // Optional (null when this PyTorch lacks them).
    bool (*inference_mode)();
    void (*exclude_keys)(void *guard, uint64_t keys);  // constructs a c10::impl::ExcludeDispatchKeyGuard
    void (*restore_keys)(void *guard);                 // destroys it
    PyObject *(*wrap_move)(Handle);                    // THPVariable_Wrap(TensorBase&&): takes the content, not the box
    PyObject *(*wrap)(Handle);                         // THPVariable_Wrap(const TensorBase&)
    void (*bump_version)(Handle);
    int32_t (*cuda_stream)(int32_t device, void **stream);
    int32_t (*cuda_guard)(int32_t device, void **guard);
    int32_t (*cuda_guard_set)(void *guard, int32_t device);
    int32_t (*delete_cuda_guard)(void *guard);
    bool (*has_callbacks)();  // whether a profiler or a trace listens, on this thread or on all
    int32_t (*record_start)(const char *name, void *kwargs, void *const *inputs, uint64_t n, void **range);
    int32_t (*record_end)(void *range);
    int64_t (*version)(Handle);  // at::TensorBase::_version; throws for an inference tensor
};
extern TorchFunctions torch;

struct TorchConfig {
    bool ready = false;
    Py_ssize_t handle_offset = -1;          // of the at::Tensor inside the Python object; -1: ask `to_handles`
    uint64_t excluded_keys = 0;             // autograd, ADInplaceOrView, autocast
    uint64_t wrapped_keys = 0;              // of tensors whose memory is not their content: see is_plain
    int32_t cpu = 0;                        // c10::DeviceType of the CPU
    PyTypeObject *tensor_type = nullptr;    // torch.Tensor's C base class
    PyObject *to_handles = nullptr;         // list of tensors -> list of capsules, each an owned handle
    PyObject *from_handles = nullptr;       // the inverse; takes the handles over
    PyObject *increment_version = nullptr;  // tensor -> None
    PyObject *alias_view = nullptr;         // (tensor, sizes, strides, offset, dtype code) -> a true view of the tensor
    PyObject *clone = nullptr;              // tensor -> a copy with its own memory
};
extern TorchConfig config;

// The last error of a PyTorch C function, in words.
std::string torch_error(const char *what);
// The same of an allocation: a PyTorch that does not say why it failed had no memory, whose text is the allocator's.
std::string allocation_error(const char *what, int32_t device);
// A handle of `object`; `*owned` says whether it must be deleted. Null with an exception when it is no tensor.
Handle handle_of(PyObject *object, bool *owned);
// How many bytes lie between the first element of a tensor of these sizes and strides and the end of its last one; -1
// where int64 cannot say.
int64_t reach_of(int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t itemsize);
// Whether `reach` bytes from the tensor's first element on are its storage's. Without storage (a library's layout):
// `opaque`.
bool holds_slowly(Handle handle, int64_t itemsize, int64_t reach, bool opaque);
inline const char *impl_of(Handle handle) {
    return *static_cast<const char *const *>(handle);
}  // an at::Tensor is a pointer
inline bool holds(Handle handle, int64_t itemsize, int64_t reach, bool opaque) {
    return (layout.storage_ready && storage_holds(impl_of(handle), itemsize, reach)) ||
           holds_slowly(handle, itemsize, reach, opaque);
}
// Whether the tensor's memory is its content: no conjugate or negative bit, no zero tensor, no wrapper. True where that
// cannot be read.
bool is_plain(Handle handle);
// A new Python tensor sharing the handle's tensor. The handle stays the caller's.
PyObject *wrap_handle(Handle handle);
// The same, and the handle is consumed (also on failure).
PyObject *wrap_and_delete(Handle handle);
// Counts one in-place change of the tensor. False with an exception (an inference tensor outside inference mode).
bool bump_version(PyObject *tensor);
// Raises fusewright.base.errors.RuntimeFallback.
void raise_fallback(const std::string &message);

// While alive, a range of the profile. Without a name, or in a PyTorch that lacks the functions, nothing.
class Range {
  public:
    explicit Range(const char *name) {
        if (*name != 0 && torch.record_start(name, nullptr, nullptr, 0, &range_) != 0) range_ = nullptr;
    }
    ~Range() {
        if (range_ != nullptr) torch.record_end(range_);
    }
    Range(const Range &) = delete;
    Range &operator=(const Range &) = delete;

  private:
    void *range_ = nullptr;
};
inline bool is_profiled() {
    bool able = torch.has_callbacks != nullptr && torch.record_start != nullptr && torch.record_end != nullptr;
    return able && torch.has_callbacks();
}

// While alive, operators run below autograd and autocast with gradients off: what the graph recorded is what runs.
class BelowAutograd {
  public:
    explicit BelowAutograd(bool active);
    ~BelowAutograd();
    BelowAutograd(const BelowAutograd &) = delete;

  private:
    bool active_, grad_ = false;
    alignas(16) unsigned char guard_[64];
};

// --- memory (plan_memory.cpp)
// ------------------------------------------------------------------------------------------------

struct Block {
    char *base = nullptr;
    size_t size = 0;
    bool busy = false;
    bool mapped = false;
    bool kept = true;  // false: larger than the limit, freed at release
};
// A block of at least `size` bytes, 64-byte aligned; null with MemoryError. All plans share few blocks: the most
// recently used idle one is taken, so that one thread always works in the same memory. More than `limit` bytes are
// freed at release. GIL held.
Block *acquire_block(size_t size, size_t limit);
void release_block(Block *block);
int memory_init(PyObject *module);

// --- the plan (plan_build.cpp)
// -----------------------------------------------------------------------------------------------

enum class SlotKind : uint8_t {
    Input,     // the caller's tensor; `where`: input position
    Constant,  // `where`: index of the constant
    Arena,     // memory in the block; no tensor; `offset`: value index of the byte offset
    Fresh,     // allocated by an Allocate step
    Returned,  // filled by an operator
    Window,    // a tensor around memory of slot `where`, `offset`: value index of the offset in elements
    Alias,     // a copy of another slot's handle (members of tensor lists)
};

struct Slot {
    SlotKind kind;
    bool needs_pointer;
    int32_t where, dtype, itemsize, device, device_index;
    int32_t ndim, sizes, strides, offset;  // the last three are value indices
};

using KernelFunction = void (*)(void *const *buffers, const int64_t *sizes, int64_t begin, int64_t end,
                                int64_t *status);

enum class StepKind : uint8_t {
    Kernel,
    Extern,
    Python,
    Allocate,
    Window,
    Release,
    Check,
    Gather,
    Mutate,
    Group,
    Launch,
    Skip,
    Own,
    Change
};

struct KernelStep {
    KernelFunction function;
    std::vector<int32_t> buffers, sizes;
    int32_t extent;
    int64_t grain;
    std::string name;
};

// Kernels that run at the same time, in one parallel region.
struct GroupStep {
    std::vector<KernelStep> kernels;
    size_t buffers = 0, sizes = 0;  // of all kernels together
};

// A kernel on a GPU. Its parameters are `buffers` (pointers, or the values that they point to in CPU memory), then
// `sizes`.
struct LaunchStep {
    void *function;
    std::vector<int32_t> buffers, sizes;
    std::vector<uint8_t> by_value, written;
    int32_t device, grid, threads, shared;
    bool scratch;  // the last buffer is scratch memory of Triton's own
    bool waits;    // the kernel itself waits for those before it
    std::string name;
};

enum class PyArgKind : uint8_t { Constant, Tensor, Value, List, Tuple, PrivateTensor };
struct PyArg {
    PyArgKind kind;
    int32_t operand;
};
struct PythonStep {
    PyObject *callable;
    PyObject *constants;  // tuple
    PyObject *keywords;   // tuple of names, or null
    std::vector<PyArg> program;
    std::vector<int32_t> results;  // slot of each result, -1 for one that nobody reads
    std::vector<int32_t> tensors;  // slots among the arguments
    std::string name;
    bool collective = false;  // other processes take part: from now on the call cannot be repeated
};

struct Step {
    StepKind kind;
    int32_t operand;  // a slot, or an index into the vector of its kind
};
struct GatherStep {
    int32_t first;  // the slots first, first + 1, ... take the handles of
    std::vector<int32_t> sources;
};

struct SkipStep {
    int32_t value, count;  // the next `count` steps are not performed where this value is 0
};

enum class OutputKind : uint8_t { Buffer, View, PrivateView, Size, Value };
struct OutputSpec {
    OutputKind kind;
    int32_t slot, ndim, sizes, strides, offset, dtype;
    PyObject *value;
};

enum class SizeOp : uint8_t { Add, Multiply, FloorDivide, Modulo, Minimum, Maximum };
struct SizeInstruction {
    SizeOp op;
    int32_t target, left, right;
};
struct SymbolSource {
    int32_t value, position, dim;  // dim -1: the input is the integer itself
};
struct InputSpec {
    char kind;  // 't' tensor, 'i' integer, 'x' not used by native code
    int32_t slot;
};
struct ArenaSlot {
    int32_t slot, offset;
};

struct Frame;

struct Program {
    std::string name;
    std::vector<InputSpec> inputs;
    std::vector<int64_t> values;
    std::vector<SymbolSource> symbols;
    std::vector<SizeInstruction> instructions;
    std::vector<Slot> slots;
    std::vector<ArenaSlot> arena_slots;
    std::vector<int32_t> given;     // slots of inputs and constants: memory that the call does not make
    std::vector<int32_t> released;  // slots that a call may leave occupied: Fresh and Returned
    std::vector<Step> steps;
    std::vector<KernelStep> kernels;
    std::vector<ExternStep> externs;
    std::vector<PythonStep> pythons;
    std::vector<GatherStep> gathers;
    std::vector<GroupStep> groups;
    std::vector<LaunchStep> launches;
    std::vector<SkipStep> skips;
    std::vector<int32_t> written_inputs;  // of launches: their memory must be aligned
    std::vector<OutputSpec> outputs;
    PyObject *constants = nullptr;
    PyObject *owner = nullptr;  // keeps the machine code of the kernels in memory
    PyObject *labels = nullptr;  // () -> what a profile calls each step; null once it was asked
    std::unique_ptr<const std::vector<std::string>> step_labels;  // set once, with the GIL held
    int32_t arena = 0;  // value index of the arena's size
    size_t arena_limit = 0;
    bool single = false, dispatches = false, has_windows = false;
    std::vector<Frame *> idle;
    size_t frames = 0;  // idle or not: `idle` has room for all of them, so that giving one back needs no memory

    ~Program();
    bool dynamic() const { return !symbols.empty(); }
};

// Reads the constructor's arguments. Null with an exception (ValueError, TypeError) when they do not fit together.
std::unique_ptr<Program> build_program(PyObject *args, PyObject *kwargs);

// --- one call (plan_steps.cpp)
// -----------------------------------------------------------------------------------------------

struct Frame {
    std::vector<int64_t> values;       // own copy when sizes are symbolic
    std::vector<Handle> handles;
    std::vector<void *> pointers;
    std::vector<PyObject *> objects;   // strong; of inputs: borrowed from the caller
    std::vector<uint8_t> owned;        // the handle must be deleted
    std::vector<void *> window_of;     // the memory that a window slot's handle was made for
    std::vector<uint32_t> window_epoch;
    uint32_t epoch = 1;                // grows when cached windows are no longer right
    bool inference = false;
    std::vector<int64_t> reach;        // of each slot of `given`: bytes that its storage must hold
    char *base = nullptr;              // of the block that `pointers` of Arena slots were computed for
};

// Whether the tensor is a plain one of the slot's shape (in `values`), dtype and device; its strides are told apart.
bool matches(Handle handle, const Slot &slot, const int64_t *values, bool *strides_match);

// Finds `step_labels`, once. GIL held.
void ask_for_labels(Program &program);

// Runs the steps of a program on a frame whose inputs and memory are in place.
class Runner {
  public:
    Runner(Program &program, Frame &frame, PyObject *const *inputs, const int64_t *values)
        : p(program), f(frame), inputs_(inputs), v(values) {}
    ~Runner();
    // False with an exception. The GIL is held again afterwards.
    bool run();
    std::vector<int64_t> *nanoseconds = nullptr;  // takes what each step took (-1: it was skipped), if it is asked for
    const std::vector<std::string> *labels = nullptr;  // the steps' ranges in a profile, while one is made
    bool show(const OutputSpec &spec);
    PyObject *output(const OutputSpec &spec);  // new reference or null
    // Gives back everything that the call left in the frame. GIL held.
    static void clean(const Program &program, Frame &frame);

  private:
    Program &p;
    Frame &f;
    PyObject *const *inputs_;
    const int64_t *v;
    PyThreadState *released_ = nullptr;
    bool mutated_ = false;
    int32_t device_ = -1;            // the GPU that is current while this runs
    bool follows_ = false;           // what was put on the stream last is a kernel of this plan
    void *guard_ = nullptr, *stream_ = nullptr;
    std::vector<Handle> copies_;     // of misaligned inputs
    std::string outside_;            // what an access outside its buffer was, if the user is to hear of it

    void drop_gil() {
        if (released_ == nullptr) released_ = PyEval_SaveThread();
    }
    void hold_gil() {
        if (released_ != nullptr) {
            PyEval_RestoreThread(released_);
            released_ = nullptr;
        }
    }
    bool step(Step step);
    bool timed(Step step);
    bool named(size_t number);
    bool kernel(const KernelStep &step);
    bool group(const GroupStep &step);
    bool kernel_failed(const KernelStep &step, int64_t status, const int64_t *sizes);
    void raise_outside(size_t number);
    bool launch(const LaunchStep &step);
    bool enter_device(int32_t device);
    bool aligned_copy(int32_t slot, void **pointer);
    bool check_alignment();
    bool external(const ExternStep &step);
    bool python(const PythonStep &step);
    bool take_results(const PythonStep &step, PyObject *result, size_t *position);
    bool take_tensor(const PythonStep &step, int32_t slot, PyObject *tensor);
    bool allocate(int32_t slot);
    bool window(int32_t slot);
    void release(int32_t slot);
    bool check(int32_t slot, bool own = false);
    std::string expected_shape(const Slot &slot);
    std::string found_shape(Handle handle);
    bool mutate(int32_t slot);
    bool pointer(int32_t slot);
    void store(int32_t slot, Handle handle, bool owned, PyObject *object);
    PyObject *object(int32_t slot);  // new reference
    PyObject *private_copy(int32_t slot);
    PyObject *values_tuple(int32_t first, int32_t n);
    bool fail(const std::string &message, PyObject *error_when_mutated);
    bool fail_with_current_exception(const std::string &name);
    PyObject *call_python(const PythonStep &step);
    char *storage_base(int32_t slot, Handle handle);
    bool shares_argument(const PythonStep &step, char *base);
};

}  // namespace fw
#endif
