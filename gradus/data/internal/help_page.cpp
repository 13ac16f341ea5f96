#include <gradus/data/internal/help_page.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <utility>

#include <gradus/data/internal/utf8.h>

namespace gradus::data::internal {
namespace {

constexpr std::string_view kNoBreakSpace = "\xc2\xa0";

bool is_space(char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\f'; }

bool is_paragraph(std::string_view name) {
  return name == "p" || (name.size() == 2 && name[0] == 'h' && name[1] >= '1' && name[1] <= '6');
}

/// The value of an attribute in double quotes; empty if it is not there.
std::string_view attribute(std::string_view attributes, std::string_view name) {
  std::size_t at = 0;
  while ((at = attributes.find(name, at)) != std::string_view::npos) {
    const std::size_t value = at + name.size();
    const bool whole = at > 0 && is_space(attributes[at - 1]);
    if (whole && attributes.substr(value).starts_with("=\"")) {
      const std::size_t end = attributes.find('"', value + 2);
      return end == std::string_view::npos ? std::string_view()
                                           : attributes.substr(value + 2, end - value - 2);
    }
    at = value;
  }
  return {};
}

/// Appends what the reference "&name;" stands for; false if it is none that is known.
bool append_reference(std::string& text, std::string_view name) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 6> kNames{
      {{"amp", "&"}, {"lt", "<"}, {"gt", ">"}, {"quot", "\""}, {"apos", "'"}, {"nbsp", " "}}};
  for (const auto& [known, value] : kNames) {
    if (name == known) {
      text += value;
      return true;
    }
  }
  if (name.size() < 2 || name[0] != '#') return false;
  const bool hexadecimal = name[1] == 'x' || name[1] == 'X';
  const std::string_view digits = name.substr(hexadecimal ? 2 : 1);
  std::uint32_t code = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), code, hexadecimal ? 16 : 10);
  const bool surrogate = code >= 0xD800 && code < 0xE000;
  if (error != std::errc() || end != digits.data() + digits.size() || code == 0 ||
      code > 0x10FFFF || surrogate) {
    return false;
  }
  append_utf8(text, code);
  return true;
}

/// White space, no-break spaces among it, as single spaces between words.
std::string collapse_spaces(std::string_view text) {
  std::string result;
  bool gap = false;
  for (std::size_t at = 0; at < text.size(); ++at) {
    const bool no_break = text.substr(at).starts_with(kNoBreakSpace);
    if (no_break) ++at;
    if (no_break || is_space(text[at])) {
      gap = true;
      continue;
    }
    if (gap && !result.empty()) result += ' ';
    gap = false;
    result += text[at];
  }
  return result;
}

}  // namespace

std::string resolve_references(std::string_view text) {
  constexpr std::size_t kLongestReference = 10;
  std::string result;
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] == '&') {
      const std::size_t end = text.substr(0, at + kLongestReference).find(';', at);
      if (end != std::string_view::npos &&
          append_reference(result, text.substr(at + 1, end - at - 1))) {
        at = end;
        continue;
      }
    }
    result += text[at];
  }
  return result;
}

std::vector<HelpParagraph> HelpPageReader::paragraphs() {
  while (!rest_.empty()) {
    const std::size_t tag = std::min(rest_.find('<'), rest_.size());
    append(rest_.substr(0, tag));
    rest_.remove_prefix(tag);
    if (rest_.empty()) break;
    const Tag taken = take_tag();
    if (taken.name.starts_with('/')) {
      close(taken.name.substr(1));
    } else {
      open(taken);
    }
  }
  end_paragraph();
  return std::move(result_);
}

HelpPageReader::Tag HelpPageReader::take_tag() {
  if (rest_.starts_with("<!--")) {
    const std::size_t end = rest_.find("-->");
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end + 3);
    return {};
  }
  const std::size_t end = std::min(rest_.find('>'), rest_.size() - 1);
  const std::string_view inside = rest_.substr(1, end - 1);
  rest_.remove_prefix(end + 1);
  const auto name_end = static_cast<std::size_t>(
      std::find_if(inside.begin(), inside.end(), is_space) - inside.begin());
  return {inside.substr(0, name_end), inside.substr(name_end)};
}

void HelpPageReader::open(const Tag& tag) {
  if (tag.name == "script" || tag.name == "style") {
    const std::string ending = "</" + std::string(tag.name);
    rest_.remove_prefix(std::min(rest_.find(ending), rest_.size()));
  } else if (tag.name == "span") {
    if (hidden_spans_ > 0 || attribute(tag.attributes, "class") == "MAC") ++hidden_spans_;
  } else if (tag.name == "br" || tag.name == "br/") {
    append(" ");
  } else if (is_paragraph(tag.name)) {
    end_paragraph();
    open_name_ = tag.name;
    result_.push_back({.id = std::string(attribute(tag.attributes, "id")), .text = {}});
  }
}

void HelpPageReader::close(std::string_view name) {
  if (name == "span") {
    if (hidden_spans_ > 0) --hidden_spans_;
  } else if (!open_name_.empty() && name == open_name_) {
    end_paragraph();
  }
}

void HelpPageReader::append(std::string_view text) {
  if (!open_name_.empty() && hidden_spans_ == 0) result_.back().text += text;
}

void HelpPageReader::end_paragraph() {
  if (open_name_.empty()) return;
  result_.back().text = collapse_spaces(resolve_references(result_.back().text));
  open_name_ = {};
  hidden_spans_ = 0;
}

}  // namespace gradus::data::internal
