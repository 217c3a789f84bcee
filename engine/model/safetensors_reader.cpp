// Validates safetensors files, and reads tensors with pread, so that no file
// page ever counts as memory of this process. Readers are thread-safe after construction.
// A file is trusted only after every offset in it has been checked against its length.
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <tuple>

#include "engine/base/error.h"
#include "engine/model/safetensors.h"
#include "engine/model/strict_json.h"

namespace overspill {
namespace {

using nlohmann::json;
using Entry = SafetensorsFile::Entry;
static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr uint64_t kHeaderLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr const char* kDownloadAgain =
    "the file is damaged or is not a safetensors file; download it again";

struct StoredType {
  const char* name;
  uint32_t bytes;
};
constexpr std::array<StoredType, 15> kStoredTypes = {{
    {"BOOL", 1},
    {"U8", 1},
    {"I8", 1},
    {"I16", 2},
    {"U16", 2},
    {"F16", 2},
    {"BF16", 2},
    {"I32", 4},
    {"U32", 4},
    {"F32", 4},
    {"F64", 8},
    {"I64", 8},
    {"U64", 8},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
}};

const StoredType* find_stored_type(std::string_view name) {
  const auto* found = std::find_if(kStoredTypes.begin(), kStoredTypes.end(),
                                   [&](const StoredType& type) { return name == type.name; });
  return found == kStoredTypes.end() ? nullptr : found;
}

std::optional<uint64_t> checked_elements(std::span<const uint64_t> shape) {
  uint64_t product = 1;
  bool overflow = false, empty = false;
  for (const uint64_t extent : shape) {
    empty |= extent == 0;
    overflow |= __builtin_mul_overflow(product, std::max<uint64_t>(extent, 1), &product);
  }
  if (empty) return 0;
  return overflow ? std::nullopt : std::optional(product);
}

uint64_t element_bytes(const TensorSpec& spec) {
  const StoredType* type = find_stored_type(spec.dtype);
  CHECK(type != nullptr);
  return type->bytes;
}

std::string read_header(const Fd& file, uint64_t size_bytes) {
  const std::string where = file.path().string();
  constexpr std::string_view kLfsStart = "version https://git-lfs";
  std::string start(std::min<uint64_t>(size_bytes, kLfsStart.size()), '\0');
  read_exact(file, 0, std::as_writable_bytes(std::span(start)));
  if (start == kLfsStart) {
    fail(ErrorCode::invalid_file,
         "{}: a Git LFS pointer, not the tensors; run \"git lfs pull\" in the model's directory",
         where);
  }
  if (size_bytes < kHeaderLengthBytes) {
    fail(ErrorCode::invalid_file,
         "{}: {} bytes long, expected at least the {} bytes of the header's length; {}", where,
         size_bytes, kHeaderLengthBytes, kDownloadAgain);
  }
  uint64_t length = 0;
  std::memcpy(&length, start.data(), sizeof(length));
  if (length > kMaxHeaderBytes) {
    fail(ErrorCode::invalid_file, "{}: header length is {}, expected at most {}; {}", where, length,
         kMaxHeaderBytes, kDownloadAgain);
  }
  const uint64_t available = size_bytes - kHeaderLengthBytes;
  if (length > available) {
    fail(ErrorCode::invalid_file,
         "{}: truncated: header length is {}, but only {} bytes follow it, so {} bytes are "
         "missing; download it again",
         where, length, available, length - available);
  }
  std::string header(length, '\0');
  read_exact(file, kHeaderLengthBytes, std::as_writable_bytes(std::span(header)));
  if (header.empty() || header.front() != '{') {
    fail(ErrorCode::invalid_file,
         "{}: the header ({} bytes) does not begin with '{{': writing was never finished, or it "
         "is not a safetensors file; export or download it again",
         where, length);
  }
  return header;
}

std::map<std::string, std::string> parse_metadata(const json& value, const std::string& where) {
  std::map<std::string, std::string> metadata;
  if (!value.is_object()) {
    fail(ErrorCode::invalid_file, "{}: __metadata__ is a JSON {}, expected an object; {}", where,
         value.type_name(), kDownloadAgain);
  }
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) {
      fail(ErrorCode::invalid_file, "{}: __metadata__ \"{}\" is a JSON {}, expected a string; {}",
           where, key, text.type_name(), kDownloadAgain);
    }
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

/// One field of a tensor's entry as whole non-negative numbers.
std::vector<uint64_t> parse_numbers(const json& entry, const char* field,
                                    const std::string& where) {
  const auto found = entry.find(field);
  const bool valid = found != entry.end() && found->is_array() &&
                     std::all_of(found->begin(), found->end(),
                                 [](const json& number) { return number.is_number_unsigned(); });
  if (!valid) {
    fail(ErrorCode::invalid_file,
         "{}: {} is {}, expected an array of whole numbers from 0 to 2^64 - 1; {}", where, field,
         found == entry.end() ? "missing" : brief_json(*found), kDownloadAgain);
  }
  return found->get<std::vector<uint64_t>>();
}

/// An entry whose file_offset still counts from the first byte after the header.
Entry parse_entry(const std::string& name, const json& value, const std::string& file) {
  const std::string where = fmt::format("{}: tensor \"{}\"", file, name);
  if (!value.is_object()) {
    fail(ErrorCode::invalid_file, "{}: a JSON {}, expected an object; {}", where, value.type_name(),
         kDownloadAgain);
  }
  const auto dtype = value.find("dtype");
  const bool typed = dtype != value.end() && dtype->is_string();
  const StoredType* type = typed ? find_stored_type(dtype->get_ref<const std::string&>()) : nullptr;
  if (type == nullptr) {
    std::string known;
    for (const StoredType& stored : kStoredTypes) {
      known += (known.empty() ? "" : ", ") + std::string(stored.name);
    }
    fail(ErrorCode::invalid_file, "{}: dtype is {}, expected one of {}; {}", where,
         dtype == value.end() ? "missing" : brief_json(*dtype), known, kDownloadAgain);
  }
  Entry entry{
      .spec = {.name = name, .shape = parse_numbers(value, "shape", where), .dtype = type->name},
      .file_offset = 0};
  const auto elements = checked_elements(entry.spec.shape);
  uint64_t size_bytes = 0;
  if (!elements || __builtin_mul_overflow(*elements, uint64_t{type->bytes}, &size_bytes)) {
    fail(ErrorCode::invalid_file, "{}: shape {} needs more than 2^64 bytes; {}", where,
         brief_json(value["shape"]), kDownloadAgain);
  }
  const auto range = parse_numbers(value, "data_offsets", where);
  if (range.size() != 2 || range[0] > range[1] || range[1] - range[0] != size_bytes) {
    fail(ErrorCode::invalid_file,
         "{}: data_offsets are {}, expected a begin and an end {} bytes apart for {} {}; {}", where,
         brief_json(value["data_offsets"]), size_bytes, type->name, brief_json(value["shape"]),
         kDownloadAgain);
  }
  entry.file_offset = range[0];
  return entry;
}

/// Entries in file order must tile the contents exactly.
void check_layout(std::span<const Entry> entries, uint64_t contents_bytes,
                  const std::string& where) {
  uint64_t end = 0;
  for (const Entry& entry : entries) {
    if (entry.file_offset != end) {
      fail(ErrorCode::invalid_file,
           "{}: tensor \"{}\" begins at byte {} of the contents, expected {}: {}; {}", where,
           entry.spec.name, entry.file_offset, end,
           entry.file_offset > end ? "there is a hole before it"
                                   : "it overlaps the tensor before it",
           kDownloadAgain);
    }
    end += entry.spec.bytes();
  }
  if (end > contents_bytes) {
    fail(ErrorCode::invalid_file,
         "{}: truncated: its tensors need {} bytes and {} are there, so {} bytes are missing; "
         "download it again",
         where, end, contents_bytes, end - contents_bytes);
  }
  if (end < contents_bytes) {
    fail(ErrorCode::invalid_file,
         "{}: {} bytes follow the last tensor, expected the file to end there; {}", where,
         contents_bytes - end, kDownloadAgain);
  }
}

/// Widens `count` 16-bit values at the end of `out` in place. A block on the stack separates the
/// two types, and what is written never reaches values not yet read.
template <float (*Convert)(uint16_t)>
void widen_from_tail(std::span<float> out) {
  constexpr size_t kBlock = 2048;
  std::array<uint16_t, kBlock> block;
  const auto* stored = reinterpret_cast<const std::byte*>(out.data()) + out.size() * 2;
  for (size_t begin = 0; begin < out.size(); begin += kBlock) {
    const size_t count = std::min(kBlock, out.size() - begin);
    std::memcpy(block.data(), stored + begin * 2, count * 2);
    for (size_t i = 0; i < count; ++i) out[begin + i] = Convert(block[i]);
  }
}

}  // namespace

uint64_t TensorSpec::elements() const {
  const auto product = checked_elements(shape);
  CHECK(product.has_value());
  return *product;
}

uint64_t TensorSpec::bytes() const {
  uint64_t product = 0;
  CHECK(!__builtin_mul_overflow(elements(), element_bytes(*this), &product));
  return product;
}

bool TensorSpec::holds_floats() const {
  return dtype == "F32" || dtype == "BF16" || dtype == "F16";
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : file_(open_file(path, O_RDONLY)) {
  const std::string where = path.string();
  const uint64_t size_bytes = file_size(file_);
  const std::string header = read_header(file_, size_bytes);
  const json root = parse_strict_json(header, where, kDownloadAgain);
  for (const auto& [name, value] : root.items()) {
    if (name == "__metadata__") {
      metadata_ = parse_metadata(value, where);
    } else {
      entries_.push_back(parse_entry(name, value, where));
    }
  }
  // An empty tensor shares its offset with the next one and comes before it.
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) {
    return std::tuple(a.file_offset, a.spec.bytes(), std::string_view(a.spec.name)) <
           std::tuple(b.file_offset, b.spec.bytes(), std::string_view(b.spec.name));
  });
  const uint64_t contents_offset = kHeaderLengthBytes + header.size();
  check_layout(entries_, size_bytes - contents_offset, where);
  for (size_t i = 0; i < entries_.size(); ++i) {
    entries_[i].file_offset += contents_offset;
    index_[entries_[i].spec.name] = i;
  }
}

const SafetensorsFile::Entry* SafetensorsFile::find(const std::string& name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &entries_[found->second];
}

void SafetensorsFile::read_raw(const Entry& entry, uint64_t begin, std::span<std::byte> out) const {
  const uint64_t unit = element_bytes(entry.spec), elements = entry.spec.elements();
  CHECK(out.size() % unit == 0);
  CHECK(begin <= elements && out.size() / unit <= elements - begin);
  read_exact(file_, entry.file_offset + begin * unit, out);
}

void SafetensorsFile::read_floats(const Entry& entry, uint64_t begin, std::span<float> out) const {
  if (!entry.spec.holds_floats()) {
    fail(ErrorCode::invalid_file,
         "{}: tensor \"{}\" has dtype {}, expected F32, BF16 or F16; convert the model to one of "
         "them",
         path().string(), entry.spec.name, entry.spec.dtype);
  }
  const auto bytes = std::as_writable_bytes(out);
  if (entry.spec.dtype == "F32") return read_raw(entry, begin, bytes);
  read_raw(entry, begin, bytes.last(bytes.size() / 2));
  if (entry.spec.dtype == "BF16") return widen_from_tail<bf16_to_float>(out);
  widen_from_tail<f16_to_float>(out);
}

}  // namespace overspill
