#pragma once

#include <cstdint>
#include <string_view>

namespace gradus::report::internal {

/// CRC-32C (Castagnoli, RFC 3720 appendix B.4): reflected polynomial 0x82F63B78.
std::uint32_t crc32c(std::string_view bytes);

/// The checksum that TFRecord files store: crc32c rotated right by 15 bits plus a constant, so that
/// a checksum of data that holds checksums stays a good one (TensorFlow, tsl/lib/hash/crc32c.h).
std::uint32_t masked_crc32c(std::string_view bytes);

}  // namespace gradus::report::internal
