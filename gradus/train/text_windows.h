#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <gradus/data/batches.h>
#include <gradus/data/token_file.h>

namespace gradus::train {

/// A text cut into the examples of private training: windows of T + 1 tokens side by side, T inputs
/// and as many targets, each the token behind its input.
///
/// No token is in two windows, also not as a target (data::BatchStream's sequences share the token
/// at their border): what one place of the text says is in one example. What does not fill a window
/// at the end of a range is left out.
class TextWindows {
 public:
  /// @throws UserError if no window fits.
  TextWindows(std::shared_ptr<const data::TokenFile> tokens,
              const std::vector<data::TokenRange>& ranges, std::int64_t context);

  std::int64_t size() const { return static_cast<std::int64_t>(begins_.size()); }
  /// Windows of some numbers in [0, size()).
  data::Batch rows(const std::vector<std::int64_t>& indices) const;

 private:
  std::shared_ptr<const data::TokenFile> tokens_;
  std::int64_t context_;
  std::vector<std::int64_t> begins_;
};

}  // namespace gradus::train
