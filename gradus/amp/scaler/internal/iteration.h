#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <gradus/amp/scaler/grad_scaler.h>
#include <gradus/amp/scaler/internal/loss_scale.h>
#include <gradus/amp/scaler/internal/skip_rate.h>

namespace gradus::amp {
namespace scaler {

// Names a tensor without keeping its memory: while it lives, no other tensor has its address.
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

enum class Stage : std::uint8_t { ready, unscaled, stepped };

/// What the scaler knows of one optimizer.
struct Record {
  std::size_t number = 0;  // In the order of first use.
  std::vector<WeakTensor> parameters = {};

  // This iteration's; cleared by update().
  Stage stage = Stage::ready;
  std::vector<at::Tensor> found = {};  // Not yet read: non-zero where a gradient was not finite.
  std::optional<bool> overflow = std::nullopt;  // Read, and reduced.
  // Losses scaled until its unscale; none where the caller unscaled it.
  std::optional<std::uint64_t> losses = std::nullopt;

  SkipRate skips = {};
};

/// A gradient and what it was when it was written down.
struct Gradient {
  WeakTensor gradient;
  std::int64_t version = 0;
  double scale = 1.0;
  const Record* record = nullptr;  // Whose unscale divided it.
  std::uint64_t losses = 0;        // Losses scaled until then.
  // Its version when a loss was scaled after its unscale: what changes it from there until the
  // scaler's next call may be that loss's backward, and not clipping.
  std::optional<std::int64_t> before_backward = std::nullopt;
  bool mixed = false;  // It did change.
};

/// A parameter's gradient about to be unscaled.
struct Candidate {
  at::Tensor parameter;
  std::string name;
};

}  // namespace scaler

/// The bookkeeping of iterations.
struct GradScaler::Impl {
  using Candidate = scaler::Candidate;
  using Gradient = scaler::Gradient;
  using Record = scaler::Record;

  /// @throws UserError on an option out of its range.
  explicit Impl(GradScalerOptions given);

  Record& record_of(const optim::Optimizer& optimizer);
  std::string name_of(const Record& record) const;
  void check_may_unscale(const Record& record) const;
  void check_gradients(const std::vector<Candidate>& candidates) const;
  void begin_check(Record& record);
  void note_backward();
  void check_not_mixed(const optim::Optimizer& optimizer, const Record& record) const;
  void unscale(const optim::Optimizer& optimizer, Record& record);
  void resolve(const std::vector<Record*>& records);
  bool finish_step(optim::Optimizer& optimizer, Record& record, bool skip);
  void warn_if_due(Record& record);
  void note_pending(double old_scale);
  std::vector<Record*> checked_records();
  void start_iteration();

  GradScalerOptions options;
  scaler::LossScale scale;
  // Addresses only: an optimizer is never reached through them.
  std::unordered_map<const optim::Optimizer*, std::unique_ptr<Record>> records;
  std::vector<std::unique_ptr<Record>> replaced;  // In this iteration: `unscaled` may point there.
  std::size_t next_number = 0;
  std::uint64_t losses = 0;   // Losses scaled so far.
  bool loss_pending = false;  // A loss was scaled since gradients were last unscaled.
  bool any_stepped = false;
  std::unordered_map<const void*, Gradient> unscaled;  // In this iteration.
  std::unordered_map<const void*, Gradient> outdated;  // Made at a scale that is gone.
};

}  // namespace gradus::amp
