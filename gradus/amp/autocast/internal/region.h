#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <gradus/amp/autocast/internal/cast_cache.h>
#include <gradus/amp/autocast/internal/settings.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/plane/saved/saved_plane.h>

namespace gradus::amp::internal {

/// Casts the arguments of listed operators. One region decides alone: the newest of a thread.
class Region final : public plane::op::Handler {
 public:
  Region(std::shared_ptr<const Settings> settings, std::shared_ptr<CastCache> cache);

  /// The region that acts on this thread now, or null.
  static std::shared_ptr<Region> current();

  void call(plane::op::Call& call) override;

  const std::shared_ptr<const Settings>& settings() const { return settings_; }
  const std::shared_ptr<CastCache>& cache() const { return cache_; }

 private:
  bool decide(plane::op::Call& call);
  void forget_written(const plane::op::Call& call);
  void proceed_nested(plane::op::Call& call);
  void lower(plane::op::Call& call, const DeviceSetting& setting, const OperatorRule& rule);
  void compute_rounded(plane::op::Call& call, const DeviceSetting& setting,
                       const OperatorRule& rule);
  void raise(plane::op::Call& call, const DeviceSetting& setting, const OperatorRule& rule);
  void raise_result(plane::op::Call& call, const DeviceSetting& setting, int dtype_argument);
  void widen(plane::op::Call& call, const DeviceSetting& setting, const OperatorRule& rule);
  Cast cast(const at::Tensor& tensor, at::ScalarType dtype, bool rounded);

  const std::shared_ptr<const Settings> settings_;
  const std::shared_ptr<CastCache> cache_;
  // A backward pass runs in the types that forward chose, unless the region began inside it.
  const int pass_;
  std::vector<const DeviceSetting*> enabled_;
};

/// A region on this thread's planes while it lives.
class ActiveRegion {
 public:
  explicit ActiveRegion(std::shared_ptr<const Settings> settings);
  ~ActiveRegion();
  ActiveRegion(const ActiveRegion&) = delete;
  ActiveRegion& operator=(const ActiveRegion&) = delete;

 private:
  std::shared_ptr<CastCache> own_cache_;  // null inside another region
  plane::op::Guard calls_;
  plane::saved::Guard saved_;
};

/// True while this thread's autocast calls operators of its own.
bool casting_now();

}  // namespace gradus::amp::internal
