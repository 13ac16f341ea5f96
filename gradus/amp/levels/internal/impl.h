#pragma once

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <gradus/amp/autocast/operator_lists.h>
#include <gradus/amp/levels/internal/align.h>
#include <gradus/amp/levels/levels.h>
#include <gradus/amp/levels/rounding.h>
#include <gradus/amp/scaler/internal/skip_rate.h>

namespace gradus::amp {

/// A parameter of a model.
struct Weight {
  enum class Kind : std::uint8_t {
    self,      ///< The optimizer steps on the parameter itself.
    master,    ///< It steps on a float32 copy that is kept.
    stand_in,  ///< It steps on a float32 copy that lives during the step.
  };
  std::string name;
  at::Tensor parameter;
  at::Tensor target;  ///< What the optimizer steps on; the parameter for Kind::self.
  Kind kind = Kind::self;
  bool frozen = false;  ///< It wanted no gradient when it was cast, so it has no master.
};

/// Gradients of one optimizer that are still scaled (delay_unscale).
struct StillScaled {
  std::size_t loss_id = 0;
  double scale = 1.0;
};

/// What is known of one optimizer.
struct OptimizerRecord {
  std::vector<at::Tensor> parameters = {};  ///< Tells another optimizer at a reused address.
  std::vector<Weight> weights = {};  ///< One a parameter; Kind::self for what is of no model.
  bool skip = false;                 ///< An overflow was found since its last step.
  bool open = false;                 ///< A ScaledLoss of it lives.
  std::optional<StillScaled> still_scaled = std::nullopt;
  /// Unscaled gradients set aside while scaled ones are made: parameter and gradient.
  std::vector<std::pair<at::Tensor, at::Tensor>> aside = {};
  scaler::SkipRate skips = {};

  void bring_back_aside();
  /// Drops scaled gradients, and takes back what was set aside.
  void drop_scaled();
};

/// What is known of one loss.
struct LossRecord {
  GradScaler scaler;
  /// Overflows of gradients that were unscaled but not judged (delay_overflow_check).
  std::vector<at::Tensor> found = {};
  /// Whose they are, one each.
  std::vector<std::shared_ptr<OptimizerRecord>> unjudged = {};

  void forget(const OptimizerRecord& record);
};

/// A gradient that the backward of a ScaledLoss wrote whose optimizers do not step on it: it is
/// scaled, or a sum of scaled and unscaled parts.
struct StrayGradient {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> gradient;
  std::size_t loss_id = 0;
};

struct Amp::Impl {
  LevelOptions options;
  Properties properties;
  std::vector<Weight> weights;
  std::unordered_map<const void*, std::size_t> by_parameter;  // TensorImpl -> index of weights
  std::unordered_map<const void*, std::size_t> by_target;
  std::vector<LossRecord> losses;
  std::unordered_map<const optim::Optimizer*, std::shared_ptr<OptimizerRecord>> records;
  /// Where the model is cast: what runs in its dtype, and the handler of internal/align.h.
  std::optional<OperatorLists> products;
  std::shared_ptr<plane::op::Handler> align;
  std::unordered_map<const void*, StrayGradient> strays;  // By parameter.
  RoundingStream rounding;
  std::exception_ptr thrown_at_end;  // By a ScaledLoss whose destructor ended it.

  c10::DeviceType device() const {
    return weights.empty() ? c10::DeviceType::CPU : weights.front().parameter.device().type();
  }
  void make_region();
  void add_model(torch::nn::Module& model, const std::string& prefix);
  void add_module(torch::nn::Module& module, const std::string& path);
  void add_parameter(const std::string& name, at::Tensor& parameter, bool cast);
  const Weight* find(const at::Tensor& parameter) const;
  const Weight& require(const std::string& name, const at::Tensor& parameter) const;

  std::shared_ptr<OptimizerRecord> record_of(const optim::Optimizer& optimizer);
  std::vector<Weight> weights_of(const optim::Optimizer& optimizer) const;
  void check_unfrozen(const Weight& weight) const;
  void check_no_stray(const Weight& weight);
  void warn_if_due(OptimizerRecord& record) const;
  void throw_pending();
  void report(const std::string& line) const {
    if (options.report) options.report(line);
  }

  /// True where a scaled loss is the loss, and nothing is to do at its end.
  bool is_plain() const;
  /// True where gradients are looked at.
  bool checks() const;
};

}  // namespace gradus::amp
