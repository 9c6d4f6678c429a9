// GuardProgram: a flat program that decides whether a captured frame may be reused, and finds the graph's inputs.
//
// Takes instructions made by capture/guards.py (sources evaluated into slots, guards over slots) and, at each check, a frame's locals and
// function. Gives yes or no and the inputs. Instructions come in an order in which a source stands after its base's guards.
//
// Always holds:
// - Slots are borrowed pointers. They stay valid during a check because nothing runs Python code; before an instruction that might,
//   `pin` takes references to every slot evaluated so far.
// - A block holds the reads from one dict (and the guards that depend on nothing but which objects were read). While the dict's version is the
//   one the block last passed with, its slots hold what the dict holds, and the block is skipped. A version that differs is no failure: the
//   block is run, and remembers the new version if it passes.
// - A check that meets another check of the same program in progress (recursion, another thread) works on slots of its own.
#include "guards.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "tensors.h"
#include "values.h"

namespace fw {
namespace {

// The order is known to capture/guards.py through the module's OPCODES tuple.
#define FW_OPCODES(X)                                                                                                                     \
    X(LOCAL) X(FUNCTION) X(CONSTANT) X(GLOBALS) X(BUILTINS) X(CLOSURE) X(TYPE_OF) X(INSTANCE_DICT) X(ITEM) X(IDENTITY_ITEM) X(GLOBAL_ITEM) \
    X(DICT_KEY) X(ATTRIBUTE) X(SIZE_OF) X(STRIDE_OF) X(INT_OF) X(BLOCK) X(BLOCK_END) X(TYPE) X(IS) X(EQUALS) X(LENGTH) X(KEYS) X(ABSENT)   \
    X(BOUND) X(UNBOUND) X(TENSOR) X(TYPE_BLOCK) X(TYPE_ATTRIBUTE) X(SAME) X(DIFFERENT) X(NO_OVERLAP) X(SIZE) X(STATE) X(CALL)
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

#define FW_RELATIONS(X) \
    X(CONST) X(SYM) X(ADD) X(SUB) X(MUL) X(FLOORDIV) X(MOD) X(MIN) X(MAX) X(NEG) X(EQ) X(NE) X(LT) X(LE) X(GT) X(GE) X(AND) X(OR) X(NOT)
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

// One instruction: `slot` is written by sources and read by guards. `skip` is where a block continues when it is skipped; of a BLOCK_END, the
// instruction of its BLOCK.
struct Instruction {
    uint16_t op;
    bool optional;  // a source that may be unbound: its slot is then NULL
    int32_t slot, base, arg, skip;
    PyObject *object;  // owned; NULL when unused
    int32_t detail;    // index into tensors, groups or relations
};

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
    std::vector<PyObject *> passed;  // compared only, never followed: the pointers that were pairwise different last time
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

struct Code {
    std::vector<Instruction> instructions;
    std::vector<TensorCheck> tensors;
    std::vector<Group> groups;
    std::vector<std::vector<int64_t>> relations;
    std::vector<State> states;
    std::vector<Input> inputs;
    int slots = 0, ints = 0;
    Frame frame;
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

void resize_frame(const Code &code, Frame *frame) {
    frame->slots.assign(code.slots, nullptr);
    frame->ints.assign(code.ints, 0);
    frame->versions.assign(code.instructions.size(), 0);
    frame->pending.assign(2 * code.instructions.size(), 0);
}

// Takes references to the slots below `upto`: from here on Python code may run.
void pin(Frame &frame, int upto) {
    for (; frame.pinned < upto; frame.pinned++) Py_XINCREF(frame.slots[frame.pinned]);
}

void unpin(Frame &frame) {
    int pinned = frame.pinned;
    frame.pinned = 0;
    for (int i = 0; i < pinned; i++) Py_XDECREF(frame.slots[i]);
    if (frame.owned.empty()) return;
    std::vector<PyObject *> owned;
    owned.swap(frame.owned);
    for (PyObject *object : owned) Py_DECREF(object);
}

PyObject *own(Frame &frame, PyObject *object) {
    if (object == nullptr)
        PyErr_Clear();
    else
        frame.owned.push_back(object);
    return object;
}

PyObject *dict_lookup(Frame &frame, PyObject *dict, PyObject *key, int slot) {
    if (lookup_is_plain(dict, key)) {
        PyObject *value = PyDict_GetItemWithError(dict, key);
        if (value == nullptr && PyErr_Occurred()) PyErr_Clear();
        return value;
    }
    pin(frame, slot);  // a key's own __eq__ may run
    Py_INCREF(dict);
    PyObject *value = PyDict_GetItemWithError(dict, key);
    if (value == nullptr)
        PyErr_Clear();
    else
        own(frame, Py_NewRef(value));
    Py_DECREF(dict);
    return value;
}

PyObject *read_item(Frame &frame, PyObject *base, PyObject *key, int64_t index, int slot) {
    if (PyDict_Check(base)) return dict_lookup(frame, base, key, slot);
    Py_ssize_t n = builtin_length(base);
    if (index == kAny || n < 0) return nullptr;
    if (index < 0) index += n;
    if (index < 0 || index >= n) return nullptr;
    if (PyTuple_Check(base)) return PyTuple_GET_ITEM(base, index);
    if (PyList_Check(base)) return PyList_GET_ITEM(base, index);
    if (PyObject *item = computed_item(base, index)) return own(frame, item);
    return nullptr;
}

// Tensor metadata through the base class's own getters, for tensors that are not read natively.
bool slow_extent(PyObject *tensor, const char *method, int dim, int64_t *value) {
    PyObject *result = PyObject_CallMethod(tensor, method, "i", dim);
    bool ok = result != nullptr && PyLong_CheckExact(result);
    if (ok) *value = PyLong_AsLongLong(result);
    ok = ok && !PyErr_Occurred();
    PyErr_Clear();
    Py_XDECREF(result);
    return ok;
}

bool read_extent(Frame &frame, PyObject *base, int dim, bool stride, bool native, int n_slots, int64_t *value) {
    if (base == nullptr) return false;
    // `native`: a tensor guard has checked the key set, so the sizes stand in the TensorImpl.
    if (native && layout.ready && is_tensor(base)) {
        const char *impl = tensor_impl(base);
        if (impl == nullptr || dim < 0 || dim >= tensor_dim(impl)) return false;
        *value = (stride ? tensor_strides(impl) : tensor_sizes(impl))[dim];
        return true;
    }
    pin(frame, n_slots);
    return slow_extent(base, stride ? "stride" : "size", dim, value);
}

bool check_tensor(const TensorCheck &check, PyObject *tensor) {
    if (Py_TYPE(tensor) != check.cls) return false;
    const char *impl = tensor_impl(tensor);
    if (impl == nullptr) return false;
    uint64_t keys = tensor_key_set(impl);
    if (keys != check.key_sets[0] && keys != check.key_sets[1]) return false;
    if (tensor_dtype(impl) != check.dtype || tensor_dim(impl) != check.dim) return false;
    const int64_t *sizes = tensor_sizes(impl), *strides = tensor_strides(impl);
    for (int i = 0; i < check.dim; i++) {
        if (check.sizes[i] != sizes[i] && check.sizes[i] != kAny) return false;
        if (check.strides[i] != strides[i] && check.strides[i] != kAny) return false;
    }
    if (check.requires_grad >= 0 && layout.requires_grad(impl) != (check.requires_grad != 0)) return false;
    return check.device_index == -2 || tensor_device_index(impl) == check.device_index;
}

bool call_is_true(PyObject *callable, PyObject *argument) {
    PyObject *result = PyObject_CallOneArg(callable, argument);
    int truth = result == nullptr ? -1 : PyObject_IsTrue(result);
    Py_XDECREF(result);
    if (truth < 0) PyErr_Clear();
    return truth == 1;
}

bool all_different(const Frame &frame, Group &group) {
    size_t n = group.slots.size();
    bool unchanged = group.passed.size() == n;
    for (size_t i = 0; unchanged && i < n; i++) unchanged = group.passed[i] == frame.slots[group.slots[i]];
    if (unchanged) return true;
    std::vector<PyObject *> objects(n);
    for (size_t i = 0; i < n; i++) objects[i] = frame.slots[group.slots[i]];
    std::vector<PyObject *> sorted = objects;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return false;
    group.passed.swap(objects);
    return true;
}

bool no_overlap(const Frame &frame, const Group &group) {
    std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
    ranges.reserve(group.slots.size());
    for (int32_t slot : group.slots) {
        PyObject *tensor = frame.slots[slot];
        uintptr_t begin, end;
        if (tensor == nullptr || !is_tensor(tensor) || tensor_impl(tensor) == nullptr || !tensor_storage_range(tensor_impl(tensor), &begin, &end)) return false;
        if (begin != 0 && end > begin) ranges.emplace_back(begin, end);
    }
    if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
    for (size_t i = 1; i < ranges.size(); i++)
        if (ranges[i].first < ranges[i - 1].second) return false;
    return true;
}

bool floor_divide(int64_t a, int64_t b, int64_t *quotient, int64_t *remainder) {
    if (b == 0 || (a == INT64_MIN && b == -1)) return false;
    *quotient = a / b;
    *remainder = a % b;
    if (*remainder != 0 && (*remainder < 0) != (b < 0)) {
        *quotient -= 1;
        *remainder += b;
    }
    return true;
}

// Postfix code over int64; overflow and division by zero make the relation false.
bool relation_holds(const std::vector<int64_t> &code, const std::vector<int64_t> &symbols) {
    int64_t stack[kRelationDepth], quotient, remainder;
    int top = 0;
    for (size_t at = 0; at < code.size(); at++) {
        int64_t op = code[at];
        if (op == REL_CONST || op == REL_SYM) {
            int64_t operand = code[++at];
            stack[top++] = op == REL_CONST ? operand : symbols[operand];
            continue;
        }
        int64_t b = stack[--top];
        if (op == REL_NEG || op == REL_NOT) {
            if (op == REL_NEG && b == INT64_MIN) return false;
            stack[top++] = op == REL_NEG ? -b : !b;
            continue;
        }
        int64_t a = stack[--top], result = 0;
        switch (op) {
            case REL_ADD: if (__builtin_add_overflow(a, b, &result)) return false; break;
            case REL_SUB: if (__builtin_sub_overflow(a, b, &result)) return false; break;
            case REL_MUL: if (__builtin_mul_overflow(a, b, &result)) return false; break;
            case REL_FLOORDIV: if (!floor_divide(a, b, &quotient, &remainder)) return false; result = quotient; break;
            case REL_MOD: if (!floor_divide(a, b, &quotient, &remainder)) return false; result = remainder; break;
            case REL_MIN: result = std::min(a, b); break;
            case REL_MAX: result = std::max(a, b); break;
            case REL_EQ: result = a == b; break;
            case REL_NE: result = a != b; break;
            case REL_LT: result = a < b; break;
            case REL_LE: result = a <= b; break;
            case REL_GT: result = a > b; break;
            case REL_GE: result = a >= b; break;
            case REL_AND: result = a && b; break;
            case REL_OR: result = a || b; break;
        }
        stack[top++] = result;
    }
    return stack[0] != 0;
}

bool check_state(const GuardProgram *self, const Instruction &in, Frame &frame, const State &expected) {
    State state;
    // Modes on the torch-function stack include the default device, which only Python knows by name.
    if (state_ready() && in.arg && read_state(&state)) return state_equal(state, expected);
    if (self->state_fallback == nullptr || self->state_fallback == Py_None) return false;
    pin(frame, in.base);
    return call_is_true(self->state_fallback, in.object);
}

// Object of the source `in`, or NULL when there is none; borrowed or owned by the frame.
PyObject *evaluate(const Instruction &in, Frame &frame, const Arguments &arguments) {
    if (in.op >= OP_TYPE_OF && frame.slots[in.base] == nullptr) return nullptr;
    switch (in.op) {
        case OP_LOCAL: return in.arg < arguments.n ? arguments.locals[in.arg] : nullptr;
        case OP_FUNCTION: return arguments.function;
        case OP_CONSTANT: return in.object;
        case OP_GLOBALS: return reinterpret_cast<PyFunctionObject *>(arguments.function)->func_globals;
        case OP_BUILTINS: return reinterpret_cast<PyFunctionObject *>(arguments.function)->func_builtins;
        case OP_CLOSURE: {
            PyObject *cells = reinterpret_cast<PyFunctionObject *>(arguments.function)->func_closure;
            return cells != nullptr && in.arg < PyTuple_GET_SIZE(cells) ? PyCell_GET(PyTuple_GET_ITEM(cells, in.arg)) : nullptr;
        }
        case OP_TYPE_OF: return reinterpret_cast<PyObject *>(Py_TYPE(frame.slots[in.base]));
        case OP_INSTANCE_DICT: return instance_dict(frame.slots[in.base]);
        case OP_ITEM: return read_item(frame, frame.slots[in.base], in.object, in.arg == INT32_MIN ? kAny : in.arg, in.slot);
        case OP_IDENTITY_ITEM: return PyDict_Check(frame.slots[in.base]) ? dict_find_identical(frame.slots[in.base], in.object) : nullptr;
        case OP_GLOBAL_ITEM: {
            PyObject *value = dict_lookup(frame, frame.slots[in.base], in.object, in.slot);
            PyObject *builtins = frame.slots[in.arg];
            return value != nullptr || builtins == nullptr || !PyDict_Check(builtins) ? value : dict_lookup(frame, builtins, in.object, in.slot);
        }
        case OP_DICT_KEY: return PyDict_Check(frame.slots[in.base]) ? dict_key_at(frame.slots[in.base], in.arg) : nullptr;
        case OP_ATTRIBUTE:
            if (in.arg != kGeneric) return read_field(frame.slots[in.base], in.arg);
            pin(frame, in.slot);
            return own(frame, PyObject_GetAttr(frame.slots[in.base], in.object));
    }
    return nullptr;
}

// Whether the block at `pc` may be skipped; otherwise notes the versions under which it is entered.
bool enter_block(const Instruction &in, size_t pc, Frame &frame) {
    PyObject *dict = frame.slots[in.base];
    uint64_t version = dict != nullptr && PyDict_Check(dict) ? dict_version(dict) : 0, second = 0;
    if (in.arg >= 0) {  // globals, then builtins
        PyObject *builtins = frame.slots[in.arg];
        second = builtins != nullptr && PyDict_Check(builtins) ? dict_version(builtins) : 0;
        if (second == 0) version = 0;
    }
    uint64_t *passed = &frame.versions[pc];
    if (version != 0 && *passed == version && (in.arg < 0 || frame.versions[in.skip - 1] == second)) return true;
    *passed = 0;
    frame.pending[2 * pc] = version;
    frame.pending[2 * pc + 1] = second;
    return false;
}

// The index of the first instruction that fails, or -1.
Py_ssize_t run(const GuardProgram *self, Code &code, Frame &frame, const Arguments &arguments) {
    const Instruction *first = code.instructions.data();
    const size_t n = code.instructions.size();
    size_t pc = 0;
    while (pc < n) {
        const Instruction &in = first[pc];
        PyObject *subject;
        bool passes;
        switch (in.op) {
            case OP_SIZE_OF:
            case OP_STRIDE_OF:
                passes = read_extent(frame, frame.slots[in.base], in.arg, in.op == OP_STRIDE_OF, in.optional, code.slots, &frame.ints[in.slot]);
                break;
            case OP_INT_OF:
                subject = frame.slots[in.base];
                passes = subject != nullptr && PyLong_CheckExact(subject);
                if (passes) {
                    int overflow;
                    frame.ints[in.slot] = PyLong_AsLongLongAndOverflow(subject, &overflow);
                    passes = overflow == 0;
                }
                break;
            case OP_BLOCK:
                if (enter_block(in, pc, frame)) {
                    pc = in.skip;
                    continue;
                }
                passes = true;
                break;
            case OP_BLOCK_END:
                frame.versions[in.skip] = frame.pending[2 * in.skip];
                frame.versions[pc] = frame.pending[2 * in.skip + 1];
                passes = true;
                break;
            case OP_TYPE:
                subject = frame.slots[in.slot];
                passes = subject != nullptr && reinterpret_cast<PyObject *>(Py_TYPE(subject)) == in.object;
                break;
            case OP_IS: passes = frame.slots[in.slot] == in.object; break;
            case OP_EQUALS:
                subject = frame.slots[in.slot];
                passes = subject != nullptr && (subject == in.object || constant_equal(in.object, subject));
                break;
            case OP_LENGTH:
                subject = frame.slots[in.slot];
                passes = subject != nullptr && builtin_length(subject) == in.arg;
                break;
            case OP_KEYS:
                subject = frame.slots[in.slot];
                passes = subject != nullptr && dict_has_keys(subject, in.object);
                break;
            case OP_ABSENT:
                subject = frame.slots[in.slot];
                passes = subject != nullptr && PyDict_Check(subject) &&
                         (in.arg ? dict_find_identical(subject, in.object) : dict_lookup(frame, subject, in.object, in.slot + 1)) == nullptr;
                break;
            case OP_BOUND: passes = frame.slots[in.slot] != nullptr; break;
            case OP_UNBOUND: passes = frame.slots[in.slot] == nullptr; break;
            case OP_TENSOR: {
                const TensorCheck &check = code.tensors[in.detail];
                subject = frame.slots[in.slot];
                if (subject == nullptr) {
                    passes = false;
                } else if (check.native && layout.ready) {
                    passes = check_tensor(check, subject);
                } else {
                    pin(frame, in.slot + 1);
                    passes = call_is_true(check.slow, subject);
                }
                break;
            }
            case OP_TYPE_BLOCK: {
                unsigned int version = type_version(reinterpret_cast<PyTypeObject *>(in.object));
                if (version != 0 && frame.versions[pc] == version) {
                    pc = in.skip;
                    continue;
                }
                frame.versions[pc] = 0;
                passes = true;
                break;
            }
            case OP_TYPE_ATTRIBUTE: {  // object: (type, name, value or nothing)
                PyTypeObject *type = reinterpret_cast<PyTypeObject *>(PyTuple_GET_ITEM(in.object, 0));
                PyObject *found = _PyType_Lookup(type, PyTuple_GET_ITEM(in.object, 1));
                passes = found == (PyTuple_GET_SIZE(in.object) > 2 ? PyTuple_GET_ITEM(in.object, 2) : nullptr);
                // The last attribute of its type's block: the lookup has given the type a version.
                if (passes && in.skip >= 0) frame.versions[in.skip] = type_version(type);
                break;
            }
            case OP_SAME: passes = frame.slots[in.slot] != nullptr && frame.slots[in.slot] == frame.slots[in.base]; break;
            case OP_DIFFERENT: passes = all_different(frame, code.groups[in.detail]); break;
            case OP_NO_OVERLAP:
                if (layout.storage_ready) {
                    passes = no_overlap(frame, code.groups[in.detail]);
                } else {
                    pin(frame, code.slots);
                    PyObject *tensors = PyTuple_New(code.groups[in.detail].slots.size());
                    passes = tensors != nullptr;
                    for (size_t i = 0; passes && i < code.groups[in.detail].slots.size(); i++) {
                        subject = frame.slots[code.groups[in.detail].slots[i]];
                        PyTuple_SET_ITEM(tensors, i, Py_NewRef(subject == nullptr ? Py_None : subject));
                    }
                    passes = passes && call_is_true(in.object, tensors);
                    Py_XDECREF(tensors);
                    PyErr_Clear();
                }
                break;
            case OP_SIZE: passes = relation_holds(code.relations[in.detail], frame.ints); break;
            case OP_STATE: passes = check_state(self, in, frame, code.states[in.detail]); break;
            case OP_CALL:
                subject = frame.slots[in.slot];
                pin(frame, code.slots);
                passes = subject != nullptr && call_is_true(in.object, subject);
                break;
            default:
                subject = evaluate(in, frame, arguments);
                frame.slots[in.slot] = subject;
                passes = subject != nullptr || in.optional;
        }
        if (!passes) return static_cast<Py_ssize_t>(pc);
        pc++;
    }
    return -1;
}

bool collect_inputs(const Code &code, const Frame &frame, PyObject **inputs) {
    for (size_t i = 0; i < code.inputs.size(); i++) {
        const Input &input = code.inputs[i];
        PyObject *value = input.is_int ? PyLong_FromLongLong(frame.ints[input.index]) : Py_XNewRef(frame.slots[input.index]);
        if (value == nullptr) {
            PyErr_Clear();
            while (i-- > 0) Py_DECREF(inputs[i]);
            return false;
        }
        inputs[i] = value;
    }
    return true;
}

Py_ssize_t check(GuardProgram *self, const Arguments &arguments, PyObject **inputs) {
    Code &code = *self->code;
    Py_ssize_t failing;
    if (code.busy) {
        Frame fresh;
        resize_frame(code, &fresh);
        failing = run(self, code, fresh, arguments);
        if (failing < 0 && inputs != nullptr && !collect_inputs(code, fresh, inputs)) failing = 0;
        unpin(fresh);
        return failing;
    }
    Py_INCREF(self);  // a guard that runs Python code may drop the last reference
    code.busy = true;
    failing = run(self, code, code.frame, arguments);
    if (failing < 0 && inputs != nullptr && !collect_inputs(code, code.frame, inputs)) failing = 0;
    unpin(code.frame);
    code.busy = false;
    Py_DECREF(self);
    return failing;
}

// --- building -------------------------------------------------------------------------------------------------------------------------

bool read_extents(PyObject *tuple, std::vector<int64_t> *out) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        out->push_back(item == Py_None ? kAny : PyLong_AsLongLong(item));
        if (PyErr_Occurred()) return false;
    }
    return true;
}

// (cls, native, (key set, key set), dtype code, device index, requires_grad, shape, stride, slow callable)
bool build_tensor(PyObject *spec, Code *code, Instruction *in) {
    TensorCheck check;
    PyObject *cls, *shape, *stride;
    unsigned long long first, second;
    int native;
    if (!PyArg_ParseTuple(spec, "O!p(KK)iiiO!O!O", &PyType_Type, &cls, &native, &first, &second, &check.dtype, &check.device_index, &check.requires_grad,
                          &PyTuple_Type, &shape, &PyTuple_Type, &stride, &check.slow))
        return false;
    check.cls = reinterpret_cast<PyTypeObject *>(cls);
    check.native = native != 0;
    check.key_sets[0] = first;
    check.key_sets[1] = second;
    check.dim = static_cast<int>(PyTuple_GET_SIZE(shape));
    if (!read_extents(shape, &check.sizes) || !read_extents(stride, &check.strides)) return false;
    if (check.strides.size() != check.sizes.size()) {
        PyErr_SetString(PyExc_ValueError, "a tensor guard's shape and stride have different lengths");
        return false;
    }
    in->detail = static_cast<int32_t>(code->tensors.size());
    code->tensors.push_back(std::move(check));
    return true;
}

bool build_group(PyObject *slots, Code *code, Instruction *in) {
    Group group;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); i++) {
        long slot = PyLong_AsLong(PyTuple_GET_ITEM(slots, i));
        if (slot < 0 || slot >= code->slots) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "no such slot");
            return false;
        }
        group.slots.push_back(static_cast<int32_t>(slot));
    }
    in->detail = static_cast<int32_t>(code->groups.size());
    code->groups.push_back(std::move(group));
    return true;
}

bool build_relation(PyObject *postfix, Code *code, Instruction *in) {
    std::vector<int64_t> out;
    if (!read_extents(postfix, &out)) return false;
    int depth = 0;
    bool ok = true;
    for (size_t at = 0; ok && at < out.size(); at++) {
        int64_t op = out[at];
        if (op == REL_CONST || op == REL_SYM) {
            ok = ++at < out.size() && ++depth <= kRelationDepth && (op == REL_CONST || (out[at] >= 0 && out[at] < code->ints));
        } else {
            int operands = op == REL_NEG || op == REL_NOT ? 1 : 2;
            ok = op > 0 && op < kRelationCount && depth >= operands;
            depth += 1 - operands;
        }
    }
    if (!ok || depth != 1) {
        PyErr_SetString(PyExc_ValueError, "not a relation in postfix order, or one that is too deep");
        return false;
    }
    in->detail = static_cast<int32_t>(code->relations.size());
    code->relations.push_back(std::move(out));
    return true;
}

// (op, slot, base, arg, skip, optional, object, detail)
bool build_instruction(PyObject *spec, Py_ssize_t n, Code *code) {
    Instruction in{};
    PyObject *object, *detail;
    int op, slot, base, arg, skip, optional;
    if (!PyTuple_Check(spec)) {
        PyErr_SetString(PyExc_TypeError, "an instruction is a tuple");
        return false;
    }
    if (!PyArg_ParseTuple(spec, "iiiiipOO", &op, &slot, &base, &arg, &skip, &optional, &object, &detail)) return false;
    bool writes_int = op == OP_SIZE_OF || op == OP_STRIDE_OF || op == OP_INT_OF;
    bool block_pair = op == OP_BLOCK || op == OP_BLOCK_END || op == OP_TYPE_BLOCK || op == OP_TYPE_ATTRIBUTE;
    bool base_is_slot = op != OP_STATE;
    if (op < 0 || op >= kOpCount || slot >= (writes_int ? code->ints : code->slots) || slot < 0 || base < 0 || (base_is_slot && base >= std::max(code->slots, 1)) ||
        (block_pair && skip > n) || ((op == OP_GLOBAL_ITEM || op == OP_BLOCK) && arg >= code->slots)) {
        if (!(slot == 0 && base == 0 && code->slots == 0 && op < kOpCount && op >= 0)) {
            PyErr_Format(PyExc_ValueError, "instruction %d is out of range", static_cast<int>(code->instructions.size()));
            return false;
        }
    }
    in.op = static_cast<uint16_t>(op);
    in.optional = optional != 0;
    in.slot = slot;
    in.base = base;
    in.arg = arg;
    in.skip = skip;
    bool ok = true;
    if (op == OP_TENSOR) ok = build_tensor(detail, code, &in);
    if (op == OP_DIFFERENT || op == OP_NO_OVERLAP) ok = build_group(detail, code, &in);
    if (op == OP_SIZE) ok = build_relation(detail, code, &in);
    if (op == OP_STATE) {
        State state{};
        if (detail != Py_None) ok = state_from_tuple(detail, &state);
        in.detail = static_cast<int32_t>(code->states.size());
        code->states.push_back(state);
    }
    if (!ok) return false;
    // TENSOR keeps its whole specification alive: it borrows the class and the callable from it.
    in.object = op == OP_TENSOR ? Py_NewRef(detail) : object == Py_None && op != OP_IS && op != OP_EQUALS && op != OP_CONSTANT && op != OP_ITEM &&
                                                              op != OP_IDENTITY_ITEM && op != OP_ABSENT
                                    ? nullptr
                                    : Py_NewRef(object);
    code->instructions.push_back(in);
    return true;
}

PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *names[] = {"slots", "ints", "instructions", "inputs", "state_fallback", nullptr};
    PyObject *instructions, *inputs, *state_fallback = nullptr;
    int slots, ints;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiO!O!|O", const_cast<char **>(names), &slots, &ints, &PyList_Type, &instructions, &PyList_Type, &inputs,
                                     &state_fallback))
        return nullptr;
    GuardProgram *self = reinterpret_cast<GuardProgram *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->code = new Code;
    self->state_fallback = Py_XNewRef(state_fallback);
    Code *code = self->code;
    code->slots = slots;
    code->ints = ints;
    Py_ssize_t n = PyList_GET_SIZE(instructions);
    code->instructions.reserve(n);
    bool ok = true;
    for (Py_ssize_t i = 0; ok && i < n; i++) ok = build_instruction(PyList_GET_ITEM(instructions, i), n, code);
    for (Py_ssize_t i = 0; ok && i < PyList_GET_SIZE(inputs); i++) {
        int is_int, index;
        ok = PyArg_ParseTuple(PyList_GET_ITEM(inputs, i), "pi", &is_int, &index);
        if (ok && (index < 0 || index >= (is_int ? ints : slots))) {
            PyErr_SetString(PyExc_ValueError, "no such input");
            ok = false;
        }
        if (ok) code->inputs.push_back({is_int != 0, index});
    }
    if (!ok) {
        Py_DECREF(self);
        return nullptr;
    }
    resize_frame(*code, &code->frame);
    return reinterpret_cast<PyObject *>(self);
}

int program_traverse(PyObject *object, visitproc visit, void *arg) {
    GuardProgram *self = reinterpret_cast<GuardProgram *>(object);
    Py_VISIT(self->state_fallback);
    if (self->code != nullptr)
        for (const Instruction &in : self->code->instructions) Py_VISIT(in.object);
    if (PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_HEAPTYPE)) Py_VISIT(Py_TYPE(object));
    return 0;
}

int program_clear(PyObject *object) {
    GuardProgram *self = reinterpret_cast<GuardProgram *>(object);
    Py_CLEAR(self->state_fallback);
    if (self->code != nullptr) {
        // An emptied program must never pass: it may still be called by a finaliser in the same garbage cycle.
        std::vector<Instruction> old;
        old.swap(self->code->instructions);
        Instruction never{};
        never.op = OP_IS;
        if (self->code->slots == 0) {
            self->code->slots = 1;
            self->code->frame.slots.assign(1, nullptr);
        }
        never.object = reinterpret_cast<PyObject *>(Py_NewRef(Py_Ellipsis));
        never.op = OP_CONSTANT;
        Instruction fail{};
        fail.op = OP_IS;
        fail.object = Py_NewRef(Py_None);
        self->code->instructions = {never, fail};
        for (Instruction &in : old) Py_XDECREF(in.object);
    }
    return 0;
}

void program_dealloc(PyObject *object) {
    GuardProgram *self = reinterpret_cast<GuardProgram *>(object);
    PyObject_GC_UnTrack(object);
    Py_CLEAR(self->state_fallback);
    if (self->code != nullptr) {
        for (Instruction &in : self->code->instructions) Py_XDECREF(in.object);
        delete self->code;
    }
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    if (PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) Py_DECREF(type);
}

bool parse_arguments(PyObject *const *args, Py_ssize_t n, Arguments *arguments) {
    if (n != 2 || !PyTuple_Check(args[0]) || !PyFunction_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected (locals: tuple, function)");
        return false;
    }
    *arguments = {reinterpret_cast<PyTupleObject *>(args[0])->ob_item, PyTuple_GET_SIZE(args[0]), args[1]};
    return true;
}

PyObject *program_check(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Arguments arguments;
    if (!parse_arguments(args, n, &arguments)) return nullptr;
    return PyBool_FromLong(check(reinterpret_cast<GuardProgram *>(self), arguments, nullptr) < 0);
}

PyObject *program_inputs(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Arguments arguments;
    if (!parse_arguments(args, n, &arguments)) return nullptr;
    PyObject *inputs = PyTuple_New(guard_program_inputs(self));
    if (inputs == nullptr) return nullptr;
    if (check(reinterpret_cast<GuardProgram *>(self), arguments, reinterpret_cast<PyTupleObject *>(inputs)->ob_item) < 0) return inputs;
    // A failed check leaves the array untouched or emptied of references.
    std::fill_n(reinterpret_cast<PyTupleObject *>(inputs)->ob_item, PyTuple_GET_SIZE(inputs), nullptr);
    Py_DECREF(inputs);
    Py_RETURN_NONE;
}

PyObject *program_failing(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Arguments arguments;
    if (!parse_arguments(args, n, &arguments)) return nullptr;
    GuardProgram *self = reinterpret_cast<GuardProgram *>(object);
    Frame fresh;
    resize_frame(*self->code, &fresh);
    Py_ssize_t failing = run(self, *self->code, fresh, arguments);
    unpin(fresh);
    if (failing < 0) Py_RETURN_NONE;
    return PyLong_FromSsize_t(failing);
}

PyObject *program_size(PyObject *self, void *) { return PyLong_FromSize_t(reinterpret_cast<GuardProgram *>(self)->code->instructions.size()); }

PyMethodDef program_methods[] = {
    {"check", reinterpret_cast<PyCFunction>(program_check), METH_FASTCALL, "check(locals: tuple, function) -> bool"},
    {"inputs", reinterpret_cast<PyCFunction>(program_inputs), METH_FASTCALL, "inputs(locals, function) -> tuple of the graph's inputs, or None when a guard fails"},
    {"failing", reinterpret_cast<PyCFunction>(program_failing), METH_FASTCALL,
     "failing(locals, function) -> index of the first instruction that fails, or None; remembers nothing"},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef program_getset[] = {{"size", program_size, nullptr, "Number of instructions.", nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject program_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "fusewright._native.GuardProgram";
    type.tp_basicsize = sizeof(GuardProgram);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE;
    type.tp_doc = "GuardProgram(slots, ints, instructions, inputs, state_fallback=None): see capture/guards.py, which builds it.";
    type.tp_new = program_new;
    type.tp_dealloc = program_dealloc;
    type.tp_traverse = program_traverse;
    type.tp_clear = program_clear;
    type.tp_methods = program_methods;
    type.tp_getset = program_getset;
    return type;
}();

PyObject *name_tuple(const char *const *names, int n) {
    PyObject *tuple = PyTuple_New(n);
    for (int i = 0; tuple != nullptr && i < n; i++) PyTuple_SET_ITEM(tuple, i, PyUnicode_FromString(names[i]));
    return tuple;
}

PyObject *py_constant_equal(PyObject *, PyObject *const *args, Py_ssize_t n) {
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "constant_equal takes two arguments");
        return nullptr;
    }
    return PyBool_FromLong(constant_equal(args[0], args[1]));
}

PyMethodDef functions[] = {
    {"constant_equal", reinterpret_cast<PyCFunction>(py_constant_equal), METH_FASTCALL,
     "constant_equal(expected, actual): same type and value, floats bit for bit, instances of user classes by identity"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyTypeObject *guard_program_type() { return &program_type; }

Py_ssize_t guard_program_inputs(PyObject *program) { return static_cast<Py_ssize_t>(reinterpret_cast<GuardProgram *>(program)->code->inputs.size()); }

int guard_program_check(PyObject *program, PyObject *const *locals, Py_ssize_t n, PyObject *function, PyObject **inputs) {
    return check(reinterpret_cast<GuardProgram *>(program), {locals, n, function}, inputs) < 0;
}

}  // namespace fw

int fw_guards_init(PyObject *module) {
    using namespace fw;
    if (values_init() < 0 || tensors_init(module) < 0 || PyModule_AddFunctions(module, functions) < 0) return -1;
    if (PyModule_AddType(module, &program_type) < 0) return -1;
    PyObject *ops = name_tuple(op_names, kOpCount), *relations = name_tuple(relation_names, kRelationCount);
    int failed = PyModule_AddObjectRef(module, "OPCODES", ops) < 0 || PyModule_AddObjectRef(module, "RELATIONS", relations) < 0;
    Py_XDECREF(ops);
    Py_XDECREF(relations);
    return failed ? -1 : 0;
}
