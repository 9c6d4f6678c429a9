// Exact reads and comparisons of builtin objects: see values.h. Version differences of CPython's object layouts live
// here.
#include "values.h"

#include <cstring>

namespace fw {

namespace {

PyTypeObject *deque_type = nullptr;

bool float_bits_equal(double a, double b) { return std::memcmp(&a, &b, sizeof a) == 0; }

// Both have the same static type. Pure for the builtin scalar types that guards hold.
bool static_equal(PyObject *a, PyObject *b) {
    if (Py_TYPE(a)->tp_as_buffer != nullptr && Py_TYPE(a)->tp_as_buffer->bf_getbuffer != nullptr) {
        // numpy scalars, bytes, bytearray: == would take -0.0 for 0.0
        Py_buffer left, right;
        if (PyObject_GetBuffer(a, &left, PyBUF_SIMPLE) == 0) {
            bool equal = false;
            if (PyObject_GetBuffer(b, &right, PyBUF_SIMPLE) == 0) {
                equal = left.len == right.len && std::memcmp(left.buf, right.buf, left.len) == 0;
                PyBuffer_Release(&right);
            }
            PyBuffer_Release(&left);
            PyErr_Clear();
            return equal;
        }
        PyErr_Clear();
    }
    int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal < 0) PyErr_Clear();
    return equal == 1;
}

bool members_equal(PyObject *a, PyObject *b, const char *const *names) {
    for (; *names != nullptr; names++) {
        PyObject *x = PyObject_GetAttrString(a, *names), *y = PyObject_GetAttrString(b, *names);
        bool equal = x != nullptr && y != nullptr && constant_equal(x, y);
        Py_XDECREF(x);
        Py_XDECREF(y);
        if (!equal) {
            PyErr_Clear();
            return false;
        }
    }
    return true;
}

bool sets_equal(PyObject *a, PyObject *b) {
    PyObject *left = PySequence_List(a), *right = PySequence_List(b);
    bool same = left != nullptr && right != nullptr && PyList_GET_SIZE(left) == PyList_GET_SIZE(right);
    for (Py_ssize_t i = 0; same && i < PyList_GET_SIZE(left); i++) {
        bool found = false;
        for (Py_ssize_t j = 0; !found && j < PyList_GET_SIZE(right); j++)
            found = constant_equal(PyList_GET_ITEM(left, i), PyList_GET_ITEM(right, j));
        same = found;
    }
    Py_XDECREF(left);
    Py_XDECREF(right);
    PyErr_Clear();
    return same;
}

}  // namespace

bool constant_equal(PyObject *a, PyObject *b) {
    if (a == b) return true;
    if (Py_TYPE(a) != Py_TYPE(b)) return false;
    if (PyFloat_Check(a)) return float_bits_equal(PyFloat_AS_DOUBLE(a), PyFloat_AS_DOUBLE(b));
    if (PyComplex_CheckExact(a)) {
        Py_complex x = PyComplex_AsCComplex(a), y = PyComplex_AsCComplex(b);
        return float_bits_equal(x.real, y.real) && float_bits_equal(x.imag, y.imag);
    }
    if (PyTuple_Check(a)) {
        Py_ssize_t n = PyTuple_GET_SIZE(a);
        if (n != PyTuple_GET_SIZE(b)) return false;
        for (Py_ssize_t i = 0; i < n; i++)
            if (!constant_equal(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
        return true;
    }
    if (PyFrozenSet_CheckExact(a)) return sets_equal(a, b);
    static const char *const bounds[] = {"start", "stop", "step", nullptr};
    if (PySlice_Check(a) || PyRange_Check(a)) return members_equal(a, b, bounds);
    if (PyLong_CheckExact(a) || PyUnicode_CheckExact(a)) return PyObject_RichCompareBool(a, b, Py_EQ) == 1;
    if (PyType_HasFeature(Py_TYPE(a), Py_TPFLAGS_HEAPTYPE)) return false;
    return static_equal(a, b);
}

bool lookup_is_plain(PyObject *dict, PyObject *key) {
    // struct _dictkeysobject: Py_ssize_t dk_refcnt; uint8_t dk_log2_size, dk_log2_index_bytes, dk_kind (0: keys of any
    // type). The same in 3.11 to 3.14 (Include/internal/pycore_dict.h).
    constexpr size_t kKindOffset = sizeof(Py_ssize_t) + 2;
    const char *keys = reinterpret_cast<const char *>(reinterpret_cast<PyDictObject *>(dict)->ma_keys);
    return PyUnicode_CheckExact(key) && keys[kKindOffset] != 0;
}

PyObject *instance_dict(PyObject *object) {
    if (PyType_Check(object)) {
#if PY_VERSION_HEX >= 0x030C0000
        PyObject *dict = PyType_GetDict(reinterpret_cast<PyTypeObject *>(object));
        Py_XDECREF(dict);  // the type keeps it alive
        return dict;
#else
        return reinterpret_cast<PyTypeObject *>(object)->tp_dict;
#endif
    }
    if (Py_IS_TYPE(object, &PyDictProxy_Type)) {  // what a mappingproxy shows is the one object that it refers to
        PyObject *mapping = nullptr;
        PyDictProxy_Type.tp_traverse(
            object,
            [](PyObject *referent, void *found) {
                *static_cast<PyObject **>(found) = referent;
                return 0;
            },
            &mapping);
        return mapping;
    }
    PyObject **at = _PyObject_GetDictPtr(object);
    if (at != nullptr && *at != nullptr) return *at;
    PyErr_Clear();
    PyObject *dict = PyObject_GenericGetDict(object, nullptr);
    if (dict == nullptr) {
        PyErr_Clear();
        return nullptr;
    }
    Py_DECREF(dict);  // the object keeps it alive
    return dict;
}

static bool is_deque(PyObject *object) { return PyObject_TypeCheck(object, deque_type); }

PyObject *computed_item(PyObject *sequence, Py_ssize_t index) {
    PyTypeObject *type = is_deque(sequence) ? deque_type : PyRange_Check(sequence) ? &PyRange_Type : nullptr;
    PyObject *item = type == nullptr ? nullptr : type->tp_as_sequence->sq_item(sequence, index);
    if (item == nullptr) PyErr_Clear();
    return item;
}

Py_ssize_t builtin_length(PyObject *object) {
    // The first four are flags of the type; the others walk its bases.
    if (PyDict_Check(object)) return PyDict_GET_SIZE(object);
    if (PyList_Check(object) || PyTuple_Check(object) || PyBytes_Check(object)) return Py_SIZE(object);
    if (PyUnicode_Check(object)) return PyUnicode_GET_LENGTH(object);
    if (PyAnySet_Check(object)) return PySet_GET_SIZE(object);
    if (is_deque(object)) return Py_SIZE(object);
    if (PyByteArray_Check(object)) return PyByteArray_GET_SIZE(object);
    if (PyRange_Check(object) || Py_IS_TYPE(object, &PyDictProxy_Type)) {
        Py_ssize_t n = PyObject_Size(object);
        if (n < 0) PyErr_Clear();
        return n;
    }
    return -1;
}

bool dict_has_keys(PyObject *dict, PyObject *keys) {
    Py_ssize_t n = PyTuple_GET_SIZE(keys), i = 0;
    if (!PyDict_Check(dict) || PyDict_GET_SIZE(dict) != n) return false;
    if (PyODict_Check(dict)) {
        // An OrderedDict keeps its order beside the table (move_to_end changes only that).
        PyObject *iterator = PyODict_Type.tp_iter(dict), *key;
        bool same = iterator != nullptr;
        while (same && (key = PyIter_Next(iterator)) != nullptr) {
            same = i < n && constant_equal(PyTuple_GET_ITEM(keys, i), key);
            i++;
            Py_DECREF(key);
        }
        Py_XDECREF(iterator);
        PyErr_Clear();
        return same && i == n;
    }
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &at, &key, &value)) {
        if (i >= n || !constant_equal(PyTuple_GET_ITEM(keys, i), key)) return false;
        i++;
    }
    return i == n;
}

PyObject *dict_key_at(PyObject *dict, Py_ssize_t index) {
    if (PyODict_Check(dict)) {
        PyObject *iterator = PyODict_Type.tp_iter(dict), *key = nullptr;
        for (Py_ssize_t i = 0; iterator != nullptr && i <= index; i++) {
            Py_XSETREF(key, PyIter_Next(iterator));
            if (key == nullptr) break;
        }
        Py_XDECREF(iterator);
        PyErr_Clear();
        Py_XDECREF(key);  // the dict keeps it alive
        return key;
    }
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &at, &key, &value))
        if (index-- == 0) return key;
    return nullptr;
}

PyObject *dict_find_identical(PyObject *dict, PyObject *wanted) {
    Py_ssize_t at = 0;
    PyObject *key, *value;
    while (PyDict_Next(dict, &at, &key, &value))
        if (key == wanted) return value;
    return nullptr;
}

PyObject *read_field(PyObject *object, int code) {
    if (code <= kFunctionCode) {
        if (!PyFunction_Check(object)) return nullptr;
        PyFunctionObject *function = reinterpret_cast<PyFunctionObject *>(object);
        switch (code) {
            case kFunctionGlobals: return function->func_globals;
            case kFunctionDefaults: return function->func_defaults ? function->func_defaults : Py_None;
            case kFunctionKwDefaults: return function->func_kwdefaults ? function->func_kwdefaults : Py_None;
            case kFunctionClosure: return function->func_closure ? function->func_closure : Py_None;
            default: return function->func_code;
        }
    }
    if (code == kCellContents) return PyCell_Check(object) ? PyCell_GET(object) : nullptr;
    if (!PyMethod_Check(object)) return nullptr;
    return code == kMethodSelf ? PyMethod_GET_SELF(object) : PyMethod_GET_FUNCTION(object);
}

int values_init() {
    PyObject *collections = PyImport_ImportModule("collections");
    if (collections == nullptr) return -1;
    deque_type = reinterpret_cast<PyTypeObject *>(PyObject_GetAttrString(collections, "deque"));
    Py_DECREF(collections);
    return deque_type == nullptr ? -1 : 0;
}

}  // namespace fw
