#include <gradus/persample/vmap/rows.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/persample/vmap/internal/compare.h>
#include <gradus/persample/vmap/internal/layers.h>
#include <gradus/persample/vmap/loop.h>

#include <tests/support/message_of.h>

namespace gradus::persample {
namespace {

namespace nn = torch::nn;
using gradus::tests::message_of;
using testing::HasSubstr;
using tests::any_nonzero;
using tests::gap;
using tests::named;

class RowsTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(1);
  }
};

struct Cube : torch::autograd::Function<Cube> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x) {
    context->save_for_backward({x});
    return x * x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list g) {
    const at::Tensor x = context->get_saved_variables()[0];
    at::Tensor slope = torch::empty_like(x);
    const double* in = x.data_ptr<double>();  // a formula that cannot be batched...
    double* out = slope.data_ptr<double>();
    for (std::int64_t i = 0; i < x.numel(); ++i) out[i] = 3 * in[i] * in[i];
    out[0] += 0 * g[0].contiguous().data_ptr<double>()[0];  // ...for it looks at the gradient
    return {g[0] * slope};
  }
};

TEST_F(RowsTest, EqualsTheLoopHoweverManyRowsRunAtOnce) {
  nn::Sequential net(nn::Conv2d(2, 3, 3), nn::Tanh(), nn::Flatten(), nn::Linear(48, 5));
  net->to(torch::kDouble);
  const at::Tensor x = torch::randn({7, 2, 6, 6}, torch::kDouble);
  const LossFunction loss = [&](const Batch& b) { return net->forward(b[0]).pow(2).sum(1); };
  const auto want = loop_gradients(named(*net), loss, {x});
  EXPECT_TRUE(any_nonzero(want));
  const at::Tensor losses = loss({x});
  for (const std::int64_t rows : {1, 2, 3, 7, 100}) {
    SCOPED_TRACE(rows);
    EXPECT_EQ(gap(row_gradients(losses, named(*net), {.rows_at_once = rows}), want), "");
  }
  for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
  losses.sum().backward();  // the graph is still there
  EXPECT_EQ(gap({net->parameters()[0].grad()}, {want[0].sum(0)}), "");
}

TEST_F(RowsTest, EqualsTheLoopOnRecurrentAttentionAndEmbeddingGraphs) {
  nn::LSTM lstm(nn::LSTMOptions(6, 4).batch_first(true));
  nn::GRU gru(nn::GRUOptions(6, 4).batch_first(true));
  nn::MultiheadAttention attention(6, 2);
  nn::Embedding table(10, 6);
  const at::Tensor ids = torch::randint(0, 10, {4, 5}, torch::kLong);
  for (const auto& module : std::vector<std::shared_ptr<nn::Module>>{
           lstm.ptr(), gru.ptr(), attention.ptr(), table.ptr()}) {
    module->to(torch::kDouble);
  }
  std::vector<NamedParameter> parameters = named(*table);
  for (const auto& more : {named(*lstm), named(*gru), named(*attention)}) {
    parameters.insert(parameters.end(), more.begin(), more.end());
  }
  const LossFunction loss = [&](const Batch& b) {
    const at::Tensor x = table->forward(b[0]);
    const at::Tensor t = x.transpose(0, 1);
    return std::get<0>(lstm->forward(x)).pow(2).sum({1, 2}) +
           std::get<0>(gru->forward(x)).pow(2).sum({1, 2}) +
           std::get<0>(attention->forward(t, t, t)).pow(2).sum({0, 2});
  };
  const auto want = loop_gradients(parameters, loss, {ids});
  EXPECT_EQ(gap(row_gradients(loss({ids}), parameters), want), "");
}

TEST_F(RowsTest, KeepsTheMasksOfTheForwardPass) {
  const at::Tensor w = torch::ones({50}, torch::kDouble).requires_grad_();
  const at::Tensor kept = at::dropout(torch::ones({6, 50}, torch::kDouble) * w, 0.5, true);
  const auto got = row_gradients(kept.sum(1), {{"w", w}});
  EXPECT_EQ(gap(got, {kept.detach()}, 0), "");
}

TEST_F(RowsTest, TakesBagsOfAnyLength) {  // P10
  for (const bool mean : {false, true}) {
    auto options = nn::EmbeddingBagOptions(10, 6);
    mean ? options.mode(torch::kMean) : options.mode(torch::kSum);
    nn::EmbeddingBag bag(options);
    bag->to(torch::kDouble);
    const at::Tensor ids = torch::tensor({1, 2, 4, 5, 4, 3, 2, 0}, torch::kLong);
    const auto bag_loss = [&](const at::Tensor& in, const at::Tensor& offsets) {
      return bag->forward(in, offsets).pow(3).sum(1);
    };
    const auto got =
        row_gradients(bag_loss(ids, torch::tensor({0, 3, 5}, torch::kLong)), named(*bag));
    std::vector<at::Tensor> want;
    const std::vector<std::pair<std::int64_t, std::int64_t>> spans{{0, 3}, {3, 5}, {5, 8}};
    for (const auto& [first, last] : spans) {
      const at::Tensor one =
          bag_loss(ids.slice(0, first, last), torch::zeros({1}, torch::kLong)).sum();
      want.push_back(torch::autograd::grad({one}, {bag->weight})[0]);
    }
    EXPECT_EQ(gap(got, {torch::stack(want)}), "");
  }
}

struct InnerImpl : nn::Module {
  InnerImpl() {
    scale = register_parameter("scale", torch::randn({6}));
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& t) {
    return linear(x) * scale + (t.unsqueeze(1) * scale).sin();
  }
  at::Tensor scale{};
  nn::Linear linear{6, 6};
};
TORCH_MODULE(Inner);

TEST_F(RowsTest, TakesAModuleWithItsOwnParameterAndASecondArgument) {  // P7
  Inner inner;
  nn::Linear head(6, 3);
  inner->to(torch::kDouble);
  head->to(torch::kDouble);
  std::vector<NamedParameter> parameters = named(*inner);
  for (const NamedParameter& each : named(*head)) parameters.push_back(each);
  const LossFunction loss = [&](const Batch& b) {
    return head(inner(b[0], b[1]).tanh()).pow(2).sum({1, 2});
  };
  const Batch batch{torch::randn({4, 5, 6}, torch::kDouble), torch::randn({4, 1}, torch::kDouble)};
  const auto want = loop_gradients(parameters, loss, batch);
  EXPECT_TRUE(any_nonzero(want));
  for (const std::int64_t rows : {1, 3, 16}) {
    SCOPED_TRACE(rows);
    EXPECT_EQ(gap(row_gradients(loss(batch), parameters, {.rows_at_once = rows}), want), "");
  }
}

TEST_F(RowsTest, RunsWhatCannotBeBatchedRowByRow) {
  const at::Tensor w = torch::randn({3}, torch::kDouble).requires_grad_();
  const LossFunction loss = [&](const Batch& b) { return Cube::apply(b[0] * w).sum(1); };
  const at::Tensor x = torch::randn({5, 3}, torch::kDouble);
  const auto want = loop_gradients({{"w", w}}, loss, {x});
  EXPECT_EQ(gap(row_gradients(loss({x}), {{"w", w}}), want), "");
  EXPECT_FALSE(internal::transform_active());
}

TEST_F(RowsTest, TakesFrozenUnusedAndSparseParameters) {
  nn::Embedding table(nn::EmbeddingOptions(10, 3).sparse(true));
  table->to(torch::kDouble);
  const at::Tensor frozen = torch::ones({3}, torch::kDouble);
  const at::Tensor unused = torch::ones({3}, torch::kDouble).requires_grad_();
  const std::vector<NamedParameter> parameters{
      {"table", table->weight}, {"frozen", frozen}, {"unused", unused}};
  const LossFunction loss = [&](const Batch& b) {
    return (table->forward(b[0]) * frozen).pow(2).sum({1, 2});
  };
  const at::Tensor ids = torch::randint(0, 10, {4, 5}, torch::kLong);
  const auto got = row_gradients(loss({ids}), parameters);
  EXPECT_EQ(gap(got, loop_gradients(parameters, loss, {ids})), "");
  EXPECT_FALSE(got[1].defined());
}

TEST_F(RowsTest, RefusesWhatIsNoBatchOfLosses) {
  const at::Tensor w = torch::randn({3}, torch::kDouble).requires_grad_();
  EXPECT_THAT(message_of([&] { row_gradients(w.sum(), {{"w", w}}); }), HasSubstr("got shape []"));
  EXPECT_THAT(message_of([&] { row_gradients(w.detach(), {{"w", w}}); }),
              HasSubstr("requires no gradient"));
  EXPECT_THAT(message_of([&] { row_gradients(w * 2, {{"w", w}}, {.rows_at_once = 0}); }),
              HasSubstr("at least 1; got 0"));
}

}  // namespace
}  // namespace gradus::persample
