// Machine code in memory: an object file made by LLVM, placed, relocated and made executable; freed with the Python object that owns it.
//
// Takes the bytes of an ELF64 relocatable file for x86-64 and a function that gives the addresses of outside symbols; gives
// `fusewright._native.MachineCode`, whose `addresses` maps each global function to its address.
// Always holds: no page is ever writable and executable at once; every offset in the file is checked before it is followed; a file with
// a relocation or a section that this loader does not know is refused (ValueError), never loaded in part.
#include "native.h"

#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#if defined(__linux__) && defined(__x86_64__)
#define FW_LOADS_OBJECTS 1
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>
#else
#define FW_LOADS_OBJECTS 0
#endif

namespace {

struct MachineCode {
    PyObject_HEAD
    void *base;
    size_t size;
    PyObject *addresses;  // dict: name -> int
};

#if FW_LOADS_OBJECTS

constexpr size_t kStub = 16;            // jmp *0(%rip) and the address it reads
constexpr size_t kLargest = 1u << 30;   // relative addresses reach 2 GB: stay well inside
enum Region { kCode, kData, kWritable, kRegions };

struct Failure {
    std::string text;
};

[[noreturn]] void refuse(const std::string &text) { throw Failure{text}; }

size_t aligned(size_t value, size_t to) { return (value + to - 1) / to * to; }

class Loader {
  public:
    Loader(const uint8_t *data, size_t size, PyObject *resolve) : data_(data), size_(size), resolve_(resolve) {}
    ~Loader() {
        if (base_ != nullptr) munmap(base_, total_);
    }

    // Places everything. False with a Python exception when `resolve` raised; throws Failure for a file that cannot be loaded.
    bool load() {
        read_sections();
        lay_out();
        if (!find_symbols()) return false;
        place();
        for (const Elf64_Shdr &section : sections_)
            if (section.sh_type == SHT_RELA) relocate(section);
        protect();
        return true;
    }

    // The addresses of the global functions: a new dict, or null with an exception.
    PyObject *functions() const {
        PyObject *found = PyDict_New();
        for (size_t i = 0; found != nullptr && i < symbols_.size(); i++) {
            const Elf64_Sym &symbol = symbols_[i];
            if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || ELF64_ST_BIND(symbol.st_info) == STB_LOCAL) continue;
            PyObject *address = PyLong_FromUnsignedLongLong(values_[i]);
            if (address == nullptr || PyDict_SetItemString(found, name_of(symbol), address) < 0) Py_CLEAR(found);
            Py_XDECREF(address);
        }
        return found;
    }

    void release(void **base, size_t *size) {
        *base = base_;
        *size = total_;
        base_ = nullptr;
    }

  private:
    const uint8_t *data_;
    size_t size_;
    PyObject *resolve_;
    std::vector<Elf64_Shdr> sections_;
    std::vector<size_t> places_;        // of each section in the mapping
    std::vector<bool> loaded_;
    std::vector<Elf64_Sym> symbols_;
    std::vector<uint64_t> values_;      // the address of each symbol
    std::vector<size_t> stubs_;         // offset of each undefined symbol's stub in the mapping
    size_t strings_ = 0, strings_size_ = 0;
    size_t starts_[kRegions + 1] = {};
    uint8_t *base_ = nullptr;
    size_t total_ = 0;

    const uint8_t *at(uint64_t offset, uint64_t count) const {
        if (offset > size_ || count > size_ - offset) refuse("the object file ends too early");
        return data_ + offset;
    }

    const char *name_of(const Elf64_Sym &symbol) const {
        if (symbol.st_name >= strings_size_) refuse("a symbol's name is outside the string table");
        return reinterpret_cast<const char *>(data_ + strings_ + symbol.st_name);
    }

    void read_sections() {
        Elf64_Ehdr header;
        std::memcpy(&header, at(0, sizeof header), sizeof header);
        if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_type != ET_REL ||
            header.e_machine != EM_X86_64 || header.e_shentsize != sizeof(Elf64_Shdr))
            refuse("not an object file for x86-64");
        sections_.resize(header.e_shnum);
        std::memcpy(sections_.data(), at(header.e_shoff, header.e_shnum * sizeof(Elf64_Shdr)), header.e_shnum * sizeof(Elf64_Shdr));
        for (const Elf64_Shdr &section : sections_) {
            if (section.sh_type != SHT_SYMTAB) continue;
            if (section.sh_entsize != sizeof(Elf64_Sym) || section.sh_link >= sections_.size()) refuse("a symbol table of another form");
            const uint8_t *table = at(section.sh_offset, section.sh_size);
            symbols_.resize(section.sh_size / sizeof(Elf64_Sym));
            std::memcpy(symbols_.data(), table, symbols_.size() * sizeof(Elf64_Sym));
            const Elf64_Shdr &strings = sections_[section.sh_link];
            strings_ = strings.sh_offset;
            strings_size_ = strings.sh_size;
            if (strings_size_ == 0 || at(strings_, strings_size_)[strings_size_ - 1] != 0) refuse("a string table without an end");
        }
    }

    // Unwind tables are left out: nothing unwinds through a kernel.
    static bool wanted(const Elf64_Shdr &section) {
        bool content = section.sh_type == SHT_PROGBITS || section.sh_type == SHT_NOBITS;
        return (section.sh_flags & SHF_ALLOC) != 0 && content && section.sh_size != 0;
    }

    static Region region_of(const Elf64_Shdr &section) {
        return (section.sh_flags & SHF_EXECINSTR) != 0 ? kCode : (section.sh_flags & SHF_WRITE) != 0 ? kWritable : kData;
    }

    void lay_out() {
        size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        places_.resize(sections_.size());
        loaded_.resize(sections_.size());
        stubs_.resize(symbols_.size());
        size_t end = 0;
        for (int region = 0; region < kRegions; region++) {
            starts_[region] = end = aligned(end, page);
            for (size_t i = 0; i < sections_.size(); i++) {
                const Elf64_Shdr &section = sections_[i];
                if (!wanted(section) || region_of(section) != region) continue;
                if ((section.sh_flags & SHF_TLS) != 0) refuse("thread-local data");
                if (section.sh_size > kLargest || section.sh_addralign > page) refuse("a section that is too large");
                end = aligned(end, section.sh_addralign == 0 ? 1 : section.sh_addralign);
                places_[i] = end;
                loaded_[i] = true;
                end += section.sh_size;
                if (end > kLargest) refuse("an object file that is too large");
            }
            if (region != kCode) continue;
            end = aligned(end, kStub);
            for (size_t i = 1; i < symbols_.size(); i++) {
                if (symbols_[i].st_shndx != SHN_UNDEF) continue;
                stubs_[i] = end;
                end += kStub;
            }
        }
        starts_[kRegions] = total_ = aligned(end == 0 ? 1 : end, page);
        void *made = mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (made == MAP_FAILED) refuse("no memory for machine code");
        base_ = static_cast<uint8_t *>(made);
    }

    bool find_symbols() {
        values_.assign(symbols_.size(), 0);
        for (size_t i = 1; i < symbols_.size(); i++) {
            const Elf64_Sym &symbol = symbols_[i];
            if (symbol.st_shndx == SHN_UNDEF) {
                PyObject *found = PyObject_CallFunction(resolve_, "s", name_of(symbol));
                if (found == nullptr) return false;
                values_[i] = PyLong_AsUnsignedLongLong(found);
                Py_DECREF(found);
                if (PyErr_Occurred()) return false;
                if (values_[i] == 0) refuse(std::string("no address for ") + name_of(symbol));
            } else if (symbol.st_shndx < sections_.size() && loaded_[symbol.st_shndx]) {
                if (symbol.st_value > sections_[symbol.st_shndx].sh_size) refuse("a symbol outside its section");
                values_[i] = reinterpret_cast<uint64_t>(base_) + places_[symbol.st_shndx] + symbol.st_value;
            }
        }
        return true;
    }

    void place() {
        for (size_t i = 0; i < sections_.size(); i++) {
            if (!loaded_[i] || sections_[i].sh_type == SHT_NOBITS) continue;
            std::memcpy(base_ + places_[i], at(sections_[i].sh_offset, sections_[i].sh_size), sections_[i].sh_size);
        }
        for (size_t i = 1; i < symbols_.size(); i++) {
            if (symbols_[i].st_shndx != SHN_UNDEF) continue;
            static const uint8_t jump[] = {0xff, 0x25, 0x02, 0, 0, 0, 0x0f, 0x0b};  // jmp *2(%rip); ud2; then the address
            std::memcpy(base_ + stubs_[i], jump, sizeof jump);
            std::memcpy(base_ + stubs_[i] + sizeof jump, &values_[i], 8);
        }
    }

    void relocate(const Elf64_Shdr &table) {
        if (table.sh_info >= sections_.size() || !loaded_[table.sh_info]) return;
        const Elf64_Shdr &target = sections_[table.sh_info];
        if (table.sh_entsize != sizeof(Elf64_Rela) || target.sh_type == SHT_NOBITS) refuse("a relocation table of another form");
        const uint8_t *entries = at(table.sh_offset, table.sh_size);
        for (size_t i = 0; i < table.sh_size / sizeof(Elf64_Rela); i++) {
            Elf64_Rela one;
            std::memcpy(&one, entries + i * sizeof one, sizeof one);
            apply(one, places_[table.sh_info], target.sh_size);
        }
    }

    void apply(const Elf64_Rela &one, size_t section, size_t section_size) {
        size_t index = ELF64_R_SYM(one.r_info);
        if (index >= symbols_.size() || values_[index] == 0) refuse("a relocation against a symbol without a place");
        uint8_t *where = base_ + section + one.r_offset;
        uint64_t here = reinterpret_cast<uint64_t>(where), symbol = values_[index];
        auto room = [&](size_t bytes) {
            if (one.r_offset > section_size || bytes > section_size - one.r_offset) refuse("a relocation outside its section");
        };
        switch (ELF64_R_TYPE(one.r_info)) {
            case R_X86_64_64: {
                room(8);
                uint64_t value = symbol + one.r_addend;
                std::memcpy(where, &value, 8);
                return;
            }
            case R_X86_64_PC64: {
                room(8);
                uint64_t value = symbol + one.r_addend - here;
                std::memcpy(where, &value, 8);
                return;
            }
            case R_X86_64_PLT32:
                if (stubs_[index] != 0) symbol = reinterpret_cast<uint64_t>(base_) + stubs_[index];
                [[fallthrough]];
            case R_X86_64_PC32: {
                room(4);
                int64_t value = static_cast<int64_t>(symbol + one.r_addend - here);
                if (value != static_cast<int32_t>(value)) refuse("an address that is too far away");
                int32_t narrow = static_cast<int32_t>(value);
                std::memcpy(where, &narrow, 4);
                return;
            }
            case R_X86_64_GOTPCREL:
            case R_X86_64_GOTPCRELX:
            case R_X86_64_REX_GOTPCRELX: {
                // The second half of a stub is the word that a global offset table would hold.
                room(4);
                if (stubs_[index] == 0) refuse("a table entry for a symbol of the file");
                uint64_t word = reinterpret_cast<uint64_t>(base_) + stubs_[index] + 8;
                int32_t narrow = static_cast<int32_t>(word + one.r_addend - here);
                std::memcpy(where, &narrow, 4);
                return;
            }
            default: refuse("an unknown kind of relocation (" + std::to_string(ELF64_R_TYPE(one.r_info)) + ")");
        }
    }

    void protect() {
        static const int rights[] = {PROT_READ | PROT_EXEC, PROT_READ, PROT_READ | PROT_WRITE};
        for (int region = 0; region < kRegions; region++) {
            size_t size = starts_[region + 1] - starts_[region];
            if (size != 0 && mprotect(base_ + starts_[region], size, rights[region]) != 0) refuse("machine code may not be made executable here");
        }
    }
};

PyObject *load(PyTypeObject *type, const uint8_t *data, size_t size, PyObject *resolve) {
    MachineCode *self = reinterpret_cast<MachineCode *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    try {
        Loader loader(data, size, resolve);
        if (loader.load()) self->addresses = loader.functions();
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
    PyErr_SetString(PyExc_NotImplementedError, "object files are loaded on Linux x86-64 only");
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

PyObject *code_addresses(PyObject *object, void *) { return PyDict_Copy(reinterpret_cast<MachineCode *>(object)->addresses); }

PyObject *code_size(PyObject *object, void *) { return PyLong_FromSize_t(reinterpret_cast<MachineCode *>(object)->size); }

PyGetSetDef code_fields[] = {
    {"addresses", code_addresses, nullptr, "The address of each global function, by name.", nullptr},
    {"size", code_size, nullptr, "Bytes of memory that the code takes.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject code_type = {
    PyVarObject_HEAD_INIT(nullptr, 0) "fusewright._native.MachineCode",
};

}  // namespace

extern "C" int fw_machine_code_init(PyObject *module) {
    PyTypeObject *type = &code_type;
    type->tp_basicsize = sizeof(MachineCode);
    type->tp_flags = Py_TPFLAGS_DEFAULT;
    type->tp_doc = "MachineCode(data, resolve): an object file in executable memory, for as long as this object lives; resolve(name) -> address.";
    type->tp_new = code_new;
    type->tp_dealloc = code_dealloc;
    type->tp_getset = code_fields;
    if (PyType_Ready(type) < 0) return -1;
    if (PyModule_AddObjectRef(module, "MachineCode", reinterpret_cast<PyObject *>(type)) < 0) return -1;
    return PyModule_AddObjectRef(module, "LOADS_OBJECTS", FW_LOADS_OBJECTS ? Py_True : Py_False);
}
