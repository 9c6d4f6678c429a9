// A call of a library's C function whose arguments are only known when a call plan is read.
// Takes the encoding that codegen/extern_calls.py made, handles by slot and values by entry; gives what the function
// says. Always holds: no Python and no PyTorch header is needed, so that packages run without either.
#ifndef FUSEWRIGHT_LIBRARY_CALL_H
#define FUSEWRIGHT_LIBRARY_CALL_H

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fw {

// An at::Tensor*, as the aoti_torch_* functions take it.
using Handle = void *;

// How one integer-class argument of a C function is made; in the order of INTEGER_KINDS in codegen/call_plan_types.py.
enum class ArgKind : uint8_t {
    Immediate,     // the payload itself
    Value,         // values[payload]
    ValueAddress,  // &values[payload]: an int array, or an optional int that is present
    ValueAddressAddress,
    Handle,         // the slot's handle
    HandleAddress,  // its address: a list of tensors, or an optional tensor that is present
    Bytes,          // address of constant bytes
    BytesAddress,   // address of that address
    Out,            // address where the result's handle is put
    Scratch,        // address where a number is put that nobody reads
};
struct Arg {
    ArgKind kind;
    int64_t payload;
};
constexpr int kMaxIntegers = 24, kMaxDoubles = 6;
struct ExternStep {
    void *function;
    std::vector<Arg> integers;
    std::vector<double> doubles;
    std::vector<std::string> bytes;
    std::vector<int32_t> results;
    std::string name;
};

namespace library_call {

// Calls a C function of integer-class and double arguments. On x86-64 System V and 64-bit ARM Linux the two classes
// travel in separate registers and only integers spill to the stack (in order, eight bytes each), so passing all
// integers first, then the doubles, and more of either than the function takes, is the same call for every mixture of
// up to eight doubles.
template <size_t... I>
int32_t with(void *function, const int64_t *i, const double *d, std::index_sequence<I...>) {
    using Function = int32_t (*)(decltype(int64_t(I))..., double, double, double, double, double, double);
    return reinterpret_cast<Function>(function)(i[I]..., d[0], d[1], d[2], d[3], d[4], d[5]);
}

template <typename T>
int64_t as_integer(T *pointer) {
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(pointer));
}

}  // namespace library_call

// 0 where the function succeeded; the results' handles are in `handles` then, and the caller's.
inline int32_t call_library(const ExternStep &step, Handle *handles, const int64_t *values) {
    using library_call::as_integer;
    int64_t integers[kMaxIntegers] = {0}, indirect[kMaxIntegers];
    double doubles[kMaxDoubles] = {0};
    size_t count = step.integers.size();
    for (size_t i = 0; i < count; i++) {
        const Arg &arg = step.integers[i];
        int64_t n = arg.payload;
        switch (arg.kind) {
            case ArgKind::Immediate: integers[i] = n; break;
            case ArgKind::Scratch: integers[i] = as_integer(&indirect[i]); break;
            case ArgKind::Value: integers[i] = values[n]; break;
            case ArgKind::ValueAddress: integers[i] = as_integer(values + n); break;
            case ArgKind::ValueAddressAddress:
                indirect[i] = as_integer(values + n);
                integers[i] = as_integer(&indirect[i]);
                break;
            case ArgKind::Handle: integers[i] = as_integer(static_cast<char *>(handles[n])); break;
            case ArgKind::HandleAddress:
            case ArgKind::Out: integers[i] = as_integer(&handles[n]); break;
            case ArgKind::Bytes: integers[i] = as_integer(step.bytes[n].data()); break;
            case ArgKind::BytesAddress:
                indirect[i] = as_integer(step.bytes[n].data());
                integers[i] = as_integer(&indirect[i]);
                break;
        }
    }
    for (size_t i = 0; i < step.doubles.size(); i++) doubles[i] = step.doubles[i];
    if (count <= 6) return library_call::with(step.function, integers, doubles, std::make_index_sequence<6>());
    if (count <= 14) return library_call::with(step.function, integers, doubles, std::make_index_sequence<14>());
    return library_call::with(step.function, integers, doubles, std::make_index_sequence<kMaxIntegers>());
}

}  // namespace fw
#endif
