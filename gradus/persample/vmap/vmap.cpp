#include <gradus/persample/vmap/vmap.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <gradus/base/byte_count.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/rng.h>
#include <gradus/persample/vmap/internal/example_transform.h>
#include <gradus/persample/vmap/internal/layers.h>
#include <gradus/persample/vmap/internal/random_streams.h>
#include <gradus/persample/vmap/set_aside_gradients.h>

namespace gradus::persample {
namespace {

using Indices = std::vector<std::int64_t>;

std::string first_line(const char* text) {
  const std::string all(text);
  return all.substr(0, all.find('\n'));
}

// The parameters that want a gradient, each tensor once.
struct Wanted {
  std::vector<at::Tensor> tensors{};
  std::vector<std::size_t> place_of{};  // of each parameter in `tensors`, or kNone
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);
};

Wanted wanted_of(const std::vector<NamedParameter>& parameters) {
  Wanted wanted;
  std::unordered_map<const c10::TensorImpl*, std::size_t> seen;
  for (const NamedParameter& parameter : parameters) {
    if (!wants_gradient(parameter)) {
      wanted.place_of.push_back(Wanted::kNone);
      continue;
    }
    const auto [found, is_new] =
        seen.emplace(parameter.tensor.unsafeGetTensorImpl(), wanted.tensors.size());
    if (is_new) wanted.tensors.push_back(parameter.tensor);
    wanted.place_of.push_back(found->second);
  }
  return wanted;
}

class Engine {
 public:
  Engine(Wanted wanted, const LossFunction& loss, const Batch& batch, const VmapOptions& options,
         VmapReport& report)
      : wanted_(std::move(wanted)),
        loss_(loss),
        batch_(batch),
        options_(options),
        report_(report),
        total_(count_examples(batch)),
        seed_(options.seed ? *options.seed : internal::drawn_seed()) {}

  std::vector<at::Tensor> run() {
    const base::RngGuard generators;
    std::int64_t size = options_.chunk == 0 ? total_ : std::min(options_.chunk, total_);
    if (options_.memory_bytes == 0 && size == total_) {
      Indices all(static_cast<std::size_t>(total_));
      std::iota(all.begin(), all.end(), 0);
      if (auto gradients = pass(all)) return *std::move(gradients);
      allocate();
      run_groups(groups_);
    } else {
      allocate();
      run_chunks(size);
    }
    return std::move(results_);
  }

 private:
  void allocate() {
    for (const at::Tensor& tensor : wanted_.tensors) {
      std::vector<std::int64_t> shape = tensor.sizes().vec();
      shape.insert(shape.begin(), total_);
      results_.push_back(at::empty(shape, tensor.options().requires_grad(false)));
    }
  }

  void run_chunks(std::int64_t largest) {
    if (options_.memory_bytes > 0) live_ = tracker().live().total();
    std::int64_t size = options_.memory_bytes > 0 ? 1 : largest;
    for (std::int64_t first = 0; first < total_;) {
      size = std::min(size, total_ - first);
      Indices chunk(static_cast<std::size_t>(size));
      std::iota(chunk.begin(), chunk.end(), first);
      const std::int64_t used = measured(chunk);
      first += size;
      if (options_.memory_bytes == 0) continue;
      report_.peak_bytes = std::max(report_.peak_bytes, used);
      GRADUS_CHECK("persample", used <= options_.memory_bytes || size > 1,
                   "memory_bytes must hold at least one example, which takes ",
                   base::format_bytes(used), "; got ", base::format_bytes(options_.memory_bytes));
      // A pass takes at most as much more as it has more examples: what they share is not more.
      const std::int64_t fits = size * options_.memory_bytes / std::max<std::int64_t>(used, 1);
      size = std::clamp<std::int64_t>(fits, 1, largest);
    }
  }

  base::MemoryTracker& tracker() { return base::MemoryTracker::install(); }

  // Bytes that the examples took at most, all groups of them.
  std::int64_t measured(const Indices& chunk) {
    if (options_.memory_bytes > 0) tracker().reset_peak();
    run_groups({chunk});
    return options_.memory_bytes > 0 ? tracker().peak().total() - live_ : 0;
  }

  void run_groups(std::deque<Indices> groups) {
    while (!groups.empty()) {
      const Indices group = std::move(groups.front());
      groups.pop_front();
      std::optional<std::vector<at::Tensor>> gradients;
      try {
        gradients = pass(group);
      } catch (const MemoryLimitError&) {
        // A base::MemoryLimit of the program's own is narrower than what was asked for.
        if (options_.memory_bytes == 0 || group.size() == 1) throw;
        const auto middle = group.begin() + static_cast<std::ptrdiff_t>(group.size() / 2);
        groups.emplace_front(middle, group.end());
        groups.emplace_front(group.begin(), middle);
        continue;
      }
      if (!gradients) {
        groups.insert(groups.begin(), groups_.begin(), groups_.end());
        continue;
      }
      for (std::size_t k = 0; k < results_.size(); ++k) {
        for (std::size_t row = 0; row < group.size(); ++row) {
          results_[k][group[row]].copy_((*gradients)[k][static_cast<std::int64_t>(row)]);
        }
      }
    }
  }

  // One gradient a wanted tensor, [examples, *shape]; or nothing, and the groups in groups_.
  std::optional<std::vector<at::Tensor>> pass(const Indices& examples) {
    ++report_.passes;
    try {
      auto gradients = computed(examples);
      report_.largest_chunk =
          std::max(report_.largest_chunk, static_cast<std::int64_t>(examples.size()));
      return gradients;
    } catch (const internal::Diverged& diverged) {
      if (!options_.split) {
        throw Unsupported(diverged.operator_name,
                          "the program's way depends on a value that differs between examples, "
                          "and VmapOptions::split is off");
      }
      ++report_.splits;
      if (report_.first_split.empty()) report_.first_split = diverged.operator_name;
      groups_.clear();
      for (std::size_t row = 0; row < examples.size(); ++row) {
        const auto group = static_cast<std::size_t>(diverged.group[row]);
        if (groups_.size() <= group) groups_.resize(group + 1);
        groups_[group].push_back(examples[row]);
      }
      return std::nullopt;
    }
  }

  std::vector<at::Tensor> computed(const Indices& indices) {
    const auto examples = static_cast<std::int64_t>(indices.size());
    const Batch inputs = examples_at(batch_, indices);
    std::vector<std::uint64_t> seeds;
    for (const std::int64_t index : indices) seeds.push_back(example_seed(seed_, index));

    const at::AutoGradMode grad_mode(true);
    std::vector<at::Tensor> given;
    try {
      given = in_layers(inputs, std::move(seeds));
    } catch (const Unsupported&) {
      throw;
    } catch (const MemoryLimitError&) {
      throw;
    } catch (const UserError& error) {
      if (!right_alone()) throw;
      throw Unsupported("", base::join("one example alone is as it should be, there it is not (",
                                       error.what(), ")"));
    }
    return dense(given, examples);
  }

  std::vector<at::Tensor> in_layers(const Batch& inputs, std::vector<std::uint64_t> seeds) {
    const std::int64_t examples = inputs[0].size(0);
    std::vector<at::Tensor> singles;
    for (const at::Tensor& input : inputs) singles.push_back(input.unsqueeze(1));  // batches of one
    const SetAsideGradients aside(wanted_.tensors);
    internal::Layers layers(examples, /*with_grad=*/true);
    std::unordered_map<c10::TensorImpl*, at::Tensor> stand_ins;
    for (const at::Tensor& tensor : wanted_.tensors) {
      stand_ins.emplace(tensor.unsafeGetTensorImpl(), layers.stand_in(tensor));
    }
    Batch example;
    for (const at::Tensor& input : singles) {
      example.push_back(layers.wrapped(layers.batched(input)));
    }
    const auto transform = std::make_shared<internal::ExampleTransform>(
        layers, std::move(stand_ins), internal::RandomStreams(std::move(seeds)));
    const plane::op::Guard guard = plane::op::push(plane::op::Order::transform, transform);
    std::vector<at::Tensor> given = backward(*transform, example);
    if (aside.any()) {
      throw Unsupported("", "the loss function calls backward(): use torch::autograd::grad");
    }
    return given;
  }

  // True if the loss is one for one example alone. Then the program is innocent of a wrong shape
  // that it has here: a rule of functorch takes the example dimension for one of the operator's.
  bool right_alone() const {
    try {
      const base::RngGuard generators;
      summed_loss(loss_(examples_at(batch_, {0})), 1);
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }

  std::vector<at::Tensor> backward(internal::ExampleTransform& transform, const Batch& example) {
    try {
      const at::Tensor loss = loss_(example);
      const at::Tensor sum = summed_loss(loss, 1);
      if (!sum.requires_grad()) return std::vector<at::Tensor>(wanted_.tensors.size());
      return torch::autograd::grad({sum}, wanted_.tensors, {}, /*retain_graph=*/false,
                                   /*create_graph=*/false, /*allow_unused=*/true);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const c10::Error& error) {
      throw Unsupported(std::string(transform.blamed()),
                        first_line(error.what_without_backtrace()));
    }
  }

  std::vector<at::Tensor> dense(std::vector<at::Tensor>& given, std::int64_t examples) const {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (std::size_t k = 0; k < given.size(); ++k) {
      if (given[k].defined()) {
        gradients.push_back(internal::by_example(given[k], examples).contiguous());
        given[k].reset();
        continue;
      }
      std::vector<std::int64_t> shape = wanted_.tensors[k].sizes().vec();
      shape.insert(shape.begin(), examples);
      gradients.push_back(at::zeros(shape, wanted_.tensors[k].options().requires_grad(false)));
    }
    return gradients;
  }

  const Wanted wanted_;
  const LossFunction& loss_;
  const Batch& batch_;
  const VmapOptions& options_;
  VmapReport& report_;
  const std::int64_t total_;
  const std::uint64_t seed_;
  std::int64_t live_ = 0;
  std::deque<Indices> groups_;
  std::vector<at::Tensor> results_;
};

}  // namespace

Unsupported::Unsupported(std::string operator_name, const std::string& reason)
    : UserError(base::join("[persample] vmap cannot compute ",
                           operator_name.empty() ? "the loss" : operator_name,
                           " for several examples at once: ", reason, ". loop_gradients() can")),
      operator_name_(std::move(operator_name)) {}

std::vector<at::Tensor> vmap_gradients(const std::vector<NamedParameter>& parameters,
                                       const LossFunction& loss, const Batch& batch,
                                       const VmapOptions& options) {
  VmapReport own;
  VmapReport& report = options.report == nullptr ? own : *options.report;
  report = {};
  GRADUS_CHECK("persample", options.chunk >= 0, "chunk must be at least 0 examples; got ",
               options.chunk);
  GRADUS_CHECK("persample", options.memory_bytes >= 0, "memory_bytes must be at least 0; got ",
               options.memory_bytes);
  GRADUS_CHECK("persample", loss != nullptr, "a loss function is required; got null");
  const bool nested = std::dynamic_pointer_cast<internal::ExampleTransform>(
                          plane::op::newest(plane::op::Order::transform)) != nullptr;
  GRADUS_CHECK("persample", !nested && !internal::transform_active(),
               "vmap_gradients must not run inside a functorch transform, such as another "
               "vmap_gradients");
  GRADUS_CHECK("persample", !c10::InferenceMode::is_enabled(),
               "gradients need inference mode off; end the c10::InferenceMode guard");
  Wanted wanted = wanted_of(parameters);
  for (const at::Tensor& tensor : wanted.tensors) {
    GRADUS_CHECK("persample", options.memory_bytes == 0 || tensor.is_cpu(),
                 "memory_bytes is measured on the CPU only; got a parameter on ", tensor.device(),
                 ". Set VmapOptions::chunk");
  }
  const std::vector<std::size_t> place_of = wanted.place_of;
  std::vector<at::Tensor> gradients(parameters.size());
  count_examples(batch);
  if (wanted.tensors.empty()) return gradients;
  const std::vector<at::Tensor> found =
      Engine(std::move(wanted), loss, batch, options, report).run();
  for (std::size_t k = 0; k < parameters.size(); ++k) {
    if (place_of[k] != Wanted::kNone) gradients[k] = found[place_of[k]];
  }
  return gradients;
}

}  // namespace gradus::persample
