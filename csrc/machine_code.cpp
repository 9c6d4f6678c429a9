// Machine code in memory: an object file made by LLVM, placed, relocated and made executable; freed with the Python
// object that owns it.
//
// Takes the bytes of an ELF64 relocatable file for this kind of processor and a function that gives the addresses of
// outside symbols; gives `fusewright._native.MachineCode`, whose `addresses` maps each global function to its address.
// Always holds: no page is ever writable and executable at once; every offset in the file is checked before it is
// followed; a file with a relocation or a section that this loader does not know is refused (ValueError), never loaded
// in part.
#include "native.h"
#include "checksum.h"
#include "object_code.h"

#include <new>

namespace {

struct MachineCode {
    PyObject_HEAD
    void *base;
    size_t size;
    PyObject *addresses;  // dict: name -> int
};

#if FW_LOADS_OBJECTS

using fw::object_code::Failure;
using fw::object_code::Loader;

bool ask(PyObject *resolve, const char *name, uint64_t *address) {
    PyObject *found = PyObject_CallFunction(resolve, "s", name);
    if (found == nullptr) return false;
    *address = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return !PyErr_Occurred();
}

// The addresses of the global functions: a new dict, or null with an exception.
PyObject *functions(const Loader &loader) {
    PyObject *found = PyDict_New();
    loader.each_function([&](const char *name, uint64_t value) {
        PyObject *address = found == nullptr ? nullptr : PyLong_FromUnsignedLongLong(value);
        if (address == nullptr || PyDict_SetItemString(found, name, address) < 0) Py_CLEAR(found);
        Py_XDECREF(address);
    });
    return found;
}

PyObject *load(PyTypeObject *type, const uint8_t *data, size_t size, PyObject *resolve) {
    MachineCode *self = reinterpret_cast<MachineCode *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    try {
        Loader loader(data, size,
                      [resolve](const char *name, uint64_t *address) { return ask(resolve, name, address); });
        if (loader.load()) self->addresses = functions(loader);
        if (self->addresses != nullptr) loader.release(&self->base, &self->size);
    } catch (const Failure &failure) {
        PyErr_Format(PyExc_ValueError, "machine code cannot be loaded: %s", failure.text.c_str());
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    }
    if (self->addresses == nullptr) Py_CLEAR(self);
    return reinterpret_cast<PyObject *>(self);
}

void unload(MachineCode *self) {
    if (self->base != nullptr) munmap(self->base, self->size);
}

#else

PyObject *load(PyTypeObject *, const uint8_t *, size_t, PyObject *) {
    PyErr_SetString(PyExc_NotImplementedError, "object files are loaded on Linux, on x86-64 and AArch64, only");
    return nullptr;
}

void unload(MachineCode *) {}

#endif

PyObject *code_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static const char *names[] = {"data", "resolve", nullptr};
    Py_buffer data;
    PyObject *resolve;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*O", const_cast<char **>(names), &data, &resolve)) return nullptr;
    PyObject *made = load(type, static_cast<const uint8_t *>(data.buf), static_cast<size_t>(data.len), resolve);
    PyBuffer_Release(&data);
    return made;
}

void code_dealloc(PyObject *object) {
    MachineCode *self = reinterpret_cast<MachineCode *>(object);
    unload(self);
    Py_XDECREF(self->addresses);
    Py_TYPE(object)->tp_free(object);
}

PyObject *code_addresses(PyObject *object, void *) {
    return PyDict_Copy(reinterpret_cast<MachineCode *>(object)->addresses);
}

PyObject *code_size(PyObject *object, void *) {
    return PyLong_FromSize_t(reinterpret_cast<MachineCode *>(object)->size);
}

PyGetSetDef code_fields[] = {
    {"addresses", code_addresses, nullptr, "The address of each global function, by name.", nullptr},
    {"size", code_size, nullptr, "Bytes of memory that the code takes.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject code_type = {
    PyVarObject_HEAD_INIT(nullptr, 0) "fusewright._native.MachineCode",
};

PyObject *checksum_of(PyObject *, PyObject *object) {
    Py_buffer data;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0) return nullptr;
    uint32_t found;
    Py_BEGIN_ALLOW_THREADS
    found = fw::crc32(static_cast<const uint8_t *>(data.buf), static_cast<size_t>(data.len));
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(found);
}

PyMethodDef functions_of_files[] = {
    {"crc32", checksum_of, METH_O, "The CRC-32 of a buffer, as zip files have it."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

extern "C" int fw_machine_code_init(PyObject *module) {
    PyTypeObject *type = &code_type;
    type->tp_basicsize = sizeof(MachineCode);
    type->tp_flags = Py_TPFLAGS_DEFAULT;
    type->tp_doc =
        "MachineCode(data, resolve): an object file in executable memory, for as long as this object lives; "
        "resolve(name) -> address.";
    type->tp_new = code_new;
    type->tp_dealloc = code_dealloc;
    type->tp_getset = code_fields;
    if (PyType_Ready(type) < 0 || PyModule_AddFunctions(module, functions_of_files) < 0) return -1;
    if (PyModule_AddObjectRef(module, "MachineCode", reinterpret_cast<PyObject *>(type)) < 0) return -1;
    return PyModule_AddObjectRef(module, "LOADS_OBJECTS", FW_LOADS_OBJECTS ? Py_True : Py_False);
}
