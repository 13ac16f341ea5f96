#pragma once

// What compression would make of the results of a traced pass.

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gradus/base/clock.h>
#include <gradus/compress/policy.h>
#include <gradus/plan/simulate.h>
#include <gradus/recompute/step_trace.h>

namespace gradus::plan::internal {

/// Measures, in one traced pass, what a guard would make of each value that autograd saves.
class CompressionProbe {
 public:
  /// @param seconds  No value is probed once so much time was spent.
  CompressionProbe(double seconds, base::Clock clock);

  /// A save of what @p call made; @p allowed: false rules the call out. Values whose size does not
  /// depend on the data are encoded once for each layout and operator.
  void saved(const compress::CompressGuard& guard, const plane::saved::Value& value,
             std::int64_t call, bool allowed);

  /// One entry a call; bytes of 0 unless each of its saves can be compressed and all of them take
  /// less than the call's bytes. Empty if no call has any.
  std::vector<CompressedResult> results(const recompute::StepTrace& trace) const;

 private:
  struct Save {
    compress::Probe probe;
    std::int64_t plain_bytes = 0;
    bool shared = false;  // finds an encoding of another save
  };
  struct Call {
    bool possible = true;
    std::vector<Save> saves;
    std::set<std::string> encodings;  // a guard shares equal ones
  };
  struct Known {
    bool possible = false;
    compress::Probe probe;
  };

  /// Seconds a plain byte of each method: medians of what was measured.
  struct Rates {
    std::array<double, compress::kMethodCount> encode{}, restore{};
  };
  Rates rates() const;
  Known look(const compress::CompressGuard& guard, const plane::saved::Value& value,
             const std::string& layout);

  double limit_s_;
  base::Clock clock_;
  double spent_s_ = 0.0;
  std::map<std::int64_t, Call> calls_;
  std::map<std::string, Known> by_layout_;
};

}  // namespace gradus::plan::internal
