// Private training of a classifier on real images, over the command line.
#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <tests/integration/training_runs.h>

#include <gradus/data/idx_images.h>

#include <tests/support/private_state.h>

namespace gradus::integration {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class PrivateTrainingTest : public TrainingRuns {
 protected:
  void SetUp() override {
    TrainingRuns::SetUp();
    if (!fs::exists(fs::path(data::kFashionMnistDirectory) / "train-images-idx3-ubyte.gz"))
      GTEST_SKIP() << "Fashion-MNIST is not installed (scripts/setup.sh --data)";
  }
  // A small part of Fashion-MNIST, and noise that repeats.
  std::string config() const {
    const std::string file = path("private.toml");
    write_text(file,
               "[data]\ntask = \"fashion-mnist\"\nlimit = 2000\n"
               "[train]\nsteps = 24\nbatch = 200\neval_every = 12\nsave_every = 5\nthreads = 1\n"
               "[optimizer]\nkind = \"sgd\"\nlr = 2.0\nweight_decay = 0.0\nwarmup = 0\n"
               "[privacy]\nsecure = false\nmax_grad_norm = 0.1\naccountant = \"rdp\"\n");
    return file;
  }
  std::vector<std::string> arguments(const std::string& run) const {
    // A flag without a value before the configuration, as people write it.
    return {"train",   "--private", config(), "--epsilon", "3",
            "--delta", "1e-4",      "--out",  path(run)};
  }
};

TEST_F(PrivateTrainingTest, TrainsToItsEpsilonShowsItAndIsEvaluated) {
  const Ended ended = run_gradus(arguments("run"));
  ASSERT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("private: noise multiplier"));
  EXPECT_THAT(ended.out, HasSubstr("epsilon spent"));
  const auto steps = metrics("run");
  ASSERT_EQ(steps.size(), 24u);
  EXPECT_LE(steps.back().extra.at("epsilon"), 3.0);
  EXPECT_GE(steps.back().extra.at("epsilon"), 2.99);
  EXPECT_GT(steps.back().extra.at("accuracy"), 0.2);  // 10 classes
  EXPECT_THAT(read_text(path("run") + "/report.html"), HasSubstr("Epsilon spent"));

  const Ended evaluated = run_gradus({"eval", path("run")});
  ASSERT_EQ(evaluated.code, 0) << evaluated.err;
  EXPECT_THAT(evaluated.out, HasSubstr("step 24: test accuracy "));
  const std::string accuracy = evaluated.out.substr(evaluated.out.find("accuracy ") + 9);
  EXPECT_NEAR(std::stod(accuracy), 100.0 * steps.back().extra.at("accuracy"), 1e-3);
  expect_refusal(run_gradus({"sample", path("run")}), 1, {"fashion-mnist", "gradus eval"});
}

TEST_F(PrivateTrainingTest, TheProgressLineShowsTheEpsilonSpent) {
  GradusProcess process(arguments("run"), Output::terminal);
  const Ended ended = process.wait();
  EXPECT_EQ(ended.code, 0);
  EXPECT_THAT(ended.out, testing::ContainsRegex("24/24  loss [0-9.]+  epsilon 3"));
}

TEST_F(PrivateTrainingTest, KilledAndResumedItEqualsTheRunThatNeverStopped) {
  ASSERT_EQ(run_gradus(arguments("whole")).code, 0);
  for (const int signal : {SIGKILL, SIGINT}) {
    const std::string run = "broken" + std::to_string(signal);
    {
      GradusProcess process(arguments(run));
      ASSERT_TRUE(process.wait_until([&] { return steps_done(run) >= 8; }));
      process.send(signal);
      process.wait();
    }
    ASSERT_LT(steps_done(run), 24) << "the run ended before it was interrupted";
    resume(run);
    EXPECT_EQ(numeric_difference(metrics("whole"), metrics(run)), "");
    EXPECT_EQ(metrics(run).back().extra, metrics("whole").back().extra);
    for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
      EXPECT_TRUE(read_text(state_file("whole", file)) == read_text(state_file(run, file))) << file;
    }
    EXPECT_EQ(tests::private_difference(state_file("whole", "privacy.safetensors"),
                                        state_file(run, "privacy.safetensors")),
              "");
  }
  expect_refusal(run_gradus({"train", "--resume", path("whole"), "--epsilon", "9"}), 1,
                 {"keeps the privacy it began with", "epsilon 3"});
}

TEST(PrivateUsageTest, RefusesByNameWithExitCodeTwo) {
  expect_refusal(run_gradus({"train", "--private", "--epsilon", "3", "--precision", "fp16"}), 2,
                 {"fp16", "private"});
  expect_refusal(run_gradus({"train", "--task", "adult", "--private"}), 2, {"got neither"});
  expect_refusal(run_gradus({"train", "--task", "adult", "--private", "--epsilon", "3",
                             "--noise-multiplier", "1"}),
                 2, {"got both"});
  expect_refusal(run_gradus({"train", "--task", "adult", "--epsilon", "3"}), 2, {"Give --private"});
  expect_refusal(run_gradus({"train", "--task", "adult", "--memory", "1GiB"}), 2,
                 {"memory.limit is for data.task language-model"});
  expect_refusal(run_gradus({"plan", "--task", "adult"}), 2, {"memory limit is required"});
}

}  // namespace
}  // namespace gradus::integration
