// Loading of compiled kernel files. Each worker gets its own copy of a file, so that a `static` array
// is the shared memory of the one block that the worker runs: no thread-local storage, whose access
// is slower and whose size is limited for libraries that are loaded late.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

#include <mutex>

#include "rt.h"

namespace memra {

namespace {

struct Symbol {
  std::string name;
  uint64_t at, n_bytes;
};

struct Symbols {
  std::vector<Symbol> functions, writable;
};

bool read_file(const char* path, std::vector<uint8_t>* bytes) {
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return false;
  struct stat about;
  bool good = !fstat(fd, &about);
  if (good) {
    bytes->resize(size_t(about.st_size));
    size_t done = 0;
    while (done < bytes->size()) {
      const ssize_t n = read(fd, bytes->data() + done, bytes->size() - done);
      if (n <= 0) break;
      done += size_t(n);
    }
    good = done == bytes->size();
  }
  close(fd);
  return good;
}

// The full symbol table names what the dynamic one does not: arrays inside functions.
bool read_symbols(const std::vector<uint8_t>& file, Symbols* out) {
  if (file.size() < sizeof(Elf64_Ehdr) || memcmp(file.data(), ELFMAG, SELFMAG)) return false;
  const auto* head = reinterpret_cast<const Elf64_Ehdr*>(file.data());
  if (head->e_shoff + uint64_t(head->e_shnum) * sizeof(Elf64_Shdr) > file.size()) return false;
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(file.data() + head->e_shoff);
  const char* section_names =
      reinterpret_cast<const char*>(file.data() + sections[head->e_shstrndx].sh_offset);
  for (uint32_t i = 0; i < head->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(file.data() + sections[i].sh_offset);
    const char* names =
        reinterpret_cast<const char*>(file.data() + sections[sections[i].sh_link].sh_offset);
    for (uint64_t j = 0; j < sections[i].sh_size / sizeof(Elf64_Sym); ++j) {
      const Elf64_Sym& s = symbols[j];
      const int type = ELF64_ST_TYPE(s.st_info);
      if (s.st_shndx == SHN_UNDEF || s.st_shndx >= head->e_shnum) continue;
      if (type == STT_FUNC) out->functions.push_back({names + s.st_name, s.st_value, s.st_size});
      if (type != STT_OBJECT || !s.st_size || !(sections[s.st_shndx].sh_flags & SHF_WRITE)) continue;
      const char* section = section_names + sections[s.st_shndx].sh_name;
      if (strncmp(section, ".bss", 4) && strcmp(section, ".data") && strncmp(section, ".data.", 6)) {
        continue;
      }
      if (!strncmp(section, ".data.rel.ro", 12)) continue;
      out->writable.push_back({names + s.st_name, s.st_value, s.st_size});
    }
    return true;
  }
  return false;
}

int own_copy(const char* path) {
  const int from = open(path, O_RDONLY | O_CLOEXEC);
  if (from < 0) return -1;
  const int to = memfd_create("memra-kernel", MFD_CLOEXEC);
  struct stat about;
  if (to >= 0 && !fstat(from, &about)) {
    off_t at = 0;
    while (at < about.st_size && sendfile(to, from, &at, size_t(about.st_size - at)) > 0) {
    }
  }
  close(from);
  return to;
}

bool open_copy(const char* path, ModuleCopy* copy, std::string* error) {
  copy->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!copy->library) {
    *error = dlerror();
    return false;
  }
  copy->table = static_cast<const ModuleTable*>(dlsym(copy->library, "memra_module"));
  if (!copy->table) {
    *error = std::string(path) + " holds no kernel table";
    return false;
  }
  if (copy->table->abi_version != ABI_VERSION) {
    *error = std::string(path) + " was built for another version of the host runtime";
    return false;
  }
  struct link_map* map;
  dlinfo(copy->library, RTLD_DI_LINKMAP, &map);
  copy->base = reinterpret_cast<uint8_t*>(map->l_addr);
  return true;
}

size_t image_bytes(const std::vector<uint8_t>& file) {
  const auto* head = reinterpret_cast<const Elf64_Ehdr*>(file.data());
  const auto* parts = reinterpret_cast<const Elf64_Phdr*>(file.data() + head->e_phoff);
  size_t end = 0;
  for (uint32_t i = 0; i < head->e_phnum; ++i) {
    if (parts[i].p_type == PT_LOAD && parts[i].p_vaddr + parts[i].p_memsz > end) {
      end = parts[i].p_vaddr + parts[i].p_memsz;
    }
  }
  return end;
}

// _ZZ6kernelE5tiles -> tiles
std::string plain_name(const std::string& mangled) {
  for (size_t n = 1; n < mangled.size(); ++n) {
    const size_t at = mangled.size() - n;
    const std::string digits = std::to_string(n);
    if (at < digits.size() + 1) break;
    if (mangled.compare(at - digits.size(), digits.size(), digits)) continue;
    if (mangled[at - digits.size() - 1] == 'E') return mangled.substr(at);
  }
  return mangled;
}

// Which static arrays belong to which kernel follows from their mangled names: an array `s` of kernel
// f is _ZZ<f>E1s. Arrays of device functions may be used by any kernel.
void assign_shared(Module& m, const Symbols& symbols) {
  const ModuleCopy& copy = m.copies[0];
  std::vector<std::string> prefixes;
  for (uint32_t i = 0; i < copy.table->n_entries; ++i) {
    const uint64_t at = uint64_t(static_cast<uint8_t*>(copy.table->entries[i].kernel) - copy.base);
    std::string prefix;
    for (const Symbol& f : symbols.functions) {
      if (f.at != at) continue;
      prefix = f.name.compare(0, 2, "_Z") == 0
                   ? "_ZZ" + f.name.substr(2) + "E"
                   : "_ZZ" + std::to_string(f.name.size()) + f.name + "E";
    }
    prefixes.push_back(prefix);
  }
  for (const Symbol& s : symbols.writable) {
    if (s.name.compare(0, 3, "_ZZ")) {
      const bool ours = s.name.find("memra_") != std::string::npos ||
                        !s.name.compare(0, 9, "completed") || !s.name.compare(0, 2, "__");
      if (!ours) m.device_global = s.name;
      continue;
    }
    if (!m.shared_high || s.at < m.shared_low) m.shared_low = s.at;
    if (s.at + s.n_bytes > m.shared_high) m.shared_high = s.at + s.n_bytes;
    bool owned = false;
    for (const std::string& p : prefixes) owned |= !p.empty() && s.name.compare(0, p.size(), p) == 0;
    for (auto& f : m.functions) {
      const std::string& p = prefixes[f->index];
      if (owned && (p.empty() || s.name.compare(0, p.size(), p))) continue;
      f->shared.push_back({s.at, s.n_bytes, plain_name(s.name)});
      f->shared_bytes += s.n_bytes;
    }
  }
}

std::mutex module_mutex;

}  // namespace

const ModuleCopy* copy_for_worker(Module& m, uint32_t worker, std::string* error) {
  std::lock_guard<std::mutex> lock(module_mutex);
  while (m.copies.size() <= worker) {
    const int fd = own_copy(m.path.c_str());
    if (fd < 0) {
      *error = "cannot copy " + m.path + " for another worker";
      return nullptr;
    }
    // dlopen takes a name that it has seen for the library of then, and descriptors are reused: so
    // every name is spelled differently, "//" and "/./" for the bits of a count.
    static uint64_t n_copies = 0;
    std::string name = "/proc/self/fd";
    for (uint64_t bits = ++n_copies; bits; bits >>= 1) name += bits & 1 ? "/./" : "//";
    name += "/" + std::to_string(fd);
    ModuleCopy copy;
    const bool good = open_copy(name.c_str(), &copy, error);
    close(fd);
    if (!good) return nullptr;
    copy.n_bytes = m.copies[0].n_bytes;
    m.copies.push_back(copy);
  }
  return &m.copies[worker];
}

}  // namespace memra

using namespace memra;

// Loads a kernel file; null with a message in `error` (of `n` bytes) when it cannot be loaded.
MEMRA_EXPORT Module* memra_module_load(const char* path, char* error, uint32_t n) {
  std::string why;
  auto m = std::make_unique<Module>();
  m->path = path;
  m->copies.reserve(64);
  ModuleCopy copy;
  std::vector<uint8_t> file;
  Symbols symbols;
  if (open_copy(path, &copy, &why)) {
    if (!read_file(path, &file) || !read_symbols(file, &symbols)) {
      why = std::string(path) + " has no symbol table: it must not be stripped";
    }
  }
  if (!why.empty()) {
    if (copy.library) dlclose(copy.library);
    snprintf(error, n, "%s", why.c_str());
    return nullptr;
  }
  copy.n_bytes = image_bytes(file);
  m->copies.push_back(copy);
  m->flags = copy.table->flags;
  for (uint32_t i = 0; i < copy.table->n_entries; ++i) {
    auto f = std::make_unique<Function>();
    f->module = m.get();
    f->index = i;
    f->name = copy.table->entries[i].name;
    m->functions.push_back(std::move(f));
  }
  assign_shared(*m, symbols);
  if (m->flags & MODULE_CHECK) memra_check_enable();
  return m.release();
}

MEMRA_EXPORT void memra_module_unload(Module* m) {
  for (ModuleCopy& copy : m->copies) dlclose(copy.library);
  delete m;
}

MEMRA_EXPORT uint32_t memra_module_flags(Module* m) { return m->flags; }
MEMRA_EXPORT uint32_t memra_module_n_functions(Module* m) { return uint32_t(m->functions.size()); }
MEMRA_EXPORT Function* memra_module_function(Module* m, uint32_t i) { return m->functions[i].get(); }
MEMRA_EXPORT const char* memra_function_name(Function* f) { return f->name.c_str(); }
MEMRA_EXPORT uint64_t memra_function_shared_bytes(Function* f) { return f->shared_bytes; }
MEMRA_EXPORT uint32_t memra_function_n_params(Function* f) {
  return f->module->copies[0].table->entries[f->index].n_params;
}
MEMRA_EXPORT uint32_t memra_function_max_threads(Function* f) {
  return f->module->copies[0].table->entries[f->index].max_threads;
}
MEMRA_EXPORT const uint32_t* memra_function_param_sizes(Function* f) {
  return f->module->copies[0].table->entries[f->index].param_sizes;
}
