#include <gradus/privacy/nn/recurrent.h>

#include <cmath>
#include <cstddef>
#include <ostream>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/types.h>

#include <gradus/base/error.h>
#include <gradus/privacy/nn/internal/packed.h>

namespace gradus::privacy::nn {

namespace {

using Options = torch::nn::detail::RNNOptionsBase;
using torch::nn::utils::rnn::PackedSequence;

const char* name_of(const Options& options) {
  if (std::holds_alternative<torch::enumtype::kLSTM>(options.mode())) return "dp_lstm";
  if (std::holds_alternative<torch::enumtype::kGRU>(options.mode())) return "dp_gru";
  return "dp_rnn";
}

std::int64_t gate_count(const Options& options) {
  if (std::holds_alternative<torch::enumtype::kLSTM>(options.mode())) return 4;
  if (std::holds_alternative<torch::enumtype::kGRU>(options.mode())) return 3;
  return 1;
}

std::int64_t direction_count(const Options& options) { return options.bidirectional() ? 2 : 1; }

std::int64_t output_size(const Options& options) {
  return options.proj_size() > 0 ? options.proj_size() : options.hidden_size();
}

// What a layer hands to its next step, each [B, ...]; c is an LSTM's only.
struct State {
  at::Tensor h = {};
  at::Tensor c = {};
};

template <typename Weights>
struct Cells {
  // gates_BG: the products with the input, bias included.
  using Step = State (*)(const Weights& w, const at::Tensor& gates_BG, const State& state);

  static State tanh(const Weights& w, const at::Tensor& gates_BG, const State& state) {
    return {.h = at::tanh(gates_BG + at::linear(state.h, w.hh, w.bias_hh))};
  }
  static State relu(const Weights& w, const at::Tensor& gates_BG, const State& state) {
    return {.h = at::relu(gates_BG + at::linear(state.h, w.hh, w.bias_hh))};
  }
  static State gru(const Weights& w, const at::Tensor& gates_BG, const State& state) {
    const auto x = gates_BG.chunk(3, 1);
    const auto h = at::linear(state.h, w.hh, w.bias_hh).chunk(3, 1);
    const at::Tensor reset = at::sigmoid(x[0] + h[0]);
    const at::Tensor update = at::sigmoid(x[1] + h[1]);
    const at::Tensor fresh = at::tanh(x[2] + reset * h[2]);
    return {.h = (state.h - fresh) * update + fresh};
  }
  static State lstm(const Weights& w, const at::Tensor& gates_BG, const State& state) {
    const auto gates = (gates_BG + at::linear(state.h, w.hh, w.bias_hh)).chunk(4, 1);
    const at::Tensor c =
        at::sigmoid(gates[1]) * state.c + at::sigmoid(gates[0]) * at::tanh(gates[2]);
    const at::Tensor h = at::sigmoid(gates[3]) * at::tanh(c);
    return {.h = w.hr.defined() ? at::linear(h, w.hr) : h, .c = c};
  }
  static Step of(const Options& options) {
    if (std::holds_alternative<torch::enumtype::kLSTM>(options.mode())) return lstm;
    if (std::holds_alternative<torch::enumtype::kGRU>(options.mode())) return gru;
    if (std::holds_alternative<torch::enumtype::kRNN_RELU>(options.mode())) return relu;
    return tanh;
  }
};

// A sequence on its way through the layers.
struct Sequence {
  at::Tensor x = {};                  // [T, B, ...], or [B, T, ...] if time is 1.
  std::int64_t time = 0;              // The dimension of time.
  std::vector<at::Tensor> live = {};  // Of each step, bool [B, 1] or undefined (all); or empty.
};

// One layer in one direction; leaves the last state in @p state. The output's time is the input's.
template <typename Weights>
at::Tensor run_direction(const Options& options, const Weights& w, const Sequence& sequence,
                         bool backward, State& state) {
  const auto step = Cells<Weights>::of(options);
  const auto gates = at::linear(sequence.x, w.ih, w.bias_ih).unbind(sequence.time);
  std::vector<at::Tensor> outputs(gates.size());
  for (std::size_t i = 0; i < gates.size(); ++i) {
    const std::size_t t = backward ? gates.size() - 1 - i : i;
    State next = step(w, gates[t], state);
    if (!sequence.live.empty() && sequence.live[t].defined()) {
      // An example that has ended, or backward not begun, keeps its state.
      next.h = at::where(sequence.live[t], next.h, state.h);
      if (next.c.defined()) next.c = at::where(sequence.live[t], next.c, state.c);
    }
    state = std::move(next);
    outputs[t] = state.h;
  }
  return at::stack(outputs, sequence.time);
}

// All layers; @p states, one a layer and direction, become the last states.
template <typename Weights>
at::Tensor run_layers(const Options& options, const std::vector<Weights>& weights, bool training,
                      Sequence sequence, std::vector<State>& states) {
  const std::int64_t directions = direction_count(options);
  for (std::int64_t layer = 0; layer < options.num_layers(); ++layer) {
    if (layer > 0 && training && options.dropout() > 0) {
      sequence.x = at::dropout(sequence.x, options.dropout(), /*train=*/true);
    }
    std::vector<at::Tensor> outputs;
    for (std::int64_t direction = 0; direction < directions; ++direction) {
      const auto i = static_cast<std::size_t>(layer * directions + direction);
      outputs.push_back(
          run_direction(options, weights[i], sequence, /*backward=*/direction == 1, states[i]));
    }
    sequence.x = directions == 1 ? outputs[0] : at::cat(outputs, 2);
  }
  return sequence.x;
}

void check_input(const Options& options, const at::Tensor& input) {
  const char* shape = options.batch_first() ? "[batch, steps, " : "[steps, batch, ";
  GRADUS_CHECK(name_of(options), input.dim() == 3 && input.size(2) == options.input_size(),
               "input must have shape ", shape, options.input_size(), "]; got ", input.sizes());
  GRADUS_CHECK(name_of(options), input.size(options.batch_first() ? 1 : 0) > 0,
               "input must have at least one step; got shape ", input.sizes());
}

// The initial state of @p size values, zeros unless given, split by layer and direction.
std::vector<at::Tensor> initial(const Options& options, const char* what, const at::Tensor& hx,
                                const at::Tensor& input, std::int64_t B, std::int64_t size) {
  const std::vector<std::int64_t> shape{options.num_layers() * direction_count(options), B, size};
  if (!hx.defined()) return at::zeros(shape, input.options()).unbind(0);
  GRADUS_CHECK(name_of(options), hx.sizes() == at::IntArrayRef(shape), "initial state ", what,
               " must have shape [layers * directions, batch, width] = ", at::IntArrayRef(shape),
               "; got ", hx.sizes());
  return hx.unbind(0);
}

std::vector<State> initial_states(const Options& options, const at::Tensor& h, const at::Tensor& c,
                                  const at::Tensor& input, std::int64_t B) {
  std::vector<State> states;
  for (const auto& tensor : initial(options, "h", h, input, B, output_size(options))) {
    states.push_back({.h = tensor});
  }
  if (std::holds_alternative<torch::enumtype::kLSTM>(options.mode())) {
    const auto cells = initial(options, "c", c, input, B, options.hidden_size());
    for (std::size_t i = 0; i < states.size(); ++i) states[i].c = cells[i];
  }
  return states;
}

State joined(const std::vector<State>& states) {
  std::vector<at::Tensor> h, c;
  for (const auto& state : states) {
    h.push_back(state.h);
    if (state.c.defined()) c.push_back(state.c);
  }
  return {.h = at::stack(h), .c = c.empty() ? at::Tensor() : at::stack(c)};
}

template <typename Weights>
std::pair<at::Tensor, State> run_padded(const Options& options, const std::vector<Weights>& weights,
                                        bool training, const at::Tensor& input, const at::Tensor& h,
                                        const at::Tensor& c) {
  check_input(options, input);
  auto states = initial_states(options, h, c, input, input.size(options.batch_first() ? 0 : 1));
  const at::Tensor output = run_layers(options, weights, training,
                                       {.x = input, .time = options.batch_first() ? 1 : 0}, states);
  return {output, joined(states)};
}

template <typename Weights>
std::pair<PackedSequence, State> run_packed(const Options& options,
                                            const std::vector<Weights>& weights, bool training,
                                            const PackedSequence& packed, const at::Tensor& h,
                                            const at::Tensor& c) {
  const internal::PackedLayout layout(name_of(options), packed);
  GRADUS_CHECK(name_of(options), packed.data().size(1) == options.input_size(),
               "data of a packed sequence must have shape [rows, ", options.input_size(), "]; got ",
               packed.data().sizes());
  const at::Tensor input = layout.padded(packed.data());
  auto states = initial_states(options, h, c, input, input.size(1));
  const at::Tensor output = run_layers(options, weights, training,
                                       {.x = input, .time = 0, .live = layout.live()}, states);
  return {layout.packed(output), joined(states)};
}

Options base_of(const torch::nn::RNNOptions& options) {
  const bool relu = std::holds_alternative<torch::enumtype::kReLU>(options.nonlinearity());
  return Options(relu ? Options::rnn_options_base_mode_t(torch::kRNN_RELU)
                      : Options::rnn_options_base_mode_t(torch::kRNN_TANH),
                 options.input_size(), options.hidden_size())
      .num_layers(options.num_layers())
      .bias(options.bias())
      .batch_first(options.batch_first())
      .dropout(options.dropout())
      .bidirectional(options.bidirectional());
}

Options base_of(const torch::nn::GRUOptions& options) {
  return Options(torch::kGRU, options.input_size(), options.hidden_size())
      .num_layers(options.num_layers())
      .bias(options.bias())
      .batch_first(options.batch_first())
      .dropout(options.dropout())
      .bidirectional(options.bidirectional());
}

Options base_of(const torch::nn::LSTMOptions& options) {
  return Options(torch::kLSTM, options.input_size(), options.hidden_size())
      .num_layers(options.num_layers())
      .bias(options.bias())
      .batch_first(options.batch_first())
      .dropout(options.dropout())
      .bidirectional(options.bidirectional())
      .proj_size(options.proj_size());
}

void check_options(const Options& options) {
  const char* component = name_of(options);
  GRADUS_CHECK(component, options.input_size() >= 1, "input_size must be at least 1; got ",
               options.input_size());
  GRADUS_CHECK(component, options.hidden_size() >= 1, "hidden_size must be at least 1; got ",
               options.hidden_size());
  GRADUS_CHECK(component, options.num_layers() >= 1, "num_layers must be at least 1; got ",
               options.num_layers());
  GRADUS_CHECK(component, options.dropout() >= 0.0 && options.dropout() <= 1.0,
               "dropout must be in [0, 1]; got ", options.dropout());
  GRADUS_CHECK(component, options.proj_size() >= 0 && options.proj_size() < options.hidden_size(),
               "proj_size must be 0 (none) or below hidden_size, ", options.hidden_size(), "; got ",
               options.proj_size());
}

}  // namespace

template <typename Derived>
DPRecurrentImpl<Derived>::DPRecurrentImpl(const Options& options) : base_(options) {
  check_options(base_);
  DPRecurrentImpl::reset();
}

template <typename Derived>
void DPRecurrentImpl<Derived>::reset() {
  const std::int64_t directions = direction_count(base_), outputs = output_size(base_);
  const std::int64_t rows = gate_count(base_) * base_.hidden_size();
  weights_.clear();
  for (std::int64_t layer = 0; layer < base_.num_layers(); ++layer) {
    const std::int64_t inputs = layer == 0 ? base_.input_size() : directions * outputs;
    for (std::int64_t direction = 0; direction < directions; ++direction) {
      const std::string suffix = "_l" + std::to_string(layer) + (direction == 1 ? "_reverse" : "");
      const auto add = [&](const char* name, std::vector<std::int64_t> shape) {
        return this->register_parameter(name + suffix, torch::empty(shape));
      };
      Weights w;
      w.ih = add("weight_ih", {rows, inputs});
      w.hh = add("weight_hh", {rows, outputs});
      if (base_.bias()) {
        w.bias_ih = add("bias_ih", {rows});
        w.bias_hh = add("bias_hh", {rows});
      }
      if (base_.proj_size() > 0) w.hr = add("weight_hr", {outputs, base_.hidden_size()});
      weights_.push_back(std::move(w));
    }
  }
  reset_parameters();
}

template <typename Derived>
void DPRecurrentImpl<Derived>::reset_parameters() {
  const at::NoGradGuard no_grad;
  const double bound = 1.0 / std::sqrt(static_cast<double>(base_.hidden_size()));
  for (auto& parameter : this->parameters()) parameter.uniform_(-bound, bound);
}

template <typename Derived>
std::vector<at::Tensor> DPRecurrentImpl<Derived>::all_weights() const {
  return this->parameters(/*recurse=*/false);
}

template <typename Derived>
void DPRecurrentImpl<Derived>::print(std::ostream& stream, const char* name) const {
  stream << "gradus::privacy::nn::" << name << "(input_size=" << base_.input_size()
         << ", hidden_size=" << base_.hidden_size() << ", num_layers=" << base_.num_layers()
         << std::boolalpha << ", bias=" << base_.bias() << ", batch_first=" << base_.batch_first()
         << ", dropout=" << base_.dropout() << ", bidirectional=" << base_.bidirectional();
  if (base_.proj_size() > 0) stream << ", proj_size=" << base_.proj_size();
  stream << ")";
}

template class DPRecurrentImpl<DPRNNImpl>;
template class DPRecurrentImpl<DPGRUImpl>;
template class DPRecurrentImpl<DPLSTMImpl>;

DPRNNImpl::DPRNNImpl(const torch::nn::RNNOptions& options)
    : DPRecurrentImpl(base_of(options)), options(options) {}

std::tuple<at::Tensor, at::Tensor> DPRNNImpl::forward(const at::Tensor& input, at::Tensor hx) {
  const auto [output, state] = run_padded(base_, weights_, is_training(), input, hx, {});
  return {output, state.h};
}

std::tuple<PackedSequence, at::Tensor> DPRNNImpl::forward_with_packed_input(
    const PackedSequence& packed_input, at::Tensor hx) {
  const auto [output, state] = run_packed(base_, weights_, is_training(), packed_input, hx, {});
  return {output, state.h};
}

void DPRNNImpl::pretty_print(std::ostream& stream) const { print(stream, "DPRNN"); }

DPGRUImpl::DPGRUImpl(const torch::nn::GRUOptions& options)
    : DPRecurrentImpl(base_of(options)), options(options) {}

std::tuple<at::Tensor, at::Tensor> DPGRUImpl::forward(const at::Tensor& input, at::Tensor hx) {
  const auto [output, state] = run_padded(base_, weights_, is_training(), input, hx, {});
  return {output, state.h};
}

std::tuple<PackedSequence, at::Tensor> DPGRUImpl::forward_with_packed_input(
    const PackedSequence& packed_input, at::Tensor hx) {
  const auto [output, state] = run_packed(base_, weights_, is_training(), packed_input, hx, {});
  return {output, state.h};
}

void DPGRUImpl::pretty_print(std::ostream& stream) const { print(stream, "DPGRU"); }

DPLSTMImpl::DPLSTMImpl(const torch::nn::LSTMOptions& options)
    : DPRecurrentImpl(base_of(options)), options(options) {}

std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>> DPLSTMImpl::forward(
    const at::Tensor& input, std::optional<std::tuple<at::Tensor, at::Tensor>> hx_opt) {
  const auto [h, c] = hx_opt.value_or(std::tuple<at::Tensor, at::Tensor>());
  const auto [output, state] = run_padded(base_, weights_, is_training(), input, h, c);
  return {output, {state.h, state.c}};
}

std::tuple<PackedSequence, std::tuple<at::Tensor, at::Tensor>>
DPLSTMImpl::forward_with_packed_input(const PackedSequence& packed_input,
                                      std::optional<std::tuple<at::Tensor, at::Tensor>> hx_opt) {
  const auto [h, c] = hx_opt.value_or(std::tuple<at::Tensor, at::Tensor>());
  const auto [output, state] = run_packed(base_, weights_, is_training(), packed_input, h, c);
  return {output, {state.h, state.c}};
}

void DPLSTMImpl::pretty_print(std::ostream& stream) const { print(stream, "DPLSTM"); }

}  // namespace gradus::privacy::nn
