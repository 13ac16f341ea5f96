#include <gradus/accumulate/window.h>

#include <cmath>
#include <numeric>
#include <unordered_set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/full_like.h>

#include <gradus/base/error.h>

namespace gradus::accumulate {
namespace {

bool positive(double value) { return std::isfinite(value) && value > 0.0; }

}  // namespace

GradientWindow::GradientWindow(std::vector<at::Tensor> parameters, const WindowOptions& options)
    : options_(options) {
  std::unordered_set<const void*> seen;
  for (auto& parameter : parameters) {
    GRADUS_CHECK("window", parameter.defined(), "parameters must be defined tensors");
    // A tied weight listed twice must not be divided twice.
    if (seen.insert(parameter.unsafeGetTensorImpl()).second)
      parameters_.push_back(std::move(parameter));
  }
  GRADUS_CHECK("window", !parameters_.empty(), "there must be at least one parameter; got none");
  GRADUS_CHECK("window", options.micro_batches >= 1, "micro_batches must be >= 1; got ",
               options.micro_batches);
  if (options.total_weight) {
    GRADUS_CHECK("window", options.normalisation == Normalisation::tokens,
                 "total_weight has a meaning with Normalisation::tokens only");
    GRADUS_CHECK("window", positive(*options.total_weight),
                 "total_weight must be finite and > 0; got ", *options.total_weight);
  }
  start_next();
}

void GradientWindow::check_ready(const at::Tensor& loss, double weight) const {
  GRADUS_CHECK("window", !broken_,
               "the window must be reset() after a backward that threw: its gradients are "
               "incomplete");
  GRADUS_CHECK("window", !full(),
               "the window must be finished before another micro-batch; it holds ", count(), " of ",
               options_.micro_batches);
  GRADUS_CHECK("window", positive(weight), "weight must be finite and > 0; got ", weight,
               ". Skip a micro-batch without tokens");
  GRADUS_CHECK("window", loss.defined(), "loss must be a defined tensor");
  GRADUS_CHECK("window", loss.dim() == 0, "loss must be a scalar; got shape ", loss.sizes(),
               ". Take its mean over the micro-batch");
  GRADUS_CHECK("window", at::isFloatingType(loss.scalar_type()),
               "loss must have a real floating dtype; got ", loss.scalar_type());
  GRADUS_CHECK("window", loss.requires_grad(),
               "loss must require a gradient: nothing that does led to it, or it was "
               "computed under NoGradGuard");
  if (!empty()) return;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    GRADUS_CHECK(
        "window", !parameters_[i].grad().defined(),
        "gradients must be cleared before a window begins; "
        "parameter ",
        i, " of shape ", parameters_[i].sizes(),
        " still has one, which would be divided as if it were the window's. Call zero_grad(true)");
  }
}

double GradientWindow::seed_for(double weight) const {
  switch (options_.normalisation) {
    case Normalisation::mean:
      return 1.0 / static_cast<double>(options_.micro_batches);
    case Normalisation::tokens:
      return expected_weight_ ? weight / *expected_weight_ : weight;
    case Normalisation::sum:
      break;
  }
  return 1.0;
}

// What the gradients must still be multiplied by once all losses are in.
double GradientWindow::remaining_factor() const {
  switch (options_.normalisation) {
    case Normalisation::mean:
      return static_cast<double>(options_.micro_batches) / static_cast<double>(count());
    case Normalisation::tokens: {
      const double weight = std::accumulate(weights_.begin(), weights_.end(), 0.0);
      if (!expected_weight_) return 1.0 / weight;
      // Weights are counts in practice; the allowance is for sums of fractions.
      const double factor = *expected_weight_ / weight;
      return std::abs(factor - 1.0) <= 1e-12 ? 1.0 : factor;
    }
    case Normalisation::sum:
      break;
  }
  return 1.0;
}

void GradientWindow::backward(const at::Tensor& loss, double weight) {
  check_ready(loss, weight);
  at::Tensor seed, value;
  {
    const at::NoGradGuard no_grad;
    // As backward's seed the factor costs one scalar; multiplying the loss would add a node to the
    // graph.
    seed = at::full_like(loss, seed_for(weight));
    value = loss.detach().clone();
  }
  broken_ = true;
  loss.backward(seed);
  broken_ = false;
  losses_.push_back(std::move(value));
  weights_.push_back(weight);
}

WindowResult GradientWindow::finish() {
  GRADUS_CHECK("window", !broken_,
               "the window must be reset() after a backward that threw: its gradients are "
               "incomplete");
  GRADUS_CHECK("window", !empty(),
               "the window must hold a micro-batch to be finished; it is empty");
  const at::NoGradGuard no_grad;
  WindowResult result{.micro_batches = count(), .weight = 0.0, .loss = 0.0};
  const bool tokens = options_.normalisation == Normalisation::tokens;
  for (std::size_t i = 0; i < losses_.size(); ++i) {
    result.weight += weights_[i];
    result.loss += losses_[i].item<double>() * (tokens ? weights_[i] : 1.0);
  }
  if (tokens) result.loss /= result.weight;
  if (options_.normalisation == Normalisation::mean)
    result.loss /= static_cast<double>(result.micro_batches);

  const double factor = remaining_factor();
  if (factor != 1.0) {
    std::vector<at::Tensor> dense;
    for (const auto& parameter : parameters_) {
      auto gradient = parameter.grad();
      if (!gradient.defined()) continue;
      if (gradient.layout() == at::kStrided) {
        dense.push_back(gradient);
      } else {
        gradient.mul_(factor);
      }
    }
    if (!dense.empty()) at::_foreach_mul_(dense, at::Scalar(factor));
  }
  start_next();
  return result;
}

void GradientWindow::expect_total_weight(double weight) {
  GRADUS_CHECK("window", empty() && !broken_,
               "the total weight must be stated before the window's first micro-batch; "
               "it holds ",
               count());
  GRADUS_CHECK("window", options_.normalisation == Normalisation::tokens,
               "a total weight has a meaning with Normalisation::tokens only");
  GRADUS_CHECK("window", positive(weight), "the total weight must be finite and > 0; got ", weight);
  expected_weight_ = weight;
}

void GradientWindow::reset() {
  for (const auto& parameter : parameters_) parameter.mutable_grad().reset();
  start_next();
}

void GradientWindow::start_next() {
  losses_.clear();
  weights_.clear();
  broken_ = false;
  expected_weight_ = options_.total_weight;
}

}  // namespace gradus::accumulate
