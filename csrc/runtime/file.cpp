#include "file.h"

#include "../checksum.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace fw {

namespace {

constexpr int kDeepest = 64;

uint64_t little(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value |= uint64_t(at[i]) << (8 * i);
    return value;
}

Bytes slice(Bytes from, uint64_t start, uint64_t size, const std::string &what) {
    require(start <= from.size && size <= from.size - start, what + ": lies outside of the file");
    return {from.data + start, static_cast<size_t>(size)};
}

// Sizes and places that do not fit into four bytes stand in an extra field of the directory, in this order.
void read_long(Bytes extra, uint64_t *sizes[3]) {
    for (size_t at = 0; at + 4 <= extra.size;) {
        size_t kind = little(extra.data + at, 2), size = little(extra.data + at + 2, 2);
        at += 4;
        require(size <= extra.size - at, "the zip directory is damaged");
        if (kind == 1) {
            size_t inside = at;
            for (int i = 0; i < 3; i++) {
                if (*sizes[i] != 0xffffffffu) continue;
                require(inside + 8 <= at + size, "the zip directory is damaged");
                *sizes[i] = little(extra.data + inside, 8);
                inside += 8;
            }
        }
        at += size;
    }
}

}  // namespace

Mapping::Mapping(const char *path) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) fail(std::string(path) + ": " + std::strerror(errno));
    struct stat about;
    void *made = MAP_FAILED;
    if (fstat(file, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0)
        made = mmap(nullptr, about.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    require(made != MAP_FAILED, std::string(path) + ": is empty, or no file");
    bytes = {static_cast<const uint8_t *>(made), static_cast<size_t>(about.st_size)};
}

Mapping::~Mapping() { munmap(const_cast<uint8_t *>(bytes.data), bytes.size); }

Parts read_zip(Bytes file) {
    size_t end = file.size < 22 ? 0 : file.size - 22;
    while (end > 0 && std::memcmp(file.data + end, "PK\5\6", 4) != 0 && file.size - end < 22 + 0xffff) end--;
    require(file.size >= 22 && std::memcmp(file.data + end, "PK\5\6", 4) == 0, "the zip directory: is missing");
    uint64_t count = little(file.data + end + 10, 2), size = little(file.data + end + 12, 4),
             start = little(file.data + end + 16, 4);
    if (start == 0xffffffffu || count == 0xffff) {
        require(end >= 20 && std::memcmp(file.data + end - 20, "PK\6\7", 4) == 0, "the zip directory: is damaged");
        Bytes more = slice(file, little(file.data + end - 12, 8), 56, "the zip directory");
        require(std::memcmp(more.data, "PK\6\6", 4) == 0, "the zip directory: is damaged");
        count = little(more.data + 32, 8);
        size = little(more.data + 40, 8);
        start = little(more.data + 48, 8);
    }
    Bytes directory = slice(file, start, size, "the zip directory");
    require(start + size <= end, "the zip directory: is damaged");
    Parts parts;
    size_t at = 0;
    for (uint64_t i = 0; i < count; i++) {
        require(directory.size - at >= 46 && std::memcmp(directory.data + at, "PK\1\2", 4) == 0,
                "the zip directory: is damaged");
        const uint8_t *entry = directory.data + at;
        uint64_t length = little(entry + 28, 2), extra = little(entry + 30, 2), comment = little(entry + 32, 2);
        require(directory.size - at - 46 >= length + extra + comment, "the zip directory: is damaged");
        std::string name(reinterpret_cast<const char *>(entry + 46), length);
        uint64_t compressed = little(entry + 20, 4), plain = little(entry + 24, 4), place = little(entry + 42, 4);
        uint64_t *sizes[] = {&plain, &compressed, &place};
        read_long({entry + 46 + length, extra}, sizes);
        require(little(entry + 10, 2) == 0 && plain == compressed && (entry[8] & 1) == 0, name + ": is compressed");
        require((little(entry + 38, 4) >> 28) != 0xa, name + ": is a symbolic link");
        Bytes header = slice(file, place, 30, name);
        require(std::memcmp(header.data, "PK\3\4", 4) == 0, name + ": has no header");
        uint64_t own = little(header.data + 26, 2), own_extra = little(header.data + 28, 2);
        Bytes own_name = slice(file, place + 30, own, name);
        require(own == length && std::memcmp(own_name.data, name.data(), own) == 0,
                name + ": has another name in its header");
        Bytes content = slice(file, place + 30 + own + own_extra, plain, name);
        require(crc32(content.data, content.size) == little(entry + 16, 4),
                name + ": its checksum differs: the file is damaged");
        require(parts.emplace(name, content).second, name + ": there are two parts of this name");
        at += 46 + length + extra + comment;
    }
    require(at == directory.size, "the zip directory: is damaged");
    return parts;
}

std::string sha256(Bytes data) {
    static const uint32_t rounds[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
        0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
        0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
        0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
        0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
        0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
        0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    auto turn = [](uint32_t value, int by) { return value >> by | value << (32 - by); };
    auto block = [&](const uint8_t *at) {
        uint32_t w[64], v[8];
        for (int i = 0; i < 16; i++)
            w[i] = uint32_t(at[4 * i]) << 24 | at[4 * i + 1] << 16 | at[4 * i + 2] << 8 | at[4 * i + 3];
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (turn(a, 7) ^ turn(a, 18) ^ a >> 3) + (turn(b, 17) ^ turn(b, 19) ^ b >> 10);
        }
        std::memcpy(v, state, sizeof v);
        for (int i = 0; i < 64; i++) {
            uint32_t one = v[7] + (turn(v[4], 6) ^ turn(v[4], 11) ^ turn(v[4], 25)) + ((v[4] & v[5]) ^ (~v[4] & v[6])) +
                           rounds[i] + w[i];
            uint32_t two =
                (turn(v[0], 2) ^ turn(v[0], 13) ^ turn(v[0], 22)) + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
            for (int k = 7; k > 0; k--) v[k] = v[k - 1];
            v[4] += one;
            v[0] = one + two;
        }
        for (int i = 0; i < 8; i++) state[i] += v[i];
    };
    size_t whole = data.size / 64 * 64, rest = data.size - whole;
    for (size_t i = 0; i < whole; i += 64) block(data.data + i);
    uint8_t last[128] = {};
    if (rest != 0) std::memcpy(last, data.data + whole, rest);
    last[rest] = 0x80;
    size_t padded = rest < 56 ? 64 : 128;
    for (int i = 0; i < 8; i++) last[padded - 1 - i] = static_cast<uint8_t>(uint64_t(data.size) * 8 >> (8 * i));
    for (size_t i = 0; i < padded; i += 64) block(last + i);
    std::string text;
    for (uint32_t word : state)
        for (int shift = 28; shift >= 0; shift -= 4) text += "0123456789abcdef"[word >> shift & 15];
    return text;
}

// --- values
// ------------------------------------------------------------------------------------------------------------------

const Value &Value::operator[](const char *key) const {
    require(kind == Object, std::string("no object with ") + key);
    for (size_t i = 0; i < keys.size(); i++)
        if (keys[i] == key) return items[i];
    fail(std::string(key) + " is missing");
}
const Value &Value::list() const {
    require(kind == List, "no list where there should be one");
    return *this;
}
const Value &Value::at(size_t index) const {
    require(index < items.size(), "a list is too short");
    return items[index];
}
int64_t Value::number() const {
    require(kind == Integer || kind == Bool, "no number where there should be one");
    return integer;
}
const std::string &Value::string() const {
    require(kind == Text, "no text where there should be one");
    return text;
}
int64_t Value::within(int64_t low, int64_t high) const {
    int64_t found = number();
    require(found >= low && found < high, "the number " + std::to_string(found) + " is out of range");
    return found;
}

namespace {

class Json {
  public:
    explicit Json(Bytes data) : at_(data.data), end_(data.data + data.size) {}
    Value whole() {
        Value made = value(0);
        blank();
        require(at_ == end_, "JSON with something behind it");
        return made;
    }

  private:
    const uint8_t *at_, *end_;

    void blank() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) at_++;
    }
    bool take(char wanted) {
        blank();
        if (at_ == end_ || *at_ != wanted) return false;
        at_++;
        return true;
    }
    void expect(char wanted) { require(take(wanted), std::string("JSON: no ") + wanted); }
    void word(const char *text) {
        for (; *text != 0; text++, at_++) require(at_ < end_ && *at_ == *text, "JSON: an unknown word");
    }

    Value value(int depth) {
        require(depth < kDeepest, "JSON: nested too deeply");
        blank();
        require(at_ < end_, "JSON: ends too early");
        Value made;
        if (take('{')) {
            made.kind = Value::Object;
            if (take('}')) return made;
            do {
                blank();
                made.keys.push_back(text());
                for (size_t i = 0; i + 1 < made.keys.size() && made.keys.size() < 64; i++)
                    require(made.keys[i] != made.keys.back(), "JSON: a name stands twice in an object");
                expect(':');
                made.items.push_back(value(depth + 1));
            } while (take(','));
            expect('}');
        } else if (take('[')) {
            made.kind = Value::List;
            if (take(']')) return made;
            do made.items.push_back(value(depth + 1));
            while (take(','));
            expect(']');
        } else if (*at_ == '"') {
            made.kind = Value::Text;
            made.text = text();
        } else if (*at_ == 't' || *at_ == 'f') {
            made.kind = Value::Bool;
            made.integer = *at_ == 't';
            word(made.integer ? "true" : "false");
        } else if (*at_ == 'n') {
            word("null");
        } else {
            number(&made);
        }
        return made;
    }

    void number(Value *made) {
        std::string digits;
        while (at_ < end_ && digits.size() < 64 && std::strchr("+-.0123456789eEInfinityNaN", *at_) != nullptr &&
               *at_ != 0)
            digits += static_cast<char>(*at_++);
        require(!digits.empty(), "JSON: an unknown value");
        char *stop = nullptr;
        errno = 0;
        made->integer = std::strtoll(digits.c_str(), &stop, 10);
        made->kind = Value::Integer;
        if (*stop == 0 && errno == 0) return;
        made->real = std::strtod(digits.c_str(), &stop);
        made->kind = Value::Real;
        require(*stop == 0, "JSON: a number of another form");
    }

    std::string text() {
        require(at_ < end_ && *at_ == '"', "JSON: no text where there should be one");
        std::string made;
        for (at_++; at_ < end_ && *at_ != '"'; at_++) {
            if (*at_ != '\\') {
                made += static_cast<char>(*at_);
                continue;
            }
            require(++at_ < end_, "JSON: ends too early");
            static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
            const char *found = *at_ == 0 ? nullptr : std::strchr(from, *at_);
            if (found != nullptr) {
                made += to[found - from];
                continue;
            }
            require(*at_ == 'u' && end_ - at_ > 4, "JSON: an unknown escape");
            std::string digits(reinterpret_cast<const char *>(at_ + 1), 4);
            unsigned long code = std::strtoul(digits.c_str(), nullptr, 16);
            at_ += 4;
            // Names that matter are ASCII; each half of a pair stands alone elsewhere, which only messages show.
            if (code < 0x80) made += static_cast<char>(code);
            else if (code < 0x800) made += {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
            else
                made += {static_cast<char>(0xe0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)),
                         static_cast<char>(0x80 | (code & 63))};
        }
        require(at_ < end_, "JSON: ends too early");
        at_++;
        return made;
    }
};

// The records of src/fusewright/runtime/artifact.py: how many fields each has, in the order of their numbers there.
constexpr int kFields[] = {12, 11, 6, 5, 7, 2, 2, 8, 4, 7, 1, 10, 5, 3, 1, 6, 1, 2};

class Plan {
  public:
    explicit Plan(Bytes data) : data_(data) {}
    Value whole() {
        Value made = value(0);
        require(at_ == data_.size, "a call plan with something behind it");
        return made;
    }

  private:
    Bytes data_;
    size_t at_ = 0;

    uint8_t byte() {
        require(at_ < data_.size, "a call plan ends too early");
        return data_.data[at_++];
    }
    uint64_t number() {
        uint64_t found = 0;
        for (int shift = 0;; shift += 7) {
            require(shift < 63, "a number of a call plan is too large");
            uint8_t one = byte();
            found |= uint64_t(one & 0x7f) << shift;
            if (one < 0x80) return found;
        }
    }
    Bytes bytes(uint64_t size) {
        require(size <= data_.size - at_, "a call plan ends too early");
        at_ += size;
        return {data_.data + at_ - size, static_cast<size_t>(size)};
    }
    void text(Value *made) {
        Bytes found = bytes(number());
        made->kind = Value::Text;
        made->text.assign(reinterpret_cast<const char *>(found.data), found.size);
    }
    void items(Value *made, uint64_t count, int depth) {
        require(count <= data_.size - at_, "a call plan ends too early");
        for (uint64_t i = 0; i < count; i++) made->items.push_back(value(depth + 1));
    }
    Value value(int depth) {
        require(depth < kDeepest, "a call plan is nested too deeply");
        Value made;
        switch (byte()) {
            case 'N': break;
            case 'B':
                made.kind = Value::Bool;
                made.integer = byte() != 0;
                break;
            case 'I': {
                uint64_t coded = number();
                made.kind = Value::Integer;
                made.integer = coded & 1 ? -static_cast<int64_t>((coded + 1) >> 1) : static_cast<int64_t>(coded >> 1);
                break;
            }
            case 'F':
                made.kind = Value::Real;
                std::memcpy(&made.real, bytes(8).data, 8);
                break;
            case 'S':
            case 'K':
            case 'D': text(&made); break;
            case 'O': {
                Value overload;
                text(&made);
                text(&overload);
                made.kind = Value::Operator;
                if (!overload.text.empty() && overload.text != "default") made.text += "." + overload.text;
                break;
            }
            case 'C':  // complex: nothing here reads it
                made.kind = Value::Data;
                made.data = bytes(16);
                break;
            case 'Y':
                made.kind = Value::Data;
                made.data = bytes(number());
                break;
            case 'T':
            case 'L':
                made.kind = Value::List;
                items(&made, number(), depth);
                break;
            case 'X':  // a tensor: dtype, sizes, strides, bytes
                made.kind = Value::List;
                items(&made, 3, depth);
                made.data = bytes(number());
                break;
            case 'R': {
                uint64_t which = number();
                require(which < sizeof kFields / sizeof *kFields,
                        "a call plan has a record that the runtime without Python does not know");
                made.kind = Value::Record;
                made.integer = static_cast<int64_t>(which);
                items(&made, kFields[which], depth);
                break;
            }
            default: fail("a call plan has a value of another form");
        }
        return made;
    }
};

}  // namespace

Value read_json(Bytes data) { return Json(data).whole(); }

Value read_plan(Bytes data) {
    constexpr int kForm = 6;  // VERSION in artifact.py
    require(data.size >= 10 && std::memcmp(data.data, "FWCP", 4) == 0, "is no call plan");
    require(little(data.data + 4, 2) == kForm, "a call plan of another form");
    Bytes body{data.data + 10, data.size - 10};
    require(crc32(body.data, body.size) == little(data.data + 6, 4),
            "the call plan's checksum differs: the file is damaged");
    return Plan(body).whole();
}

}  // namespace fw
