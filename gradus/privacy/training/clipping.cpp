#include <gradus/privacy/training/clipping.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <gradus/base/error.h>
#include <gradus/privacy/training/internal/state_codec.h>

namespace gradus::privacy {
namespace {

using internal::kComponent;

void check_norm(const char* what, double value) {
  GRADUS_CHECK(kComponent, std::isfinite(value) && value > 0.0, what,
               " must be finite and > 0; got ", value);
}

void check(const ClippingOptions& options) {
  check_norm("max_norm", options.max_norm);
  for (const ClippedLayer& layer : options.layers)
    check_norm("max_norm of a layer", layer.max_norm);
  GRADUS_CHECK(kComponent, options.layers.empty() || options.policy == Clipping::per_layer,
               "layers must be empty unless the policy is per_layer; got ", options.layers.size(),
               " with ", name(options.policy));
  GRADUS_CHECK(kComponent, options.target_quantile >= 0.0 && options.target_quantile <= 1.0,
               "target_quantile must be in [0, 1]; got ", options.target_quantile);
  check_norm("adaptation_rate", options.adaptation_rate);
  if (options.count_noise) check_norm("count_noise", *options.count_noise);
  check_norm("least_norm", options.least_norm);
  check_norm("greatest_norm", options.greatest_norm);
  GRADUS_CHECK(kComponent, options.least_norm <= options.greatest_norm,
               "least_norm must not exceed greatest_norm; got ", options.least_norm, " and ",
               options.greatest_norm);
  check_norm("stability", options.stability);
}

bool names(const std::string& name, const std::string& parameter) {
  return parameter == name || (parameter.size() > name.size() && parameter.starts_with(name) &&
                               parameter[name.size()] == '.');
}

std::vector<std::size_t> group_parameters(const std::vector<ClippedLayer>& layers,
                                          const std::vector<std::string>& parameters) {
  std::vector<std::size_t> group_of(parameters.size(), layers.size());
  for (std::size_t l = 0; l < layers.size(); ++l) {
    for (const std::string& name : layers[l].names) {
      bool found = false;
      for (std::size_t p = 0; p < parameters.size(); ++p) {
        if (!names(name, parameters[p])) continue;
        GRADUS_CHECK(kComponent, group_of[p] == layers.size() || group_of[p] == l, "parameter '",
                     parameters[p], "' must be in one clipped layer; it is in layers ", group_of[p],
                     " and ", l);
        group_of[p] = l;
        found = true;
      }
      GRADUS_CHECK(kComponent, found, "clipped layer ", l, " names '", name,
                   "', which no parameter of the model has");
    }
  }
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    GRADUS_CHECK(kComponent, group_of[p] < layers.size(), "parameter '", parameters[p],
                 "' must be in a clipped layer; it is in none");
  }
  return group_of;
}

}  // namespace

const char* name(Clipping clipping) {
  switch (clipping) {
    case Clipping::flat:
      return "flat";
    case Clipping::per_layer:
      return "per-layer";
    case Clipping::adaptive:
      return "adaptive";
    case Clipping::automatic:
      return "automatic";
  }
  return "unknown";
}

Clipper::Clipper(ClippingOptions options, const std::vector<std::string>& parameters)
    : options_(std::move(options)) {
  check(options_);
  if (options_.policy != Clipping::per_layer) {
    thresholds_ = {options_.max_norm};
    group_of_.assign(parameters.size(), 0);
    return;
  }
  GRADUS_CHECK(kComponent, !parameters.empty(),
               "per-layer clipping must know the parameters' names; got none");
  if (options_.layers.empty()) {
    const auto layers = static_cast<double>(parameters.size());
    thresholds_.assign(parameters.size(), options_.max_norm / std::sqrt(layers));
    for (std::size_t p = 0; p < parameters.size(); ++p) group_of_.push_back(p);
    return;
  }
  for (const ClippedLayer& layer : options_.layers) thresholds_.push_back(layer.max_norm);
  group_of_ = group_parameters(options_.layers, parameters);
}

void Clipper::set_live(const std::vector<bool>& live) {
  if (options_.policy != Clipping::per_layer) return;
  GRADUS_CHECK(kComponent, live.size() == group_of_.size(), "there must be one flag for each of ",
               group_of_.size(), " parameters; got ", live.size());
  live_.assign(thresholds_.size(), false);
  for (std::size_t p = 0; p < live.size(); ++p)
    live_[group_of_[p]] = live_[group_of_[p]] || live[p];
  const auto layers = std::count(live_.begin(), live_.end(), true);
  if (layers == 0) live_.assign(thresholds_.size(), true);  // nothing is trained: any bound holds
  if (options_.layers.empty() && layers > 0) {
    thresholds_.assign(thresholds_.size(),
                       options_.max_norm / std::sqrt(static_cast<double>(layers)));
  }
}

std::size_t Clipper::group_of(std::size_t index) const { return group_of_.at(index); }

std::vector<double> Clipper::thresholds() const {
  std::vector<double> result;
  for (const double threshold : thresholds_) result.push_back(threshold * scale_);
  if (options_.policy == Clipping::adaptive) result[0] = options_.max_norm * scale_;
  return result;
}

double Clipper::sensitivity() const {
  const std::vector<double> bounds = thresholds();
  if (bounds.size() == 1) return bounds[0];  // exactly
  double squares = 0.0;
  for (std::size_t g = 0; g < bounds.size(); ++g) {
    if (live_.empty() || live_[g]) squares += bounds[g] * bounds[g];
  }
  return std::sqrt(squares);
}

ClipWeights Clipper::weights(const std::vector<at::Tensor>& norms) const {
  GRADUS_CHECK(kComponent, norms.size() == groups(), "there must be norms for each of ", groups(),
               " groups; got ", norms.size());
  const std::vector<double> bounds = thresholds();
  ClipWeights result;
  for (const at::Tensor& norm : norms) {
    const at::Tensor finite = norm.isfinite();
    result.finite = result.finite.defined() ? result.finite.logical_and(finite) : finite;
  }
  result.clipped = at::zeros_like(result.finite);
  for (std::size_t g = 0; g < norms.size(); ++g) {
    at::Tensor factor = options_.policy == Clipping::automatic
                            ? bounds[g] / (norms[g] + options_.stability)
                            : (bounds[g] / norms[g]).clamp_max(1.0);
    factor = at::where(result.finite, factor, at::zeros_like(factor));
    result.clipped = result.clipped.logical_or(
        (options_.policy == Clipping::automatic ? norms[g].gt(bounds[g]) : factor.lt(1.0))
            .logical_and(result.finite));
    result.groups.push_back(factor);
  }
  return result;
}

void Clipper::set_scale(double scale) {
  check_norm("the scale of clipping thresholds", scale);
  scale_ = scale;
}

Clipper::NoiseShares Clipper::shares(double noise_multiplier, double expected_batch_size) const {
  if (options_.policy != Clipping::adaptive || noise_multiplier == 0.0)
    return {.gradients = noise_multiplier, .count = 0.0};
  const double count =
      options_.count_noise.value_or(std::max(expected_batch_size / 20.0, noise_multiplier));
  GRADUS_CHECK(kComponent, 2.0 * count > noise_multiplier,
               "count_noise must be more than half the noise multiplier ", noise_multiplier,
               ", else the count alone costs more than the whole step may; got ", count);
  const double z = 1.0 / noise_multiplier, s = 1.0 / (2.0 * count);
  return {.gradients = 1.0 / std::sqrt((z - s) * (z + s)), .count = count};
}

at::Tensor Clipper::count(const ClipWeights& weights) const {
  const at::Tensor below = weights.finite.logical_and(weights.clipped.logical_not());
  return below.to(at::kDouble).sub(0.5).sum();
}

void Clipper::adapt(double noised_count, double expected_batch_size) {
  const double below = 0.5 + noised_count / expected_batch_size;
  const double moved =
      options_.max_norm * std::exp(-options_.adaptation_rate * (below - options_.target_quantile));
  options_.max_norm = std::clamp(moved, options_.least_norm, options_.greatest_norm);
}

void Clipper::set_adapted_norm(double norm) {
  check_norm("the adapted clipping norm", norm);
  options_.max_norm = norm;
  if (options_.policy != Clipping::per_layer) thresholds_ = {norm};
}

}  // namespace gradus::privacy
