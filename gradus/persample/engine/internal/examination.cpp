#include <gradus/persample/engine/internal/examination.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/rng.h>
#include <gradus/persample/engine/internal/fixed_randomness.h>
#include <gradus/persample/engine/internal/mixing.h>
#include <gradus/persample/engine/internal/precision.h>
#include <gradus/persample/graph/graph_gradients.h>
#include <gradus/persample/vmap/loop.h>
#include <gradus/persample/vmap/set_aside_gradients.h>
#include <gradus/persample/vmap/vmap.h>

namespace gradus::persample::internal {

namespace {

// A parameter whose gradient is this small beside the whole gradient is compared with that:
// rounding is all there is of it (the bias of attention's keys).
constexpr double kNegligible = 1e-2;
// Examples that are checked beyond the usual ones, for parameters that only they use.
constexpr std::size_t kMoreChecked = 4;
// Examples that vmap takes at once where memory is not tracked.
constexpr std::int64_t kUntrackedChunk = 32;

using Indices = std::vector<std::int64_t>;

at::Tensor one_hot(std::int64_t example, std::int64_t examples) {
  at::Tensor weights = at::zeros({examples}, at::kDouble);
  weights[example] = 1;
  return weights;
}

std::string join_names(const std::set<std::string>& names) {
  std::string all;
  for (const std::string& name : names) all += (all.empty() ? "" : ", ") + name;
  return all;
}

std::vector<at::Tensor> wanted_of(const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> wanted;
  for (const NamedParameter& each : parameters) {
    if (each.tensor.requires_grad()) wanted.push_back(each.tensor);
  }
  return wanted;
}

class Examination {
 public:
  explicit Examination(const Subject& subject)
      : of_(subject), loss_(with_same_draws(subject.loss)), aside_(wanted_of(subject.parameters)) {
    for (std::size_t i = 0; i < count(); ++i) {
      if (of_.parameters[i].tensor.requires_grad()) all_.push_back(i);
    }
  }

  Verdict run();

 private:
  std::size_t count() const { return of_.parameters.size(); }
  const std::string& name(std::size_t index) const { return of_.parameters[index].name; }
  void log(const std::string& line) const {
    if (of_.log) of_.log(line);
  }
  double tolerance(at::ScalarType type) const {
    type = c10::toRealValueType(type);
    if (type == at::kDouble) return of_.options.tolerance_float64;
    return type == at::kFloat ? of_.options.tolerance_float32 : of_.options.tolerance_16bit;
  }
  // Of the coarsest that took part: a float64 parameter behind a float32 model is no finer.
  double tolerance_of(std::size_t index) const {
    return std::max(tolerance(of_.parameters[index].tensor.scalar_type()), tolerance(coarsest()));
  }
  at::ScalarType coarsest() const { return precision_ ? precision_->coarsest() : coarsest_; }
  void graph_rows();
  Indices usual_examples() const;
  void add_users(const GraphGradients& rows);
  void loop_rows();
  void compare_losses() const;
  std::vector<std::size_t> mismatches(const std::vector<std::vector<at::Tensor>>& got,
                                      const std::vector<std::size_t>& of);
  void find_silent();
  void refuse_graph(const std::vector<std::size_t>& wrong) const;
  std::vector<std::size_t> wrong_by_vmap(const std::vector<std::size_t>& wrong);
  Verdict by_loop(const char* why);
  void fall_back(std::vector<std::size_t> wrong);

  const Subject& of_;
  const LossFunction loss_;
  const SetAsideGradients aside_;
  std::optional<Precision> precision_;
  at::ScalarType coarsest_ = at::kDouble;  // once precision_ is gone
  std::vector<std::size_t> all_;           // the parameters that want a gradient
  Verdict verdict_;
  at::Tensor in_batch_;  // losses, with constant random numbers
  Indices examples_;     // compared with the loop
  std::set<std::int64_t> wrong_examples_;
  std::vector<std::vector<at::Tensor>> got_;  // of the graph engine, by example and parameter
  std::vector<at::Tensor> want_;              // of the loop, by parameter
  std::vector<at::Tensor> losses_alone_;
  bool drew_ = false;
};

Verdict Examination::run() {
  verdict_.engines.assign(count(), Engine::graph);
  precision_.emplace();
  std::optional<MixingCheck> mixing;
  bool told = true;
  if (of_.options.check_mixing) {
    mixing.emplace(loss_, of_.batch, *precision_, of_.log ? of_.log : [](const std::string&) {});
    // With real draws: what a drawn branch or mask does is seen too.
    told = mixing->losses(mixing->replacements().separating());
  }
  std::vector<std::size_t> wrong;
  {
    const FixedRandomness fixed;
    if (of_.options.checked_examples > 0) {
      graph_rows();
      if (aside_.any()) {
        return by_loop(
            "the backward pass adds to .grad itself (a checkpoint that runs backward() inside)");
      }
      loop_rows();
      drew_ = fixed.drew();
      if (mixing && fixed.still_random().empty()) compare_losses();
      wrong = got_.empty() ? all_ : mismatches(got_, all_);
      find_silent();
    }
    const bool compared = !examples_.empty() || of_.options.checked_examples == 0;
    if (mixing && drew_ && !told) {
      told = mixing->losses(mixing->replacements().separating());  // a mask may have hidden it
    }
    verdict_.proved = told && compared && verdict_.silent.empty();
    if (mixing) {
      // What is wrong in an example that none changes is a rule's fault.
      for (const std::int64_t example : wrong_examples_) {
        mixing->gradients({mixing->replacements().all_but(example)}, of_.parameters);
      }
      if (!verdict_.proved && of_.number == 0) {
        mixing->gradients(mixing->replacements().separating(), of_.parameters);
      }
    }
    if (!wrong.empty()) fall_back(std::move(wrong));
  }
  return std::move(verdict_);
}

// Spread over the examples whose loss is a number, others in each examination.
Indices Examination::usual_examples() const {
  Indices finite;
  for (std::int64_t i = 0; i < in_batch_.size(0); ++i) {
    if (std::isfinite(in_batch_[i].item<double>())) finite.push_back(i);
  }
  const auto size = static_cast<std::int64_t>(finite.size());
  const std::int64_t count = std::min(of_.options.checked_examples, size);
  Indices chosen;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t place = count == 1 ? 0 : i * (size - 1) / (count - 1);
    chosen.push_back(finite[static_cast<std::size_t>((place + of_.number) % size)]);
  }
  return chosen;
}

void Examination::graph_rows() {
  at::Tensor losses = loss_(of_.batch);
  in_batch_ = losses.detach().to(c10::kCPU, at::kDouble);
  examples_ = usual_examples();
  if (examples_.empty()) return;
  GraphGradients scratch(of_.parameters, of_.options.graph);
  scratch.set_examples_checked(of_.options.check_mixing || of_.options.graph.examples_checked);
  try {
    scratch.backward(losses);
    add_users(scratch);
    for (const std::int64_t example : examples_) {
      got_.emplace_back();
      for (std::size_t i = 0; i < count(); ++i) {
        got_.back().push_back(scratch.weighted_sum(i, one_hot(example, scratch.examples())));
      }
    }
  } catch (const c10::Error& error) {
    log(base::join("the graph engine failed: ", error.what_without_backtrace()));
    got_.clear();
    wrong_examples_.insert(examples_.begin(), examples_.end());
  }
}

// Parameters that none of the usual examples uses (an expert, a branch) are checked where they are
// used most.
void Examination::add_users(const GraphGradients& rows) {
  std::vector<at::Tensor> norms;
  std::vector<std::size_t> of;
  for (const std::size_t i : all_) {
    if (!rows.uses(i)) continue;
    norms.push_back(rows.norms(i).to(c10::kCPU));
    of.push_back(i);
  }
  if (norms.empty()) return;
  const at::Tensor by_parameter =
      at::stack(norms).nan_to_num(0, 0, 0) * in_batch_.isfinite().to(at::kDouble).unsqueeze(0);
  const std::size_t most = examples_.size() + kMoreChecked;
  for (std::size_t i = 0; i < of.size() && examples_.size() < most; ++i) {
    const at::Tensor own = by_parameter[static_cast<std::int64_t>(i)];
    const bool seen = std::any_of(examples_.begin(), examples_.end(), [&](std::int64_t example) {
      return own[example].item<double>() > 0;
    });
    if (!seen && own.max().item<double>() > 0)
      examples_.push_back(own.argmax().item<std::int64_t>());
  }
}

void Examination::loop_rows() {
  if (examples_.empty()) return;
  const LossFunction recorded = [this](const Batch& example) {
    at::Tensor loss = of_.loss(example);
    if (loss.defined()) losses_alone_.push_back(loss.detach().to(c10::kCPU, at::kDouble).sum());
    return loss;
  };
  want_ = loop_gradients(of_.parameters, recorded, of_.batch, {.examples = examples_});
}

void Examination::compare_losses() const {
  for (std::size_t e = 0; e < examples_.size() && e < losses_alone_.size(); ++e) {
    const double together = in_batch_[examples_[e]].item<double>();
    const double alone = losses_alone_[e].item<double>();
    const double scale =
        std::abs(alone) + in_batch_.abs().nan_to_num(0, 0, 0).mean().item<double>();
    // As gradients are: another shape rounds otherwise.
    const bool equal = std::abs(together - alone) <= tolerance(coarsest()) * scale;
    GRADUS_CHECK("persample", equal,
                 "losses that depend on one example each are required; the loss of example ",
                 examples_[e], " is ", together, " in the batch and ", alone,
                 " alone: leave out statistics over the batch, its size, and a state that is kept "
                 "between calls");
  }
}

// Parameters of @p of whose rows got[example][parameter] differ from the loop's.
std::vector<std::size_t> Examination::mismatches(const std::vector<std::vector<at::Tensor>>& got,
                                                 const std::vector<std::size_t>& of) {
  std::vector<std::size_t> wrong;
  for (std::size_t example = 0; example < got.size(); ++example) {
    double total = 0;
    for (const at::Tensor& each : want_) {
      if (each.defined())
        total = std::hypot(total, norm_of(each[static_cast<std::int64_t>(example)]));
    }
    for (const std::size_t i : of) {
      if (!want_[i].defined()) continue;
      const at::Tensor expected = want_[i][static_cast<std::int64_t>(example)];
      const double scale = norm_of(expected) + kNegligible * total;
      const double error = norm_of(got[example][i] - expected);
      if (error <= tolerance_of(i) * scale) continue;  // false for NaN
      wrong_examples_.insert(examples_[example]);
      if (std::find(wrong.begin(), wrong.end(), i) == wrong.end()) wrong.push_back(i);
    }
  }
  return wrong;
}

void Examination::find_silent() {
  if (examples_.empty()) return;
  for (const std::size_t i : all_) {
    const bool reached = i < of_.reached.size() && of_.reached[i];
    if (reached && norm_of(want_[i]) == 0) verdict_.silent.push_back(i);
  }
}

void Examination::refuse_graph(const std::vector<std::size_t>& wrong) const {
  std::set<std::string> names;
  for (const std::size_t i : wrong) names.insert(name(i));
  GRADUS_CHECK("persample", !of_.options.strict && of_.options.engine != Engine::graph,
               "per-sample gradients equal to those of single examples are required; the graph "
               "engine differs at ",
               join_names(names),
               ": register a rule for its operator, or use Engine::automatic without strict");
}

std::vector<std::size_t> Examination::wrong_by_vmap(const std::vector<std::size_t>& wrong) {
  std::vector<NamedParameter> of;
  for (const std::size_t i : wrong) of.push_back(of_.parameters[i]);
  try {
    const Batch few = examples_at(of_.batch, examples_);
    const std::vector<at::Tensor> rows = gradients_by(Engine::vmap, of, of_.loss, few, of_.options);
    std::vector<std::vector<at::Tensor>> got(examples_.size(), std::vector<at::Tensor>(count()));
    for (std::size_t e = 0; e < examples_.size(); ++e) {
      for (std::size_t i = 0; i < wrong.size(); ++i) {
        got[e][wrong[i]] = rows[i][static_cast<std::int64_t>(e)];
      }
    }
    return mismatches(got, wrong);
  } catch (const c10::Error& error) {
    log(error.what_without_backtrace());
  } catch (const std::exception& error) {  // whatever it is, the loop may do
    log(error.what());
  }
  return wrong;
}

Verdict Examination::by_loop(const char* why) {
  refuse_graph(all_);
  verdict_.engines.assign(count(), Engine::loop);
  verdict_.proved = true;  // by itself: the loop is what all else is compared with
  verdict_.silent.clear();
  log(base::join(why, ": computed by the loop, one example at a time, which is slow"));
  return std::move(verdict_);
}

void Examination::fall_back(std::vector<std::size_t> wrong) {
  refuse_graph(wrong);
  // One pass of one engine draws the masks that all parameters share.
  if (drew_) wrong = all_;
  coarsest_ = precision_->coarsest();
  precision_.reset();  // not in the way of functorch's tensors
  std::vector<std::size_t> still = wrong_by_vmap(wrong);
  if (drew_ && !still.empty()) still = wrong;
  for (const std::size_t i : wrong) verdict_.engines[i] = Engine::vmap;
  for (const std::size_t i : still) verdict_.engines[i] = Engine::loop;
  for (const std::size_t i : wrong) {
    log(base::join(name(i), ": the graph engine does not match single examples; ",
                   verdict_.engines[i] == Engine::vmap ? "computed by vmap"
                                                       : "computed by the loop, one example at a "
                                                         "time, which is slow"));
  }
}

// A batch of one mixes with others only by what the program keeps from call to call.
bool check_state(const Subject& subject, const Batch* other, const Precision& precision) {
  if (other == nullptr) return false;
  const LossFunction loss = with_same_draws(subject.loss);
  const auto number = [&](const Batch& batch) {
    return loss(batch).detach().to(at::kDouble).sum().item<double>();
  };
  const double before = number(subject.batch);
  double between = before;
  try {
    between = number(*other);
  } catch (const c10::Error&) {  // another kind of batch
    return false;
  } catch (const UserError&) {
    return false;
  }
  const double after = number(subject.batch);
  const double by = std::abs(after - before);
  const bool equal = by <= precision.rounding() * std::abs(before) ||
                     (!std::isfinite(before) && !std::isfinite(after));
  GRADUS_CHECK(
      "persample", equal,
      "losses that depend on their own example alone are required; the loss of one example "
      "changes by ",
      by, ", from ", before,
      ", when another one is computed in between: leave out what the program keeps from "
      "call to call (a running mean), and random numbers that are not PyTorch's");
  return std::isfinite(before) && between != before;
}

}  // namespace

LossFunction with_same_draws(const LossFunction& loss) {
  return [&loss](const Batch& of) {
    const base::RngGuard same_draws;
    Batch copies;
    for (const at::Tensor& tensor : of) copies.push_back(tensor.detach().clone());
    return loss(copies);
  };
}

std::vector<at::Tensor> gradients_by(Engine engine, const std::vector<NamedParameter>& parameters,
                                     const LossFunction& loss, const Batch& batch,
                                     const SampleOptions& options) {
  if (engine == Engine::loop) return loop_gradients(parameters, loss, batch);
  // Sizing passes by measured bytes would start the memory tracker in a program that has none.
  if (base::MemoryTracker::installed() == nullptr) {
    return vmap_gradients(parameters, loss, batch, {.chunk = kUntrackedChunk});
  }
  return vmap_gradients(parameters, loss, batch, {.memory_bytes = options.vmap_bytes});
}

Verdict examine(const Subject& subject) { return Examination(subject).run(); }

Verdict examine_alone(const Subject& subject, const Batch* other) {
  Verdict verdict{.engines = std::vector<Engine>(subject.parameters.size(), Engine::graph)};
  const std::vector<at::Tensor> wanted = wanted_of(subject.parameters);
  const SetAsideGradients aside(wanted);
  const Precision precision;
  const bool told = !subject.options.check_mixing || check_state(subject, other, precision);
  const std::vector<at::Tensor> gradients =
      dense_gradients(with_same_draws(subject.loss)(subject.batch).sum(), wanted);
  if (aside.any()) {
    GRADUS_CHECK("persample", !subject.options.strict && subject.options.engine != Engine::graph,
                 "a backward pass that leaves .grad alone is required; got one that adds to it "
                 "itself (a checkpoint that runs backward() inside): use Engine::automatic without "
                 "strict");
    verdict.engines.assign(subject.parameters.size(), Engine::loop);
  }
  std::size_t place = 0;
  for (std::size_t i = 0; i < subject.parameters.size(); ++i) {
    if (!subject.parameters[i].tensor.requires_grad()) continue;
    if (subject.reached[i] && norm_of(gradients[place]) == 0) verdict.silent.push_back(i);
    ++place;
  }
  verdict.proved = told && verdict.silent.empty();
  return verdict;
}

void glance(const Subject& subject, const Batch* other) {
  if (!subject.options.check_mixing) return;
  const Precision precision;
  if (count_examples(subject.batch) == 1) {
    check_state(subject, other, precision);
    return;
  }
  MixingCheck mixing(with_same_draws(subject.loss), subject.batch, precision,
                     [](const std::string&) {});
  mixing.losses(mixing.replacements().halves(static_cast<std::uint64_t>(subject.number)));
}

}  // namespace gradus::persample::internal
