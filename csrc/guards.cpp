// Running a guard program: a flat program that decides whether a captured frame may be reused, and finds the graph's
// inputs.
//
// Takes instructions made by capture/guards.py (sources evaluated into slots, guards over slots) and, at each check, a
// frame's locals and function. Gives yes or no and the inputs. Instructions come in an order in which a source stands
// after its base's guards.
//
// Always holds:
// - Slots are borrowed pointers. They stay valid during a check because nothing runs Python code; before an instruction
// that might,
//   `pin` takes references to every slot evaluated so far.
// - A block holds the reads from one dict (and the guards that depend on nothing but which objects were read). While
// the dict's version is the
//   one the block last passed with, its slots hold what the dict holds, and the block is skipped. A version that
//   differs is no failure: the block is run, and remembers the new version if it passes.
// - A program that has passed twice takes the shortcut of guard_words.cpp, which says yes only where the instructions
// would.
// - A check that meets another check of the same program in progress (recursion, another thread) works on slots of its
// own.
#include <algorithm>
#include <utility>

#include "guard_code.h"
#include "dict_versions.h"
#include "interruptions.h"
#include "values.h"

namespace fw {
namespace {

// Takes references to the slots below `upto`: from here on Python code may run.
void pin(Frame &frame, int upto) {
    for (; frame.pinned < upto; frame.pinned++) Py_XINCREF(frame.slots[frame.pinned]);
}

PyObject *own(Frame &frame, PyObject *object) {
    if (object == nullptr)
        drop_error();
    else {
        Held kept(object);
        frame.owned.push_back(object);
        kept.release();
    }
    return object;
}

PyObject *dict_lookup(Frame &frame, PyObject *dict, PyObject *key, int slot) {
    if (lookup_is_plain(dict, key)) {
        PyObject *value = PyDict_GetItemWithError(dict, key);
        if (value == nullptr && PyErr_Occurred()) drop_error();
        return value;
    }
    pin(frame, slot);  // a key's own __eq__ may run
    Py_INCREF(dict);
    PyObject *value = Py_XNewRef(PyDict_GetItemWithError(dict, key));
    Py_DECREF(dict);
    return own(frame, value);
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
    drop_error();
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
    if (truth < 0) drop_error();
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

bool all_tensors(const Frame &frame, const Group &group) {  // else NumPy arrays are among them
    for (int32_t slot : group.slots)
        if (frame.slots[slot] == nullptr || !is_tensor(frame.slots[slot])) return false;
    return true;
}

bool no_overlap(const Frame &frame, const Group &group) {
    std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
    ranges.reserve(group.slots.size());
    for (int32_t slot : group.slots) {
        PyObject *tensor = frame.slots[slot];
        uintptr_t begin, end;
        if (tensor == nullptr || !is_tensor(tensor) || tensor_impl(tensor) == nullptr ||
            !tensor_storage_range(tensor_impl(tensor), &begin, &end))
            return false;
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

// A slot is read by its descriptor: where it is empty, `getattr` would run the class's `__getattr__`.
PyObject *read_attribute(PyObject *object, PyObject *name) {
    PyObject *found = _PyType_Lookup(Py_TYPE(object), name);
    if (found == nullptr || !Py_IS_TYPE(found, &PyMemberDescr_Type)) return PyObject_GetAttr(object, name);
    Py_INCREF(found);
    PyObject *value = PyMemberDescr_Type.tp_descr_get(found, object, reinterpret_cast<PyObject *>(Py_TYPE(object)));
    Py_DECREF(found);
    return value;
}

// Object of the source `in`, or NULL when there is none; borrowed or owned by the frame.
PyObject *evaluate(const Instruction &in, Frame &frame, const Arguments &arguments) {
    if (in.op >= OP_TYPE_OF && frame.slots[in.base] == nullptr) return nullptr;
    switch (in.op) {
        case OP_LOCAL: return in.arg < arguments.n ? arguments.locals[in.arg] : nullptr;
        case OP_FUNCTION: return arguments.function;
        case OP_CONSTANT: return in.object;
        case OP_WEAK_CONSTANT: return weak_object(in);
        case OP_GLOBALS: return reinterpret_cast<PyFunctionObject *>(arguments.function)->func_globals;
        case OP_BUILTINS: return reinterpret_cast<PyFunctionObject *>(arguments.function)->func_builtins;
        case OP_CLOSURE: {
            PyObject *cells = reinterpret_cast<PyFunctionObject *>(arguments.function)->func_closure;
            return cells != nullptr && in.arg < PyTuple_GET_SIZE(cells) ? PyCell_GET(PyTuple_GET_ITEM(cells, in.arg))
                                                                        : nullptr;
        }
        case OP_TYPE_OF: return reinterpret_cast<PyObject *>(Py_TYPE(frame.slots[in.base]));
        case OP_INSTANCE_DICT: return instance_dict(frame.slots[in.base]);
        case OP_ITEM:
            return read_item(frame, frame.slots[in.base], in.object, in.arg == INT32_MIN ? kAny : in.arg, in.slot);
        case OP_IDENTITY_ITEM:
            return PyDict_Check(frame.slots[in.base]) ? dict_find_identical(frame.slots[in.base], in.object) : nullptr;
        case OP_GLOBAL_ITEM: {
            PyObject *value = dict_lookup(frame, frame.slots[in.base], in.object, in.slot);
            PyObject *builtins = frame.slots[in.arg];
            return value != nullptr || builtins == nullptr || !PyDict_Check(builtins)
                       ? value
                       : dict_lookup(frame, builtins, in.object, in.slot);
        }
        case OP_DICT_KEY:
            return PyDict_Check(frame.slots[in.base]) ? dict_key_at(frame.slots[in.base], in.arg) : nullptr;
        case OP_REFERENT:
            // A subclass (weakref.KeyedRef) that is called as its base is.
            if (!PyWeakref_CheckRef(frame.slots[in.base]) ||
                Py_TYPE(frame.slots[in.base])->tp_call != _PyWeakref_RefType.tp_call)
                return nullptr;
            return own(frame, PyObject_CallNoArgs(frame.slots[in.base]));
        case OP_COMPUTED:
            pin(frame, in.slot);
            return own(frame, PyObject_CallOneArg(in.object, frame.slots[in.base]));
        case OP_ATTRIBUTE:
            if (in.arg != kGeneric) return read_field(frame.slots[in.base], in.arg);
            pin(frame, in.slot);
            return own(frame, read_attribute(frame.slots[in.base], in.object));
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
    // An OrderedDict's order may change without its version, so its block is never skipped.
    if (version != 0 && PyODict_Check(dict)) version = 0;
    *passed = 0;
    frame.pending[2 * pc] = version;
    frame.pending[2 * pc + 1] = second;
    return false;
}

bool collect_inputs(const Code &code, const Frame &frame, PyObject **inputs) {
    for (size_t i = 0; i < code.inputs.size(); i++) {
        const Input &input = code.inputs[i];
        PyObject *value =
            input.is_int ? PyLong_FromLongLong(frame.ints[input.index]) : Py_XNewRef(frame.slots[input.index]);
        if (value == nullptr) {
            drop_error();
            while (i-- > 0) Py_DECREF(inputs[i]);
            return false;
        }
        inputs[i] = value;
    }
    return true;
}

}  // namespace

void resize_frame(const Code &code, Frame *frame) {
    frame->slots.assign(code.slots, nullptr);
    frame->ints.assign(code.ints, 0);
    frame->versions.assign(code.instructions.size(), 0);
    frame->pending.assign(2 * code.instructions.size(), 0);
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

Py_ssize_t run_guards(const GuardProgram *self, Code &code, Frame &frame, const Arguments &arguments) {
    return run_range(self, code, frame, arguments, 0, code.instructions.size());
}

Py_ssize_t run_range(const GuardProgram *self, Code &code, Frame &frame, const Arguments &arguments, size_t pc,
                     size_t end) {
    const Instruction *first = code.instructions.data();
    while (pc < end) {
        const Instruction &in = first[pc];
        PyObject *subject;
        bool passes;
        switch (in.op) {
            case OP_SIZE_OF:
            case OP_STRIDE_OF:
                passes = read_extent(frame, frame.slots[in.base], in.arg, in.op == OP_STRIDE_OF, in.optional,
                                     code.slots, &frame.ints[in.slot]);
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
            case OP_WEAK_IS:
                subject = frame.slots[in.slot];
                passes = subject != nullptr && subject == weak_object(in);
                break;
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
                         (in.arg ? dict_find_identical(subject, in.object)
                                 : dict_lookup(frame, subject, in.object, in.base)) == nullptr;
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
                    pin(frame, in.base);
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
                if (in.arg != 0) found = type->tp_mro;
                passes = found == (PyTuple_GET_SIZE(in.object) > 2 ? PyTuple_GET_ITEM(in.object, 2) : nullptr);
                // The last attribute of its type's block: the lookup has given the type a version.
                if (passes && in.skip >= 0) frame.versions[in.skip] = type_version(type);
                break;
            }
            case OP_SAME:
                passes = frame.slots[in.slot] != nullptr && frame.slots[in.slot] == frame.slots[in.base];
                break;
            case OP_DIFFERENT: passes = all_different(frame, code.groups[in.detail]); break;
            case OP_NO_OVERLAP:
                if (layout.storage_ready && all_tensors(frame, code.groups[in.detail])) {
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
                    drop_error();
                }
                break;
            case OP_SIZE: passes = relation_holds(code.relations[in.detail], frame.ints); break;
            case OP_STATE: passes = check_state(self, in, frame, code.states[in.detail]); break;
            case OP_CALL:
                subject = frame.slots[in.slot];
                pin(frame, in.base);
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

constexpr int kLeastPenalty = 2, kMostPenalty = 1 << 12;

Py_ssize_t check_guards(GuardProgram *self, const Arguments &arguments, PyObject **inputs) {
    Code &code = *self->code;
    Py_ssize_t failing;
    if (code.busy) {
        Frame fresh;
        resize_frame(code, &fresh);
        Finally left{[&] { unpin(fresh); }};
        failing = run_guards(self, code, fresh, arguments);
        if (failing < 0 && inputs != nullptr && !collect_inputs(code, fresh, inputs)) failing = 0;
        return failing;
    }
    // A guard that runs Python code may drop the last reference.
    Held alive(Py_NewRef(reinterpret_cast<PyObject *>(self)));
    code.busy = true;
    Finally left{[&] {
        unpin(code.frame);
        code.busy = false;
    }};
    failing = code.words.empty() ? kChanged : check_words(self, code, code.frame, arguments);
    if (failing == kChanged) {
        if (!code.words.empty()) {
            code.words.clear();
            code.penalty = code.lasted > code.penalty ? kLeastPenalty : std::min(2 * code.penalty, kMostPenalty);
            code.wait = code.penalty;
            unpin(code.frame);
        }
        failing = run_guards(self, code, code.frame, arguments);
        if (failing < 0 && --code.wait <= 0) {
            learn_words(code, code.frame, arguments);
            code.lasted = 0;
        }
    } else if (failing < 0 && code.lasted < kMostPenalty) {
        code.lasted++;
    }
    if (failing < 0 && inputs != nullptr && !collect_inputs(code, code.frame, inputs)) failing = 0;
    return failing;
}

}  // namespace fw
