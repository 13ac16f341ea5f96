#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gradus::state {

/// XXH64 of a block of bytes: tells a corrupt or changed file from the right one. Not a defence
/// against forgery.
///
/// The same on every machine; agrees with the published test vectors of https://xxhash.com (version
/// 0.1.1 of its specification).
std::uint64_t content_hash(const void* data, std::size_t bytes, std::uint64_t seed = 0);
inline std::uint64_t content_hash(std::string_view text, std::uint64_t seed = 0) {
  return content_hash(text.data(), text.size(), seed);
}

/// Sixteen lower-case hexadecimal digits.
std::string hash_text(std::uint64_t hash);

}  // namespace gradus::state
