// What the parts of fusewright._native share: each part registers its types and functions in `module`, and the entry
// calls plans through one C function. CPython API only; no PyTorch or C++ library type crosses this border.
//
// Always holds: every function returns -1 or NULL with a Python exception set when it fails; the GIL is held.
#ifndef FUSEWRIGHT_NATIVE_H
#define FUSEWRIGHT_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#ifdef __cplusplus
extern "C" {
#endif

// csrc/plan.cpp: the native call plan. Weak, so that the extension also loads when that file is not in the tree.
__attribute__((weak)) PyTypeObject *fw_plan_type(void);
__attribute__((weak)) int fw_plan_init(PyObject *module);
// Runs `plan` (exactly of fw_plan_type()) on `n` borrowed inputs. Returns a new reference: a tuple of outputs, or the
// single output object when the plan says so.
__attribute__((weak)) PyObject *fw_plan_run(PyObject *plan, PyObject *const *inputs, Py_ssize_t n);
// The same with the tensors of a list, which is emptied: each may be freed after its last reader.
__attribute__((weak)) PyObject *fw_plan_consume(PyObject *plan, PyObject *list);

// csrc/guards.cpp: GuardProgram.
int fw_guards_init(PyObject *module);
// csrc/entry.cpp: Entry, FrameCache; csrc/compiled_function.cpp: CompiledFunction.
int fw_entry_init(PyObject *module);
// csrc/hook.c: the PEP 523 frame hook.
int fw_hook_init(PyObject *module);
// csrc/parameters.cpp: PreparedPlan.
int fw_parameters_init(PyObject *module);
// csrc/differentiable.cpp: Differentiable.
int fw_differentiable_init(PyObject *module);
// csrc/module_call.cpp: ModuleCall.
int fw_module_call_init(PyObject *module);
// csrc/machine_code.cpp: MachineCode.
int fw_machine_code_init(PyObject *module);
// csrc/sets.cpp: set_layout, set_filled.
int fw_sets_init(PyObject *module);
// csrc/kinds.cpp: isinstance, may_hold.
int fw_kinds_init(PyObject *module);

#ifdef __cplusplus
}

#include <exception>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace fw {

// A reference that is given back however its block ends: memory may be short at any request.
class Held {
  public:
    explicit Held(PyObject *object) : object_(object) {}  // takes the reference over
    ~Held() { Py_XDECREF(object_); }
    Held(const Held &) = delete;
    Held &operator=(const Held &) = delete;
    PyObject *get() const { return object_; }
    PyObject *release() { return std::exchange(object_, nullptr); }

  private:
    PyObject *object_;
};

// Does `last` however its block ends.
template <typename Last>
struct Finally {
    Last last;
    ~Finally() { last(); }
};
template <typename Last>
Finally(Last) -> Finally<Last>;

// The next push_back asks for no memory: what it takes over is not lost.
template <typename Item>
void make_room(std::vector<Item> &items) {
    if (items.size() == items.capacity()) items.reserve(2 * items.size() + 1);
}

// A function that Python's C code calls: memory that is short is a MemoryError there, since no C++ exception may pass
// through C.
template <auto function>
struct Caught;
template <typename Result, typename... Given, Result (*function)(Given...)>
struct Caught<function> {
    static Result call(Given... given) noexcept {
        try {
            return function(given...);
        } catch (const std::bad_alloc &) {
            PyErr_NoMemory();
        } catch (const std::exception &error) {
            PyErr_SetString(PyExc_SystemError, error.what());
        }
        if constexpr (std::is_pointer_v<Result>) return nullptr;
        else return -1;
    }
};
template <auto function>
constexpr auto caught = &Caught<function>::call;

}  // namespace fw
#endif
#endif
