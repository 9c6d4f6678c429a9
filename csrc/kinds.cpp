// isinstance, by the type of a value alone. Python's own asks the value for `__class__` where its type is no instance:
// that is code of the program's (a `__getattribute__`, a property), which may have effects, and may name another class.
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

PyMethodDef functions[] = {
    {"isinstance", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_instance)), METH_FASTCALL,
     "isinstance(value, kinds) -> whether type(value) is a subclass of one of them; asks the value nothing."},
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
