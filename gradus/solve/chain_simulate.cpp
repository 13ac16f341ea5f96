#include <algorithm>
#include <cmath>
#include <string_view>

#include <gradus/base/error.h>
#include <gradus/solve/chain.h>
#include <gradus/solve/internal/chain_sizes.h>

namespace gradus::solve {
namespace internal {

void check_chain(const Chain& chain) {
  GRADUS_CHECK("chain", !chain.stages.empty(), "a chain must have at least one stage; got none");
  GRADUS_CHECK("chain", chain.input_bytes >= 0 && chain.input_gradient_bytes >= 0,
               "input_bytes and input_gradient_bytes must be >= 0; got ", chain.input_bytes,
               " and ", chain.input_gradient_bytes);
  std::int64_t made_gradient = chain.input_gradient_bytes;
  for (std::size_t i = 0; i < chain.stages.size(); ++i) {
    const ChainStage& stage = chain.stages[i];
    GRADUS_CHECK("chain",
                 std::isfinite(stage.forward_ms) && stage.forward_ms >= 0.0 &&
                     std::isfinite(stage.backward_ms) && stage.backward_ms >= 0.0,
                 "times must be finite and >= 0; stage ", i, " has forward ", stage.forward_ms,
                 " ms, backward ", stage.backward_ms, " ms");
    GRADUS_CHECK("chain",
                 stage.output_bytes >= 0 && stage.forward_transient_bytes >= 0 &&
                     stage.saving_transient_bytes.value_or(0) >= 0 &&
                     stage.gradient_bytes.value_or(0) >= 0,
                 "sizes must be >= 0; got a negative one in stage ", i);
    GRADUS_CHECK("chain", stage.saved_bytes >= stage.output_bytes,
                 "saved_bytes must be >= output_bytes, which it includes; stage ", i, " has ",
                 stage.saved_bytes, " < ", stage.output_bytes);
    GRADUS_CHECK("chain", stage.backward_transient_bytes >= -made_gradient,
                 "backward_transient_bytes must be >= minus the gradient that backward makes; "
                 "stage ",
                 i, " has ", stage.backward_transient_bytes, " < -", made_gradient);
    made_gradient = stage.gradient_bytes.value_or(stage.output_bytes);
  }
}

}  // namespace internal

namespace {

constexpr std::string_view kKindNames[] = {"forward_drop", "forward_keep", "forward_save",
                                           "backward"};

// What is in memory; values are numbered as in the paper, 0 the chain's input.
class Machine {
 public:
  explicit Machine(const Chain& chain)
      : chain_(chain),
        held_(chain.stages.size() + 1),
        saved_(chain.stages.size() + 1),
        gradient_(static_cast<std::int64_t>(chain.stages.size())),
        live_(chain.input_bytes + gradient_bytes(gradient_)) {
    held_[0] = true;
  }

  void step(std::size_t position, const ChainOperation& operation, ChainRun& run) {
    const auto fail_unless = [&](bool condition, const char* requirement) {
      GRADUS_CHECK("chain", condition, "operation ", position, ", ",
                   kKindNames[static_cast<std::size_t>(operation.kind)], " of stage ",
                   operation.stage, ": ", requirement);
    };
    const std::int64_t value = operation.stage + 1;  // The value that the stage makes.
    fail_unless(operation.stage >= 0 && value < static_cast<std::int64_t>(held_.size()),
                "the stage must exist");
    fail_unless(held_[value - 1] || saved_[value - 1], "its input must be in memory");
    const ChainStage& stage = chain_.stages[operation.stage];
    std::int64_t peak = live_;
    if (operation.kind == ChainOperationKind::backward) {
      fail_unless(gradient_ == value, "the gradient of its output must be in memory");
      fail_unless(saved_[value], "its forward_save must have run");
      peak += gradient_bytes(value - 1) + stage.backward_transient_bytes;
      live_ += gradient_bytes(value - 1) - gradient_bytes(value) - stage.saved_bytes;
      saved_[value] = false;
      gradient_ = value - 1;
      if (held_[value - 1] && value > 1) drop(value - 1);
      run.time_ms += stage.backward_ms;
    } else {
      fail_unless(!held_[value] && !saved_[value], "its output must not be in memory already");
      run.time_ms += stage.forward_ms;
      if (operation.kind == ChainOperationKind::forward_save) {
        live_ += stage.saved_bytes;
        saved_[value] = true;
        peak = live_ + stage.saving_transient_bytes.value_or(stage.forward_transient_bytes);
      } else {
        live_ += stage.output_bytes;
        held_[value] = true;
        peak = live_ + stage.forward_transient_bytes;
        if (operation.kind == ChainOperationKind::forward_drop) {
          fail_unless(held_[value - 1], "an input that is part of a saved stage cannot be dropped");
          drop(value - 1);
        }
      }
    }
    run.operation_peak_bytes.push_back(peak);
    run.peak_bytes = std::max({run.peak_bytes, peak, live_});
  }

  std::int64_t gradient() const { return gradient_; }

 private:
  std::int64_t gradient_bytes(std::int64_t value) const {
    if (value == 0) return chain_.input_gradient_bytes;
    const ChainStage& stage = chain_.stages[value - 1];
    return stage.gradient_bytes.value_or(stage.output_bytes);
  }
  void drop(std::int64_t value) {
    held_[value] = false;
    live_ -= value == 0 ? chain_.input_bytes : chain_.stages[value - 1].output_bytes;
  }

  const Chain& chain_;
  std::vector<char> held_;
  std::vector<char> saved_;
  std::int64_t gradient_;
  std::int64_t live_;
};

}  // namespace

ChainRun simulate(const ChainSequence& sequence, const Chain& chain) {
  internal::check_chain(chain);
  ChainRun run;
  Machine machine(chain);
  for (std::size_t i = 0; i < sequence.size(); ++i) machine.step(i, sequence[i], run);
  GRADUS_CHECK("chain", machine.gradient() == 0,
               "the backward of every stage must run; that of stage ", machine.gradient() - 1,
               " did not");
  return run;
}

ChainSequence keep_everything(const Chain& chain) {
  const auto count = static_cast<std::int64_t>(chain.stages.size());
  ChainSequence sequence;
  for (std::int64_t i = 0; i < count; ++i)
    sequence.push_back({ChainOperationKind::forward_save, i});
  for (std::int64_t i = count; i-- > 0;) sequence.push_back({ChainOperationKind::backward, i});
  return sequence;
}

}  // namespace gradus::solve
