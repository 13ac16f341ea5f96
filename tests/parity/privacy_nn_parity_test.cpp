// Trained layers of gradus/privacy/nn against Python's torch.nn: the same state, by safetensors
// files, gives the same results, either way.
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <privacy_nn_parity_paths.h>
#include <unistd.h>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/privacy/nn/multihead_attention.h>
#include <gradus/privacy/nn/plain_state.h>
#include <gradus/privacy/nn/recurrent.h>
#include <gradus/state/safetensors.h>

namespace gradus::privacy::nn {
namespace {

namespace fs = std::filesystem;
using AttentionOptions = torch::nn::MultiheadAttentionOptions;
using Inputs = std::map<std::string, at::Tensor>;

// A layer, what it is called with, and the options that Python makes its own from.
struct Case {
  std::shared_ptr<torch::nn::Module> layer = nullptr;
  state::Metadata metadata = {};
  Inputs inputs = {};
  std::function<std::vector<at::Tensor>()> run = {};
};

at::Tensor find(const Inputs& inputs, const std::string& name) {
  const auto found = inputs.find(name);
  return found == inputs.end() ? at::Tensor() : found->second;
}

Case attention_case(const AttentionOptions& options, Inputs inputs, bool need_weights = true,
                    bool average = true) {
  DPMultiheadAttention layer(options);
  Case result{.layer = layer.ptr(),
              .metadata = {{"kind", "attention"},
                           {"embed_dim", std::to_string(options.embed_dim())},
                           {"num_heads", std::to_string(options.num_heads())},
                           {"bias", std::to_string(options.bias())},
                           {"add_bias_kv", std::to_string(options.add_bias_kv())},
                           {"add_zero_attn", std::to_string(options.add_zero_attn())},
                           {"kdim", std::to_string(options.kdim())},
                           {"vdim", std::to_string(options.vdim())},
                           {"need_weights", std::to_string(need_weights)},
                           {"average_attn_weights", std::to_string(average)}},
              .inputs = inputs};
  result.run = [=]() mutable {
    auto [output, weights] = layer->forward(find(inputs, "query"), find(inputs, "key"),
                                            find(inputs, "value"), find(inputs, "key_padding_mask"),
                                            need_weights, find(inputs, "attn_mask"), average);
    return need_weights ? std::vector<at::Tensor>{output, weights}
                        : std::vector<at::Tensor>{output};
  };
  return result;
}

std::vector<at::Tensor> listed(const at::Tensor& output, const at::Tensor& state) {
  return {output, state};
}
std::vector<at::Tensor> listed(const at::Tensor& output,
                               const std::tuple<at::Tensor, at::Tensor>& states) {
  return {output, std::get<0>(states), std::get<1>(states)};
}

template <typename Layer, typename Options>
Case recurrent_case(const char* kind, const Options& options, Inputs inputs) {
  Layer layer(options);
  Case result{.layer = layer.ptr(),
              .metadata = {{"kind", kind},
                           {"input_size", std::to_string(options.input_size())},
                           {"hidden_size", std::to_string(options.hidden_size())},
                           {"num_layers", std::to_string(options.num_layers())},
                           {"bias", std::to_string(options.bias())},
                           {"batch_first", std::to_string(options.batch_first())},
                           {"bidirectional", std::to_string(options.bidirectional())}},
              .inputs = inputs};
  if constexpr (std::is_same_v<Layer, DPLSTM>) {
    result.metadata["proj_size"] = std::to_string(options.proj_size());
  }
  if constexpr (std::is_same_v<Layer, DPRNN>) {
    const bool relu = std::holds_alternative<torch::enumtype::kReLU>(options.nonlinearity());
    result.metadata["nonlinearity"] = relu ? "relu" : "tanh";
  }
  result.run = [=]() mutable {
    const at::Tensor input = find(inputs, "input"), lengths = find(inputs, "lengths");
    const auto call = [&](const auto& x, auto forward) {
      if constexpr (std::is_same_v<Layer, DPLSTM>) {
        if (!inputs.contains("h")) return forward(x, std::nullopt);
        return forward(x, std::make_tuple(inputs["h"], inputs["c"]));
      } else {
        return forward(x, find(inputs, "h"));
      }
    };
    if (lengths.defined()) {
      const auto packed = torch::nn::utils::rnn::pack_padded_sequence(
          input, lengths, options.batch_first(), /*enforce_sorted=*/false);
      const auto [output, last] = call(packed, [&](const auto& x, const auto& states) {
        return layer->forward_with_packed_input(x, states);
      });
      return listed(output.data(), last);
    }
    const auto [output, last] =
        call(input, [&](const auto& x, const auto& states) { return layer->forward(x, states); });
    return listed(output, last);
  };
  return result;
}

at::Tensor draw(at::IntArrayRef shape) { return torch::randn(shape, torch::kFloat64); }

// False for the first key of each query.
at::Tensor draw_mask(at::IntArrayRef shape) {
  at::Tensor mask = torch::rand(shape) < 0.4;
  mask.select(-1, 0).fill_(false);
  return mask;
}

std::vector<Case> cases() {
  // L 4, S 5, B 3, E 6, H 2.
  const at::Tensor q = draw({4, 3, 6}), k = draw({5, 3, 6}), v = draw({5, 3, 6});
  const at::Tensor k4 = draw({5, 3, 4}), v7 = draw({5, 3, 7});
  const AttentionOptions plain(6, 2);
  const AttentionOptions both = AttentionOptions(6, 2).add_bias_kv(true).add_zero_attn(true);
  const AttentionOptions widths = AttentionOptions(6, 2).kdim(4).vdim(7).add_bias_kv(true);
  const Inputs memory{{"query", q}, {"key", k}, {"value", v}};
  const auto with = [](Inputs inputs, const std::string& name, const at::Tensor& mask) {
    inputs[name] = mask;
    return inputs;
  };
  const Inputs padded = with(memory, "key_padding_mask", draw_mask({3, 5}));
  const Inputs steps{{"input", draw({5, 3, 4})}};
  const Inputs packed = with(steps, "lengths", torch::tensor({3, 5, 1}));
  const Inputs rows{{"input", draw({3, 5, 4})}, {"lengths", torch::tensor({2, 5, 4})}};
  return {
      attention_case(plain, {{"query", q}, {"key", q}, {"value", q}}),
      attention_case(plain, memory, true, false),
      attention_case(plain, padded, false),
      attention_case(plain, with(padded, "attn_mask", draw_mask({4, 5}))),
      attention_case(both, with(padded, "attn_mask", draw_mask({6, 4, 5})), true, false),
      attention_case(both, with(memory, "attn_mask", draw({6, 4, 5}))),
      attention_case(AttentionOptions(both).bias(false), memory, false),
      attention_case(widths, {{"query", q}, {"key", k4}, {"value", v7}}),
      recurrent_case<DPRNN>("rnn", torch::nn::RNNOptions(4, 5).num_layers(2), steps),
      recurrent_case<DPRNN>(
          "rnn", torch::nn::RNNOptions(4, 5).nonlinearity(torch::kReLU).bidirectional(true),
          with(packed, "h", draw({2, 3, 5}))),
      recurrent_case<DPGRU>("gru", torch::nn::GRUOptions(4, 5).num_layers(2).bias(false), steps),
      recurrent_case<DPGRU>(
          "gru", torch::nn::GRUOptions(4, 5).num_layers(2).bidirectional(true).batch_first(true),
          rows),
      recurrent_case<DPLSTM>("lstm", torch::nn::LSTMOptions(4, 5).num_layers(2).bidirectional(true),
                             packed),
      recurrent_case<DPLSTM>("lstm", torch::nn::LSTMOptions(4, 5).proj_size(3),
                             with(with(steps, "h", draw({1, 3, 3})), "c", draw({1, 3, 5}))),
  };
}

// A few steps of SGD towards random results.
void train(Case& one) {
  one.layer->to(torch::kFloat64);
  torch::optim::SGD sgd(one.layer->parameters(), 0.2);
  at::Tensor target;
  for (int step = 0; step < 5; ++step) {
    const at::Tensor output = one.run()[0];
    if (!target.defined()) target = torch::randn_like(output);
    sgd.zero_grad();
    torch::mse_loss(output, target).backward();
    sgd.step();
  }
}

class PrivacyNnParityTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kPython)) {
      GTEST_SKIP() << "no Python at " << kPython
                   << ": run scripts/setup.sh, or configure with -DGRADUS_PYTHON=<python>";
    }
    at::set_num_threads(1);
    torch::manual_seed(5);
    std::string pattern = (fs::temp_directory_path() / "gradus-privacy-nn-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override {
    if (!directory_.empty()) fs::remove_all(directory_);
  }

  std::string path(const char* name, std::size_t i) const {
    return base::join(directory_, "/", name, "_", i, ".safetensors");
  }

  void write(const Case& one, std::size_t i, double disturbance = 0.0) const {
    std::vector<state::NamedTensor> tensors;
    for (const auto& item : plain_state(*one.layer)) {
      tensors.emplace_back("state." + item.key(), item.value());
    }
    for (const auto& [name, tensor] : one.inputs) tensors.emplace_back("in." + name, tensor);
    const torch::NoGradGuard no_grad;
    const auto results = one.run();
    for (std::size_t r = 0; r < results.size(); ++r) {
      tensors.emplace_back("out." + std::to_string(r), results[r] + disturbance);
    }
    state::save_safetensors(path("case", i), tensors, one.metadata);
  }

  int run_script() const {
    return std::system(base::join("'", kPython, "' '", kScript, "' '", directory_, "'").c_str());
  }

  std::string directory_;
};

TEST_F(PrivacyNnParityTest, TrainedLayersGiveTheSameInPythonAndPythonsGiveTheSameHere) {
  std::vector<Case> all = cases();
  for (std::size_t i = 0; i < all.size(); ++i) {
    train(all[i]);
    write(all[i], i);
  }
  EXPECT_EQ(run_script(), 0);
  for (std::size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(all[i].metadata["kind"] + " case " + std::to_string(i));
    const auto content = state::load_safetensors(path("reply", i));
    PlainState state("State");
    std::vector<at::Tensor> expected;
    for (const auto& [name, tensor] : content.tensors) {
      if (name.starts_with("state.")) state.insert(name.substr(6), tensor);
      if (name.starts_with("out.")) expected.push_back(tensor);
    }
    const torch::NoGradGuard no_grad;
    const auto before = all[i].run();
    load_plain_state(*all[i].layer, state);
    const auto results = all[i].run();
    ASSERT_EQ(results.size(), expected.size());
    for (std::size_t r = 0; r < results.size(); ++r) {
      EXPECT_TRUE(torch::allclose(results[r], expected[r], 1e-12, 1e-12)) << "result " << r;
    }
    EXPECT_FALSE(torch::allclose(before[0], expected[0])) << "the reply has the same weights";
  }
}

TEST_F(PrivacyNnParityTest, TheScriptFindsADifference) {
  std::vector<Case> all = cases();
  all[0].layer->to(torch::kFloat64);
  write(all[0], 0, 1e-9);
  EXPECT_NE(run_script(), 0);
}

}  // namespace
}  // namespace gradus::privacy::nn
