// Runs the examples on small data that is written here, as a user does: by their command lines.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <example_paths.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <examples/support.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/error.h>
#include <gradus/report/metrics.h>

namespace gradus::examples {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string read_all(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

struct Ended {
  int code = -1;
  std::string out = {};
  std::string err = {};
};

class RealExamplesTest : public testing::Test {
 protected:
  RealExamplesTest() {
    std::string pattern = (fs::temp_directory_path() / "gradus-examples-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    folder_ = pattern;
  }
  ~RealExamplesTest() override {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  /// Runs a program on one thread; no argument has a quote.
  Ended run(const char* program, const std::vector<std::string>& arguments) const {
    std::string command = std::string("OMP_WAIT_POLICY=passive '") + program + "' --threads 1";
    for (const std::string& argument : arguments) command += " '" + argument + "'";
    command += " >'" + path("out") + "' 2>'" + path("err") + "' </dev/null";
    const int status = std::system(command.c_str());  // NOLINT(cert-env33-c): paths of this test
    return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1,
            .out = read_all(path("out")),
            .err = read_all(path("err"))};
  }

  std::vector<double> losses(const std::string& run) const {
    std::vector<double> result;
    for (const report::StepMetrics& step : report::read_metrics(folder_ / run / "metrics.jsonl"))
      result.push_back(step.loss);
    return result;
  }

  std::int64_t peak(const std::string& run) const {
    std::int64_t bytes = 0;
    for (const report::StepMetrics& step : report::read_metrics(folder_ / run / "metrics.jsonl"))
      bytes = std::max(bytes, step.peak_bytes);
    return bytes;
  }

  /// Trains without a limit and by a budget of a share of what that took: the losses must be the
  /// same bits, the limit held, and something run again.
  void expect_the_same_losses_by_a_budget(const char* program, std::vector<std::string> arguments,
                                          double share) {
    const auto with = [&](const std::vector<std::string>& more) {
      std::vector<std::string> all = arguments;
      all.insert(all.end(), more.begin(), more.end());
      return run(program, all);
    };
    const Ended plain = with({"--plan", "none", "--memory", "", "--out", path("free")});
    ASSERT_EQ(plain.code, 0) << plain.err;
    EXPECT_THAT(plain.out, HasSubstr(" 0 operators run again"));
    const auto limit = static_cast<std::int64_t>(share * static_cast<double>(peak("free")));
    const std::string memory = std::to_string(limit);
    const Ended budget = with({"--memory", memory, "--out", path("budget")});
    ASSERT_EQ(budget.code, 0) << budget.err;
    EXPECT_THAT(budget.out, Not(HasSubstr(" 0 operators run again")));
    EXPECT_LE(peak("budget"), limit);
    EXPECT_EQ(losses("budget"), losses("free"));
    EXPECT_THAT(read_all(path("budget/report.html")),
                AllOf(HasSubstr("</html>"), HasSubstr("operators run again")));

    const Ended refused = with({"--plan", "none", "--memory", memory, "--out", path("refused")});
    EXPECT_EQ(refused.code, 1);
    EXPECT_THAT(refused.err, HasSubstr("device memory limit of " + base::format_bytes(limit)));
    EXPECT_EQ(std::count(refused.err.begin(), refused.err.end(), '\n'), 1) << refused.err;
  }

  /// Compares under a limit that plain training of @p shallow just keeps on its own; @p name and @p
  /// value are one more flag. Returns the limit.
  std::int64_t expect_deeper_by_a_budget(const char* program, std::vector<std::string> shallow,
                                         std::vector<std::string> deep, const std::string& name,
                                         const std::string& value) {
    shallow.insert(shallow.end(),
                   {"--plan", "none", "--memory", "", "--out", path("free"), name, value});
    const Ended plain = run(program, shallow);
    EXPECT_EQ(plain.code, 0) << plain.err;
    const std::int64_t limit = peak("free") + peak("free") / 10;
    deep.insert(deep.end(), {"--compare", "--memory", std::to_string(limit), "--out", path("both"),
                             name, value});
    const Ended ended = run(program, deep);
    EXPECT_EQ(ended.code, 0) << ended.err << ended.out;
    EXPECT_THAT(ended.out, HasSubstr("does not fit"));
    EXPECT_LE(peak("both/budget"), limit);
    EXPECT_TRUE(fs::exists(path("both/budget/report.html")));
    return limit;
  }

  fs::path folder_;
};

TEST(RunOptionsTest, NameTheFlagThatIsWrong) {
  const auto refused = [](RunOptions options, const char* text) {
    EXPECT_THAT(([&] { validate(options); }), testing::ThrowsMessage<UserError>(HasSubstr(text)));
  };
  const RunOptions good{.memory = "1GiB", .out = "x"};
  EXPECT_NO_THROW(validate(good));
  const auto with = [&](auto change) {
    RunOptions options = good;
    change(options);
    return options;
  };
  refused(with([](RunOptions& o) { o.steps = 0; }), "--steps must be >= 1; got 0");
  refused(with([](RunOptions& o) { o.batch = -1; }), "--batch must be >= 1; got -1");
  refused(with([](RunOptions& o) { o.threads = -1; }), "--threads must be >= 0; got -1");
  refused(with([](RunOptions& o) { o.lr = NAN; }), "--lr must be finite");
  refused(with([](RunOptions& o) { o.plan = "magic"; }), "--plan must be budget or none");
  refused(with([](RunOptions& o) { o.memory = "lots"; }), "lots");
  refused(with([](RunOptions& o) { o.memory = "0"; }), "--memory must be > 0");
  refused(with([](RunOptions& o) { o.memory = ""; }), "set --memory");
  refused(with([](RunOptions& o) { o.out = ""; }), "--out must name a directory");
  refused(with([](RunOptions& o) {
            o.plan = "none";
            o.compare = true;
          }),
          "leave out --plan");
}

// --- Fashion-MNIST

void write_idx(const fs::path& path, std::vector<std::uint32_t> sizes, const std::string& bytes) {
  std::string content;
  const auto number = [&](std::uint32_t value) {
    for (int shift = 24; shift >= 0; shift -= 8)
      content += static_cast<char>((value >> shift) & 0xFF);
  };
  number(0x800 + static_cast<std::uint32_t>(sizes.size()));
  for (const std::uint32_t size : sizes) number(size);
  content += bytes;
  gzFile file = gzopen(path.c_str(), "wb");
  gzwrite(file, content.data(), static_cast<unsigned>(content.size()));
  gzclose(file);
}

/// Images of 8 x 8 in four kinds: the quarter that is bright.
void write_images(const fs::path& folder) {
  fs::create_directories(folder);
  for (const auto& [prefix, count] : {std::pair{"train", 64}, {"t10k", 24}}) {
    std::string pixels;
    std::string labels;
    for (int i = 0; i < count; ++i) {
      const int kind = i % 4;
      labels += static_cast<char>(kind);
      for (int y = 0; y < 8; ++y) {
        for (int x = 0; x < 8; ++x) {
          const bool bright = (y / 4) * 2 + x / 4 == kind;
          pixels += static_cast<char>((bright ? 180 : 20) + (i * 7 + y * 5 + x * 3) % 40);
        }
      }
    }
    const auto images = static_cast<std::uint32_t>(count);
    write_idx(folder / (std::string(prefix) + "-images-idx3-ubyte.gz"), {images, 8, 8}, pixels);
    write_idx(folder / (std::string(prefix) + "-labels-idx1-ubyte.gz"), {images}, labels);
  }
}

class FashionMnistTest : public RealExamplesTest {
 protected:
  FashionMnistTest() { write_images(folder_ / "data"); }

  std::vector<std::string> small(std::int64_t depth) const {
    return {"--data",  path("data"), "--image-size", "32", "--width", "4",
            "--batch", "16",         "--eval-every", "2",  "--depth", std::to_string(depth)};
  }
};

TEST_F(FashionMnistTest, GivesTheSameLossesByABudget) {
  std::vector<std::string> arguments = small(30);
  arguments.insert(arguments.end(), {"--steps", "4"});
  expect_the_same_losses_by_a_budget(kFashionMnist, arguments, 0.65);
}

TEST_F(FashionMnistTest, TrainsDeeperThanPlainUnderOneLimitAndReportsBoth) {
  const std::int64_t limit =
      expect_deeper_by_a_budget(kFashionMnist, small(12), small(18), "--steps", "3");
  EXPECT_LE(peak("both/plain"), limit);
  EXPECT_THAT(read_all(path("both/report.html")),
              AllOf(HasSubstr("<td>ResNet-18, width 4</td></tr>"), HasSubstr("of 24 images"),
                    HasSubstr("href=\"plain/report.html\"")));
  EXPECT_TRUE(fs::exists(path("both/plain/report.html")));
}

TEST_F(FashionMnistTest, RefusesToCompareWhatPlainTrainingCanDo) {
  std::vector<std::string> arguments = small(12);
  arguments.insert(arguments.end(), {"--compare", "--memory", "1GiB", "--out", path("x")});
  const Ended ended = run(kFashionMnist, arguments);
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr("12 fits under 1.0 GiB without a budget"));
}

TEST_F(FashionMnistTest, RefusesBadUsageByOneLineAndCodeTwo) {
  const auto refused = [&](const std::vector<std::string>& arguments, const char* text) {
    SCOPED_TRACE(text);
    const Ended ended = run(kFashionMnist, arguments);
    EXPECT_EQ(ended.code, 2);
    EXPECT_THAT(ended.err, AllOf(HasSubstr("fashion_mnist: error: "), HasSubstr(text)));
    EXPECT_EQ(std::count(ended.err.begin(), ended.err.end(), '\n'), 1) << ended.err;
  };
  refused({"--depth", "11"}, "--depth must be 10 and multiples of 2 more; got 11");
  refused({"--deep", "3"}, "--deep");
}

TEST_F(FashionMnistTest, NamesAMissingFileAndFails) {
  const Ended ended = run(kFashionMnist, {"--data", path("nowhere"), "--out", path("x")});
  EXPECT_EQ(ended.code, 1);
  EXPECT_THAT(ended.err, HasSubstr(path("nowhere")));
}

// --- Translation

/// Two dozen pages of the help's format, in a small language that is translated word by word.
void write_pages(const fs::path& folder) {
  static constexpr std::array<std::array<const char*, 2>, 12> kWords{{{"open", "öffnen"},
                                                                      {"the", "die"},
                                                                      {"cell", "Zelle"},
                                                                      {"file", "Datei"},
                                                                      {"insert", "einfügen"},
                                                                      {"menu", "Menü"},
                                                                      {"table", "Tabelle"},
                                                                      {"click", "klicken"},
                                                                      {"and", "und"},
                                                                      {"choose", "wählen"},
                                                                      {"page", "Seite"},
                                                                      {"text", "Text"}}};
  std::uint32_t draw = 1;
  const auto next = [&](std::uint32_t bound) {
    draw = draw * 1664525U + 1013904223U;
    return (draw >> 16) % bound;
  };
  for (int page = 0; page < 24; ++page) {
    std::array<std::string, 2> bodies;
    for (int p = 0; p < 12; ++p) {
      const std::uint32_t words = 3 + next(6);
      std::array<std::string, 2> texts;
      for (std::uint32_t w = 0; w < words; ++w) {
        const auto& word = kWords[next(kWords.size())];
        for (std::size_t side = 0; side < 2; ++side)
          texts[side] += (w > 0 ? " " : "") + std::string(word[side]);
      }
      for (std::size_t side = 0; side < 2; ++side) {
        bodies[side] += "<p id=\"par_" + std::to_string(p) +
                        "\" class=\"paragraph\" dir=\"auto\">" + texts[side] + ".</p>\n";
      }
    }
    for (std::size_t side = 0; side < 2; ++side) {
      const fs::path path = folder / (side == 0 ? "en-US" : "de") / "text" / "swriter" /
                            ("page" + std::to_string(page) + ".html");
      fs::create_directories(path.parent_path());
      std::ofstream(path) << "<!DOCTYPE html><html><body><div id=\"DisplayArea\">\n"
                          << bodies[side] << "</div></body></html>\n";
    }
  }
}

class TranslateTest : public RealExamplesTest {
 protected:
  TranslateTest() { write_pages(folder_ / "data"); }

  std::vector<std::string> small(const char* model, std::int64_t depth) const {
    return {"--data",       path("data"), "--model",      model, "--width", "16",
            "--vocabulary", "320",        "--batch",      "8",   "--depth", std::to_string(depth),
            "--eval-pairs", "8",          "--max-tokens", "30",  "--steps", "4",
            "--eval-every", "2"};
  }
};

TEST_F(TranslateTest, TransformerGivesTheSameLossesByABudget) {
  expect_the_same_losses_by_a_budget(kTranslate, small("transformer", 3), 0.6);
  EXPECT_THAT(read_all(path("budget/report.html")), HasSubstr("reference"));
}

TEST_F(TranslateTest, RecurrentModelGivesTheSameLossesByABudget) {
  expect_the_same_losses_by_a_budget(kTranslate, small("recurrent", 2), 0.6);
}

TEST_F(TranslateTest, TrainsDeeperThanPlainUnderOneLimitAndReportsBoth) {
  expect_deeper_by_a_budget(kTranslate, small("transformer", 3), small("transformer", 6), "--seed",
                            "2");
  EXPECT_THAT(
      read_all(path("both/report.html")),
      AllOf(HasSubstr("transformer, 6 + 6 layers"), HasSubstr("on 8 pairs"), HasSubstr("BLEU")));
}

TEST_F(TranslateTest, Learns) {
  std::vector<std::string> arguments = small("recurrent", 1);
  arguments.insert(arguments.end(), {"--width", "64", "--steps", "60", "--batch", "16", "--lr",
                                     "1e-2", "--dropout", "0", "--plan", "none", "--memory", "",
                                     "--eval-every", "0", "--out", path("learns")});
  const Ended ended = run(kTranslate, arguments);
  ASSERT_EQ(ended.code, 0) << ended.err;
  const std::vector<double> values = losses("learns");
  ASSERT_EQ(values.size(), 60U);
  // Batches of short and long pairs differ, so ends are compared by their means.
  const auto mean = [](auto begin, auto end) {
    return std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin);
  };
  EXPECT_LT(mean(values.end() - 10, values.end()), 0.7 * mean(values.begin(), values.begin() + 5));
}

TEST_F(TranslateTest, RefusesBadUsageByOneLineAndCodeTwo) {
  const Ended ended = run(kTranslate, {"--model", "oracle"});
  EXPECT_EQ(ended.code, 2);
  EXPECT_EQ(ended.err.substr(0, ended.err.find(" (")),
            "translate: error: [flags] --model must be transformer or recurrent; got 'oracle'");
}

}  // namespace
}  // namespace gradus::examples
