// fusewright.h for C++17: objects that free themselves, and errors as exceptions.
#ifndef FUSEWRIGHT_HPP
#define FUSEWRIGHT_HPP

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "fusewright.h"

namespace fusewright {

struct Error : std::runtime_error {
    Error(fw_status status, const char *text) : std::runtime_error(text), status(status) {}
    fw_status status;
};

inline void check(fw_status status) {
    if (status != FW_OK) throw Error(status, fw_last_error());
}

// Where libtorch_cpu.so is, for packages that are not standalone: its path or folder. Before the first is loaded.
inline void use_torch(const std::string &path) { check(fw_use_torch(path.c_str())); }

// A result: owns its memory.
class Tensor {
  public:
    Tensor() : tensor_{} {}
    Tensor(Tensor &&other) noexcept : tensor_(other.tensor_) { other.tensor_ = {}; }
    Tensor &operator=(Tensor &&other) noexcept {
        std::swap(tensor_, other.tensor_);
        return *this;
    }
    ~Tensor() { fw_free(&tensor_); }
    fw_tensor *get() { return &tensor_; }
    int32_t dtype() const { return tensor_.dtype; }
    bool is_on_gpu() const { return tensor_.device != FW_CPU; }
    // Moves it to memory of the CPU, after the work that makes it.
    Tensor &cpu() {
        check(fw_to_cpu(&tensor_));
        return *this;
    }
    std::vector<int64_t> sizes() const { return {tensor_.sizes, tensor_.sizes + tensor_.ndim}; }
    size_t count() const {
        size_t product = 1;
        for (int32_t i = 0; i < tensor_.ndim; i++) product *= static_cast<size_t>(tensor_.sizes[i]);
        return product;
    }
    template <typename T>
    const T *data() const {
        return static_cast<const T *>(tensor_.data);
    }

  private:
    fw_tensor tensor_;
};

// An argument: memory of the caller's, which is only read. gpu: the number of the GPU on which it lies; -1: the CPU.
inline fw_tensor tensor(const void *data, fw_dtype dtype, const std::vector<int64_t> &sizes, int32_t gpu = -1) {
    fw_tensor made{const_cast<void *>(data), dtype, static_cast<int32_t>(sizes.size()), {}, gpu < 0 ? FW_CPU : FW_CUDA,
                   gpu < 0 ? 0 : gpu};
    if (sizes.size() > FW_MOST_DIMS) throw Error(FW_INPUT, "a tensor of too many dimensions");
    for (size_t i = 0; i < sizes.size(); i++) made.sizes[i] = sizes[i];
    return made;
}

class Package {
  public:
    // verify_key: the 32 bytes of the Ed25519 key that the package must be signed by; empty where none is asked for.
    explicit Package(const std::string &path, const std::string &verify_key = "") {
        fw_package *made = nullptr;
        if (verify_key.size() != 0 && verify_key.size() != 32) throw Error(FW_INPUT, "a key has 32 bytes");
        auto key = reinterpret_cast<const uint8_t *>(verify_key.data());
        check(fw_load_signed(path.c_str(), verify_key.empty() ? nullptr : key, &made));
        package_.reset(made);
    }
    const fw_package *get() const { return package_.get(); }
    std::vector<std::string> entries() const {
        std::vector<std::string> names;
        for (size_t i = 0; i < fw_entry_count(get()); i++) names.emplace_back(fw_entry_name(get(), i));
        return names;
    }
    std::vector<Tensor> operator()(const std::vector<fw_tensor> &inputs, size_t entry = 0) const {
        std::vector<fw_tensor> raw(fw_output_count(get(), entry));
        check(fw_run(get(), entry, inputs.data(), inputs.size(), raw.data(), raw.size()));
        return owned(raw);
    }
    // On a stream of the GPU, without waiting for it: see fw_run_on.
    std::vector<Tensor> on_stream(void *stream, const std::vector<fw_tensor> &inputs, size_t entry = 0) const {
        std::vector<fw_tensor> raw(fw_output_count(get(), entry));
        check(fw_run_on(get(), entry, inputs.data(), inputs.size(), raw.data(), raw.size(), stream));
        return owned(raw);
    }

  private:
    static std::vector<Tensor> owned(const std::vector<fw_tensor> &raw) {
        std::vector<Tensor> made(raw.size());
        for (size_t i = 0; i < raw.size(); i++) *made[i].get() = raw[i];
        return made;
    }
    struct Close {
        void operator()(fw_package *package) const { fw_close(package); }
    };
    std::unique_ptr<fw_package, Close> package_;
};

}  // namespace fusewright
#endif
