#include <gradus/persample/engine/sample_gradients.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/api/include/torch/nn/module.h>

#include <gradus/accumulate/batch_norm.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/base/rng.h>
#include <gradus/persample/engine/internal/examination.h>
#include <gradus/persample/engine/internal/mixing.h>
#include <gradus/persample/graph/analysis.h>
#include <gradus/persample/graph/term.h>
#include <gradus/persample/vmap/set_aside_gradients.h>
#include <gradus/persample/vmap/vmap.h>

namespace gradus::persample {

namespace {

// A proved program is looked at again at this use of it, and at each that is as many times as far.
constexpr std::int64_t kFirstGlance = 64;
constexpr std::int64_t kGlanceFactor = 4;
// So many programs of a family are examined before others are taken to be like them.
constexpr std::int64_t kExaminedPrograms = 8;
// Programs that are remembered.
constexpr std::size_t kPrograms = 4096;

bool same_values(const Batch& one, const Batch& other) {
  for (std::size_t i = 0; i < one.size(); ++i) {
    if (!one[i].equal(other[i])) return false;
  }
  return true;
}

std::vector<std::int64_t> versions_of(const Batch& batch) {
  std::vector<std::int64_t> versions;
  for (const at::Tensor& tensor : batch) {
    versions.push_back(tensor.is_inference() ? 0 : tensor._version());
  }
  return versions;
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
  void backward(const at::Tensor& losses);

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
  at::Tensor norms() const {
    if (std::ranges::none_of(formed_, [](const at::Tensor& each) { return each.defined(); })) {
      const bool unused = graph_.examples() == 0 && examples_ > 0;  // all frozen
      return unused ? at::zeros({examples_}, at::kDouble) : graph_.norms();
    }
    at::Tensor total = at::zeros({examples()}, at::kDouble);
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      if (wanted(i)) total += norms(i).square();
    }
    return total.sqrt();
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
  // What a backward() call of so many examples needs.
  void check(std::int64_t examples) const {
    check_module();
    check_examples(examples);
  }

 private:
  // What is known of one program: a structure of the graph, for one example or for several.
  struct Known {
    internal::Verdict verdict{};
    std::int64_t uses = 0;
    std::int64_t next_look = 1;  // at this use
    std::int64_t looks = 0;
    std::set<std::size_t> spoke{};  // parameters that were silent when looked at, and then were not
  };
  // What is known of the programs of one family. A model of packed sequences has one for each set
  // of lengths.
  struct Family {
    std::int64_t programs = 0;
    std::int64_t next_examined = 1;  // the program of this number
    internal::Verdict verdict{};     // the last that was proved
    std::int64_t proofs = 0;
    bool alike = true;  // all of them gave the same engines
  };
  // The program of some losses.
  struct Program {
    std::uint64_t key = 0;
    std::uint64_t family = 0;     // of one that is not known yet
    std::vector<bool> reached{};  // by parameter
  };

  void log(const std::string& line) {
    if (options_.log && logged_.insert(line).second) options_.log("[persample] " + line);
  }
  bool has_graph(std::size_t index) const { return graph_.examples() > 0 && graph_.uses(index); }
  void check_module() const;
  void check_examples(std::int64_t examples) const {
    GRADUS_CHECK("persample", this->examples() == 0 || this->examples() == examples,
                 "a batch of the same ", this->examples(),
                 " examples as in the earlier backward() call is required; got ", examples,
                 ": call clear() between batches");
  }
  void check_reached(const std::vector<bool>& reached) const;
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const NamedParameter& parameter : parameters()) all.push_back(parameter.tensor);
    return all;
  }
  std::vector<bool> reached_by(const Graph& graph) const;
  Program program_of(const at::Tensor& losses) const;
  at::Tensor losses_of(const LossFunction& loss, const Batch& batch);
  void check_whole() const;
  internal::Verdict examined(Known& known, const LossFunction& loss, const Batch& batch,
                             const std::vector<bool>& reached);
  void look(Known& known, const LossFunction& loss, const Batch& batch,
            const std::vector<bool>& reached);
  static void learn(Family& family, const internal::Verdict& verdict);
  void remember(const Batch& batch);
  bool speaks(Known& known) const;
  void run_graph(const at::Tensor& losses);
  void compute(internal::Verdict& verdict, at::Tensor losses, const LossFunction& loss,
               const Batch& batch);
  void add_formed(Engine engine, const internal::Verdict& verdict, const LossFunction& loss,
                  const Batch& batch);

  SampleOptions options_;
  std::shared_ptr<torch::nn::Module> module_;
  GraphGradients graph_;
  std::vector<at::Tensor> formed_;  // of vmap and the loop, [B, *shape]
  std::int64_t examples_ = 0;
  std::map<std::uint64_t, Known> known_;
  std::map<std::uint64_t, Family> families_;
  std::optional<Batch> other_;  // an example of another batch, for batches of one
  std::optional<bool>
      changes_batch_;     // the loss writes to its batch; unknown before the first call
  bool spoiled_ = false;  // this call's batch was written to
  bool reaches_ = false;  // the loss of one example reached a parameter
  std::set<std::string> logged_;
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

void SampleGradients::State::check_reached(const std::vector<bool>& reached) const {
  bool any = false, wants = false;
  for (std::size_t i = 0; i < reached.size(); ++i) {
    wants = wants || wanted(i);
    any = any || reached[i];
  }
  GRADUS_CHECK("persample", any || !wants,
               "losses with a graph to at least one parameter that wants a gradient are required; "
               "got losses that reach none of the ",
               parameters().size(),
               ": they are detached, computed under NoGradGuard, or of another model's parameters");
}

std::vector<bool> SampleGradients::State::reached_by(const Graph& graph) const {
  std::vector<bool> reached(parameters().size(), false);
  for (const std::int64_t parameter : graph.parameter) {
    if (parameter >= 0) reached[static_cast<std::size_t>(parameter)] = true;
  }
  return reached;
}

SampleGradients::State::Program SampleGradients::State::program_of(const at::Tensor& losses) const {
  const Graph graph = read_graph(losses, tensors());
  const std::uint64_t alone = losses.size(0) == 1 ? 1 : 0;  // nothing follows for several
  Program program{.key = 2 * structure_of(graph) + alone, .reached = reached_by(graph)};
  if (!known_.contains(program.key)) program.family = 2 * family_of(graph) + alone;
  return program;
}

// A loss may write to its batch (x.div_(255)). It then gets copies, so that each call sees the
// batch as it was, and so does the caller.
at::Tensor SampleGradients::State::losses_of(const LossFunction& loss, const Batch& batch) {
  const std::int64_t examples = count_examples(batch);
  const bool copied = changes_batch_.value_or(true);
  Batch given = batch;
  if (copied) {
    for (at::Tensor& tensor : given) {
      if (!tensor.requires_grad()) tensor = tensor.detach().clone();
    }
  }
  const std::vector<std::int64_t> versions = versions_of(given);
  at::Tensor losses = loss(given);
  const bool changed = versions_of(given) != versions;
  if (!changes_batch_) {
    changes_batch_ = changed || !same_values(given, batch);
  } else if (changed) {
    spoiled_ = spoiled_ || !copied;
    changes_batch_ = true;
  }
  if (losses.defined() && losses.dim() == 0 && examples == 1) losses = losses.unsqueeze(0);
  GRADUS_CHECK("persample",
               losses.defined() && losses.dim() == 1 && losses.size(0) == examples &&
                   losses.is_floating_point(),
               "a loss function that gives one loss an example, shape [", examples,
               "], is required; got ", base::describe_tensor(losses),
               ": reduce over all but dimension 0 (cross_entropy with reduction=none, then a mean "
               "over each example's own elements)");
  return losses;
}

void SampleGradients::State::check_whole() const {
  GRADUS_CHECK(
      "persample", !spoiled_,
      "a loss function that writes to its batch in each call or in none is required; got "
      "one that did so now and not in its first call, so that the batch as it was is gone: "
      "clone what it writes to. The next call gets copies");
}

at::Tensor SampleGradients::State::backward(const LossFunction& loss, const Batch& batch) {
  const std::int64_t examples = count_examples(batch);
  at::AutoGradMode grad(true);
  spoiled_ = false;
  if (options_.engine == Engine::vmap || options_.engine == Engine::loop) {
    if (!reaches_) {
      at::Tensor one = internal::with_same_draws(loss)(examples_at(batch, {0}));
      check_reached(reached_by(read_graph(one.reshape({-1}), tensors())));
      reaches_ = true;
    }
    internal::Verdict all{.engines = std::vector<Engine>(parameters().size(), options_.engine)};
    add_formed(options_.engine, all, loss, batch);
    examples_ = examples;
    const at::NoGradGuard no_grad;
    return losses_of(loss, batch).detach();
  }
  const base::RngState before = base::RngState::capture();
  at::Tensor losses = losses_of(loss, batch);
  const Program program = program_of(losses);
  check_reached(program.reached);
  if (known_.size() >= kPrograms && !known_.contains(program.key)) known_.clear();
  Known& known = known_[program.key];
  Family* const family = ++known.uses == 1 ? &families_[program.family] : nullptr;
  const bool adopted =
      family != nullptr && ++family->programs < family->next_examined && family->alike;
  if (adopted) {
    known.verdict = family->verdict;
    known.next_look = kFirstGlance;
  }
  bool looked = known.uses >= known.next_look;
  const auto look_now = [&] {
    looked = true;
    check_whole();
    losses = at::Tensor();  // two graphs at once might not fit
    look(known, loss, batch, program.reached);
    if (family != nullptr) learn(*family, known.verdict);
    before.restore();
    losses = losses_of(loss, batch);
  };
  if (looked) look_now();
  const at::Tensor result = losses.detach();
  const bool first = this->examples() == 0;
  try {
    compute(known.verdict, std::move(losses), loss, batch);
  } catch (const MemoryLimitError&) {
    throw;
  } catch (const UserError&) {
    if (!adopted || !first) throw;
    clear();  // the family's engines do not take this one
    known.verdict = {};
    look_now();
    compute(known.verdict, std::move(losses), loss, batch);
  }
  if (!looked && first && speaks(known)) {
    check_whole();
    const std::vector<Engine> used = known.verdict.engines;
    known.verdict = examined(known, loss, batch, program.reached);
    if (known.verdict.engines != used) {
      clear();
      const base::RngGuard after;
      before.restore();
      compute(known.verdict, losses_of(loss, batch), loss, batch);
    }
  }
  examples_ = examples;
  return result;
}

void SampleGradients::State::backward(const at::Tensor& losses) {
  graph_.set_skipped({});
  graph_.set_examples_checked(options_.graph.examples_checked);
  const bool first = examples() == 0;
  const auto uses_any = [&] {
    for (std::size_t i = 0; i < parameters().size(); ++i) {
      if (graph_.uses(i)) return true;
    }
    return false;
  };
  if (!losses.requires_grad()) check_reached(std::vector<bool>(parameters().size(), false));
  run_graph(losses);
  if (first && !uses_any()) {
    // Something must have come of it: the graph below is freed, its nodes are not.
    check_reached(reached_by(read_graph(losses, tensors())));
  }
}

// The whole of what is known of a program on this batch.
internal::Verdict SampleGradients::State::examined(Known& known, const LossFunction& loss,
                                                   const Batch& batch,
                                                   const std::vector<bool>& reached) {
  const internal::Subject subject{.parameters = parameters(),
                                  .options = options_,
                                  .loss = loss,
                                  .batch = batch,
                                  .reached = reached,
                                  .number = known.looks,
                                  .log = [this](const std::string& line) { log(line); }};
  internal::Verdict verdict = count_examples(batch) == 1
                                  ? internal::examine_alone(subject, other_ ? &*other_ : nullptr)
                                  : internal::examine(subject);
  ++known.looks;
  std::erase_if(verdict.silent, [&](std::size_t i) { return known.spoke.contains(i); });
  return verdict;
}

// A verdict that numbers did not prove is looked at again, ever less often: a parameter that is
// never used proves nothing. A proved one only at a glance.
void SampleGradients::State::look(Known& known, const LossFunction& loss, const Batch& batch,
                                  const std::vector<bool>& reached) {
  known.next_look = known.uses + 1;  // if this one fails
  if (known.verdict.proved) {
    internal::glance({.parameters = parameters(),
                      .options = options_,
                      .loss = loss,
                      .batch = batch,
                      .reached = reached,
                      .number = known.uses},
                     other_ ? &*other_ : nullptr);
    known.next_look = kGlanceFactor * known.uses;
  } else {
    known.verdict = examined(known, loss, batch, reached);
    known.next_look =
        known.verdict.proved ? std::max(kFirstGlance, kGlanceFactor * known.uses) : 2 * known.uses;
  }
  remember(batch);
}

// A family's first programs are all examined. If their verdicts were the same, later ones take
// that, and ever fewer are examined: whose gradient is where is measured in each program anyway.
void SampleGradients::State::learn(Family& family, const internal::Verdict& verdict) {
  if (verdict.proved) {
    family.alike =
        family.alike && (family.proofs == 0 || family.verdict.engines == verdict.engines);
    family.verdict = verdict;
    ++family.proofs;
  }
  family.next_examined =
      family.proofs < kExaminedPrograms ? family.programs + 1 : kGlanceFactor * family.programs;
}

void SampleGradients::State::remember(const Batch& batch) { other_ = examples_at(batch, {0}); }

// A parameter whose gradients were all zero when the program was looked at has one now.
bool SampleGradients::State::speaks(Known& known) const {
  std::vector<at::Tensor> norms;
  std::vector<std::size_t> of;
  for (const std::size_t i : known.verdict.silent) {
    if (known.verdict.engines[i] != Engine::graph || !has_graph(i)) continue;
    norms.push_back(graph_.norms(i));
    of.push_back(i);
  }
  if (norms.empty()) return false;
  const at::Tensor most = at::stack(norms).amax(1).cpu();
  bool any = false;
  for (std::size_t i = 0; i < of.size(); ++i) {
    if (most[static_cast<std::int64_t>(i)].item<double>() == 0) continue;  // true for NaN
    known.spoke.insert(of[i]);
    any = true;
  }
  return any;
}

void SampleGradients::State::run_graph(const at::Tensor& losses) {
  std::vector<at::Tensor> wanted_tensors;
  for (std::size_t i = 0; i < parameters().size(); ++i) {
    if (wanted(i)) wanted_tensors.push_back(parameters()[i].tensor);
  }
  const SetAsideGradients aside(std::move(wanted_tensors));
  graph_.backward(losses);
  GRADUS_CHECK(
      "persample", !aside.any(),
      "a backward pass that leaves .grad alone is required; got one that adds to it itself "
      "(a checkpoint that runs backward() inside): use the call with a loss function, which "
      "computes that by the loop");
}

void SampleGradients::State::compute(internal::Verdict& verdict, at::Tensor losses,
                                     const LossFunction& loss, const Batch& batch) {
  if (std::count(verdict.engines.begin(), verdict.engines.end(), Engine::graph) > 0) {
    std::vector<bool> skipped;
    for (const Engine engine : verdict.engines) skipped.push_back(engine != Engine::graph);
    graph_.set_skipped(std::move(skipped));
    graph_.set_examples_checked(options_.check_mixing || options_.graph.examples_checked);
    run_graph(losses);
  }
  losses = at::Tensor();
  try {
    add_formed(Engine::vmap, verdict, loss, batch);
  } catch (const Unsupported& error) {
    log(error.what());
    std::replace(verdict.engines.begin(), verdict.engines.end(), Engine::vmap, Engine::loop);
  }
  add_formed(Engine::loop, verdict, loss, batch);
}

void SampleGradients::State::add_formed(Engine engine, const internal::Verdict& verdict,
                                        const LossFunction& loss, const Batch& batch) {
  std::vector<NamedParameter> of;
  std::vector<std::size_t> place;
  for (std::size_t i = 0; i < verdict.engines.size(); ++i) {
    if (verdict.engines[i] != engine || !wanted(i)) continue;
    of.push_back(parameters()[i]);
    place.push_back(i);
  }
  if (of.empty()) return;
  check_whole();
  const std::vector<at::Tensor> gradients =
      internal::gradients_by(engine, of, loss, batch, options_);
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < of.size(); ++i) {
    at::Tensor& sum = formed_[place[i]];
    sum = sum.defined() ? sum + gradients[i] : gradients[i];
  }
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
  state_->check(count_examples(batch));  // before anything is lost
  try {
    return state_->backward(loss, batch);
  } catch (...) {
    state_->clear();  // of a sum of which a part is missing nothing is right
    throw;
  }
}
void SampleGradients::backward(const at::Tensor& losses) {
  state_->check(losses.dim() == 1 ? losses.size(0) : 0);
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
  return state_->norms();
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
    const double norm = internal::norm_of(sum);
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
