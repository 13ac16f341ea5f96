#include <gradus/privacy/training/internal/dp_state.h>

#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>

#include <gradus/base/error.h>

namespace gradus::privacy {

using internal::kComponent;

// Each parameter's group and that group's norm, as given: [P, 2]; none without explicit layers.
at::Tensor DPOptimizer::State::layers_entry() const {
  const std::vector<ClippedLayer>& layers = options_.clipping.layers;
  const auto n = static_cast<std::int64_t>(layers.empty() ? 0 : targets_.size());
  at::Tensor entry = at::empty({n, 2}, at::kDouble);
  auto* value = entry.mutable_data_ptr<double>();
  for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
    const std::size_t group = clipper_.group_of(i);
    *value++ = static_cast<double>(group);
    *value++ = layers[group].max_norm;
  }
  return entry;
}

void DPOptimizer::State::save(internal::StateWriter& write) const {
  GRADUS_CHECK(kComponent, pending_.examples == 0, "a state must be taken between logical steps; ",
               pending_.examples, " examples are accumulated. Call step() or zero_grad() first");
  write.number("noise_multiplier", options_.noise_multiplier);
  write.number("expected_batch_size", options_.expected_batch_size);
  write.number("clipping", static_cast<double>(options_.clipping.policy));
  write.number("max_norm", options_.clipping.max_norm);
  const ClippingOptions& clipping = options_.clipping;
  write.number("clipping.target_quantile", clipping.target_quantile);
  write.number("clipping.adaptation_rate", clipping.adaptation_rate);
  write.number("clipping.count_noise", clipping.count_noise.value_or(0.0));
  write.number("clipping.least_norm", clipping.least_norm);
  write.number("clipping.greatest_norm", clipping.greatest_norm);
  write.number("clipping.stability", clipping.stability);
  write.tensor("clipping.layers", layers_entry());
  write.count("logical_steps", steps_);
  write.number("adapted_norm", clipper_.adapted_norm());
  write.noise("noise", noise_);
  write.releases(accountant_->ledger().records());
  for (const optim::NamedState& entry : optimizer_.state())
    write.tensor("optimizer." + entry.name, entry.tensor);
}

void DPOptimizer::State::load(internal::StateReader& read) {
  read.expect("noise_multiplier", options_.noise_multiplier, "noise multiplier");
  read.expect("expected_batch_size", options_.expected_batch_size, "expected batch size");
  read.expect("clipping", static_cast<double>(options_.clipping.policy),
              "clipping (0 flat, 1 per layer, 2 adaptive, 3 automatic)");
  read.expect("max_norm", options_.clipping.max_norm, "clipping norm");
  const ClippingOptions& clipping = options_.clipping;
  read.expect("clipping.target_quantile", clipping.target_quantile, "target_quantile of clipping");
  read.expect("clipping.adaptation_rate", clipping.adaptation_rate, "adaptation_rate of clipping");
  read.expect("clipping.count_noise", clipping.count_noise.value_or(0.0),
              "count_noise of clipping (0 unset)");
  read.expect("clipping.least_norm", clipping.least_norm, "least_norm of clipping");
  read.expect("clipping.greatest_norm", clipping.greatest_norm, "greatest_norm of clipping");
  read.expect("clipping.stability", clipping.stability, "stability of clipping");
  const at::Tensor layers = layers_entry();
  GRADUS_CHECK(kComponent,
               read.tensor("clipping.layers", at::kDouble, layers.sizes()).equal(layers),
               "the clipped layers of the state must be those of this run, with their norms; they "
               "are others");
  const std::int64_t steps = read.count("logical_steps");
  GRADUS_CHECK(kComponent, steps >= 0, "state 'logical_steps' must be >= 0; got ", steps);
  const double norm = read.number("adapted_norm");
  const bool adaptive = clipping.policy == Clipping::adaptive;
  GRADUS_CHECK(kComponent,
               norm == clipping.max_norm ||
                   (adaptive && norm >= clipping.least_norm && norm <= clipping.greatest_norm),
               "state 'adapted_norm' must be ", clipping.max_norm,
               adaptive ? " or from least_norm to greatest_norm" : "", "; got ", norm);
  const auto noise = read.noise("noise", noise_.is_secure());
  const std::vector<Releases> releases = read.releases();
  Ledger(accountant_->ledger()).merge(releases);  // refuses before anything is changed
  std::vector<optim::NamedState> optimizer;
  for (auto& [name, tensor] : read.under("optimizer.")) {
    GRADUS_CHECK(kComponent,
                 !at::isFloatingType(tensor.scalar_type()) || tensor.element_size() < 2 ||
                     tensor.isfinite().all().item<bool>(),
                 "state 'optimizer.", name, "' must be finite; it holds NaN or infinity");
    optimizer.push_back({name, tensor});
  }
  read.finish();
  Clipper clipper = clipper_;
  clipper.set_adapted_norm(norm);
  optimizer_.load_state(optimizer);
  clipper_ = std::move(clipper);
  accountant_->merge(releases);
  if (noise) noise_.load(*noise);
  steps_ = steps;
  watch_buffers();
  zero_grad();
}

}  // namespace gradus::privacy
