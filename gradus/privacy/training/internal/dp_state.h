#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/nn/module.h>

#include <gradus/privacy/training/dp_optimizer.h>
#include <gradus/privacy/training/internal/buffer_watch.h>
#include <gradus/privacy/training/internal/logical_batch.h>
#include <gradus/privacy/training/internal/state_codec.h>

namespace gradus::privacy {

/// What a DPOptimizer holds. Its parts stand in files of their own: which tensors belong together
/// (dp_optimizer.cpp), accumulation (accumulation.cpp), release (release.cpp), training state
/// (dp_state.cpp).
class DPOptimizer::State {
 public:
  State(optim::Optimizer& optimizer, std::shared_ptr<torch::nn::Module> model,
        std::shared_ptr<Accountant> accountant, DPOptimizerOptions options);

  at::Tensor accumulate(const LossFunction& loss, const Batch& batch);
  void accumulate(const at::Tensor& losses);
  DPStep step(bool empty);
  void zero_grad() {
    drop();
    optimizer_.zero_grad();
  }
  void save(internal::StateWriter& write) const;
  void load(internal::StateReader& read);

  optim::Optimizer& optimizer_;
  std::shared_ptr<torch::nn::Module> model_;
  std::shared_ptr<Accountant> accountant_;
  DPOptimizerOptions options_;
  persample::SampleGradients table_;
  Clipper clipper_;
  NoiseGenerator noise_;
  std::vector<at::Tensor> targets_;
  std::int64_t steps_ = 0;
  at::Tensor last_norms_ = at::empty({0}, at::kDouble);
  internal::LogicalBatch pending_;

 private:
  using LogicalBatch = internal::LogicalBatch;

  // dp_optimizer.cpp
  void match_targets();
  void check_targets() const;
  void check_noise(double deviation) const;
  void set_live();
  double scale_thresholds();
  double scheduled_noise() const;
  void watch_buffers() {
    if (!options_.allow_buffer_updates) buffers_.take(*model_);
  }
  void drop() {
    pending_ = LogicalBatch{};
    table_.clear();  // holds something only after an exception
  }

  // accumulation.cpp
  at::Tensor contribute(const LossFunction& loss, const Batch& batch, LogicalBatch& contribution);
  void contribute_doubtful(const LossFunction& loss, const Batch& batch,
                           const std::vector<std::int64_t>& rows,
                           const std::vector<std::int64_t>& places, const at::Tensor& all_norms,
                           LogicalBatch& contribution);
  std::vector<at::Tensor> group_norms() const;
  at::Tensor norms_of(const std::vector<at::Tensor>& groups) const;
  std::vector<at::Tensor> exact_group_norms(const at::Tensor& rows);
  std::vector<std::int64_t> doubtful_rows(const std::vector<at::Tensor>& norms) const;
  std::vector<at::Tensor> sums(const ClipWeights& weights);
  std::vector<at::Tensor> finite_sums(const ClipWeights& weights);
  void count(const ClipWeights& weights, LogicalBatch& into) const;

  // release.cpp
  void complete_sums();
  void release(DPStep& done);

  // dp_state.cpp
  at::Tensor layers_entry() const;

  internal::BufferWatch buffers_;
  bool run_agreed_ = false;  // all ranks count their steps as one run
};

namespace internal {

/// Sums are as wide as SampleGradients gives them.
inline at::ScalarType sum_dtype(const at::Tensor& parameter) {
  return parameter.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace internal
}  // namespace gradus::privacy
