#include <gradus/persample/engine/internal/mixing.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <gradus/base/error.h>
#include <gradus/persample/engine/internal/culprits.h>

namespace gradus::persample::internal {

namespace {

// A parameter whose gradient is this small beside the whole gradient is compared with that.
constexpr double kNegligible = 1e-2;
// Examples tried one by one to name in a message the one that changes another.
constexpr std::int64_t kNamed = 64;

const std::string kCure =
    ". Per-sample gradients and private training need a model without BatchNorm in training, "
    "permutations of the batch, statistics over it, or a state that is kept between calls";

struct Change {
  std::int64_t example = -1;
  double by = 0;
};

// The example that keeps its values and whose loss changes most beyond rounding.
Change changed_of(const at::Tensor& before, const at::Tensor& after, const Replacement& replacement,
                  double rounding) {
  Change most;
  const at::Tensor sizes = before.abs().nan_to_num(0, 0, 0);
  const at::Tensor excess =
      ((after - before).abs() - rounding * (sizes + sizes.mean())).contiguous();
  const at::Tensor finite = before.isfinite().contiguous(), still = after.isfinite().contiguous();
  double worst = 0;
  for (std::size_t i = 0; i < replacement.size(); ++i) {
    if (replacement[i] != static_cast<std::int64_t>(i)) continue;
    const bool was = finite.const_data_ptr<bool>()[i], is = still.const_data_ptr<bool>()[i];
    if (!was && !is) continue;
    const double by = was != is ? HUGE_VAL : excess.const_data_ptr<double>()[i];
    if (by > worst) {
      worst = by;
      most.example = static_cast<std::int64_t>(i);
      most.by = (after - before).abs()[most.example].item<double>();
    }
  }
  return most;
}

}  // namespace

double norm_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
  return values.to(at::kDouble).norm().item<double>();
}

std::vector<at::Tensor> dense_gradients(const at::Tensor& sum,
                                        const std::vector<at::Tensor>& wanted) {
  std::vector<at::Tensor> gradients(wanted.size());
  if (sum.requires_grad()) {
    gradients = torch::autograd::grad({sum}, wanted, {}, /*retain_graph=*/false,
                                      /*create_graph=*/false, /*allow_unused=*/true);
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    at::Tensor& gradient = gradients[i];
    if (!gradient.defined()) gradient = at::zeros_like(wanted[i].detach());
    if (gradient.is_sparse()) gradient = gradient.to_dense();
  }
  return gradients;
}

MixingCheck::MixingCheck(LossFunction loss, const Batch& batch, const Precision& precision,
                         std::function<void(const std::string&)> log)
    : loss_(std::move(loss)),
      batch_(batch),
      precision_(precision),
      log_(std::move(log)),
      replacements_(batch) {}

at::Tensor MixingCheck::losses_of(const Batch& batch) {
  const auto run = [&] {
    const at::AutoGradMode mode(with_grad_);
    return loss_(batch).detach().to(c10::kCPU, at::kDouble).contiguous();
  };
  if (with_grad_) return run();
  try {
    return run();
  } catch (const c10::Error&) {
    with_grad_ = true;  // it differentiates itself; if it is broken, that shows again
  } catch (const UserError&) {
    with_grad_ = true;
  }
  return run();
}

bool MixingCheck::losses(const std::vector<Replacement>& replacements) {
  const at::Tensor before = losses_of(batch_);
  std::vector<bool> told(static_cast<std::size_t>(before.size(0)), false);
  for (const Replacement& replacement : replacements) {
    at::Tensor after;
    const auto untold = [&](const char* reason) {
      log_(
          base::join("the loss does not take examples replaced by others, so that mixing was not "
                     "looked for: ",
                     reason));
    };
    try {
      after = losses_of(examples_at(batch_, replacement));
    } catch (const c10::Error& error) {
      untold(error.what_without_backtrace());
      return false;
    } catch (const UserError& error) {
      untold(error.what());
      return false;
    }
    const double rounding = precision_.rounding();
    const Change change = changed_of(before, after, replacement, rounding);
    if (change.example >= 0) refuse(replacement, change.example, change.by);
    for (std::size_t i = 0; i < told.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      if (replacement[i] == at) continue;
      const double was = before[at].item<double>(), is = after[at].item<double>();
      if (std::abs(is - was) > rounding * std::abs(was)) told[i] = true;  // false for NaN
    }
  }
  return std::find(told.begin(), told.end(), false) == told.end();
}

void MixingCheck::refuse(const Replacement& replacement, std::int64_t example, double by) {
  // One example that alone changes it, if there is one: else it is several, or a state.
  const at::Tensor before = losses_of(batch_);
  std::int64_t tried = 0;
  std::string who = "changing other examples";
  std::string suspects;
  for (std::size_t i = 0; i < replacement.size() && tried < kNamed; ++i) {
    if (replacement[i] == static_cast<std::int64_t>(i)) continue;
    ++tried;
    const Replacement only = replacements_.only(static_cast<std::int64_t>(i));
    Batch changed = examples_at(batch_, only);
    const Change change = changed_of(before, losses_of(changed), only, precision_.rounding());
    if (change.example < 0) continue;
    who = base::join("changing example ", i);
    example = change.example;
    by = change.by;
    suspects = culprits([&] { losses_of(batch_); }, [&] { losses_of(changed); },
                        static_cast<std::int64_t>(replacement.size()));
    break;
  }
  throw UserError(base::join(
      "[persample] losses that depend on one example each are required; ", who,
      " changes the loss of example ", example, " by ", by,
      suspects.empty() ? "" : base::join("; operators that can mix them: ", suspects), kCure));
}

std::vector<at::Tensor> MixingCheck::sum_gradients(const Batch& batch, const at::Tensor& kept,
                                                   const std::vector<at::Tensor>& wanted) const {
  const at::AutoGradMode grad(true);
  const at::Tensor losses = loss_(batch);
  // where, not a product: a loss that is no number has no part in the sum.
  return dense_gradients(at::where(kept.to(losses.device()), losses, at::zeros_like(losses)).sum(),
                         wanted);
}

void MixingCheck::gradients(const std::vector<Replacement>& replacements,
                            const std::vector<NamedParameter>& parameters) {
  std::vector<at::Tensor> wanted;
  std::vector<std::string> names;
  for (const NamedParameter& each : parameters) {
    if (!each.tensor.requires_grad()) continue;
    wanted.push_back(each.tensor);
    names.push_back(each.name);
  }
  for (const Replacement& replacement : replacements) {
    std::vector<std::uint8_t> unchanged;
    for (std::size_t i = 0; i < replacement.size(); ++i) {
      unchanged.push_back(replacement[i] == static_cast<std::int64_t>(i) ? 1 : 0);
    }
    if (std::count(unchanged.begin(), unchanged.end(), 0) == 0) continue;
    const at::Tensor kept = at::tensor(unchanged, at::kByte).to(at::kBool);
    const std::vector<at::Tensor> before = sum_gradients(batch_, kept, wanted);
    std::vector<at::Tensor> after;
    try {
      after = sum_gradients(examples_at(batch_, replacement), kept, wanted);
    } catch (const c10::Error&) {
      return;  // as the forward pass said
    } catch (const UserError&) {
      return;
    }
    double total = 0;
    for (const at::Tensor& each : before) total = std::hypot(total, norm_of(each));
    if (!std::isfinite(total)) continue;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const double by = norm_of(after[i] - before[i]);
      const double scale = norm_of(before[i]) + kNegligible * total;
      if (!std::isfinite(by) || by <= precision_.rounding() * scale) continue;
      throw UserError(base::join(
          "[persample] gradients that depend on one example each are required; changing other "
          "examples changes the gradient of ",
          names[i], " by ", by, ", of ", norm_of(before[i]),
          ", where no loss changes: behind weights that are zero, or in the backward pass alone",
          kCure));
    }
  }
}

}  // namespace gradus::persample::internal
