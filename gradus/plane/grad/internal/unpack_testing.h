#pragma once

#include <memory>
#include <optional>

#include <gradus/plane/saved/saved_plane.h>

namespace gradus::plane::grad::internal {

/// Counts how often a saved tensor is unpacked.
struct UnpackCounter final : saved::Hooks {
  explicit UnpackCounter(int& n) : n(n) {}
  std::optional<saved::Packed> pack(const saved::Value& v) override {
    return saved::Packed{{v.tensor}, [this](auto p) {
                           ++n;
                           return p[0];
                         }};
  }
  int& n;
};

}  // namespace gradus::plane::grad::internal
