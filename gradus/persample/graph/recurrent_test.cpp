#include <functional>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/graph_gradients.h>
#include <gradus/plane/grad/grad_plane.h>

// The kinds of recurrent layers as torch::nn and at:: offer them, whose graphs are one fused node
// (LSTM in float32 and less on a CPU) or chains of products, against a batch of one at a time.

namespace gradus::persample {
namespace {

using at::Tensor;
namespace nn = torch::nn;
namespace rnn = torch::nn::utils::rnn;

[[maybe_unused]] constexpr double kDouble = 1e-9;
constexpr double kSingle = 1e-5;
const std::string kFused = "MkldnnRnnLayerBackward0";

std::vector<NamedParameter> named(const nn::Module& module) {
  std::vector<NamedParameter> result;
  for (const auto& each : module.named_parameters()) result.push_back({each.key(), each.value()});
  return result;
}

double relative(const Tensor& got, const Tensor& want) {
  const double scale = want.to(at::kDouble).norm().item<double>();
  const double error = (got.to(at::kDouble) - want.to(at::kDouble)).norm().item<double>();
  return scale == 0 ? error : error / scale;
}

bool uses(const Tensor& losses, const std::string& node) {
  for (const auto& each : plane::grad::walk({losses})) {
    if (each.name() == node) return true;
  }
  return false;
}

// One example's gradients of the parameters, zero where it uses none.
std::vector<Tensor> one(const std::vector<NamedParameter>& parameters, const Tensor& loss) {
  std::vector<Tensor> tensors;
  for (const auto& each : parameters) tensors.push_back(each.tensor);
  std::vector<Tensor> gradients =
      torch::autograd::grad({loss.sum()}, tensors, {}, false, false, true);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(tensors[i]);
  }
  return gradients;
}

// @p all gives the losses of the batch, @p single the loss of one example alone, whose gradients of
// @p oracle's parameters are the truth (a copy in float64, or the same).
void expect_equals_loop(const std::vector<NamedParameter>& parameters,
                        const std::function<Tensor()>& all,
                        const std::vector<NamedParameter>& oracle,
                        const std::function<Tensor(std::int64_t)>& single, double tolerance,
                        GraphOptions options = {}) {
  GraphGradients table(parameters, options);
  const Tensor losses = all();
  const std::int64_t examples = losses.size(0);
  std::vector<std::vector<Tensor>> rows(parameters.size());
  for (std::int64_t b = 0; b < examples; ++b) {
    const std::vector<Tensor> gradients = one(oracle, single(b));
    for (std::size_t i = 0; i < rows.size(); ++i) rows[i].push_back(gradients[i]);
  }
  table.backward(losses);
  const Tensor weights = at::linspace(0.5, 2.0, examples, at::kDouble);
  Tensor squared = at::zeros({examples}, at::kDouble);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    SCOPED_TRACE(parameters[i].name);
    const Tensor want = at::stack(rows[i]).to(at::kDouble);
    const Tensor norms = want.reshape({examples, -1}).norm(2, 1);
    squared += norms.square();
    EXPECT_LE(relative(table.gradients(i), want), tolerance);
    EXPECT_LE(relative(table.norms(i), norms), tolerance);
    EXPECT_LE(relative(table.weighted_sum(i, weights), at::tensordot(weights, want, {0}, {0})),
              tolerance);
  }
  EXPECT_LE(relative(table.norms(), squared.sqrt()), tolerance);
}

class RecurrentTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }
  std::int64_t draw(std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random_);
  }
  bool flip() { return draw(0, 1) == 1; }

 private:
  std::mt19937 random_{7};
};

// A copy in float64: its graph has no fused node.
template <typename Holder>
Holder in_double(const Holder& module) {
  auto copy = std::dynamic_pointer_cast<typename Holder::ContainedType>(module->clone());
  copy->to(at::kDouble);
  return Holder(copy);
}

// The inputs of one recurrent call: x in the layer's own layout, states [layers, B, H].
struct Call {
  Tensor x{};
  Tensor h{};
  Tensor c{};
  std::int64_t batch_dim = 1;
  int outputs = 0;  // bits: 1 all steps, 2 the last hidden states, 4 the last cells

  Call at(std::int64_t example) const {
    const auto of = [&](const Tensor& tensor, std::int64_t dim) {
      return tensor.defined() ? tensor.narrow(dim, example, 1) : Tensor();
    };
    return {of(x, batch_dim), of(h, 1), of(c, 1), batch_dim, outputs};
  }
  Call to(at::ScalarType type) const {
    const auto of = [&](const Tensor& tensor) {
      return tensor.defined() ? tensor.to(type) : Tensor();
    };
    return {of(x), of(h), of(c), batch_dim, outputs};
  }
};

// Losses [B] of all outputs that the call wants.
Tensor losses_of(const Call& call, const Tensor& y, const Tensor& h, const Tensor& c) {
  const auto by_example = [](const Tensor& tensor, std::int64_t dim) {
    return tensor.tanh().square().movedim(dim, 0).flatten(1).sum(1);
  };
  Tensor losses = at::zeros({call.x.size(call.batch_dim)}, y.options());
  if ((call.outputs & 1) != 0) losses = losses + by_example(y, call.batch_dim);
  if ((call.outputs & 2) != 0) losses = losses + 2 * by_example(h, 1);
  if ((call.outputs & 4) != 0 && c.defined()) losses = losses + 3 * by_example(c, 1);
  return losses;
}

Tensor run(nn::LSTM& lstm, const Call& call) {
  const auto given = call.h.defined() ? torch::optional<std::tuple<Tensor, Tensor>>({call.h, call.c})
                                      : torch::nullopt;
  const auto [y, states] = lstm(call.x, given);
  return losses_of(call, y, std::get<0>(states), std::get<1>(states));
}
template <typename Holder>
Tensor run(Holder& module, const Call& call) {
  const auto [y, h] = module(call.x, call.h);
  return losses_of(call, y, h, {});
}

template <typename Holder>
void expect_module_equals_loop(Holder module, const Call& call, at::ScalarType type,
                               double tolerance) {
  Holder truth = in_double(module);
  module->to(type);
  const Call typed = call.to(type);
  const Call exact = call.to(at::kDouble);
  expect_equals_loop(
      named(*module), [&] { return run(module, typed); }, named(*truth),
      [&](std::int64_t b) { return run(truth, exact.at(b)); }, tolerance);
}

TEST_F(RecurrentTest, FusedLstmOfAnyShapeWithAnyOutputs) {
  {
    nn::LSTM probe(6, 7);
    if (!uses(run(probe, {.x = at::randn({5, 4, 6}), .outputs = 1}), kFused)) {
      GTEST_SKIP() << "this machine's LSTM is no " << kFused;
    }
  }
  for (int trial = 0; trial < 120; ++trial) {
    SCOPED_TRACE(trial);
    const std::int64_t layers = draw(1, 2), input = draw(1, 5), hidden = draw(1, 9);
    const bool both = flip(), first = flip();
    nn::LSTM lstm(nn::LSTMOptions(input, hidden)
                      .num_layers(layers)
                      .bidirectional(both)
                      .batch_first(first)
                      .bias(draw(0, 3) > 0));
    const std::int64_t examples = draw(2, 6), steps = draw(1, 6);
    Call call{.x = at::randn({first ? examples : steps, first ? steps : examples, input}),
              .batch_dim = first ? 0 : 1,
              .outputs = static_cast<int>(draw(1, 7))};
    if (flip()) {
      call.h = at::randn({layers * (both ? 2 : 1), examples, hidden});
      call.c = at::randn_like(call.h);
    }
    expect_module_equals_loop(lstm, call, at::kFloat, kSingle);
    const Tensor losses = run(lstm, call);
    EXPECT_TRUE(uses(losses, kFused));
    GraphGradients table(named(*lstm));
    table.backward(losses);
    for (const std::string& line : table.explain()) {
      EXPECT_EQ(line.find("own formula"), std::string::npos) << line;
    }
  }
}

}  // namespace
}  // namespace gradus::persample
