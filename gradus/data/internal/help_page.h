#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include <gradus/data/parallel_text.h>

namespace gradus::data::internal {

/// Reads the text area of a help page: a scanner for the HTML that LibreOffice's help is made of,
/// not for HTML at large.
class HelpPageReader {
 public:
  explicit HelpPageReader(std::string_view html) : rest_(html) {}

  std::vector<HelpParagraph> paragraphs();

 private:
  struct Tag {
    std::string_view name;  // "p", "/p"
    std::string_view attributes;
  };

  Tag take_tag();
  void open(const Tag& tag);
  void close(std::string_view name);
  void append(std::string_view text);
  void end_paragraph();

  std::string_view rest_;
  std::vector<HelpParagraph> result_;
  std::string_view open_name_;    // of the paragraph being read; empty: none
  std::size_t hidden_spans_ = 0;  // depth inside a span that is left out
};

/// Replaces &amp; &lt; &gt; &quot; &apos; &nbsp; and numeric references; leaves others as they are.
std::string resolve_references(std::string_view text);

}  // namespace gradus::data::internal
