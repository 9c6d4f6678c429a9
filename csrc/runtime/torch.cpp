#include "torch.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>

#include "plan.h"

namespace fw {

namespace {

struct Row {
    const char *name;
    void **(*place)(Torch &);
    bool required;
};
#define ROW(field, symbol, required) \
    {symbol, [](Torch &made) { return reinterpret_cast<void **>(&made.field); }, required},
const Row kRows[] = {
    FUSEWRIGHT_TENSOR_CALLS(ROW)
    ROW(clone, "aoti_torch_clone", true)
    ROW(layout, "aoti_torch_get_layout", true)
    ROW(abi_version, "aoti_torch_abi_version", true)
    ROW(call_dispatcher, "torch_call_dispatcher", false)
    ROW(new_list, "torch_new_list_reserve_size", false)
    ROW(push_back, "torch_list_push_back", false)
    ROW(new_string, "torch_new_string_handle", false)
    ROW(new_value, "torch_new_stable_ivalue", false)
};
#undef ROW

std::mutex opening;
std::string chosen_path;
std::atomic<const Torch *> opened{nullptr};  // never closed: tensors of it may live
std::atomic<bool> cuda_opened{false};

int32_t code(const Torch &made, const std::string &name) {
    auto function = reinterpret_cast<int32_t (*)()>(made.function(name));
    return function == nullptr ? -1 : function();
}

std::unique_ptr<Torch> open_torch() {
    auto made = std::make_unique<Torch>();
    std::string path = chosen_path, reason = "it is not in the process";
    if (!path.empty() && path.find(".so") == std::string::npos) path += "/libtorch_cpu.so";
    // What the process has is taken: another copy would have its own threads and memory.
    made->library = dlsym(RTLD_DEFAULT, kRows[0].name) != nullptr ? RTLD_DEFAULT
                                                                  : dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD);
    bool found = dlsym(RTLD_DEFAULT, kRows[0].name) != nullptr || made->library != nullptr;
    if (!found) {
        made->library = dlopen(path.empty() ? "libtorch_cpu.so" : path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (made->library == nullptr) {
            const char *text = dlerror();
            if (text != nullptr) reason = text;
            fail("the package calls PyTorch's operators, and libtorch is not found (" + reason +
                     "): say where it is by fw_use_torch or LD_LIBRARY_PATH, or make the package by standalone=True",
                 FW_MACHINE);
        }
    }
    for (const Row &row : kRows) {
        void *address = made->function(row.name);
        if (address == nullptr && row.required)
            fail(std::string("this libtorch lacks ") + row.name + ": it is too old", FW_MACHINE);
        *row.place(*made) = address;
    }
    made->cpu = code(*made, "aoti_torch_device_type_cpu");
    made->strided = code(*made, "aoti_torch_layout_strided");
    for (int i = 0; i < 10; i++) made->dtypes[i] = code(*made, std::string("aoti_torch_dtype_") + kDTypes[i].name);
    return made;
}

// The library of GPUs beside the other: opening it registers its operators.
TorchCuda open_torch_cuda() {
    const Torch &base = torch();
    TorchCuda made;
    Dl_info about{};
    std::string path = "libtorch_cuda.so";
    if (dladdr(reinterpret_cast<void *>(base.empty_strided), &about) != 0 && about.dli_fname != nullptr &&
        std::strchr(about.dli_fname, '/') != nullptr)
        path = std::string(about.dli_fname, std::strrchr(about.dli_fname, '/') + 1) + path;
    made.library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);  // that of the process
    if (made.library == nullptr) made.library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (made.library == nullptr) {
        const char *text = dlerror();
        fail("the package calls PyTorch's operators on a GPU, and this libtorch has none for CUDA (" +
                 std::string(text == nullptr ? path : text) + ")",
             FW_MACHINE);
    }
    auto find = [&](const char *name, auto *place) {
        void *address = dlsym(made.library, name);
        if (address == nullptr) fail(std::string("this libtorch lacks ") + name + ": it is too old", FW_MACHINE);
        std::memcpy(place, &address, sizeof address);
    };
    find("aoti_torch_create_cuda_stream_guard", &made.guard);
    find("aoti_torch_delete_cuda_stream_guard", &made.delete_guard);
    int32_t (*device_type)() = nullptr;
    find("aoti_torch_device_type_cuda", &device_type);
    made.device = device_type();
    // PyTorch sets its part of CUDA up when a tensor is made there.
    int64_t one = 1;
    Handle first = nullptr;
    base.check(base.empty_strided(1, &one, &one, base.dtypes[1], made.device, 0, &first), "a tensor on the GPU");
    base.delete_handle(first);
    cuda_opened = true;
    return made;
}

}  // namespace

void use_torch(const std::string &path) {
    std::lock_guard<std::mutex> guard(opening);
    chosen_path = path;
}

const Torch &torch() {
    const Torch *found = opened.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    std::lock_guard<std::mutex> guard(opening);
    if (opened.load() == nullptr) opened.store(open_torch().release(), std::memory_order_release);
    return *opened.load();
}

void check_torch_version(const std::string &made_with) {
    uint64_t version = torch().abi_version();
    std::string text = std::to_string(version >> 56) + "." + std::to_string(version >> 48 & 255) + "." +
                       std::to_string(version >> 40 & 255);
    if (made_with != text)
        fail("the package was made with PyTorch " + made_with + ", and libtorch is of " + text + ": make it again",
             FW_MACHINE);
}

void *Torch::function(const std::string &name) const {
    void *found = dlsym(library, name.c_str());
    return found == nullptr && cuda_opened ? dlsym(torch_cuda().library, name.c_str()) : found;
}

const TorchCuda &torch_cuda() {
    static const TorchCuda found = open_torch_cuda();
    return found;
}

bool Torch::is_strided(Handle handle) const {
    int32_t found = -1;
    return layout(handle, &found) == 0 && found == strided;
}

void Torch::check(int32_t status, const std::string &what) const {
    if (status != 0) fail(error_of(*this, what), FW_RUN);
}

// --- operators by name
// ---------------------------------------------------------------------------------------------------

namespace {

Type read_type(const std::string &text, int depth = 0) {
    static const std::map<std::string, Type::Kind> simple = {
        {"Tensor", Type::Tensor}, {"int", Type::Int},       {"SymInt", Type::Int},   {"float", Type::Float},
        {"bool", Type::Bool},     {"SymBool", Type::Bool},  {"str", Type::String},   {"ScalarType", Type::DType},
        {"Layout", Type::Layout}, {"MemoryFormat", Type::MemoryFormat}, {"Device", Type::Device}};
    Type made;
    made.text = text;
    auto found = simple.find(text);
    if (found != simple.end()) made.kind = found->second;
    for (const auto &[name, kind] :
         {std::pair<std::string, Type::Kind>{"Optional[", Type::Optional}, {"List[", Type::List}})
        if (text.compare(0, name.size(), name) == 0 && text.back() == ']' && depth < 8) {
            made.kind = kind;
            made.inner = {read_type(text.substr(name.size(), text.size() - name.size() - 1), depth + 1)};
        }
    return made;
}

const std::map<std::string, const char *> kFormats = {
    {"strided", "aoti_torch_layout_strided"},
    {"contiguous_format", "aoti_torch_memory_format_contiguous_format"},
    {"preserve_format", "aoti_torch_memory_format_preserve_format"},
    {"channels_last", "aoti_torch_memory_format_channels_last"},
    {"channels_last_3d", "aoti_torch_memory_format_channels_last_3d"}};

// Whether the argument can be passed as this type.
bool fits(const Type &type, const Argument &given) {
    const Value &value = given.constant;
    bool constant = given.kind == Argument::Constant;
    switch (type.kind) {
        case Type::Tensor: return given.kind == Argument::Slot || given.kind == Argument::Private;
        case Type::Int: return given.kind == Argument::Entry || (constant && value.kind == Value::Integer);
        case Type::Float: return constant && (value.kind == Value::Real || value.kind == Value::Integer);
        case Type::Bool: return constant && (value.kind == Value::Bool || value.kind == Value::Integer);
        case Type::String:
        case Type::DType: return constant && value.kind == Value::Text;
        case Type::Layout:
        case Type::MemoryFormat: return constant && value.kind == Value::Text && kFormats.count(value.text) != 0;
        case Type::Device:
            return constant && value.kind == Value::Text && (value.text == "cpu" || Gpu::index_of(value.text) >= 0);
        case Type::Optional: return (constant && value.kind == Value::Null) || fits(type.inner[0], given);
        case Type::List:
            if (constant && value.kind == Value::List)
                return std::all_of(value.items.begin(), value.items.end(), [&](const Value &item) {
                    return fits(type.inner[0], {Argument::Constant, item, 0, {}});
                });
            return given.kind == Argument::List &&
                   std::all_of(given.items.begin(), given.items.end(),
                               [&](const Argument &item) { return fits(type.inner[0], item); });
        case Type::Other: break;
    }
    return constant && value.kind == Value::Null && type.text.compare(0, 9, "Optional[") == 0;
}

// The argument as the dispatcher's C function takes it; a new reference where it is an object.
uint64_t encode(const Type &type, const Argument &given, Handle *handles, const int64_t *values) {
    const Torch &t = torch();
    const Value &value = given.constant;
    switch (type.kind) {
        case Type::Tensor: {
            Handle source = handles[given.number], made = nullptr;
            if (source == nullptr) fail("an operator reads a tensor that does not exist yet");
            t.check(given.kind == Argument::Private ? t.clone(source, &made) : t.new_handle(source, &made),
                    "a tensor's handle");
            return reinterpret_cast<uint64_t>(made);
        }
        case Type::Int:
            return static_cast<uint64_t>(given.kind == Argument::Entry ? values[given.number] : value.integer);
        case Type::Bool: return value.integer != 0;
        case Type::Float: {
            double number = value.kind == Value::Real ? value.real : static_cast<double>(value.integer);
            uint64_t made;
            std::memcpy(&made, &number, sizeof made);
            return made;
        }
        case Type::String: {
            void *made = nullptr;
            t.check(t.new_string(value.text.data(), value.text.size(), &made), "a text");
            return reinterpret_cast<uint64_t>(made);
        }
        case Type::DType: return static_cast<uint32_t>(t.dtypes[dtype_of(value.text)]);
        case Type::Layout:
        case Type::MemoryFormat: return static_cast<uint32_t>(code(t, kFormats.at(value.text)));
        case Type::Device: {
            int32_t index = Gpu::index_of(value.text);
            uint64_t device = static_cast<uint32_t>(index < 0 ? t.cpu : torch_cuda().device);
            return device << 32 | static_cast<uint32_t>(index);
        }
        case Type::Optional: {
            if (given.kind == Argument::Constant && value.kind == Value::Null) return 0;
            uint64_t inner = encode(type.inner[0], given, handles, values), *made = nullptr;
            if (t.new_value != nullptr) t.check(t.new_value(&made), "an optional argument");
            else made = new uint64_t;  // libtorch frees it by `delete`
            *made = inner;
            return reinterpret_cast<uint64_t>(made);
        }
        case Type::List: {
            void *made = nullptr;
            size_t count = given.kind == Argument::List ? given.items.size() : value.items.size();
            t.check(t.new_list(count, &made), "a list");
            for (size_t i = 0; i < count; i++) {
                const Argument &item =
                    given.kind == Argument::List ? given.items[i] : Argument{Argument::Constant, value.items[i], 0, {}};
                t.check(t.push_back(made, encode(type.inner[0], item, handles, values)), "a list");
            }
            return reinterpret_cast<uint64_t>(made);
        }
        case Type::Other: break;
    }
    return 0;
}

void tensors_of(const Argument &argument, std::vector<size_t> *slots) {
    if (argument.kind == Argument::Slot) slots->push_back(argument.number);
    for (const Argument &item : argument.items) tensors_of(item, slots);
}

// Where the storage of a tensor begins; null where it has none that can be seen.
const char *storage_of(Handle handle, int32_t *dtype) {
    const Torch &t = torch();
    void *data = nullptr;
    int64_t offset = 0;
    if (handle == nullptr || !t.is_strided(handle) || t.data_ptr(handle, &data) != 0 ||
        t.storage_offset(handle, &offset) != 0 || t.dtype(handle, dtype) != 0)
        return nullptr;
    for (int i = 0; i < 10; i++)
        if (t.dtypes[i] == *dtype) return static_cast<const char *>(data) - offset * kDTypes[i].size;
    return nullptr;
}

}  // namespace

Operators read_operators(const Value &described) {
    Operators made;
    require(described.kind == Value::Object, "operators are damaged");
    for (size_t i = 0; i < described.keys.size(); i++) {
        const Value &one = described.items[i];
        Operator found;
        found.name = one["name"].string();
        found.overload = one["overload"].string();
        for (const Value &argument : one["arguments"].list().items) {
            found.names.push_back(argument["name"].string());
            found.types.push_back(read_type(argument["type"].string()));
            Value missing;
            missing.kind = Value::Record;
            bool has = std::find(argument.keys.begin(), argument.keys.end(), "default") != argument.keys.end();
            found.defaults.push_back(has ? argument["default"] : missing);
        }
        for (const Value &result : one["results"].list().items) found.results.push_back(read_type(result.string()));
        made.emplace(described.keys[i], std::move(found));
    }
    return made;
}

OperatorStep operator_step(const Operator &target, std::vector<Argument> given,
                           const std::vector<std::string> &keywords, std::vector<int64_t> results) {
    OperatorStep step;
    const std::string text = target.name + (target.overload.empty() ? "" : "." + target.overload);
    require(keywords.size() <= given.size(), text + ": its arguments are damaged");
    size_t plain = given.size() - keywords.size();
    require(plain <= target.types.size(), text + ": too many arguments");
    if (torch().call_dispatcher == nullptr || torch().new_list == nullptr)
        fail("calling " + text + " needs the C interface of PyTorch 2.10 or later", FW_MACHINE);
    for (size_t i = 0; i < target.types.size(); i++) {
        Argument one;
        auto named = std::find(keywords.begin(), keywords.end(), target.names[i]);
        if (i < plain) one = std::move(given[i]);
        else if (named != keywords.end()) one = std::move(given[plain + (named - keywords.begin())]);
        else {
            require(target.defaults[i].kind != Value::Record, text + ": " + target.names[i] + " is missing");
            one.constant = target.defaults[i];
        }
        if (!fits(target.types[i], one))
            fail("PyTorch's C interface cannot pass " + target.names[i] + " (" + target.types[i].text + ") to " + text +
                     ": load the package in Python, or make it by standalone=True",
                 FW_MACHINE);
        step.arguments.push_back(std::move(one));
    }
    for (size_t i = 0; i < results.size(); i++) {
        require(results[i] < 0 || i < target.results.size(), text + ": too many results");
        if (results[i] >= 0 && target.results[i].kind != Type::Tensor)
            fail("PyTorch's C interface cannot give a result of " + text + ", a " + target.results[i].text +
                     ": load the package in Python",
                 FW_MACHINE);
    }
    step.target = &target;
    step.results = std::move(results);
    return step;
}

void call_operator(const OperatorStep &step, Handle *handles, const int64_t *values) {
    const Torch &t = torch();
    const Operator &target = *step.target;
    std::vector<uint64_t> stack(std::max(step.arguments.size(), target.results.size()) + 1);
    for (size_t i = 0; i < step.arguments.size(); i++)
        stack[i] = encode(target.types[i], step.arguments[i], handles, values);
    t.check(t.call_dispatcher(target.name.c_str(), target.overload.c_str(), stack.data(), t.abi_version()),
            target.name);
    std::vector<size_t> read;
    for (const Argument &argument : step.arguments) tensors_of(argument, &read);
    for (size_t i = 0; i < target.results.size(); i++) {
        if (target.results[i].kind != Type::Tensor) continue;
        Handle made = reinterpret_cast<Handle>(stack[i]);
        if (i >= step.results.size() || step.results[i] < 0) {
            t.delete_handle(made);
            continue;
        }
        // The memory of an argument will be used again: a result that shares it gets its own.
        int32_t own = -1, other = -1;
        const char *base = storage_of(made, &own);
        bool shared = base != nullptr && std::any_of(read.begin(), read.end(), [&](size_t slot) {
                          return storage_of(handles[slot], &other) == base;
                      });
        if (shared) {
            Handle copy = nullptr;
            int32_t status = t.clone(made, &copy);
            t.delete_handle(made);
            t.check(status, target.name);
            made = copy;
        }
        handles[step.results[i]] = made;
    }
}

}  // namespace fw
