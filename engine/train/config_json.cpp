// nlohmann's parser tells no positions, so it reads through an iterator that counts.
#include "engine/train/config_json.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <vector>

#include "engine/base/error.h"

namespace overspill {
namespace {

using nlohmann::ordered_json;

constexpr int kMostDepth = 32;

/// Iterates over text and leaves in `*position` how far the parser has read.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, size_t* position) : at_(at), position_(position) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    ++*position_;
    return *this;
  }
  CountingIterator operator++(int) {
    const CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  size_t* position_;
};

class Parser {
 public:
  Parser(const std::string& text, const std::string& file) : text_(text), file_(file) {}

  LocatedJson parse() {
    if (const size_t at = text_.find('\0'); at != std::string::npos) {
      position_ = at;
      refuse("found a NUL byte");
    }
    const auto note = [this](int depth, ordered_json::parse_event_t event, ordered_json& value) {
      return take(depth, event, value);
    };
    try {
      result_.root =
          ordered_json::parse(CountingIterator(text_.data(), &position_),
                              CountingIterator(text_.data() + text_.size(), &position_), note);
    } catch (const nlohmann::json::parse_error& error) {
      position_ = std::min(text_.size(), error.byte > 0 ? error.byte - 1 : 0);
      refuse("is not valid JSON", error.what());
    } catch (const nlohmann::json::exception& error) {  // a number that no double holds
      refuse("is not valid JSON", error.what());
    }
    if (!result_.root.is_object()) {
      position_ = 0;
      refuse("found no JSON object");
    }
    return std::move(result_);
  }

 private:
  struct Scope {
    std::string prefix;  ///< of the names inside, with its dot
    std::string key;     ///< the last one
    std::map<std::string, size_t> lines;
  };

  size_t line() const {
    return 1 + static_cast<size_t>(std::count(text_.data(), text_.data() + position_, '\n'));
  }

  [[noreturn]] void refuse(const char* what, const std::string& detail = "") const {
    fail(
        ErrorCode::invalid_config,
        "{}:{}: {}{}{}; a DeepSpeed configuration is one JSON object, without comments and without "
        "a comma after the last entry; correct the line",
        file_, line(), what, detail.empty() ? "" : ": ", detail);
  }

  bool take(int depth, ordered_json::parse_event_t event, const ordered_json& value) {
    using Event = ordered_json::parse_event_t;
    if (depth > kMostDepth) refuse("found more than 32 levels of nesting");
    if (event == Event::object_start) {
      scopes_.push_back({scopes_.empty() ? "" : name_of(scopes_.back()) + ".", "", {}});
    } else if (event == Event::object_end) {
      scopes_.pop_back();
    } else if (event == Event::key) {
      take_key(value.get<std::string>());
    }
    return true;
  }

  void take_key(const std::string& key) {
    Scope& scope = scopes_.back();
    scope.key = key;
    const auto [first, fresh] = scope.lines.emplace(key, line());
    if (!fresh) {
      fail(ErrorCode::invalid_config,
           "{}:{}: {}: found the key a second time (first at {}:{}); keep one of the two", file_,
           line(), name_of(scope), file_, first->second);
    }
    result_.lines.emplace(name_of(scope), line());
  }

  static std::string name_of(const Scope& scope) { return scope.prefix + scope.key; }

  const std::string& text_;
  const std::string& file_;
  size_t position_ = 0;
  std::vector<Scope> scopes_;
  LocatedJson result_;
};

}  // namespace

LocatedJson parse_located_json(const std::string& text, const std::string& file) {
  return Parser(text, file).parse();
}

}  // namespace overspill
