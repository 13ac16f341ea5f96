// Trains a deep ResNet on Fashion-MNIST, enlarged, inside a memory limit.
//
//   fashion_mnist --memory 64MiB --depth 50 --steps 300 --out runs/fashion
//   fashion_mnist --compare ...    the deepest plain model that fits beside it
//
// The images come from the Debian package dataset-fashion-mnist, or from --data.

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <examples/support.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/data/idx_images.h>
#include <gradus/metrics/accuracy.h>
#include <gradus/models/resnet.h>

namespace {

using namespace gradus;

// Of the training images' pixels.
constexpr double kPixelMean = 0.2860;
constexpr double kPixelDeviation = 0.3530;
constexpr std::int64_t kStages = 4;

struct Options {
  std::int64_t image_size = 112;    ///< Height and width that images are enlarged to.
  std::int64_t width = 16;          ///< Channels of the first stage.
  std::int64_t eval_images = 2000;  ///< Of the test images, for the final accuracy.
};

class FashionMnist final : public examples::Subject {
 public:
  FashionMnist(const Options& options, const examples::RunOptions& run)
      : options_(options), run_(run) {}

  /// Reads the images. @throws UserError.
  void load() {
    train_ = std::make_shared<data::IdxImages>(
        data::load_fashion_mnist(data::ImagePart::train, run_.data));
    test_ = std::make_shared<data::IdxImages>(
        data::load_fashion_mnist(data::ImagePart::test, run_.data));
    classes_ = std::max(train_->classes(), test_->classes());
  }

  std::string task() const override {
    return base::join("Fashion-MNIST at ", options_.image_size, " x ", options_.image_size);
  }
  std::string model_name(std::int64_t depth) const override {
    return base::join("ResNet-", depth, ", width ", options_.width);
  }
  std::string quality_name() const override { return "accuracy"; }
  std::string loss_label() const override { return "Cross-entropy, nats per image"; }
  std::string item() const override { return "image"; }
  // One block of two layers in each stage, a first and a last layer.
  std::int64_t smallest_depth() const override { return 2 * kStages + 2; }
  std::int64_t depth_step() const override { return 2; }
  std::vector<std::pair<std::string, std::string>> settings() const override {
    return {{"image-size", std::to_string(options_.image_size)},
            {"width", std::to_string(options_.width)},
            {"eval-images", std::to_string(options_.eval_images)}};
  }

  std::shared_ptr<torch::nn::Module> begin(std::int64_t depth) override {
    model_ = models::ResNet(models::ResNetOptions{.in_channels = 1,
                                                  .classes = classes_,
                                                  .blocks = blocks(depth),
                                                  .width = options_.width,
                                                  .groups = 8,
                                                  .stem = options_.image_size >= 64
                                                              ? models::ResNetStem::kLarge
                                                              : models::ResNetStem::kSmall});
    batches_.emplace(train_, batch_options(/*shuffle=*/true));
    return model_.ptr();
  }

  void end() override {
    model_ = nullptr;
    batches_.reset();
    batch_ = {};
  }

  // All batches but the last of an epoch need the same memory, and that one less.
  std::int64_t draw(bool /*largest*/) override {
    batch_ = {};
    batch_ = batches_->next();
    return batch_.size();
  }

  at::Tensor loss() override {
    return torch::cross_entropy_loss(model_->forward(batch_.images), batch_.labels);
  }

  examples::Quality evaluate(bool final) override {
    constexpr std::int64_t kQuickImages = 256;
    batch_ = {};
    data::ImageBatches batches(test_, batch_options(/*shuffle=*/false));
    const std::int64_t wanted =
        std::min(final ? options_.eval_images : std::min(kQuickImages, options_.eval_images),
                 test_->count());
    metrics::Accuracy accuracy;
    while (accuracy.examples() < wanted) {
      const data::ImageBatch batch = batches.next();
      const std::int64_t taken = std::min(batch.size(), wanted - accuracy.examples());
      accuracy.add(model_->forward(batch.images.slice(0, 0, taken)),
                   batch.labels.slice(0, 0, taken));
    }
    char text[64];
    std::snprintf(text, sizeof text, "%.1f %% of %lld images", 100.0 * accuracy.value(),
                  static_cast<long long>(accuracy.examples()));
    return {.value = accuracy.value(), .text = text};
  }

 private:
  data::ImageBatchOptions batch_options(bool shuffle) const {
    return {.batch_size = run_.batch,
            .image_size = options_.image_size,
            .seed = static_cast<std::uint64_t>(run_.seed),
            .shuffle = shuffle,
            .mean = kPixelMean,
            .deviation = kPixelDeviation};
  }

  /// Blocks of each stage: as equal as can be, the third ones first, as ResNets have it.
  static std::vector<std::int64_t> blocks(std::int64_t depth) {
    const std::int64_t all = (depth - 2) / 2;
    std::vector<std::int64_t> result(kStages, all / kStages);
    constexpr std::int64_t kOrder[] = {2, 1, 0};
    for (std::int64_t i = 0; i < all % kStages; ++i) ++result[static_cast<std::size_t>(kOrder[i])];
    return result;
  }

  Options options_;
  const examples::RunOptions& run_;
  std::shared_ptr<const data::IdxImages> train_, test_;
  std::int64_t classes_ = 0;
  models::ResNet model_{nullptr};
  std::optional<data::ImageBatches> batches_;
  data::ImageBatch batch_;
};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a deep ResNet on enlarged Fashion-MNIST images inside a memory limit",
               "fashion_mnist");
  examples::RunOptions run{
      .memory = "300MiB", .depth = 50, .data = data::kFashionMnistDirectory, .out = "runs/fashion"};
  Options options;
  examples::add_run_options(app, run);
  app.add_option("--image-size", options.image_size, "Height and width that images get")
      ->capture_default_str();
  app.add_option("--width", options.width, "Channels of the first stage")->capture_default_str();
  app.add_option("--eval-images", options.eval_images, "Test images for the final accuracy")
      ->capture_default_str();
  std::unique_ptr<FashionMnist> subject;
  const auto prepare = [&] {
    examples::validate(run);
    GRADUS_CHECK("flags", options.image_size >= 8 && options.image_size <= 1024,
                 "--image-size must be 8 to 1024; got ", options.image_size);
    GRADUS_CHECK("flags", options.width >= 1, "--width must be >= 1; got ", options.width);
    GRADUS_CHECK("flags", options.eval_images >= 1, "--eval-images must be >= 1; got ",
                 options.eval_images);
    subject = std::make_unique<FashionMnist>(options, run);
    examples::validate(run, subject.get());
  };
  return examples::run_program(app, argc, argv, prepare, [&] {
    subject->load();
    examples::run_example(*subject, run, std::cout);
  });
}
