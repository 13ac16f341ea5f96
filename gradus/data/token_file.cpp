#include <gradus/data/token_file.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string_view>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gradus/base/error.h>
#include <gradus/data/corpus.h>
#include <gradus/state/atomic_file.h>
#include <gradus/state/content_hash.h>

namespace gradus::data {
namespace {

namespace fs = std::filesystem;

static_assert(std::endian::native == std::endian::little, "tokens are stored little-endian");

struct RawHeader {
  char magic[8];
  std::uint32_t version;
  std::uint32_t token_bytes;
  std::uint64_t count;
  std::uint64_t vocabulary_size;
  std::uint64_t tokenizer_hash;
  std::uint64_t corpus_hash;
  std::uint64_t data_hash;
  std::uint64_t header_hash;  // of all bytes before it
};
static_assert(sizeof(RawHeader) == 64);
constexpr char kMagic[8] = {'g', 'r', 'a', 'd', 'u', 's', 'T', 'K'};
constexpr std::uint32_t kVersion = 1;
constexpr std::int64_t kSmallVocabulary = 1 << 16;

std::uint64_t header_hash(const RawHeader& header) {
  return state::content_hash(&header, offsetof(RawHeader, header_hash));
}

template <typename Word>
std::vector<Word> narrow(std::span<const std::int64_t> tokens, std::int64_t vocabulary_size) {
  std::vector<Word> words;
  words.reserve(tokens.size());
  for (const std::int64_t token : tokens) {
    GRADUS_CHECK("token_file", token >= 0 && token < vocabulary_size, "a token must be in [0, ",
                 vocabulary_size, "); got ", token);
    words.push_back(static_cast<Word>(token));
  }
  return words;
}

void write_tokens(const std::string& path, const void* data, std::size_t token_bytes,
                  const TokenFileInfo& info) {
  const std::size_t bytes = static_cast<std::size_t>(info.count) * token_bytes;
  RawHeader header{};
  std::memcpy(header.magic, kMagic, sizeof kMagic);
  header.version = kVersion;
  header.token_bytes = static_cast<std::uint32_t>(token_bytes);
  header.count = static_cast<std::uint64_t>(info.count);
  header.vocabulary_size = static_cast<std::uint64_t>(info.vocabulary_size);
  header.tokenizer_hash = info.tokenizer_hash;
  header.corpus_hash = info.corpus_hash;
  header.data_hash = state::content_hash(data, bytes);
  header.header_hash = header_hash(header);
  state::AtomicFile file(path);
  file.write(&header, sizeof header);
  file.write(data, bytes);
  file.commit();
}

/// Says what is wrong with a header, or "" if nothing is.
std::string fault_of(const RawHeader& header, std::size_t file_bytes) {
  if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
    return "it does not begin as a token file";
  if (header.version != kVersion)
    return base::join("it has version ", header.version, "; this build reads ", kVersion);
  if (header.header_hash != header_hash(header)) return "its header is damaged";
  if (header.token_bytes != 2 && header.token_bytes != 4) return "its tokens have an unknown size";
  // Division, so that a count near 2^64 cannot wrap round.
  const std::size_t data_bytes = file_bytes - sizeof(RawHeader);
  if (data_bytes % header.token_bytes != 0 || data_bytes / header.token_bytes != header.count) {
    return base::join("it should hold ", header.count, " tokens of ", header.token_bytes,
                      " bytes and has ", data_bytes, " bytes of them");
  }
  return "";
}

/// "bible-kjv" stays itself; a path keeps its letters and digits and is told apart by its hash.
std::string cache_name(const std::string& corpus, const TokenizerOptions& options) {
  std::string kind = options.kind;
  if (kind != "bytes") kind += base::join("-", options.vocabulary_size);
  std::string slug;
  for (const char c : corpus.size() > 40 ? corpus.substr(corpus.size() - 40) : corpus) {
    slug.push_back(std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' ? c : '_');
  }
  return base::join(slug, "-", kind, "-", state::hash_text(state::content_hash(corpus)));
}

/// Fills @p prepared from the cache and returns "", or returns why that cannot be.
std::string load_cached(const Corpus& corpus, PreparedTokens& prepared) {
  if (!fs::exists(prepared.directory)) return "not cached";
  try {
    const auto tokenizer = load_tokenizer(prepared.directory + "/tokenizer");
    const auto tokens = TokenFile::open(prepared.directory + "/tokens");
    if (tokens->info().corpus_hash != corpus.hash) return "the corpus changed";
    if (tokens->info().tokenizer_hash != tokenizer->hash())
      return "the cached tokens are of another tokenizer";
    prepared.tokenizer = tokenizer;
    prepared.tokens = tokens;
    return "";
  } catch (const UserError& error) {
    return error.what();
  }
}

/// Encodes in parts that end at newlines, where encoding is additive, and checks each part's way
/// back.
std::vector<std::int64_t> encode_whole(const Tokenizer& tokenizer, std::string_view text) {
  constexpr std::size_t kPartBytes = 1 << 20;
  std::vector<std::int64_t> tokens;
  while (!text.empty()) {
    std::size_t end = text.size() <= kPartBytes ? text.size() : text.find('\n', kPartBytes);
    end = end >= text.size() ? text.size() : end + 1;
    const std::string_view part = text.substr(0, end);
    const std::vector<std::int64_t> encoded = tokenizer.encode(part);
    GRADUS_INTERNAL_CHECK("token_file", tokenizer.decode(encoded) == part, "the tokenizer '",
                          tokenizer.name(), "' does not give the text back");
    tokens.insert(tokens.end(), encoded.begin(), encoded.end());
    text.remove_prefix(end);
  }
  return tokens;
}

void build(const Corpus& corpus, const TokenizerOptions& options, PreparedTokens& prepared) {
  prepared.tokenizer = make_tokenizer(options, corpus.text);
  const std::vector<std::int64_t> tokens = encode_whole(*prepared.tokenizer, corpus.text);
  state::AtomicDirectory entry(prepared.directory);
  prepared.tokenizer->save(entry.file("tokenizer"));
  TokenFile::write(entry.file("tokens"), tokens,
                   {.vocabulary_size = prepared.tokenizer->vocabulary_size(),
                    .tokenizer_hash = prepared.tokenizer->hash(),
                    .corpus_hash = corpus.hash});
  entry.commit();
  prepared.tokens = TokenFile::open(prepared.directory + "/tokens");
}

}  // namespace

void TokenFile::write(const std::string& path, std::span<const std::int64_t> tokens,
                      TokenFileInfo info) {
  GRADUS_CHECK("token_file",
               info.vocabulary_size >= 1 && info.vocabulary_size <= (std::int64_t{1} << 32),
               "a vocabulary has 1 to 2^32 tokens; got ", info.vocabulary_size);
  info.count = static_cast<std::int64_t>(tokens.size());
  if (info.vocabulary_size <= kSmallVocabulary) {
    write_tokens(path, narrow<std::uint16_t>(tokens, info.vocabulary_size).data(), 2, info);
  } else {
    write_tokens(path, narrow<std::uint32_t>(tokens, info.vocabulary_size).data(), 4, info);
  }
}

std::shared_ptr<const TokenFile> TokenFile::open(const std::string& path) {
  const auto fail = [&](const std::string& fault) {
    throw UserError(base::join("[token_file] '", path, "' cannot be used: ", fault,
                               ". Remove it and prepare the tokens again."));
  };
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail(std::strerror(errno));
  struct stat there{};
  const bool regular = ::fstat(fd, &there) == 0 && S_ISREG(there.st_mode);
  const auto bytes = regular ? static_cast<std::size_t>(there.st_size) : 0;
  void* mapping =
      bytes < sizeof(RawHeader) ? MAP_FAILED : ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, fd, 0);
  const int map_error = errno;
  ::close(fd);
  if (bytes < sizeof(RawHeader))
    fail(base::join("it has ", bytes, " bytes, fewer than a header's ", sizeof(RawHeader)));
  if (mapping == MAP_FAILED) fail(std::strerror(map_error));
  std::shared_ptr<TokenFile> file(new TokenFile);
  file->mapping_ = mapping;
  file->mapping_bytes_ = bytes;
  RawHeader header;
  std::memcpy(&header, mapping, sizeof header);
  if (const std::string fault = fault_of(header, bytes); !fault.empty()) fail(fault);
  const char* data = static_cast<const char*>(mapping) + sizeof header;
  if (header.data_hash != state::content_hash(data, bytes - sizeof header))
    fail("its tokens are damaged (checksum)");
  file->token_bytes_ = header.token_bytes;
  file->info_ = {.count = static_cast<std::int64_t>(header.count),
                 .vocabulary_size = static_cast<std::int64_t>(header.vocabulary_size),
                 .tokenizer_hash = header.tokenizer_hash,
                 .corpus_hash = header.corpus_hash};
  return file;
}

TokenFile::~TokenFile() {
  if (mapping_ != nullptr) ::munmap(mapping_, mapping_bytes_);
}

std::int64_t TokenFile::operator[](std::int64_t index) const {
  std::int64_t token = 0;
  copy(index, {&token, 1});
  return token;
}

void TokenFile::copy(std::int64_t begin, std::span<std::int64_t> out) const {
  const auto count = static_cast<std::int64_t>(out.size());
  GRADUS_CHECK("token_file", begin >= 0 && count <= size() && begin <= size() - count, "tokens ",
               begin, " to ", begin + count, " must lie in a file of ", size());
  const char* data = static_cast<const char*>(mapping_) + sizeof(RawHeader);
  if (token_bytes_ == 2) {
    const auto* words = reinterpret_cast<const std::uint16_t*>(data) + begin;
    std::copy(words, words + count, out.begin());
  } else {
    const auto* words = reinterpret_cast<const std::uint32_t*>(data) + begin;
    std::copy(words, words + count, out.begin());
  }
}

PreparedTokens prepare_tokens(const std::string& corpus, const TokenizerOptions& options,
                              const std::string& cache_directory) {
  const Corpus loaded = load_corpus(corpus);
  std::error_code error;
  fs::create_directories(cache_directory, error);
  if (error) {
    throw UserError(base::join("[token_file] cannot create the cache directory '", cache_directory,
                               "': ", error.message(), ". Choose one that this user may write."));
  }
  state::remove_stale_temporaries(cache_directory);
  PreparedTokens prepared;
  prepared.directory = (fs::path(cache_directory) / cache_name(corpus, options)).string();
  prepared.built_because = load_cached(loaded, prepared);
  if (!prepared.built_because.empty()) build(loaded, options, prepared);
  return prepared;
}

}  // namespace gradus::data
