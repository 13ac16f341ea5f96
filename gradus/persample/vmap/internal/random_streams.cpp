#include <gradus/persample/vmap/internal/random_streams.h>

#include <limits>
#include <mutex>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/randint.h>

namespace gradus::persample::internal {
namespace {

void seed(at::Generator generator, std::uint64_t value) {
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(value);
}

}  // namespace

void seed_generators(std::uint64_t value) {
  seed(at::detail::getDefaultCPUGenerator(), value);
  if (const auto accelerator = at::getAccelerator()) {
    const auto count = at::accelerator::deviceCount();
    for (c10::DeviceIndex i = 0; i < count; ++i) {
      seed(at::globalContext().defaultGenerator(c10::Device(*accelerator, i)), value);
    }
  }
}

std::uint64_t drawn_seed() {
  const at::Tensor drawn = at::randint(std::numeric_limits<std::int64_t>::max(), {1}, at::kLong);
  return static_cast<std::uint64_t>(drawn.item<std::int64_t>());
}

// Far from seeds that programs choose.
constexpr std::uint64_t kFirstToken = 0x67726164'75730000U;

RandomStreams::RandomStreams(std::vector<std::uint64_t> seeds)
    : seeds_(std::move(seeds)), now_(seeds_.size()), token_(kFirstToken) {
  end();
}

void RandomStreams::begin() {
  const auto found = positions_.find(at::detail::getDefaultCPUGenerator().current_seed());
  if (found == positions_.end()) {  // the program seeded the generator
    now_.assign(seeds_.size(), base::RngState::capture());
  } else {
    now_ = found->second;
  }
}

void RandomStreams::enter(std::size_t row) {
  if (now_[row]) {
    now_[row]->restore();
  } else {
    seed_generators(seeds_[row]);
  }
}

void RandomStreams::leave(std::size_t row) { now_[row] = base::RngState::capture(); }

void RandomStreams::end() {
  ++token_;
  positions_.emplace(token_, std::move(now_));
  seed(at::detail::getDefaultCPUGenerator(), token_);
}

}  // namespace gradus::persample::internal
