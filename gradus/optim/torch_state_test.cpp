#include <gradus/optim/torch_state.h>

#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/optim/adamw.h>
#include <gradus/optim/muon.h>
#include <gradus/optim/sgd.h>

#include <tests/support/message_of.h>

namespace gradus::optim {
namespace {

using testing::HasSubstr;
using tests::message_of;

at::Tensor parameter() { return torch::ones({2}).requires_grad_(); }

TEST(TorchStateTest, HasTorchsStructure) {
  auto a = parameter(), b = parameter(), c = parameter();
  AdamW optimizer({{.parameters = {a}, .lr = 0.5, .weight_decay = 0.25, .names = {"h.weight"}},
                   {.parameters = {b, c},
                    .lr = 0.125,
                    .weight_decay = 0.0,
                    .names = {"h.bias", "x.y"},
                    .options = {{"beta1", 0.5}}}},
                  AdamWOptions{.amsgrad = true});
  a.mutable_grad() = torch::ones({2});
  c.mutable_grad() = torch::ones({2});
  optimizer.step();
  const auto state = to_torch_state(optimizer);
  std::vector<std::string> names;
  for (const auto& entry : state.tensors) names.push_back(entry.name);
  EXPECT_THAT(names,
              testing::ElementsAre("state.0.step", "state.0.exp_avg", "state.0.exp_avg_sq",
                                   "state.0.max_exp_avg_sq", "state.2.step", "state.2.exp_avg",
                                   "state.2.exp_avg_sq", "state.2.max_exp_avg_sq"));
  EXPECT_EQ(state.param_groups,
            R"([{"lr":0.5,"betas":[0.9,0.999],"eps":1e-08,"weight_decay":0.25,"amsgrad":true,)"
            R"("maximize":false,"params":[0],"param_names":["h.weight"]},)"
            R"({"lr":0.125,"betas":[0.5,0.999],"eps":1e-08,"weight_decay":0.0,"amsgrad":true,)"
            R"("maximize":false,"params":[1,2],"param_names":["h.bias","x.y"]}])");
}

TEST(TorchStateTest, RoundTripContinuesBitwiseWithRatesAndOptions) {
  torch::manual_seed(61);
  auto a = torch::randn({3, 2}).requires_grad_();
  auto b = torch::randn({3}).requires_grad_();
  MuonWithAdamW first(muon_groups({{"w", a}, {"b", b}}));
  first.set_option(0, "momentum", 0.5);
  first.set_option(1, "beta2", 0.75);
  first.set_learning_rate(1, 0.25);
  a.mutable_grad() = torch::randn({3, 2});
  b.mutable_grad() = torch::randn({3});
  first.step();
  auto a2 = a.detach().clone().requires_grad_();
  auto b2 = b.detach().clone().requires_grad_();
  MuonWithAdamW second(muon_groups({{"w", a2}, {"b", b2}}));
  load_torch_state(second, to_torch_state(first));
  EXPECT_EQ(second.groups()[1].lr, 0.25);
  a2.mutable_grad() = a.grad().clone();
  b2.mutable_grad() = b.grad().clone();
  first.step();
  second.step();
  EXPECT_TRUE(torch::equal(a, a2));
  EXPECT_TRUE(torch::equal(b, b2));
}

TEST(TorchStateTest, WhatDoesNotFitIsRefusedAndChangesNothing) {
  auto a = parameter();
  SGD optimizer({{.parameters = {a}, .lr = 0.5, .names = {"w"}}}, {.momentum = 0.9});
  const NamedState buffer{"state.0.momentum_buffer", torch::ones({2})};
  const std::vector<std::pair<TorchState, std::string>> cases{
      {{{}, "{"}, "param_groups must be a JSON list"},
      {{{}, "[1]"}, "each of param_groups must have a list 'params'; got 1"},
      {{{}, "[]"}, "param_groups must have 1 groups, as this optimizer; got 0"},
      {{{}, R"([{"params":[0,1]}])"}, "group 0 must have 1 parameters; got 2"},
      {{{}, R"([{"params":["a"]}])"}, "the params of group 0 must be indices"},
      {{{}, R"([{"params":[0],"param_names":["v"]}])"}, "must have the name 'w'; got \"v\""},
      {{{}, R"([{"params":[0],"nesterov":true}])"},
       "'nesterov' of group 0 must be that of this optimizer, which cannot change it after "
       "construction; got true and not false"},
      {{{}, R"([{"params":[0],"lr":"x"}])"}, "'lr' of group 0 must be a number; got \"x\""},
      {{{}, R"([{"params":[0],"lr":0.25,"momentum":-1}])"}, "momentum must be finite and >= 0"},
      {{{{"0.momentum_buffer", torch::ones({2})}}, R"([{"params":[0]}])"},
       "tensors must be named state.<index>.<name>; got '0.momentum_buffer'"},
      {{{{"state.1.momentum_buffer", torch::ones({2})}}, R"([{"params":[0]}])"},
       "there is no index 1"},
      {{{{"state.0.momentum_buffer", torch::ones({3})}}, R"([{"params":[0],"lr":0.25}])"},
       "state 'w.momentum_buffer' must have shape [2]; got [3]"}};
  for (const auto& [state, message] : cases) {
    SCOPED_TRACE(message);
    EXPECT_THAT(message_of([&] { load_torch_state(optimizer, state); }), HasSubstr(message));
    EXPECT_EQ(optimizer.groups()[0].lr, 0.5);
    EXPECT_TRUE(optimizer.state().empty());
  }
  load_torch_state(optimizer,
                   {{buffer}, R"([{"params":[0],"lr":0.25,"foreach":null,"momentum":0.5}])"});
  EXPECT_EQ(optimizer.groups()[0].lr, 0.25);
  EXPECT_EQ(optimizer.groups()[0].options.at("momentum"), 0.5);
  EXPECT_EQ(optimizer.state()[0].name, "w.momentum_buffer");
}

TEST(TorchStateTest, SixteenBitStateOfTorchIsCast) {
  auto w = torch::ones({4, 4}, at::kBFloat16).requires_grad_();
  Muon optimizer({w});
  const auto buffer = torch::full({4, 4}, 0.3, at::kBFloat16);
  load_torch_state(optimizer, {{{"state.0.momentum_buffer", buffer}}, R"([{"params":[0]}])"});
  EXPECT_TRUE(torch::equal(optimizer.state()[0].tensor, buffer.to(at::kFloat)));
}

}  // namespace
}  // namespace gradus::optim
