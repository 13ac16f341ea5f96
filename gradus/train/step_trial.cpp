#include <gradus/train/step_trial.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>

#include <gradus/base/memory_tracker.h>
#include <gradus/base/rng.h>
#include <gradus/optim/clip.h>
#include <gradus/plan/budget_compression.h>
#include <gradus/plane/op/op_plane.h>
#include <gradus/recompute/memory_budget.h>
#include <gradus/train/language_model.h>

namespace gradus::train {
namespace {

// Notes the peak of each moment of a pass, counted as a StepTrace counts them: operator calls from
// the first whose result needs a gradient. Copies that a budget makes to run an in-place operator
// again are no calls of the program; like what is run again itself, they count to the next one.
class MomentPeaks final : public plane::op::Handler {
 public:
  void call(plane::op::Call& call) override {
    const bool counts = call.frame() == plane::op::Frame::autograd;
    call.proceed();
    if (!counts || makes_raw_bytes(call)) return;
    begun_ = begun_ || std::ranges::any_of(call.results(), [](const c10::IValue& result) {
               return result.isTensor() && result.toTensor().defined() &&
                      result.toTensor().requires_grad();
             });
    if (begun_) bytes_.push_back(tracker_.peak().total());
    tracker_.reset_peak();
  }
  std::vector<std::int64_t> take() {
    begun_ = false;
    return std::exchange(bytes_, {});
  }

 private:
  // Storages are copied as bytes, which no model computes with.
  static bool makes_raw_bytes(const plane::op::Call& call) {
    return !call.results().empty() &&
           std::ranges::all_of(call.results(), [](const c10::IValue& result) {
             return result.isTensor() && result.toTensor().defined() &&
                    result.toTensor().scalar_type() == at::kByte && result.toTensor().dim() == 1;
           });
  }
  base::MemoryTracker& tracker_ = base::MemoryTracker::install();
  bool begun_ = false;
  std::vector<std::int64_t> bytes_;
};

// A budget tells of a pass as the next one begins: this is one.
void begin_another_pass() {
  const at::AutoGradMode grad(true);
  at::zeros({1}).requires_grad_().tanh().backward();
}

// Leaves out what follows the backward pass: the next batch is fetched, which is not of the pass.
void end_with_backward(recompute::StepTrace& trace) {
  while (!trace.moments.empty() && !trace.moments.back().backward) trace.moments.pop_back();
  const std::int64_t last = static_cast<std::int64_t>(trace.moments.size()) - 1;
  for (recompute::TracedCall& call : trace.calls) {
    call.held_until = std::min(call.held_until, last);
    call.released_after = std::min(call.released_after, last);
  }
}

}  // namespace

StepTrials::StepTrials(models::Gpt gpt, amp::Amp& amp, data::Batch batch,
                       std::unique_ptr<optim::Optimizer> probe, StepTrialOptions options)
    : gpt_(std::move(gpt)),
      amp_(amp),
      amp_state_(amp.state()),
      batch_(std::move(batch)),
      probe_(std::move(probe)),
      options_(std::move(options)) {
  const base::ArenaScope host(base::Arena::host);
  for (const at::Tensor& weight : written()) weights_.push_back(weight.detach().clone());
  if (!options_.privacy) return;
  // Nothing is released: any noise and any divisor will do, as what they cost is the same.
  privacy::DPOptimizerOptions dp{
      .noise_multiplier = 1.0,
      .expected_batch_size = static_cast<double>(batch_.size()),
      .clipping = options_.privacy->clipping,
      .seed = options_.privacy->seed,
      .sample = options_.privacy->sample,
      .apply = [this] { return optim::StepResult{.skipped = !amp_.step(*probe_)}; }};
  if (amp_.properties().casts_to_half()) dp.targets = amp_.parameters(*gpt_);
  private_ = std::make_unique<privacy::DPOptimizer>(
      *probe_, gpt_.ptr(), std::make_shared<privacy::Accountant>(), std::move(dp));
}

// What an optimizer step writes: the model's weights, and their masters where there are some.
std::vector<at::Tensor> StepTrials::written() const {
  std::vector<at::Tensor> result = gpt_->parameters();
  // What an optimizer steps on there exists during the step only.
  if (amp_.properties().stochastic_rounding) return result;
  for (const at::Tensor& weight : amp_.parameters(*gpt_)) {
    if (std::ranges::none_of(result,
                             [&](const at::Tensor& known) { return known.is_same(weight); }))
      result.push_back(weight);
  }
  return result;
}

StepTrials::~StepTrials() {
  if (private_) private_->zero_grad();
  amp_.zero_grad(*probe_);
  amp_.load_state(amp_state_);
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> weights = written();
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i].copy_(weights_[i]);
}

void StepTrials::micro_batch(accumulate::GradientWindow& window, std::int64_t size) {
  const at::Device device = gpt_->parameters().front().device();
  const auto take = [&](const at::Tensor& all) {
    const base::MemoryCategoryScope inputs(base::MemoryCategory::inputs);
    if (size <= all.size(0)) return all.narrow(0, 0, size).to(device);
    return all.repeat({(size + all.size(0) - 1) / all.size(0), 1}).narrow(0, 0, size).to(device);
  };
  const at::Tensor inputs = take(batch_.inputs), targets = take(batch_.targets);
  if (private_) {
    private_->accumulate(
        [this](const persample::Batch& rows) {
          const amp::Region region = amp_.region();
          return language_model_losses(*gpt_, rows[0], rows[1], /*recomputed=*/0);
        },
        {inputs, targets});
    return;
  }
  // Never judged: a trial moves no loss scale.
  language_model_backward(*gpt_, amp_, *probe_, window, inputs, targets, /*recomputed=*/0,
                          /*judge=*/false);
}

// Drops the gradients of the step that was begun.
void StepTrials::reset(accumulate::GradientWindow& window) {
  if (private_) private_->zero_grad();
  window.reset();
}

void StepTrials::optimizer_step() {
  if (private_) {
    const base::MemoryCategoryScope state(base::MemoryCategory::optimizer_state);
    private_->step();
    optim::gradient_norm(amp_.master_params(*probe_));
    return;
  }
  optim::gradient_norm(amp_.master_params(*probe_));
  const base::MemoryCategoryScope state(base::MemoryCategory::optimizer_state);
  amp_.step(*probe_);
}

// The optimizer's state is made, kernels are compiled and caches filled at first use: not part of a
// step. Nor is the look at a program that per-sample gradients begin with, on the first batch which
// is larger than one.
void StepTrials::warm_up(accumulate::GradientWindow& window, const TrialRequest& request,
                         std::int64_t limit_bytes) {
  const std::int64_t size = private_ ? std::min<std::int64_t>(request.size, 3) : 1;
  if (warmed_up_ >= size) return;
  {
    std::optional<plan::BudgetCompression> compression;
    if (options_.compression) compression.emplace(*options_.compression);
    const recompute::MemoryBudget budget({.limit_bytes = limit_bytes,
                                          .encoder = compression ? compression->encoder() : nullptr,
                                          .encode_unplanned = request.encode});
    micro_batch(window, size);
  }
  optimizer_step();
  reset(window);
  warmed_up_ = size;
}

// The passes of a step, each run again without being watched for its time: two times, since other
// programs on the machine make a trial slower, never faster.
Trial StepTrials::passes(accumulate::GradientWindow& window, const TrialRequest& request,
                         std::int64_t limit_bytes) {
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  std::optional<plan::BudgetCompression> compression;
  std::optional<recompute::MemoryBudget> budget;
  if (request.budget) {
    if (options_.compression) compression.emplace(*options_.compression);
    budget.emplace(
        recompute::MemoryBudgetOptions{.limit_bytes = limit_bytes,
                                       .stash = options_.stash,
                                       .encoder = compression ? compression->encoder() : nullptr,
                                       .encode_unplanned = request.encode});
  }
  const auto begin = [&](bool later) {
    if (!later) reset(window);
    if (budget) {
      budget->set_plan(request.plans == nullptr ? nullptr
                                                : request.plans->find(request.size, later));
    }
    tracker.reset_peak();
  };
  Trial trial;
  if (request.accumulating) trial.later.emplace();
  const std::vector<MeasuredPass*> passes =
      trial.later ? std::vector<MeasuredPass*>{&trial.first, &*trial.later}
                  : std::vector<MeasuredPass*>{&trial.first};

  // Watched: traced under a budget, and moment by moment if asked for.
  std::vector<recompute::StepTrace> traces;
  std::vector<std::vector<plan::CompressedResult>> compressed;
  std::vector<std::int64_t> strayed{0};
  const auto begin_probing = [&] {
    if (compression) compression->begin_pass(options_.probing_s);
  };
  if (budget) {
    begin_probing();
    budget->trace(
        [&](const recompute::StepTrace& trace) {
          traces.push_back(trace);
          compressed.push_back(compression ? compression->results(trace)
                                           : std::vector<plan::CompressedResult>());
          strayed.push_back(budget->statistics().strayed_passes);
          begin_probing();
        },
        [&](const plane::saved::Value& value, std::int64_t call) {
          if (compression) compression->saved(value, call);
        });
  }
  const auto peaks = std::make_shared<MomentPeaks>();
  for (MeasuredPass* pass : passes) {
    begin(pass != &trial.first);
    std::optional<plane::op::Guard> watch;
    if (request.moments) watch.emplace(plane::op::push(plane::op::Order::profile, peaks));
    micro_batch(window, request.size);
    pass->moment_bytes = peaks->take();
    pass->peak_bytes = tracker.peak().total();
    for (const std::int64_t bytes : pass->moment_bytes)
      pass->peak_bytes = std::max(pass->peak_bytes, bytes);
  }
  if (budget) {
    begin_another_pass();
    budget->trace(nullptr);
  }

  for (MeasuredPass* pass : passes) {
    for (int i = 0; i < 2; ++i) {
      begin(pass != &trial.first);
      const double start = options_.clock();
      micro_batch(window, request.size);
      const double seconds = options_.clock() - start;
      pass->seconds = i == 0 ? seconds : std::min(pass->seconds, seconds);
      pass->peak_bytes = std::max(pass->peak_bytes, tracker.peak().total());
    }
  }
  for (std::size_t i = 0; budget && i < passes.size(); ++i) {
    MeasuredPass& pass = *passes[i];
    pass.trace = std::move(traces.at(i));
    pass.compressed = std::move(compressed.at(i));
    end_with_backward(pass.trace);
    // Watching is not of the pass either.
    pass.trace.seconds =
        std::min(pass.trace.seconds, std::max(0.0, pass.seconds - pass.trace.replay_seconds));
    pass.trace.recording_seconds = std::min(pass.trace.recording_seconds, pass.trace.seconds);
    pass.strayed = strayed[i + 1] > strayed[i];
    // Behind the pass the program fetches the next batch.
    if (pass.moment_bytes.size() > pass.trace.moments.size())
      pass.moment_bytes.resize(pass.trace.moments.size());
  }
  return trial;
}

std::optional<Trial> StepTrials::run(const TrialRequest& request) {
  base::MemoryTracker& tracker = base::MemoryTracker::install();
  const std::int64_t limit_bytes = request.limit_bytes.value_or(options_.limit_bytes);
  const base::MemoryLimit limit({.device_bytes = limit_bytes});
  const base::RngGuard rng;
  try {
    accumulate::GradientWindow window(
        amp_.parameters(*gpt_),
        {.micro_batches = 4, .normalisation = accumulate::Normalisation::tokens});
    warm_up(window, request, limit_bytes);
    Trial trial = passes(window, request, limit_bytes);
    if (!private_) window.finish();
    tracker.reset_peak();
    const double start = options_.clock();
    optimizer_step();
    trial.optimizer_seconds = options_.clock() - start;
    trial.optimizer_peak_bytes = tracker.peak().total();
    amp_.zero_grad(*probe_);
    return trial;
  } catch (const MemoryLimitError&) {
    if (private_) private_->zero_grad();
    amp_.zero_grad(*probe_);
    return std::nullopt;
  }
}

}  // namespace gradus::train
