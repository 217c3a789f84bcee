// Token files as `overspill prepare` writes them, from the format's document
// (docs/formats/tokens.md) and nothing of the engine.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace overspill::test {

/// zlib's CRC-32, bit by bit.
inline uint32_t zlib_crc(std::string_view bytes) {
  uint32_t crc = 0xffffffffu;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xedb88320u : 0);
  }
  return ~crc;
}

template <class Value>
void put_value(std::string& bytes, size_t offset, Value value) {
  std::memcpy(bytes.data() + offset, &value, sizeof(value));
}

/// After a change of the header, so that the change itself is what a reader finds.
inline void sign_header(std::string& file) {
  put_value(file, 252, zlib_crc(std::string_view(file).substr(0, 252)));
}

struct PreparedFile {
  std::vector<uint32_t> tokens;
  std::vector<uint64_t> starts;  ///< of documents, without the end
  std::vector<char> trained{};   ///< a token each, or none: no mask
  uint64_t sequence_len = 0;
  uint32_t vocab_size = 256;
  uint32_t token_bytes = 2;
  std::string metadata = "{}";

  std::string bytes() const {
    const std::string mask = mask_section();
    std::string file(4096, '\0');
    file.replace(0, 8, "OSPTOKEN");
    const auto header = [&](size_t offset, auto value) { put_value(file, offset, value); };
    header(8, uint32_t{1});
    header(12, uint32_t{256});
    header(16, token_bytes);
    header(20, uint32_t{!mask.empty()});
    header(24, uint64_t{tokens.size()});
    header(32, uint64_t{starts.size()});
    header(40, sequence_len);
    header(48, trained_count());
    header(56, vocab_size);
    header(60, uint32_t{0xffffffff});
    add_section(file, token_section(), 64, 112);
    if (!mask.empty()) add_section(file, mask, 72, 116);
    add_section(file, start_section(), 80, 120);
    add_section(file, metadata, 88, 124);
    header(96, uint64_t{metadata.size()});
    header(104, uint64_t{file.size()});
    sign_header(file);
    return file;
  }

 private:
  uint64_t trained_count() const {
    if (trained.empty()) return tokens.size() - starts.size();
    uint64_t count = 0;
    for (const char bit : trained) count += bit != 0;
    return count;
  }
  std::string token_section() const {
    std::string section;
    for (const uint32_t token : tokens) {
      section.append(reinterpret_cast<const char*>(&token), token_bytes);
    }
    return section;
  }
  std::string mask_section() const {
    std::string section((trained.size() + 7) / 8, '\0');
    for (size_t t = 0; t < trained.size(); ++t) {
      if (trained[t]) section[t / 8] = static_cast<char>(section[t / 8] | 1 << t % 8);
    }
    return section;
  }
  std::string start_section() const {
    std::vector<uint64_t> all = starts;
    all.push_back(tokens.size());
    return {reinterpret_cast<const char*>(all.data()), all.size() * sizeof(uint64_t)};
  }
  static void add_section(std::string& file, const std::string& section, size_t offset_field,
                          size_t crc_field) {
    file.resize((file.size() + 4095) / 4096 * 4096, '\0');
    put_value(file, offset_field, uint64_t{file.size()});
    put_value(file, crc_field, zlib_crc(section));
    file += section;
  }
};

/// The document's example.
inline PreparedFile example_file() {
  return {.tokens = {1, 5, 6, 7, 1, 8, 9, 0},
          .starts = {0, 4, 7},
          .trained = {0, 0, 1, 1, 0, 0, 1, 0},
          .sequence_len = 8,
          .vocab_size = 10};
}

}  // namespace overspill::test
