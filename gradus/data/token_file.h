#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <gradus/data/tokenizer.h>

namespace gradus::data {

/// What a token file says of itself.
struct TokenFileInfo {
  std::int64_t count = 0;            ///< Tokens.
  std::int64_t vocabulary_size = 0;  ///< Every token is below it.
  std::uint64_t tokenizer_hash = 0;  ///< Tokenizer::hash of the one that made it.
  std::uint64_t corpus_hash = 0;     ///< Corpus::hash of the text it was made from.
  bool operator==(const TokenFileInfo&) const = default;
};

/// A tokenised corpus on disk, memory-mapped: tokens are read by page as they are used, and shared
/// between processes.
///
/// 64 bytes of header, then little-endian numbers of 2 bytes (4 for a vocabulary above 65,536).
/// Written atomically; a checksum over header and tokens is verified on opening, so that a damaged
/// file is refused and never misread. Reading from several threads is safe. A file that somebody
/// shortens in place while it is mapped ends the process (SIGBUS).
class TokenFile {
 public:
  /// Writes @p tokens with @p info (whose count is set from them).
  /// @throws UserError if a token is not in [0, info.vocabulary_size) or writing fails.
  static void write(const std::string& path, std::span<const std::int64_t> tokens,
                    TokenFileInfo info);

  /// @throws UserError that names the file and the fault.
  static std::shared_ptr<const TokenFile> open(const std::string& path);

  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  const TokenFileInfo& info() const { return info_; }
  std::int64_t size() const { return info_.count; }
  std::int64_t operator[](std::int64_t index) const;

  /// Copies tokens [begin, begin + out.size()). @throws UserError if they pass the end.
  void copy(std::int64_t begin, std::span<std::int64_t> out) const;

 private:
  TokenFile() = default;

  TokenFileInfo info_;
  void* mapping_ = nullptr;
  std::size_t mapping_bytes_ = 0;
  std::size_t token_bytes_ = 2;
};

/// What prepare_tokens returns.
struct PreparedTokens {
  std::shared_ptr<const Tokenizer> tokenizer;
  std::shared_ptr<const TokenFile> tokens;
  std::string directory;      ///< Where both are cached: files "tokenizer" and "tokens".
  std::string built_because;  ///< Empty if the cache was used, else why it was not: "not cached",
                              ///< "the corpus changed" ...
};

/// Loads a corpus, trains the tokenizer and tokenises, once: later calls with the same corpus and
/// options use the cache.
///
/// The corpus itself is read on each call, so that a changed text is noticed. A cached entry that
/// is damaged or stale is built again, in its place. Several processes may prepare at once: each
/// sees a whole entry.
///
/// @param cache_directory  Created if absent.
/// @throws UserError as load_corpus and make_tokenizer do, and if the cache cannot be written.
PreparedTokens prepare_tokens(const std::string& corpus, const TokenizerOptions& options,
                              const std::string& cache_directory);

}  // namespace gradus::data
