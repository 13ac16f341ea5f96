#include <gradus/data/corpus.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

#include <gradus/base/error.h>
#include <gradus/data/internal/run_program.h>
#include <gradus/data/internal/utf8.h>
#include <gradus/state/atomic_file.h>
#include <gradus/state/content_hash.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFilePrefix = "file:";
constexpr std::string_view kBible = "bible-kjv";
constexpr std::int64_t kBibleLines = 31102;

/// Ends each line without the spaces that some verses carry.
std::string without_trailing_spaces(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (const char c : text) {
    if (c == '\n') {
      while (!result.empty() && (result.back() == ' ' || result.back() == '\r')) result.pop_back();
    }
    result.push_back(c);
  }
  return result;
}

std::string load_bible() {
  const internal::ProgramResult result = internal::run_program({"bible", "-f", "gen1:1-rev22:21"});
  if (result.spawn_error != 0) {
    throw UserError(
        base::join("[data] the corpus 'bible-kjv' comes from the program 'bible', which could not "
                   "be started (",
                   std::strerror(result.spawn_error), "). Install it: apt-get install bible-kjv"));
  }
  const auto lines = std::count(result.output.begin(), result.output.end(), '\n');
  if (result.exit_status != 0 || lines != kBibleLines) {
    throw UserError(base::join(
        "[data] 'bible -f gen1:1-rev22:21' must print ", kBibleLines, " verses; got ", lines,
        " and exit status ", result.exit_status, " (", result.complaint.substr(0, 200),
        "). Install it afresh: apt-get install --reinstall bible-kjv bible-kjv-text"));
  }
  return without_trailing_spaces(result.output);
}

/// One file as itself; a directory as its text files.
std::vector<std::string> text_files(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  GRADUS_CHECK("data", fs::exists(status), "the corpus 'file:", path,
               "' must name a text file or a directory; there is no '", path, "'");
  if (!fs::is_directory(status)) return {path};
  std::vector<std::string> files;
  fs::recursive_directory_iterator entry(path, error);
  for (; !error && entry != fs::recursive_directory_iterator(); entry.increment(error)) {
    const std::string extension = entry->path().extension().string();
    if (entry->is_regular_file() && (extension == ".txt" || extension == ".rst"))
      files.push_back(entry->path().string());
  }
  if (error) throw UserError(base::join("[data] cannot list '", path, "': ", error.message()));
  GRADUS_CHECK("data", !files.empty(), "a corpus directory must hold .txt or .rst files; '", path,
               "' holds none");
  std::sort(files.begin(), files.end());
  return files;
}

std::string load_files(const std::string& path) {
  std::string text;
  for (const std::string& file : text_files(path)) {
    const std::string content = state::read_file(file);
    const std::size_t valid = internal::valid_utf8_bytes(content);
    GRADUS_CHECK("data", valid == content.size(), "a corpus must be UTF-8 text; '", file,
                 "' is not at byte ", valid, ". Convert it: iconv -t UTF-8");
    text += content;
    if (!content.empty() && content.back() != '\n') text += '\n';
  }
  return text;
}

}  // namespace

Corpus load_corpus(const std::string& name) {
  Corpus corpus;
  corpus.name = name;
  if (name == kBible) {
    corpus.text = load_bible();
  } else if (name.starts_with(kFilePrefix)) {
    corpus.text = load_files(name.substr(kFilePrefix.size()));
  } else {
    throw UserError(base::join("[data] a corpus is 'bible-kjv' or 'file:PATH'; got '", name, "'"));
  }
  GRADUS_CHECK("data", !corpus.text.empty(), "a corpus must hold text; '", name, "' is empty");
  corpus.hash = state::content_hash(corpus.text);
  return corpus;
}

std::vector<std::string> corpus_names() {
  return {std::string(kBible), std::string(kFilePrefix) + "PATH"};
}

}  // namespace gradus::data
