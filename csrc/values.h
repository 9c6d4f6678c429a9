// Exact reads of builtin containers and exact comparison of constants, for guards: nothing here runs Python code unless
// said so.
#ifndef FUSEWRIGHT_VALUES_H
#define FUSEWRIGHT_VALUES_H

#include <cstdint>

#include "native.h"

namespace fw {

// Same type and same value: floats bit for bit, containers of constants element by element, instances of user classes
// by identity.
bool constant_equal(PyObject *expected, PyObject *actual);

// Whether looking `key` up in `dict` runs no Python code (an exact str in a table of exact strs only).
bool lookup_is_plain(PyObject *dict, PyObject *key);

// A type's version, 0 when it has none now. Equal versions mean that no attribute of it or of its bases has changed.
inline unsigned int type_version(PyTypeObject *type) {
#if PY_VERSION_HEX < 0x030D0000
    if (!(type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#endif
    return type->tp_version_tag;
}

// The instance dictionary (of a type: its namespace), borrowed; NULL when there is none. Makes it exist where CPython
// defers that.
PyObject *instance_dict(PyObject *object);

// len() of a builtin container, string or subclass by the builtin's own count; -1 for anything else.
Py_ssize_t builtin_length(PyObject *object);

// Whether the dict's keys, in its own order, are `keys` (constants by value, others by identity).
bool dict_has_keys(PyObject *dict, PyObject *keys);

// The index-th key in the dict's own order, borrowed, or NULL.
PyObject *dict_key_at(PyObject *dict, Py_ssize_t index);

// The dict's value at `key`, where `key` is found by identity only; borrowed, or NULL.
PyObject *dict_find_identical(PyObject *dict, PyObject *key);

// The value of a plain C attribute that is read without running Python code; borrowed. `code` is a FieldCode.
enum FieldCode {
    kGeneric,
    kFunctionGlobals,
    kFunctionDefaults,
    kFunctionKwDefaults,
    kFunctionClosure,
    kFunctionCode,
    kCellContents,
    kMethodSelf,
    kMethodFunction
};
PyObject *read_field(PyObject *object, int code);

// The item of a deque or range (a new reference; index in range), NULL for anything else.
PyObject *computed_item(PyObject *sequence, Py_ssize_t index);

int values_init();

}  // namespace fw
#endif
