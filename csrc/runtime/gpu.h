// A GPU: memory, copies and kernels through the CUDA driver, which is opened when a package first needs it.
// Takes numbers of GPUs, machine code and streams; gives memory and functions. Always holds: a failure of the driver is
// a Failure with its text; the caller's own context is current again when a call of this library returns.
#ifndef FUSEWRIGHT_RUNTIME_GPU_H
#define FUSEWRIGHT_RUNTIME_GPU_H

#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>

#include "../cuda_driver.h"
#include "file.h"

namespace fw {

class Gpu {
  public:
    static const Gpu &number(int32_t index);  // opened once, never closed. FW_MACHINE where there is none
    static int32_t count();                   // 0 without a driver
    static int32_t arch_of(int32_t index);    // 90 for compute capability 9.0; without opening it
    // The number in "cuda:1"; 0 for "cuda", -1 for what is no GPU.
    static int32_t index_of(const std::string &device);
    int32_t index() const { return index_; }
    int32_t arch() const { return arch_; }
    // The calling thread's own: what is on it follows what is on the default stream. Not the driver's stream "per
    // thread", whose one name PyTorch's memory would take for one stream.
    void *thread_stream() const;

    void check(cuda::Result result, const std::string &what) const;
    // While the stream is recorded into a graph, memory that stays to the end: the graph may run at any time.
    void *allocate(int64_t bytes, void *stream) const;
    void free(void *memory, void *stream) const noexcept;
    void upload(void *target, const void *source, int64_t bytes, void *stream) const;
    void download(void *target, const void *source, int64_t bytes, void *stream) const;
    void copy(void *target, const void *source, int64_t bytes, void *stream) const;
    // The elements of a tensor with any strides, row by row. stride: in elements.
    void pack(void *target, const void *source, int64_t item, int32_t ndim, const int64_t *sizes,
              const int64_t *strides, void *stream) const;
    void wait(void *stream) const;
    void wait_for_all() const;
    void trim() const noexcept;  // gives the driver the memory that nobody uses

  private:
    friend class OnGpu;
    explicit Gpu(int32_t index);
    int32_t index_, arch_ = 0;
    int device_ = 0;
    void *context_ = nullptr, *pool_ = nullptr;
    bool is_recorded(void *stream) const;
    mutable std::mutex mutex_;
    mutable std::set<void *> recorded_;  // memory that a recorded graph uses, as long as anybody may start it
};

// While alive, the GPU's context is current on this thread. Nothing for null.
class OnGpu {
  public:
    explicit OnGpu(const Gpu *gpu) : gpu_(gpu) {
        if (gpu_ != nullptr) gpu_->check(cuda::driver().push_context(gpu_->context_), "making the GPU current");
    }
    ~OnGpu() {
        void *context = nullptr;
        if (gpu_ != nullptr) cuda::driver().pop_context(&context);
    }
    OnGpu(const OnGpu &) = delete;

  private:
    const Gpu *gpu_;
};

// Gives memory back: of a GPU after what is on the stream, or of the CPU.
struct Free {
    const Gpu *gpu = nullptr;
    void *stream = nullptr;
    void operator()(void *memory) const noexcept {
        if (gpu == nullptr) std::free(memory);
        else gpu->free(memory, stream);
    }
};
using Owned = std::unique_ptr<void, Free>;

struct DeviceFunction {
    void *function = nullptr;
    int32_t threads = 0, shared = 0;
};

// The kernels of `.cuda` parts, loaded for one GPU when a plan asks for them; unloaded at the end.
class DeviceCode {
  public:
    explicit DeviceCode(const Gpu &gpu) : gpu_(gpu) {}
    ~DeviceCode();
    DeviceCode(const DeviceCode &) = delete;
    void add(Bytes part);
    const DeviceFunction &function(const std::string &key, const std::string &name);

  private:
    struct Code {
        int64_t arch, shared, warps;
        bool ptx;
        std::string name;
        Bytes code;
    };
    const Gpu &gpu_;
    std::map<std::string, std::vector<Code>> codes_;
    std::map<std::string, DeviceFunction> loaded_;
    std::vector<void *> modules_;
};

// The target of a package whose code is used here: the best that runs on this processor, or on each GPU. A Failure that
// says what there is, where none runs.
std::string chosen_target(const Value &targets);

}  // namespace fw
#endif
