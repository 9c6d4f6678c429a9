#include "gpu.h"

#include <sys/utsname.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <limits>
#include <sstream>

namespace fw {

namespace {

std::mutex opening;
std::map<int32_t, std::unique_ptr<Gpu>> opened;  // never closed: memory of the caller's may lie there

constexpr int kPinned = 1, kOnDevice = 1;   // CUmemAllocationType, CUmemLocationType
constexpr int kPoolReleaseThreshold = 4;    // CUmemPool_attribute
constexpr int kRelaxed = 2;                 // CUstreamCaptureMode
constexpr int kOwnFeatures = 90;            // from here on code is for its own architecture only: sm_90a

// How good code for `arch` is on a GPU of architecture `own`; 0: it does not run there. As exporting/device_code.py has
// it.
int64_t rank(int64_t arch, bool ptx, int64_t own) {
    if (arch == own) return ptx ? 1 : 3000;
    if (arch > own || arch >= kOwnFeatures) return 0;
    if (!ptx) return arch / 10 == own / 10 ? 1000 + arch : 0;
    return 1 + arch;
}

int64_t named_arch(const std::string &target) {
    char *end = nullptr;
    int64_t found = target.compare(0, 3, "sm_") == 0 ? std::strtoll(target.c_str() + 3, &end, 10) : 0;
    return end != nullptr && *end == 0 && found > 0 && found < 1000 ? found : 0;
}

std::string joined(const std::vector<Value> &texts) {
    std::string made;
    for (const Value &text : texts) made += (made.empty() ? "" : ", ") + text.string();
    return made;
}

}  // namespace

int32_t Gpu::count() {
    int found = 0;
    return cuda::find_driver() && cuda::driver().device_count(&found) == 0 ? found : 0;
}

int32_t Gpu::arch_of(int32_t index) {
    int device = 0, major = 0, minor = 0;
    bool good = cuda::driver().device(&device, index) == 0 &&
                cuda::driver().device_attribute(&major, cuda::kMajor, device) == 0 &&
                cuda::driver().device_attribute(&minor, cuda::kMinor, device) == 0;
    return good ? 10 * major + minor : 0;
}

int32_t Gpu::index_of(const std::string &device) {
    if (device == "cuda") return 0;
    if (device.compare(0, 5, "cuda:") != 0) return -1;
    char *end = nullptr;
    long found = std::strtol(device.c_str() + 5, &end, 10);
    require(*end == 0 && end != device.c_str() + 5 && found >= 0 && found < 1024, "no device: " + device);
    return int32_t(found);
}

const Gpu &Gpu::number(int32_t index) {
    std::lock_guard<std::mutex> guard(opening);
    std::unique_ptr<Gpu> &found = opened[index];
    if (found == nullptr) found.reset(new Gpu(index));
    return *found;
}

Gpu::Gpu(int32_t index) : index_(index) {
    if (!cuda::find_driver()) fail("the program is on a GPU, and no CUDA driver (libcuda.so.1) is usable", FW_MACHINE);
    if (index >= count())
        fail("the program is on GPU " + std::to_string(index) + ", and there are " + std::to_string(count()),
             FW_MACHINE);
    const cuda::Driver &driver = cuda::driver();
    check(driver.device(&device_, index), "opening the GPU");
    arch_ = arch_of(index);
    check(driver.retain_context(&context_, device_), "the GPU's context");
    if (driver.pool_create == nullptr || driver.pool_set == nullptr || driver.pool_allocate == nullptr ||
        driver.pool_free == nullptr)
        return;
    // A pool of our own, which keeps what calls give back: memory is taken and given back in the order of the stream.
    cuda::PoolOptions options{};
    options.allocation = kPinned;
    options.location = kOnDevice;
    options.device = device_;
    OnGpu current(this);
    uint64_t all = std::numeric_limits<uint64_t>::max();
    if (driver.pool_create(&pool_, &options) != 0) pool_ = nullptr;  // a GPU without pools
    else check(driver.pool_set(pool_, kPoolReleaseThreshold, &all), "keeping the GPU's memory");
}

namespace {

// Streams by GPU; those of threads that have ended serve others.
struct Streams {
    std::mutex mutex;
    std::multimap<int32_t, void *> idle;
};
Streams &streams() {
    static Streams *all = new Streams;  // threads may end after everything else
    return *all;
}
struct OwnStreams {
    std::map<int32_t, void *> by_gpu;
    ~OwnStreams() {
        std::lock_guard<std::mutex> guard(streams().mutex);
        streams().idle.insert(by_gpu.begin(), by_gpu.end());
    }
};

}  // namespace

void *Gpu::thread_stream() const {
    static thread_local OwnStreams own;
    void *&found = own.by_gpu[index_];
    if (found != nullptr) return found;
    std::lock_guard<std::mutex> guard(streams().mutex);
    auto idle = streams().idle.find(index_);
    if (idle != streams().idle.end()) {
        found = idle->second;
        streams().idle.erase(idle);
        return found;
    }
    OnGpu current(this);
    check(cuda::driver().stream_create(&found, 0), "a stream");
    return found;
}

void Gpu::check(cuda::Result result, const std::string &what) const {
    if (result != 0) fail(cuda::describe(what, result), result == cuda::kNoMemory ? FW_MEMORY : FW_RUN);
}

bool Gpu::is_recorded(void *stream) const {
    const cuda::Driver &driver = cuda::driver();
    int status = 0;
    if (stream == nullptr || driver.is_capturing == nullptr || driver.capture_mode == nullptr) return false;
    return driver.is_capturing(stream, &status) == 0 && status != 0;
}

void *Gpu::allocate(int64_t bytes, void *stream) const {
    void *made = nullptr;
    const std::string what = std::to_string(bytes) + " bytes on the GPU";
    if (bytes < 0) fail("no memory for " + what, FW_MEMORY);
    size_t size = bytes < 1 ? 1 : size_t(bytes);
    if (is_recorded(stream)) {
        // Memory of a pool would be a node of the graph, which PyTorch takes for memory of no GPU.
        int mode = kRelaxed;
        check(cuda::driver().capture_mode(&mode), what);
        cuda::Result result = cuda::driver().allocate(&made, size);
        check(cuda::driver().capture_mode(&mode), what);
        check(result, what);
        std::lock_guard<std::mutex> guard(mutex_);
        recorded_.insert(made);
        return made;
    }
    check(pool_ == nullptr ? cuda::driver().allocate(&made, size)
                           : cuda::driver().pool_allocate(&made, size, pool_, stream),
          what);
    return made;
}

void Gpu::free(void *memory, void *stream) const noexcept {
    if (memory == nullptr) return;
    {
        std::lock_guard<std::mutex> guard(mutex_);
        if (recorded_.count(memory) != 0) return;
    }
    if (cuda::driver().push_context(context_) != 0) return;
    void *context = nullptr;
    if (pool_ == nullptr) cuda::driver().free(memory);
    else cuda::driver().pool_free(memory, stream);
    cuda::driver().pop_context(&context);
}

void Gpu::upload(void *target, const void *source, int64_t bytes, void *stream) const {
    if (bytes > 0) check(cuda::driver().upload(target, source, size_t(bytes), stream), "copying to the GPU");
}

void Gpu::download(void *target, const void *source, int64_t bytes, void *stream) const {
    if (bytes > 0) check(cuda::driver().download(target, source, size_t(bytes), stream), "copying from the GPU");
}

void Gpu::copy(void *target, const void *source, int64_t bytes, void *stream) const {
    if (bytes > 0)
        check(cuda::driver().copy(target, const_cast<void *>(source), size_t(bytes), stream), "copying on the GPU");
}

void Gpu::pack(void *target, const void *source, int64_t item, int32_t ndim, const int64_t *sizes,
               const int64_t *strides, void *stream) const {
    // The dimensions, outermost first, where those that lie one behind the other are one.
    struct Level {
        int64_t size, stride;
    };
    std::vector<Level> levels;
    for (int32_t i = 0; i < ndim; i++) {
        if (sizes[i] == 0) return;
        if (sizes[i] == 1) continue;
        if (!levels.empty() && levels.back().stride == sizes[i] * strides[i])
            levels.back() = {levels.back().size * sizes[i], strides[i]};
        else levels.push_back({sizes[i], strides[i]});
    }
    int64_t width = item, height = 1, pitch = 0;
    if (!levels.empty() && levels.back().stride == 1) {
        width *= levels.back().size;
        levels.pop_back();
    }
    if (!levels.empty() && levels.back().stride * item >= width) {
        height = levels.back().size;
        pitch = levels.back().stride * item;
        levels.pop_back();
    }
    std::vector<int64_t> at(levels.size());
    char *out = static_cast<char *>(target);
    for (bool more = true; more; out += width * height) {
        int64_t start = 0;
        for (size_t i = 0; i < levels.size(); i++) start += at[i] * levels[i].stride;
        char *from = const_cast<char *>(static_cast<const char *>(source)) + start * item;
        if (height == 1) {
            copy(out, from, width, stream);
        } else {
            cuda::Rows rows{{0, 0, cuda::kDeviceMemory, nullptr, from, nullptr, size_t(pitch)},
                            {0, 0, cuda::kDeviceMemory, nullptr, out, nullptr, size_t(width)},
                            size_t(width),
                            size_t(height)};
            check(cuda::driver().copy_rows(&rows, stream), "copying on the GPU");
        }
        more = false;
        for (size_t i = levels.size(); i-- > 0 && !more;) {
            more = ++at[i] < levels[i].size;
            if (!more) at[i] = 0;
        }
    }
}

void Gpu::wait(void *stream) const { check(cuda::driver().stream_synchronise(stream), "the program on the GPU"); }
void Gpu::wait_for_all() const { check(cuda::driver().synchronise(), "the program on the GPU"); }

void Gpu::trim() const noexcept {
    void *context = nullptr;
    if (pool_ == nullptr || cuda::driver().pool_trim == nullptr || cuda::driver().push_context(context_) != 0) return;
    cuda::driver().synchronise();
    cuda::driver().pool_trim(pool_, 0);
    cuda::driver().pop_context(&context);
}

// --- machine code
// ------------------------------------------------------------------------------------------------------

DeviceCode::~DeviceCode() {
    try {
        OnGpu current(&gpu_);
        for (void *module : modules_) cuda::driver().module_unload(module);
    } catch (const Failure &) {  // the GPU is lost: so is what was on it
    }
}

void DeviceCode::add(Bytes part) {
    const void *end = std::memchr(part.data, '\n', part.size);
    require(end != nullptr, "has no list of kernels");
    size_t head = size_t(static_cast<const uint8_t *>(end) - part.data);
    Bytes data{part.data + head + 1, part.size - head - 1};
    Value records = read_json({part.data, head});
    require(records.kind == Value::Object, "its list of kernels is damaged");
    for (size_t i = 0; i < records.keys.size(); i++) {
        std::vector<Code> &found = codes_[records.keys[i]];
        found.clear();
        for (const Value &one : records.items[i].list().items) {
            require(one["ptx"].kind == Value::Bool, "its list of kernels is damaged");
            int64_t start = one["start"].within(0, int64_t(data.size) + 1);
            int64_t size = one["size"].within(0, int64_t(data.size) - start + 1);
            found.push_back({one["arch"].within(1, 1000), one["shared"].within(0, 1 << 30), one["warps"].within(1, 33),
                             one["ptx"].integer != 0, one["name"].string(), {data.data + start, size_t(size)}});
        }
    }
}

const DeviceFunction &DeviceCode::function(const std::string &key, const std::string &name) {
    auto known = loaded_.find(key);
    if (known != loaded_.end()) return known->second;
    const std::vector<Code> &codes = codes_[key];
    auto worse = [&](const Code &a, const Code &b) {
        return rank(a.arch, a.ptx, gpu_.arch()) < rank(b.arch, b.ptx, gpu_.arch());
    };
    auto best = std::max_element(codes.begin(), codes.end(), worse);
    if (best == codes.end() || rank(best->arch, best->ptx, gpu_.arch()) == 0)
        fail("there is no code of kernel " + name + " for sm_" + std::to_string(gpu_.arch()), FW_MACHINE);
    OnGpu current(&gpu_);
    std::string code(reinterpret_cast<const char *>(best->code.data), best->code.size);  // PTX ends with a zero
    void *module = nullptr;
    DeviceFunction made{nullptr, int32_t(32 * best->warps), int32_t(best->shared)};
    cuda::Result result = 0;
    const char *what =
        cuda::load_kernel(code.c_str(), best->name.c_str(), made.shared, &module, &made.function, &result);
    if (what != nullptr)
        fail("code of kernel " + name + " for sm_" + std::to_string(best->arch) + ": " + cuda::describe(what, result),
             result == cuda::kNoMemory ? FW_MEMORY : FW_FILE);
    modules_.push_back(module);
    return loaded_[key] = made;
}

// --- which code runs here
// ----------------------------------------------------------------------------------------------

namespace {

// The flags of this processor.
std::set<std::string> own_flags() {
    std::set<std::string> flags;
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
        if (line.compare(0, 5, "flags") != 0 && line.compare(0, 8, "Features") != 0) continue;
        std::istringstream words(line.substr(line.find(':') + 1));
        for (std::string word; words >> word;) flags.insert(word);
        break;
    }
#if defined(__x86_64__)
    // Under an emulator /proc/cpuinfo is the host's: the processor itself has the last word on what registers it has.
#define FW_ASK(flag) \
    if (!__builtin_cpu_supports(flag)) flags.erase(flag)
    FW_ASK("avx");
    FW_ASK("avx2");
    FW_ASK("fma");
    FW_ASK("avx512f");
    FW_ASK("avx512bw");
    FW_ASK("avx512cd");
    FW_ASK("avx512dq");
    FW_ASK("avx512vl");
#undef FW_ASK
#endif
    return flags;
}

// Why the code does not run here; empty where it does.
std::string reason(const Value &needs) {
    const std::vector<Value> &flags = needs["flags"].list().items;
    if (needs["machine"].string() == "cuda") {
        int32_t count = Gpu::count();
        if (count == 0) return "it is for NVIDIA GPUs (" + joined(flags) + "), and no CUDA driver or no GPU is found";
        for (int32_t i = 0; i < count; i++) {
            int64_t own = Gpu::arch_of(i), best = 0;
            for (const Value &flag : flags)
                for (bool ptx : {false, true}) best = std::max(best, rank(named_arch(flag.string()), ptx, own));
            if (best == 0)
                return "it is for " + joined(flags) + ", and GPU " + std::to_string(i) + " is sm_" +
                       std::to_string(own);
        }
        return "";
    }
    struct utsname about;
    if (uname(&about) != 0 || needs["machine"].string() != about.machine)
        return "it is for " + needs["machine"].string() + ", and this is " + about.machine;
    static const std::set<std::string> own = own_flags();
    for (const Value &flag : flags)
        if (own.count(flag.string()) == 0) return "it needs " + flag.string() + ", which this processor lacks";
    return "";
}

}  // namespace

std::string chosen_target(const Value &targets) {
    require(targets.kind == Value::Object, "targets are damaged");
    std::string why;
    for (const char *name : {"cuda", "native", "x86-64-v4", "x86-64-v3", "x86-64-v2", "aarch64"})
        for (size_t i = 0; i < targets.keys.size(); i++) {
            if (targets.keys[i] != name) continue;
            std::string one = reason(targets.items[i]);
            if (one.empty()) return name;
            why += std::string("; ") + name + ": " + one;
        }
    fail("no code in the package runs on this machine" + why, FW_MACHINE);
}

}  // namespace fw
