#include <gradus/models/tabular_classifier.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <gradus/models/internal/layers.h>

namespace gradus::models {

namespace {

std::int64_t total_ids(const TabularClassifierOptions& options) {
  return std::accumulate(options.id_counts.begin(), options.id_counts.end(), std::int64_t{0});
}

// Input, hidden and output widths of the linear layers.
std::vector<std::int64_t> widths_of(const TabularClassifierOptions& options) {
  const auto columns = static_cast<std::int64_t>(options.id_counts.size());
  std::vector<std::int64_t> widths{options.features + columns * options.embedding};
  widths.insert(widths.end(), options.hidden.begin(), options.hidden.end());
  widths.push_back(options.classes);
  return widths;
}

}  // namespace

std::string defect(const TabularClassifierOptions& options) {
  if (options.features < 0)
    return "features must be at least 0; got " + std::to_string(options.features);
  if (options.features == 0 && options.id_counts.empty())
    return "a row needs columns; got no features and no id_counts";
  std::string problem =
      internal::count_defect({{"embedding", options.embedding}, {"classes", options.classes}});
  for (const std::int64_t count : options.id_counts) {
    if (problem.empty()) problem = internal::count_defect({{"each of id_counts", count}});
  }
  for (const std::int64_t width : options.hidden) {
    if (problem.empty()) problem = internal::count_defect({{"each hidden width", width}});
  }
  return problem.empty() ? defect(options.activation) : problem;
}

std::int64_t parameter_count(const TabularClassifierOptions& options) {
  const std::vector<std::int64_t> widths = widths_of(options);
  std::int64_t count = total_ids(options) * options.embedding;
  for (std::size_t i = 0; i + 1 < widths.size(); ++i) count += (widths[i] + 1) * widths[i + 1];
  return count;
}

TabularClassifierImpl::TabularClassifierImpl(TabularClassifierOptions options)
    : options_(std::move(options)) {
  internal::check("tabular_classifier", options_);
  TabularClassifierImpl::reset();
}

void TabularClassifierImpl::reset() {
  if (!options_.id_counts.empty()) {
    embedding = register_module("embedding",
                                internal::make_embedding(total_ids(options_), options_.embedding));
    first_rows_ = at::empty({static_cast<std::int64_t>(options_.id_counts.size())}, at::kLong);
    std::exclusive_scan(options_.id_counts.begin(), options_.id_counts.end(),
                        first_rows_.mutable_data_ptr<std::int64_t>(), std::int64_t{0});
  }
  layers_ = register_module("layers", std::make_shared<torch::nn::ModuleListImpl>());
  const std::vector<std::int64_t> widths = widths_of(options_);
  for (std::size_t i = 0; i + 1 < widths.size(); ++i)
    layers_->push_back(internal::make_linear(widths[i], widths[i + 1]));
  reset_parameters();
}

std::vector<std::shared_ptr<torch::nn::LinearImpl>> TabularClassifierImpl::layers() const {
  std::vector<std::shared_ptr<torch::nn::LinearImpl>> result;
  for (const auto& layer : *layers_)
    result.push_back(std::dynamic_pointer_cast<torch::nn::LinearImpl>(layer));
  return result;
}

void TabularClassifierImpl::reset_parameters(const std::optional<at::Generator>& generator) {
  const at::NoGradGuard no_grad;
  if (embedding) embedding->weight.normal_(0.0, 1.0, generator);
  for (const auto& layer : layers()) internal::draw_uniform(*layer, generator);
}

at::Tensor TabularClassifierImpl::forward(const at::Tensor& features_BF, const at::Tensor& ids_BD) {
  TORCH_CHECK_VALUE(features_BF.dim() == 2 && features_BF.size(1) == options_.features,
                    "[tabular_classifier] features must have shape [batch, ", options_.features,
                    "]; got ", features_BF.sizes());
  at::Tensor x = features_BF;
  if (embedding) {
    const auto columns = static_cast<std::int64_t>(options_.id_counts.size());
    TORCH_CHECK_VALUE(ids_BD.defined(), "[tabular_classifier] ids must be int64 [", x.size(0), ", ",
                      columns, "]; got none");
    TORCH_CHECK_VALUE(ids_BD.scalar_type() == at::kLong && ids_BD.dim() == 2 &&
                          ids_BD.size(0) == x.size(0) && ids_BD.size(1) == columns,
                      "[tabular_classifier] ids must be int64 [", x.size(0), ", ", columns,
                      "]; got ", ids_BD.scalar_type(), " ", ids_BD.sizes());
    const at::Tensor rows = ids_BD + first_rows_.to(ids_BD.device());
    x = at::cat({x, embedding->forward(rows).flatten(1)}, 1);
  }
  const auto list = layers();
  for (std::size_t i = 0; i + 1 < list.size(); ++i)
    x = activate(list[i]->forward(x), options_.activation);
  return list.back()->forward(x);
}

}  // namespace gradus::models
