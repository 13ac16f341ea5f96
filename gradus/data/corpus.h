#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradus::data {

/// A text to train on.
struct Corpus {
  std::string name;        ///< As given to load_corpus.
  std::string text;        ///< UTF-8, lines ended by '\n'.
  std::uint64_t hash = 0;  ///< state::content_hash of the text: tells a changed corpus from the one
                           ///< tokenised earlier.
};

/// Loads a corpus by name.
///
/// - "bible-kjv": the King James Bible from the Debian package bible-kjv, a verse a line with its
/// reference ("Ge1:1 In the
///   beginning ..."), 31,102 lines, 4.4 MB.
/// - "file:PATH": one UTF-8 text file, or a directory whose .txt and .rst files (folders below
/// included, links to folders
///   not followed) are joined in the order of their paths, each ended by a newline.
///
/// @throws UserError for an unknown name, a package that is not installed (the message says how to
/// install it), a missing
///   file, text that is not UTF-8 (file and byte are named) and an empty corpus.
Corpus load_corpus(const std::string& name);

/// The names that load_corpus knows, for messages and help: "bible-kjv", "file:PATH".
std::vector<std::string> corpus_names();

}  // namespace gradus::data
