// Inside of the guard program: instructions and what a check works on. Shared by guards.cpp (running) and
// guard_program.cpp (building).
#ifndef FUSEWRIGHT_GUARD_CODE_H
#define FUSEWRIGHT_GUARD_CODE_H

#include <cstdint>
#include <vector>

#include "native.h"
#include "tensors.h"

namespace fw {

// The order is known to capture/guards.py through the module's OPCODES tuple.
#define FW_OPCODES(X)                                                                                              \
    X(LOCAL)                                                                                                       \
    X(FUNCTION) X(CONSTANT) X(WEAK_CONSTANT) X(GLOBALS) X(BUILTINS) X(CLOSURE) X(TYPE_OF) X(INSTANCE_DICT) X(ITEM) \
        X(IDENTITY_ITEM) X(GLOBAL_ITEM) X(DICT_KEY) X(REFERENT) X(COMPUTED) X(ATTRIBUTE) X(SIZE_OF) X(STRIDE_OF)   \
            X(INT_OF) X(BLOCK) X(BLOCK_END) X(TYPE) X(IS) X(WEAK_IS) X(EQUALS) X(LENGTH) X(KEYS) X(ABSENT)         \
                X(BOUND) X(UNBOUND) X(TENSOR) X(TYPE_BLOCK) X(TYPE_ATTRIBUTE) X(SAME) X(DIFFERENT) X(NO_OVERLAP)   \
                    X(SIZE) X(STATE) X(CALL)
enum Op : uint16_t {
#define FW_ENUM(name) OP_##name,
    FW_OPCODES(FW_ENUM)
#undef FW_ENUM
};
const char *const op_names[] = {
#define FW_NAME(name) #name,
    FW_OPCODES(FW_NAME)
#undef FW_NAME
};
constexpr int kOpCount = sizeof op_names / sizeof *op_names;

#define FW_RELATIONS(X)                                                                                            \
    X(CONST)                                                                                                       \
    X(SYM) X(ADD) X(SUB) X(MUL) X(FLOORDIV) X(MOD) X(MIN) X(MAX) X(NEG) X(EQ) X(NE) X(LT) X(LE) X(GT) X(GE) X(AND) \
        X(OR) X(NOT)
enum RelationOp : int64_t {
#define FW_ENUM(name) REL_##name,
    FW_RELATIONS(FW_ENUM)
#undef FW_ENUM
};
const char *const relation_names[] = {
#define FW_NAME(name) #name,
    FW_RELATIONS(FW_NAME)
#undef FW_NAME
};
constexpr int kRelationCount = sizeof relation_names / sizeof *relation_names;
constexpr int kRelationDepth = 64;
constexpr int64_t kAny = INT64_MIN;  // a symbolic dimension in a tensor guard

// One instruction: `slot` is written by sources and read by guards. `skip` is where a block continues when it is
// skipped; of a BLOCK_END, the instruction of its BLOCK.
struct Instruction {
    uint16_t op;
    bool optional;  // a source that may be unbound: its slot is then NULL
    int32_t slot, base, arg, skip;
    PyObject *object;  // owned; NULL when unused
    int32_t detail;    // index into tensors, groups or relations
};

// The object of an instruction that holds it by a weak reference; NULL once it is dead.
inline PyObject **weak_place(const Instruction &in) {
    return &reinterpret_cast<PyWeakReference *>(in.object)->wr_object;
}
inline PyObject *weak_object(const Instruction &in) {
    PyObject *object = *weak_place(in);
    return object == Py_None ? nullptr : object;
}

struct TensorCheck {
    PyTypeObject *cls;  // kept alive by the instruction's object
    uint64_t key_sets[2];
    int dtype, device_index, requires_grad, dim;  // device_index -2 and requires_grad -1: not looked at
    std::vector<int64_t> sizes, strides;          // kAny: symbolic
    PyObject *slow;                               // callable(tensor) -> bool, borrowed from the instruction's object
    bool native;
};

struct Group {  // slots that are compared with each other
    std::vector<int32_t> slots;
    std::vector<PyObject *>
        passed;  // compared only, never followed: the pointers that were pairwise different last time
};

struct Input {
    bool is_int;
    int32_t index;
};

// What one check works on.
struct Frame {
    std::vector<PyObject *> slots;
    std::vector<int64_t> ints;
    std::vector<uint64_t> versions;  // one an instruction: of BLOCK and TYPE_BLOCK, the version last passed with
    std::vector<uint64_t> pending;   // of BLOCK: the dict's versions (two for globals) when the block was entered
    std::vector<PyObject *> owned;
    int pinned = 0;
};

// One step of a shortcut (guard_words.cpp). Half of what a check costs is reading these, so they are kept short: the
// kind stands in the bits of `at` that an aligned address leaves.
enum WordKind : uint64_t {
    kWord,          // the eight bytes at this address are `expected`
    kDtypeWord,     // of a tensor: those that hold its dtype
    kLocalWord,     // the argument of this number is the object `expected`
    kFunctionWord,  // the function is
    kRangeWord,     // the instructions from the upper half of `expected` up to its lower half pass
};
struct Word {
    uint64_t at, expected;

    static constexpr uint64_t kKinds = 7;
    WordKind kind() const { return static_cast<WordKind>(at & kKinds); }
    const uint64_t *place() const { return reinterpret_cast<const uint64_t *>(at & ~kKinds); }
    int32_t number() const { return static_cast<int32_t>(at >> 3); }
    size_t from() const { return expected >> 32; }
    size_t to() const { return expected & 0xFFFFFFFF; }

    static Word memory(const uint64_t *place, uint64_t expected, WordKind kind) {
        return {reinterpret_cast<uint64_t>(place) | kind, expected};
    }
    static Word local(int32_t number, PyObject *object) {
        return {static_cast<uint64_t>(number) << 3 | kLocalWord, reinterpret_cast<uint64_t>(object)};
    }
    static Word function(PyObject *object) { return {kFunctionWord, reinterpret_cast<uint64_t>(object)}; }
    static Word range(size_t from, size_t to) { return {kRangeWord, static_cast<uint64_t>(from) << 32 | to}; }
};

struct Code {
    std::vector<Instruction> instructions;
    std::vector<TensorCheck> tensors;
    std::vector<Group> groups;
    std::vector<std::vector<int64_t>> relations;
    std::vector<State> states;
    std::vector<Input> inputs;
    int slots = 0, ints = 0;
    Frame frame;
    std::vector<Word> words;      // empty: there is no shortcut
    int wait = 2, penalty = 2;    // passes until one is made; how many the next failure of one that did not last costs
    int lasted = 0;               // how often the present one has passed
    bool busy = false;
};

struct GuardProgram {
    PyObject_HEAD
    Code *code;
    PyObject *state_fallback;  // callable(expected GlobalState) -> bool
};

struct Arguments {
    PyObject *const *locals;
    Py_ssize_t n;
    PyObject *function;
};

void resize_frame(const Code &code, Frame *frame);
// Gives back what the check has taken references to.
void unpin(Frame &frame);
// The index of the first instruction that fails, or -1.
Py_ssize_t run_guards(const GuardProgram *self, Code &code, Frame &frame, const Arguments &arguments);
// The same for the instructions from `pc` to `end`.
Py_ssize_t run_range(const GuardProgram *self, Code &code, Frame &frame, const Arguments &arguments, size_t pc,
                     size_t end);
// Takes the shortcut: -1 when it passes, the index of an instruction that fails, or kChanged: a word differs, which
// says nothing.
constexpr Py_ssize_t kChanged = -2;
Py_ssize_t check_words(const GuardProgram *self, Code &code, Frame &frame, const Arguments &arguments);
// Makes the shortcut from a frame that run_guards has just passed on (before `unpin`).
void learn_words(Code &code, const Frame &frame, const Arguments &arguments);
// As run_guards, on the program's own frame if it is free; when it passes, inputs (unless NULL) gets new references.
Py_ssize_t check_guards(GuardProgram *self, const Arguments &arguments, PyObject **inputs);

}  // namespace fw
#endif
