// Temporary memory of call plans: a few blocks that all plans share, grown to the largest need seen.
// Takes a size in bytes; gives an idle block of at least that size. Always holds: the list of blocks is touched with
// the GIL held; a busy block never moves. A plan that runs inside another one's Python step finds that one's block busy
// and gets another.
#include <stdlib.h>
#include <sys/mman.h>

#include "plan.h"

namespace fw {

namespace {

constexpr size_t kAlignment = 64, kHugePage = size_t(2) << 20;
std::vector<Block *> blocks;  // most recently used last

void free_memory(Block *block) {
    if (block->base == nullptr) return;
    if (block->mapped)
        munmap(block->base, block->size);
    else
        free(block->base);
    block->base = nullptr;
    block->size = 0;
}

// Large blocks start on a huge page and ask for huge pages: fewer TLB misses and page faults.
bool map_large(Block *block, size_t size) {
    size = (size + kHugePage - 1) / kHugePage * kHugePage;
    size_t reserved = size + kHugePage;
    void *memory = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    char *start = static_cast<char *>(memory);
    size_t head = (kHugePage - reinterpret_cast<uintptr_t>(start) % kHugePage) % kHugePage;
    if (head != 0) munmap(start, head);
    if (kHugePage - head != 0) munmap(start + head + size, kHugePage - head);
    block->base = start + head;
    block->size = size;
    block->mapped = true;
#ifdef MADV_HUGEPAGE
    madvise(block->base, size, MADV_HUGEPAGE);
#endif
    return true;
}

bool allocate_memory(Block *block, size_t size) {
    if (size >= kHugePage) return map_large(block, size);
    // Up to the next power of two: dynamic shapes that grow little by little do not reallocate at every call.
    size_t rounded = 4096;
    while (rounded < size) rounded *= 2;
    void *memory = nullptr;
    if (posix_memalign(&memory, kAlignment, rounded) != 0) return false;
    block->base = static_cast<char *>(memory);
    block->size = rounded;
    block->mapped = false;
    return true;
}

PyObject *release_memory(PyObject *, PyObject *) {
    std::vector<Block *> busy;
    size_t freed = 0;
    for (Block *block : blocks) {
        if (block->busy) {
            busy.push_back(block);
            continue;
        }
        freed += block->size;
        free_memory(block);
        delete block;
    }
    blocks.swap(busy);
    return PyLong_FromSize_t(freed);
}

PyObject *memory_held(PyObject *, PyObject *) {
    size_t held = 0;
    for (Block *block : blocks) held += block->size;
    return PyLong_FromSize_t(held);
}

PyMethodDef functions[] = {
    {"release_memory", release_memory, METH_NOARGS,
     "Free the temporary memory that no running plan uses; gives the number of bytes freed."},
    {"memory_held", memory_held, METH_NOARGS, "Bytes of temporary memory held by call plans."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

Block *acquire_block(size_t size, size_t limit) {
    Block *found = nullptr;
    bool over = size > limit;
    if (!over) {
        for (size_t i = blocks.size(); i-- > 0;) {
            if (blocks[i]->busy) continue;
            if (found == nullptr || blocks[i]->size >= size) found = blocks[i];
            if (found->size >= size) break;
        }
    }
    if (found == nullptr) {
        make_room(blocks);
        found = new Block();
        found->kept = !over;
        blocks.push_back(found);
    }
    if (found->size < size || found->base == nullptr) {
        free_memory(found);
        if (!allocate_memory(found, size)) {
            for (size_t i = 0; i < blocks.size(); i++)
                if (blocks[i] == found) blocks.erase(blocks.begin() + i);
            delete found;
            PyErr_NoMemory();
            return nullptr;
        }
    }
    found->busy = true;
    return found;
}

void release_block(Block *block) {
    block->busy = false;
    if (blocks.back() == block && block->kept) return;
    for (size_t i = 0; i < blocks.size(); i++) {
        if (blocks[i] != block) continue;
        blocks.erase(blocks.begin() + i);
        break;
    }
    if (block->kept) {
        blocks.push_back(block);
    } else {
        free_memory(block);
        delete block;
    }
}

int memory_init(PyObject *module) { return PyModule_AddFunctions(module, functions); }

}  // namespace fw
