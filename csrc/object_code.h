// Places an object file (ELF; x86-64, AArch64) in executable memory; shared by the extension and the runtime without
// Python. Takes its bytes and what finds outside functions; gives the functions' addresses. Always holds: every offset
// is checked before it is followed; a file with a relocation or a section that this loader does not know is refused
// (Failure), never loaded in part.
#ifndef FUSEWRIGHT_OBJECT_CODE_H
#define FUSEWRIGHT_OBJECT_CODE_H

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#define FW_LOADS_OBJECTS 1
#include <elf.h>
#include <sys/mman.h>
#include <unistd.h>
#else
#define FW_LOADS_OBJECTS 0
#endif

#if FW_LOADS_OBJECTS
namespace fw {
namespace object_code {

constexpr size_t kStub = 16;            // a jump, and the address that it reads
#if defined(__x86_64__)
constexpr uint16_t kMachine = EM_X86_64;
constexpr uint8_t kJump[8] = {0xff, 0x25, 0x02, 0, 0, 0, 0x0f, 0x0b};  // jmp *2(%rip); ud2
#else
constexpr uint16_t kMachine = EM_AARCH64;
constexpr uint8_t kJump[8] = {0x50, 0, 0, 0x58, 0, 0x02, 0x1f, 0xd6};  // ldr x16, 8 bytes on; br x16
#endif
constexpr size_t kLargest = 1u << 30;   // relative addresses reach 2 GB: stay well inside
enum Region { kCode, kData, kWritable, kRegions };

struct Failure {
    std::string text;
};

[[noreturn]] inline void refuse(const std::string &text) { throw Failure{text}; }

inline size_t aligned(size_t value, size_t to) { return (value + to - 1) / to * to; }

// Puts the address of an outside function, or 0; false where it cannot be asked.
using Resolve = std::function<bool(const char *, uint64_t *)>;

class Loader {
  public:
      Loader(const uint8_t *data, size_t size, Resolve resolve)
          : data_(data), size_(size), resolve_(std::move(resolve)) {}
      ~Loader() {
          if (base_ != nullptr) munmap(base_, total_);
      }

    // Places everything. False where `resolve` says so; throws Failure for a file that cannot be loaded.
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

    // Calls `take(name, address)` for each global function.
    template <typename Take>
    void each_function(Take take) const {
        for (size_t i = 0; i < symbols_.size(); i++) {
            const Elf64_Sym &symbol = symbols_[i];
            if (ELF64_ST_TYPE(symbol.st_info) != STT_FUNC || ELF64_ST_BIND(symbol.st_info) == STB_LOCAL) continue;
            take(name_of(symbol), values_[i]);
        }
    }

    void release(void **base, size_t *size) {
        *base = base_;
        *size = total_;
        base_ = nullptr;
    }

  private:
    const uint8_t *data_;
    size_t size_;
    Resolve resolve_;
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
        if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_ident[EI_CLASS] != ELFCLASS64 ||
            header.e_type != ET_REL || header.e_machine != kMachine || header.e_shentsize != sizeof(Elf64_Shdr))
            refuse("not an object file for this kind of processor");
        sections_.resize(header.e_shnum);
        std::memcpy(sections_.data(), at(header.e_shoff, header.e_shnum * sizeof(Elf64_Shdr)),
                    header.e_shnum * sizeof(Elf64_Shdr));
        for (const Elf64_Shdr &section : sections_) {
            if (section.sh_type != SHT_SYMTAB) continue;
            if (section.sh_entsize != sizeof(Elf64_Sym) || section.sh_link >= sections_.size())
                refuse("a symbol table of another form");
            const uint8_t *table = at(section.sh_offset, section.sh_size);
            symbols_.resize(section.sh_size / sizeof(Elf64_Sym));
            std::memcpy(symbols_.data(), table, symbols_.size() * sizeof(Elf64_Sym));
            const Elf64_Shdr &strings = sections_[section.sh_link];
            strings_ = strings.sh_offset;
            strings_size_ = strings.sh_size;
            if (strings_size_ == 0 || at(strings_, strings_size_)[strings_size_ - 1] != 0)
                refuse("a string table without an end");
        }
    }

    // Unwind tables are left out: nothing unwinds through a kernel.
    static bool wanted(const Elf64_Shdr &section) {
        bool content = section.sh_type == SHT_PROGBITS || section.sh_type == SHT_NOBITS;
        return (section.sh_flags & SHF_ALLOC) != 0 && content && section.sh_size != 0;
    }

    static Region region_of(const Elf64_Shdr &section) {
        return (section.sh_flags & SHF_EXECINSTR) != 0 ? kCode
               : (section.sh_flags & SHF_WRITE) != 0   ? kWritable
                                                       : kData;
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
                if (!resolve_(name_of(symbol), &values_[i])) return false;
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
            std::memcpy(base_ + stubs_[i], kJump, sizeof kJump);
            std::memcpy(base_ + stubs_[i] + sizeof kJump, &values_[i], 8);
        }
    }

    void relocate(const Elf64_Shdr &table) {
        if (table.sh_info >= sections_.size() || !loaded_[table.sh_info]) return;
        const Elf64_Shdr &target = sections_[table.sh_info];
        if (table.sh_entsize != sizeof(Elf64_Rela) || target.sh_type == SHT_NOBITS)
            refuse("a relocation table of another form");
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
            if (one.r_offset > section_size || bytes > section_size - one.r_offset)
                refuse("a relocation outside its section");
        };
        auto put = [&](auto value) { std::memcpy(where, &value, sizeof value); };
#if defined(__aarch64__)
        // An instruction with `value` in its `bits` bits from number `from` on.
        auto put_bits = [&](uint64_t value, int from, int bits) {
            uint32_t word, mask = ((bits == 32 ? 0 : 1u << bits) - 1) << from;
            std::memcpy(&word, where, 4);
            put((word & ~mask) | (static_cast<uint32_t>(value << from) & mask));
        };
        auto put_page = [&](uint64_t address) {  // adrp: how many pages away, in two parts
            int64_t pages = static_cast<int64_t>((address & ~uint64_t(0xfff)) - (here & ~uint64_t(0xfff))) >> 12;
            if (pages < -(1 << 20) || pages >= 1 << 20) refuse("an address that is too far away");
            put_bits(static_cast<uint64_t>(pages) & 3, 29, 2);
            put_bits(static_cast<uint64_t>(pages) >> 2, 5, 19);
        };
        auto put_rest = [&](uint64_t address, int scale) {  // where in its page, in units of 2^scale bytes
            if ((address & ((1u << scale) - 1)) != 0) refuse("an address that is not aligned");
            put_bits((address & 0xfff) >> scale, 10, 12);
        };
        uint64_t table = stubs_[index] == 0 ? 0 : reinterpret_cast<uint64_t>(base_) + stubs_[index] + sizeof kJump;
        uint64_t address = symbol + one.r_addend;
        auto kind = ELF64_R_TYPE(one.r_info);
        room(kind == R_AARCH64_ABS64 || kind == R_AARCH64_PREL64 ? 8 : 4);
        switch (kind) {
            case R_AARCH64_ABS64: return put(address);
            case R_AARCH64_PREL64: return put(address - here);
            case R_AARCH64_PREL32: {
                int64_t value = static_cast<int64_t>(address - here);
                if (value != static_cast<int32_t>(value)) refuse("an address that is too far away");
                return put(static_cast<int32_t>(value));
            }
            case R_AARCH64_CALL26:
            case R_AARCH64_JUMP26: {
                if (stubs_[index] != 0) address = reinterpret_cast<uint64_t>(base_) + stubs_[index];
                int64_t words = static_cast<int64_t>(address - here) >> 2;
                if (words < -(1 << 25) || words >= 1 << 25) refuse("an address that is too far away");
                return put_bits(static_cast<uint64_t>(words), 0, 26);
            }
            case R_AARCH64_ADR_PREL_PG_HI21: return put_page(address);
            case R_AARCH64_ADD_ABS_LO12_NC:
            case R_AARCH64_LDST8_ABS_LO12_NC: return put_rest(address, 0);
            case R_AARCH64_LDST16_ABS_LO12_NC: return put_rest(address, 1);
            case R_AARCH64_LDST32_ABS_LO12_NC: return put_rest(address, 2);
            case R_AARCH64_LDST64_ABS_LO12_NC: return put_rest(address, 3);
            case R_AARCH64_LDST128_ABS_LO12_NC: return put_rest(address, 4);
            // The second half of a stub is the word that a global offset table would hold.
            case R_AARCH64_ADR_GOT_PAGE:
                if (table == 0) refuse("a table entry for a symbol of the file");
                return put_page(table);
            case R_AARCH64_LD64_GOT_LO12_NC:
                if (table == 0) refuse("a table entry for a symbol of the file");
                return put_rest(table, 3);
            default: refuse("an unknown kind of relocation (" + std::to_string(kind) + ")");
        }
#else
        switch (ELF64_R_TYPE(one.r_info)) {
            case R_X86_64_64: {
                room(8);
                return put(symbol + one.r_addend);
            }
            case R_X86_64_PC64: {
                room(8);
                return put(symbol + one.r_addend - here);
            }
            case R_X86_64_PLT32:
                if (stubs_[index] != 0) symbol = reinterpret_cast<uint64_t>(base_) + stubs_[index];
                [[fallthrough]];
            case R_X86_64_PC32: {
                room(4);
                int64_t value = static_cast<int64_t>(symbol + one.r_addend - here);
                if (value != static_cast<int32_t>(value)) refuse("an address that is too far away");
                return put(static_cast<int32_t>(value));
            }
            case R_X86_64_GOTPCREL:
            case R_X86_64_GOTPCRELX:
            case R_X86_64_REX_GOTPCRELX: {
                // The second half of a stub is the word that a global offset table would hold.
                room(4);
                if (stubs_[index] == 0) refuse("a table entry for a symbol of the file");
                uint64_t word = reinterpret_cast<uint64_t>(base_) + stubs_[index] + 8;
                return put(static_cast<int32_t>(word + one.r_addend - here));
            }
            default: refuse("an unknown kind of relocation (" + std::to_string(ELF64_R_TYPE(one.r_info)) + ")");
        }
#endif
    }

    void protect() {
        __builtin___clear_cache(reinterpret_cast<char *>(base_), reinterpret_cast<char *>(base_ + total_));
        static const int rights[] = {PROT_READ | PROT_EXEC, PROT_READ, PROT_READ | PROT_WRITE};
        for (int region = 0; region < kRegions; region++) {
            size_t size = starts_[region + 1] - starts_[region];
            if (size != 0 && mprotect(base_ + starts_[region], size, rights[region]) != 0)
                refuse("machine code may not be made executable here");
        }
    }
};

}  // namespace object_code
}  // namespace fw
#endif
#endif
