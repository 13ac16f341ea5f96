// What a loss function may do beside computing losses: write to its batch, add to .grad, draw.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/engine/internal/loss_testing.h>
#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/persample/graph/rule.h>
#include <gradus/persample/graph/term.h>
#include <gradus/persample/vmap/loop.h>
#include <gradus/persample/vmap/rows.h>
#include <gradus/persample/vmap/vmap.h>

namespace gradus::persample {
namespace {

using at::Tensor;
using internal::by_example;
using internal::doubles;
using internal::leaf;
using testing::HasSubstr;

class LossFunctionTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
    options.log = [this](const std::string& line) { lines.push_back(line); };
  }

  // A plain backward pass an example, on a copy of it.
  static Tensor truth(const Tensor& parameter, const LossFunction& loss, const Batch& batch) {
    const Tensor kept = parameter.grad();
    std::vector<Tensor> rows;
    for (std::int64_t i = 0; i < batch[0].size(0); ++i) {
      Batch one;
      for (const Tensor& each : batch) one.push_back(each.narrow(0, i, 1).clone());
      parameter.mutable_grad() = Tensor();
      loss(one).sum().backward();
      rows.push_back(parameter.grad().clone());
    }
    parameter.mutable_grad() = kept;
    return at::stack(rows);
  }
  static void expect_close(const Tensor& got, const Tensor& want) {
    EXPECT_LE((got - want).norm().item<double>(), 1e-9 * want.norm().item<double>());
  }
  template <typename Work>
  static std::string error_of(Work work) {
    try {
      work();
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  }

  SampleOptions options{};
  std::vector<std::string> lines{};
};

TEST_F(LossFunctionTest, MayWriteToItsBatchWhichIsThenChangedOnceAndNotForTheCaller) {
  // A wrong rule, so that automatic computes one parameter by vmap.
  register_rule(
      "LogaddexpBackward0", [](const NodeUse& use) -> std::optional<std::vector<OperandTerm>> {
        if (use.shared.size() != 1) return std::nullopt;
        std::vector<OperandTerm> terms;
        terms.push_back(
            {use.shared[0], std::make_unique<FormedTerm>(use.gradients[0].unsqueeze(1).clone())});
        return terms;
      });
  const Tensor w = leaf({6, 5}), slope = leaf({1});
  const LossFunction loss = [&](const Batch& b) {
    b[0].sub_(1.0).div_(4.0);
    return at::logaddexp(by_example(b[0].mm(w).tanh()), slope);
  };
  for (const Engine engine : {Engine::automatic, Engine::vmap, Engine::loop}) {
    SCOPED_TRACE(static_cast<int>(engine));
    options.engine = engine;
    SampleGradients table({{"w", w}, {"slope", slope}}, options);
    for (int call = 0; call < 3; ++call) {
      const Batch batch{doubles({4, 6})};
      const Tensor before = batch[0].clone();
      const Tensor want = truth(w, loss, batch), want_slope = truth(slope, loss, batch);
      table.clear();
      const Tensor losses = table.backward(loss, batch);
      expect_close(table.gradients(0), want);
      expect_close(table.gradients(1), want_slope);
      EXPECT_TRUE(batch[0].equal(before));
      expect_close(losses, loss({before}).detach());
    }
  }
  EXPECT_THAT(lines, testing::ElementsAre(HasSubstr("slope: ")));
}

TEST_F(LossFunctionTest, ThatBeginsToWriteToItsBatchIsRefusedWhereTheBatchIsNeededAgain) {
  const Tensor w = leaf({6, 5});
  bool writes = false;
  const LossFunction loss = [&](const Batch& b) {
    if (writes) b[0].mul_(0.5);
    return by_example(writes ? b[0].mm(w).tanh().exp() : b[0].mm(w));
  };
  SampleGradients table({{"w", w}}, options);
  table.backward(loss, {doubles({4, 6})});
  writes = true;
  EXPECT_THAT(error_of([&] { table.backward(loss, {doubles({4, 6})}); }),
              HasSubstr("writes to its batch"));
  const Batch batch{doubles({4, 6})};
  const Tensor want = truth(w, loss, batch);
  table.backward(loss, batch);
  expect_close(table.gradients(0), want);
}

TEST_F(LossFunctionTest, OrdinaryOnesGetTheBatchItself) {
  const Tensor w = leaf({6, 5});
  const Batch batch{doubles({4, 6})};
  int same = 0, calls = 0;
  const LossFunction loss = [&](const Batch& b) {
    ++calls;
    same += b[0].is_same(batch[0]) ? 1 : 0;
    return by_example(b[0].mm(w));
  };
  SampleGradients table({{"w", w}}, options);
  table.backward(loss, batch);
  calls = same = 0;
  for (int call = 0; call < 5; ++call) {
    table.clear();
    table.backward(loss, batch);
  }
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(same, 5);
}

// A checkpoint that runs backward() inside its node, so that the graph does not show its weights.
struct Inside : torch::autograd::Function<Inside> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x,
                        std::function<Tensor(const Tensor&)>* block) {
    ctx->save_for_backward({x});
    ctx->saved_data["block"] = reinterpret_cast<std::int64_t>(block);
    const torch::NoGradGuard no_grad;
    return (*block)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list given) {
    auto* const block =
        reinterpret_cast<std::function<Tensor(const Tensor&)>*>(ctx->saved_data["block"].toInt());
    const Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_();
    const torch::AutoGradMode on(true);
    torch::autograd::backward({(*block)(x)}, {given[0]});
    return {x.grad(), Tensor()};
  }
};

TEST_F(LossFunctionTest, WhoseBackwardAddsToGradIsComputedByTheLoop) {
  const Tensor w = leaf({6, 6}), v = leaf({6, 6});
  std::function<Tensor(const Tensor&)> block = [&](const Tensor& x) { return x.mm(w).tanh(); };
  const LossFunction loss = [&](const Batch& b) {
    return by_example(Inside::apply(b[0].mm(v), &block).square());
  };
  const Tensor kept = doubles({6, 6});
  v.mutable_grad() = kept;
  for (const std::int64_t examples : {4, 1}) {
    SCOPED_TRACE(examples);
    const Batch batch{doubles({examples, 6})};
    SampleGradients table({{"w", w}, {"v", v}}, options);
    for (int call = 0; call < 2; ++call) {
      table.clear();
      table.backward(loss, batch);
      expect_close(table.gradients(0), truth(w, loss, batch));
      w.mutable_grad() = Tensor();
      table.clear();
      table.backward(loss, batch);
      EXPECT_FALSE(w.grad().defined());
      EXPECT_TRUE(v.grad().is_same(kept));
    }
  }
  EXPECT_THAT(lines, testing::Contains(HasSubstr("by the loop")));
  const Batch batch{doubles({4, 6})};
  SampleGradients table({{"w", w}, {"v", v}}, options);
  EXPECT_THAT(error_of([&] { table.backward(loss(batch)); }), HasSubstr("adds to it"));
  EXPECT_THAT(error_of([&] { row_gradients(loss(batch), {{"w", w}, {"v", v}}); }),
              HasSubstr("adds to it"));
  options.strict = true;
  SampleGradients strict({{"w", w}, {"v", v}}, options);
  EXPECT_THAT(error_of([&] { strict.backward(loss, batch); }), HasSubstr("differs"));
  EXPECT_FALSE(w.grad().defined());
}

TEST_F(LossFunctionTest, ThatReachesNoParameterIsRefused) {
  const Tensor w = leaf({6, 5}), other = leaf({6, 5});
  const Batch batch{doubles({4, 6})};
  const LossFunction detached = [&](const Batch& b) { return by_example(b[0].mm(w)).detach(); };
  const LossFunction elsewhere = [&](const Batch& b) { return by_example(b[0].mm(other)); };
  for (const Engine engine : {Engine::automatic, Engine::graph, Engine::vmap, Engine::loop}) {
    options.engine = engine;
    for (const std::int64_t examples : {4, 1}) {
      const Batch some{batch[0].narrow(0, 0, examples)};
      for (const LossFunction& loss : {detached, elsewhere}) {
        SampleGradients table({{"w", w}}, options);
        EXPECT_THAT(error_of([&] { table.backward(loss, some); }), HasSubstr("reach none"));
      }
    }
  }
  for (const LossFunction& loss : {detached, elsewhere}) {
    SampleGradients table({{"w", w}}, options);
    EXPECT_THAT(error_of([&] { table.backward(loss(batch)); }), HasSubstr("reach none"));
  }
  // Where none is wanted there is none to reach.
  const Tensor frozen = doubles({6, 5});
  SampleGradients table({{"frozen", frozen}}, options);
  EXPECT_NO_THROW(
      table.backward([&](const Batch& b) { return by_example(b[0].mm(frozen)); }, batch));
}

TEST_F(LossFunctionTest, WhoseShapeVmapMakesWrongIsComputedByTheLoop) {
  const Tensor w = leaf({5, 5});
  const LossFunction solved = [&](const Batch& b) {
    const Tensor a = w.mm(w.t()) + at::eye(5, w.options());
    return by_example(at::linalg_solve(a, b[0].unsqueeze(2)).squeeze(2).square());
  };
  const Batch batch{doubles({4, 5})};
  try {
    expect_close(vmap_gradients({{"w", w}}, solved, batch)[0], truth(w, solved, batch));
  } catch (const Unsupported&) {  // by its name, not as the program's fault
  }
  const LossFunction clamped = [&](const Batch& b) {
    Tensor a = w.t() * 1.0;
    a.register_hook([](const Tensor& g) { return g.clamp(-0.01, 0.01); });
    a = a + 4 * at::eye(5, a.options());
    return by_example(at::linalg_solve(a, b[0].unsqueeze(2)).squeeze(2).square()) +
           by_example(b[0].mm(a).tanh());
  };
  SampleGradients table({{"w", w}}, options);
  table.backward(clamped, batch);
  expect_close(table.gradients(0), truth(w, clamped, batch));
}

TEST_F(LossFunctionTest, ThatCapturesATensorOfTheBatchIsToldSo) {
  const Tensor w = leaf({5, 4}), side = doubles({3, 5});
  const std::string error = error_of([&] {
    SampleGradients({{"w", w}}, options)
        .backward([&](const Batch& b) { return by_example((b[0] * side).mm(w)); },
                  {doubles({3, 5})});
  });
  EXPECT_THAT(error, HasSubstr("instead of capturing it"));
}

}  // namespace
}  // namespace gradus::persample
