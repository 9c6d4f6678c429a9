// What a package file is made of, checked: zip parts, JSON, hashes, and the values of a call plan.
// Takes bytes; gives views of them and plain values. Always holds: what is wrong is a Failure that names the part, and
// no more is allocated than in proportion to the file.
#ifndef FUSEWRIGHT_RUNTIME_FILE_H
#define FUSEWRIGHT_RUNTIME_FILE_H

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fusewright.h"

namespace fw {

struct Failure {
    fw_status status;
    std::string text;
};

[[noreturn]] inline void fail(const std::string &text, fw_status status = FW_FILE) { throw Failure{status, text}; }
inline void require(bool holds, const std::string &text) {
    if (!holds) fail(text);
}

struct Bytes {
    const uint8_t *data = nullptr;
    size_t size = 0;
};

// A file in memory, for as long as this lives.
class Mapping {
  public:
    explicit Mapping(const char *path);
    ~Mapping();
    Mapping(const Mapping &) = delete;
    Bytes bytes;
};

using Parts = std::map<std::string, Bytes>;
Parts read_zip(Bytes file);  // checks the checksum of each part
std::string sha256(Bytes data);

// A value of JSON, or of a call plan.
struct Value {
    enum Kind { Null, Bool, Integer, Real, Text, List, Object, Record, Data, Operator } kind = Null;
    int64_t integer = 0;  // of a record: its number
    double real = 0;
    std::string text;  // of an operator: namespace::name.overload
    std::vector<Value> items;
    std::vector<std::string> keys;  // of an object
    Bytes data;

    const Value &operator[](const char *key) const;
    const Value &at(size_t index) const;
    const Value &list() const;
    int64_t number() const;
    const std::string &string() const;
    // A number within [low, high).
    int64_t within(int64_t low, int64_t high) const;
};

Value read_json(Bytes data);
Value read_plan(Bytes data);  // with its header

}  // namespace fw
#endif
