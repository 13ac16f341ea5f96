#include <gradus/compress/policy.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/compress/gist.h>
#include <gradus/compress/internal/dense.h>
#include <gradus/compress/internal/origins.h>

namespace gradus::compress {
namespace {

using plane::saved::Packed;
using plane::saved::Value;
using Tensors = std::vector<at::Tensor>;

constexpr std::array<std::string_view, 39> kProportional{
    "aten::convolution",
    "aten::_convolution",
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::addbmm",
    "aten::linear",
    "aten::mv",
    "aten::addmv",
    "aten::mul",
    "aten::mul_",
    "aten::addcmul",
    "aten::native_batch_norm",
    "aten::_native_batch_norm_legit",
    "aten::_batch_norm_impl_index",
    "aten::batch_norm",
    "aten::native_layer_norm",
    "aten::native_group_norm",
    "aten::_fused_rms_norm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::gelu",
    "aten::silu",
    "aten::silu_",
    "aten::mish",
    "aten::tanh",
    "aten::tanh_",
    "aten::sigmoid",
    "aten::sigmoid_",
    "aten::softplus",
    "aten::hardswish",
    "aten::glu",
    "aten::_softmax",
    "aten::prelu",
    "aten::_prelu_kernel",
    "aten::sin",
    "aten::cos",
    "aten::celu",
    "aten::elu",
};

std::optional<Precision> precision_of(Lossy lossy) {
  switch (lossy) {
    case Lossy::bf16:
      return Precision::bf16;
    case Lossy::fp16:
      return Precision::fp16;
    case Lossy::fp10:
      return Precision::fp10;
    case Lossy::fp8:
      return Precision::fp8;
    default:
      return std::nullopt;
  }
}

std::optional<int> quantised_bits(Lossy lossy) {
  switch (lossy) {
    case Lossy::int8:
      return 8;
    case Lossy::int4:
      return 4;
    case Lossy::int2:
      return 2;
    default:
      return std::nullopt;
  }
}

double bits_a_value(Lossy lossy) {
  if (const auto bits = quantised_bits(lossy)) return *bits + 0.25;
  switch (lossy) {
    case Lossy::fp8:
      return 8;
    case Lossy::fp10:
      return 32.0 / 3;
    default:
      return 16;
  }
}

std::int64_t bytes_of(const Tensors& tensors) {
  std::int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

struct Encoded {
  Method method = Method::shape;
  Packed packed;
};

std::optional<Encoded> encoded(Method method, std::optional<Packed> packed) {
  if (!packed) return std::nullopt;
  return Encoded{method, std::move(*packed)};
}

}  // namespace

namespace internal {

// Tensors encoded before, so that what several operators save is encoded once. Holds memory of
// neither: weak references tell what still lives.
class Shared {
 public:
  // What an encoding must be good for.
  enum class Use : std::uint8_t { positive, positive_or_nan, exact, lossy };

  std::optional<Encoded> find(const at::Tensor& tensor, Use use) {
    const std::lock_guard lock(mutex_);
    const auto [first, last] = entries_.equal_range(tensor.storage().unsafeGetStorageImpl());
    for (auto entry = first; entry != last; ++entry) {
      if (!entry->second.is(tensor, use)) continue;
      Encoded encoded{entry->second.method, {{}, entry->second.restore}};
      for (const auto& part : entry->second.payload) {
        auto alive = part.lock();
        if (!alive) return std::nullopt;  // moved away by an outer hook, or freed
        encoded.packed.payload.emplace_back(std::move(alive));
      }
      return encoded;
    }
    return std::nullopt;
  }

  void add(const at::Tensor& tensor, Use use, const Encoded& encoded) {
    if (tensor.is_inference()) return;  // no version to tell changes by
    Entry entry;
    entry.storage = tensor.storage().getWeakStorageImpl();
    entry.data = tensor.const_data_ptr();
    entry.sizes = tensor.sizes().vec();
    entry.strides = tensor.strides().vec();
    entry.dtype = tensor.scalar_type();
    entry.version = tensor._version();
    entry.use = use;
    entry.method = encoded.method;
    entry.restore = encoded.packed.restore;
    for (const at::Tensor& part : encoded.packed.payload) {
      entry.payload.emplace_back(part.getIntrusivePtr());
    }
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= prune_at_) {
      std::erase_if(entries_, [](const auto& e) { return e.second.expired(); });
      prune_at_ = std::max<std::size_t>(256, 2 * entries_.size());
    }
    const c10::StorageImpl* const key = tensor.storage().unsafeGetStorageImpl();
    entries_.emplace(key, std::move(entry));
  }

 private:
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
  using WeakTensor = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
  struct Entry {
    WeakStorage storage{c10::intrusive_ptr<c10::StorageImpl>()};
    const void* data = nullptr;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
    at::ScalarType dtype = at::ScalarType::Undefined;
    std::int64_t version = 0;
    Use use = Use::exact;
    Method method = Method::shape;
    std::vector<WeakTensor> payload;
    std::function<at::Tensor(Tensors)> restore;

    bool expired() const {
      return storage.expired() || std::any_of(payload.begin(), payload.end(),
                                              [](const auto& part) { return part.expired(); });
    }
    bool is(const at::Tensor& tensor, Use wanted) const {
      return !expired() && !tensor.is_inference() && use == wanted &&
             data == tensor.const_data_ptr() && dtype == tensor.scalar_type() &&
             version == tensor._version() && tensor.sizes() == at::IntArrayRef(sizes) &&
             tensor.strides() == at::IntArrayRef(strides);
    }
  };

  std::mutex mutex_;
  std::unordered_multimap<const c10::StorageImpl*, Entry> entries_;
  std::size_t prune_at_ = 256;
};

// Counts; outlives the guard, as what it encoded may be restored later.
class Counts {
 public:
  void kept(Method method, std::int64_t before, std::int64_t after, bool shared, double seconds) {
    const std::lock_guard lock(mutex_);
    MethodStatistics& m = statistics_.methods[static_cast<std::size_t>(method)];
    ++m.tensors;
    m.shared += shared ? 1 : 0;
    m.bytes_before += before;
    m.bytes_after += after;
    m.encode_s += seconds;
  }
  void restored(Method method, double seconds) {
    const std::lock_guard lock(mutex_);
    MethodStatistics& m = statistics_.methods[static_cast<std::size_t>(method)];
    ++m.restores;
    m.restore_s += seconds;
  }
  void left(std::int64_t bytes) {
    const std::lock_guard lock(mutex_);
    ++statistics_.left_tensors;
    statistics_.left_bytes += bytes;
  }
  CompressStatistics read() const {
    const std::lock_guard lock(mutex_);
    return statistics_;
  }

 private:
  mutable std::mutex mutex_;
  CompressStatistics statistics_;
};

class Compressor final : public plane::saved::Hooks {
 public:
  explicit Compressor(CompressOptions options)
      : options_(std::move(options)),
        quantiser_(quantised_bits(options_.lossy).value_or(8), options_.rounding) {}

  std::optional<Packed> pack(const Value& value) override { return pack_within(value, 1.0); }

  std::optional<Packed> pack_within(const Value& value, double max_ratio) {
    const std::int64_t bytes = plain_bytes(value.tensor);
    if (!eligible(value.tensor, bytes) || (options_.keep && options_.keep(value))) {
      counts_->left(bytes);
      return std::nullopt;
    }
    const double start_s = options_.clock();
    bool shared = false;
    std::optional<Encoded> encoded = choose(value, shared);
    const double seconds = options_.clock() - start_s;
    if (encoded && !shared &&
        static_cast<double>(bytes_of(encoded->packed.payload)) >
            max_ratio * static_cast<double>(bytes)) {
      encoded.reset();
    }
    if (!encoded) {
      counts_->left(bytes);
      return std::nullopt;
    }
    counts_->kept(encoded->method, bytes, shared ? 0 : bytes_of(encoded->packed.payload), shared,
                  seconds);
    return timed(std::move(*encoded));
  }

  std::optional<Probe> probe(const Value& value) const {
    if (!eligible(value.tensor, plain_bytes(value.tensor))) return std::nullopt;
    const base::ArenaScope host(base::Arena::host);
    const Need need = need_for(value);
    Quantiser quantiser(quantiser_.bits());  // leaves the guard's numbers alone
    const double start_s = options_.clock();
    std::optional<Encoded> encoded = encode(value.tensor, need, lossy(value), quantiser);
    const double encoded_s = options_.clock();
    if (!encoded) return std::nullopt;
    Probe probe;
    probe.method = encoded->method;
    probe.bytes = bytes_of(encoded->packed.payload);
    probe.encode_s = encoded_s - start_s;
    probe.by_layout = need != Need::values && need != Need::positions;
    encoded->packed.restore(std::move(encoded->packed.payload));
    probe.restore_s = options_.clock() - encoded_s;
    return probe;
  }

  const std::shared_ptr<Origins>& origins() const { return origins_; }
  CompressStatistics statistics() const { return counts_->read(); }
  RoundingState rounding() const { return quantiser_.state(); }

 private:
  static std::int64_t plain_bytes(const at::Tensor& tensor) {
    return tensor.defined() && tensor.has_storage() ? static_cast<std::int64_t>(tensor.nbytes())
                                                    : std::int64_t{0};
  }

  bool eligible(const at::Tensor& tensor, std::int64_t bytes) const {
    return readable(tensor) && bytes > 0 && bytes >= options_.min_bytes &&
           !origins_->outside(tensor) && base::tensor_name(tensor).empty();
  }

  static Need need_for(const Value& value) {
    return value.saved_by_maker ? need_of(value.maker, value.tensor) : Need::values;
  }

  std::optional<Encoded> choose(const Value& value, bool& shared) {
    const at::Tensor& tensor = value.tensor;
    const Need need = need_for(value);
    const bool loses = lossy(value);
    if (need == Need::shape || need == Need::positions)
      return encode(tensor, need, loses, quantiser_);
    using Use = Shared::Use;
    Use use = loses ? Use::lossy : Use::exact;
    if (need == Need::positive) use = Use::positive;
    if (need == Need::positive_or_nan) use = Use::positive_or_nan;
    if (std::optional<Encoded> known = shared_.find(tensor, use)) {
      shared = true;
      return known;
    }
    std::optional<Encoded> result = encode(tensor, need, loses, quantiser_);
    if (result) shared_.add(tensor, use, *result);
    return result;
  }

  std::optional<Encoded> encode(const at::Tensor& tensor, Need need, bool lossy,
                                Quantiser& quantiser) const {
    switch (need) {
      case Need::shape:
        return encoded(Method::shape, keep_shape(tensor));
      case Need::positions:
        return encoded(Method::positions, narrow_integers(tensor));
      case Need::positive:
      case Need::positive_or_nan:
        return encoded(Method::binarize, binarize(tensor, need));
      case Need::values:
        break;
    }
    return encode_values(tensor, lossy, quantiser);
  }

  bool lossy(const Value& value) const {
    return options_.allow_lossy && options_.lossy != Lossy::none && value.saved_by_maker &&
           value.tensor.is_floating_point() &&
           (options_.may_lose ? options_.may_lose(value) : lossy_by_default(value));
  }

  std::optional<Encoded> encode_values(const at::Tensor& tensor, bool lossy,
                                       Quantiser& quantiser) const {
    if (auto result = encoded(Method::two_valued, pack_two_valued(tensor))) return result;
    const auto plain_bits = 8.0 * static_cast<double>(tensor.element_size());
    if (lossy && bits_a_value(options_.lossy) < plain_bits) {
      return encode_lossily(tensor, plain_bits, quantiser);
    }
    return encoded(Method::sparse, pack_sparse(tensor, options_.max_ratio));
  }

  // Sparse where a bit for each value and the lossy form of the others are fewer bits than the
  // lossy form of all of them.
  std::optional<Encoded> encode_lossily(const at::Tensor& tensor, double plain_bits,
                                        Quantiser& quantiser) const {
    const double bits = bits_a_value(options_.lossy);
    const double max_density = options_.max_ratio - 1.0 / bits;
    if (max_density > 0) {
      std::optional<Packed> sparse = pack_sparse(tensor, max_density + 1.0 / plain_bits);
      if (sparse) return with_lossy_values(std::move(*sparse), quantiser);
    }
    std::optional<Encoded> result = lose(tensor, quantiser);
    // Infinities and the like: exact or not at all.
    if (!result) return encoded(Method::sparse, pack_sparse(tensor, options_.max_ratio));
    return result;
  }

  std::optional<Encoded> lose(const at::Tensor& tensor, Quantiser& quantiser) const {
    if (const auto precision = precision_of(options_.lossy)) {
      return encoded(Method::reduced, reduce_precision(tensor, *precision));
    }
    return encoded(Method::quantised, quantiser.pack(tensor));
  }

  std::optional<Encoded> with_lossy_values(Packed sparse, Quantiser& quantiser) const {
    std::optional<Encoded> inner = lose(sparse.payload.at(1), quantiser);
    if (!inner) return Encoded{Method::sparse, std::move(sparse)};
    Packed packed;
    packed.payload = std::move(inner->packed.payload);
    packed.payload.push_back(std::move(sparse.payload.at(0)));
    packed.restore = [outer = std::move(sparse.restore),
                      inner = std::move(inner->packed.restore)](Tensors payload) {
      at::Tensor bitmap = std::move(payload.back());
      payload.pop_back();
      return outer({std::move(bitmap), inner(std::move(payload))});
    };
    return Encoded{Method::sparse_lossy, std::move(packed)};
  }

  Packed timed(Encoded encoded) const {
    Packed packed;
    packed.payload = std::move(encoded.packed.payload);
    packed.restore = [restore = std::move(encoded.packed.restore), counts = counts_,
                      clock = options_.clock, method = encoded.method](Tensors payload) {
      const double start_s = clock();
      at::Tensor tensor = restore(std::move(payload));
      counts->restored(method, clock() - start_s);
      return tensor;
    };
    return packed;
  }

  CompressOptions options_;
  Quantiser quantiser_;
  Shared shared_;
  std::shared_ptr<Origins> origins_ = std::make_shared<Origins>();
  std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
};

}  // namespace internal

bool lossy_by_default(const plane::saved::Value& value) {
  if (std::find(kProportional.begin(), kProportional.end(), value.maker) == kProportional.end()) {
    return false;
  }
  // Statistics of normalisations and the log-sum-exp of attention are saved beside the values, with
  // fewer dimensions or a last one of 1; backward exponentiates or multiplies everything by them.
  const at::Tensor& tensor = value.tensor;
  if (value.maker.find("attention") != std::string_view::npos) return tensor.dim() == 4;
  if (value.maker.find("norm") != std::string_view::npos) {
    const std::int64_t least = value.maker == "aten::native_group_norm" ? 3 : 2;
    return tensor.dim() >= least && tensor.size(-1) > 1;
  }
  return true;
}

MethodStatistics CompressStatistics::total() const {
  MethodStatistics sum;
  for (const MethodStatistics& m : methods) {
    sum.tensors += m.tensors;
    sum.shared += m.shared;
    sum.bytes_before += m.bytes_before;
    sum.bytes_after += m.bytes_after;
    sum.restores += m.restores;
    sum.encode_s += m.encode_s;
    sum.restore_s += m.restore_s;
  }
  return sum;
}

CompressGuard::CompressGuard(const CompressOptions& options) {
  GRADUS_CHECK("compress", options.allow_lossy || options.lossy == Lossy::none,
               "a lossy method must be allowed; got one without allow_lossy. Set allow_lossy = "
               "true if gradients may change, or lossy = Lossy::none");
  GRADUS_CHECK("compress", options.min_bytes >= 0, "min_bytes must be >= 0; got ",
               options.min_bytes);
  GRADUS_CHECK("compress", options.max_ratio > 0 && options.max_ratio <= 1,
               "max_ratio must be in (0, 1]; got ", options.max_ratio);
  GRADUS_CHECK("compress", options.clock != nullptr, "clock must be set; got none");
  compressor_ = std::make_shared<internal::Compressor>(options);
  origins_guard_ = plane::op::push(plane::op::Order::gather, compressor_->origins());
  if (options.on_save)
    saved_guard_ = plane::saved::push(plane::saved::Order::compress, compressor_);
}

CompressGuard::~CompressGuard() = default;
CompressGuard::CompressGuard(CompressGuard&&) noexcept = default;

CompressGuard& CompressGuard::operator=(CompressGuard&& other) noexcept {
  if (this != &other) {
    saved_guard_ = std::move(other.saved_guard_);
    origins_guard_ = std::move(other.origins_guard_);
    compressor_ = std::move(other.compressor_);
  }
  return *this;
}

std::optional<Probe> CompressGuard::probe(const plane::saved::Value& value) const {
  const at::NoGradGuard no_grad;
  return compressor_->probe(value);
}
std::optional<plane::saved::Packed> CompressGuard::encode(const plane::saved::Value& value,
                                                          double max_ratio) const {
  const at::NoGradGuard no_grad;
  return compressor_->pack_within(value, max_ratio);
}
CompressStatistics CompressGuard::statistics() const { return compressor_->statistics(); }
RoundingState CompressGuard::rounding() const { return compressor_->rounding(); }

}  // namespace gradus::compress
