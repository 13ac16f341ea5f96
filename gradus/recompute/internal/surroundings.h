#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/rng.h>
#include <gradus/recompute/checkpoint.h>
#include <gradus/recompute/internal/region.h>

namespace gradus::recompute::internal {

/// What a region's result depends on beside its tensors, as it was when the region was called:
/// random numbers and autocast settings.
class Surroundings {
 public:
  explicit Surroundings(const CheckpointOptions& options);

  /// Puts all back as it was while it lives, custom generators of @p record included; then returns
  /// to what was there before.
  class [[nodiscard]] Scope {
   public:
    Scope(const Surroundings& surroundings, const RegionRecord& record);

   private:
    std::optional<base::RngGuard> rng_;
    amp::AutocastStateGuard autocast_;
  };

 private:
  std::optional<base::RngState> rng_;
  amp::AutocastState autocast_ = amp::AutocastState::capture();
};

/// While it lives, the outside leaves of a region that runs a backward pass inside itself have no
/// gradient; then the one they had. So a second run adds nothing to them.
class [[nodiscard]] GradientsAside {
 public:
  explicit GradientsAside(const RegionRecord& record);
  ~GradientsAside();
  GradientsAside(const GradientsAside&) = delete;
  GradientsAside& operator=(const GradientsAside&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

}  // namespace gradus::recompute::internal
