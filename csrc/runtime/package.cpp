// The C interface: packages, their entry points, and the conditions of their versions.
// Takes a file; gives what fusewright.h says. Always holds: no byte of code is used before its hash holds; nothing that
// a file or an argument holds leaves this library as a C++ exception.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <set>

#include "conditions.h"
#include "plan.h"
#include "signature.h"

namespace fw {
namespace {

struct Leaf {
    std::string name;
    int32_t dtype, gpu;  // gpu: its number; -1 for the CPU
    std::vector<Size> shape;
};

struct Symbol {
    std::string name, label;
    size_t leaf, dim;
    int64_t min, max;
};

struct Version {
    std::vector<Fact> facts;  // their symbols: the number of a leaf * FW_MOST_DIMS + the dimension
    std::unique_ptr<CallPlan> plan;
};

struct Entry {
    std::string name;
    std::vector<Leaf> leaves;
    std::vector<Symbol> symbols;
    std::vector<Fact> constraints;
    std::vector<Version> versions;
    size_t results = 0;
};

}  // namespace
}  // namespace fw

struct fw_package {
    explicit fw_package(const char *path) : file(path) {}
    fw::Mapping file;
    std::vector<std::unique_ptr<std::vector<int64_t>>> copies;  // of weights that lie at odd places
    const fw::Gpu *gpu = nullptr;                               // that the programs are on
    std::map<const void *, fw::Owned> on_gpu;                   // weights there, by their place in the file
    std::unique_ptr<fw::DeviceCode> code;
    fw::Operators operators;
    std::vector<fw::Entry> entries;
};

namespace fw {
namespace {

class Reader {
  public:
    // key: the 32 bytes of the public key that the package must be signed by; null where none is asked for.
    Reader(fw_package *package, const uint8_t *key)
        : package_(package), key_(key), parts_(read_zip(package->file.bytes)) {}

    void read() {
        if (key_ != nullptr) {
            Bytes seal = part("package.ed25519");
            require(seal.size == 64, "package.ed25519: is no signature");
            require(is_signed(part("package.json"), seal.data, key_),
                    "package.ed25519: the package was not signed by this key, or was changed");
        }
        Value manifest = json("package.json");
        named("package.json", [&] { require(manifest["format"].number() == 1, "another format"); });
        check_hashes(*named("package.json", [&] { return &manifest["hashes"]; }));
        read_weights();
        if (has(manifest, "operators"))
            named("package.json", [&] { package_->operators = read_operators(manifest["operators"]); });
        if (has(manifest, "made_with") && has(manifest["made_with"], "torch"))
            named("package.json", [&] { made_with_ = manifest["made_with"]["torch"].string(); });
        std::string target = named("package.json", [&] { return chosen_target(manifest["targets"]); });
        const Value &programs = *named("package.json", [&] { return &manifest["programs"]; });
        require(programs.kind == Value::Object && !programs.items.empty(), "package.json: has no programs");
        for (size_t i = 0; i < programs.keys.size(); i++) read_entry(programs.keys[i], programs.items[i], target);
        if (package_->gpu == nullptr) return;
        OnGpu current(package_->gpu);
        package_->gpu->wait_for_all();  // weights are there for any stream
    }

  private:
    fw_package *package_;
    const uint8_t *key_;
    Parts parts_;
    std::map<std::string, Bytes> tensors_;
    std::string made_with_;

    static bool has(const Value &object, const char *key) {
        return object.kind == Value::Object &&
               std::find(object.keys.begin(), object.keys.end(), key) != object.keys.end();
    }

    Bytes part(const std::string &name) {
        auto found = parts_.find(name);
        require(found != parts_.end(), name + ": is missing");
        return found->second;
    }

    template <typename Read>
    auto named(const std::string &name, Read read) -> decltype(read()) {
        try {
            return read();
        } catch (const Failure &failure) {
            if (failure.text.compare(0, name.size(), name) == 0) throw;
            throw Failure{failure.status, name + ": " + failure.text};
        }
    }

    Value json(const std::string &name) {
        Bytes data = part(name);
        return named(name, [&] { return read_json(data); });
    }

    void check_hashes(const Value &hashes) {
        require(hashes.kind == Value::Object, "package.json: hashes are damaged");
        std::set<std::string> hashed(hashes.keys.begin(), hashes.keys.end());
        for (const auto &[name, data] : parts_) {
            if (name == "package.json" || name == "package.ed25519") continue;
            require(hashed.erase(name) == 1, name + ": has no hash");
            // Weights have a checksum, which holds by now; against malice it says nothing.
            if (name != "weights.safetensors" || key_ != nullptr)
                require(sha256(data) == hashes[name.c_str()].string(),
                        name + ": its hash differs: the file is damaged");
        }
        require(hashed.empty(), (hashed.empty() ? "" : *hashed.begin()) + ": is missing");
    }

    void read_weights() {
        const std::string name = "weights.safetensors";
        Bytes whole = part(name);
        named(name, [&] {
            uint64_t size = 0;
            require(whole.size >= 8, "ends too early");
            std::memcpy(&size, whole.data, 8);
            require(size <= whole.size - 8, "its header ends behind its end");
            Value header = read_json({whole.data + 8, static_cast<size_t>(size)});
            require(header.kind == Value::Object, "its header is damaged");
            Bytes data{whole.data + 8 + size, whole.size - 8 - static_cast<size_t>(size)};
            for (size_t i = 0; i < header.keys.size(); i++) {
                if (header.keys[i] == "__metadata__") continue;
                const Value &range = header.items[i]["data_offsets"].list();
                int64_t start = range.at(0).within(0, int64_t(data.size) + 1),
                        end = range.at(1).within(start, int64_t(data.size) + 1);
                tensors_[header.keys[i]] = {data.data + start, static_cast<size_t>(end - start)};
            }
        });
    }

    void read_entry(const std::string &name, const Value &made, const std::string &target) {
        Entry entry;
        entry.name = name;
        Value signature = json(name + "/signature.json");
        named(name + "/signature.json", [&] { read_signature(signature, &entry); });
        if (target == "cuda") {
            named(name + "/signature.json", [&] {
                const Value &weights = signature["weights"];
                require(weights.kind == Value::Object, "weights are damaged");
                for (const Value &weight : weights.items) on_gpu(Gpu::index_of(weight["device"].string()));
                for (const Leaf &leaf : entry.leaves) on_gpu(leaf.gpu);
            });
            require(package_->gpu != nullptr, "package.json: " + name + " is not on a GPU");
        }
        OnGpu current(package_->gpu);
        named("package.json", [&] {
            for (const Value &one : made["versions"].list().items)
                if (one["target"].string() == target) entry.versions.push_back(read_version(one, signature, &entry));
        });
        require(!entry.versions.empty(), "package.json: " + name + " has no code for " + target);
        package_->entries.push_back(std::move(entry));
    }

    void read_signature(const Value &signature, Entry *entry) {
        require(signature["format"].number() == 1, "another format");
        const Value &symbols = signature["symbols"];
        require(symbols.kind == Value::Object, "symbols are damaged");
        auto symbol = [&](const std::string &name) {
            for (size_t i = 0; i < symbols.keys.size(); i++)
                if (symbols.keys[i] == name) return static_cast<int>(i);
            fail("an unknown size " + name);
        };
        for (const Value &one : signature["leaves"].list().items) {
            require(one["kind"].string() == "tensor",
                    "an argument that is no tensor is not for the runtime without Python");
            Leaf leaf{one["name"].string(), dtype_of(one["dtype"].string()), Gpu::index_of(one["device"].string()), {}};
            const Value &order = one["order"].list(), &shape = one["shape"].list();
            require(order.items.size() == shape.items.size() && shape.items.size() <= FW_MOST_DIMS,
                    "too many dimensions");
            for (size_t i = 0; i < shape.items.size(); i++) {
                require(order.at(i).number() == int64_t(i),
                        leaf.name + ": does not lie row by row, which the runtime without Python needs");
                leaf.shape.push_back(read_size(shape.at(i), symbol));
            }
            entry->leaves.push_back(std::move(leaf));
        }
        for (size_t i = 0; i < symbols.keys.size(); i++) {
            const Value &one = symbols.items[i];
            Symbol made{symbols.keys[i],
                        one["label"].string(),
                        size_t(one["leaf"].within(0, entry->leaves.size())),
                        0,
                        one["min"].number(),
                        INT64_MAX};
            made.dim = one["dim"].within(0, entry->leaves[made.leaf].shape.size());
            if (one["max"].kind != Value::Null) made.max = one["max"].number();
            entry->symbols.push_back(made);
        }
        for (const Value &one : signature["constraints"].list().items) {
            const Value &fact = one.kind == Value::Object && one.keys.size() != 0 ? one["relation"] : one;
            entry->constraints.push_back(read_fact(fact, symbol));
        }
    }

    Version read_version(const Value &record, const Value &signature, Entry *entry) {
        auto leaf_of = [&](const Value &value) { return size_t(value.within(0, entry->leaves.size())); };
        std::vector<PlanInput> inputs;
        for (const Value &one : record["inputs"].list().items) {
            const std::string &kind = one.list().at(0).string();
            PlanInput made{};
            if (kind == "leaf" || kind == "size") {
                made.kind = kind == "leaf" ? PlanInput::Leaf : PlanInput::Size;
                made.leaf = leaf_of(one.at(1));
                if (kind == "size") made.dim = one.at(2).within(0, entry->leaves[made.leaf].shape.size());
            } else {
                made = weight_input(one, signature["weights"]);
            }
            inputs.push_back(made);
        }
        std::vector<size_t> outputs;
        for (const Value &one : record["results"].list().items) {
            require(one.list().at(0).string() == "output",
                    "a result that is not computed is not for the runtime without Python");
            outputs.push_back(size_t(one.at(1).within(0, 1 << 20)));
        }
        require(entry->versions.empty() || entry->results == outputs.size(), "versions with other results");
        entry->results = outputs.size();
        Version made;
        for (const Value &one : record["facts"].list().items)
            made.facts.push_back(read_fact(one, [&](const std::string &text) {
                char *end = nullptr;
                unsigned long leaf = std::strtoul(text.c_str(), &end, 10),
                              dim = *end == '.' ? std::strtoul(end + 1, &end, 10) : ~0ul;
                require(*end == 0 && leaf < entry->leaves.size() && dim < entry->leaves[leaf].shape.size(),
                        "a condition of another form");
                return static_cast<int>(leaf * FW_MOST_DIMS + dim);
            }));
        const std::string &name = record["part"].string();
        Bytes code = part(name);
        Library library = own_library(record);
        if (has(record, "prepare")) {
            const Value &prepare = record["prepare"];
            for (const Value &size : prepare["usual"].list().items) library.usual.push_back(size.number());
            library.preparation = preparation(prepare, signature["weights"]);
        }
        made.plan = named(name, [&] {
            return std::make_unique<CallPlan>(code, std::move(inputs), std::move(outputs), std::move(library));
        });
        return made;
    }

    // What computes the inputs of a plan that depend on weights alone: a plan, then operators that make layouts of
    // their own.
    std::shared_ptr<const Preparation> preparation(const Value &prepare, const Value &weights) {
        std::vector<PlanInput> inputs;
        for (const Value &one : prepare["inputs"].list().items) inputs.push_back(weight_input(one, weights));
        size_t values = size_t(prepare["values"].within(0, 1 << 20));
        std::vector<size_t> outputs(values);
        for (size_t i = 0; i < values; i++) outputs[i] = i;
        std::vector<Preparation::Result> results;
        for (const Value &one : prepare["results"].list().items) {
            Preparation::Result made;
            if (one.list().at(0).string() == "value") {
                made.value = size_t(one.at(1).within(0, values));
            } else {
                auto found = package_->operators.find(one.at(1).string());
                require(found != package_->operators.end(), "an operator that is not described: " + one.at(1).string());
                std::vector<Argument> given;
                for (const Value &argument : one.at(2).list().items) {
                    Argument own;
                    if (argument.kind == Value::Object) {
                        own.kind = Argument::Slot;
                        own.number = size_t(argument["value"].within(0, values));
                    } else {
                        own.constant = argument;
                    }
                    given.push_back(std::move(own));
                }
                made.step = std::make_unique<OperatorStep>(
                    operator_step(found->second, std::move(given), {}, {int64_t(values)}));
            }
            results.push_back(std::move(made));
        }
        const std::string &name = prepare["part"].string();
        Bytes code = part(name);
        Library library = own_library(prepare);
        auto plan = named(name, [&] {
            return std::make_unique<CallPlan>(code, std::move(inputs), std::move(outputs), std::move(library));
        });
        return std::make_shared<const Preparation>(std::move(plan), std::move(results), values);
    }

    // Notes that something is on this GPU; nothing for -1.
    void on_gpu(int32_t index) {
        if (index < 0) return;
        require(package_->gpu == nullptr || package_->gpu->index() == index,
                "programs on several GPUs are not for the runtime without Python");
        if (package_->gpu != nullptr) return;
        package_->gpu = &Gpu::number(index);
        package_->code = std::make_unique<DeviceCode>(*package_->gpu);
    }

    // What a plan may call; `record` names the part with its kernels, where they are for a GPU.
    Library own_library(const Value &record) {
        if (has(record, "kernels")) {
            const std::string &name = record["kernels"].string();
            require(package_->code != nullptr, name + ": code for a GPU, and the program is on none");
            Bytes data = part(name);
            named(name, [&] { package_->code->add(data); });
        }
        return {&package_->operators, made_with_, package_->gpu, package_->code.get(), nullptr, {}};
    }

    PlanInput weight_input(const Value &one, const Value &weights) {
        const std::string &kind = one.list().at(0).string();
        require(kind == "state" || kind == "constant", "an input of another form");
        return weight(weights, (kind == "state" ? "" : "constant:") + one.at(1).string());
    }

    PlanInput weight(const Value &weights, const std::string &name) {
        const Value &record = weights[name.c_str()];
        auto found = tensors_.find(record["stored"].string());
        require(found != tensors_.end(), "weights.safetensors: " + name + " is missing");
        int64_t size = kDTypes[dtype_of(record["dtype"].string())].size;
        int64_t offset = record["offset"].within(0, int64_t(found->second.size) / size + 1) * size;
        PlanInput made{};
        made.kind = PlanInput::Weight;
        made.data = found->second.data + offset;
        made.reach = found->second.size - offset;
        if (Gpu::index_of(record["device"].string()) >= 0) {
            made.data = uploaded(found->second, size_t(offset));
            return made;
        }
        if (reinterpret_cast<uintptr_t>(made.data) % 16 != 0) {  // never so in a file that package() wrote
            package_->copies.push_back(std::make_unique<std::vector<int64_t>>(made.reach / 8 + 1));
            if (made.reach != 0) std::memcpy(package_->copies.back()->data(), made.data, made.reach);
            made.data = package_->copies.back()->data();
        }
        return made;
    }

    // A weight on the GPU, from `offset` of what is stored: a copy of the whole, or of its own where kernels could not
    // read it there.
    const void *uploaded(Bytes stored, size_t offset) {
        require(package_->gpu != nullptr, "weights.safetensors: a weight on a GPU, and the program is on none");
        size_t start = offset % 16 == 0 ? 0 : offset;
        const Gpu &gpu = *package_->gpu;
        Owned &found = package_->on_gpu[stored.data + start];
        if (found == nullptr) {
            found =
                Owned(gpu.allocate(int64_t(stored.size - start), gpu.thread_stream()), Free{&gpu, gpu.thread_stream()});
            gpu.upload(found.get(), stored.data + start, int64_t(stored.size - start), gpu.thread_stream());
        }
        return static_cast<const char *>(found.get()) + offset - start;
    }
};

thread_local std::string last_error;

template <typename Work>
fw_status guarded(Work work) {
    try {
        work();
        return FW_OK;
    } catch (const Failure &failure) {
        last_error = failure.text;
        return failure.status;
    } catch (const std::bad_alloc &) {
        last_error = "no memory is left";
        return FW_MEMORY;
    } catch (const std::exception &error) {
        last_error = error.what();
        return FW_FILE;
    }
}

const Entry &entry_of(const fw_package *package, size_t number) {
    if (number >= package->entries.size()) fail("the package has no entry point " + std::to_string(number), FW_INPUT);
    return package->entries[number];
}

std::string shape_text(const fw_tensor &tensor) {
    std::string text = "(";
    for (int32_t i = 0; i < tensor.ndim; i++) text += (i ? ", " : "") + std::to_string(tensor.sizes[i]);
    return text + ")";
}

void check_inputs(const Entry &entry, const fw_tensor *inputs, size_t count) {
    if (count != entry.leaves.size())
        fail(entry.name + " takes " + std::to_string(entry.leaves.size()) + " tensors, got " + std::to_string(count),
             FW_INPUT);
    for (size_t i = 0; i < count; i++) {
        const Leaf &leaf = entry.leaves[i];
        const fw_tensor &given = inputs[i];
        if (given.dtype != leaf.dtype) fail(leaf.name + " must be " + kDTypes[leaf.dtype].name, FW_INPUT);
        if (given.device != FW_CPU && (given.device != FW_CUDA || given.device_index != leaf.gpu))
            fail(leaf.name + (leaf.gpu < 0 ? " must lie on the CPU"
                                           : " must lie on the CPU, or on GPU " + std::to_string(leaf.gpu)),
                 FW_INPUT);
        if (given.ndim != int32_t(leaf.shape.size()))
            fail(leaf.name + " has " + std::to_string(leaf.shape.size()) + " dimensions, got " +
                     std::to_string(given.ndim),
                 FW_INPUT);
        int64_t count = 1;
        for (int32_t k = 0; k < given.ndim; k++)
            if (given.sizes[k] < 0 || __builtin_mul_overflow(count, given.sizes[k], &count))
                fail(leaf.name + ": a size is wrong", FW_INPUT);
        if (count != 0 &&
            (given.data == nullptr || reinterpret_cast<uintptr_t>(given.data) % kDTypes[leaf.dtype].size != 0))
            fail(leaf.name + ": its memory is missing, or not aligned as its dtype", FW_INPUT);
    }
    auto known = [&](int symbol) { return inputs[entry.symbols[symbol].leaf].sizes[entry.symbols[symbol].dim]; };
    for (size_t i = 0; i < entry.symbols.size(); i++) {
        const Symbol &symbol = entry.symbols[i];
        int64_t size = known(int(i));
        if (size < symbol.min || size > symbol.max)
            fail(entry.leaves[symbol.leaf].name + ": dimension " + std::to_string(symbol.dim) + " (" + symbol.label +
                     ") is " + std::to_string(size) + ", and must be at least " + std::to_string(symbol.min) +
                     (symbol.max == INT64_MAX ? "" : " and at most " + std::to_string(symbol.max)),
                 FW_INPUT);
    }
    for (size_t i = 0; i < count; i++)
        for (size_t k = 0; k < entry.leaves[i].shape.size(); k++) {
            int64_t wanted = evaluate(entry.leaves[i].shape[k], known);
            if (inputs[i].sizes[k] != wanted)
                fail(entry.leaves[i].name + ": dimension " + std::to_string(k) + " must be " + std::to_string(wanted) +
                         ", got " + shape_text(inputs[i]),
                     FW_INPUT);
        }
    for (const Fact &fact : entry.constraints)
        if (!holds(fact, known)) fail("the sizes of the arguments do not fit together", FW_INPUT);
}

}  // namespace
}  // namespace fw

using namespace fw;

fw_status fw_use_torch(const char *path) {
    return guarded([&] { use_torch(path); });
}

fw_status fw_load(const char *path, fw_package **package) { return fw_load_signed(path, nullptr, package); }

fw_status fw_load_signed(const char *path, const uint8_t *key, fw_package **package) {
    return guarded([&] {
        auto made = std::make_unique<fw_package>(path);
        Reader(made.get(), key).read();
        *package = made.release();
    });
}

void fw_close(fw_package *package) {
    const Gpu *gpu = package == nullptr ? nullptr : package->gpu;
    delete package;
    if (gpu != nullptr) gpu->trim();
}
const char *fw_last_error(void) { return last_error.c_str(); }
int64_t fw_item_size(int32_t dtype) { return dtype < 0 || dtype >= 10 ? 0 : kDTypes[dtype].size; }
size_t fw_entry_count(const fw_package *package) { return package->entries.size(); }

const char *fw_entry_name(const fw_package *package, size_t entry) {
    return entry < package->entries.size() ? package->entries[entry].name.c_str() : nullptr;
}

size_t fw_input_count(const fw_package *package, size_t entry) {
    return entry < package->entries.size() ? package->entries[entry].leaves.size() : 0;
}

size_t fw_output_count(const fw_package *package, size_t entry) {
    return entry < package->entries.size() ? package->entries[entry].results : 0;
}

const char *fw_input_name(const fw_package *package, size_t entry, size_t input) {
    return input < fw_input_count(package, entry) ? package->entries[entry].leaves[input].name.c_str() : nullptr;
}

fw_status fw_input(const fw_package *package, size_t entry, size_t input, fw_tensor *description) {
    return guarded([&] {
        const Entry &one = entry_of(package, entry);
        if (input >= one.leaves.size()) fail("there is no input of this number", FW_INPUT);
        const Leaf &leaf = one.leaves[input];
        *description = {nullptr, leaf.dtype, int32_t(leaf.shape.size()), {}, FW_CPU, 0};
        for (size_t i = 0; i < leaf.shape.size(); i++) {
            bool varies = leaf.shape[i].symbol >= 0 || !leaf.shape[i].sides.empty();
            description->sizes[i] = varies ? -1 : leaf.shape[i].number;
        }
    });
}

fw_status fw_output(const fw_package *package, size_t entry, size_t output, fw_tensor *description) {
    return guarded([&] {
        const Entry &one = entry_of(package, entry);
        if (output >= one.results) fail("there is no output of this number", FW_INPUT);
        *description = one.versions[0].plan->described(output);
    });
}

namespace {

void run(const fw_package *package, size_t entry, const fw_tensor *inputs, size_t input_count, fw_tensor *outputs,
         size_t output_count, void *stream) {
    const Entry &one = entry_of(package, entry);
    if (output_count != one.results)
        fail(one.name + " gives " + std::to_string(one.results) + " tensors, not " + std::to_string(output_count),
             FW_INPUT);
    check_inputs(one, inputs, input_count);
    auto known = [&](int place) { return inputs[place / FW_MOST_DIMS].sizes[place % FW_MOST_DIMS]; };
    for (const Version &version : one.versions) {
        bool fits = true;
        for (const Fact &fact : version.facts) fits = fits && holds(fact, known);
        if (fits) return version.plan->run(inputs, outputs, stream);
    }
    fail("no compiled version is for these sizes", FW_INPUT);
}

}  // namespace

fw_status fw_run_on(const fw_package *package, size_t entry, const fw_tensor *inputs, size_t input_count,
                    fw_tensor *outputs, size_t output_count, void *stream) {
    return guarded([&] { run(package, entry, inputs, input_count, outputs, output_count, stream); });
}

fw_status fw_run(const fw_package *package, size_t entry, const fw_tensor *inputs, size_t input_count,
                 fw_tensor *outputs, size_t output_count) {
    return guarded([&] {
        void *stream = package->gpu == nullptr ? nullptr : package->gpu->thread_stream();
        run(package, entry, inputs, input_count, outputs, output_count, stream);
        if (package->gpu == nullptr) return;
        try {
            OnGpu current(package->gpu);
            package->gpu->wait(stream);
        } catch (const Failure &) {
            for (size_t i = 0; i < output_count; i++) fw_free(&outputs[i]);
            throw;
        }
    });
}

fw_status fw_to_cpu(fw_tensor *tensor) {
    return guarded([&] {
        if (tensor->device == FW_CPU) return;
        const Gpu &gpu = Gpu::number(tensor->device_index);
        int64_t bytes = fw_item_size(tensor->dtype);
        for (int32_t i = 0; i < tensor->ndim; i++) bytes *= tensor->sizes[i];
        Owned made(std::malloc(bytes < 1 ? 1 : size_t(bytes)));
        if (made == nullptr) fail("no memory for " + std::to_string(bytes) + " bytes", FW_MEMORY);
        OnGpu current(&gpu);
        gpu.wait_for_all();  // it may have been made on any stream
        gpu.download(made.get(), tensor->data, bytes, gpu.thread_stream());
        gpu.wait(gpu.thread_stream());
        fw_free(tensor);
        tensor->data = made.release();
        tensor->device = FW_CPU;
        tensor->device_index = 0;
    });
}

void fw_free(fw_tensor *tensor) {
    if (tensor->device == FW_CUDA && tensor->data != nullptr) {
        guarded([&] {
            const Gpu &gpu = Gpu::number(tensor->device_index);
            gpu.free(tensor->data, gpu.thread_stream());
        });
    } else {
        std::free(tensor->data);
    }
    tensor->data = nullptr;
}
