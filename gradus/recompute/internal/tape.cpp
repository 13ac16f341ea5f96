#include <gradus/recompute/internal/tape.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <utility>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/base/names.h>
#include <gradus/plane/saved/saved_plane.h>
#include <gradus/recompute/internal/operator_traits.h>
#include <gradus/recompute/internal/storage.h>

namespace gradus::recompute::internal {
namespace {

using plane::op::Call;
using plane::op::Frame;

using Clock = Tracer::Clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

double seconds_since(Clock::time_point start) { return seconds_between(start, Clock::now()); }

// Results of at most this part of their call's largest one are planned for themselves.
constexpr std::int64_t kSmallResult = 4;

// A pass without a plan keeps smaller forms of at most this part of a value's bytes.
constexpr double kWorthEncoding = 0.5;

// Calls that a restored value needs are the tape's, not moments of the program.
thread_local int restoring = 0;

// Dense tensors over memory of their own; others pass through a recipe as they are, and are kept.
bool is_plain(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() && tensor.layout() == at::kStrided &&
         !tensor.is_conj() && !tensor.is_neg() && !tensor.is_quantized() && !tensor.is_inference();
}

at::Tensor over(const c10::Storage& storage, const Shape& shape) {
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), shape.keys, shape.dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides, shape.offset);
  return tensor;
}

template <typename Visit>
void visit_plain(const c10::IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (is_plain(value.toTensor())) visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) visit_plain(element, visit);
  }
}

// The generator that a call draws from: its argument, or the default one of the device it computes
// on.
at::Generator generator_of(const Call& call) {
  if (!traits_of(call).seeded) return {};
  c10::Device device(c10::kCPU);
  for (const c10::IValue& value : call.arguments()) {
    if (value.isGenerator() && value.toGenerator().defined()) return value.toGenerator();
    if (value.isTensor() && value.toTensor().defined()) device = value.toTensor().device();
    if (value.isDevice()) device = value.toDevice();
  }
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

Shape Tape::shape_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.dtype(),
          tensor.unsafeGetTensorImpl()->key_set()};
}

// The content that a tensor shows now. Tensors the tape did not see made are outside: held strongly
// if asked for.
std::shared_ptr<Content> Tape::content_of(const at::Tensor& tensor, bool outside_too) {
  const c10::StorageImpl* const key = storage_of(tensor);
  for (auto change = changing_.rbegin(); change != changing_.rend(); ++change) {
    if (change->key == key && change->counter.current_version() == change->version)
      return change->before;
  }
  const auto found = current_.find(key);
  if (found != current_.end() && found->second->program.use_count() > 0) return found->second;
  if (!outside_too) return nullptr;
  const auto known = outside_.find(key);
  if (known != outside_.end()) {
    auto content = known->second.lock();
    if (content != nullptr && content->version->current_version() == content->version_read)
      return content;
  }
  auto content = std::make_shared<Content>(static_cast<std::int64_t>(tensor.storage().nbytes()),
                                           weak_storage(tensor));
  content->storage = tensor.storage();
  content->version = tensor.unsafeGetTensorImpl()->version_counter();
  content->version_read = content->version->current_version();
  content->description = base::describe_tensor(tensor);
  outside_[key] = content;
  return content;
}

// Called before an operator changes @p tensor in place: what the storage holds now is a content of
// its own. Returns whether it came from outside. @p only_changes: the operator makes nothing new.
bool Tape::prepare_change(const at::Tensor& tensor, bool only_changes) {
  const auto content = content_of(tensor, true);
  const c10::StorageImpl* const key = storage_of(tensor);
  const bool outside = content->maker == nullptr;
  if (!outside) {
    content->storage = c10::Storage();
    current_.erase(key);
  } else if (saved_ == 0 && only_changes) {
    // Nothing waits for backward, so nothing will be made again from what is about to go: an
    // optimizer's step must not cost a copy of every weight. All that was made so far counts as
    // outside from here on.
    current_.clear();
    content->storage = c10::Storage();
    outside_.erase(key);
  } else {
    // It cannot be made again, and what was computed from it may have to be.
    content->storage = copy_of_storage(content->storage).storage();
    content->version.reset();
    outside_.erase(key);
  }
  content->program =
      c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>());
  const c10::VariableVersion& counter = tensor.unsafeGetTensorImpl()->version_counter();
  if (counter.enabled()) changing_.push_back({key, content, counter, counter.current_version()});
  return outside;
}

Argument Tape::argument_of(const c10::IValue& value) {
  Argument argument;
  if (value.isTensor() && is_plain(value.toTensor())) {
    const at::Tensor& tensor = value.toTensor();
    argument.tensors.emplace_back(content_of(tensor, true), shape_of(tensor));
    return argument;
  }
  argument.value = value;
  if (!value.isList() || value.toListRef().empty()) return argument;
  bool any = false;
  for (const c10::IValue& element : value.toListRef()) {
    const bool plain = element.isTensor() && is_plain(element.toTensor());
    argument.present.push_back(plain);
    any = any || plain;
    if (plain)
      argument.tensors.emplace_back(content_of(element.toTensor(), true),
                                    shape_of(element.toTensor()));
  }
  if (!any) {
    argument.present.clear();
    return argument;
  }
  // The list itself must not hold the tensors.
  std::vector<c10::IValue> rest;
  std::size_t i = 0;
  for (const c10::IValue& element : value.toListRef())
    rest.push_back(argument.present[i++] ? c10::IValue() : element);
  argument.value = c10::IValue(c10::ivalue::Tuple::create(std::move(rest)));
  return argument;
}

void Tape::call(Call& call) {
  if (call.frame() != Frame::autograd) {  // below are parts of kernels
    call.proceed();
    return;
  }
  if (plane::saved::current_backward() >= 0) {
    // In a backward pass nothing is recorded, so what a double backward saves is kept.
    call.proceed();
    if (restoring == 0) count_moment(/*backward=*/true);
    return;
  }
  record(call);
  count_moment(/*backward=*/false);
}

void Tape::count_moment(bool backward) {
  const std::lock_guard lock(mutex_);
  if (calls_ < 0) return;
  if (tracer_ != nullptr) tracer_->end_moment(moment_, backward);
  ++moment_;
  if (!backward) return;
  // A program that ends where another goes on.
  if (!backward_seen_ && following_ && static_cast<std::size_t>(calls_) != plan_->calls.size()) {
    change_plan(nullptr, [&](const EvictionPlan& plan) {
      return static_cast<std::size_t>(calls_) == plan.calls.size();
    });
  }
  backward_seen_ = true;
  backward_end_ = Clock::now();
}

// @p since: how long ago its first call began.
void Tape::begin_pass(Tracer::Clock::duration since) {
  OnTrace report;
  std::function<void(const EvictionPlan*)> ended;
  std::shared_ptr<const EvictionPlan> followed;
  StepTrace trace;
  {
    const std::lock_guard lock(mutex_);
    if (calls_ >= 0) {
      ended = on_pass_;
      if (following_) {
        const bool whole = calls_ == static_cast<std::int64_t>(plan_->calls.size());
        ++(whole ? statistics_.planned_passes : statistics_.strayed_passes);
        if (whole) followed = plan_;
      }
      if (tracer_ != nullptr) {
        const double elsewhere = evicting_s_ + statistics_.replay_seconds - replay_s_at_start_;
        trace =
            tracer_->finish(seconds_between(pass_start_, backward_end_) - elsewhere - probing_s_,
                            recording_s_, elsewhere);
        tracer_ = nullptr;
        report = on_trace_;
      }
    }
  }
  // These may begin or end tracing, and set a plan.
  if (report != nullptr) report(trace);
  if (ended != nullptr) ended(followed.get());
  const std::lock_guard lock(mutex_);
  other_plans_ = next_plans_;
  plan_ = nullptr;
  if (!other_plans_.empty()) {
    plan_ = other_plans_.front().plan;
    online_ = other_plans_.front().online;
    other_plans_.erase(other_plans_.begin());
  }
  following_ = plan_ != nullptr;
  if (on_trace_ != nullptr) tracer_ = std::make_unique<Tracer>();
  calls_ = 0;
  moment_ = 0;
  over_ = false;
  backward_seen_ = false;
  recording_s_ = 0.0;
  evicting_s_ = 0.0;
  probing_s_ = 0.0;
  replay_s_at_start_ = statistics_.replay_seconds;
  pass_start_ = backward_end_ = Clock::now() - since;
}

void Tape::trace(OnTrace on_trace, OnSaved on_saved) {
  const std::lock_guard lock(mutex_);
  on_trace_ = std::move(on_trace);
  on_saved_ = std::move(on_saved);
  if (on_trace_ == nullptr) tracer_ = nullptr;
}

void Tape::on_pass(std::function<void(const EvictionPlan*)> ended) {
  const std::lock_guard lock(mutex_);
  on_pass_ = std::move(ended);
}

void Tape::set_plan(std::shared_ptr<const EvictionPlan> plan) {
  set_plans(plan == nullptr ? std::vector<ProgramPlan>()
                            : std::vector{ProgramPlan{.plan = std::move(plan)}});
}

void Tape::set_plans(std::vector<ProgramPlan> plans) {
  const std::lock_guard lock(mutex_);
  std::erase_if(plans, [](const ProgramPlan& program) { return program.plan == nullptr; });
  next_plans_ = std::move(plans);
}

// Goes over to another plan that has all calls so far; @p fits answers for those of @p recipe.
bool Tape::change_plan(const Recipe* recipe, const std::function<bool(const EvictionPlan&)>& fits) {
  const auto same_so_far = [&](const EvictionPlan& other) {
    for (std::int64_t call = 0; call < calls_; ++call) {
      if (recipe != nullptr && (call == recipe->call || call == recipe->small_call)) continue;
      const auto i = static_cast<std::size_t>(call);
      if (i >= other.calls.size() || i >= plan_->calls.size() ||
          other.calls[i].op != plan_->calls[i].op || other.calls[i].bytes != plan_->calls[i].bytes)
        return false;
    }
    return true;
  };
  while (!other_plans_.empty()) {
    const auto other = other_plans_.front();
    other_plans_.erase(other_plans_.begin());
    if (!fits(*other.plan) || !same_so_far(*other.plan)) continue;
    plan_ = other.plan;
    online_ = other.online;
    return true;
  }
  return false;
}

// Gives the small results of @p recipe, just run, a number of their own: to keep a layer's output
// may be worth much where to keep its workspace is not.
void Tape::separate_small(Recipe& recipe) {
  std::int64_t largest = 0;
  for (const auto& weak : recipe.made) largest = std::max(largest, weak.lock()->bytes);
  for (const auto& weak : recipe.made) {
    const auto content = weak.lock();
    if (content->bytes > largest / kSmallResult) continue;
    if (recipe.small_call < 0) recipe.small_call = calls_++;
    content->call = recipe.small_call;
  }
}

// Checks that @p recipe, just run, is the call that the plan has at its place.
void Tape::follow(const Recipe& recipe) {
  if (!following_) return;
  std::int64_t bytes = 0, small_bytes = 0;
  for (const auto& weak : recipe.made) {
    const auto content = weak.lock();
    (content->call == recipe.call ? bytes : small_bytes) += content->bytes;
  }
  const auto fits = [&](const EvictionPlan& plan) {
    const auto has = [&](std::int64_t call, std::int64_t made) {
      const auto index = static_cast<std::size_t>(call);
      return index < plan.calls.size() && plan.calls[index].bytes == made &&
             plan.calls[index].op == recipe.op.schema().name();
    };
    return has(recipe.call, bytes) &&
           (recipe.small_call < 0 || has(recipe.small_call, small_bytes));
  };
  if (fits(*plan_) || change_plan(&recipe, fits)) return;
  following_ = false;
  ++statistics_.strayed_passes;
}

void Tape::record(Call& call) {
  const auto entered = Clock::now();
  const OperatorTraits& traits = traits_of(call);
  auto recipe = std::make_shared<Recipe>(call.op());
  struct Changed {
    std::size_t argument;
    at::Tensor tensor;
    bool outside;
  };
  std::vector<Changed> changed;
  std::vector<const c10::StorageImpl*> taken;
  std::size_t changing_before = 0;
  {
    const std::lock_guard lock(mutex_);
    changing_before = changing_.size();
    if (++calls_since_purge_ >= 256) purge();
    recipe->number = ++clock_;
    if (calls_ >= 0 && !over_ && !backward_seen_) recipe->call = calls_++;
    const auto& returns = call.schema().returns();
    const bool only_changes = std::all_of(returns.begin(), returns.end(), [](const auto& result) {
      return result.alias_info() != nullptr;
    });
    const auto arguments = call.arguments();
    recipe->arguments.reserve(arguments.size());
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      visit_plain(arguments[i], [&](const at::Tensor& t) { taken.push_back(storage_of(t)); });
      recipe->arguments.push_back(argument_of(arguments[i]));
      for (const auto& [content, shape] : recipe->arguments.back().tensors)
        content->last_used = clock_;
      recipe->arguments.back().written = writes(call, traits, i);
      if (recipe->arguments.back().written) {
        visit_plain(arguments[i], [&](const at::Tensor& t) {
          changed.push_back({i, t, prepare_change(t, only_changes)});
        });
      }
    }
    recipe->grad_mode = at::GradMode::is_enabled();
    recipe->generator = generator_of(call);
    if (recipe->generator.defined()) {
      const base::ArenaScope host(base::Arena::host);
      const std::lock_guard generator_lock(recipe->generator.mutex());
      recipe->generator_state = recipe->generator.get_state();
    }
  }
  const double evicting_before = evicting_s_ + probing_s_;
  const auto start = Clock::now();
  {
    // Also where the call throws.
    struct Changing {
      Tape& tape;
      std::size_t before;
      ~Changing() {
        const std::lock_guard lock(tape.mutex_);
        tape.changing_.erase(tape.changing_.begin() + static_cast<std::ptrdiff_t>(before),
                             tape.changing_.end());
      }
    } const changing{*this, changing_before};
    call.proceed();
  }
  const auto end = Clock::now();

  const auto records = [](const c10::IValue& result) {
    return result.isTensor() && result.toTensor().defined() && result.toTensor().requires_grad();
  };
  double reporting_s = 0.0;  // is no part of any pass
  if (over_ && recipe->grad_mode && std::ranges::any_of(call.results(), records)) {
    begin_pass(Clock::now() - entered);
    recipe->call = calls_++;
    reporting_s = seconds_since(end);
  }
  const std::lock_guard lock(mutex_);
  recipe->seconds = seconds_between(start, end) - (evicting_s_ + probing_s_ - evicting_before);
  bool makes = false;
  std::int64_t new_bytes = 0;
  const auto add = [&](const at::Tensor& tensor, std::size_t output) {
    auto content = std::make_shared<Content>(static_cast<std::int64_t>(tensor.storage().nbytes()),
                                             weak_storage(tensor));
    content->maker = recipe;
    content->output = output;
    content->call = recipe->call;
    content->last_used = clock_;
    recipe->made.push_back(content);
    current_[storage_of(tensor)] = content;
    makes = true;
  };
  for (const Changed& change : changed) {
    // Results are numbered first, changed arguments behind them. An outside tensor stays one: state
    // that lives from step to step would otherwise tie every step's tape to the one before.
    if (!change.outside) add(change.tensor, call.schema().returns().size() + change.argument);
  }
  const auto results = call.results();
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!results[i].isTensor()) {
      // A list of results (split, unbind) holds views of an argument, or the operator is not
      // recorded.
      visit_plain(results[i], [&](const at::Tensor& t) {
        const auto* const key = storage_of(t);
        if (std::find(taken.begin(), taken.end(), key) == taken.end()) current_.erase(key);
      });
      continue;
    }
    const at::Tensor& tensor = results[i].toTensor();
    if (!is_plain(tensor)) continue;
    const auto* const key = storage_of(tensor);
    if (std::find(taken.begin(), taken.end(), key) != taken.end())
      continue;  // a view, or the changed argument
    const auto found = current_.find(key);
    if (found != current_.end() && found->second->maker == recipe)
      continue;  // two results over one storage
    add(tensor, i);
    new_bytes += recipe->made.back().lock()->bytes;
  }
  if (makes) ++statistics_.recorded;
  // Where a call changes two views of one storage, the last content of it counts.
  std::erase_if(recipe->made, [](const auto& made) { return made.expired(); });
  if (recipe->call >= 0) {
    separate_small(*recipe);
    follow(*recipe);
    if (tracer_ != nullptr) tracer_->call(*recipe, moment_, new_bytes);
  }
  recording_s_ += seconds_between(entered, start) + seconds_since(end) - reporting_s;
}

// Forgets contents that the program dropped; whatever still needs one holds it.
bool Tape::purge() {
  calls_since_purge_ = 0;
  const std::size_t before = current_.size();
  if (saved_ == 0) {
    // No backward pass is to come for anything recorded so far.
    current_.clear();
  } else {
    std::erase_if(current_,
                  [](const auto& entry) { return entry.second->program.use_count() == 0; });
  }
  std::erase_if(outside_, [](const auto& entry) { return entry.second.expired(); });
  std::erase_if(kept_, [](const auto& weak_content) {
    const auto content = weak_content.lock();
    return content == nullptr || !content->storage;
  });
  std::erase_if(encoded_, [](const auto& weak_content) {
    const auto content = weak_content.lock();
    return content == nullptr || content->encoded.empty();
  });
  return current_.size() < before;
}

std::shared_ptr<Content> Tape::find(const plane::saved::Value& value) {
  if (!is_plain(value.tensor) || plane::saved::current_backward() >= 0) return nullptr;
  std::shared_ptr<Content> content;
  OnSaved on_saved;
  {
    const std::lock_guard lock(mutex_);
    content = content_of(value.tensor, false);
    if (content == nullptr || !replayable(*content)) return nullptr;
    if (tracer_ != nullptr && content->call >= 0) on_saved = on_saved_;
  }
  if (on_saved != nullptr) {
    const auto start = Clock::now();
    on_saved(value, content->call);
    const std::lock_guard lock(mutex_);
    probing_s_ += seconds_since(start);
  }
  return content;
}

std::optional<plane::saved::Packed> Tape::encode(const std::shared_ptr<Content>& content,
                                                 const plane::saved::Value& value) {
  if (encoder_ == nullptr) return std::nullopt;
  const std::lock_guard lock(mutex_);
  if (planned() ? disposition_of(*content) != Disposition::leave : !encode_unplanned_)
    return std::nullopt;
  if (tracer_ != nullptr) tracer_->before_change();
  const double evicting_before = evicting_s_;
  const auto start = Clock::now();
  std::optional<plane::saved::Packed> small;
  try {
    small = encoder_->encode(value, planned() ? 1.0 : kWorthEncoding);
  } catch (const MemoryLimitError&) {
    // No room for the smaller form beside the value: it is kept as without an encoder.
  }
  evicting_s_ = evicting_before + seconds_since(start);  // evicting for it is in this time
  if (!small) {
    if (tracer_ != nullptr) tracer_->after_change();
    return std::nullopt;
  }
  const auto form = std::make_shared<Encoded>(
      Encoded{.payload = std::move(small->payload), .restore = std::move(small->restore)});
  if (content->encoded.empty()) encoded_.push_back(content);
  content->encoded.push_back(form);
  content->last_used = clock_;
  ++saved_;
  ++statistics_.encoded;
  if (tracer_ != nullptr) {
    tracer_->after_change();
    if (content->call >= 0)
      tracer_->saved(*content, value.maker,
                     static_cast<std::size_t>(content->saved) + content->encoded.size() == 1);
  }
  auto tape = shared_from_this();
  const std::shared_ptr<void> lease(
      nullptr, [tape, content, form](void*) { tape->release_encoded(content, form); });
  return plane::saved::Packed{
      .payload = {}, .restore = [tape, content, form, shape = shape_of(value.tensor), lease](auto) {
        return tape->decode(content, *form, shape);
      }};
}

at::Tensor Tape::decode(const std::shared_ptr<Content>& content, Encoded& form,
                        const Shape& shape) {
  const std::lock_guard lock(mutex_);
  if (form.dropped) return get(content, shape);
  content->last_used = ++clock_;
  if (tracer_ != nullptr && content->call >= 0) tracer_->read(*content, moment_);
  struct Decoding {
    Encoded& form;
    explicit Decoding(Encoded& f) : form(f) {
      ++restoring;
      form.decoding = true;
    }
    ~Decoding() {
      --restoring;
      form.decoding = false;
    }
  } const decoding(form);
  if (tracer_ != nullptr) tracer_->before_change();
  const auto start = Clock::now();
  at::Tensor tensor = form.restore(form.payload);
  evicting_s_ += seconds_since(start);
  if (is_plain(tensor)) content->decoded = weak_storage(tensor);
  if (tracer_ != nullptr) tracer_->after_change();
  ++statistics_.decoded;
  return tensor;
}

void Tape::release_encoded(const std::shared_ptr<Content>& content,
                           const std::shared_ptr<Encoded>& form) {
  const std::lock_guard lock(mutex_);
  if (tracer_ != nullptr && content->call >= 0) tracer_->released(*content, moment_ - 1);
  if (tracer_ != nullptr) tracer_->before_change();
  std::erase(content->encoded, form);
  form->payload.clear();
  // Made again for want of the smaller form.
  if (form->dropped && content->saved == 0 && content->encoded.empty() && content->pins == 0)
    content->storage = c10::Storage();
  if (tracer_ != nullptr) tracer_->after_change();
  end_saved();
}

bool Tape::leaves(const Content& content) const {
  const std::lock_guard lock(mutex_);
  return encoder_ == nullptr && disposition_of(content) == Disposition::leave;
}

void Tape::save(const std::shared_ptr<Content>& content, std::string_view maker) {
  const std::lock_guard lock(mutex_);
  ++content->saved;
  ++saved_;
  content->last_used = clock_;
  if (tracer_ != nullptr && content->call >= 0)
    tracer_->saved(*content, maker,
                   static_cast<std::size_t>(content->saved) + content->encoded.size() == 1);
  if (content->storage) return;
  auto program = content->program.lock();
  if (!program) return;
  content->storage = c10::Storage(std::move(program));
  kept_.push_back(content);
}

void Tape::release(const std::shared_ptr<Content>& content) {
  const std::lock_guard lock(mutex_);
  // Autograd lets go between calls: the last moment it was there is over.
  if (tracer_ != nullptr && content->call >= 0) tracer_->released(*content, moment_ - 1);
  if (--content->saved == 0) {
    if (tracer_ != nullptr) tracer_->before_change();
    if (content->pins == 0) content->storage = c10::Storage();
    content->away = nullptr;
    if (tracer_ != nullptr) tracer_->after_change();
  }
  end_saved();
}

void Tape::leave() {
  const std::lock_guard lock(mutex_);
  ++saved_;
}

void Tape::end_left() {
  const std::lock_guard lock(mutex_);
  end_saved();
}

void Tape::end_saved() {
  if (--saved_ > 0) return;
  // The end of a step: state that outlives it must not keep what it was computed from.
  purge();
  over_ = over_ || backward_seen_ || plane::saved::current_backward() >= 0;
}

at::Tensor Tape::get(const std::shared_ptr<Content>& content, const Shape& shape) {
  const std::lock_guard lock(mutex_);
  content->last_used = ++clock_;
  if (tracer_ != nullptr && content->call >= 0) tracer_->read(*content, moment_);
  struct Restoring {
    Restoring() { ++restoring; }
    ~Restoring() { --restoring; }
  } const inside;
  return over(materialise(content), shape);
}

// Brings @p content into memory if that needs no operator.
bool Tape::ready(const std::shared_ptr<Content>& content) {
  if (content->storage) return true;
  if (auto program = content->program.lock()) {
    content->storage = c10::Storage(std::move(program));
  } else if (content->away != nullptr) {
    content->storage = stash_->get(content->away);
    ++statistics_.fetched;
  } else {
    return false;
  }
  if (content->maker != nullptr) kept_.push_back(content);
  return true;
}

c10::Storage Tape::materialise(const std::shared_ptr<Content>& wanted) {
  // A replay may not evict what it is about to read: the inputs, as far as they are there, of each
  // recipe on the way from the wanted content to the one being made.
  class Pins {
   public:
    void add(const std::shared_ptr<Content>& content) {
      ++content->pins;
      contents_.push_back(content);
    }
    void clear() {
      for (const auto& content : contents_) --content->pins;
      contents_.clear();
    }
    Pins() = default;
    Pins(Pins&&) noexcept = default;
    ~Pins() { clear(); }

   private:
    std::vector<std::shared_ptr<Content>> contents_;
  };
  struct Visit {
    std::shared_ptr<Content> content;
    Pins pins;
  };
  if (wanted->storage) return wanted->storage;
  const auto start = Clock::now();
  if (tracer_ != nullptr) tracer_->before_change();
  // Depth first by an explicit stack: a chain of recipes may be as long as the program.
  constexpr int kMostRelaxed = 8;
  int relaxed = 0;
  std::vector<Visit> path;
  path.push_back({wanted, {}});
  while (!path.empty()) {
    Visit& visit = path.back();
    Content& content = *visit.content;
    if (ready(visit.content)) {
      path.pop_back();
      continue;
    }
    GRADUS_INTERNAL_CHECK("memory_budget", content.maker != nullptr,
                          "a value that cannot be made again was dropped: ", content.description);
    const std::shared_ptr<Recipe> recipe = content.maker;
    visit.pins.clear();
    std::shared_ptr<Content> missing;
    for (const Argument& argument : recipe->arguments) {
      for (const auto& [input, shape] : argument.tensors) {
        if (ready(input)) {
          visit.pins.add(input);
        } else if (missing == nullptr) {
          missing = input;
        }
      }
    }
    if (missing != nullptr) {
      path.push_back({std::move(missing), {}});
      continue;
    }
    try {
      run(*recipe);
    } catch (const MemoryLimitError&) {
      // What waits for this value may be too much to hold meanwhile: made again once more, then.
      if (path.size() == 1 || relaxed++ == kMostRelaxed) throw;
      for (std::size_t i = 0; i + 1 < path.size(); ++i) path[i].pins.clear();
      run(*recipe);
    }
    GRADUS_INTERNAL_CHECK("memory_budget", visit.content->storage, recipe->op.schema().name(),
                          " was run again and did not make the value it made before");
    path.pop_back();
  }
  path.clear();
  if (tracer_ != nullptr) tracer_->after_change();
  statistics_.replay_seconds += seconds_since(start);
  return wanted->storage;
}

void Tape::run(Recipe& recipe) {
  // Some kernels make less when no gradient is wanted (the recurrent ones of oneDNN).
  const at::AutoGradMode grad(recipe.grad_mode);
  const c10::FunctionSchema& schema = recipe.op.schema();
  std::vector<std::pair<std::size_t, at::Tensor>> changed;
  std::vector<std::pair<const Content*, c10::Storage>> copies;
  torch::jit::Stack values;
  values.reserve(recipe.arguments.size());
  for (std::size_t i = 0; i < recipe.arguments.size(); ++i) {
    const Argument& argument = recipe.arguments[i];
    if (argument.tensors.empty()) {
      values.push_back(argument.value);
      continue;
    }
    const auto tensor_over = [&](const std::pair<std::shared_ptr<Content>, Shape>& entry) {
      const Content& content = *entry.first;
      if (content.version && content.version->current_version() != content.version_read) {
        throw UserError(base::join(
            "[memory_budget] what a value is computed from must not change before backward; ",
            content.description, ", which ", schema.name(), " read, was at version ",
            content.version_read, " and is now at version ", content.version->current_version(),
            ". Change it after backward, or change a clone."));
      }
      if (!argument.written) return over(content.storage, entry.second);
      // The operator changes this argument; the content before it may be needed again. Two views of
      // one content stay so.
      auto known = std::find_if(copies.begin(), copies.end(),
                                [&](const auto& c) { return c.first == &content; });
      if (known == copies.end())
        known = copies.insert(known, {&content, copy_of_storage(content.storage).storage()});
      at::Tensor copy = over(known->second, entry.second);
      changed.emplace_back(i, copy);
      return copy;
    };
    if (argument.present.empty()) {
      values.emplace_back(tensor_over(argument.tensors[0]));
      continue;
    }
    // A list: tensors over contents and other elements in their places.
    const auto& rest = argument.value.toTupleRef().elements();
    std::size_t next = 0;
    bool optional = false;
    std::vector<std::optional<at::Tensor>> elements;
    for (std::size_t k = 0; k < argument.present.size(); ++k) {
      if (argument.present[k]) {
        elements.emplace_back(tensor_over(argument.tensors[next++]));
      } else if (rest[k].isTensor()) {
        elements.emplace_back(rest[k].toTensor());
      } else {
        elements.emplace_back(std::nullopt);
        optional = true;
      }
    }
    const auto type = schema.arguments()[i].type();
    optional = optional || type->containedType(0)->kind() == c10::TypeKind::OptionalType;
    if (optional) {
      c10::List<std::optional<at::Tensor>> list;
      for (auto& element : elements) list.push_back(std::move(element));
      values.emplace_back(std::move(list));
    } else {
      std::vector<at::Tensor> list;
      for (auto& element : elements) list.push_back(std::move(*element));
      values.emplace_back(std::move(list));
    }
  }
  std::optional<at::Tensor> generator_after;
  if (recipe.generator.defined()) {
    const base::ArenaScope host(base::Arena::host);
    const std::lock_guard lock(recipe.generator.mutex());
    generator_after = recipe.generator.get_state();
    recipe.generator.set_state(recipe.generator_state);
  }
  struct Restore {
    at::Generator generator;
    std::optional<at::Tensor>& state;
    ~Restore() {
      if (!state) return;
      const std::lock_guard lock(generator.mutex());
      generator.set_state(*state);
    }
  } const restore{recipe.generator, generator_after};
  // Kernels only: the call was recorded just above autograd, its arguments are cast already, and it
  // must not be recorded again.
  plane::op::call_kernel(recipe.op, values);
  ++statistics_.replayed;

  for (const auto& weak_made : recipe.made) {
    const auto made = weak_made.lock();
    if (made == nullptr || made->storage) continue;
    at::Tensor tensor;
    if (made->output < schema.returns().size()) {
      tensor = values[made->output].toTensor();
    } else {
      const std::size_t index = made->output - schema.returns().size();
      const auto found = std::find_if(changed.begin(), changed.end(),
                                      [&](const auto& c) { return c.first == index; });
      if (found == changed.end()) continue;
      tensor = found->second;
    }
    made->storage = tensor.storage();
    made->last_used = clock_;
    kept_.push_back(made);
  }
}

// --- Eviction ----------------------------------------------------------------------------------

struct Tape::Candidate {
  std::shared_ptr<Content> content;
  double score = 0.0;    // the lowest goes first
  bool encoded = false;  // its smaller forms
};

Disposition Tape::disposition_of(const Content& content) const {
  return planned() && content.call >= 0
             ? plan_->calls[static_cast<std::size_t>(content.call)].disposition
             : Disposition::keep;
}

// The moment at which backward asks for @p content next, by the plan.
std::int64_t Tape::next_read(const Content& content) const {
  const auto& reads = plan_->calls[static_cast<std::size_t>(content.call)].reads;
  const auto next = std::lower_bound(reads.begin(), reads.end(), moment_);
  return next == reads.end() ? std::numeric_limits<std::int64_t>::max() : *next;
}

bool Tape::evictable(const Content& content) const {
  // Where somebody else holds the memory too, dropping our handle would free nothing.
  return content.storage && content.pins == 0 && content.bytes > 0 &&
         content.storage.use_count() == 1;
}

std::int64_t Tape::drop(Content& content) {
  if (!content.storage) return 0;  // listed twice
  if (content.away == nullptr && stash_ != nullptr && content.saved > 0 &&
      disposition_of(content) == Disposition::offload) {
    content.away = stash_->put(content.storage);
    if (content.away != nullptr) ++statistics_.offloaded;
  }
  content.storage = c10::Storage();
  ++statistics_.evicted;
  statistics_.evicted_bytes += content.bytes;
  return content.bytes;
}

std::int64_t Tape::drop_encoded(Content& content) {
  const std::int64_t bytes = content.encoded_bytes();
  for (const auto& form : content.encoded) {
    form->payload.clear();
    form->dropped = true;
  }
  ++statistics_.evicted;
  statistics_.evicted_bytes += bytes;
  return bytes;
}

std::int64_t Tape::drop_cheapest(std::vector<Candidate> candidates, std::int64_t bytes) {
  const auto later = [](const Candidate& l, const Candidate& r) {
    return l.score != r.score ? l.score > r.score
                              : l.content->maker->number > r.content->maker->number;
  };
  std::make_heap(candidates.begin(), candidates.end(), later);
  std::int64_t freed = 0;
  while (freed < bytes && !candidates.empty()) {
    std::pop_heap(candidates.begin(), candidates.end(), later);
    Content& content = *candidates.back().content;
    freed += candidates.back().encoded ? drop_encoded(content) : drop(content);
    candidates.pop_back();
  }
  return freed;
}

std::int64_t Tape::evict(std::int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto start = Clock::now();
  // In a replay, what it made so far is in no count yet; materialise() leaves all of it out.
  if (tracer_ != nullptr && restoring == 0) tracer_->before_change();
  std::int64_t freed = planned() ? evict_planned(bytes) : 0;
  if (freed < bytes) {
    const bool purged = purge();
    freed += evict_by_cost(bytes - freed);
    if (freed == 0 && purged) freed = 1;  // forgetting may have freed tensors from outside
  }
  if (tracer_ != nullptr) tracer_->after_change();
  if (restoring == 0) evicting_s_ += seconds_since(start);
  return freed;
}

// Drops what nobody has asked for, then what the plan says, the one read last first.
std::int64_t Tape::evict_planned(std::int64_t bytes) {
  std::vector<Candidate> candidates;
  for (const auto& weak_content : kept_) {
    auto content = weak_content.lock();
    if (content == nullptr || !evictable(*content)) continue;
    if (content->saved > 0) {
      const Disposition disposition = disposition_of(*content);
      if (disposition != Disposition::recompute && disposition != Disposition::offload) continue;
    }
    const double score = content->saved > 0 ? -static_cast<double>(next_read(*content))
                                            : -std::numeric_limits<double>::infinity();
    candidates.push_back({std::move(content), score});
  }
  return drop_cheapest(std::move(candidates), bytes);
}

std::int64_t Tape::evict_by_cost(std::int64_t bytes) {
  // What it would take to make each content again: its own call, and all calls before it whose
  // results are gone. One pass in the order of the calls; a shared ancestor counts for each of its
  // users, which errs towards keeping it.
  std::unordered_map<const Recipe*, double> cost;
  const auto cost_of = [&](const std::shared_ptr<Recipe>& first) {
    std::vector<const Recipe*> stack{first.get()};
    while (!stack.empty()) {
      const Recipe* const recipe = stack.back();
      if (cost.contains(recipe)) {
        stack.pop_back();
        continue;
      }
      double sum = recipe->seconds;
      bool complete = true;
      for (const Argument& argument : recipe->arguments) {
        for (const auto& [input, shape] : argument.tensors) {
          if (input->in_memory() || input->away != nullptr || input->maker == nullptr) continue;
          const auto known = cost.find(input->maker.get());
          if (known == cost.end()) {
            stack.push_back(input->maker.get());
            complete = false;
          } else {
            sum += known->second;
          }
        }
      }
      if (!complete) continue;
      cost[recipe] = sum;
      stack.pop_back();
    }
    return cost[first.get()];
  };
  const auto score_of = [&](const Content& content, std::int64_t bytes_freed) {
    const auto wait =
        planned() && content.call >= 0 ? next_read(content) - moment_ : clock_ - content.last_used;
    return (cost_of(content.maker) + 1e-7) /
           (static_cast<double>(bytes_freed) * (static_cast<double>(wait) + 1.0));
  };
  std::vector<Candidate> candidates;
  for (const auto& weak_content : kept_) {
    auto content = weak_content.lock();
    if (content == nullptr || !evictable(*content)) continue;
    // 0: made on the way to another value; nobody has asked for it.
    const double score = content->saved > 0 ? score_of(*content, content->bytes) : 0.0;
    candidates.push_back({std::move(content), score});
  }
  for (const auto& weak_content : encoded_) {
    auto content = weak_content.lock();
    if (content == nullptr || content->encoded.empty() ||
        std::ranges::any_of(content->encoded, [](const auto& form) { return form->decoding; }))
      continue;
    const std::int64_t held = content->encoded_bytes();
    if (held == 0) continue;
    const double score = score_of(*content, held);
    candidates.push_back({std::move(content), score, /*encoded=*/true});
  }
  return drop_cheapest(std::move(candidates), bytes);
}

BudgetStatistics Tape::statistics() const {
  const std::lock_guard lock(mutex_);
  return statistics_;
}

}  // namespace gradus::recompute::internal
