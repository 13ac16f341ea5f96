#include <algorithm>
#include <array>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <gradus/base/error.h>
#include <gradus/privacy/training/internal/dp_state.h>

namespace gradus::privacy {
namespace {

using internal::kComponent;

constexpr int kPieces = 8;

// A run id in 16-bit pieces, which any floating sum over ranks keeps.
at::Tensor run_pieces(const RunId& run) {
  at::Tensor pieces = at::empty({kPieces}, at::kDouble);
  auto* piece = pieces.mutable_data_ptr<double>();
  for (const std::uint64_t word : {run.high, run.low})
    for (int shift = 48; shift >= 0; shift -= 16)
      *piece++ = static_cast<double>((word >> shift) & 0xffffU);
  return pieces;
}

RunId run_of(const at::Tensor& pieces) {
  const auto* piece = pieces.const_data_ptr<double>();
  std::array<std::uint64_t, 2> words = {};
  for (std::uint64_t& word : words)
    for (int i = 0; i < kPieces / 2; ++i)
      word = (word << 16U) | static_cast<std::uint64_t>(*piece++);
  return {.high = words[0], .low = words[1]};
}

}  // namespace

// Parameters that nothing was accumulated for get noise like all others.
void DPOptimizer::State::complete_sums() {
  pending_.sums.resize(targets_.size());
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    const at::Tensor& parameter = table_.parameters()[i].tensor;
    at::Tensor& sum = pending_.sums[i];
    if (!parameter.requires_grad()) {
      sum = at::Tensor();
    } else if (!sum.defined()) {
      sum = at::zeros(parameter.sizes(), parameter.options().dtype(internal::sum_dtype(parameter)));
    }
  }
}

DPStep DPOptimizer::State::step(bool empty) {
  GRADUS_CHECK(kComponent, !empty || pending_.examples == 0,
               "step_empty() is for a batch without examples; ", pending_.examples,
               " were accumulated. Call step()");
  GRADUS_CHECK(
      kComponent, empty || pending_.examples > 0,
      "step() needs a logical batch; nothing was accumulated. The noise of an empty batch is "
      "added by step_empty()");
  check_targets();
  DPStep done{.step = steps_ + 1,
              .examples = pending_.examples,
              .clipped = pending_.clipped,
              .non_finite = pending_.non_finite};
  // A schedule that changed its mind since must not leave a gradient above its noise.
  done.max_norm = std::max(scale_thresholds(), pending_.sensitivity);
  done.noise_multiplier = scheduled_noise();
  // Fails before anything is counted or drawn.
  check_noise(clipper_.shares(done.noise_multiplier, options_.expected_batch_size).gradients *
              done.max_norm);
  const at::NoGradGuard no_grad;
  complete_sums();
  const at::Tensor norms =
      pending_.norms.empty() ? at::empty({0}, at::kDouble) : at::cat(pending_.norms);
  accountant_->add(options_.accounted ? options_.accounted(done.noise_multiplier)
                                      : GaussianSteps{.noise_multiplier = done.noise_multiplier,
                                                      .sample_rate = 1.0});
  // Counted is taken, also if the release fails: the next step has the next one's noise.
  ++steps_;
  try {
    release(done);
  } catch (...) {
    drop();
    throw;
  }
  drop();
  last_norms_ = norms;
  done.applied = options_.apply ? options_.apply() : optimizer_.step();
  return done;
}

// Adds noise once, whatever the number of ranks: rank 0's sums carry it.
void DPOptimizer::State::release(DPStep& done) {
  const auto shares = clipper_.shares(done.noise_multiplier, options_.expected_batch_size);
  done.noise_deviation = shares.gradients * done.max_norm;
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& sum : pending_.sums) {
    if (sum.defined()) tensors.push_back(sum);
  }
  at::Tensor unclipped = pending_.unclipped;
  if (options_.reduction.rank == 0) {
    noise_.add_gaussian_(tensors, done.noise_deviation);
    if (shares.count > 0.0) noise_.add_gaussian_(unclipped, shares.count);
  }
  if (options_.reduction.ranks > 1) {
    if (options_.clipping.policy == Clipping::adaptive) tensors.push_back(unclipped);
    const bool agree = !run_agreed_;
    const at::Tensor pieces =
        run_pieces(options_.reduction.rank == 0 ? accountant_->ledger().run() : RunId{});
    if (agree) tensors.push_back(pieces);
    options_.reduction.sum(tensors);
    // A state of one rank, loaded on another, is of the same run there.
    const RunId run = run_of(pieces);
    if (agree && run.known()) accountant_->rename_run(run);
    run_agreed_ = true;
  }
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    at::Tensor& sum = pending_.sums[i];
    // What the optimizer sees is from here, or nothing: not an old gradient of a frozen parameter.
    targets_[i].mutable_grad().reset();
    if (!sum.defined()) continue;
    sum.div_(options_.expected_batch_size);
    // Rounded to 16 bits once, after the noise: that is post-processing.
    targets_[i].mutable_grad() = sum.to(targets_[i].device(), targets_[i].scalar_type());
    sum = at::Tensor();
  }
  if (options_.clipping.policy == Clipping::adaptive)
    clipper_.adapt(unclipped.item<double>(), options_.expected_batch_size);
}

}  // namespace gradus::privacy
