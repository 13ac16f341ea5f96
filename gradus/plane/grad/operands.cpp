#include <gradus/plane/grad/operands.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_map>

#include <ATen/ops/rsqrt.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <gradus/plane/grad/internal/access.h>
#include <gradus/plane/grad/saved_numbers.h>

namespace gradus::plane::grad {

namespace generated = torch::autograd::generated;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

namespace {

template <typename Kind>
Kind* as(const NodeView& view) {
  return view.defined() ? dynamic_cast<Kind*>(&Access::node(view)) : nullptr;
}

// What an operator saved of its inputs.
at::Tensor read(const SavedVariable& saved) { return saved.unpack(); }

// What an operator saved of its own outputs, which needs the node to be complete.
template <typename Kind>
at::Tensor read_output(Kind* node, const SavedVariable& saved) {
  return saved.unpack(node->getptr());
}

template <typename Kind>
std::vector<std::int64_t> integers(const Kind& values) {
  std::vector<std::int64_t> result;
  for (const auto& value : values) result.push_back(value.expect_int());
  return result;
}

}  // namespace

std::optional<Product> as_product(const NodeView& node) {
  Product product{.node = node};
  if (as<generated::MmBackward0>(node) != nullptr || as<generated::BmmBackward0>(node) != nullptr) {
    return product;
  }
  if (as<generated::MvBackward0>(node) != nullptr) {
    product.vector = true;
    return product;
  }
  const auto summed = [&](const auto& found) {
    product.added = 0;
    product.left = 1;
    product.right = 2;
    product.alpha = found.alpha.toDouble();
    product.beta = found.beta.toDouble();
  };
  if (const auto* const addmm = as<generated::AddmmBackward0>(node)) {
    summed(*addmm);
    return product;
  }
  if (const auto* const baddbmm = as<generated::BaddbmmBackward0>(node)) {
    summed(*baddbmm);
    return product;
  }
  return std::nullopt;
}

at::Tensor Product::left_value() const {
  if (const auto* const mm = as<generated::MmBackward0>(node)) return read(mm->self_);
  if (const auto* const bmm = as<generated::BmmBackward0>(node)) return read(bmm->self_);
  if (const auto* const mv = as<generated::MvBackward0>(node)) return read(mv->self_);
  if (const auto* const addmm = as<generated::AddmmBackward0>(node)) return read(addmm->mat1_);
  if (const auto* const baddbmm = as<generated::BaddbmmBackward0>(node)) {
    return read(baddbmm->batch1_);
  }
  return {};
}

at::Tensor Product::right_value() const {
  if (const auto* const mm = as<generated::MmBackward0>(node)) return read(mm->mat2_);
  if (const auto* const bmm = as<generated::BmmBackward0>(node)) return read(bmm->mat2_);
  if (const auto* const mv = as<generated::MvBackward0>(node)) return read(mv->vec_);
  if (const auto* const addmm = as<generated::AddmmBackward0>(node)) return read(addmm->mat2_);
  if (const auto* const baddbmm = as<generated::BaddbmmBackward0>(node)) {
    return read(baddbmm->batch2_);
  }
  return {};
}

std::optional<Convolution> as_convolution(const NodeView& node) {
  const auto* const found = as<generated::ConvolutionBackward0>(node);
  if (found == nullptr) return std::nullopt;
  return Convolution{.node = node,
                     .stride = integers(found->stride),
                     .padding = integers(found->padding),
                     .dilation = integers(found->dilation),
                     .output_padding = integers(found->output_padding),
                     .groups = found->groups.expect_int(),
                     .transposed = found->transposed};
}

at::Tensor Convolution::input() const {
  return read(as<generated::ConvolutionBackward0>(node)->input_);
}

at::Tensor Convolution::weight() const {
  return read(as<generated::ConvolutionBackward0>(node)->weight_);
}

std::optional<Normalisation> as_normalisation(const NodeView& node) {
  using Kind = Normalisation::Kind;
  if (const auto* const layer = as<generated::NativeLayerNormBackward0>(node)) {
    return Normalisation{.node = node,
                         .kind = Kind::layer,
                         .bias = 2,
                         .normalised_dims = layer->normalized_shape.size()};
  }
  if (const auto* const group = as<generated::NativeGroupNormBackward0>(node)) {
    return Normalisation{.node = node, .kind = Kind::group, .bias = 2, .groups = group->group};
  }
  if (const auto* const batch = as<generated::NativeBatchNormBackward0>(node)) {
    return Normalisation{.node = node, .kind = Kind::batch, .bias = 2, .training = batch->training};
  }
  if (const auto* const rms = as<generated::FusedRmsNormBackward0>(node)) {
    return Normalisation{
        .node = node, .kind = Kind::rms, .normalised_dims = rms->normalized_shape.size()};
  }
  return std::nullopt;
}

at::Tensor Normalisation::normalised_input() const {
  if (auto* const layer = as<generated::NativeLayerNormBackward0>(node)) {
    return (read(layer->input_) - read_output(layer, layer->result1_))
        .mul_(read_output(layer, layer->result2_));
  }
  if (auto* const found = as<generated::NativeGroupNormBackward0>(node)) {
    const at::Tensor input = read(found->input_);
    const std::int64_t examples = found->N.expect_int();
    const at::Tensor mean = read_output(found, found->result1_).view({examples, groups, 1});
    const at::Tensor rstd = read_output(found, found->result2_).view({examples, groups, 1});
    return (input.reshape({examples, groups, -1}) - mean).mul_(rstd).view(input.sizes());
  }
  if (auto* const found = as<generated::NativeBatchNormBackward0>(node)) {
    const at::Tensor input = read(found->input_);
    std::vector<std::int64_t> channels(static_cast<std::size_t>(input.dim()), 1);
    channels[1] = input.size(1);
    if (training) {
      return (input - read_output(found, found->result1_).view(channels)) *
             read_output(found, found->result2_).view(channels);
    }
    return (input - read(found->running_mean_).view(channels)) *
           at::rsqrt(read(found->running_var_) + found->eps).view(channels);
  }
  if (auto* const rms = as<generated::FusedRmsNormBackward0>(node)) {
    return read(rms->input_) * read_output(rms, rms->result1_);
  }
  return {};
}

at::Tensor Normalisation::input() const {
  if (auto* const found = as<generated::NativeGroupNormBackward0>(node)) return read(found->input_);
  return {};
}

at::Tensor Normalisation::mean() const {
  if (auto* const found = as<generated::NativeGroupNormBackward0>(node)) {
    return read_output(found, found->result1_);
  }
  return {};
}

at::Tensor Normalisation::inverse_deviation() const {
  if (auto* const found = as<generated::NativeGroupNormBackward0>(node)) {
    return read_output(found, found->result2_);
  }
  return {};
}

std::optional<Embedding> as_embedding(const NodeView& node) {
  const auto* const found = as<generated::EmbeddingBackward0>(node);
  if (found == nullptr) return std::nullopt;
  return Embedding{.node = node,
                   .rows = found->weight_sym_argsize_0.expect_int(),
                   .padding_index = found->padding_idx.expect_int(),
                   .scale_by_frequency = found->scale_grad_by_freq};
}

at::Tensor Embedding::indices() const {
  return read(as<generated::EmbeddingBackward0>(node)->indices_);
}

std::optional<EmbeddingBag> as_embedding_bag(const NodeView& node) {
  const auto* const found = as<generated::EmbeddingBagBackward0>(node);
  if (found == nullptr) return std::nullopt;
  return EmbeddingBag{.node = node,
                      .mode = static_cast<EmbeddingBag::Mode>(found->mode),
                      .rows = found->weight_sym_argsize_0.expect_int(),
                      .padding_index = found->padding_idx,
                      .scale_by_frequency = found->scale_grad_by_freq};
}

at::Tensor EmbeddingBag::indices() const {
  return read(as<generated::EmbeddingBagBackward0>(node)->indices_);
}
at::Tensor EmbeddingBag::offsets() const {
  return read(as<generated::EmbeddingBagBackward0>(node)->offsets_);
}
at::Tensor EmbeddingBag::offset_to_bag() const {
  auto* const found = as<generated::EmbeddingBagBackward0>(node);
  return read_output(found, found->result1_);
}
at::Tensor EmbeddingBag::bag_sizes() const {
  auto* const found = as<generated::EmbeddingBagBackward0>(node);
  return read_output(found, found->result2_);
}
at::Tensor EmbeddingBag::max_indices() const {
  auto* const found = as<generated::EmbeddingBagBackward0>(node);
  return read_output(found, found->result3_);
}
at::Tensor EmbeddingBag::index_weights() const {
  return read(as<generated::EmbeddingBagBackward0>(node)->per_sample_weights_);
}

std::optional<RecurrentLayer> as_recurrent_layer(const NodeView& node) {
  const auto* const found = as<generated::MkldnnRnnLayerBackward0>(node);
  if (found == nullptr) return std::nullopt;
  return RecurrentLayer{.node = node,
                        .mode = static_cast<RecurrentLayer::Mode>(found->mode),
                        .reverse = found->reverse,
                        .has_biases = found->has_biases,
                        .batch_first = found->batch_first,
                        .batch_sizes = found->batch_sizes};
}

at::Tensor RecurrentLayer::input() const {
  return read(as<generated::MkldnnRnnLayerBackward0>(node)->input_);
}
at::Tensor RecurrentLayer::input_weight() const {
  return read(as<generated::MkldnnRnnLayerBackward0>(node)->weight0_);
}
at::Tensor RecurrentLayer::hidden_weight() const {
  return read(as<generated::MkldnnRnnLayerBackward0>(node)->weight1_);
}
at::Tensor RecurrentLayer::input_bias() const {
  return read(as<generated::MkldnnRnnLayerBackward0>(node)->weight2_);
}
at::Tensor RecurrentLayer::hidden_bias() const {
  return read(as<generated::MkldnnRnnLayerBackward0>(node)->weight3_);
}
at::Tensor RecurrentLayer::initial_hidden() const {
  return read(as<generated::MkldnnRnnLayerBackward0>(node)->hx__);
}
at::Tensor RecurrentLayer::initial_cell() const {
  return read(as<generated::MkldnnRnnLayerBackward0>(node)->cx__);
}
at::Tensor RecurrentLayer::output() const {
  auto* const found = as<generated::MkldnnRnnLayerBackward0>(node);
  return read_output(found, found->result0_);
}
void RecurrentLayer::release(bool runs) const {
  auto* const found = as<generated::MkldnnRnnLayerBackward0>(node);
  if (!runs) return found->release_variables();
  // What went through hooks may be elsewhere, or on its way there at this moment.
  if (found->result3_.has_hooks()) return;
  // Not the saved variable: the node unpacks it, whatever gradients it gets. Two hold its bytes
  // where nobody else does: the node and this.
  constexpr std::size_t kOwnHolders = 2;
  const at::Tensor workspace = read_output(found, found->result3_);
  if (workspace.defined() && workspace.storage().use_count() <= kOwnHolders) {
    workspace.storage().unsafeGetStorageImpl()->reset();
  }
}

std::optional<Elementwise> as_elementwise(const NodeView& node) {
  using Kind = Elementwise::Kind;
  if (const auto* const add = as<generated::AddBackward0>(node)) {
    return Elementwise{.node = node, .kind = Kind::add, .scale = {1, add->alpha.toDouble()}};
  }
  if (const auto* const sub = as<generated::SubBackward0>(node)) {
    return Elementwise{.node = node, .kind = Kind::add, .scale = {1, -sub->alpha.toDouble()}};
  }
  if (const auto* const rsub = as<generated::RsubBackward0>(node)) {
    return Elementwise{.node = node, .kind = Kind::add, .scale = {-rsub->alpha.toDouble(), 1}};
  }
  if (as<generated::ExpandBackward0>(node) != nullptr) {
    return Elementwise{.node = node, .kind = Kind::expand};
  }
  if (as<generated::MulBackward0>(node) != nullptr) {
    return Elementwise{.node = node, .kind = Kind::multiply};
  }
  if (as<generated::DivBackward0>(node) != nullptr) {
    return Elementwise{.node = node, .kind = Kind::divide};
  }
  if (as<generated::PreluKernelBackward0>(node) != nullptr) {
    return Elementwise{.node = node, .kind = Kind::prelu};
  }
  return std::nullopt;
}

at::Tensor Elementwise::operand(std::size_t edge) const {
  if (const auto* const mul = as<generated::MulBackward0>(node)) {
    return read(edge == 0 ? mul->self_ : mul->other_);
  }
  if (const auto* const div = as<generated::DivBackward0>(node)) {
    return read(edge == 0 ? div->self_ : div->other_);
  }
  if (const auto* const prelu = as<generated::PreluKernelBackward0>(node)) {
    return read(edge == 0 ? prelu->self_ : prelu->weight_);
  }
  return {};
}

std::optional<Rearrangement> as_rearrangement(const NodeView& node) {
  if (as<generated::TBackward0>(node) != nullptr) return Rearrangement{.transposes_matrix = true};
  if (const auto* const transpose = as<generated::TransposeBackward0>(node)) {
    const bool matrix = node.sizes(0).size() == 2 && transpose->dim0 != transpose->dim1;
    return Rearrangement{.transposes_matrix = matrix};
  }
  if (as<generated::ToCopyBackward0>(node) != nullptr ||
      as<generated::AliasBackward0>(node) != nullptr ||
      as<generated::CloneBackward0>(node) != nullptr) {
    return Rearrangement{.keeps_shape = true};
  }
  if (as<generated::PermuteBackward0>(node) != nullptr) return Rearrangement{};
  if (as<generated::ViewBackward0>(node) != nullptr ||
      as<generated::UnsafeViewBackward0>(node) != nullptr ||
      as<generated::ReshapeAliasBackward0>(node) != nullptr ||
      as<generated::SqueezeBackward0>(node) != nullptr ||
      as<generated::SqueezeBackward1>(node) != nullptr ||
      as<generated::UnsqueezeBackward0>(node) != nullptr) {
    return Rearrangement{.keeps_order = true};
  }
  return std::nullopt;
}

namespace {

// What kind of choice an operator makes.
enum class Chooses : std::uint8_t {
  along_dim,      // by an index that it was given, along the dimension that it saved
  own_along_dim,  // by its operand's own values
  along_plane,    // along the last two or three dimensions, by a grid or indices
  own_along_plane,
  rows,       // of a table
  positions,  // by one index for each of some dimensions
  contraction,
  anywhere,
  own_anywhere,
};

// By the operator, in the name of its node what comes before "Backward".
const std::unordered_map<std::string_view, Chooses>& choosers() {
  static const std::unordered_map<std::string_view, Chooses> table{
      {"Gather", Chooses::along_dim},
      {"IndexSelect", Chooses::along_dim},
      {"IndexAdd", Chooses::along_dim},
      {"IndexCopy", Chooses::along_dim},
      {"IndexFill", Chooses::along_dim},
      {"IndexReduce", Chooses::along_dim},
      {"Scatter", Chooses::along_dim},
      {"ScatterAdd", Chooses::along_dim},
      {"ScatterReduce", Chooses::along_dim},
      {"SegmentReduce", Chooses::along_dim},
      {"Sort", Chooses::own_along_dim},
      {"Topk", Chooses::own_along_dim},
      {"Kthvalue", Chooses::own_along_dim},
      {"Mode", Chooses::own_along_dim},
      {"Median", Chooses::own_along_dim},
      {"Nanmedian", Chooses::own_along_dim},
      {"Max", Chooses::own_along_dim},
      {"Min", Chooses::own_along_dim},
      {"Amax", Chooses::own_along_dim},
      {"Amin", Chooses::own_along_dim},
      {"Aminmax", Chooses::own_along_dim},
      {"Cummax", Chooses::own_along_dim},
      {"Cummin", Chooses::own_along_dim},
      {"MaxPool2D", Chooses::own_along_plane},
      {"MaxPool2DWithIndices", Chooses::own_along_plane},
      {"MaxPool3DWithIndices", Chooses::own_along_plane},
      {"AdaptiveMaxPool2D", Chooses::own_along_plane},
      {"AdaptiveMaxPool3D", Chooses::own_along_plane},
      {"FractionalMaxPool2D", Chooses::along_plane},
      {"FractionalMaxPool3D", Chooses::along_plane},
      {"MaxUnpool2D", Chooses::along_plane},
      {"MaxUnpool3D", Chooses::along_plane},
      {"GridSampler2D", Chooses::along_plane},
      {"GridSampler3D", Chooses::along_plane},
      {"Embedding", Chooses::rows},
      {"EmbeddingBag", Chooses::rows},
      {"Index", Chooses::positions},
      {"UnsafeIndex", Chooses::positions},
      {"Mm", Chooses::contraction},
      {"Addmm", Chooses::contraction},
      {"Bmm", Chooses::contraction},
      {"Baddbmm", Chooses::contraction},
      {"Addbmm", Chooses::contraction},
      {"Mv", Chooses::contraction},
      {"Addmv", Chooses::contraction},
      {"Dot", Chooses::contraction},
      {"Vdot", Chooses::contraction},
      {"Take", Chooses::anywhere},
      {"Put", Chooses::anywhere},
      {"IndexPut", Chooses::anywhere},
      {"UnsafeIndexPut", Chooses::anywhere},
      {"IndexPutImpl", Chooses::anywhere},
      {"UnsafeMaskedIndex", Chooses::anywhere},
      {"UnsafeMaskedIndexPutAccumulate", Chooses::anywhere},
      {"MaskedSelect", Chooses::anywhere},
      {"MaskedScatter", Chooses::anywhere},
      {"PackPaddedSequence", Chooses::anywhere},
      {"EmbeddingDense", Chooses::anywhere},
      {"MkldnnRnnLayer", Chooses::own_anywhere},  // if packed
  };
  return table;
}

// Dimensions that have an index; nullopt if that cannot be told.
template <typename Kind>
std::optional<std::vector<std::int64_t>> indexed_dims(const Kind& node) {
  std::vector<std::int64_t> dims;
  for (std::size_t i = 0; i < node.indices_.size(); ++i) {
    const std::optional<at::Tensor> index = node.indices_[i].get_raw_data();
    if (index && !index->defined()) continue;
    // A mask stands for several dimensions.
    if (!index || index->scalar_type() == at::kBool || index->scalar_type() == at::kByte) {
      return std::nullopt;
    }
    dims.push_back(static_cast<std::int64_t>(i));
  }
  return dims;
}

}  // namespace

std::optional<Choice> as_choice(const NodeView& node, std::size_t edge) {
  const std::string name = node.name();
  const std::string_view operation = std::string_view(name).substr(0, name.find("Backward"));
  const auto along = [](std::initializer_list<std::int64_t> dims, bool by_saved) {
    return Choice{.by_saved = by_saved, .dims = std::vector<std::int64_t>(dims)};
  };
  const auto found = choosers().find(operation);
  if (found == choosers().end()) {
    const auto has = [&](std::string_view part) { return name.find(part) != std::string::npos; };
    if (has("ScaledDotProduct") || has("AttentionBackward")) return along({-2}, true);
    if (has("CppNode") || has("PyNode") || operation.starts_with("Sparse") ||
        operation.starts_with("Nested") || operation.starts_with("Unique")) {
      return Choice{.by_saved = true};
    }
    return std::nullopt;
  }
  const auto saved_dims = [&]() -> std::optional<std::vector<std::int64_t>> {
    SavedNumbers numbers;
    read_saved_numbers(node, numbers);
    if (numbers.dims.empty()) return std::nullopt;
    return numbers.dims;
  };
  switch (found->second) {
    case Chooses::along_dim:
      return Choice{.by_saved = true, .dims = saved_dims()};
    case Chooses::own_along_dim:
      return Choice{.by_saved = false, .dims = saved_dims()};
    case Chooses::along_plane:
    case Chooses::own_along_plane: {
      if (edge == 1) return std::nullopt;  // of the grid each element stays where it is
      const bool by_saved = found->second == Chooses::along_plane;
      return operation.find("3D") == std::string_view::npos ? along({-1, -2}, by_saved)
                                                            : along({-1, -2, -3}, by_saved);
    }
    case Chooses::rows:
      return edge == 0 ? along({0}, true) : Choice{.by_saved = true};
    case Chooses::positions:
      if (const auto* const index = as<generated::IndexBackward0>(node)) {
        return Choice{.by_saved = true, .dims = indexed_dims(*index)};
      }
      if (const auto* const index = as<generated::UnsafeIndexBackward0>(node)) {
        return Choice{.by_saved = true, .dims = indexed_dims(*index)};
      }
      return Choice{.by_saved = true};
    case Chooses::contraction: {
      const bool added = operation.starts_with("Add") || operation.starts_with("Badd");
      if (added && edge == 0) return std::nullopt;
      const bool left = edge == (added ? 1U : 0U);
      if (operation == "Addbmm") return left ? along({0, -1}, false) : along({0, -2}, false);
      const bool vector =
          operation == "Mv" || operation == "Addmv" || operation == "Dot" || operation == "Vdot";
      return along({left || vector ? -1 : -2}, false);
    }
    case Chooses::anywhere:
      return Choice{.by_saved = true};
    case Chooses::own_anywhere: {
      const auto layer = as_recurrent_layer(node);
      if (layer && layer->batch_sizes.empty()) return std::nullopt;
      return Choice{};
    }
  }
  return std::nullopt;
}

}  // namespace gradus::plane::grad
