// A CUDA driver without a GPU, for tests: device memory is memory of the process, a kernel is a call of the test's own
// function. It counts what is live, and refuses what a real driver refuses: memory that is not its own, calls without a
// context, launches of no kernel, memory that is given back twice.
//
// With FAKE_TORCH: libtorch_cuda.so instead, whose "GPU" is the CPU, and whose stream guards are counted.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

extern "C" {
#define SHOW __attribute__((visibility("default")))

#ifdef FAKE_TORCH

SHOW int fake_guards = 0, fake_most_guards = 0;
SHOW int32_t aoti_torch_device_type_cuda() { return 0; }
SHOW int32_t aoti_torch_create_cuda_stream_guard(void *stream, int32_t, void **guard) {
    *guard = std::malloc(1);
    fake_most_guards = ++fake_guards > fake_most_guards ? fake_guards : fake_most_guards;
    return stream == nullptr;
}
SHOW int32_t aoti_torch_delete_cuda_stream_guard(void *guard) {
    std::free(guard);
    fake_guards--;
    return 0;
}

// Products that a plan calls by their C functions: those of the CPU.
#define FORWARD(name)                                                                                                     \
    int32_t aoti_torch_cpu_##name(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, double, double);                  \
    SHOW int32_t aoti_torch_cuda_##name(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, double x, double y) { \
        return aoti_torch_cpu_##name(a, b, c, d, e, f, x, y);                                                             \
    }
FORWARD(addmm_out)
FORWARD(mm_out)
FORWARD(bmm_out)

#else

using Launch = int (*)(const char *image, const char *name, unsigned grid, unsigned threads, unsigned shared, void **parameters);

SHOW Launch fake_launch = nullptr;
SHOW int fake_arch = 80, fake_fails = 0, fake_allocations = 0;  // fake_fails: the number of the request for memory that fails
SHOW int fake_early = 0, fake_modules = 0, fake_contexts = 0, fake_copied_rows = 0, fake_errors = 0;
SHOW int fake_broken = 0;  // what waiting for a stream gives
SHOW int64_t fake_live = 0, fake_uploaded = 0;

static std::mutex mutex;
static std::map<char *, size_t> memory;
static thread_local int contexts = 0;
struct Module { std::string image; };
struct Function { Module *module; std::string name; int shared; };

static int refused(const char *what) { return std::fprintf(stderr, "the driver refused: %s\n", what), fake_errors++, 1; }
static bool lies_in(const void *start, size_t bytes) {
    auto found = memory.upper_bound(const_cast<char *>(static_cast<const char *>(start)));
    if (found == memory.begin()) return false;
    --found;
    return static_cast<const char *>(start) + bytes <= found->first + found->second;
}
#define ENTER                                         \
    std::lock_guard<std::mutex> guard(mutex);         \
    if (contexts == 0) return refused("a call without a context")

SHOW size_t fake_rest(void *start) {  // bytes from here to the end of its memory
    std::lock_guard<std::mutex> guard(mutex);
    auto found = memory.upper_bound(static_cast<char *>(start));
    if (found == memory.begin() || !lies_in(start, 0)) return 0;
    --found;
    return size_t(found->first + found->second - static_cast<char *>(start));
}

SHOW int cuInit(unsigned) { return 0; }
SHOW int cuGetErrorString(int code, const char **text) {
    *text = code == 2 ? "out of memory" : code == 710 ? "device-side assert triggered" : "refused";
    return 0;
}
SHOW int cuDriverGetVersion(int *version) { return *version = 12080, 0; }
SHOW int cuDeviceGetCount(int *count) { return *count = 1, 0; }
SHOW int cuDeviceGet(int *device, int number) { return *device = number, number != 0; }
SHOW int cuDeviceGetAttribute(int *value, int attribute, int) {
    *value = attribute == 75 ? fake_arch / 10 : fake_arch % 10;
    return attribute != 75 && attribute != 76;
}
SHOW int cuDevicePrimaryCtxRetain(void **context, int) { return *context = &contexts, 0; }
SHOW int cuCtxSetCurrent(void *) { return contexts = 1, 0; }
SHOW int cuCtxPushCurrent_v2(void *) { return contexts++, fake_contexts++, 0; }
SHOW int cuCtxPopCurrent_v2(void **) { return contexts--, fake_contexts--, 0; }
SHOW int cuStreamCreate(void **stream, unsigned flags) { ENTER; return *stream = std::malloc(1), int(flags); }
SHOW int cuCtxSynchronize() { ENTER; return 0; }
SHOW int cuStreamSynchronize(void *) { ENTER; return fake_broken; }
SHOW int cuModuleLoadData(void **module, const void *image) {
    ENTER;
    if (++fake_allocations == fake_fails) return 2;
    if (std::strncmp(static_cast<const char *>(image), "kernel ", 7) != 0) return 200;
    *module = new Module{static_cast<const char *>(image)};
    return fake_modules++, 0;
}
SHOW int cuModuleUnload(void *module) { ENTER; delete static_cast<Module *>(module); return fake_modules--, 0; }
SHOW int cuModuleGetFunction(void **function, void *module, const char *name) {
    ENTER;
    if (++fake_allocations == fake_fails) return 2;
    static std::vector<Function *> all;
    all.push_back(new Function{static_cast<Module *>(module), name, 48 * 1024});
    return *function = all.back(), 0;
}
SHOW int cuFuncSetAttribute(void *function, int attribute, int value) {
    ENTER;
    if (++fake_allocations == fake_fails) return 2;
    static_cast<Function *>(function)->shared = value;
    return attribute != 8;
}
SHOW int cuFuncGetAttribute(int *value, int, void *) { return *value = 0, ++fake_allocations == fake_fails ? 2 : 0; }
static int start(void *function, unsigned grid, unsigned threads, unsigned shared, void **parameters) {
    if (contexts == 0) return refused("a launch without a context");
    if (++fake_allocations == fake_fails) return 2;
    Function *one = static_cast<Function *>(function);
    if (one == nullptr || grid == 0 || threads == 0 || threads % 32 != 0 || int(shared) > one->shared) return refused("launch");
    int result = fake_launch(one->module->image.c_str(), one->name.c_str(), grid, threads, shared, parameters);
    if (result != 0) fake_broken = result;
    return 0;
}
SHOW int cuLaunchKernel(void *function, unsigned gx, unsigned, unsigned, unsigned bx, unsigned, unsigned, unsigned shared, void *,
                        void **parameters, void **) {
    return start(function, gx, bx, shared, parameters);
}
struct Config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; };
SHOW int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **) {
    fake_early++;
    return start(function, config->grid[0], config->block[0], config->shared, parameters);
}
SHOW int fake_recorded = 0;  // the number of the stream that is recorded into a graph
static int capture_mode = 0;
SHOW int cuStreamIsCapturing(void *stream, int *status) {
    return *status = fake_recorded != 0 && stream == reinterpret_cast<void *>(intptr_t(fake_recorded)), 0;
}
SHOW int cuThreadExchangeStreamCaptureMode(int *mode) { return std::swap(*mode, capture_mode), 0; }
SHOW int cuMemAlloc_v2(void **made, size_t bytes) {
    ENTER;
    if (fake_recorded != 0 && capture_mode != 2) return refused("memory while a stream is recorded");
    if (++fake_allocations == fake_fails) return 2;
    *made = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
    std::memset(*made, 0x7b, bytes);  // what was there before
    memory[static_cast<char *>(*made)] = bytes;
    return fake_live++, 0;
}
SHOW int cuMemFree_v2(void *start) {
    ENTER;
    if (memory.erase(static_cast<char *>(start)) == 0) return refused("free");
    std::free(start);
    return fake_live--, 0;
}
#ifndef WITHOUT_POOLS
SHOW int cuMemPoolCreate(void **pool, const void *) { ENTER; return *pool = &memory, 0; }
SHOW int cuMemPoolSetAttribute(void *, int, void *) { ENTER; return 0; }
SHOW int cuMemPoolTrimTo(void *, size_t) { ENTER; return 0; }
SHOW int cuMemAllocFromPoolAsync(void **made, size_t bytes, void *pool, void *stream) {
    return stream == nullptr || pool != &memory ? refused("pool") : cuMemAlloc_v2(made, bytes);
}
SHOW int cuMemFreeAsync(void *start, void *stream) { return stream == nullptr ? refused("pool") : cuMemFree_v2(start); }
#endif
SHOW int cuMemcpyHtoDAsync_v2(void *target, const void *source, size_t bytes, void *) {
    ENTER;
    if (!lies_in(target, bytes) || lies_in(source, 1)) return refused("upload");
    std::memcpy(target, source, bytes);
    return fake_uploaded += int64_t(bytes), 0;
}
SHOW int cuMemcpyDtoHAsync_v2(void *target, const void *source, size_t bytes, void *) {
    ENTER;
    if (!lies_in(source, bytes) || lies_in(target, 1)) return refused("download");
    return std::memcpy(target, source, bytes), 0;
}
SHOW int cuMemcpyDtoDAsync_v2(void *target, void *source, size_t bytes, void *) {
    ENTER;
    if (!lies_in(target, bytes)) return refused("copy");
    return std::memcpy(target, source, bytes), 0;
}
struct Side { size_t x, y; int kind; void *host, *device, *array; size_t pitch; };
struct Rows { Side source, target; size_t width, height; };
SHOW int cuMemcpy2DAsync_v2(const Rows *rows, void *) {
    ENTER;
    const Side &from = rows->source, &to = rows->target;
    size_t last = rows->height - 1;
    if (from.kind != 2 || to.kind != 2 || from.pitch < rows->width || to.pitch < rows->width ||
        !lies_in(to.device, last * to.pitch + rows->width))
        return refused("rows");
    for (size_t i = 0; i < rows->height; i++)
        std::memcpy(static_cast<char *>(to.device) + i * to.pitch, static_cast<char *>(from.device) + i * from.pitch, rows->width);
    return fake_copied_rows++, 0;
}

#endif
}
