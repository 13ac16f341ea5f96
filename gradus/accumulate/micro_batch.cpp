#include <gradus/accumulate/micro_batch.h>

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/rng.h>

namespace gradus::accumulate {
namespace {

// Puts a model's gradients and buffers back, and meanwhile has no gradients.
class ModelState {
 public:
  explicit ModelState(const torch::nn::Module& module) {
    const base::ArenaScope host(base::Arena::host);
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : module.parameters()) {
      gradients_.emplace_back(parameter, parameter.grad());
      parameter.mutable_grad().reset();
    }
    for (const at::Tensor& buffer : module.buffers()) {
      if (buffer.defined()) buffers_.emplace_back(buffer, buffer.detach().clone());
    }
  }
  ~ModelState() {
    for (auto& [parameter, gradient] : gradients_) parameter.mutable_grad() = std::move(gradient);
    restore_buffers();
  }
  ModelState(const ModelState&) = delete;
  ModelState& operator=(const ModelState&) = delete;

  void restore_buffers() const {
    const at::NoGradGuard no_grad;
    for (const auto& [buffer, value] : buffers_) buffer.copy_(value);
  }
  void drop_gradients() const {
    for (const auto& entry : gradients_) entry.first.mutable_grad().reset();
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_, buffers_;
};

class Search {
 public:
  Search(const torch::nn::Module& module, const std::function<at::Tensor(std::int64_t)>& loss_of,
         const MicroBatchOptions& options)
      : loss_of_(loss_of), options_(options), state_(module) {}

  MicroBatchSearch run() {
    const std::int64_t before = tracker_.live().total();
    warm_up();
    std::int64_t fits = 0, refused = options_.largest + 1;
    for (std::int64_t size = 1; size < refused;) {
      if (!attempt(size)) {
        refused = size;
        break;
      }
      fits = size;
      size = std::min(size * 2, options_.largest);
      if (fits == options_.largest) break;
    }
    if (fits == 0) refuse_one();
    while (refused - fits > 1) {
      const std::int64_t middle = fits + (refused - fits) / 2;
      (attempt(middle) ? fits : refused) = middle;
    }
    result_.size = fits;
    for (const MicroBatchTry& made : result_.tries) {
      if (made.size == fits) result_.peak_bytes = made.peak_bytes;
    }
    result_.retained_bytes = tracker_.live().total() - before;
    return std::move(result_);
  }

 private:
  void release() const {
    state_.drop_gradients();
    state_.restore_buffers();
  }

  void pass(std::int64_t size) const {
    const at::Tensor loss = loss_of_(size);
    GRADUS_CHECK("micro_batch", loss.defined() && loss.dim() == 0 && loss.requires_grad(),
                 "loss_of must return a scalar that requires a gradient");
    loss.backward();
  }

  // Forward and backward, twice. Releases all that it made, on failure too.
  void two_passes(std::int64_t size) const {
    const base::RngGuard rng;
    try {
      pass(size);
      pass(size);
    } catch (...) {
      release();
      throw;
    }
    release();
  }

  // Caches that first use makes are not of the smallest try alone.
  void warm_up() const {
    try {
      two_passes(1);
    } catch (const MemoryLimitError&) {  // Said by the first try.
    }
  }

  bool attempt(std::int64_t size) {
    tracker_.reset_peak();
    try {
      two_passes(size);
      result_.tries.push_back({size, true, tracker_.peak().total()});
      return true;
    } catch (const MemoryLimitError& error) {
      result_.tries.push_back({size, false, error.live_bytes + error.requested_bytes});
      return false;
    }
  }

  [[noreturn]] void refuse_one() {
    const base::MemoryLimit none({});
    tracker_.reset_peak();
    two_passes(1);
    const std::int64_t needed = tracker_.peak().total();
    throw UserError(
        base::join("[micro_batch] a micro-batch of one example must fit; it needs ",
                   base::format_bytes(needed), " (", needed, " bytes, ",
                   base::format_bytes(options_.reserve_bytes), " of them reserved)",
                   options_.limit_bytes
                       ? base::join(" and the limit is ", base::format_bytes(*options_.limit_bytes))
                       : std::string(" and the memory limit in force is lower"),
                   ". Recompute, offload or compress activations, or raise the limit"));
  }

  base::MemoryTracker& tracker_ = base::MemoryTracker::install();
  const std::function<at::Tensor(std::int64_t)>& loss_of_;
  const MicroBatchOptions& options_;
  ModelState state_;
  MicroBatchSearch result_;
};

}  // namespace

MicroBatchSearch find_micro_batch(torch::nn::Module& module,
                                  const std::function<at::Tensor(std::int64_t)>& loss_of,
                                  const MicroBatchOptions& options) {
  GRADUS_CHECK("micro_batch", options.largest >= 1,
               "largest must be >= 1, the effective batch above all; got ", options.largest);
  GRADUS_CHECK("micro_batch", !options.limit_bytes || *options.limit_bytes > 0,
               "limit_bytes must be > 0; got ", options.limit_bytes.value_or(0));
  GRADUS_CHECK("micro_batch", options.reserve_bytes >= 0, "reserve_bytes must be >= 0; got ",
               options.reserve_bytes);
  for (const at::Tensor& parameter : module.parameters()) {
    GRADUS_CHECK("micro_batch", parameter.device().is_cpu(),
                 "memory is limited on the CPU's arena only; the model has a parameter on ",
                 parameter.device().str());
  }
  base::MemoryTracker::install();
  const at::AutoGradMode grad(true);
  // Never written, so that the reserve takes address space only. Made before the limit is: a
  // reserve beyond it is told with the bytes needed.
  std::optional<base::MemoryLimit> none;
  none.emplace(base::MemoryLimitOptions{});
  const at::Tensor reserve = at::empty({options.reserve_bytes}, at::kByte);
  none.reset();
  std::optional<base::MemoryLimit> limit;
  if (options.limit_bytes)
    limit.emplace(base::MemoryLimitOptions{.device_bytes = *options.limit_bytes});
  return Search(module, loss_of, options).run();
}

std::string describe(const MicroBatchSearch& search) {
  std::string sizes;
  for (const MicroBatchTry& made : search.tries) {
    sizes += base::join(sizes.empty() ? "" : ", ", made.size, made.fits ? "" : " refused");
  }
  return base::join("micro-batch ", search.size, ": peak ", base::format_bytes(search.peak_bytes),
                    "; tried ", sizes);
}

}  // namespace gradus::accumulate
