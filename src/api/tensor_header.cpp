#include "api/tensor_header.h"

#include <array>
#include <set>
#include <utility>

#include "api/checks.h"

namespace fold::api {
namespace {

constexpr std::array<std::pair<const char*, DType>, 9> kNames{{{"F32", DType::f32},
                                                               {"BF16", DType::bf16},
                                                               {"F16", DType::f16},
                                                               {"I32", DType::i32},
                                                               {"I64", DType::i64},
                                                               {"U8", DType::u8},
                                                               {"I8", DType::i8},
                                                               {"U64", DType::u64},
                                                               {"BOOL", DType::boolean}}};

/// The part of JSON that such a header may hold: objects, strings, arrays of whole numbers.
class Parser {
 public:
  Parser(std::string_view text, const std::string& path) : text_(text), path_(path) {}

  TensorHeader header() {
    TensorHeader header;
    object([&](const std::string& name) {
      if (name == "__metadata__") {
        object([&](const std::string& key) { header.metadata[key] = string(); });
      } else {
        header.entries.push_back(entry(name));
      }
    });
    space();
    if (at_ != text_.size()) fail("the header's end");
    return header;
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const {
    const std::string got =
        at_ < text_.size() ? "byte " + std::to_string(at_) + " of the header" : "a header cut short";
    fail_value(path_, got, "a safetensors file has " + expected + " here");
  }

  void space() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }

  bool accept(char c) {
    space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  void expect(char c) {
    if (!accept(c)) fail(std::string(1, c));
  }

  /// Calls `member` with each key, to parse its value.
  template <typename F>
  void object(F member) {
    std::set<std::string> seen;
    expect('{');
    if (accept('}')) return;
    do {
      const std::string key = string();
      if (!seen.insert(key).second) fail_value(path_, "\"" + key + "\" twice", "each name once");
      expect(':');
      member(key);
    } while (accept(','));
    expect('}');
  }

  TensorEntry entry(const std::string& name) {
    TensorEntry result{.name = name};
    bool dtype = false, shape = false, offsets = false;
    object([&](const std::string& key) {
      if (key == "dtype") {
        result.dtype = this->dtype();
        dtype = true;
      } else if (key == "shape") {
        result.shape = numbers();
        shape = true;
      } else if (key == "data_offsets") {
        const std::vector<int64_t> pair = numbers();
        if (pair.size() != 2) fail("two data_offsets");
        result.begin = pair[0];
        result.end = pair[1];
        offsets = true;
      } else {
        fail("dtype, shape or data_offsets");
      }
    });
    if (!dtype || !shape || !offsets) fail("dtype, shape and data_offsets");
    return result;
  }

  DType dtype() {
    const std::string name = string();
    std::string allowed = "supported:";
    for (const auto& [known, value] : kNames) {
      if (name == known) return value;
      allowed += std::string(" ") + known;
    }
    fail_value(path_ + ": dtype", name, allowed);
  }

  std::vector<int64_t> numbers() {
    std::vector<int64_t> values;
    expect('[');
    if (accept(']')) return values;
    do values.push_back(number());
    while (accept(','));
    expect(']');
    return values;
  }

  int64_t number() {
    space();
    int64_t value = 0;
    const size_t start = at_;
    for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, int64_t{10}, &value) ||
          __builtin_add_overflow(value, int64_t{text_[at_] - '0'}, &value)) {
        fail("a number below 2^63");
      }
    }
    if (at_ == start || (at_ - start > 1 && text_[start] == '0')) fail("a whole number");
    return value;
  }

  std::string string() {
    expect('"');
    std::string value;
    while (true) {
      if (at_ >= text_.size()) fail("the end of a string");
      const char c = text_[at_++];
      if (c == '"') return value;
      if (static_cast<unsigned char>(c) < 0x20) fail("no control character in a string");
      if (c == '\\') {
        escape(value);
      } else {
        value += c;
      }
    }
  }

  void escape(std::string& value) {
    constexpr std::string_view from = "\"\\/bfnrt", to = "\"\\/\b\f\n\r\t";
    const char c = at_ < text_.size() ? text_[at_++] : '\0';
    if (const size_t i = from.find(c); i != std::string_view::npos) {
      value += to[i];
      return;
    }
    if (c != 'u') fail("an escape known to JSON");
    uint32_t code = hex4();
    const auto surrogate = [](uint32_t unit, uint32_t first) { return unit >= first && unit < first + 0x400; };
    if (surrogate(code, 0xD800) && text_.substr(at_, 2) == "\\u") {
      at_ += 2;
      const uint32_t low = hex4();
      if (!surrogate(low, 0xDC00)) fail("a pair of surrogates");
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    }
    if (code >= 0xD800 && code < 0xE000) fail("a pair of surrogates");
    append_utf8(value, code);
  }

  uint32_t hex4() {
    uint32_t code = 0;
    for (int i = 0; i < 4; ++i) {
      const char c = at_ < text_.size() ? text_[at_++] : '\0';
      const size_t digit = std::string_view("0123456789abcdef0123456789ABCDEF").find(c);
      if (c == '\0' || digit == std::string_view::npos) fail("four hex digits");
      code = code << 4 | static_cast<uint32_t>(digit % 16);
    }
    return code;
  }

  static void append_utf8(std::string& value, uint32_t code) {
    if (code < 0x80) {
      value += static_cast<char>(code);
      return;
    }
    const int following = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
    value += static_cast<char>((0xFF00 >> (following + 1) & 0xFF) | code >> (6 * following));
    for (int i = following - 1; i >= 0; --i) value += static_cast<char>(0x80 | (code >> (6 * i) & 0x3F));
  }

  std::string_view text_;
  const std::string& path_;
  size_t at_ = 0;
};

std::string quoted(const std::string& value) {
  std::string text = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      text += std::string{'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20) {
      constexpr std::string_view digits = "0123456789abcdef";
      text += std::string("\\u00") + digits[c >> 4] + digits[c & 15];
    } else {
      text += c;
    }
  }
  return text + "\"";
}

template <typename T, typename F>
std::string joined(const T& items, F format) {
  std::string text;
  for (const auto& item : items) text += (text.empty() ? "" : ",") + format(item);
  return text;
}

}  // namespace

TensorHeader parse_tensor_header(std::string_view text, const std::string& path) { return Parser(text, path).header(); }

std::string format_tensor_header(const TensorHeader& header) {
  const auto pair = [](const auto& item) { return quoted(item.first) + ":" + quoted(item.second); };
  const auto entry = [](const TensorEntry& e) {
    std::string dtype;
    for (const auto& [name, value] : kNames) {
      if (value == e.dtype) dtype = name;
    }
    return quoted(e.name) + ":{\"dtype\":\"" + dtype + "\",\"shape\":[" +
           joined(e.shape, [](int64_t n) { return std::to_string(n); }) + "],\"data_offsets\":[" +
           std::to_string(e.begin) + "," + std::to_string(e.end) + "]}";
  };
  std::string text = "{\"__metadata__\":{" + joined(header.metadata, pair) + "}";
  for (const TensorEntry& e : header.entries) text += "," + entry(e);
  return text + "}";
}

}  // namespace fold::api
