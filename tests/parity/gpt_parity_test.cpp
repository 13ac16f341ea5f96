// The C++ GPT against gpt_model.py: same weights, read by Python's safetensors, give the same
// logits and gradients.
#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <gpt_parity_paths.h>
#include <unistd.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include <gradus/base/error.h>
#include <gradus/models/gpt.h>
#include <gradus/state/safetensors.h>

namespace gradus::models {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t kSeed = 11;

constexpr GptOptions kSizes[] = {
    {.vocabulary = 97, .context = 24, .layers = 3, .heads = 4, .width = 32},
    {.vocabulary = 50, .context = 7, .layers = 1, .heads = 1, .width = 24, .bias = false}};

class GptParityTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!fs::exists(kPython)) {
      GTEST_SKIP() << "no Python at " << kPython
                   << ": run scripts/setup.sh, or configure with -DGRADUS_PYTHON=<python>";
    }
    at::set_num_threads(1);
    std::string pattern = (fs::temp_directory_path() / "gradus-gpt-XXXXXX").string();
    directory_ = ::mkdtemp(pattern.data());
  }
  void TearDown() override {
    if (!directory_.empty()) fs::remove_all(directory_);
  }

  // Weights drawn from kSeed, one batch, its logits, its gradients, as files; returns
  // gpt_parity.py's exit code.
  int compare(const GptOptions& options, double disturbance) const {
    Gpt gpt(options);
    gpt->reset_parameters(at::make_generator<at::CPUGeneratorImpl>(kSeed));
    std::vector<state::NamedTensor> weights, results;
    for (const auto& item : gpt->named_parameters())
      weights.emplace_back(item.key(), item.value().detach());
    state::save_safetensors(directory_ + "/weights.safetensors", weights);

    const at::Tensor ids = at::randint(0, options.vocabulary, {3, options.context}, at::kLong);
    const at::Tensor targets = at::randint(0, options.vocabulary, {3, options.context}, at::kLong);
    const at::Tensor logits = gpt->forward(ids);
    at::cross_entropy_loss(logits.view({-1, options.vocabulary}), targets.view({-1})).backward();
    results = {{"ids", ids}, {"targets", targets}, {"logits", logits.detach() + disturbance}};
    for (const auto& item : gpt->named_parameters())
      results.emplace_back("grad." + item.key(), item.value().grad());
    state::save_safetensors(directory_ + "/results.safetensors", results,
                            {{"vocabulary", std::to_string(options.vocabulary)},
                             {"context", std::to_string(options.context)},
                             {"layers", std::to_string(options.layers)},
                             {"heads", std::to_string(options.heads)},
                             {"width", std::to_string(options.width)},
                             {"bias", std::to_string(options.bias)},
                             {"seed", std::to_string(kSeed)}});
    return std::system(base::join("'", kPython, "' '", kScript, "' '", directory_, "'").c_str());
  }

  std::string directory_;
};

TEST_F(GptParityTest, PythonGivesTheSameWeightsLogitsAndGradients) {
  for (const GptOptions& options : kSizes) {
    SCOPED_TRACE(options.layers);
    EXPECT_EQ(compare(options, 0.0), 0);
  }
}

TEST_F(GptParityTest, TheComparisonSeesADifferenceOfOneInTenThousand) {
  EXPECT_NE(compare(kSizes[1], 1e-4), 0);
}

}  // namespace
}  // namespace gradus::models
