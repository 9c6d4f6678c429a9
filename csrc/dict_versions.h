// Versions of dicts: numbers never used twice, so that an equal version means the same dict with the same content.
//
// CPython 3.11 keeps one in each dict. From 3.12 on (3.13 keeps none) they are ours: a dict that is asked about is
// watched from then on (PyDict_Watch), and its version stands in a table until the dict changes or dies. The table's
// words lie side by side, so looking whether many dicts are as they were reads an eighth of the cache lines that the
// dicts themselves would take.
#ifndef FUSEWRIGHT_DICT_VERSIONS_H
#define FUSEWRIGHT_DICT_VERSIONS_H

#include <cstdint>

#include "native.h"

namespace fw {

// Whether versions stand in a table of ours: they can then be read whatever has become of the dict.
#if PY_VERSION_HEX >= 0x030C0000
constexpr bool kVersionsApart = true;
#else
constexpr bool kVersionsApart = false;
#endif

// Where the dict's version stands; NULL where it has none (every watcher of the process is taken, or CPython tells no
// watcher of its changes). Never raises.
const uint64_t *dict_version_place(PyObject *dict);

// The dict's version, 0 where it has none.
inline uint64_t dict_version(PyObject *dict) {
    const uint64_t *place = dict_version_place(dict);
    return place == nullptr ? 0 : *place;
}

int dict_versions_init();

}  // namespace fw
#endif
