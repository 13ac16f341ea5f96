// 500 random configurations of each layer kind in float64 against the loop; fixed seeds.
// GRADUS_LONG_TESTS=1 runs 5000. The graph takes all of them, vmap and rows every fifth.

#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/graph_gradients.h>
#include <gradus/persample/graph/internal/loop_testing.h>
#include <gradus/persample/vmap/loop.h>
#include <gradus/persample/vmap/rows.h>
#include <gradus/persample/vmap/vmap.h>

namespace gradus::persample {
namespace {

using at::Tensor;
namespace nn = torch::nn;

// What one random draw makes: a model and a batch of it.
struct Draw {
  std::vector<NamedParameter> parameters{};
  LossFunction loss = nullptr;
  Batch batch{};
  std::string about{};
};

class Dice {
 public:
  explicit Dice(unsigned seed) : engine_(seed) {}
  std::int64_t of(std::int64_t low, std::int64_t high) {
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  bool coin() { return of(0, 1) == 1; }

 private:
  std::mt19937_64 engine_;
};

Tensor doubles(std::vector<std::int64_t> sizes) { return at::randn(sizes, at::kDouble); }

template <typename Holder>
std::vector<NamedParameter> in_double(Holder& layer) {
  layer->to(at::kDouble);
  std::vector<NamedParameter> result;
  for (const auto& each : layer->named_parameters()) {
    const torch::NoGradGuard no_grad;
    each.value().copy_(at::randn_like(each.value()));
    result.push_back({each.key(), each.value()});
  }
  return result;
}

// Moves the batch, dimension 0, to where a layer might want it, and back.
struct Arrangement {
  std::int64_t batch_dim = 0;
  bool folded = false;  // with the dimensions before the last

  static Arrangement drawn(Dice& dice, std::int64_t dims) {
    return {.batch_dim = dice.of(0, dims - 2), .folded = dice.coin()};
  }
  Tensor apply(const std::function<Tensor(const Tensor&)>& layer, const Tensor& x) const {
    const Tensor moved = x.movedim(0, batch_dim);
    Tensor y =
        folded ? layer(moved.flatten(0, -2)).unflatten(0, moved.sizes().slice(0, moved.dim() - 1))
               : layer(moved);
    return y.movedim(batch_dim, 0).flatten(1).sin().square().sum(1);
  }
};

Draw linear(Dice& dice) {
  const std::int64_t in = dice.of(1, 6), out = dice.of(1, 6), dims = dice.of(2, 4);
  nn::Linear layer(nn::LinearOptions(in, out).bias(dice.coin()));
  std::vector<std::int64_t> sizes{dice.of(2, 5)};
  for (std::int64_t i = 2; i < dims; ++i) sizes.push_back(dice.of(1, 5));
  sizes.push_back(in);
  const auto where = Arrangement::drawn(dice, dims);
  return {in_double(layer),
          [=](const Batch& b) mutable {
            return where.apply([&](const Tensor& x) { return layer(x); }, b[0]);
          },
          {doubles(sizes)},
          base::join("Linear on ", at::IntArrayRef(sizes), " batch at ", where.batch_dim)};
}

Draw norm(Dice& dice) {
  const std::int64_t examples = dice.of(2, 5), channels = dice.of(1, 3) * 2, length = dice.of(2, 5);
  const Tensor x = doubles({examples, channels, length});
  const auto with = [&](auto layer, const std::string& name) -> Draw {
    return {in_double(layer),
            [=](const Batch& b) mutable { return layer(b[0]).sin().flatten(1).sum(1); },
            {x},
            name};
  };
  switch (dice.of(0, 3)) {
    case 0:
      return with(nn::LayerNorm(nn::LayerNormOptions(
                      dice.coin() ? std::vector<std::int64_t>{length}
                                  : std::vector<std::int64_t>{channels, length})),
                  "LayerNorm");
    case 1:
      return with(nn::GroupNorm(nn::GroupNormOptions(dice.coin() ? 2 : 1, channels)), "GroupNorm");
    case 2:
      return with(nn::InstanceNorm1d(nn::InstanceNorm1dOptions(channels).affine(true)),
                  "InstanceNorm1d");
    default: {
      nn::BatchNorm1d layer(channels);
      layer->eval();
      return with(layer, "BatchNorm1d in eval");
    }
  }
}

Draw embedding(Dice& dice) {
  const std::int64_t rows = dice.of(2, 9), width = dice.of(1, 5);
  auto options = nn::EmbeddingOptions(rows, width);
  if (dice.coin()) options.padding_idx(dice.of(0, rows - 1));
  nn::Embedding layer(options);
  std::vector<std::int64_t> sizes{dice.of(2, 5)};
  for (std::int64_t i = dice.of(0, 2); i > 0; --i) sizes.push_back(dice.of(1, 6));
  const bool turned = sizes.size() > 1 && dice.coin();
  return {in_double(layer),
          [=](const Batch& b) mutable {
            Tensor y = turned ? layer(b[0].transpose(0, 1)).transpose(0, 1) : layer(b[0]);
            return y.sin().square().flatten(1).sum(1);
          },
          {at::randint(rows, sizes)},
          base::join("Embedding of ", at::IntArrayRef(sizes))};
}

Draw elementwise(Dice& dice) {
  std::vector<std::int64_t> sizes{dice.of(2, 5), dice.of(1, 4), dice.of(1, 4)};
  std::vector<std::int64_t> shape;
  for (std::size_t i = static_cast<std::size_t>(dice.of(1, 3)); i < 3; ++i)
    shape.push_back(dice.coin() ? sizes[i] : 1);
  const Tensor w = doubles(shape).requires_grad_(), v = doubles(shape).requires_grad_();
  nn::PReLU slopes(nn::PReLUOptions().num_parameters(dice.coin() ? 1 : sizes[1]));
  auto parameters = in_double(slopes);
  parameters.push_back({"w", w});
  parameters.push_back({"v", v});
  const std::int64_t way = dice.of(0, 3);
  return {parameters,
          [=](const Batch& b) mutable {
            Tensor y = slopes(b[0]);
            if (way == 0) y = y * w + v;
            if (way == 1) y = (v - y) / (w.square() + 1);
            if (way == 2) y = (y + w.exp()) * v.unsqueeze(0).tanh();
            if (way == 3) y = at::where(y > 0, y * w, v) / (y.square() + w.square() + 1);
            return y.sin().flatten(1).sum(1);
          },
          {doubles(sizes)},
          base::join("elementwise ", way, " of ", at::IntArrayRef(shape))};
}

Draw attention(Dice& dice) {
  const std::int64_t heads = dice.of(1, 3), width = heads * dice.of(1, 3), steps = dice.of(1, 5);
  nn::MultiheadAttention layer(nn::MultiheadAttentionOptions(width, heads)
                                   .bias(dice.coin())
                                   .add_bias_kv(dice.coin())
                                   .add_zero_attn(dice.coin()));
  const bool causal = dice.coin();
  return {in_double(layer),
          [=](const Batch& b) mutable {
            const Tensor x = b[0].transpose(0, 1);
            const Tensor mask =
                causal ? at::full({steps, steps}, -1e9, at::kDouble).triu(1) : Tensor();
            return std::get<0>(layer->forward(x, x, x.sin(), {}, false, mask))
                .transpose(0, 1)
                .sin()
                .flatten(1)
                .sum(1);
          },
          {doubles({dice.of(2, 5), steps, width})},
          base::join("attention ", heads, " x ", width / heads)};
}

Draw shared_matrices(Dice& dice) {
  const std::int64_t groups = dice.of(1, 3), in = dice.of(1, 4), out = dice.of(1, 4),
                     steps = dice.of(1, 4);
  const Tensor w = doubles({groups, in, out}).requires_grad_();
  const Tensor table = doubles({in, out}).requires_grad_();
  const bool tied = dice.coin();
  return {{{"w", w}, {"table", table}},
          [=](const Batch& b) {
            // [B, T, G, in] as G products of [B * T, in].
            Tensor y = at::bmm(b[0].permute({2, 0, 1, 3}).flatten(1, 2), w);  // [G, B * T, out]
            y = y.unflatten(1, {b[0].size(0), steps}).permute({1, 2, 0, 3}).sin();
            y = at::matmul(y, table.t());
            if (tied) y = y + at::matmul(y.tanh(), table).matmul(table.t() * 0.5);
            return y.square().flatten(1).sum(1);
          },
          {doubles({dice.of(2, 5), steps, groups, in})},
          base::join("bmm ", groups, tied ? " tied" : "")};
}

double relative(const Tensor& got, const Tensor& want) {
  const double scale = want.norm().item<double>();
  const double error = (got - want).norm().item<double>();
  return scale < 1e-9 ? error : error / scale;
}

class RandomLayersTest : public testing::TestWithParam<std::pair<const char*, Draw (*)(Dice&)>> {};

TEST_P(RandomLayersTest, EqualTheLoop) {
  torch::manual_seed(0);
  at::set_num_threads(1);
  Dice dice(17);
  for (int i = 0; i < internal::random_trials(); ++i) {
    const Draw draw = GetParam().second(dice);
    SCOPED_TRACE(base::join("draw ", i, ": ", draw.about));
    const auto want = loop_gradients(draw.parameters, draw.loss, draw.batch);
    const std::int64_t examples = draw.batch[0].size(0);
    GraphOptions options{.keep = i % 2 == 0 ? Keep::factors : Keep::formed};
    // Parameters that other operators computed, which the loop here checks.
    options.examples_checked = true;
    GraphGradients table(draw.parameters, options);
    table.backward(draw.loss(draw.batch));
    const Tensor weights = at::linspace(0.5, 2, examples, at::kDouble);
    Tensor squares = at::zeros({examples}, at::kDouble);
    for (std::size_t p = 0; p < want.size(); ++p) {
      squares += want[p].reshape({examples, -1}).square().sum(1);
      ASSERT_LE(relative(table.gradients(p), want[p]), 1e-9) << draw.parameters[p].name;
      ASSERT_LE(relative(table.weighted_sum(p, weights), at::tensordot(weights, want[p], {0}, {0})),
                1e-9)
          << draw.parameters[p].name;
    }
    ASSERT_LE(relative(table.norms(), squares.sqrt()), 1e-9);
    if (i % 5 != 0) continue;  // the slower engines
    const auto by_vmap = vmap_gradients(draw.parameters, draw.loss, draw.batch);
    const auto by_rows = row_gradients(draw.loss(draw.batch), draw.parameters);
    for (std::size_t p = 0; p < want.size(); ++p) {
      ASSERT_LE(relative(by_vmap[p], want[p]), 1e-9) << "vmap " << draw.parameters[p].name;
      ASSERT_LE(relative(by_rows[p], want[p]), 1e-9) << "rows " << draw.parameters[p].name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, RandomLayersTest,
                         testing::Values(std::pair{"linear", &linear}, std::pair{"norm", &norm},
                                         std::pair{"embedding", &embedding},
                                         std::pair{"elementwise", &elementwise},
                                         std::pair{"attention", &attention},
                                         std::pair{"shared_matrices", &shared_matrices}),
                         [](const auto& info) { return std::string(info.param.first); });

}  // namespace
}  // namespace gradus::persample
