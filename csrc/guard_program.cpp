// The type GuardProgram: building its code from the tuples that capture/guards/program.py emits, and its Python
// methods.
//
// Always holds: every slot, int and instruction number in a program that was built is in range, so that running needs
// no checks.
#include <algorithm>
#include <utility>

#include "guard_code.h"
#include "guards.h"
#include "interruptions.h"
#include "dict_versions.h"
#include "values.h"

namespace fw {
namespace {

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
    if (!PyArg_ParseTuple(spec, "O!p(KK)iiiO!O!O", &PyType_Type, &cls, &native, &first, &second, &check.dtype,
                          &check.device_index, &check.requires_grad, &PyTuple_Type, &shape, &PyTuple_Type, &stride,
                          &check.slow))
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
            ok = ++at < out.size() && ++depth <= kRelationDepth &&
                 (op == REL_CONST || (out[at] >= 0 && out[at] < code->ints));
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
    const bool writes_int = op == OP_SIZE_OF || op == OP_STRIDE_OF || op == OP_INT_OF;
    const bool reads_base =
        (op >= OP_TYPE_OF && op <= OP_BLOCK) || op == OP_SAME;  // otherwise `base` counts the slots evaluated so far
    const bool writes_slot = op <= OP_ATTRIBUTE,
               reads_slot = (op >= OP_TYPE && op <= OP_TENSOR) || op == OP_SAME || op == OP_CALL;
    bool fits = op >= 0 && op < kOpCount && slot >= 0 && base >= 0 && base <= code->slots;
    fits = fits && (!writes_int || slot < code->ints) && (!(writes_slot || reads_slot) || slot < code->slots) &&
           (!reads_base || base < code->slots);
    fits = fits && skip <= n && (!(op == OP_BLOCK || op == OP_TYPE_BLOCK) || skip > 0) &&
           (op != OP_BLOCK_END || skip >= 0);
    fits = fits && (op != OP_GLOBAL_ITEM || (arg >= 0 && arg < code->slots)) && (op != OP_BLOCK || arg < code->slots) &&
           (op != OP_LOCAL || arg >= 0) && (op != OP_CLOSURE || arg >= 0);
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "instruction %d is out of range", static_cast<int>(code->instructions.size()));
        return false;
    }
    in.op = static_cast<uint16_t>(op);
    in.optional = optional != 0;
    in.slot = slot;
    in.base = base;
    in.arg = arg;
    in.skip = skip;
    bool ok = true;
    if ((op == OP_WEAK_CONSTANT || op == OP_WEAK_IS) && !PyWeakref_CheckRef(object)) {
        PyErr_SetString(PyExc_TypeError, "a weak instruction takes a weak reference");
        ok = false;
    }
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
    in.object = Py_NewRef(op == OP_TENSOR ? detail : object);
    code->instructions.push_back(in);
    return true;
}

PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *names[] = {"slots", "ints", "instructions", "inputs", "state_fallback", nullptr};
    PyObject *instructions, *inputs, *state_fallback = nullptr;
    int slots, ints;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiO!O!|O", const_cast<char **>(names), &slots, &ints, &PyList_Type,
                                     &instructions, &PyList_Type, &inputs, &state_fallback))
        return nullptr;
    Held made(type->tp_alloc(type, 0));
    if (made.get() == nullptr) return nullptr;
    GuardProgram *self = reinterpret_cast<GuardProgram *>(made.get());
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
    if (!ok) return nullptr;
    resize_frame(*code, &code->frame);
    return made.release();
}

int program_traverse(PyObject *object, visitproc visit, void *arg) {
    GuardProgram *self = reinterpret_cast<GuardProgram *>(object);
    Py_VISIT(self->state_fallback);
    if (self->code != nullptr)
        for (const Instruction &in : self->code->instructions) Py_VISIT(in.object);
    return 0;
}

int program_clear(PyObject *object) {
    GuardProgram *self = reinterpret_cast<GuardProgram *>(object);
    Py_CLEAR(self->state_fallback);
    if (self->code != nullptr) {
        // An emptied program must never pass: it may still be called by a finaliser in the same garbage cycle.
        std::vector<Instruction> old;
        old.swap(self->code->instructions);
        self->code->words.clear();
        self->code->wait = INT32_MAX;
        Instruction never{};
        never.op = OP_SIZE;
        never.detail = static_cast<int32_t>(self->code->relations.size());
        self->code->relations.push_back({REL_CONST, 0});
        self->code->instructions.push_back(never);
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
    Py_TYPE(object)->tp_free(object);
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
    bool passes = check_guards(reinterpret_cast<GuardProgram *>(self), arguments, nullptr) < 0;
    return interrupted() ? nullptr : PyBool_FromLong(passes);
}

PyObject *program_inputs(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    Arguments arguments;
    if (!parse_arguments(args, n, &arguments)) return nullptr;
    Held inputs(PyTuple_New(guard_program_inputs(self)));
    if (inputs.get() == nullptr) return nullptr;
    PyObject **items = reinterpret_cast<PyTupleObject *>(inputs.get())->ob_item;
    bool passes = check_guards(reinterpret_cast<GuardProgram *>(self), arguments, items) < 0;
    // A failed check leaves the array untouched or emptied of references.
    if (!passes) std::fill_n(items, PyTuple_GET_SIZE(inputs.get()), nullptr);
    if (interrupted()) return nullptr;
    if (passes) return inputs.release();
    Py_RETURN_NONE;
}

PyObject *program_failing(PyObject *object, PyObject *const *args, Py_ssize_t n) {
    Arguments arguments;
    if (!parse_arguments(args, n, &arguments)) return nullptr;
    GuardProgram *self = reinterpret_cast<GuardProgram *>(object);
    Frame fresh;
    resize_frame(*self->code, &fresh);
    Finally left{[&] { unpin(fresh); }};
    Py_ssize_t failing = run_guards(self, *self->code, fresh, arguments);
    if (interrupted()) return nullptr;
    if (failing < 0) Py_RETURN_NONE;
    return PyLong_FromSsize_t(failing);
}

PyObject *program_size(PyObject *self, void *) {
    return PyLong_FromSize_t(reinterpret_cast<GuardProgram *>(self)->code->instructions.size());
}

PyObject *program_words(PyObject *self, void *) {
    return PyLong_FromSize_t(reinterpret_cast<GuardProgram *>(self)->code->words.size());
}

PyMethodDef program_methods[] = {
    {"check", reinterpret_cast<PyCFunction>(fw::caught<program_check>), METH_FASTCALL,
     "check(locals: tuple, function) -> bool"},
    {"inputs", reinterpret_cast<PyCFunction>(fw::caught<program_inputs>), METH_FASTCALL,
     "inputs(locals, function) -> tuple of the graph's inputs, or None when a guard fails"},
    {"failing", reinterpret_cast<PyCFunction>(fw::caught<program_failing>), METH_FASTCALL,
     "failing(locals, function) -> index of the first instruction that fails, or None; remembers nothing"},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef program_getset[] = {
    {"size", program_size, nullptr, "Number of instructions.", nullptr},
    {"words", program_words, nullptr, "Number of steps of the shortcut; 0 while there is none.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject program_type = [] {
    PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
    type.tp_name = "fusewright._native.GuardProgram";
    type.tp_basicsize = sizeof(GuardProgram);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE;
    type.tp_doc =
        "GuardProgram(slots, ints, instructions, inputs, state_fallback=None): see capture/guards.py, which builds it.";
    type.tp_new = fw::caught<program_new>;
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
     "constant_equal(expected, actual): same type and value, floats bit for bit, instances of user classes by "
     "identity"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

PyTypeObject *guard_program_type() { return &program_type; }

Py_ssize_t guard_program_inputs(PyObject *program) {
    return static_cast<Py_ssize_t>(reinterpret_cast<GuardProgram *>(program)->code->inputs.size());
}

int guard_program_check(PyObject *program, PyObject *const *locals, Py_ssize_t n, PyObject *function,
                        PyObject **inputs) {
    return check_guards(reinterpret_cast<GuardProgram *>(program), {locals, n, function}, inputs) < 0;
}

}  // namespace fw

int fw_guards_init(PyObject *module) {
    using namespace fw;
    if (values_init() < 0 || dict_versions_init() < 0 || tensors_init(module) < 0 ||
        PyModule_AddFunctions(module, functions) < 0)
        return -1;
    if (PyModule_AddType(module, &program_type) < 0) return -1;
    PyObject *ops = name_tuple(op_names, kOpCount), *relations = name_tuple(relation_names, kRelationCount);
    int failed =
        PyModule_AddObjectRef(module, "OPCODES", ops) < 0 || PyModule_AddObjectRef(module, "RELATIONS", relations) < 0;
    Py_XDECREF(ops);
    Py_XDECREF(relations);
    return failed ? -1 : 0;
}
