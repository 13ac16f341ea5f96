#include <gradus/metrics/bleu.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>
#include <gradus/metrics/internal/sacrebleu_cases.h>

namespace gradus::metrics {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

TEST(BleuTest, SplitsLinesAsSacrebleuDoes) {
  for (const auto& [line, tokens] : internal::kTokenizerCases) {
    SCOPED_TRACE(line);
    EXPECT_EQ(tokenize_13a(line), tokens);
  }
}

TEST(BleuTest, ScoresAsSacrebleuDoes) {
  const std::array<BleuOptions, 5> options{{{},
                                            {.smoothing = BleuSmoothing::none},
                                            {.smoothing = BleuSmoothing::floor},
                                            {.smoothing = BleuSmoothing::add_k},
                                            {.effective_order = true}}};
  for (std::size_t i = 0; i < internal::kCorpusCases.size(); ++i) {
    const internal::CorpusCase& expected = internal::kCorpusCases[i];
    for (std::size_t j = 0; j < options.size(); ++j) {
      SCOPED_TRACE(base::join("case ", i, ", options ", j));
      const Bleu bleu = corpus_bleu(expected.hypotheses, expected.references, options[j]);
      // The same formula in the same order: only exp and log of another libm may differ.
      EXPECT_NEAR(bleu.score, expected.scores[j], 1e-11);
      EXPECT_NEAR(bleu.brevity_penalty, expected.brevity_penalty, 1e-14);
      EXPECT_EQ(bleu.hypothesis_length, expected.hypothesis_length);
      EXPECT_EQ(bleu.reference_length, expected.reference_length);
    }
  }
}

TEST(BleuTest, CountsClippedMatchesByOrder) {
  const Bleu bleu =
      corpus_bleu({"the the the cat"}, std::vector<std::string>{"the cat is the cat"});
  EXPECT_THAT(bleu.counts, testing::ElementsAre(3, 1, 0, 0));
  EXPECT_THAT(bleu.totals, testing::ElementsAre(4, 3, 2, 1));
  EXPECT_THAT(bleu.precisions, testing::ElementsAre(75.0, 100.0 / 3.0, 25.0, 25.0));
}

TEST(BleuTest, IsAHundredForTheReferenceItselfAndDependsOnCase) {
  const std::vector<std::string> text{"Wählen Sie Einfügen – Feldbefehl – Datum.",
                                      "Größe: 12,5 cm."};
  EXPECT_NEAR(corpus_bleu(text, text).score, 100.0, 1e-12);
  EXPECT_LT(
      corpus_bleu({"wählen Sie Einfügen – Feldbefehl – Datum.", "Größe: 12,5 cm."}, text).score,
      99.0);
}

TEST(BleuTest, TakesBytesThatAreNoUtf8AsWords) {
  EXPECT_EQ(tokenize_13a("a\xff.b \xc3"), "a\xff . b \xc3");
}

TEST(BleuTest, RefusesWhatItCannotScore) {
  const std::vector<std::string> none;
  EXPECT_THAT(([&] { corpus_bleu(none, none); }),
              ThrowsMessage<UserError>(HasSubstr("got 0 and 0")));
  EXPECT_THAT(([&] { corpus_bleu({"a"}, std::vector<std::string>{"a", "b"}); }),
              ThrowsMessage<UserError>(HasSubstr("got 1 and 2")));
  EXPECT_THAT(([&] { corpus_bleu({"a", "b"}, std::vector<std::vector<std::string>>{{"a"}, {}}); }),
              ThrowsMessage<UserError>(HasSubstr("number 1 has none")));
  EXPECT_THAT(([&] { corpus_bleu({"a"}, std::vector<std::string>{"a"}, {.floor_count = -1.0}); }),
              ThrowsMessage<UserError>(HasSubstr("floor_count")));
}

}  // namespace
}  // namespace gradus::metrics
