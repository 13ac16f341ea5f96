#include <gradus/data/internal/unicode.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <gradus/base/error.h>
#include <gradus/data/internal/unicode_tables.h>

namespace gradus::data::internal {
namespace {

/// Reads the tables' words.
class TableReader {
 public:
  explicit TableReader(const char* table) : rest_(table) {}

  bool at_end() {
    take(' ');
    return rest_.empty();
  }
  char32_t number() {
    std::uint32_t value = 0;
    const auto [end, error] =
        std::from_chars(rest_.data(), rest_.data() + rest_.size(), value, /*base=*/16);
    GRADUS_INTERNAL_CHECK("data", error == std::errc(), "a Unicode table is damaged at ",
                          rest_.substr(0, 20));
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return value;
  }
  bool take(char c) {
    if (rest_.empty() || rest_.front() != c) return false;
    rest_.remove_prefix(1);
    return true;
  }

 private:
  std::string_view rest_;
};

/// A set of characters as sorted ranges.
class CharacterSet {
 public:
  explicit CharacterSet(const char* table) {
    for (TableReader reader(table); !reader.at_end();) {
      const char32_t first = reader.number();
      ranges_.push_back({first, reader.take('-') ? reader.number() : first});
    }
  }
  bool contains(char32_t character) const {
    const auto after = std::upper_bound(
        ranges_.begin(), ranges_.end(), character,
        [](char32_t value, const std::array<char32_t, 2>& range) { return value < range[0]; });
    return after != ranges_.begin() && character <= (*(after - 1))[1];
  }

 private:
  std::vector<std::array<char32_t, 2>> ranges_;
};

std::unordered_map<char32_t, std::u32string> read_folds() {
  std::unordered_map<char32_t, std::u32string> folds;
  for (TableReader reader(kFolds); !reader.at_end();) {
    const char32_t first = reader.number();
    if (reader.take('=')) {
      std::u32string& target = folds[first];
      do {
        target.push_back(reader.number());
      } while (reader.take(','));
      continue;
    }
    const char32_t last = reader.take('-') ? reader.number() : first;
    const char32_t step = reader.take('/') ? reader.number() : 1;
    reader.take('+');
    const bool down = reader.take('-');
    const char32_t delta = reader.number();
    for (char32_t code = first; code <= last; code += step)
      folds[code].push_back(down ? code - delta : code + delta);
  }
  return folds;
}

// Unicode 15, section 3.12: a Hangul syllable is its parts by arithmetic.
constexpr char32_t kHangulBase = 0xAC00, kHangulCount = 11172, kVowels = 21, kTails = 28;
constexpr char32_t kLeadBase = 0x1100, kVowelBase = 0x1161, kTailBase = 0x11A7;

void append_hangul(char32_t syllable, std::u32string& out) {
  const char32_t index = syllable - kHangulBase;
  out.push_back(kLeadBase + index / (kVowels * kTails));
  out.push_back(kVowelBase + index % (kVowels * kTails) / kTails);
  if (index % kTails != 0) out.push_back(kTailBase + index % kTails);
}

}  // namespace

void append_folded(char32_t character, std::u32string& out) {
  if (character < 0x80) {
    out.push_back(character >= U'A' && character <= U'Z' ? character + 0x20 : character);
    return;
  }
  if (character >= kHangulBase && character < kHangulBase + kHangulCount) {
    append_hangul(character, out);
    return;
  }
  static const auto folds = read_folds();
  static const CharacterSet marks(kNonSpacingMarks);
  if (const auto fold = folds.find(character); fold != folds.end()) {
    out += fold->second;
  } else if (!marks.contains(character)) {
    out.push_back(character);
  }
}

bool is_punctuation(char32_t character) {
  static const CharacterSet punctuation(kPunctuation);
  return punctuation.contains(character);
}

bool is_control(char32_t character) {
  static const CharacterSet controls(kControls);
  return controls.contains(character);
}

bool is_space(char32_t character) {
  switch (character) {
    case U' ':
    case U'\t':
    case U'\n':
    case U'\r':
    case 0xA0:
    case 0x1680:
    case 0x2028:
    case 0x2029:
    case 0x202F:
    case 0x205F:
    case 0x3000:
      return true;
    default:
      return character >= 0x2000 && character <= 0x200A;
  }
}

bool is_cjk(char32_t character) {
  constexpr std::array<std::array<char32_t, 2>, 8> kRanges{{{0x3400, 0x4DBF},
                                                            {0x4E00, 0x9FFF},
                                                            {0xF900, 0xFAFF},
                                                            {0x20000, 0x2A6DF},
                                                            {0x2A700, 0x2B73F},
                                                            {0x2B740, 0x2B81F},
                                                            {0x2B820, 0x2CEAF},
                                                            {0x2F800, 0x2FA1F}}};
  return std::any_of(kRanges.begin(), kRanges.end(), [&](const auto& range) {
    return character >= range[0] && character <= range[1];
  });
}

}  // namespace gradus::data::internal
