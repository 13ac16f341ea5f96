#include <gradus/optim/optimizer.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/adafactor.h>
#include <gradus/optim/adam_mini.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/came.h>
#include <gradus/optim/eight_bit.h>
#include <gradus/optim/lamb.h>
#include <gradus/optim/lars.h>
#include <gradus/optim/sgd.h>

#include <tests/support/message_of.h>

namespace gradus::optim {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using tests::message_of;

using Factory = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>;

// Every optimizer, with both of its kernels: what the base promises must hold for each.
std::vector<std::pair<std::string, Factory>> every_optimizer() {
  std::vector<std::pair<std::string, Factory>> result;
  for (const bool fused : {true, false}) {
    const std::string kernel = fused ? " fused" : " foreach";
    result.emplace_back("adamw" + kernel, [fused](std::vector<at::Tensor> parameters) {
      return std::make_unique<AdamW>(std::move(parameters),
                                     AdamWOptions{.lr = 0.5, .fused = fused});
    });
    result.emplace_back("sgd" + kernel, [fused](std::vector<at::Tensor> parameters) {
      SGDOptions options{.lr = 0.5, .momentum = 0.9};
      if (!fused) options.fused = false;  // true would refuse 16-bit parameters
      return std::make_unique<SGD>(std::move(parameters), options);
    });
  }
  result.emplace_back("lamb", [](std::vector<at::Tensor> parameters) {
    return std::make_unique<Lamb>(std::move(parameters), LambOptions{.lr = 0.5});
  });
  result.emplace_back("lars", [](std::vector<at::Tensor> parameters) {
    return std::make_unique<Lars>(std::move(parameters), LarsOptions{.lr = 0.5});
  });
  result.emplace_back("came", [](std::vector<at::Tensor> parameters) {
    return std::make_unique<Came>(std::move(parameters), CameOptions{.lr = 0.5});
  });
  result.emplace_back("adam_mini", [](std::vector<at::Tensor> parameters) {
    return std::make_unique<AdamMini>(std::move(parameters), AdamMiniOptions{.lr = 0.5});
  });
  return result;
}

std::vector<std::string> names_of(const std::vector<NamedState>& state) {
  std::vector<std::string> names;
  for (const auto& entry : state) names.push_back(entry.name);
  return names;
}

TEST(OptimizerTest, BackwardThroughAParameterThatAStepChangedIsAnError) {
  for (const auto& [name, make] : every_optimizer()) {
    SCOPED_TRACE(name);
    auto w = torch::ones({4}, torch::requires_grad());
    const auto loss = (w * w).sum();
    w.mutable_grad() = torch::ones({4});
    make({w})->step();
    try {
      loss.backward();
      ADD_FAILURE() << "backward used the new value: gradient " << w.grad();
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation"));
    }
  }
}

TEST(OptimizerTest, StepBumpsTheVersionOfUpdatedParametersOnly) {
  for (const auto& [name, make] : every_optimizer()) {
    SCOPED_TRACE(name);
    auto used = torch::ones({4}, torch::requires_grad());
    auto unused = torch::ones({4}, torch::requires_grad());
    auto optimizer = make({used, unused});
    used.mutable_grad() = torch::ones({4});
    const auto before = used._version();
    optimizer->step();
    EXPECT_GT(used._version(), before);
    EXPECT_EQ(unused._version(), 0);
    EXPECT_TRUE(torch::equal(unused.detach(), torch::ones({4})));
  }
}

TEST(OptimizerTest, ParameterWithoutGradientHasNoStateUntilItIsFirstUsed) {
  auto a = torch::ones({2}, torch::requires_grad());
  auto b = torch::ones({2}, torch::requires_grad());
  AdamW optimizer({a, b});
  EXPECT_TRUE(optimizer.state().empty());
  b.mutable_grad() = torch::ones({2});
  optimizer.step();
  EXPECT_THAT(names_of(optimizer.state()), ElementsAre("1.step", "1.exp_avg", "1.exp_avg_sq"));
  EXPECT_EQ(optimizer.state_tensors().size(), 3);
  a.mutable_grad() = torch::ones({2});
  optimizer.step();
  EXPECT_EQ(optimizer.state()[0].name, "0.step");
  EXPECT_EQ(optimizer.state()[0].tensor.item<float>(), 1.0F);
  EXPECT_EQ(optimizer.state()[3].tensor.item<float>(), 2.0F);
}

TEST(OptimizerTest, StateIsKeyedByGivenNames) {
  auto w = torch::ones({2}, torch::requires_grad());
  w.mutable_grad() = torch::ones({2});
  SGD optimizer({{.parameters = {w}, .lr = 0.1, .weight_decay = 0.0, .names = {"head.weight"}}},
                {.momentum = 0.9});
  optimizer.step();
  EXPECT_THAT(names_of(optimizer.state()), ElementsAre("head.weight.momentum_buffer"));
}

TEST(OptimizerTest, SparseGradientIsRefusedByNameBeforeAnythingIsWritten) {
  for (const auto& [name, make] : every_optimizer()) {
    SCOPED_TRACE(name);
    auto dense = torch::ones({4}, torch::requires_grad());
    auto embedding = torch::ones({4, 2}, torch::requires_grad());
    auto optimizer = make({dense, embedding});
    dense.mutable_grad() = torch::ones({4});
    embedding.mutable_grad() = torch::ones({4, 2}).to_sparse();
    EXPECT_THAT(message_of([&] { optimizer->step(); }),
                HasSubstr("gradient of parameter '1' must be dense; got layout Sparse"));
    EXPECT_TRUE(torch::equal(dense.detach(), torch::ones({4})));
    EXPECT_TRUE(optimizer->state().empty());
  }
}

TEST(OptimizerTest, GradientOfAnotherShapeIsRefusedByNameBeforeAnythingIsWritten) {
  for (const auto& [name, make] : every_optimizer()) {
    for (const auto& shape : {std::vector<std::int64_t>{3}, {4}, {4, 3, 1}, {12}, {}}) {
      SCOPED_TRACE(name);
      auto first = torch::ones({4}, torch::requires_grad());
      auto second = torch::ones({4, 3}, torch::requires_grad());
      auto optimizer = make({first, second});
      first.mutable_grad() = torch::ones({4});
      second.mutable_grad() = torch::ones(shape);
      EXPECT_THAT(message_of([&] { optimizer->step(); }),
                  HasSubstr("gradient of parameter '1' must have the parameter's shape [4, 3]"));
      EXPECT_TRUE(torch::equal(first.detach(), torch::ones({4})));
      EXPECT_TRUE(optimizer->state().empty());
    }
  }
}

TEST(OptimizerTest, ParameterThatGotAnotherShapeOrDtypeNoLongerFitsItsStateAndIsRefusedByName) {
  const std::vector<std::pair<std::string, Factory>> with_state{
      {"adamw", [](auto p) { return std::make_unique<AdamW>(p, AdamWOptions{}); }},
      {"sgd", [](auto p) { return std::make_unique<SGD>(p, SGDOptions{.momentum = 0.9}); }},
      {"lamb", [](auto p) { return std::make_unique<Lamb>(p, LambOptions{}); }},
      {"came", [](auto p) { return std::make_unique<Came>(p, CameOptions{}); }},
      {"adafactor", [](auto p) { return std::make_unique<Adafactor>(p, AdafactorOptions{}); }},
      {"adam8bit", [](auto p) { return std::make_unique<Adam8bit>(p, Adam8bitOptions{}); }},
      {"sgd8bit", [](auto p) { return std::make_unique<SGD8bit>(p, SGD8bitOptions{}); }}};
  for (const auto& [name, make] : with_state) {
    for (const auto& value : {torch::ones({256, 65}), torch::ones({65, 64}),
                              torch::ones({64, 65}, at::kDouble), torch::ones({3, 5})}) {
      if (name.ends_with("8bit") && value.scalar_type() == at::kDouble) continue;
      SCOPED_TRACE(name + " " + value.toString());
      auto other = torch::ones({2}, torch::requires_grad());
      auto w = torch::ones({64, 65}, torch::requires_grad());
      auto optimizer = make({other, w});
      other.mutable_grad() = torch::ones({2});
      w.mutable_grad() = torch::ones({64, 65});
      optimizer->step();
      w.mutable_grad().reset();
      w.set_data(value.clone());
      w.mutable_grad() = torch::ones_like(value);
      const auto before = other.detach().clone();
      EXPECT_THAT(message_of([&] { optimizer->step(); }),
                  testing::AllOf(
                      testing::AnyOf(HasSubstr("state '1."), HasSubstr("state of parameter '1'")),
                      HasSubstr("of the parameter; got")));
      EXPECT_THROW(static_cast<void>(optimizer->state()), UserError);
      EXPECT_TRUE(torch::equal(w.detach(), value));
      EXPECT_TRUE(torch::equal(other.detach(), before));
      // A fresh state is what the message advises.
      optimizer->load_state({});
      EXPECT_EQ(optimizer->step().updated, 2);
    }
  }
}

// module->to(memory_format) between two steps, and a state that was saved in another layout.
TEST(OptimizerTest, LayoutOfAParameterMayChangeBetweenStepsAndBetweenSavingAndLoading) {
  auto all = every_optimizer();
  all.emplace_back("adam8bit", [](auto p) {
    return std::make_unique<Adam8bit>(p, Adam8bitOptions{.lr = 0.5, .min_values = 0});
  });
  all.emplace_back("sgd8bit", [](auto p) {
    return std::make_unique<SGD8bit>(p, SGD8bitOptions{.lr = 0.5, .min_values = 0});
  });
  all.emplace_back("adafactor", [](auto p) {
    return std::make_unique<Adafactor>(p, AdafactorOptions{.lr = 0.5, .beta1 = 0.9});
  });
  const auto laid_out = [](const at::Tensor& x, bool channels_last) {
    return x.clone(channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
  };
  for (const auto& [name, make] : all) {
    for (const bool before : {false, true}) {
      for (const bool after : {false, true}) {
        for (const bool reload : {false, true}) {
          SCOPED_TRACE(testing::Message() << name << " channels last " << before << " then "
                                          << after << (reload ? " loaded" : ""));
          torch::manual_seed(6);
          const auto value = torch::randn({4, 40, 3, 3});
          const auto g1 = torch::randn({4, 40, 3, 3}), g2 = torch::randn({4, 40, 3, 3});
          auto plain = value.clone().requires_grad_();
          auto plain_optimizer = make({plain});
          auto w = laid_out(value, before).requires_grad_();
          auto optimizer = make({w});
          plain.mutable_grad() = g1.clone();
          plain_optimizer->step();
          w.mutable_grad() = g1.clone();
          optimizer->step();
          std::vector<NamedState> saved;
          for (const auto& entry : optimizer->state()) {
            saved.push_back({entry.name, entry.tensor.clone(at::MemoryFormat::Contiguous)});
          }
          w.set_data(laid_out(w.detach(), after));
          if (reload) {
            optimizer = make({w});
            optimizer->load_state(saved);
          }
          plain.mutable_grad() = g2.clone();
          plain_optimizer->step();
          w.mutable_grad() = g2.clone();
          optimizer->step();
          EXPECT_TRUE(at::allclose(w.detach(), plain.detach(), 1e-4, 1e-5))
              << (w - plain).abs().max();
        }
      }
    }
  }
}

// torch.optim keeps the state of 16-bit parameters in 16 bits, and casts what it loads.
TEST(OptimizerTest, NarrowerFloatsAreCastOnLoadAndNothingElseIs) {
  auto w = torch::ones({4, 4}, at::kBFloat16).requires_grad_();
  Adafactor optimizer({w});
  const auto rows = torch::full({4, 1}, 0.3, at::kBFloat16);
  optimizer.load_state({{"0.step", torch::tensor(1.0F)},
                        {"0.row_var", rows},
                        {"0.col_var", torch::ones({1, 4}, at::kHalf)}});
  EXPECT_EQ(optimizer.state()[1].tensor.scalar_type(), at::kFloat);
  EXPECT_TRUE(torch::equal(optimizer.state()[1].tensor, rows.to(at::kFloat)));
  const auto refused = [&](const at::Tensor& columns) {
    return message_of([&] {
      optimizer.load_state(
          {{"0.step", torch::tensor(1.0F)}, {"0.row_var", rows}, {"0.col_var", columns}});
    });
  };
  EXPECT_THAT(refused(torch::ones({1, 4}, at::kDouble)), HasSubstr("must have dtype Float"));
  EXPECT_THAT(refused(torch::ones({1, 4}, at::kByte)), HasSubstr("must have dtype Float"));
  auto half = torch::ones({4}, at::kHalf).requires_grad_();
  SGD sgd({half}, {.momentum = 0.9});
  EXPECT_THAT(
      message_of([&] { sgd.load_state({{"0.momentum_buffer", torch::ones({4}, at::kBFloat16)}}); }),
      HasSubstr("must have dtype Half; got BFloat16"));
}

TEST(OptimizerTest, NanInAGradientReachesTheParameter) {
  for (const auto& [name, make] : every_optimizer()) {
    SCOPED_TRACE(name);
    auto w = torch::ones({2}, torch::requires_grad());
    w.mutable_grad() = torch::tensor({1.0F, std::numeric_limits<float>::quiet_NaN()});
    make({w})->step();
    // Rules with a norm or a mean over the tensor spread it to the other elements.
    if (name.starts_with("adamw") || name.starts_with("sgd")) {
      EXPECT_FALSE(w[0].isnan().item<bool>());
    }
    EXPECT_TRUE(w[1].isnan().item<bool>());
  }
}

// The fused CPU kernels walk parameter, gradient and state as flat arrays: other strides would pair
// wrong elements.
TEST(OptimizerTest, StridesOfParameterAndGradientDoNotChangeTheResult) {
  for (const auto& [name, make] : every_optimizer()) {
    SCOPED_TRACE(name);
    torch::manual_seed(1);
    const auto value = torch::randn({3, 5}, torch::kDouble);
    auto plain = value.clone().requires_grad_();
    auto transposed = value.t().contiguous().t().requires_grad_();
    auto plain_optimizer = make({plain});
    auto transposed_optimizer = make({transposed});
    for (int step = 0; step < 3; ++step) {
      const auto gradient = torch::randn({3, 5}, torch::kDouble);
      plain.mutable_grad() = gradient.clone();
      transposed.mutable_grad() = step == 1 ? gradient.t().contiguous().t() : gradient.clone();
      plain_optimizer->step();
      transposed_optimizer->step();
    }
    EXPECT_TRUE(torch::allclose(plain, transposed, 1e-14, 1e-14));
    transposed.mutable_grad() = torch::ones({1, 1}, torch::kDouble).expand({3, 5});
    plain.mutable_grad() = torch::ones({3, 5}, torch::kDouble);
    plain_optimizer->step();
    transposed_optimizer->step();
    EXPECT_TRUE(torch::allclose(plain, transposed, 1e-14, 1e-14));
  }
}

TEST(OptimizerTest, ParameterWithGapsInMemoryIsUpdatedWithoutTouchingTheGaps) {
  auto base = torch::ones({4, 6}, torch::kDouble);
  auto gapped = base.slice(1, 0, 3).detach().requires_grad_();
  auto dense = torch::ones({4, 3}, torch::kDouble).requires_grad_();
  const auto gradient = torch::arange(12, torch::kDouble).reshape({4, 3});
  AdamW on_gapped({gapped}, {.lr = 0.1});
  AdamW on_dense({dense}, {.lr = 0.1});
  for (int step = 0; step < 2; ++step) {
    gapped.mutable_grad() = gradient.clone();
    dense.mutable_grad() = gradient.clone();
    on_gapped.step();
    on_dense.step();
  }
  EXPECT_TRUE(torch::allclose(gapped, dense, 1e-13, 1e-13));
  EXPECT_TRUE(torch::equal(base.slice(1, 3, 6), torch::ones({4, 3}, torch::kDouble)));
  gapped.mutable_grad() = gradient.clone();
  AdamW insists({gapped}, {.fused = true});
  EXPECT_THAT(message_of([&] { insists.step(); }),
              HasSubstr("parameter '0' must suit the fused kernel"));
}

TEST(OptimizerTest, SavedAndLoadedStateContinuesBitwise) {
  for (const auto& [name, make] : every_optimizer()) {
    SCOPED_TRACE(name);
    torch::manual_seed(2);
    auto a = torch::randn({7, 3}).requires_grad_();
    auto b = torch::randn({5}).requires_grad_();
    auto optimizer = make({a, b});
    const auto gradients = torch::randn({6, 26});
    const auto run = [&](Optimizer& target, std::vector<at::Tensor> p, int from, int to) {
      for (int step = from; step < to; ++step) {
        p[0].mutable_grad() = gradients[step].slice(0, 0, 21).reshape({7, 3}).clone();
        // b joins at step 2, so that the two have different step counts.
        if (step >= 2) p[1].mutable_grad() = gradients[step].slice(0, 21, 26).clone();
        target.step();
      }
    };
    run(*optimizer, {a, b}, 0, 3);
    std::vector<NamedState> saved;
    for (const auto& entry : optimizer->state())
      saved.push_back({entry.name, entry.tensor.clone()});
    auto a2 = a.detach().clone().requires_grad_();
    auto b2 = b.detach().clone().requires_grad_();
    run(*optimizer, {a, b}, 3, 6);

    auto resumed = make({a2, b2});
    resumed->load_state(saved);
    run(*resumed, {a2, b2}, 3, 6);
    EXPECT_TRUE(torch::equal(a, a2));
    EXPECT_TRUE(torch::equal(b, b2));
    const auto one = optimizer->state();
    const auto two = resumed->state();
    ASSERT_EQ(names_of(one), names_of(two));
    for (std::size_t i = 0; i < one.size(); ++i)
      EXPECT_TRUE(torch::equal(one[i].tensor, two[i].tensor));
  }
}

TEST(OptimizerTest, LoadedStateIsACopy) {
  auto w = torch::ones({2}, torch::requires_grad());
  SGD optimizer({w}, {.momentum = 0.9});
  auto buffer = torch::ones({2});
  optimizer.load_state({{"0.momentum_buffer", buffer}});
  buffer.fill_(7);
  EXPECT_TRUE(torch::equal(optimizer.state()[0].tensor, torch::ones({2})));
}

TEST(OptimizerTest, LoadStateRefusesWhatDoesNotFitAndChangesNothing) {
  auto w = torch::ones({2}, torch::requires_grad());
  AdamW optimizer({w});
  w.mutable_grad() = torch::ones({2});
  optimizer.step();
  const auto step = torch::tensor(5.0F);
  const auto moment = torch::ones({2});
  const std::vector<std::pair<std::vector<NamedState>, std::string>> cases{
      {{{"0.step", step}, {"0.exp_avg", torch::ones({3})}, {"0.exp_avg_sq", moment}},
       "state '0.exp_avg' must have shape [2]; got [3]"},
      {{{"0.step", step}, {"0.exp_avg", moment.to(at::kDouble)}, {"0.exp_avg_sq", moment}},
       "state '0.exp_avg' must have dtype Float; got Double"},
      {{{"0.step", step}, {"0.exp_avg", moment}},
       "state of parameter '0' must be complete; got '0.exp_avg' but no '0.exp_avg_sq'"},
      {{{"0.step", step}, {"0.exp_avg", moment}, {"0.exp_avg_sq", moment}, {"1.step", step}},
       "state '1.step' must belong to a parameter of this optimizer"},
      {{{"0.step", step}, {"0.step", step}}, "state names must differ; got '0.step' twice"},
      {{{"0.step", step}, {"0.exp_avg", at::Tensor()}, {"0.exp_avg_sq", moment}},
       "got an undefined tensor"}};
  for (const auto& [entries, message] : cases) {
    SCOPED_TRACE(message);
    EXPECT_THAT(message_of([&] { optimizer.load_state(entries); }), HasSubstr(message));
    EXPECT_EQ(optimizer.state()[0].tensor.item<float>(), 1.0F);
  }
  optimizer.load_state({});
  EXPECT_TRUE(optimizer.state().empty());
}

TEST(OptimizerTest, ZeroGradDropsOrZeroes) {
  auto w = torch::ones({2}, torch::requires_grad());
  SGD optimizer({w});
  (w * w).sum().backward();
  optimizer.zero_grad(false);
  EXPECT_TRUE(torch::equal(w.grad(), torch::zeros({2})));
  optimizer.zero_grad();
  EXPECT_FALSE(w.grad().defined());
}

TEST(OptimizerTest, GroupsHaveTheirOwnLearningRate) {
  auto a = torch::zeros({1}, torch::requires_grad());
  auto b = torch::zeros({1}, torch::requires_grad());
  SGD optimizer({{.parameters = {a}, .lr = 1.0, .weight_decay = 0.0},
                 {.parameters = {b}, .lr = 2.0, .weight_decay = 0.0}},
                SGDOptions{});
  const auto step = [&] {
    a.mutable_grad() = torch::ones({1});
    b.mutable_grad() = torch::ones({1});
    optimizer.step();
  };
  step();
  EXPECT_EQ(a.item<float>(), -1.0F);
  EXPECT_EQ(b.item<float>(), -2.0F);
  optimizer.set_learning_rate(1, 4.0);
  step();
  EXPECT_EQ(a.item<float>(), -2.0F);
  EXPECT_EQ(b.item<float>(), -6.0F);
  optimizer.set_learning_rate(8.0);
  step();
  EXPECT_EQ(a.item<float>(), -10.0F);
  EXPECT_EQ(b.item<float>(), -14.0F);
  EXPECT_THROW(optimizer.set_learning_rate(-1.0), UserError);
  EXPECT_THROW(optimizer.set_learning_rate(std::numeric_limits<double>::infinity()), UserError);
  EXPECT_THROW(optimizer.set_learning_rate(2, 1.0), UserError);
}

TEST(OptimizerTest, ParametersOfSeveralDtypesStepTogether) {
  std::vector<at::Tensor> parameters;
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kFloat}) {
    parameters.push_back(torch::ones({3}, dtype).requires_grad_());
    parameters.back().mutable_grad() = torch::ones({3}, dtype);
  }
  SGD optimizer(parameters, {.lr = 0.5});
  optimizer.step();
  for (const auto& parameter : parameters) {
    EXPECT_TRUE(
        torch::equal(parameter.detach().to(at::kDouble), torch::full({3}, 0.5, at::kDouble)));
  }
}

TEST(OptimizerTest, EmptyParameterIsFine) {
  for (const auto& [name, make] : every_optimizer()) {
    SCOPED_TRACE(name);
    auto w = torch::ones({0, 8}, torch::requires_grad());
    w.mutable_grad() = torch::ones({0, 8});
    EXPECT_NO_THROW(make({w})->step());
  }
}

TEST(OptimizerTest, ConstructionRefusesWhatCannotBeOptimised) {
  const auto w = torch::ones({2}, torch::requires_grad());
  const auto refused = [](std::vector<ParameterGroup> groups) {
    return message_of([&] { SGD optimizer(std::move(groups), SGDOptions{}); });
  };
  EXPECT_THAT(refused({}), HasSubstr("there must be at least one parameter; got none"));
  EXPECT_THAT(refused({{.parameters = {w, w}}}), HasSubstr("parameter '1' must be given once"));
  EXPECT_THAT(refused({{.parameters = {w * 2}}}), HasSubstr("parameter '0' must be a leaf"));
  EXPECT_THAT(refused({{.parameters = {torch::ones({2}, at::kLong)}}}),
              HasSubstr("real floating dtype; got Long"));
  EXPECT_THAT(refused({{.parameters = {at::Tensor()}}}), HasSubstr("must be a defined tensor"));
  EXPECT_THAT(refused({{.parameters = {w}, .lr = -1.0}}),
              HasSubstr("lr must be finite and >= 0; got -1"));
  EXPECT_THAT(refused({{.parameters = {w}, .names = {"a", "b"}}}),
              HasSubstr("got 2 names for 1 parameters"));
  EXPECT_THAT(refused({{.parameters = {w, w.detach().clone()}, .names = {"a", "a"}}}),
              HasSubstr("got 'a' twice"));
  at::Tensor inference;
  {
    const c10::InferenceMode guard;
    inference = torch::ones({2});
  }
  EXPECT_THAT(refused({{.parameters = {inference}}}), HasSubstr("must not be an inference tensor"));
}

TEST(OptimizerTest, GradientThatIsNotFiniteSkipsOrRefusesTheWholeStepByPolicy) {
  for (const auto& [name, make] : every_optimizer()) {
    for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      SCOPED_TRACE(name);
      auto good = torch::ones({2}, torch::requires_grad());
      auto empty = torch::ones({0}, torch::requires_grad());
      auto half = torch::ones({3}, at::kHalf).requires_grad_();
      auto broken = torch::ones({2}, torch::requires_grad());
      auto optimizer = make({good, empty, half, broken});
      good.mutable_grad() = torch::full({2}, 1e38F);  // large, but a number
      empty.mutable_grad() = torch::ones({0});
      half.mutable_grad() = torch::full({3}, 60000.0, at::kHalf);
      broken.mutable_grad() = torch::tensor({1.0, bad}).to(at::kFloat);
      optimizer->set_non_finite_policy(NonFinitePolicy::skip);
      const auto result = optimizer->step();
      EXPECT_TRUE(result.skipped);
      EXPECT_EQ(result.updated, 0);
      EXPECT_EQ(result.non_finite, "3");
      EXPECT_TRUE(optimizer->state().empty());

      optimizer->set_non_finite_policy(NonFinitePolicy::refuse);
      EXPECT_THAT(message_of([&] { optimizer->step(); }),
                  HasSubstr("gradient of parameter '3' must be finite; got NaN or infinity"));
      half.mutable_grad().fill_(bad);
      EXPECT_THAT(message_of([&] { optimizer->step(); }), HasSubstr("gradient of parameter '2'"));
      EXPECT_TRUE(torch::equal(good.detach(), torch::ones({2})));
      EXPECT_EQ(good._version(), 0);

      half.mutable_grad().fill_(1);
      broken.mutable_grad().fill_(1);
      const auto clean = optimizer->step();
      EXPECT_FALSE(clean.skipped);
      EXPECT_EQ(clean.updated, 4);
      EXPECT_EQ(clean.non_finite, "");
    }
  }
}

TEST(OptimizerTest, OneValueThatIsNotFiniteIsFoundInEveryDtypeAndLayout) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    for (const bool gaps : {false, true}) {
      SCOPED_TRACE(testing::Message() << dtype << (gaps ? " with gaps" : ""));
      auto w = torch::ones({300, 700}, dtype).requires_grad_();
      auto memory = torch::ones({300, gaps ? 1400 : 700}, dtype);
      const auto gradient = memory.slice(1, 0, 700);
      w.mutable_grad() = gradient;
      SGD optimizer({w}, {.lr = 0.5, .fused = false});
      optimizer.set_non_finite_policy(NonFinitePolicy::skip);
      if (gaps) memory[0][700] = std::nan("");  // beside the gradient, not in it
      const double largest = dtype == at::kHalf ? 65504.0 : 3e38;
      gradient[299][699] = largest;
      gradient[0][0] = -largest;
      EXPECT_FALSE(optimizer.step().skipped);
      for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
        gradient[299][699] = bad;
        EXPECT_TRUE(optimizer.step().skipped) << bad;
      }
    }
  }
}

TEST(OptimizerTest, GroupIsAddedWithItsOwnRateOptionsAndIndices) {
  auto a = torch::ones({2}, torch::requires_grad());
  auto b = torch::ones({2}, torch::requires_grad());
  AdamW optimizer({a}, {.lr = 0.5});
  a.mutable_grad() = torch::ones({2});
  optimizer.step();
  optimizer.add_group({.parameters = {b}, .lr = 0.25, .options = {{"beta1", 0.5}}});
  a.mutable_grad() = torch::ones({2});
  b.mutable_grad() = torch::ones({2});
  EXPECT_EQ(optimizer.step().updated, 2);
  EXPECT_THAT(optimizer.parameter_names(), ElementsAre("0", "1"));
  EXPECT_EQ(optimizer.state()[0].tensor.item<float>(), 2.0F);
  EXPECT_EQ(optimizer.state()[3].tensor.item<float>(), 1.0F);
  EXPECT_EQ(optimizer.state()[4].tensor[0].item<float>(), 0.5F);  // (1 - beta1) * 1
  EXPECT_EQ(optimizer.groups()[1].lr, 0.25);

  const auto refused = [&](ParameterGroup group) {
    return message_of([&] { optimizer.add_group(std::move(group)); });
  };
  EXPECT_THAT(refused({.parameters = {a}}), HasSubstr("parameter '2' must be given once"));
  EXPECT_THAT(refused({}), HasSubstr("must have at least one parameter; got none"));
  auto c = torch::ones({2}, torch::requires_grad());
  EXPECT_THAT(refused({.parameters = {c}, .names = {"0"}}), HasSubstr("got '0' twice"));
  EXPECT_THAT(refused({.parameters = {c}, .options = {{"beta2", 1.0}}}),
              HasSubstr("beta2 must be in [0, 1); got 1"));
  EXPECT_THAT(refused({.parameters = {c}, .options = {{"momentum", 0.5}}}),
              HasSubstr("a group's options may be lr, weight_decay, beta1, beta2, eps; got "
                        "'momentum'"));
  EXPECT_EQ(optimizer.groups().size(), 2);
}

TEST(OptimizerTest, OptionsOfAGroupCountFromTheNextStepOn) {
  auto a = torch::zeros({1}, torch::requires_grad());
  SGD optimizer({a}, {.lr = 1.0, .momentum = 0.5});
  const auto step = [&] {
    a.mutable_grad() = torch::ones({1});
    optimizer.step();
  };
  step();  // buffer 1
  EXPECT_EQ(a.item<float>(), -1.0F);
  optimizer.set_option(0, "momentum", 0.25);
  step();  // buffer 1.25
  EXPECT_EQ(a.item<float>(), -2.25F);
  optimizer.set_option(0, "lr", 2.0);
  step();  // buffer 1.3125
  EXPECT_EQ(a.item<float>(), -4.875F);
  optimizer.set_option(0, "weight_decay", 0.5);
  EXPECT_EQ(optimizer.groups()[0].weight_decay, 0.5);
  EXPECT_THAT(message_of([&] { optimizer.set_option(0, "momentum", 0.0); }),
              HasSubstr("a group's momentum must be 0 if and only if"));
  EXPECT_THAT(message_of([&] { optimizer.set_option(0, "beta1", 0.5); }), HasSubstr("got 'beta1'"));
  EXPECT_THAT(message_of([&] { optimizer.set_option(0, "lr", -1.0); }), HasSubstr("got -1"));
  EXPECT_THAT(message_of([&] { optimizer.set_option(1, "lr", 1.0); }),
              HasSubstr("group must be below 1; got 1"));
  EXPECT_EQ(optimizer.groups()[0].lr, 2.0);
  EXPECT_EQ(std::get<double>(optimizer.hyperparameters(0)[1].value), 0.25);
}

}  // namespace
}  // namespace gradus::optim
