// The CUDA driver's functions, found in libcuda.so.1 when first needed; kernels are launched through them.
// Takes nothing; gives a table of functions. Always holds: no CUDA header is included and no CUDA library is linked;
// whoever has no usable driver gets false. Needs no Python: packages run without it.
#ifndef FUSEWRIGHT_CUDA_DRIVER_H
#define FUSEWRIGHT_CUDA_DRIVER_H

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

namespace fw {
namespace cuda {

using Result = int;  // CUresult; 0 is success

struct Attribute {  // CUlaunchAttribute
    int id;
    int unused;
    union {
        int allowed;
        char all[64];
    } value;
};
struct Config {  // CUlaunchConfig
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
};
struct Rows {  // CUDA_MEMCPY2D
    struct Side {
        size_t x, y;
        int kind;
        void *host, *device, *array;
        size_t pitch;
    } source, target;
    size_t width, height;
};
struct PoolOptions {  // CUmemPoolProps
    int allocation, handles, location, device;
    void *security;
    size_t most;
    char reserved[56];
};
static_assert(sizeof(Attribute) == 72 && sizeof(Config) == 56 && sizeof(Rows) == 128 && sizeof(PoolOptions) == 88,
              "as the driver's interface has them");

constexpr Result kInvalidValue = 1, kNoMemory = 2, kInvalidContext = 201;
constexpr int kProgrammaticSerialization = 6;  // CUlaunchAttributeID
constexpr int kLeastVersion = 12030;           // of a driver that records such launches into CUDA graphs
constexpr int kMaxDynamicShared = 8, kLocalBytes = 3, kRegisters = 4;  // CUfunction_attribute
constexpr int kMajor = 75, kMinor = 76;                                // CUdevice_attribute
constexpr int kDeviceMemory = 2;                                       // CUmemorytype
constexpr int32_t kPlainShared = 48 * 1024;  // more dynamic shared memory than this must be asked for

struct Driver {
    Result (*init)(unsigned flags);
    Result (*error_string)(Result, const char **);
    Result (*module_load)(void **module, const void *image);
    Result (*module_function)(void **function, void *module, const char *name);
    Result (*module_unload)(void *module);
    Result (*function_set)(void *function, int attribute, int value);
    Result (*function_get)(int *value, int attribute, void *function);
    Result (*launch)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                     unsigned shared, void *stream, void **parameters, void **extra);
    Result (*version)(int *);
    Result (*device_count)(int *);
    Result (*device)(int *device, int number);
    Result (*device_attribute)(int *value, int attribute, int device);
    Result (*retain_context)(void **context, int device);
    Result (*set_context)(void *context);
    Result (*push_context)(void *context);
    Result (*pop_context)(void **context);
    Result (*synchronise)();
    Result (*stream_create)(void **stream, unsigned flags);
    Result (*stream_synchronise)(void *stream);
    Result (*allocate)(void **memory, size_t bytes);
    Result (*free)(void *memory);
    Result (*upload)(void *target, const void *source, size_t bytes, void *stream);
    Result (*download)(void *target, const void *source, size_t bytes, void *stream);
    Result (*copy)(void *target, void *source, size_t bytes, void *stream);
    Result (*copy_rows)(const Rows *, void *stream);
    // Optional: of drivers for CUDA 11.2 and 11.8.
    Result (*pool_create)(void **pool, const PoolOptions *);
    Result (*pool_set)(void *pool, int attribute, void *value);
    Result (*pool_trim)(void *pool, size_t kept);
    Result (*pool_allocate)(void **memory, size_t bytes, void *pool, void *stream);
    Result (*pool_free)(void *memory, void *stream);
    Result (*launch_with)(const Config *config, void *function, void **parameters, void **extra);
    Result (*is_capturing)(void *stream, int *status);  // of CUDA 10
    Result (*capture_mode)(int *mode);                  // this thread's, given and taken; of CUDA 10.1
};

struct DriverRow {
    const char *name;
    size_t place;
    bool required;
};
#define FW_ROW(field, symbol, required) {symbol, offsetof(Driver, field), required}
constexpr DriverRow kDriverRows[] = {
    FW_ROW(init, "cuInit", true),
    FW_ROW(error_string, "cuGetErrorString", true),
    FW_ROW(module_load, "cuModuleLoadData", true),
    FW_ROW(module_function, "cuModuleGetFunction", true),
    FW_ROW(module_unload, "cuModuleUnload", true),
    FW_ROW(function_set, "cuFuncSetAttribute", true),
    FW_ROW(function_get, "cuFuncGetAttribute", true),
    FW_ROW(launch, "cuLaunchKernel", true),
    FW_ROW(version, "cuDriverGetVersion", true),
    FW_ROW(device_count, "cuDeviceGetCount", true),
    FW_ROW(device, "cuDeviceGet", true),
    FW_ROW(device_attribute, "cuDeviceGetAttribute", true),
    FW_ROW(retain_context, "cuDevicePrimaryCtxRetain", true),
    FW_ROW(set_context, "cuCtxSetCurrent", true),
    FW_ROW(push_context, "cuCtxPushCurrent_v2", true),
    FW_ROW(pop_context, "cuCtxPopCurrent_v2", true),
    FW_ROW(synchronise, "cuCtxSynchronize", true),
    FW_ROW(stream_create, "cuStreamCreate", true),
    FW_ROW(stream_synchronise, "cuStreamSynchronize", true),
    FW_ROW(allocate, "cuMemAlloc_v2", true),
    FW_ROW(free, "cuMemFree_v2", true),
    FW_ROW(upload, "cuMemcpyHtoDAsync_v2", true),
    FW_ROW(download, "cuMemcpyDtoHAsync_v2", true),
    FW_ROW(copy, "cuMemcpyDtoDAsync_v2", true),
    FW_ROW(copy_rows, "cuMemcpy2DAsync_v2", true),
    FW_ROW(pool_create, "cuMemPoolCreate", false),
    FW_ROW(pool_set, "cuMemPoolSetAttribute", false),
    FW_ROW(pool_trim, "cuMemPoolTrimTo", false),
    FW_ROW(pool_allocate, "cuMemAllocFromPoolAsync", false),
    FW_ROW(pool_free, "cuMemFreeAsync", false),
    FW_ROW(launch_with, "cuLaunchKernelEx", false),
    FW_ROW(is_capturing, "cuStreamIsCapturing", false),
    FW_ROW(capture_mode, "cuThreadExchangeStreamCaptureMode", false),
};
#undef FW_ROW

inline Driver &driver() {
    static Driver table{};
    return table;
}

// Whether there is a driver that can be used; its functions are in `driver()` then.
inline bool find_driver() {
    static std::atomic<bool> found{false};
    static std::mutex mutex;
    if (found.load(std::memory_order_acquire)) return true;
    std::lock_guard<std::mutex> guard(mutex);
    if (found.load()) return true;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    Driver &table = driver();
    for (const DriverRow &row : kDriverRows) {
        void *address = dlsym(library, row.name);
        if (address == nullptr && row.required) return false;
        *reinterpret_cast<void **>(reinterpret_cast<char *>(&table) + row.place) = address;
    }
    int version = 0;
    if (table.init(0) != 0) return false;
    if (table.version(&version) != 0 || version < kLeastVersion) table.launch_with = nullptr;
    found.store(true, std::memory_order_release);
    return true;
}

inline std::string describe(const std::string &what, Result result) {
    const char *text = nullptr;
    if (driver().error_string(result, &text) != 0 || text == nullptr) text = "unknown error";
    return what + ": " + text;
}

// The kernel of machine code, loaded into the current context. What failed, or null; nothing stays loaded then.
inline const char *load_kernel(const void *code, const char *name, int shared, void **module, void **function,
                               Result *result) {
    if ((*result = driver().module_load(module, code)) != 0) {
        *module = nullptr;
        return "loading a kernel";
    }
    const char *what = "finding a kernel in its module";
    *result = driver().module_function(function, *module, name);
    if (*result == 0 && shared > kPlainShared) {
        what = "asking for shared memory";
        *result = driver().function_set(*function, kMaxDynamicShared, shared);
    }
    if (*result == 0) return nullptr;
    driver().module_unload(*module);
    *module = nullptr;
    return what;
}

}  // namespace cuda

// `grid` programs of `threads` threads, with `shared` bytes of dynamic shared memory each. early: before the kernel
// that is last on the stream has ended (the function waits for it itself).
struct DeviceLaunch {
    void *function;
    int64_t grid;
    int32_t device, threads, shared;
    void *stream;
    bool early;
};

// Starts a kernel. `parameters` holds the address of each parameter's value. 0, or the driver's number with the reason.
inline cuda::Result cuda_launch(const DeviceLaunch &one, void **parameters, std::string *error) {
    const cuda::Driver &driver = cuda::driver();
    if (one.grid > INT32_MAX) {
        *error = "a kernel of too many programs";
        return cuda::kInvalidValue;
    }
    unsigned grid = static_cast<unsigned>(one.grid), threads = static_cast<unsigned>(one.threads);
    unsigned shared = static_cast<unsigned>(one.shared);
    auto start = [&] {
        if (!one.early || driver.launch_with == nullptr)
            return driver.launch(one.function, grid, 1, 1, threads, 1, 1, shared, one.stream, parameters, nullptr);
        cuda::Attribute attribute{cuda::kProgrammaticSerialization, 0, {1}};
        cuda::Config config{{grid, 1, 1}, {threads, 1, 1}, shared, one.stream, &attribute, 1};
        return driver.launch_with(&config, one.function, parameters, nullptr);
    };
    cuda::Result result = start();
    if (result == cuda::kInvalidContext) {
        // A thread that has not called the CUDA runtime yet has no context, though the runtime says that its device is
        // this one.
        void *context = nullptr;
        result = driver.retain_context(&context, one.device);  // as the runtime holds it, until the process ends
        if (result == 0) result = driver.set_context(context);
        if (result == 0) result = start();
    }
    if (result != 0) *error = cuda::describe("launching a kernel", result);
    return result;
}

}  // namespace fw
#endif
