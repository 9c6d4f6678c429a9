// PyTorch's C interface, opened when a package first calls an operator of the library.
// Takes names of functions, operators and their arguments; gives tensors by handle. Always holds: no PyTorch header is
// needed and nothing is linked against it; what libtorch lacks, or refuses, is a Failure with the reason.
#ifndef FUSEWRIGHT_RUNTIME_TORCH_H
#define FUSEWRIGHT_RUNTIME_TORCH_H

#include "../torch_calls.h"
#include "gpu.h"

namespace fw {

// The functions, as torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h declare them.
struct Torch : TensorCalls {
    int32_t (*clone)(Handle, Handle *);
    int32_t (*layout)(Handle, int32_t *);
    uint64_t (*abi_version)();
    // Optional: of PyTorch 2.10 and later.
    int32_t (*call_dispatcher)(const char *name, const char *overload, uint64_t *stack, uint64_t version);
    int32_t (*new_list)(size_t, void **);
    int32_t (*push_back)(void *list, uint64_t);
    int32_t (*new_string)(const char *, size_t, void **);
    int32_t (*new_value)(uint64_t **);

    void *library = nullptr;
    int32_t cpu = 0, strided = 0, dtypes[10] = {};  // codes; dtypes in the order of fw_dtype

    void *function(const std::string &name) const;  // null where there is none
    void check(int32_t status, const std::string &what) const;
    bool is_strided(Handle) const;  // false for a library's own layout
};

// What is more for tensors on GPUs, in libtorch_cuda.so.
struct TorchCuda {
    void *library = nullptr;
    int32_t device = 0;  // code
    int32_t (*guard)(void *stream, int32_t index, void **) = nullptr;
    int32_t (*delete_guard)(void *) = nullptr;
};

// Raises FW_MACHINE where there is no libtorch, or one that is too old.
const Torch &torch();
const TorchCuda &torch_cuda();
void use_torch(const std::string &path);  // of libtorch_cpu.so, or of its folder
// Raises FW_MACHINE unless libtorch is of the version that the package was made with.
void check_torch_version(const std::string &made_with);

// An operator of the library, as the package's manifest describes it.
struct Type {
    enum Kind {
        Tensor, Int, Float, Bool, String, DType, Layout, MemoryFormat, Device, Optional, List, Other
    } kind = Other;
    std::string text;
    std::vector<Type> inner;
};
struct Operator {
    std::string name, overload;
    std::vector<std::string> names;
    std::vector<Type> types;
    std::vector<Value> defaults;  // Record where there is none
    std::vector<Type> results;
};
using Operators = std::map<std::string, Operator>;  // by "namespace::name.overload"
Operators read_operators(const Value &described);

// An argument of a call: a constant, a tensor by slot, a number by value entry, or a list of such.
struct Argument {
    enum Kind { Constant, Slot, Entry, List, Private } kind = Constant;
    Value constant;
    size_t number = 0;
    std::vector<Argument> items;
};

struct OperatorStep {
    const Operator *target = nullptr;
    std::vector<Argument> arguments;  // one of each of the operator's
    std::vector<int64_t> results;     // slots; -1 for one that nobody reads
};

// The step that calls `target`; raises a Failure where PyTorch's C interface cannot pass such an argument.
OperatorStep operator_step(const Operator &target, std::vector<Argument> given,
                           const std::vector<std::string> &keywords, std::vector<int64_t> results);
// Puts new handles at the results' slots.
void call_operator(const OperatorStep &step, Handle *handles, const int64_t *values);

// While alive, operators run without gradients on this thread; those on a GPU, if one is given, on the stream.
class OperatorScope {
  public:
    OperatorScope(bool active, const Gpu *gpu, void *stream) {
        if (active && gpu != nullptr)
            torch().check(torch_cuda().guard(stream, gpu->index(), &guard_), "making the stream PyTorch's");
        without_gradients_ = active && torch().grad_enabled();
        if (without_gradients_) torch().set_grad_enabled(false);
    }
    ~OperatorScope() {
        if (without_gradients_) torch().set_grad_enabled(true);
        if (guard_ != nullptr) torch_cuda().delete_guard(guard_);
    }
    OperatorScope(const OperatorScope &) = delete;

  private:
    bool without_gradients_ = false;
    void *guard_ = nullptr;
};

}  // namespace fw
#endif
