// Repeats under gradus's autocast what amp_autocast_parity.py ran under Python's: the same types,
// and the same values where the same kernels ran.

#include <filesystem>
#include <functional>
#include <map>
#include <string>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/amp/autocast/autocast.h>

#include <tests/support/python_recording.h>

namespace gradus::amp {
namespace {

constexpr int kSteps = 8;
constexpr double kRate = 0.1;

using Recording = std::map<std::string, at::Tensor>;
using Note = std::function<at::Tensor(const std::string&, at::Tensor)>;
using Net = std::function<at::Tensor(Recording&, at::Tensor, const Note&)>;

Recording record() {
  Recording recording;
  for (const auto& entry : tests::python_recording(GRADUS_PARITY_PYTHON, GRADUS_PARITY_SCRIPT)) {
    recording[entry.key().toStringRef()] = entry.value().toTensor();
  }
  return recording;
}

class AmpAutocastParityTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    if (std::filesystem::exists(GRADUS_PARITY_PYTHON)) recording_ = record();
  }
  void SetUp() override {
    if (recording_.empty()) {
      GTEST_SKIP() << "no Python interpreter at " << GRADUS_PARITY_PYTHON
                   << ": run scripts/setup.sh";
    }
  }
  static const at::Tensor& get(const std::string& key) { return recording_.at(key); }

  static inline Recording recording_;
};

TEST_F(AmpAutocastParityTest, WithTorchsListsEachOperatorGivesItsTypeAndValues) {
  const auto a = get("input/a"), b = get("input/b"), p = get("input/p"), q = get("input/q");
  const auto image = get("input/image"), kernel = get("input/kernel");
  const auto c = a.to(at::kBFloat16);
  const auto labels = torch::arange(6);
  Recording got;
  {
    const AutocastGuard guard(
        {.dtype = at::kBFloat16, .lists = OperatorLists::of_torch(c10::DeviceType::CPU)});
    got = {
        {"mm", at::mm(a, b)},
        {"linear", at::linear(a, b)},
        {"addmm", at::addmm(a, a, b)},
        {"bmm", at::bmm(a.unsqueeze(0), b.unsqueeze(0))},
        {"matmul", at::matmul(a, b)},
        {"conv2d", at::conv2d(image, kernel)},
        {"conv_transpose2d", at::conv_transpose2d(image, kernel)},
        {"attention", at::scaled_dot_product_attention(q, q, q)},
        {"prelu", at::prelu(c, p[0].narrow(0, 0, 1))},
        {"softmax", c.softmax(-1)},
        {"layer_norm", at::layer_norm(c, {6})},
        {"batch_norm",
         at::batch_norm(image.to(at::kBFloat16), {}, {}, {}, {}, true, 0.1, 1e-5, false)},
        {"sum", c.sum()},
        {"exp", c.exp()},
        {"gelu", at::gelu(c)},
        {"add", c + a},
        {"mse_loss", at::mse_loss(c, b)},
        {"cross_entropy", at::cross_entropy_loss(c, labels)},
        {"binary_cross_entropy", at::binary_cross_entropy(p.to(at::kBFloat16), p)},
        {"smooth_l1_loss", at::smooth_l1_loss(c, b)},
        {"cdist", at::cdist(c, c)},
        {"trace", c.trace()},
        {"prod", c.prod()},
        {"inverse", at::inverse(c)},
        {"cat", at::cat({c, a})},
        {"cat_lower", at::cat({c, c})},
        {"stack", at::stack({a, c})},
        {"index_copy", a.index_copy(0, torch::tensor({0, 2}), c.narrow(0, 0, 2))},
    };
  }
  std::size_t compared = 0;
  for (const auto& [key, expected] : recording_) {
    if (!key.starts_with("operator/")) continue;
    const auto& result = got.at(key.substr(9));
    EXPECT_EQ(result.scalar_type(), expected.scalar_type()) << key;
    EXPECT_TRUE(at::allclose(result.to(at::kDouble), expected.to(at::kDouble), 1e-2, 1e-3)) << key;
    ++compared;
  }
  EXPECT_EQ(compared, got.size());
}

at::Tensor gpt(Recording& w, at::Tensor x, const Note& note) {
  auto h = at::embedding(w["embedding"], x);
  const auto B = x.size(0), T = x.size(1);
  for (const std::string layer : {"0.", "1."}) {
    auto t = note(layer + "norm1", at::layer_norm(h, {32}, w[layer + "norm1"]));
    t = note(layer + "qkv", at::linear(t, w[layer + "qkv"]));
    const auto parts = t.view({B, T, 3, 4, 8}).permute({2, 0, 3, 1, 4}).unbind();
    t = note(layer + "attention",
             at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true));
    t = note(layer + "proj", at::linear(t.transpose(1, 2).reshape({B, T, 32}), w[layer + "proj"]));
    h = note(layer + "sum", h + t);
    t = at::linear(at::layer_norm(h, {32}, w[layer + "norm2"]), w[layer + "up"]);
    h = h + at::linear(note(layer + "gelu", at::gelu(t)), w[layer + "down"]);
  }
  return note("logits", at::linear(h, w["embedding"])).flatten(0, 1);
}

at::Tensor cnn(Recording& w, at::Tensor x, const Note& note) {
  for (const std::string layer : {"0.", "1."}) {
    x = note(layer + "conv", at::conv2d(x, w[layer + "conv"], {}, {2, 2}, {1, 1}));
    x = note(layer + "norm",
             at::batch_norm(x, w[layer + "norm"], {}, {}, {}, true, 0.1, 1e-5, false));
    x = at::relu(x);
  }
  return note("logits", at::linear(note("mean", x.mean(at::IntArrayRef{2, 3})), w["head"]));
}

// @param lists  Whose types are compared activation by activation where they are torch's.
void train(const Recording& recording, const std::string& name, const Net& net,
           const OperatorLists& lists, bool same_lists) {
  SCOPED_TRACE(name + (same_lists ? " with torch's lists" : " with the default lists"));
  Recording w;
  const auto prefix = name + "/weight/";
  for (const auto& [key, tensor] : recording) {
    if (key.starts_with(prefix)) w[key.substr(prefix.size())] = tensor.clone().requires_grad_();
  }
  ASSERT_FALSE(w.empty());
  for (int step = 0; step < kSteps; ++step) {
    const auto at_step = [&](const std::string& key) {
      return recording.at(name + "/" + key + "/" + std::to_string(step));
    };
    const Note note = [&](const std::string& key, at::Tensor tensor) {
      if (step > 0) return tensor;
      const auto& expected = recording.at(name + "/activation/" + key);
      if (same_lists || key != "mean") {  // the default lists take means in float32
        EXPECT_EQ(tensor.scalar_type(), expected.scalar_type()) << key;
      }
      const auto error = (tensor.detach().to(at::kFloat) - expected.to(at::kFloat)).abs().max();
      EXPECT_LE(error.item<double>(), 0.02 * expected.to(at::kFloat).abs().max().item<double>())
          << key;
      return tensor;
    };
    at::Tensor loss;
    {
      const AutocastGuard guard({.dtype = at::kBFloat16, .lists = lists});
      loss = at::cross_entropy_loss(net(w, at_step("input"), note), at_step("target"));
    }
    loss.backward();
    const double expected = at_step("loss").item<double>();
    EXPECT_NEAR(loss.item<double>(), expected, 5e-3 * expected) << "step " << step;
    const at::NoGradGuard no_grad;
    for (auto& [key, parameter] : w) {
      parameter.sub_(parameter.grad(), kRate);
      parameter.mutable_grad() = at::Tensor();
    }
  }
  for (const auto& [key, parameter] : w) {
    const auto& expected = recording.at(name + "/final/" + key);
    EXPECT_LE((parameter.detach() - expected).norm().item<double>(),
              5e-3 * expected.norm().item<double>())
        << key;
  }
}

TEST_F(AmpAutocastParityTest, AGptTrainsAsUnderPythonsAutocast) {
  train(recording_, "gpt", gpt, OperatorLists::of_torch(c10::DeviceType::CPU), true);
  train(recording_, "gpt", gpt, OperatorLists::defaults(c10::DeviceType::CPU, at::kBFloat16),
        false);
}

TEST_F(AmpAutocastParityTest, AConvolutionalNetTrainsAsUnderPythonsAutocast) {
  train(recording_, "cnn", cnn, OperatorLists::of_torch(c10::DeviceType::CPU), true);
  train(recording_, "cnn", cnn, OperatorLists::defaults(c10::DeviceType::CPU, at::kBFloat16),
        false);
}

}  // namespace
}  // namespace gradus::amp
