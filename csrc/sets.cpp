// Sets as they are: set_layout and set_filled. The order of a set's elements follows from its table, and the table from
// all that was ever added and removed; a set that is made again gets the same table, and so the same order.
#include "native.h"

namespace {

// What CPython writes in the place of an element that was removed; null where sets are not laid out as assumed here.
PyObject *dummy = nullptr;

PySetObject *as_set(PyObject *object) { return reinterpret_cast<PySetObject *>(object); }

// (mask, finger, ((slot, hash), ...)), in the order of the slots; a hash of None: an element was removed there.
PyObject *set_layout(PyObject *, PyObject *object) {
    if (!PyAnySet_Check(object)) return PyErr_Format(PyExc_TypeError, "set_layout(set) takes a set or frozenset");
    if (dummy == nullptr) Py_RETURN_NONE;
    PySetObject *set = as_set(object);
    PyObject *slots = PyTuple_New(set->fill);
    if (slots == nullptr) return nullptr;
    for (Py_ssize_t at = 0, n = 0; at <= set->mask && n < set->fill; at++) {
        const setentry &entry = set->table[at];
        if (entry.key == nullptr) continue;
        PyObject *pair = entry.key == dummy ? Py_BuildValue("nO", at, Py_None) : Py_BuildValue("nn", at, entry.hash);
        if (pair == nullptr) {
            Py_DECREF(slots);
            return nullptr;
        }
        PyTuple_SET_ITEM(slots, n++, pair);
    }
    return Py_BuildValue("nnN", set->mask, set->finger, slots);
}

struct Place {
    Py_ssize_t slot;
    Py_hash_t hash;
    PyObject *element;  // borrowed; the dummy where one was removed
};

// Where each element belongs. False: at least one has another hash than it had, so the layout says nothing. The hash of
// an element whose place in `known` is true is not asked for. -1 with an error set.
int places_of(PyObject *slots, PyObject *known, PyObject *elements, Py_ssize_t mask, std::vector<Place> &places) {
    Py_ssize_t next = 0, count = PySequence_Fast_GET_SIZE(elements);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); i++) {
        Py_ssize_t slot;
        PyObject *hash;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(slots, i), "nO", &slot, &hash)) return -1;
        if (slot < 0 || slot > mask) return 0;
        if (hash == Py_None) {
            places.push_back({slot, -1, dummy});
            continue;
        }
        if (next >= count) return 0;
        PyObject *element = PySequence_Fast_GET_ITEM(elements, next);
        Py_hash_t had = PyLong_AsSsize_t(hash);
        if (had == -1 && PyErr_Occurred()) return -1;
        if (next >= PyTuple_GET_SIZE(known) || PyTuple_GET_ITEM(known, next) != Py_True) {
            Py_hash_t has = PyObject_Hash(element);
            if (has == -1) return -1;
            if (has != had) return 0;
        }
        places.push_back({slot, had, element});
        next++;
    }
    return next == count;
}

// Fills a set that holds nothing, and that nobody else sees. -1 with an error set.
int lay_out(PySetObject *set, Py_ssize_t mask, Py_ssize_t finger, const std::vector<Place> &places) {
    if (mask + 1 > PySet_MINSIZE) {
        setentry *table = PyMem_New(setentry, mask + 1);
        if (table == nullptr) return PyErr_NoMemory(), -1;
        for (Py_ssize_t at = 0; at <= mask; at++) table[at] = {nullptr, 0};
        set->table = table;
        set->mask = mask;
    }
    for (const Place &place : places) {
        if (set->table[place.slot].key != nullptr) continue;  // a layout names each slot once
        set->table[place.slot] = {place.element, place.hash};
        set->fill++;
        if (place.element == dummy) continue;
        Py_INCREF(place.element);
        set->used++;
    }
    set->finger = finger;
    return 0;
}

// A new set of the class `target`, or the set `target`, emptied. Null with an error set.
PyObject *emptied(PyObject *target) {
    PyTypeObject *type = PyType_Check(target) ? reinterpret_cast<PyTypeObject *>(target) : nullptr;
    if (type == nullptr && PySet_Check(target)) return PySet_Clear(target) == 0 ? Py_NewRef(target) : nullptr;
    for (PyTypeObject *base : {&PySet_Type, &PyFrozenSet_Type})
        if (type != nullptr && PyType_IsSubtype(type, base)) {
            fw::Held none(PyTuple_New(0));
            return none.get() == nullptr ? nullptr : base->tp_new(type, none.get(), nullptr);
        }
    return PyErr_Format(PyExc_TypeError, "set_filled takes a set, or a class of sets");
}

// set_filled(target, layout, known, elements)
PyObject *set_filled(PyObject *, PyObject *args) {
    PyObject *target, *layout, *known, *given, *slots = nullptr;
    if (!PyArg_ParseTuple(args, "OOO!O", &target, &layout, &PyTuple_Type, &known, &given)) return nullptr;
    fw::Held elements(PySequence_Fast(given, "set_filled takes the elements as a list"));
    if (elements.get() == nullptr) return nullptr;
    std::vector<Place> places;
    Py_ssize_t mask = 0, finger = 0;
    int fits = 0;
    if (dummy != nullptr && layout != Py_None) {
        if (!PyArg_ParseTuple(layout, "nnO!", &mask, &finger, &PyTuple_Type, &slots)) return nullptr;
        bool table = mask >= PySet_MINSIZE - 1 && (mask & (mask + 1)) == 0 && PyTuple_GET_SIZE(slots) <= mask;
        if (table) fits = places_of(slots, known, elements.get(), mask, places);
        if (fits < 0) return nullptr;
    }
    fw::Held made(emptied(target));
    if (made.get() == nullptr) return nullptr;
    if (fits == 1 && as_set(made.get())->fill == 0 && as_set(made.get())->mask == PySet_MINSIZE - 1) {
        if (lay_out(as_set(made.get()), mask, finger, places) < 0) return nullptr;
    } else {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(elements.get()); i++)
            if (PySet_Add(made.get(), PySequence_Fast_GET_ITEM(elements.get(), i)) < 0) return nullptr;
    }
    return made.release();
}

// Finds the dummy in a set of which one of two elements was removed.
int find_dummy() {
#ifndef Py_GIL_DISABLED
    PyObject *set = PySet_New(nullptr), *one = PyLong_FromLong(1), *two = PyLong_FromLong(2);
    bool ok = set != nullptr && one != nullptr && two != nullptr;
    ok = ok && PySet_Add(set, one) == 0 && PySet_Add(set, two) == 0 && PySet_Discard(set, one) == 1;
    PySetObject *held = as_set(set);
    bool known = ok && held->mask == PySet_MINSIZE - 1 && held->fill == 2 && held->used == 1;
    known = known && held->table == held->smalltable && held->table[2].key == two && held->table[2].hash == 2;
    if (known && held->table[1].hash == -1) dummy = held->table[1].key;
    Py_XDECREF(set);
    Py_XDECREF(one);
    Py_XDECREF(two);
    return ok ? 0 : -1;
#else
    return 0;
#endif
}

PyMethodDef functions[] = {
    {"set_layout", set_layout, METH_O,
     "set_layout(set) -> where the set's table holds which hash, for set_filled; None if that is not known."},
    {"set_filled", fw::caught<set_filled>, METH_VARARGS,
     "set_filled(target, layout, known, elements) -> a set, emptied, or a new one of a class, with these elements "
     "where the layout has them. known: for each element whether its hash is not to be asked for."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int fw_sets_init(PyObject *module) { return find_dummy() == 0 ? PyModule_AddFunctions(module, functions) : -1; }
