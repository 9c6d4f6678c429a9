// One call plan, read from a package, and a call of it: generated kernels, on the CPU or on a GPU, and operators of
// PyTorch's through its C functions. Takes the bytes of a `.code` part and pointers; gives memory of the results.
// Always holds: every slot and value number of a plan that was read is in range; a plan is not changed by calls, so
// that threads share it.
#ifndef FUSEWRIGHT_RUNTIME_PLAN_H
#define FUSEWRIGHT_RUNTIME_PLAN_H

#include <memory>
#include <mutex>

#include "gpu.h"
#include "torch.h"

namespace fw {

struct DType {
    const char *name;
    int64_t size;
};
extern const DType kDTypes[10];  // in the order of fw_dtype
constexpr int64_t kMost = int64_t(1) << 46;  // bytes of one tensor
enum SlotKind { kInput, kConstant, kArena, kFresh, kReturned, kWindow, kAlias };
int32_t dtype_of(const std::string &name);

struct PlanInput {
    enum Kind { Leaf, Weight, Size, Number, Prepared } kind;
    size_t leaf = 0, dim = 0;    // leaf: of one that is prepared, its number
    int64_t number = 0;          // the usual value of a size
    const void *data = nullptr;  // of a weight, on the GPU where the plan reads it there
    size_t reach = 0;            // its bytes
};

// A tensor by handle, and the memory that it looks at where it has none of its own.
class Kept {
  public:
    explicit Kept(Handle handle) : handle_(handle) {}
    Kept(Kept &&other) noexcept : handle_(other.handle_), memory(std::move(other.memory)) { other.handle_ = nullptr; }
    Kept &operator=(Kept &&) = delete;
    ~Kept() {
        if (handle_ != nullptr) torch().delete_handle(handle_);
    }
    Handle handle() const { return handle_; }

  private:
    Handle handle_;

  public:
    std::shared_ptr<void> memory;
};

class Preparation;

// What a plan may call besides its kernels.
struct Library {
    const Operators *operators = nullptr;
    std::string made_with;       // the version of PyTorch
    const Gpu *gpu = nullptr;    // that the program is on
    DeviceCode *code = nullptr;  // of its kernels
    std::shared_ptr<const Preparation> preparation;
    std::vector<int64_t> usual;  // sizes that values are prepared for, and serve any
};

class CallPlan {
  public:
    CallPlan(Bytes data, std::vector<PlanInput> inputs, std::vector<size_t> outputs, Library library);
    ~CallPlan();
    CallPlan(const CallPlan &) = delete;
    // stream: of the GPU, where the program is on one
    void run(const fw_tensor *leaves, fw_tensor *results, void *stream) const;
    // Of a plan without arguments: its results as tensors, views of one memory included.
    std::vector<Kept> run_kept() const;
    fw_tensor described(size_t result) const;
    const Gpu *gpu() const { return library_.gpu; }

  private:
    using Kernel = void (*)(void *const *buffers, const int64_t *sizes, int64_t begin, int64_t end, int64_t *status);
    struct Slot {
        int kind;  // as codegen/call_plan_types.py numbers them
        size_t where;
        int32_t dtype;
        size_t ndim, sizes, strides, offset;
        bool needs_pointer, needs_handle;  // needs_handle: an operator reads or makes it
        const Gpu *gpu;                    // where its memory is; null: the CPU's
    };
    struct Call {
        Kernel function;
        std::string name;
        std::vector<size_t> buffers, sizes;
        size_t extent;
        int64_t grain;
    };
    struct Launch {  // a kernel on the GPU
        DeviceFunction function;
        std::string name;
        std::vector<size_t> buffers, sizes;
        std::vector<bool> by_value;  // buffers of the CPU whose content is the parameter
        size_t grid;
        bool scratch, waits;  // scratch: the last buffer is Triton's own; waits: it waits itself for those before it
    };
    struct Step {
        enum Kind { Kernels, Launched, Allocate, Window, Release, Check, Gather, Extern, Operator, Skip } kind;
        size_t number;  // of a slot, a value entry or a call of its kind
        size_t count;   // of kernels, or of steps that are skipped
    };
    struct Gathered {
        size_t first;
        std::vector<size_t> sources;
    };
    struct Symbol {
        size_t value, input;
        int64_t dim;
    };
    struct Instruction {
        int op;
        size_t target, left, right;
    };
    struct Output {
        bool view;
        size_t slot, ndim, sizes, strides, offset;
        int32_t dtype;
    };
    struct Memory;

    std::vector<PlanInput> inputs_;
    Library library_;
    std::vector<int64_t> values_;
    std::vector<Symbol> symbols_;
    std::vector<Instruction> instructions_;
    std::vector<Slot> slots_;
    std::vector<Call> calls_;
    std::vector<Launch> launches_;
    std::vector<ExternStep> externs_;
    std::vector<OperatorStep> operators_;
    std::vector<Gathered> gathers_;
    std::vector<Step> steps_;
    std::vector<Output> outputs_;
    std::vector<std::vector<int64_t>> constants_;  // eight bytes a word: aligned
    std::vector<Owned> on_gpu_;                    // constants that kernels read there, by number
    std::vector<Kept> fixed_;                      // handles of weights and constants
    std::vector<Handle> handles_;                  // by slot: those of fixed_
    size_t arena_ = 0;
    const Gpu *arena_gpu_ = nullptr;
    bool calls_library_ = false;
    void *code_ = nullptr;
    size_t code_size_ = 0;

    void load_code(Bytes data, const std::vector<std::string> &keys);
    void read_slot(const Value &record);
    void read_step(const Value &record, std::vector<std::string> *keys);
    void read_slot_step(const Value &record);
    void read_call(const Value &record, std::vector<std::string> *keys);
    void read_launch(const Value &record);
    void read_extern(const Value &record);
    void read_operator(const Value &record);
    void read_output(const Value &record);
    void hold_fixed();
    size_t handled(const Value &slot);
    size_t run_of(const Value &start, size_t count) const;
    void check_weights() const;
    int64_t bytes_of(const int64_t *values, const Slot &slot) const;
    Handle around(const Slot &slot, void *data, const int64_t *values) const;
    const int64_t *start(const fw_tensor *leaves, Memory *memory) const;
    void perform(const int64_t *values, Memory *memory) const;
    void perform(const Call &call, void *const *pointers, const int64_t *values) const;
    void launch(const Launch &launch, const int64_t *values, Memory *memory) const;
    void give_leaf(size_t slot, const fw_tensor &leaf, const int64_t *values, Memory *memory) const;
    void check_result(size_t slot, const int64_t *values, Memory *memory) const;
    void compute(std::vector<int64_t> *values, const fw_tensor *leaves) const;
    void give(const Output &output, const int64_t *values, Memory *memory, fw_tensor *result) const;
};

// Values that a plan reads and that depend on weights alone: computed when a call first needs them.
class Preparation {
  public:
    struct Result {
        size_t value = 0;                 // of the plan's, where no operator makes it
        std::unique_ptr<OperatorStep> step;  // its slots are numbers of values
    };
    Preparation(std::unique_ptr<CallPlan> plan, std::vector<Result> results, size_t values)
        : plan_(std::move(plan)), results_(std::move(results)), values_(values) {}
    size_t size() const { return results_.size(); }
    const std::vector<Kept> &get() const;

  private:
    std::unique_ptr<CallPlan> plan_;
    std::vector<Result> results_;
    size_t values_;
    mutable std::mutex mutex_;
    mutable std::unique_ptr<std::vector<Kept>> made_;
};

}  // namespace fw
#endif
