// The shortcut of a guard program: what a check reads while nothing changes, as a list of memory words.
//
// Takes a program and a frame that it has just passed on; gives a list of (address, content). A check that finds every
// word as it was would run the same instructions over the same objects with the same outcome, so it passes without
// running them. The addresses are known beforehand, so their reads do not wait for one another: in a deep model what a
// check costs is misses of the caches.
//
// Always holds:
// - A slot is *settled* when the words before say that it would be filled with the very pointer that it holds. Only
// what reads settled
//   slots is made words; the other instructions are run, in their order.
// - A pointer that is the same need not be the same object (it may have been freed, and its place taken). It is for a
// *kept* slot: the program
//   keeps the object, or a dict whose version is the same does, or a word says that a weak reference still leads to
//   it. Of all others the type is a word as well, and of kept ones whose class may change.
// - An address is read only after the words that say that it still belongs to a living object: of the argument, of a
// dict that has its
//   version (versions are never used twice), of a container that has its type and size.
// - A word that differs is no failure: the program is run.
#include "guard_code.h"
#include "dict_versions.h"
#include "values.h"

namespace fw {
namespace {

// Of the eight bytes of a tensor around its dtype, the dtype's two; 0 where they stand elsewhere in the word
// (big-endian).
uint64_t dtype_mask() {
    const uint16_t one = 1;
    return *reinterpret_cast<const uint8_t *>(&one) == 0 ? 0 : uint64_t(0xFFFF) << (8 * (layout.dtype & 7));
}

class Learner {
  public:
      Learner(Code &code, const Frame &frame, const Arguments &arguments)
          : code_(code),
            frame_(frame),
            arguments_(arguments),
            settled_(static_cast<size_t>(code.slots)),
            kept_(settled_),
            typed_(settled_) {}

      void run() {
          const size_t n = code_.instructions.size();
          size_t pc = 0;
          while (pc < n) {
              const Instruction &in = code_.instructions[pc];
              const bool block = in.op == OP_BLOCK || in.op == OP_TYPE_BLOCK;
              const size_t next = block ? static_cast<size_t>(in.skip) : pc + 1;
              const size_t known = words_.size();
              if (!settle(in, pc)) {
                  words_.resize(known);
                  instructions(pc, next);
              }
              pc = next;
          }
          code_.words.swap(words_);
      }

  private:
    Code &code_;
    const Frame &frame_;
    const Arguments &arguments_;
    std::vector<bool> settled_, kept_, typed_;
    std::vector<Word> words_;
    bool function_known_ = false;

    PyObject *at(int32_t slot) const { return frame_.slots[static_cast<size_t>(slot)]; }
    bool settled(int32_t slot) const { return settled_[static_cast<size_t>(slot)] && at(slot) != nullptr; }

    template <typename T>
    bool word(const T *address) {
        static_assert(sizeof(T) == sizeof(uint64_t), "a word has eight bytes");
        const uint64_t *place = reinterpret_cast<const uint64_t *>(address);
        words_.push_back(Word::memory(place, *place, kWord));
        return true;
    }

    bool version_of(PyObject *dict) {
        const uint64_t *place = dict_version_place(dict);
        return place != nullptr && *place != 0 && word(place);
    }

    // What stands in the slot is an object of the type that it has.
    bool type_of(int32_t slot) {
        PyObject *object = at(slot);
        const bool fixed = kept_[static_cast<size_t>(slot)] && !PyType_HasFeature(Py_TYPE(object), Py_TPFLAGS_HEAPTYPE);
        if (!fixed && !typed_[static_cast<size_t>(slot)]) word(&object->ob_type);
        typed_[static_cast<size_t>(slot)] = true;
        return true;
    }

    bool function() {
        if (!function_known_) {
            words_.push_back(Word::function(arguments_.function));
            word(&arguments_.function->ob_type);
            function_known_ = true;
        }
        return true;
    }

    void instructions(size_t from, size_t to) {
        if (!words_.empty() && words_.back().kind() == kRangeWord && words_.back().to() == from)
            words_.back() = Word::range(words_.back().from(), to);
        else
            words_.push_back(Word::range(from, to));
    }

    bool settle(const Instruction &in, size_t pc) {
        if (in.op > OP_ATTRIBUTE) return guard(in, pc);
        const bool known_function = function_known_;
        const bool ok = at(in.slot) != nullptr && source(in);
        if (!ok) function_known_ = known_function;  // its words are dropped again
        settled_[static_cast<size_t>(in.slot)] = ok;
        return ok;
    }

    bool source(const Instruction &in) {
        switch (in.op) {
            case OP_CONSTANT: return kept_[static_cast<size_t>(in.slot)] = true;
            case OP_WEAK_CONSTANT: return kept_[static_cast<size_t>(in.slot)] = word(weak_place(in));
            case OP_LOCAL: return local(in);
            case OP_FUNCTION: return function();
            case OP_GLOBALS:
                return function() && word(&reinterpret_cast<PyFunctionObject *>(arguments_.function)->func_globals);
            case OP_BUILTINS:
                return function() && word(&reinterpret_cast<PyFunctionObject *>(arguments_.function)->func_builtins);
            case OP_TYPE_OF: return settled(in.base) && type_of(in.base);
            case OP_INSTANCE_DICT: return settled(in.base) && dict_of(in);
            case OP_ITEM: return settled(in.base) && item(in);
            case OP_ATTRIBUTE: return in.arg != kGeneric && settled(in.base) && field(in);
            default: return false;
        }
    }

    // Arguments that are the same at each call, as a rule: not tensors, nor what a call makes afresh.
    bool local(const Instruction &in) {
        PyObject *object = at(in.slot);
        if (is_tensor(object) || _PyObject_GetDictPtr(object) == nullptr) return false;
        words_.push_back(Word::local(in.arg, object));
        return true;
    }

    bool dict_of(const Instruction &in) {
        PyObject *object = at(in.base);
        PyObject **place = nullptr;
        if (PyType_Check(object)) {
            if (PY_VERSION_HEX < 0x030C0000 ||
                PyType_HasFeature(reinterpret_cast<PyTypeObject *>(object), Py_TPFLAGS_HEAPTYPE))
                place = &reinterpret_cast<PyTypeObject *>(object)->tp_dict;
        } else if (!Py_IS_TYPE(object, &PyDictProxy_Type)) {
            place = _PyObject_GetDictPtr(object);
        }
        if (place == nullptr || *place == nullptr) return false;
        type_of(in.base);
        typed_[static_cast<size_t>(in.slot)] =
            PyDict_CheckExact(*place);  // nothing but a dict stands there, and a version tells which one
        return word(place);
    }

    bool item(const Instruction &in) {
        PyObject *base = at(in.base);
        const bool list = PyList_Check(base);
        if ((!list && !PyTuple_Check(base)) || in.arg == INT32_MIN) return false;
        const Py_ssize_t n = Py_SIZE(base), index = in.arg < 0 ? in.arg + n : in.arg;
        if (index < 0 || index >= n) return false;
        type_of(in.base);
        word(&reinterpret_cast<PyVarObject *>(base)->ob_size);
        if (list) word(&reinterpret_cast<PyListObject *>(base)->ob_item);
        PyObject **items =
            list ? reinterpret_cast<PyListObject *>(base)->ob_item : reinterpret_cast<PyTupleObject *>(base)->ob_item;
        return word(items + index);
    }

    bool field(const Instruction &in) {
        PyObject *base = at(in.base);
        PyFunctionObject *function = reinterpret_cast<PyFunctionObject *>(base);
        PyObject **place = nullptr;
        if (PyFunction_Check(base)) {
            switch (in.arg) {
                case kFunctionGlobals: place = &function->func_globals; break;
                case kFunctionDefaults: place = &function->func_defaults; break;
                case kFunctionKwDefaults: place = &function->func_kwdefaults; break;
                case kFunctionClosure: place = &function->func_closure; break;
                case kFunctionCode: place = &function->func_code; break;
                default: break;
            }
        } else if (PyCell_Check(base) && in.arg == kCellContents) {
            place = &reinterpret_cast<PyCellObject *>(base)->ob_ref;
        } else if (PyMethod_Check(base) && in.arg == kMethodSelf) {
            place = &reinterpret_cast<PyMethodObject *>(base)->im_self;
        } else if (PyMethod_Check(base) && in.arg == kMethodFunction) {
            place = &reinterpret_cast<PyMethodObject *>(base)->im_func;
        }
        return place != nullptr && type_of(in.base) && word(place);
    }

    bool guard(const Instruction &in, size_t pc) {
        switch (in.op) {
            case OP_BLOCK: return block(in, pc);
            case OP_TYPE: return settled(in.slot) && type_of(in.slot);
            case OP_IS: return settled(in.slot);
            case OP_WEAK_IS:  // a dead object's place may be taken
                return settled(in.slot) && (kept_[static_cast<size_t>(in.slot)] || word(weak_place(in)));
            case OP_EQUALS: return settled(in.slot) && at(in.slot) == in.object;
            case OP_BOUND: return settled(in.slot);
            case OP_LENGTH: return settled(in.slot) && length(in.slot);
            case OP_TENSOR: return settled(in.slot) && tensor(code_.tensors[static_cast<size_t>(in.detail)], in.slot);
            case OP_SAME: return settled(in.slot) && settled(in.base);
            case OP_DIFFERENT:
                for (int32_t slot : code_.groups[static_cast<size_t>(in.detail)].slots)
                    if (!settled(slot)) return false;
                return true;
            default: return false;
        }
    }

    bool length(int32_t slot) {
        PyObject *object = at(slot);
        if (!PyDict_Check(object) && !PyList_Check(object) && !PyTuple_Check(object)) return false;
        type_of(slot);
        if (PyDict_Check(object)) {
            const bool empty = PyDict_GET_SIZE(object) == 0;  // a change of its content is then a change of its length
            return (kVersionsApart && empty && version_of(object)) ||
                   word(&reinterpret_cast<PyDictObject *>(object)->ma_used);
        }
        return word(&reinterpret_cast<PyVarObject *>(object)->ob_size);
    }

    bool tensor(const TensorCheck &check, int32_t slot) {
        constexpr int kInline = 5;
        if (!check.native || !layout.ready || check.requires_grad >= 0 || check.device_index != -2 ||
            check.dim > kInline)
            return false;
        if (dtype_mask() == 0) return false;
        PyObject *object = at(slot);
        const char *impl = tensor_impl(object);
        type_of(slot);
        word(reinterpret_cast<char **>(reinterpret_cast<char *>(object) + layout.impl));
        word(reinterpret_cast<const uint64_t *>(impl + layout.key_set));
        const uint64_t *dtype = reinterpret_cast<const uint64_t *>(impl + (layout.dtype & ~7));
        words_.push_back(Word::memory(dtype, *dtype & dtype_mask(), kDtypeWord));
        word(reinterpret_cast<const uint64_t *>(impl + layout.sizes));
        for (int i = 0; i < check.dim; i++) {
            if (check.sizes[static_cast<size_t>(i)] != kAny) word(tensor_sizes(impl) + i);
            if (check.strides[static_cast<size_t>(i)] != kAny) word(tensor_strides(impl) + i);
        }
        return true;
    }

    // A block that the check has skipped, or has just passed: its dict's version stands for all that it reads.
    bool block(const Instruction &in, size_t pc) {
        if (!settled(in.base) || (in.arg >= 0 && !settled(in.arg))) return false;
        PyObject *dict = at(in.base), *second = in.arg >= 0 ? at(in.arg) : nullptr;
        if (!PyDict_Check(dict) || PyODict_Check(dict) ||
            (second != nullptr && (!PyDict_Check(second) || PyODict_Check(second))))
            return false;
        const uint64_t version = dict_version(dict);
        if (version == 0 || frame_.versions[pc] != version) return false;
        if (second != nullptr &&
            (dict_version(second) == 0 || frame_.versions[static_cast<size_t>(in.skip) - 1] != dict_version(second)))
            return false;
        type_of(in.base);
        version_of(dict);
        if (second != nullptr) version_of(second);
        for (size_t i = pc + 1; i < static_cast<size_t>(in.skip); i++) {
            const Instruction &inside = code_.instructions[i];
            if (inside.op <= OP_ATTRIBUTE)
                settled_[static_cast<size_t>(inside.slot)] = kept_[static_cast<size_t>(inside.slot)] =
                    inside.base == in.base;
        }
        return true;
    }
};

}  // namespace

void learn_words(Code &code, const Frame &frame, const Arguments &arguments) { Learner(code, frame, arguments).run(); }

Py_ssize_t check_words(const GuardProgram *self, Code &code, Frame &frame, const Arguments &arguments) {
    constexpr size_t kAhead = 12;
    const Word *words = code.words.data();
    const size_t n = code.words.size();
    const uint64_t of_dtype = dtype_mask();
    for (size_t i = 0; i < n; i++) {
        const Word &one = words[i];
        if (i + kAhead < n) __builtin_prefetch(words[i + kAhead].place());
        switch (one.kind()) {
            case kWord:
                if (*one.place() != one.expected) return kChanged;
                break;
            case kDtypeWord:
                if ((*one.place() & of_dtype) != one.expected) return kChanged;
                break;
            case kLocalWord:
                if (one.number() >= arguments.n ||
                    reinterpret_cast<uint64_t>(arguments.locals[one.number()]) != one.expected)
                    return kChanged;
                break;
            case kFunctionWord:
                if (reinterpret_cast<uint64_t>(arguments.function) != one.expected) return kChanged;
                break;
            case kRangeWord: {
                const Py_ssize_t failing = run_range(self, code, frame, arguments, one.from(), one.to());
                if (failing >= 0) return failing;
            }
        }
    }
    return -1;
}

}  // namespace fw
