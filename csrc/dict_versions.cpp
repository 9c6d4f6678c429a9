// Versions of dicts, see dict_versions.h.
//
// Always holds: a word of the table belongs to one living, watched dict, or is 0 and belongs to none; a word other than
// 0 was given to this dict after its last change. CPython tells of a change before it makes it, and runs no other code
// in between.
#include "dict_versions.h"

#include "values.h"

#if PY_VERSION_HEX >= 0x030C0000
#include <deque>
#include <new>
#include <unordered_map>
#include <vector>
#endif

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // ma_version_tag
#endif

namespace fw {

#if PY_VERSION_HEX >= 0x030C0000

namespace {

struct Table {
    std::unordered_map<PyObject *, uint64_t *> places;
    std::deque<uint64_t> words;  // stay where they are
    std::vector<uint64_t *> unused;
    uint64_t last = 0;
};

int watcher = -1;

Table &table() {
    static Table *made = new Table;  // never destroyed: dicts die later than static objects
    return *made;
}

// CPython tells of the assignment of the value that is there already, where it stores to an instance's attribute: an
// object whose attributes are set at each call (a context variable, say) would never be as it was.
bool stays(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value) {
    return event == PyDict_EVENT_MODIFIED && lookup_is_plain(dict, key) && PyDict_GetItemWithError(dict, key) == value;
}

int changed(PyDict_WatchEvent event, PyObject *dict, PyObject *key, PyObject *value) {
    Table &all = table();
    const auto found = all.places.find(dict);
    if (found == all.places.end() || (*found->second != 0 && stays(event, dict, key, value))) return 0;
    *found->second = 0;
    if (event == PyDict_EVENT_DEALLOCATED) {
        all.unused.push_back(found->second);  // has room for each word
        all.places.erase(found);
    }
    return 0;
}

uint64_t *new_place(PyObject *dict) {
    Table &all = table();
    try {
        if (all.unused.empty()) {
            all.words.push_back(0);
            all.unused.push_back(&all.words.back());
            all.unused.reserve(all.words.size());
        }
        uint64_t *place = all.unused.back();
        all.places.emplace(dict, place);
        all.unused.pop_back();
        if (PyDict_Watch(watcher, dict) == 0) return place;
        PyErr_Clear();
        all.unused.push_back(place);
        all.places.erase(dict);
    } catch (const std::bad_alloc &) {  // then the dict has no version, and guards read it
    }
    return nullptr;
}

// CPython 3.13.0 does not tell of attributes that are stored in the object itself (python/cpython#125608, mended
// in 3.13.1).
bool is_heard_of(PyObject *dict) {
#if PY_VERSION_HEX >= 0x030D0000
    return (Py_Version >> 8) != 0x030D00 || reinterpret_cast<PyDictObject *>(dict)->ma_values == nullptr;
#else
    (void)dict;
    return true;
#endif
}

}  // namespace

const uint64_t *dict_version_place(PyObject *dict) {
    if (watcher < 0 || !is_heard_of(dict)) return nullptr;
    Table &all = table();
    const auto found = all.places.find(dict);
    uint64_t *place = found != all.places.end() ? found->second : new_place(dict);
    if (place != nullptr && *place == 0) *place = ++all.last;
    return place;
}

int dict_versions_init() {
    watcher = PyDict_AddWatcher(changed);
    if (watcher < 0) PyErr_Clear();
    return 0;
}

#else

const uint64_t *dict_version_place(PyObject *dict) { return &reinterpret_cast<PyDictObject *>(dict)->ma_version_tag; }

int dict_versions_init() { return 0; }

#endif

}  // namespace fw
