// The table of layer kinds and engines of docs/persample_engine.md: made by running each kind with
// each engine, and compared with the page. GRADUS_UPDATE_DOCS=1 writes it anew.

#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/engine/internal/loss_testing.h>
#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/persample/vmap/loop.h>

namespace gradus::persample {
namespace {

using at::Tensor;
using internal::by_example;
namespace nn = torch::nn;

constexpr const char* kBegin = "<!-- layer table: begin -->\n";
constexpr const char* kEnd = "<!-- layer table: end -->";

struct Kind {
  std::string name{};
  std::shared_ptr<nn::Module> module = nullptr;
  LossFunction loss = nullptr;
  Batch batch{};
};

template <typename Holder>
Kind kind(const std::string& name, Holder layer, const Tensor& input) {
  return {name,
          layer.ptr(),
          [layer](const Batch& b) mutable { return by_example(layer(b[0]).pow(2).sin()); },
          {input}};
}

std::vector<Kind> kinds(at::ScalarType type) {
  const auto values = [&](at::IntArrayRef sizes) { return at::randn(sizes, type); };
  std::vector<Kind> all;
  all.push_back(kind("Linear", nn::Linear(6, 5), values({4, 6})));
  all.push_back(kind("Linear over a sequence", nn::Linear(6, 5), values({4, 3, 6})));
  nn::Bilinear bilinear(3, 3, 2);
  all.push_back({"Bilinear",
                 bilinear.ptr(),
                 [=](const Batch& b) mutable { return by_example(bilinear(b[0], b[0]).sin()); },
                 {values({4, 3})}});
  all.push_back(kind("Conv1d", nn::Conv1d(nn::Conv1dOptions(2, 4, 3).stride(2).padding(1)),
                     values({4, 2, 9})));
  all.push_back(
      kind("Conv2d", nn::Conv2d(nn::Conv2dOptions(2, 4, 3).groups(2)), values({4, 2, 6, 6})));
  all.push_back(
      kind("Conv2d, circular padding",
           nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1).padding_mode(torch::kCircular)),
           values({4, 2, 5, 5})));
  all.push_back(kind("Conv3d", nn::Conv3d(nn::Conv3dOptions(2, 2, 2)), values({4, 2, 3, 3, 3})));
  all.push_back(kind("ConvTranspose2d",
                     nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2, 3, 3).stride(2)),
                     values({4, 2, 4, 4})));
  all.push_back(kind("LayerNorm", nn::LayerNorm(nn::LayerNormOptions({6})), values({4, 3, 6})));
  all.push_back(kind("GroupNorm", nn::GroupNorm(nn::GroupNormOptions(2, 4)), values({4, 4, 5})));
  all.push_back(kind("InstanceNorm1d, affine",
                     nn::InstanceNorm1d(nn::InstanceNorm1dOptions(4).affine(true)),
                     values({4, 4, 5})));
  nn::BatchNorm1d frozen(4);
  frozen->eval();
  all.push_back(kind("BatchNorm1d, eval", frozen, values({4, 4, 5})));
  nn::Sequential trained(nn::Linear(4, 4), nn::BatchNorm1d(4));
  all.push_back({"BatchNorm1d, training",
                 trained.ptr(),
                 [=](const Batch& b) mutable { return by_example(trained->forward(b[0]).sin()); },
                 {values({4, 4})}});
  const auto ids = at::randint(10, {4, 5});
  all.push_back(kind("Embedding", nn::Embedding(10, 6), ids));
  all.push_back(kind("EmbeddingBag, sum",
                     nn::EmbeddingBag(nn::EmbeddingBagOptions(10, 6).mode(torch::kSum)), ids));
  all.push_back(kind("EmbeddingBag, mean",
                     nn::EmbeddingBag(nn::EmbeddingBagOptions(10, 6).mode(torch::kMean)), ids));
  all.push_back(kind("EmbeddingBag, max",
                     nn::EmbeddingBag(nn::EmbeddingBagOptions(10, 6).mode(torch::kMax)), ids));
  const auto recurrent = [&](const std::string& name, auto layer) {
    all.push_back(
        {name,
         layer.ptr(),
         [=](const Batch& b) mutable { return by_example(std::get<0>(layer(b[0])).sin()); },
         {values({4, 5, 6})}});
  };
  recurrent("RNN", nn::RNN(nn::RNNOptions(6, 3).batch_first(true)));
  recurrent("GRU, two layers, both directions",
            nn::GRU(nn::GRUOptions(6, 3).batch_first(true).num_layers(2).bidirectional(true)));
  recurrent("LSTM", nn::LSTM(nn::LSTMOptions(6, 3).batch_first(true)));
  nn::GRU packed(nn::GRUOptions(6, 3).batch_first(true));
  all.push_back(
      {"GRU, packed sequences",
       packed.ptr(),
       [=](const Batch& b) mutable {
         const auto sequence = nn::utils::rnn::pack_padded_sequence(b[0], b[1].cpu(), true, false);
         return by_example(
             std::get<0>(nn::utils::rnn::pad_packed_sequence(
                             std::get<0>(packed->forward_with_packed_input(sequence)), true))
                 .sin());
       },
       {values({4, 5, 6}), at::tensor({2, 5, 3, 1}, at::kLong)}});
  nn::MultiheadAttention attention(6, 2);
  all.push_back({"MultiheadAttention",
                 attention.ptr(),
                 [=](const Batch& b) mutable {
                   const auto x = b[0].transpose(0, 1);
                   return by_example(std::get<0>(attention(x, x, x)).transpose(0, 1).sin());
                 },
                 {values({4, 5, 6})}});
  all.push_back(kind("PReLU", nn::PReLU(nn::PReLUOptions().num_parameters(3)), values({4, 3, 5})));
  for (Kind& each : all) each.module->to(type);
  return all;
}

std::string outcome(const Kind& kind, Engine engine, double tolerance) {
  SampleOptions options{.engine = engine};
  std::vector<std::string> lines;
  options.log = [&](const std::string& line) { lines.push_back(line); };
  if (engine == Engine::graph) options.strict = true;
  try {
    SampleGradients table(kind.module, options);
    table.backward(kind.loss, kind.batch);
    const auto want = loop_gradients(parameters_of(*kind.module), kind.loss, kind.batch);
    for (std::size_t i = 0; i < want.size(); ++i) {
      const double scale = want[i].norm().item<double>() + 1e-6;
      if (!((table.gradients(i) - want[i]).norm().item<double>() <= tolerance * scale))
        return "WRONG";
    }
    if (engine != Engine::graph) return "yes";
    for (const std::string& line : table.explain()) {
      if (line.find("own formula") != std::string::npos) return "own formula";
    }
    return "rule";
  } catch (const UserError&) {
    return "refused";
  }
}

std::string make_table() {
  torch::manual_seed(0);
  at::set_num_threads(1);
  const auto doubles = kinds(at::kDouble);
  const auto floats = kinds(at::kFloat);
  std::ostringstream table;
  table << "| layer | graph, float64 | graph, float32 | vmap | loop |\n|---|---|---|---|---|\n";
  for (std::size_t i = 0; i < doubles.size(); ++i) {
    table << "| " << doubles[i].name << " | " << outcome(doubles[i], Engine::graph, 1e-9) << " | "
          << outcome(floats[i], Engine::graph, 1e-4) << " | "
          << outcome(doubles[i], Engine::vmap, 1e-9) << " | "
          << outcome(doubles[i], Engine::loop, 1e-9) << " |\n";
  }
  return table.str();
}

TEST(LayerTableTest, ThePageShowsWhatEachEngineDoesWithEachLayer) {
  const std::string path = GRADUS_SOURCE_DIR "/docs/persample_engine.md";
  std::ifstream file(path);
  std::string page{std::istreambuf_iterator<char>(file), {}};
  const auto begin = page.find(kBegin), end = page.find(kEnd);
  ASSERT_TRUE(begin != std::string::npos && end != std::string::npos) << path;
  const auto start = begin + std::string(kBegin).size();
  const std::string table = make_table();
  EXPECT_EQ(table.find("WRONG"), std::string::npos) << table;
  if (std::getenv("GRADUS_UPDATE_DOCS") != nullptr) {
    page.replace(start, end - start, table);
    std::ofstream(path) << page;
  }
  EXPECT_EQ(page.substr(start, page.find(kEnd) - start), table)
      << "run this test with GRADUS_UPDATE_DOCS=1 and look at the difference";
}

}  // namespace
}  // namespace gradus::persample
