// Sizes and conditions on them, as signatures and manifests write them.
// Takes values of JSON, and what the symbols in them are; gives numbers and answers. Always holds: what int64 cannot
// hold is a Failure.
#ifndef FUSEWRIGHT_RUNTIME_CONDITIONS_H
#define FUSEWRIGHT_RUNTIME_CONDITIONS_H

#include <set>

#include "file.h"

namespace fw {

// A size: a number, a symbol, or [operator, left, right].
struct Size {
    int64_t number = 0;
    int symbol = -1;
    std::string op;
    std::vector<Size> sides;
};

struct Fact {
    std::string op;
    Size left, right;
};

template <typename Resolve>
Size read_size(const Value &value, Resolve resolve, int depth = 0) {
    Size made;
    require(depth < 32, "a size of another form");
    if (value.kind == Value::Text) {
        made.symbol = resolve(value.text);
    } else if (value.kind == Value::List) {
        require(value.items.size() == 3, "a size of another form");
        made.op = value.at(0).string();
        static const std::set<std::string> known = {"+", "*", "//", "%", "min", "max"};
        require(known.count(made.op) != 0, "a size of another form");
        made.sides = {read_size(value.at(1), resolve, depth + 1), read_size(value.at(2), resolve, depth + 1)};
    } else {
        made.number = value.number();
    }
    return made;
}

template <typename Resolve>
Fact read_fact(const Value &value, Resolve resolve) {
    Fact made{value.list().at(0).string(), read_size(value.at(1), resolve), read_size(value.at(2), resolve)};
    require(made.op == "==" || made.op == "!=" || made.op == "<" || made.op == "<=", "a condition of another form");
    return made;
}

template <typename Known>
int64_t evaluate(const Size &size, Known known) {
    if (size.symbol >= 0) return known(size.symbol);
    if (size.sides.empty()) return size.number;
    int64_t a = evaluate(size.sides[0], known), b = evaluate(size.sides[1], known), result = 0;
    if (size.op == "min") return a < b ? a : b;
    if (size.op == "max") return a > b ? a : b;
    bool bad = false;
    if (size.op == "+") bad = __builtin_add_overflow(a, b, &result);
    else if (size.op == "*") bad = __builtin_mul_overflow(a, b, &result);
    else {
        bad = b == 0 || (a == INT64_MIN && b == -1);
        if (!bad) result = size.op == "//" ? a / b - (a % b != 0 && (a % b < 0) != (b < 0)) : (a % b + b) % b;
    }
    if (bad) fail("a size is too large, or divided by zero", FW_INPUT);
    return result;
}

template <typename Known>
bool holds(const Fact &fact, Known known) {
    int64_t a = evaluate(fact.left, known), b = evaluate(fact.right, known);
    return fact.op == "==" ? a == b : fact.op == "!=" ? a != b : fact.op == "<" ? a < b : a <= b;
}

}  // namespace fw
#endif
