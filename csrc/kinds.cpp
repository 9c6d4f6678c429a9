// What values are, by their types alone.
// isinstance: Python's own asks the value for `__class__` where its type is no instance: that is code of the program's
// (a `__getattribute__`, a property), which may have effects, and may name another class.
// may_hold: a walk through containers, for those that are looked through again at each call that is given them.
#include <unordered_set>

#include "native.h"

namespace {

PyObject *instance_check, *plain_check;  // the name; what `type` has under it
PyObject *class_name, *plain_class, *getter_name;  // `__class__`; what `object` has under it; `__getattribute__`
PyTypeObject *abstract_meta;

// Whether code of the program's would say what its class is.
bool answers_itself(PyTypeObject *type) {
    PyObject *getter = _PyType_Lookup(type, getter_name);
    return _PyType_Lookup(type, class_name) != plain_class || getter == nullptr ||
           !Py_IS_TYPE(getter, &PyWrapperDescr_Type);
}

int is_kind(PyObject *value, PyObject *kinds) {
    if (PyTuple_Check(kinds)) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); i++)
            if (int found = is_kind(value, PyTuple_GET_ITEM(kinds, i))) return found;
        return 0;
    }
    if (PyType_Check(kinds)) {
        if (PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject *>(kinds))) return 1;
        PyTypeObject *meta = Py_TYPE(kinds);
        if (meta == &PyType_Type || _PyType_Lookup(meta, instance_check) == plain_check) return 0;
        if (meta == abstract_meta || answers_itself(Py_TYPE(value)))
            return PyObject_IsSubclass(reinterpret_cast<PyObject *>(Py_TYPE(value)), kinds);
        return PyObject_IsInstance(value, kinds);
    }
    PyObject *members = PyObject_GetAttrString(kinds, "__args__");  // of a union
    if (members == nullptr) {
        PyErr_Clear();
        return PyObject_IsInstance(value, kinds);
    }
    int found = is_kind(value, members);
    Py_DECREF(members);
    return found;
}

PyObject *is_instance(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "isinstance expected 2 arguments, got %zd", count);
    int found = is_kind(arguments[0], arguments[1]);
    return found < 0 ? nullptr : PyBool_FromLong(found);
}

// One walk through what a value holds in lists, tuples and the values of dicts, looking for types.
class Search {
  public:
    explicit Search(PyObject *kinds) : kinds_(kinds) {}

    bool found(PyObject *value) const {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds_); i++)
            if (PyType_IsSubtype(Py_TYPE(value), reinterpret_cast<PyTypeObject *>(PyTuple_GET_ITEM(kinds_, i))))
                return true;
        return false;
    }

    bool inside(PyObject *container, int depth) {
        if (depth > DEEPEST) return true;
        bool noted = false;  // of a container that holds others, so that none is walked through twice
        auto reaches = [&](PyObject *part) {
            if (found(part)) return true;
            if (!PyTuple_Check(part) && !PyList_Check(part) && !PyDict_Check(part)) return false;
            if (!noted && !seen_.insert(container).second) return false;
            noted = true;
            return inside(part, depth + 1);
        };
        if (PyDict_Check(container)) {
            Py_ssize_t place = 0;
            for (PyObject *value; PyDict_Next(container, &place, nullptr, &value);)
                if (reaches(value)) return true;
        } else if (PyTuple_Check(container) || PyList_Check(container)) {
            for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(container); i++)
                if (reaches(PySequence_Fast_GET_ITEM(container, i))) return true;
        }
        return false;
    }

  private:
    static constexpr int DEEPEST = 200;
    PyObject *kinds_;
    std::unordered_set<PyObject *> seen_;
};

PyObject *may_hold(PyObject *, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyTuple_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "may_hold takes a value and a tuple of types");
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments[1]); i++)
        if (!PyType_Check(PyTuple_GET_ITEM(arguments[1], i)))
            return PyErr_Format(PyExc_TypeError, "may_hold takes types");
    Search search(arguments[1]);
    return PyBool_FromLong(search.found(arguments[0]) || search.inside(arguments[0], 0));
}

PyMethodDef functions[] = {
    {"isinstance", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_instance)), METH_FASTCALL,
     "isinstance(value, kinds) -> whether type(value) is a subclass of one of them; asks the value nothing."},
    {"may_hold", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fw::caught<may_hold>)), METH_FASTCALL,
     "may_hold(value, kinds) -> whether it is of one of these types, or such a value is in it or in the lists, tuples "
     "and values of dicts that it holds; True too for what is too deep to look through."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int fw_kinds_init(PyObject *module) {
    instance_check = PyUnicode_InternFromString("__instancecheck__");
    class_name = PyUnicode_InternFromString("__class__");
    getter_name = PyUnicode_InternFromString("__getattribute__");
    if (instance_check == nullptr || class_name == nullptr || getter_name == nullptr) return -1;
    plain_check = _PyType_Lookup(&PyType_Type, instance_check);
    plain_class = _PyType_Lookup(&PyBaseObject_Type, class_name);
    PyObject *abstract = PyImport_ImportModule("abc");
    if (abstract == nullptr) return -1;
    abstract_meta = reinterpret_cast<PyTypeObject *>(PyObject_GetAttrString(abstract, "ABCMeta"));
    Py_DECREF(abstract);
    return abstract_meta == nullptr ? -1 : PyModule_AddFunctions(module, functions);
}
