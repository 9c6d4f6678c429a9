// One call plan of generated kernels, read from a package, and a call of it.
// Takes the bytes of a `.code` part and pointers; gives memory of the results. Always holds: every slot and value number
// of a plan that was read is in range; a plan is not changed by calls, so that threads share it.
#ifndef FUSEWRIGHT_RUNTIME_PLAN_H
#define FUSEWRIGHT_RUNTIME_PLAN_H

#include <memory>

#include "file.h"

namespace fw {

struct DType {
    const char *name;
    int64_t size;
};
extern const DType kDTypes[10];  // in the order of fw_dtype
int32_t dtype_of(const std::string &name);


struct PlanInput {
    enum Kind { Leaf, Weight, Size } kind;
    size_t leaf = 0, dim = 0;
    const void *data = nullptr;  // of a weight
    size_t reach = 0;            // its bytes
};

class CallPlan {
  public:
    CallPlan(Bytes data, std::vector<PlanInput> inputs, std::vector<size_t> outputs);
    ~CallPlan();
    CallPlan(const CallPlan &) = delete;
    void run(const fw_tensor *leaves, fw_tensor *results) const;
    fw_tensor described(size_t result) const;

  private:
    using Kernel = void (*)(void *const *buffers, const int64_t *sizes, int64_t begin, int64_t end, int64_t *status);
    struct Slot {
        int kind;  // as codegen/call_plan_types.py numbers them
        size_t where;
        int32_t dtype;
        size_t ndim, sizes, strides, offset;
    };
    struct Call {
        Kernel function;
        std::string name;
        std::vector<size_t> buffers, sizes;
        size_t extent;
        int64_t grain;
    };
    struct Step {
        bool allocates;
        size_t number;  // of a slot, or of the first call
        size_t count;
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
    std::vector<int64_t> values_;
    std::vector<Symbol> symbols_;
    std::vector<Instruction> instructions_;
    std::vector<Slot> slots_;
    std::vector<Call> calls_;
    std::vector<Step> steps_;
    std::vector<Output> outputs_;
    std::vector<std::vector<int64_t>> constants_;  // eight bytes a word: aligned
    size_t arena_ = 0;
    void *code_ = nullptr;
    size_t code_size_ = 0;

    void load_code(Bytes data, const std::vector<std::string> &keys);
    void read_slot(const Value &record);
    void read_call(const Value &record, std::vector<std::string> *keys);
    size_t run_of(const Value &start, size_t count) const;
    void check_weights() const;
    int64_t bytes_of(const int64_t *values, const Slot &slot) const;
    void perform(const Call &call, void *const *pointers, const int64_t *values) const;
    void compute(std::vector<int64_t> *values, const fw_tensor *leaves) const;
    void give(const Output &output, const int64_t *values, Memory *memory, fw_tensor *result) const;
};

}  // namespace fw
#endif
