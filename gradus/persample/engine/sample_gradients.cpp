#include <gradus/persample/engine/sample_gradients.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/api/include/torch/nn/module.h>

#include <gradus/accumulate/batch_norm.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/base/rng.h>
#include <gradus/persample/engine/internal/fixed_randomness.h>
#include <gradus/persample/graph/analysis.h>
#include <gradus/persample/graph/term.h>
#include <gradus/persample/vmap/loop.h>
#include <gradus/persample/vmap/vmap.h>

namespace gradus::persample {

namespace {

// A parameter whose gradient is this small beside the whole gradient is compared with that:
// rounding is all there is of it (the bias of attention's keys).
constexpr double kNegligible = 1e-2;
// Losses of examples that nothing changed may differ by this, relatively, by another order of sums.
constexpr double kUnchanged = 1e-5;
constexpr std::size_t kChangedExamples = 2;
// Examples that vmap takes at once where memory is not tracked.
constexpr std::int64_t kUntrackedChunk = 32;

std::string join_names(const std::set<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

double norm_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
  return values.to(at::kDouble).norm().item<double>();
}

at::Tensor one_hot(std::int64_t example, std::int64_t examples) {
  at::Tensor weights = at::zeros({examples}, at::kDouble);
  weights[example] = 1;
  return weights;
}

}  // namespace

std::vector<NamedParameter> parameters_of(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  std::set<const void*> seen;
  for (const auto& each : module.named_parameters()) {
    if (!each.value().defined() || !seen.insert(each.value().unsafeGetTensorImpl()).second)
      continue;
    parameters.push_back({each.key(), each.value()});
  }
  return parameters;
}

class SampleGradients::State {
 public:
  State(std::vector<NamedParameter> parameters, std::shared_ptr<torch::nn::Module> module,
        SampleOptions options)
      : options_(std::move(options)),
        module_(std::move(module)),
        graph_(std::move(parameters), options_.graph),
        formed_(graph_.parameters().size()) {}

  at::Tensor backward(const LossFunction& loss, const Batch& batch);
  void backward(const at::Tensor& losses) {
    check_module();
    check_examples(losses.dim() == 1 ? losses.size(0) : 0);
    graph_.set_skipped({});
    graph_.set_examples_checked(options_.graph.examples_checked);
    graph_.backward(losses);
  }

  std::int64_t examples() const { return std::max(examples_, graph_.examples()); }
  const std::vector<NamedParameter>& parameters() const { return graph_.parameters(); }
  void clear() {
    graph_.clear();
    std::fill(formed_.begin(), formed_.end(), at::Tensor());
    examples_ = 0;
  }

  at::Tensor gradients(std::size_t index, bool sparse) const {
    if (!formed_.at(index).defined()) return graph_.gradients(index, sparse);
    const at::Tensor formed = widened(formed_[index]);
    return has_graph(index) ? formed + graph_.gradients(index) : formed;
  }
  at::Tensor norms(std::size_t index) const {
    if (!formed_.at(index).defined()) return graph_.norms(index);
    return FormedTerm(gradients(index, false)).squared_norms().to(at::kDouble).sqrt();
  }
  at::Tensor weighted_sum(std::size_t index, const at::Tensor& weights) const {
    if (!formed_.at(index).defined()) return graph_.weighted_sum(index, weights);
    return FormedTerm(gradients(index, false)).weighted_sum(weights);
  }
  std::vector<std::string> explain() const {
    std::vector<std::string> lines = graph_.explain();
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (formed_[i].defined()) lines[i] = parameters()[i].name + ": by vmap or the loop";
    }
    return lines;
  }
  void forget(std::size_t index) {
    graph_.forget(index);
    formed_.at(index) = at::Tensor();
  }
  bool wanted(std::size_t index) const { return parameters().at(index).tensor.requires_grad(); }

 private:
  // How each parameter of one program is computed.
  struct Verdict {
    std::vector<Engine> engines{};
    bool proved = true;  // by numbers: else the next batch is examined too
  };

  void log(const std::string& line) const {
    if (options_.log) options_.log("[persample] " + line);
  }
  bool has_graph(std::size_t index) const { return graph_.examples() > 0 && graph_.uses(index); }
  void check_module() const;
  void check_examples(std::int64_t examples) const {
    GRADUS_CHECK("persample", this->examples() == 0 || this->examples() == examples,
                 "a batch of the same ", this->examples(),
                 " examples as in the earlier backward() call is required; got ", examples,
                 ": call clear() between batches");
  }
  const Verdict& examine(const LossFunction& loss, const Batch& batch, std::uint64_t structure);
  // False if nothing could be told.
  bool check_mixing(const LossFunction& loss, const Batch& batch,
                    const std::function<std::string()>& where) const;
  std::vector<std::size_t> mismatches(const std::vector<std::vector<at::Tensor>>& got,
                                      const std::vector<at::Tensor>& want,
                                      const std::vector<std::size_t>& of) const;
  std::vector<at::Tensor> by(Engine engine, const std::vector<NamedParameter>& parameters,
                             const LossFunction& loss, const Batch& batch) const;
  void add_formed(Engine engine, const Verdict& verdict, const LossFunction& loss,
                  const Batch& batch);
  std::vector<std::int64_t> checked(const at::Tensor& losses) const;
  double tolerance(const at::Tensor& parameter) const {
    const at::ScalarType type = c10::toRealValueType(parameter.scalar_type());
    if (type == at::kDouble) return options_.tolerance_float64;
    return type == at::kFloat ? options_.tolerance_float32 : options_.tolerance_16bit;
  }

  SampleOptions options_;
  std::shared_ptr<torch::nn::Module> module_;
  GraphGradients graph_;
  std::vector<at::Tensor> formed_;  // of vmap and the loop, [B, *shape]
  std::int64_t examples_ = 0;
  std::map<std::uint64_t, Verdict> verdicts_;
};

void SampleGradients::State::check_module() const {
  if (module_ == nullptr) return;
  for (const accumulate::BatchNormLayer& layer : accumulate::batch_norm_layers(*module_)) {
    GRADUS_CHECK("persample", !layer.uses_batch_statistics,
                 "a model whose examples do not mix is required; got ", layer.type, " \"",
                 layer.name,
                 "\" in training, which normalises over the batch (frozen or not): call eval() on "
                 "it, or replace it by GroupNorm");
  }
}

// Examples to compare with the loop, spread over those whose loss is a number.
std::vector<std::int64_t> SampleGradients::State::checked(const at::Tensor& losses) const {
  std::vector<std::int64_t> finite;
  for (std::int64_t i = 0; i < losses.size(0); ++i) {
    if (std::isfinite(losses[i].item<double>())) finite.push_back(i);
  }
  std::vector<std::int64_t> indices;
  const auto last = static_cast<std::int64_t>(finite.size()) - 1;
  const std::int64_t count = std::min(options_.checked_examples, last + 1);
  for (std::int64_t i = 0; i < count; ++i) {
    indices.push_back(finite[static_cast<std::size_t>(count == 1 ? 0 : i * last / (count - 1))]);
  }
  return indices;
}

at::Tensor SampleGradients::State::backward(const LossFunction& loss, const Batch& batch) {
  check_module();
  const std::int64_t examples = count_examples(batch);
  check_examples(examples);
  at::AutoGradMode grad(true);
  const auto losses_of = [&] {
    at::Tensor losses = loss(batch);
    if (losses.dim() == 0 && examples == 1) losses = losses.unsqueeze(0);
    GRADUS_CHECK(
        "persample", losses.dim() == 1 && losses.size(0) == examples && losses.is_floating_point(),
        "a loss function that gives one loss an example, shape [", examples, "], is required; got ",
        base::describe_tensor(losses),
        ": reduce over all but dimension 0 (cross_entropy with reduction=none, then a mean "
        "over each example's own elements)");
    return losses;
  };
  if (options_.engine == Engine::vmap || options_.engine == Engine::loop) {
    Verdict all{.engines = std::vector<Engine>(parameters().size(), options_.engine)};
    add_formed(options_.engine, all, loss, batch);
    examples_ = examples;
    const at::NoGradGuard no_grad;
    return losses_of().detach();
  }
  const base::RngState before = base::RngState::capture();
  at::Tensor losses = losses_of();
  if (examples == 1) {  // its gradient is the gradient
    const at::Tensor result = losses.detach();
    graph_.set_skipped({});
    graph_.backward(losses);
    examples_ = examples;
    return result;
  }
  const auto structure_now = [&] {
    std::vector<at::Tensor> tensors;
    for (const NamedParameter& parameter : parameters()) tensors.push_back(parameter.tensor);
    return structure_of(read_graph(losses, tensors));
  };
  const std::uint64_t structure = structure_now();
  auto known = verdicts_.find(structure);
  if (known == verdicts_.end()) {
    losses = at::Tensor();  // two graphs at once might not fit
    examine(loss, batch, structure);
    known = verdicts_.find(structure);
    before.restore();
    losses = losses_of();
  }
  const Verdict& verdict = known->second;
  const at::Tensor result = losses.detach();
  const bool any_graph =
      std::count(verdict.engines.begin(), verdict.engines.end(), Engine::graph) > 0;
  if (any_graph) {
    std::vector<bool> skipped;
    for (const Engine engine : verdict.engines) skipped.push_back(engine != Engine::graph);
    graph_.set_skipped(std::move(skipped));
    graph_.set_examples_checked(options_.check_mixing || options_.graph.examples_checked);
    graph_.backward(losses);
  }
  losses = at::Tensor();
  for (const Engine engine : {Engine::vmap, Engine::loop}) {
    add_formed(engine, verdict, loss, batch);
  }
  if (!verdict.proved) verdicts_.erase(known);
  examples_ = examples;
  return result;
}

std::vector<at::Tensor> SampleGradients::State::by(Engine engine,
                                                   const std::vector<NamedParameter>& parameters,
                                                   const LossFunction& loss,
                                                   const Batch& batch) const {
  if (engine == Engine::loop) return loop_gradients(parameters, loss, batch);
  // Sizing passes by measured bytes would start the memory tracker in a program that has none.
  if (base::MemoryTracker::installed() == nullptr) {
    return vmap_gradients(parameters, loss, batch, {.chunk = kUntrackedChunk});
  }
  return vmap_gradients(parameters, loss, batch, {.memory_bytes = options_.vmap_bytes});
}

void SampleGradients::State::add_formed(Engine engine, const Verdict& verdict,
                                        const LossFunction& loss, const Batch& batch) {
  std::vector<NamedParameter> of;
  std::vector<std::size_t> place;
  for (std::size_t i = 0; i < verdict.engines.size(); ++i) {
    if (verdict.engines[i] != engine || !wanted(i)) continue;
    of.push_back(parameters()[i]);
    place.push_back(i);
  }
  if (of.empty()) return;
  const std::vector<at::Tensor> gradients = by(engine, of, loss, batch);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < of.size(); ++i) {
    at::Tensor& sum = formed_[place[i]];
    sum = sum.defined() ? sum + gradients[i] : gradients[i];
  }
}

// Parameters of @p of whose rows got[example][parameter] differ from want[parameter][example].
std::vector<std::size_t> SampleGradients::State::mismatches(
    const std::vector<std::vector<at::Tensor>>& got, const std::vector<at::Tensor>& want,
    const std::vector<std::size_t>& of) const {
  std::vector<std::size_t> wrong;
  for (std::size_t example = 0; example < got.size(); ++example) {
    double total = 0;
    for (const at::Tensor& each : want) {
      if (!each.defined()) continue;
      const double norm = norm_of(each[static_cast<std::int64_t>(example)]);
      total += norm * norm;
    }
    for (const std::size_t i : of) {
      if (!want[i].defined()) continue;
      const at::Tensor expected = want[i][static_cast<std::int64_t>(example)];
      const double scale = norm_of(expected) + kNegligible * std::sqrt(total);
      const double error = norm_of(got[example][i] - expected);
      const bool equal = error <= tolerance(parameters()[i].tensor) * scale;  // false for NaN
      if (!equal && std::find(wrong.begin(), wrong.end(), i) == wrong.end()) wrong.push_back(i);
    }
  }
  return wrong;
}

bool SampleGradients::State::check_mixing(const LossFunction& loss, const Batch& batch,
                                          const std::function<std::string()>& where) const {
  const at::Tensor losses = loss(batch).detach();
  const auto examples = static_cast<std::size_t>(losses.size(0));
  bool proved = true;
  for (std::size_t changed = 0; changed < std::min(kChangedExamples, examples); ++changed) {
    // Another example's values are ones that the model takes.
    const auto at = static_cast<std::int64_t>(changed);
    Batch other;
    for (const at::Tensor& tensor : batch) other.push_back(tensor.detach().clone());
    bool differs = false;
    for (std::int64_t from = losses.size(0) - 1; from >= 0 && !differs; --from) {
      if (from == at) continue;
      for (std::size_t i = 0; i < batch.size(); ++i) {
        other[i][at].copy_(batch[i].detach()[from]);
        differs = differs || !other[i][at].equal(batch[i].detach()[at]);
      }
    }
    at::Tensor now;
    try {
      now = loss(other).detach();
    } catch (const c10::Error& error) {
      log(base::join("the loss does not take example ", at,
                     " replaced by another, so that mixing "
                     "was not looked for: ",
                     error.what_without_backtrace()));
      continue;
    }
    proved = proved && differs;
    const at::Tensor difference = (now - losses).abs().to(at::kDouble);
    const at::Tensor sizes = losses.abs().to(at::kDouble).nan_to_num(0, 0, 0);
    const at::Tensor bound = kUnchanged * (sizes + sizes.mean());
    for (std::int64_t i = 0; i < losses.size(0); ++i) {
      if (i == at) continue;
      const double by = difference[i].item<double>();
      if (!std::isfinite(by)) {
        proved = false;
        continue;
      }
      if (by <= bound[i].item<double>()) continue;
      const std::string suspects = where();
      GRADUS_CHECK("persample", by <= bound[i].item<double>(),
                   "losses that depend on one example each are required; changing example ", at,
                   " changes the loss of example ", i, " by ", by,
                   suspects.empty() ? std::string()
                                    : base::join("; operators that can mix them: ", suspects),
                   ". Per-sample gradients and private training need a model without BatchNorm in "
                   "training, permutations of the batch or statistics over it");
    }
  }
  return proved;
}

const SampleGradients::State::Verdict& SampleGradients::State::examine(const LossFunction& loss,
                                                                       const Batch& batch,
                                                                       std::uint64_t structure) {
  const std::size_t count = parameters().size();
  Verdict verdict{.engines = std::vector<Engine>(count, Engine::graph)};
  std::vector<std::size_t> all;
  for (std::size_t i = 0; i < count; ++i) {
    if (wanted(i)) all.push_back(i);
  }
  std::vector<std::int64_t> examples;
  std::vector<std::size_t> wrong;
  std::vector<at::Tensor> want;
  bool drew = false;
  // Copies, as a loss may change its batch; a permutation that the model draws must be the same one
  // in each run.
  const LossFunction with_same_draws = [&](const Batch& of) {
    const base::RngGuard same_draws;
    Batch copies;
    for (const at::Tensor& tensor : of) copies.push_back(tensor.detach().clone());
    return loss(copies);
  };
  if (options_.check_mixing) {
    // With real draws: what a drawn branch or mask does is seen too.
    verdict.proved = check_mixing(with_same_draws, batch, [&] {
      const internal::FixedRandomness watched;
      with_same_draws(batch);
      return join_names(watched.suspects());
    });
  }
  const internal::FixedRandomness fixed;
  {
    at::Tensor losses = with_same_draws(batch);
    examples = checked(losses.detach());
    if (options_.check_mixing && fixed.drew()) {
      verdict.proved =
          check_mixing(with_same_draws, batch, [&] { return join_names(fixed.suspects()); }) &&
          verdict.proved;
    }
    verdict.proved = verdict.proved && (!examples.empty() || options_.checked_examples == 0);
    if (!examples.empty()) {
      GraphGradients scratch(parameters(), options_.graph);
      scratch.set_examples_checked(options_.check_mixing || options_.graph.examples_checked);
      std::vector<std::vector<at::Tensor>> got;
      try {
        scratch.backward(losses);
        for (const std::int64_t example : examples) {
          got.emplace_back();
          for (std::size_t i = 0; i < count; ++i) {
            got.back().push_back(scratch.weighted_sum(i, one_hot(example, scratch.examples())));
          }
        }
      } catch (const c10::Error& error) {
        log(base::join("the graph engine failed: ", error.what_without_backtrace()));
        got.clear();
      }
      losses = at::Tensor();
      want = loop_gradients(parameters(), loss, batch, {.examples = examples});
      wrong = got.empty() ? all : mismatches(got, want, all);
    }
    drew = fixed.drew();
  }
  if (!wrong.empty()) {
    std::set<std::string> names;
    for (const std::size_t i : wrong) names.insert(parameters()[i].name);
    GRADUS_CHECK("persample", !options_.strict && options_.engine != Engine::graph,
                 "per-sample gradients equal to those of single examples are required; the graph "
                 "engine differs at ",
                 join_names(names),
                 ": register a rule for its operator, or use Engine::automatic without strict");
    // One pass of one engine draws the masks that all parameters share.
    if (drew) wrong = all;
    std::vector<NamedParameter> of;
    for (const std::size_t i : wrong) of.push_back(parameters()[i]);
    std::vector<std::size_t> still = wrong;
    try {
      Batch few = examples_at(batch, examples);
      const std::vector<at::Tensor> rows = by(Engine::vmap, of, loss, few);
      std::vector<std::vector<at::Tensor>> got(examples.size(), std::vector<at::Tensor>(count));
      for (std::size_t e = 0; e < examples.size(); ++e) {
        for (std::size_t i = 0; i < wrong.size(); ++i) {
          got[e][wrong[i]] = rows[i][static_cast<std::int64_t>(e)];
        }
      }
      still = mismatches(got, want, wrong);
    } catch (const Unsupported& error) {
      log(error.what());
    } catch (const c10::Error& error) {
      log(error.what_without_backtrace());
    }
    if (drew && !still.empty()) still = wrong;
    for (const std::size_t i : wrong) verdict.engines[i] = Engine::vmap;
    for (const std::size_t i : still) verdict.engines[i] = Engine::loop;
    for (const std::size_t i : wrong) {
      log(base::join(parameters()[i].name, ": the graph engine does not match single examples; ",
                     verdict.engines[i] == Engine::vmap ? "computed by vmap"
                                                        : "computed by the loop, one example at a "
                                                          "time, which is slow"));
    }
  }
  return verdicts_[structure] = verdict;
}

SampleGradients::SampleGradients(std::vector<NamedParameter> parameters, SampleOptions options)
    : state_(std::make_unique<State>(std::move(parameters), nullptr, std::move(options))) {}
SampleGradients::SampleGradients(std::shared_ptr<torch::nn::Module> module, SampleOptions options) {
  GRADUS_CHECK("persample", module != nullptr, "a module is required; got none");
  std::vector<NamedParameter> parameters = parameters_of(*module);
  state_ = std::make_unique<State>(std::move(parameters), std::move(module), std::move(options));
}
SampleGradients::~SampleGradients() = default;

at::Tensor SampleGradients::backward(const LossFunction& loss, const Batch& batch) {
  try {
    return state_->backward(loss, batch);
  } catch (...) {
    state_->clear();  // of a sum of which a part is missing nothing is right
    throw;
  }
}
void SampleGradients::backward(const at::Tensor& losses) {
  try {
    state_->backward(losses);
  } catch (...) {
    state_->clear();
    throw;
  }
}
std::int64_t SampleGradients::examples() const { return state_->examples(); }
const std::vector<NamedParameter>& SampleGradients::parameters() const {
  return state_->parameters();
}
at::Tensor SampleGradients::gradients(std::size_t index, bool sparse) const {
  const at::NoGradGuard no_grad;
  return state_->gradients(index, sparse);
}
at::Tensor SampleGradients::norms(std::size_t index) const {
  const at::NoGradGuard no_grad;
  return state_->norms(index);
}
at::Tensor SampleGradients::norms() const {
  const at::NoGradGuard no_grad;
  at::Tensor total = at::zeros({examples()}, at::kDouble);
  for (std::size_t i = 0; i < parameters().size(); ++i) {
    if (state_->wanted(i)) total += state_->norms(i).square();
  }
  return total.sqrt();
}
at::Tensor SampleGradients::weighted_sum(std::size_t index, const at::Tensor& weights) const {
  const at::NoGradGuard no_grad;
  return state_->weighted_sum(index, weights);
}
std::vector<at::Tensor> SampleGradients::weighted_sums(const at::Tensor& weights, bool consume) {
  std::vector<at::Tensor> sums;
  for (std::size_t i = 0; i < parameters().size(); ++i) {
    sums.push_back(state_->wanted(i) ? weighted_sum(i, weights) : at::Tensor());
    if (consume) state_->forget(i);
  }
  if (consume) clear();
  return sums;
}
void SampleGradients::clear() { state_->clear(); }
std::vector<std::string> SampleGradients::explain() const { return state_->explain(); }

std::vector<std::pair<std::string, at::Tensor>> gradients(
    const std::shared_ptr<torch::nn::Module>& module, const LossFunction& loss, const Batch& batch,
    const SampleOptions& options) {
  SampleGradients table(module, options);
  table.backward(loss, batch);
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (std::size_t i = 0; i < table.parameters().size(); ++i) {
    const NamedParameter& parameter = table.parameters()[i];
    if (parameter.tensor.requires_grad()) result.emplace_back(parameter.name, table.gradients(i));
  }
  return result;
}

at::Tensor gradient_norms(const std::shared_ptr<torch::nn::Module>& module,
                          const LossFunction& loss, const Batch& batch,
                          const SampleOptions& options) {
  SampleGradients table(module, options);
  table.backward(loss, batch);
  return table.norms();
}

double noise_scale(const std::shared_ptr<torch::nn::Module>& module, const LossFunction& loss,
                   const Batch& batch, const SampleOptions& options) {
  const std::int64_t examples = count_examples(batch);
  GRADUS_CHECK("persample", examples >= 2, "at least two examples are required; got ", examples);
  SampleGradients table(module, options);
  table.backward(loss, batch);
  const double mean_square = table.norms().square().mean().item<double>();
  const auto count = static_cast<double>(examples);
  double square_of_mean = 0;
  for (const at::Tensor& sum : table.weighted_sums(at::ones({examples}, at::kDouble) / count)) {
    if (!sum.defined()) continue;
    const double norm = norm_of(sum);
    square_of_mean += norm * norm;
  }
  const double trace = (mean_square - square_of_mean) * count / (count - 1);
  return trace / (square_of_mean - trace / count);
}

std::vector<at::Tensor> jacobians(const std::vector<NamedParameter>& parameters,
                                  const std::function<at::Tensor(const Batch&)>& outputs,
                                  const Batch& batch, const SampleOptions& options) {
  const at::Tensor shape = [&] {
    const base::RngGuard same_draws;
    const at::NoGradGuard no_grad;
    return outputs(batch);
  }();
  GRADUS_CHECK("persample", shape.dim() == 2 && shape.size(0) == count_examples(batch),
               "outputs of shape [", count_examples(batch), ", K] are required; got ",
               base::describe_tensor(shape));
  const base::RngState draws = base::RngState::capture();
  SampleGradients table(parameters, options);
  std::vector<std::vector<at::Tensor>> rows(parameters.size());
  for (std::int64_t k = 0; k < shape.size(1); ++k) {
    draws.restore();  // one pass in K parts: the same masks in each
    table.clear();
    table.backward([&](const Batch& part) { return outputs(part).select(1, k); }, batch);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].tensor.requires_grad()) rows[i].push_back(table.gradients(i));
    }
  }
  std::vector<at::Tensor> result;
  result.reserve(rows.size());
  for (const auto& of_parameter : rows) {
    result.push_back(of_parameter.empty() ? at::Tensor() : at::stack(of_parameter, 1));
  }
  return result;
}

}  // namespace gradus::persample
