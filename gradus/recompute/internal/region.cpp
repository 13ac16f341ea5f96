#include <gradus/recompute/internal/region.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <mutex>
#include <sstream>

#include <ATen/core/function_schema.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>

#include <gradus/amp/autocast/autocast.h>
#include <gradus/base/error.h>
#include <gradus/base/names.h>
#include <gradus/recompute/internal/storage.h>

namespace gradus::recompute::internal {
namespace {

using plane::op::Call;
using plane::op::Frame;

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {
  return (hash ^ value) * 0x9e3779b97f4a7c15ULL + (hash >> 29);
}

std::uint64_t signature_of(const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) return 1;
    std::uint64_t hash = mix(2, static_cast<std::uint64_t>(tensor.scalar_type()));
    for (const std::int64_t size : tensor.sizes())
      hash = mix(hash, static_cast<std::uint64_t>(size));
    return hash;
  }
  if (value.isInt()) return mix(3, static_cast<std::uint64_t>(value.toInt()));
  if (value.isDouble()) return mix(4, std::bit_cast<std::uint64_t>(value.toDouble()));
  if (value.isBool()) return mix(5, value.toBool() ? 1 : 0);
  if (value.isString()) return mix(6, std::hash<std::string>()(value.toStringRef()));
  if (value.isDevice()) return mix(7, static_cast<std::uint64_t>(value.toDevice().type()));
  if (value.isComplexDouble()) {
    const auto z = value.toComplexDouble();
    return mix(mix(8, std::bit_cast<std::uint64_t>(z.real())),
               std::bit_cast<std::uint64_t>(z.imag()));
  }
  if (value.isList()) {
    std::uint64_t hash = 9;
    for (const c10::IValue& element : value.toListRef()) hash = mix(hash, signature_of(element));
    return hash;
  }
  return value.isNone() ? 10 : 11;
}

std::uint64_t signature_of(const Call& call) {
  std::uint64_t hash = 0;
  for (const c10::IValue& value : call.arguments()) hash = mix(hash, signature_of(value));
  return hash;
}

// Calls visit on every tensor with a storage, in lists too.
template <typename Visit>
void visit_storages(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined() && tensor.has_storage()) visit(tensor);
  } else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    for (const c10::IValue& element : value.toListRef()) visit_storages(element, visit);
  }
}

std::vector<at::Tensor> tensors_in(c10::ArrayRef<c10::IValue> values) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& value : values) {
    visit_storages(value, [&](const at::Tensor& tensor) { tensors.push_back(tensor); });
  }
  return tensors;
}

// Whether a second run must repeat this call. detach() is what saving a tensor does; the casts of
// an autocast operator depend on what its cache holds; a backward pass inside the region depends on
// what lies outside it.
bool is_step(Compare compare, const Call& call, Frame frame, const OperatorTraits& traits,
             const void* casting_for, std::size_t nesting, int pass) {
  if (compare == Compare::nothing || traits.detaches || amp::casting()) return false;
  if (compare == Compare::program) {
    if (nesting > 0) return false;
  } else if (frame != Frame::autograd ||
             (casting_for != nullptr && casting_for != &call.schema())) {
    return false;
  }
  return plane::saved::current_backward() == pass;
}

// Counts a running operator.
class Nesting {
 public:
  explicit Nesting(std::size_t& count) : count_(count) { ++count_; }
  ~Nesting() { --count_; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

 private:
  std::size_t& count_;
};

thread_local const plane::op::Handler* innermost = nullptr;

// Whether a policy may decide on this call: the steps, and what is composed of them.
bool is_decided(const Call& call, Frame frame, const OperatorTraits& traits,
                const void* casting_for) {
  return (frame == Frame::autograd || frame == Frame::composite) && !traits.detaches &&
         !amp::casting() && (casting_for == nullptr || casting_for == &call.schema());
}

void describe(std::ostream& out, const c10::IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      out << "none";
    } else {
      out << tensor.scalar_type() << tensor.sizes();
    }
  } else if (value.isList()) {
    out << '[';
    const auto elements = value.toListRef();
    for (std::size_t i = 0; i < elements.size(); ++i) {
      if (i > 0) out << ", ";
      describe(out, elements[i]);
    }
    out << ']';
  } else if (value.isGenerator()) {
    out << "generator";
  } else {
    out << value;
  }
}

std::string text_of(const Call& call) {
  std::ostringstream out;
  out << call.name() << '(';
  const auto arguments = call.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (i > 0) out << ", ";
    describe(out, arguments[i]);
  }
  out << ')';
  return out.str();
}

void list_around(std::ostream& out, const char* title, const std::vector<std::string>& texts,
                 std::size_t at) {
  constexpr std::size_t kAround = 4;
  out << "\n" << title;
  const std::size_t begin = at > kAround ? at - kAround : 0;
  const std::size_t end = std::min(texts.size(), at + kAround + 1);
  if (begin > 0) out << "\n    ... " << begin << " operators that agree";
  for (std::size_t i = begin; i < end; ++i) {
    out << "\n" << (i == at ? " >> " : "    ") << i << ": " << texts[i];
  }
  if (at >= texts.size()) out << "\n >> " << texts.size() << ": the end of the region";
}

// Sets, for the time of one call, which operator autocast is casting arguments for.
class CastingScope {
 public:
  CastingScope(const void*& casting_for, const Call& call, Frame frame)
      : casting_for_(casting_for), outer_(casting_for) {
    if (frame == Frame::autocast) {
      casting_for_ = &call.schema();
    } else if (casting_for_ == &call.schema()) {
      casting_for_ = nullptr;
    }
  }
  ~CastingScope() { casting_for_ = outer_; }
  CastingScope(const CastingScope&) = delete;
  CastingScope& operator=(const CastingScope&) = delete;

 private:
  const void*& casting_for_;
  const void* outer_;
};

}  // namespace

InnermostRegion::InnermostRegion(const plane::op::Handler* watcher)
    : outer_(std::exchange(innermost, watcher)) {}

InnermostRegion::~InnermostRegion() { innermost = outer_; }

const plane::op::Handler* InnermostRegion::watcher() { return innermost; }

at::Tensor over_bytes(const at::Tensor& tensor, const at::Tensor& bytes) {
  at::Tensor result = at::empty({0}, tensor.options());
  result.set_(bytes.clone().storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return result;
}

void check_unchanged(const RegionRecord& record) {
  for (const OutsideTensor& outside : record.read) {
    const auto alive = outside.tensor.lock();
    // set_data() gives a tensor other memory without a trace in its version.
    if (alive && outside.storage && at::Tensor(alive).has_storage() &&
        at::Tensor(alive).storage().unsafeGetStorageImpl() !=
            outside.storage->_unsafe_get_target()) {
      throw UserError(base::join(
          "[checkpoint] what a checkpointed region reads must not change before backward; ",
          base::describe_tensor(at::Tensor(alive)),
          " was given other memory (set_data?). Do that after backward."));
    }
    // What the region itself changes is read again as it was, from a copy.
    if (outside.storage && record.changed.contains(outside.storage->_unsafe_get_target())) continue;
    if (outside.counter.current_version() == outside.version) continue;
    throw UserError(base::join(
        "[checkpoint] what a checkpointed region reads must not change before backward; ",
        alive ? base::describe_tensor(at::Tensor(alive)) : "a tensor that is gone",
        " was at version ", outside.version, " and is now at version ",
        outside.counter.current_version(), ". Change it after backward, or change a clone."));
  }
}

Recorder::Recorder(RegionRecord& record, Options options)
    : record_(record), options_(std::move(options)), pass_(plane::saved::current_backward()) {}

// One call that a policy may decide on, as it stood before.
struct Recorder::Span {
  std::size_t ordinal, calls, places, seeded;
  std::uint64_t signature;
  std::vector<c10::IValue> arguments;
};

void Recorder::note_tensor(const at::Tensor& tensor, bool written, const Call& call) {
  const c10::StorageImpl* const storage = storage_of(tensor);
  if (written && !record_.kept.empty()) note_write_to_kept(tensor, call);
  const auto [seen, is_new] = storages_.emplace(storage, Origin::outside);
  if (seen->second == Origin::inside) return;
  record_.read_requires_grad = record_.read_requires_grad || tensor.requires_grad();
  if (is_new && !tensor.is_inference()) {
    record_.read.push_back({std::optional(weak_storage(tensor)),
                            c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                                tensor.getIntrusivePtr()),
                            tensor.unsafeGetTensorImpl()->version_counter(), 0});
  }
  if (written && !record_.changed.contains(storage)) {
    record_.changed.emplace(
        storage, ChangedStorage{weak_storage(tensor), copy_of_storage(tensor.storage())});
  }
}

// Sparse and other tensors without a storage: known by themselves.
void Recorder::note_without_storage(const c10::IValue& value) {
  if (!value.isTensor()) return;
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined() || tensor.has_storage() || tensor.is_inference()) return;
  if (!without_storage_.emplace(tensor.unsafeGetTensorImpl(), Origin::outside).second) return;
  record_.read.push_back(
      {std::nullopt,
       c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()),
       tensor.unsafeGetTensorImpl()->version_counter(), 0});
}

void Recorder::note_arguments(const Call& call, const OperatorTraits& traits) {
  const auto arguments = call.arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    note_without_storage(value);
    if (value.isTensor() || value.isList()) {
      const bool written = writes(call, traits, i);
      visit_storages(value, [&](const at::Tensor& tensor) { note_tensor(tensor, written, call); });
    } else if (value.isGenerator()) {
      at::Generator generator = value.toGenerator();
      if (!generator.defined()) continue;
      const bool known = std::any_of(record_.generators.begin(), record_.generators.end(),
                                     [&](const auto& entry) { return entry.first == generator; });
      if (known) continue;
      const std::lock_guard lock(generator.mutex());
      record_.generators.emplace_back(generator, generator.get_state());
    }
  }
}

// What shares no storage with an argument was made here: all arguments were noted before.
void Recorder::note_results(const Call& call) {
  for (const c10::IValue& value : call.results()) {
    if (value.isTensor() && value.toTensor().defined() && !value.toTensor().has_storage()) {
      without_storage_.emplace(value.toTensor().unsafeGetTensorImpl(), Origin::inside);
    }
    visit_storages(value, [&](const at::Tensor& tensor) {
      storages_.emplace(storage_of(tensor), Origin::inside);
    });
  }
}

void Recorder::note_write_to_kept(const at::Tensor& tensor, const Call& call) {
  for (std::size_t i = record_.kept.size(); i-- > 0;) {
    KeptOperator& op = record_.kept[i];
    for (KeptResult& result : op.results) {
      if (!result.storage || result.mutated ||
          result.storage->_unsafe_get_target() != storage_of(tensor)) {
        continue;
      }
      if (!options_.policy.allow_mutation) {
        if (op.must) {
          throw UserError(base::join(
              "[checkpoint] a result that a selective policy must save must not be changed in "
              "place; ",
              call.name(), " changes the result of ", op.name, " (", base::describe_tensor(tensor),
              "). Recompute that operator, save the composite one around both, say prefer_save, or "
              "set SelectivePolicy::allow_mutation, which keeps a copy."));
        }
        // Preferred only: made again after all, as is what changes it.
        record_.kept.erase(record_.kept.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
      const at::NoGradGuard no_grad;
      result.pending = result.pending.clone();
      result.mutated = true;
    }
  }
}

void Recorder::saved(const plane::saved::Value& value) {
  if (options_.policy) saved_.push_back(value.tensor);
  // Hooks that wait for an operator to return come after it; what is saved outside any operator is
  // not its own.
  if (open_ && !value.maker.empty() && open_end_ == places_) ++open_end_;
  ++places_;
}

// By now all is known that autograd saved in the operator that was kept last.
void Recorder::close() {
  if (!open_) return;
  open_ = false;
  KeptOperator& op = record_.kept.back();
  for (std::size_t i = op.places_begin; i < open_end_; ++i) {
    op.places.push_back(place_of(saved_.at(i - saved_begin_), open_arguments_, open_results_));
  }
  open_arguments_.clear();
  open_results_.clear();
}

void Recorder::call(Call& call) {
  const Frame frame = call.frame();
  if (frame == Frame::below_autograd || paused_) {
    call.proceed();
    return;
  }
  close();
  const OperatorTraits& traits = traits_of(call);
  const bool in_backward = plane::saved::current_backward() != pass_;
  if (in_backward && !record_.ran_backward) {
    record_.ran_backward = true;
    if (options_.policy) {
      throw UserError(
          "[checkpoint] a region with a selective policy must not run a backward pass inside: its "
          "second run has no graph through the operators that it does not run. Leave the policy "
          "away, or take the backward pass out of the region.");
    }
  }
  const std::size_t calls_before = record_.calls.size();
  std::uint64_t signature = 0;
  if (is_step(options_.compare, call, frame, traits, casting_for_, nesting_, pass_)) {
    signature = signature_of(call);
    record_.calls.push_back({call.name(), signature});
    if (options_.debug) record_.texts.push_back(text_of(call));
  }
  note_arguments(call, traits);
  if (traits.seeded) ++seeded_;
  const Nesting nested(nesting_);
  if (!options_.policy || InnermostRegion::watcher() != this ||
      !is_decided(call, frame, traits, casting_for_)) {
    const CastingScope scope(casting_for_, call, frame);
    call.proceed();
  } else {
    const auto arguments = call.arguments();
    const Span span{ordinal_++, calls_before,   places_, seeded_ - (traits.seeded ? 1 : 0),
                    signature,  arguments.vec()};
    if (nesting_ == 1) {
      saved_.clear();
      saved_begin_ = places_;
    }
    {
      const CastingScope scope(casting_for_, call, frame);
      call.proceed();
    }
    close();
    decide(call, traits, span);
  }
  note_results(call);
}

void Recorder::decide(const Call& call, const OperatorTraits& traits, const Span& span) {
  const Keep wish = options_.policy.decide({call.name(), span.arguments, call.results()});
  if (wish == Keep::must_recompute || wish == Keep::prefer_recompute) return;
  bool possible = !traits.aliases && traits.writes == 0;
  // The second run's copy of the statistics must change as they did.
  if (traits.statistics != 0) {
    possible = possible && traits.train_flag >= 0 &&
               !span.arguments[static_cast<std::size_t>(traits.train_flag)].toBool();
  }
  for (const c10::IValue& value : call.results()) possible = possible && !value.isTensorList();
  if (!possible) {
    GRADUS_CHECK("checkpoint", wish != Keep::must_save,
                 "a policy must ask to save only operators with results of their own; ",
                 call.name(),
                 " returns a view or a list, or changes an argument. Save the operator that makes "
                 "the storage, or say prefer_save");
    return;
  }
  // Some operators return an argument without saying so (dropout that does not train).
  const std::vector<at::Tensor> arguments = tensors_in(span.arguments);
  for (const at::Tensor& result : tensors_in(call.results())) {
    for (const at::Tensor& argument : arguments) {
      if (storage_of(result) == storage_of(argument)) return;
    }
  }
  keep(call, span, wish == Keep::must_save);
}

KeptPlace Recorder::place_of(const at::Tensor& saved, const std::vector<at::Tensor>& arguments,
                             const std::vector<at::Tensor>& results) {
  KeptPlace place;
  const auto look_in = [&](const std::vector<at::Tensor>& tensors, KeptPlace::From from) {
    if (place.from != KeptPlace::From::own && place.whole) return;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const at::Tensor& base = tensors[i];
      if (storage_of(base) != storage_of(saved) || base.scalar_type() != saved.scalar_type() ||
          base.is_conj() != saved.is_conj() || base.is_neg() != saved.is_neg()) {
        continue;
      }
      const bool whole = base.sizes() == saved.sizes() && base.strides() == saved.strides() &&
                         base.storage_offset() == saved.storage_offset();
      if (place.from != KeptPlace::From::own && !whole) continue;
      place.from = from;
      place.index = i;
      place.whole = whole;
      place.base_strides = base.strides().vec();
      place.offset = saved.storage_offset() - base.storage_offset();
      if (whole) return;
    }
  };
  if (saved.has_storage()) {
    look_in(arguments, KeptPlace::From::argument);
    look_in(results, KeptPlace::From::result);
  }
  if (place.from == KeptPlace::From::own) {
    place.pending = saved;
  } else if (!place.whole) {
    place.sizes = saved.sizes().vec();
    place.strides = saved.strides().vec();
  }
  return place;
}

void Recorder::keep(const Call& call, const Span& span, bool must) {
  // A composite operator that is kept is not run: nothing of its parts need be.
  while (!record_.kept.empty() && record_.kept.back().ordinal > span.ordinal) {
    record_.kept.pop_back();
  }
  KeptOperator op;
  op.name = call.name();
  op.must = must;
  op.signature = span.signature;
  op.ordinal = span.ordinal;
  op.ordinal_end = ordinal_;
  op.calls_end = record_.calls.size();
  op.places_begin = span.places;
  const at::NoGradGuard no_grad;
  for (const c10::IValue& value : call.results()) {
    KeptResult& kept = op.results.emplace_back();
    if (!value.isTensor() || !value.toTensor().defined()) {
      kept.other = value;
      continue;
    }
    const at::Tensor& tensor = value.toTensor();
    kept.is_tensor = true;
    kept.pending = tensor.detach();  // the graph owns the record: no way back to the graph
    if (tensor.has_storage()) kept.storage = weak_storage(tensor);
    kept.requires_grad = tensor.requires_grad();
  }
  if (seeded_ > span.seeded && options_.keep_rng) {
    std::vector<at::Generator> custom;
    for (const auto& entry : record_.generators) custom.push_back(entry.first);
    op.rng_after = base::RngState::capture(custom);
  }
  record_.kept.push_back(std::move(op));
  open_ = true;
  open_end_ = places_;
  open_arguments_ = tensors_in(span.arguments);
  open_results_ = tensors_in(call.results());
}

bool Recorder::made(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return true;
  const auto seen = storages_.find(storage_of(tensor));
  return seen != storages_.end() && seen->second == Origin::inside;
}

void Recorder::finish() {
  close();
  saved_.clear();
  // Not earlier: the region's own hooks would take it for a tensor that autograd saves.
  const at::NoGradGuard no_grad;
  for (KeptOperator& op : record_.kept) {
    for (KeptResult& result : op.results) {
      if (result.is_tensor) result.held = plane::saved::Held(std::exchange(result.pending, {}));
    }
    for (KeptPlace& place : op.places) {
      if (place.pending.defined()) {
        place.held = plane::saved::Held(std::exchange(place.pending, {}));
      }
    }
  }
  for (OutsideTensor& outside : record_.read) outside.version = outside.counter.current_version();
}

Replayer::Replayer(const RegionRecord& record, const void* frame, Compare compare, bool debug)
    : record_(record),
      frame_(frame),
      compare_(compare),
      debug_(debug),
      pass_(plane::saved::current_backward()) {}

at::Tensor Replayer::shadow_of(const at::Tensor& tensor) {
  const c10::StorageImpl* const storage = storage_of(tensor);
  const auto changed = record_.changed.find(storage);
  if (changed == record_.changed.end()) return {};
  const at::NoGradGuard no_grad;
  auto shadow = shadows_.find(storage);
  if (shadow == shadows_.end())
    shadow = shadows_.emplace(storage, changed->second.bytes_before.clone()).first;
  at::Tensor result = at::empty({0}, tensor.options().requires_grad(false));
  result.set_(shadow->second.storage(), tensor.storage_offset(), tensor.sizes(), tensor.strides());
  return result;
}

void Replayer::substitute(Call& call) {
  if (record_.changed.empty()) return;
  const std::size_t count = call.arguments().size();
  for (std::size_t i = 0; i < count; ++i) {
    const c10::IValue& value = call.arguments()[i];
    bool outside = false;
    visit_storages(value, [&](const at::Tensor& t) {
      outside = outside || record_.changed.contains(storage_of(t));
    });
    if (!outside) continue;
    if (value.isTensor()) {
      call.set_argument(i, shadow_of(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        if (const at::Tensor shadow =
                tensor.defined() && tensor.has_storage() ? shadow_of(tensor) : at::Tensor();
            shadow.defined()) {
          tensor = shadow;
        }
      }
      call.set_argument(i, c10::IValue(std::move(tensors)));
    } else {
      throw UserError(
          base::join("[checkpoint] ", call.name(),
                     " takes a tensor that the region changed in a list of "
                     "optional tensors, which cannot be run again; change a clone instead"));
    }
  }
}

void Replayer::compare(const Call& call) {
  if (debug_) {
    texts_.push_back(text_of(call));
    // A few more operators, so that the lists show where the runs went.
    if (different_at_) {
      if (texts_.size() > *different_at_ + 4) report_difference();
      return;
    }
  }
  const std::uint64_t signature = signature_of(call);
  if (next_ < record_.calls.size() && record_.calls[next_].name == call.name() &&
      record_.calls[next_].signature == signature) {
    ++next_;
    return;
  }
  const bool ended = next_ >= record_.calls.size();
  difference_ = base::join(
      "[checkpoint] a checkpointed region must compute the same again for backward; operator ",
      next_, " was ", ended ? std::string_view("the end of the region") : record_.calls[next_].name,
      " and is now ", call.name(),
      !ended && record_.calls[next_].name == call.name() ? " with other arguments" : "",
      ". Did the module switch between train() and eval(), or a condition outside the region "
      "change?");
  different_at_ = next_;
  if (!debug_) report_difference();
}

void Replayer::report_difference() const {
  if (!different_at_) return;
  std::ostringstream out;
  out << difference_;
  if (debug_) {
    list_around(out, "  The first run:", record_.texts, *different_at_);
    list_around(out, "  The second run:", texts_, *different_at_);
  }
  throw UserError(out.str());
}

bool Replayer::replace_kept(Call& call) {
  const std::size_t ordinal = ordinal_++;
  if (next_kept_ >= record_.kept.size() || record_.kept[next_kept_].ordinal != ordinal) {
    return false;
  }
  const KeptOperator& op = record_.kept[next_kept_++];
  if (op.name != call.name()) {
    throw UserError(base::join(
        "[checkpoint] a checkpointed region must compute the same again for backward; where it now "
        "calls ",
        call.name(), ", the result of ", op.name, " was kept"));
  }
  const std::vector<at::Tensor> arguments =
      op.places.empty() ? std::vector<at::Tensor>() : tensors_in(call.arguments());
  std::vector<c10::IValue> values;
  std::vector<at::Tensor> results;
  for (const KeptResult& kept : op.results) {
    if (!kept.is_tensor) {
      values.push_back(kept.other);
      continue;
    }
    at::Tensor tensor = kept.held.get().detach();
    tensor.requires_grad_(kept.requires_grad);
    if (kept.mutated) {
      // Soon changed in place: that needs memory of its own, and a tensor that is no leaf.
      const at::AutoGradMode grad(true);
      tensor = tensor.clone();
    }
    results.push_back(tensor);
    values.emplace_back(std::move(tensor));
  }
  if (places_ != nullptr) {
    GRADUS_INTERNAL_CHECK("checkpoint", places_->count() == op.places_begin,
                          "the second run saved ", places_->count(), " tensors before ", op.name,
                          ", the first ", op.places_begin);
    for (const KeptPlace& place : op.places) {
      if (place.from == KeptPlace::From::own) {
        places_->fill(place.held.get());
        continue;
      }
      const at::Tensor base =
          (place.from == KeptPlace::From::argument ? arguments : results).at(place.index).detach();
      if (place.whole) {
        places_->fill(base);
        continue;
      }
      GRADUS_CHECK("checkpoint", base.strides() == at::IntArrayRef(place.base_strides),
                   "an argument "
                   "of ",
                   op.name, " must have the strides it had, ", place.base_strides,
                   ", for its result to be kept; got ", base.strides());
      places_->fill(
          at::as_strided(base, place.sizes, place.strides, base.storage_offset() + place.offset));
    }
  }
  if (op.rng_after) op.rng_after->restore();
  ordinal_ = op.ordinal_end;
  next_ = op.calls_end;
  call.replace(std::move(values));
  return true;
}

void Replayer::call(Call& call) {
  const Frame frame = call.frame();
  if (frame == Frame::below_autograd) {
    call.proceed();
    return;
  }
  const OperatorTraits& traits = traits_of(call);
  // Not out of a backward pass inside the region, whose engine would have to clean up.
  const bool may_stop = plane::saved::current_backward() == pass_;
  if (stop_ && may_stop) throw StopRegion{frame_};
  if (is_step(compare_, call, frame, traits, casting_for_, nesting_, pass_)) compare(call);
  const Nesting nested(nesting_);
  if (!record_.kept.empty() && InnermostRegion::watcher() == this &&
      is_decided(call, frame, traits, casting_for_) && replace_kept(call)) {
    if (stop_) throw StopRegion{frame_};
    return;
  }
  substitute(call);
  {
    const CastingScope scope(casting_for_, call, frame);
    call.proceed();
  }
  if (stop_ && may_stop) throw StopRegion{frame_};
}

void Replayer::finish() {
  if (compare_ == Compare::nothing) return;
  report_difference();
  if (next_ == record_.calls.size()) return;
  difference_ = base::join(
      "[checkpoint] a checkpointed region must compute the same again for backward; it "
      "ended after ",
      next_, " operators, before ", record_.calls[next_].name, ", where it ran ",
      record_.calls.size(), " the first time. Did the module switch between train() and eval()?");
  different_at_ = next_;
  report_difference();
}

}  // namespace gradus::recompute::internal
