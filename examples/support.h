#pragma once

// What the examples on real data share: flags, the training loop with and without a memory budget,
// the search for the deepest plain model, and the page that compares the two.

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace CLI {
class App;
}  // namespace CLI

namespace torch::nn {
class Module;
}  // namespace torch::nn

namespace gradus::examples {

/// Flags that every example has.
struct RunOptions {
  std::string memory = {};      ///< Limit of all tensors: "300MiB"; empty: none.
  std::string plan = "budget";  ///< "budget": recompute under the limit; "none": plain training.
  bool compare = false;         ///< Train the deepest plain model that fits as well.
  std::int64_t depth = 1;       ///< Of the model, in the example's unit.
  std::int64_t steps = 200;     ///< Optimizer steps.
  std::int64_t batch = 32;      ///< Examples in a step.
  double lr = 1e-3;             ///< Highest learning rate of AdamW.
  std::int64_t seed = 1;        ///< Of weights, dropout and order.
  std::int64_t threads = 0;     ///< 0: LibTorch's default.
  std::int64_t eval_every =
      50;                 ///< Steps between evaluations on part of the held-out data; 0: none.
  std::string data = {};  ///< Directory of the data.
  std::string out = {};   ///< Run directory.
};

/// Adds the flags of @p options, whose values are the defaults.
void add_run_options(CLI::App& app, RunOptions& options);

/// How good a model is on held-out data.
struct Quality {
  double value = 0.0;
  std::string text = {};    ///< With its unit: "86.1 %".
  std::string sample = {};  ///< What the model makes of some examples; may be empty.
};

/// What an example trains: data, and a model of any depth. One model lives at a time.
class Subject {
 public:
  virtual ~Subject() = default;

  virtual std::string task() const = 0;                          ///< "Fashion-MNIST at 96 x 96".
  virtual std::string model_name(std::int64_t depth) const = 0;  ///< "ResNet-50, width 16".
  virtual std::string quality_name() const = 0;                  ///< "accuracy".
  virtual std::string loss_label() const = 0;                    ///< With its unit.
  virtual std::string item() const = 0;  ///< What draw() counts, in the singular: "image".
  virtual std::int64_t smallest_depth() const = 0;
  virtual std::int64_t depth_step()
      const = 0;  ///< Depths are smallest_depth() plus multiples of it.
  /// Every flag of the example's own and its value.
  virtual std::vector<std::pair<std::string, std::string>> settings() const = 0;

  /// Makes a new model of @p depth from the default generator and goes back to the first batch.
  virtual std::shared_ptr<torch::nn::Module> begin(std::int64_t depth) = 0;
  /// Drops model and batch.
  virtual void end() = 0;
  /// Takes the next batch, or the one that needs most memory; returns its tokens or examples.
  virtual std::int64_t draw(bool largest) = 0;
  /// Mean loss of the batch taken.
  virtual at::Tensor loss() = 0;
  /// Of the model on held-out data: all that was asked for (@p final), or a part of it.
  virtual Quality evaluate(bool final) = 0;
};

/// Trains as @p options say, prints progress to @p out and writes the report.
/// @throws UserError, MemoryLimitError among them.
void run_example(Subject& subject, const RunOptions& options, std::ostream& out);

/// The main function of an example: parses, calls @p prepare (what it throws is bad usage: exit
/// code 2), then @p run (what it throws is a failed run: 1). An error is one line on standard
/// error.
int run_program(CLI::App& app, int argc, char** argv, const std::function<void()>& prepare,
                const std::function<void()>& run);

/// Refuses what no example can run. @throws UserError.
void validate(const RunOptions& options, const Subject* subject = nullptr);

}  // namespace gradus::examples
