// Loaded in front of the C library (LD_PRELOAD): fails the n-th request for memory that comes from code between two
// addresses; `aligned`: only requests of posix_memalign count, which is what PyTorch's allocator makes.
#include <dlfcn.h>
#include <errno.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

extern "C" void *__libc_malloc(size_t);
extern "C" void *__libc_calloc(size_t, size_t);
extern "C" void *__libc_realloc(void *, size_t);
extern "C" void *__libc_memalign(size_t, size_t);

namespace {

long left = -1, failed = 0, only_aligned = 0;
uintptr_t first = 0, last = 0;

bool fails(void *caller, bool aligned = false) {
    if (only_aligned && !aligned) return false;
    uintptr_t at = reinterpret_cast<uintptr_t>(caller);
    if (left < 0 || at < first || at >= last || left-- != 0) return false;
    errno = ENOMEM;
    failed = 1;
    return true;
}

void *made(void *caller, size_t size) {
    void *memory = fails(caller) ? nullptr : __libc_malloc(size ? size : 1);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

#define CALLER __builtin_return_address(0)
extern "C" {
void fail_request(long number, uintptr_t from, uintptr_t to, long aligned) {
    left = number, first = from, last = to, failed = 0, only_aligned = aligned;
}
long stop_failing() { return left = -1, failed; }
void *malloc(size_t size) { return fails(CALLER) ? nullptr : __libc_malloc(size); }
void *calloc(size_t count, size_t size) { return fails(CALLER) ? nullptr : __libc_calloc(count, size); }
void *realloc(void *old, size_t size) { return fails(CALLER) ? nullptr : __libc_realloc(old, size); }
void *aligned_alloc(size_t to, size_t size) { return fails(CALLER) ? nullptr : __libc_memalign(to, size); }
int posix_memalign(void **memory, size_t to, size_t size) {
    if (fails(CALLER, true)) return ENOMEM;
    *memory = __libc_memalign(to, size);
    return *memory == nullptr ? ENOMEM : 0;
}
void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    static auto next = reinterpret_cast<decltype(&mmap)>(dlsym(RTLD_NEXT, "mmap"));
    return fails(CALLER) ? MAP_FAILED : next(address, size, protection, flags, file, offset);
}
}
void *operator new(size_t size) { return made(CALLER, size); }
void *operator new[](size_t size) { return made(CALLER, size); }
void operator delete(void *memory) noexcept { free(memory); }
void operator delete[](void *memory) noexcept { free(memory); }
void operator delete(void *memory, size_t) noexcept { free(memory); }
void operator delete[](void *memory, size_t) noexcept { free(memory); }
