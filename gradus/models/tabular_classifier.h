#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/pimpl.h>

#include <gradus/models/activation.h>

namespace torch::nn {
class EmbeddingImpl;
class LinearImpl;
class ModuleListImpl;
}  // namespace torch::nn

namespace gradus::models {

// Shapes: B batch, F features, D columns of ids, K classes.

/// What a classifier of table rows is made of.
struct TabularClassifierOptions {
  std::int64_t features = 0;                 ///< F, columns of numbers. >= 0.
  std::vector<std::int64_t> id_counts = {};  ///< Ids of each of D columns, each >= 1.
  std::int64_t embedding = 8;                ///< Width of an id's vector. >= 1.
  std::vector<std::int64_t> hidden = {64};   ///< Widths of the hidden layers, each >= 1.
  std::int64_t classes = 2;                  ///< K. >= 1.
  ActivationOptions activation = {};         ///< After each hidden layer.
};

/// Says what makes @p options impossible ("classes must be at least 1; got 0"), or "" if nothing
/// does.
std::string defect(const TabularClassifierOptions& options);

/// Number of values in all parameters.
std::int64_t parameter_count(const TabularClassifierOptions& options);

/// Linear layers over the numbers of a row and the vectors of its ids.
///
/// An ordinary torch::nn module. Its state names are embedding.weight, if there are columns of ids
/// (one table: the rows of column d follow those of the columns before it), and layers.N.{weight,
/// bias}, the last of which gives the logits.
class TabularClassifierImpl : public torch::nn::Cloneable<TabularClassifierImpl> {
 public:
  /// Builds the modules, then draws the weights from the default generator as reset_parameters()
  /// says (the modules' own initialisation draws from it before that).
  /// @throws c10::ValueError with the text of defect() if @p options are impossible.
  explicit TabularClassifierImpl(TabularClassifierOptions options);
  void reset() override;

  /// Draws the embedding from N(0, 1), then each layer's weight and its bias from
  /// U(-1/sqrt(inputs), 1/sqrt(inputs)), first layer first.
  /// @param generator  Where the numbers come from; the default generator if not given.
  void reset_parameters(const std::optional<at::Generator>& generator = std::nullopt);

  /// Logits: numbers [B, F] and ids int64 [B, D], column d in [0, id_counts[d]) -> [B, K]. B may be
  /// 0; ids may be left out if D is 0.
  /// @throws c10::ValueError for other shapes. The values of ids are not checked: one outside its
  ///   column reads another column's row, or is LibTorch's index error.
  at::Tensor forward(const at::Tensor& features_BF, const at::Tensor& ids_BD = {});

  const TabularClassifierOptions& options() const { return options_; }
  /// The linear layers in order.
  std::vector<std::shared_ptr<torch::nn::LinearImpl>> layers() const;

  std::shared_ptr<torch::nn::EmbeddingImpl> embedding;  ///< Null without columns of ids.

 private:
  TabularClassifierOptions options_;
  std::shared_ptr<torch::nn::ModuleListImpl> layers_;
  at::Tensor first_rows_;  // int64 [D], on the CPU
};
TORCH_MODULE(TabularClassifier);

}  // namespace gradus::models
