#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/internal/rules.h>
#include <gradus/plane/grad/operands.h>

namespace gradus::persample::internal {

namespace {

namespace grad = plane::grad;
using Recurrent = grad::RecurrentLayer;

// Elements of a step that one thread takes at least.
constexpr std::int64_t kGrain = 16384;

// An LSTM (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000) as torch::nn
// computes it, gates in the order i, f, g, o:
//   z = W_ih x + b_ih + W_hh h' + b_hh;  c = f c' + i g;  h = o tanh(c).
struct Lstm {
  at::Tensor input{};          // [T, N, D]
  at::Tensor input_weight{};   // [4H, D]
  at::Tensor hidden_weight{};  // [4H, H]
  at::Tensor bias{};           // [4H], both biases' sum; undefined if none
  at::Tensor hidden{};         // [N, H], initial
  at::Tensor cell{};           // [N, H], initial
  at::Tensor output{};         // [T, N, H]
  bool reverse = false;
  bool from_rest = false;  // the initial hidden state is all zero

  std::int64_t steps() const { return input.size(0); }
  std::int64_t rows() const { return input.size(1); }
  std::int64_t width() const { return output.size(2); }
  // Index in time of the step that is computed as number @p step.
  std::int64_t time(std::int64_t step) const { return reverse ? steps() - 1 - step : step; }
};

at::Tensor as_float(const at::Tensor& tensor) { return tensor.to(at::kFloat).contiguous(); }

std::optional<Lstm> read(const Recurrent& layer) {
  const at::Tensor input = layer.input();
  const at::Tensor output = layer.output();
  const at::Tensor hidden = layer.initial_hidden();
  const at::Tensor cell = layer.initial_cell();
  for (const at::Tensor& each :
       {input, output, hidden, cell, layer.input_weight(), layer.hidden_weight()}) {
    if (!each.defined() || !each.is_cpu() || each.scalar_type() == at::kDouble) return std::nullopt;
  }
  if (input.dim() != 3 || output.dim() != 3 || input.numel() == 0) return std::nullopt;
  const std::vector<std::int64_t> state{input.size(1), output.size(2)};
  if (hidden.numel() != state[0] * state[1] || cell.numel() != hidden.numel()) return std::nullopt;
  Lstm lstm{.input = as_float(input),
            .input_weight = as_float(layer.input_weight()),
            .hidden_weight = as_float(layer.hidden_weight()),
            .hidden = as_float(hidden).view(state),
            .cell = as_float(cell).view(state),
            .output = as_float(output),
            .reverse = layer.reverse};
  if (layer.has_biases) lstm.bias = as_float(layer.input_bias()) + as_float(layer.hidden_bias());
  // Without products of the first step's zeros, the states before each step are a view of the
  // outputs.
  lstm.from_rest = lstm.steps() > 1 && lstm.hidden.count_nonzero().item<std::int64_t>() == 0;
  return lstm;
}

// What stands before the steps whose hidden products count, and those steps: all, or from rest all
// but the first.
struct Before {
  at::Tensor states{};     // [S, N, H]
  std::int64_t first = 0;  // index in time
  std::int64_t steps = 0;  // S
};

Before before(const Lstm& lstm) {
  const std::int64_t others = lstm.steps() - 1;
  const at::Tensor states = lstm.output.narrow(0, lstm.reverse ? 1 : 0, others);
  if (lstm.from_rest) return {states, lstm.reverse ? 0 : 1, others};
  const at::Tensor initial = lstm.hidden.unsqueeze(0);
  return {lstm.reverse ? at::cat({states, initial}) : at::cat({initial, states}), 0, lstm.steps()};
}

// Activated gates [T, N, 4H]. The outputs are known, so that all steps are one product.
at::Tensor gates_of(const Lstm& lstm, const Before& before) {
  const std::int64_t width = lstm.width();
  const at::Tensor inputs = lstm.input.flatten(0, 1);
  at::Tensor gates = lstm.bias.defined() ? at::addmm(lstm.bias, inputs, lstm.input_weight.t())
                                         : at::mm(inputs, lstm.input_weight.t());
  gates = gates.view({lstm.steps(), lstm.rows(), 4 * width});
  gates.narrow(0, before.first, before.steps)
      .flatten(0, 1)
      .addmm_(before.states.flatten(0, 1), lstm.hidden_weight.t());
  gates.narrow(2, 0, 2 * width).sigmoid_();
  gates.narrow(2, 2 * width, width).tanh_();
  gates.narrow(2, 3 * width, width).sigmoid_();
  return gates;
}

// Cells after each step [T, N, H].
at::Tensor cells_of(const Lstm& lstm, const at::Tensor& gates) {
  const std::int64_t rows = lstm.rows();
  const std::int64_t width = lstm.width();
  at::Tensor cells = at::empty({lstm.steps(), rows, width}, gates.options());
  const float* previous = lstm.cell.const_data_ptr<float>();
  for (std::int64_t step = 0; step < lstm.steps(); ++step) {
    const float* const gate = gates.const_data_ptr<float>() + lstm.time(step) * rows * 4 * width;
    float* const cell = cells.mutable_data_ptr<float>() + lstm.time(step) * rows * width;
    at::parallel_for(0, rows, kGrain / width + 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        const float* const in = gate + row * 4 * width;
        for (std::int64_t i = 0; i < width; ++i) {
          cell[row * width + i] =
              in[width + i] * previous[row * width + i] + in[i] * in[2 * width + i];
        }
      }
    });
    previous = cell;
  }
  return cells;
}

// One row of one step backwards: gates become the gradients of what they were computed from, and
// the cell's gradient that of the cell before. Loops over elements of one row, which do not
// overlap.
void step_back(float* __restrict gates, const float* __restrict previous_cell,
               const float* __restrict squashed, const float* __restrict output_gradient,
               const float* __restrict hidden_gradient, float* __restrict cell_gradient,
               std::int64_t width) {
  float* const i = gates;
  float* const f = gates + width;
  float* const g = gates + 2 * width;
  float* const o = gates + 3 * width;
  for (std::int64_t k = 0; k < width; ++k) {
    const float hidden = output_gradient[k] + hidden_gradient[k];
    const float cell = cell_gradient[k] + hidden * o[k] * (1 - squashed[k] * squashed[k]);
    const float input_gate = i[k];
    cell_gradient[k] = cell * f[k];
    i[k] = cell * g[k] * input_gate * (1 - input_gate);
    f[k] = cell * previous_cell[k] * f[k] * (1 - f[k]);
    g[k] = cell * input_gate * (1 - g[k] * g[k]);
    o[k] = hidden * squashed[k] * o[k] * (1 - o[k]);
  }
}

struct Backward {
  at::Tensor gates{};   // gradients of z, [T, N, 4H]
  at::Tensor hidden{};  // gradients of the initial states, [N, H]
  at::Tensor cell{};
};

// @p outputs, @p hidden and @p cell: gradients of the outputs and the last states, or undefined.
Backward backward(const Lstm& lstm, const at::Tensor& gates, const at::Tensor& outputs,
                  const at::Tensor& hidden, const at::Tensor& cell) {
  const std::int64_t rows = lstm.rows();
  const std::int64_t width = lstm.width();
  const std::vector<std::int64_t> state{rows, width};
  const at::Tensor cells = cells_of(lstm, gates);
  const auto copied = [&](const at::Tensor& tensor) {
    at::Tensor result = at::zeros(state, gates.options());
    return tensor.defined() ? result.copy_(tensor.reshape(state)) : result;
  };
  const at::Tensor given = outputs.defined() ? as_float(outputs) : at::Tensor();
  const at::Tensor none = given.defined() ? at::Tensor() : at::zeros(state, gates.options());
  at::Tensor hidden_gradient = copied(hidden);
  at::Tensor cell_gradient = copied(cell);
  at::Tensor squashed = at::empty(state, gates.options());
  float* const all_gates = gates.mutable_data_ptr<float>();
  for (std::int64_t step = lstm.steps() - 1; step >= 0; --step) {
    const std::int64_t time = lstm.time(step);
    at::tanh_out(squashed, cells.select(0, time));
    const at::Tensor previous = step == 0 ? lstm.cell : cells.select(0, lstm.time(step - 1));
    const at::Tensor output_gradient = given.defined() ? given.select(0, time) : none;
    at::parallel_for(0, rows, kGrain / width + 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) {
        step_back(all_gates + (time * rows + row) * 4 * width,
                  previous.const_data_ptr<float>() + row * width,
                  squashed.const_data_ptr<float>() + row * width,
                  output_gradient.const_data_ptr<float>() + row * width,
                  hidden_gradient.const_data_ptr<float>() + row * width,
                  cell_gradient.mutable_data_ptr<float>() + row * width, width);
      }
    });
    at::mm_out(hidden_gradient, gates.select(0, time), lstm.hidden_weight);
  }
  return {gates, hidden_gradient, cell_gradient};
}

// The rule by which dimension 1 of the outputs belongs to examples; nullopt if the outputs that
// got gradients do not agree, or have none.
std::optional<Layout> layout_of(const NodeUse& use) {
  std::optional<Layout> found;
  for (std::size_t output = 0; output < use.gradients.size(); ++output) {
    if (!use.gradients[output].defined() || use.layouts[output].examples == 0) continue;
    const Layout& layout = use.layouts[output];
    const std::int64_t of_batch = use.gradients[output].dim() - 2;
    if (layout.dim < 0 || layout.dim != of_batch) return std::nullopt;
    if (found && (found->inner != layout.inner || found->owners != layout.owners)) {
      return std::nullopt;
    }
    found = layout;
  }
  return found;
}

// Owners of bags, and of what lies in bags.
std::vector<std::int64_t> owners_of(const Layout& layout, std::int64_t size) {
  if (layout.dim < 0)
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), layout.owners.at(0));
  if (!layout.regular()) return layout.owners;
  std::vector<std::int64_t> owners(static_cast<std::size_t>(size));
  for (std::int64_t i = 0; i < size; ++i) {
    owners[static_cast<std::size_t>(i)] = (i / layout.inner) % layout.examples;
  }
  return owners;
}

std::vector<std::int64_t> integers(const at::Tensor& tensor) {
  const at::Tensor longs = tensor.to(at::kCPU, at::kLong).contiguous();
  const auto* const data = longs.const_data_ptr<std::int64_t>();
  return {data, data + longs.numel()};
}

// The lookups of an EmbeddingBag that gradients go back through.
struct Lookups {
  std::vector<std::int64_t> position{};  // in the indices
  std::vector<std::int64_t> row{};       // of the table
  std::vector<std::int64_t> bag{};
  std::vector<std::int64_t> bag_size{};  // of that bag, without padding
};

Lookups lookups_of(const grad::EmbeddingBag& bags, std::int64_t count) {
  const bool once = bags.mode == grad::EmbeddingBag::Mode::max;
  const std::vector<std::int64_t> indices = integers(bags.indices());
  const std::vector<std::int64_t> offsets = integers(bags.offsets());
  Lookups lookups;
  for (std::int64_t bag = 0; bag < count; ++bag) {
    const auto place = static_cast<std::size_t>(bag);
    const std::int64_t end =
        place + 1 < offsets.size() ? offsets[place + 1] : static_cast<std::int64_t>(indices.size());
    const std::size_t first = lookups.row.size();
    std::int64_t size = 0;
    std::set<std::int64_t> seen;
    for (std::int64_t position = offsets[place]; position < end; ++position) {
      const std::int64_t row = indices[static_cast<std::size_t>(position)];
      if (row == bags.padding_index) continue;
      ++size;
      // A maximum that a row has twice in a bag passes its gradient once.
      if (once && !seen.insert(row).second) continue;
      lookups.position.push_back(position);
      lookups.row.push_back(row);
      lookups.bag.push_back(bag);
    }
    lookups.bag_size.insert(lookups.bag_size.end(), lookups.row.size() - first, size);
  }
  return lookups;
}

}  // namespace

std::optional<std::vector<OperandTerm>> recurrent_rule(const NodeUse& use) {
  const auto layer = grad::as_recurrent_layer(use.node);
  if (!layer || layer->mode != Recurrent::Mode::lstm || !layer->batch_sizes.empty()) {
    return std::nullopt;
  }
  for (const std::size_t edge : use.shared) {
    if (edge < Recurrent::kInputWeight || edge > Recurrent::kHiddenBias) return std::nullopt;
  }
  const std::optional<Layout> layout = layout_of(use);
  if (!layout) return std::nullopt;
  const std::optional<Lstm> lstm = read(*layer);
  if (!lstm) return std::nullopt;
  const auto goes_on = [&](std::size_t edge) {
    return std::find(use.onward.begin(), use.onward.end(), edge) != use.onward.end();
  };
  // Where all gradients that go on are given here, nothing asks for the node's own formula, nor for
  // its workspace, which is larger than all that follows.
  const bool instead = std::all_of(use.onward.begin(), use.onward.end(), [](std::size_t edge) {
    return edge == Recurrent::kInput || edge == Recurrent::kHidden || edge == Recurrent::kCell;
  });
  if (use.frees_graph && instead) layer->release(/*runs=*/!use.onward.empty());

  const Before states = before(*lstm);
  const Backward gradients = backward(*lstm, gates_of(*lstm, states), use.gradients[0],
                                      use.gradients[1], use.gradients[2]);
  const auto by_example = [&](const at::Tensor& tensor) {  // [S, N, k] to [B, S', k]
    return layout->by_example(tensor, 1).flatten(1, 2);
  };
  const at::Tensor rows = by_example(gradients.gates);
  std::vector<OperandTerm> terms;
  at::Tensor sum;  // over steps, the gradient of either bias
  for (const std::size_t edge : use.shared) {
    if (edge == Recurrent::kInputWeight) {
      terms.push_back({edge, std::make_unique<ProductTerm>(rows, by_example(lstm->input))});
    } else if (edge == Recurrent::kHiddenWeight) {
      terms.push_back({edge, std::make_unique<ProductTerm>(
                                 by_example(gradients.gates.narrow(0, states.first, states.steps)),
                                 by_example(states.states))});
    } else {
      if (!sum.defined()) sum = rows.sum(1);
      terms.push_back({edge, std::make_unique<FormedTerm>(sum)});
    }
  }
  if (goes_on(Recurrent::kInput)) {
    terms.push_back(
        {.edge = Recurrent::kInput,
         .gradient =
             at::mm(gradients.gates.flatten(0, 1), lstm->input_weight).view(lstm->input.sizes())});
  }
  if (goes_on(Recurrent::kHidden)) {
    terms.push_back({.edge = Recurrent::kHidden,
                     .gradient = gradients.hidden.view(use.operand_sizes(Recurrent::kHidden))});
  }
  if (goes_on(Recurrent::kCell)) {
    terms.push_back({.edge = Recurrent::kCell,
                     .gradient = gradients.cell.view(use.operand_sizes(Recurrent::kCell))});
  }
  return terms;
}

std::optional<std::vector<OperandTerm>> embedding_bag_rule(const NodeUse& use) {
  using Bag = grad::EmbeddingBag;
  const auto bags = grad::as_embedding_bag(use.node);
  if (!bags || !use.gradients[0].defined()) return std::nullopt;
  if (use.shared != std::vector<std::size_t>{Bag::kWeight}) return std::nullopt;
  const Layout& layout = use.layouts[0];
  const at::Tensor& gradient = use.gradients[0];  // [bags, D]
  if (gradient.dim() != 2 || layout.dim > 0) return std::nullopt;
  GRADUS_CHECK("persample", !bags->scale_by_frequency,
               "an EmbeddingBag whose gradients belong to single examples is required; got "
               "scale_grad_by_freq, which divides by the frequency in the whole batch: set it to "
               "false");
  const Lookups lookups = lookups_of(*bags, gradient.size(0));
  std::vector<OperandTerm> terms;
  const auto finish = [&](const at::Tensor& indices, const at::Tensor& values) {
    terms.push_back({Bag::kWeight, std::make_unique<LookupTerm>(indices, values, bags->rows)});
    return std::move(terms);
  };
  const auto options = gradient.options().dtype(at::kLong);
  if (lookups.row.empty()) {  // all bags are empty
    return finish(at::zeros({layout.examples, 1}, options) - 1,
                  at::zeros({layout.examples, 1, gradient.size(1)}, gradient.options()));
  }
  const at::Tensor rows = at::tensor(lookups.row, options);
  const at::Tensor bag = at::tensor(lookups.bag, options);
  at::Tensor values = widened(gradient).index_select(0, bag);
  if (bags->mode == Bag::Mode::mean) {
    values.div_(at::tensor(lookups.bag_size, options).unsqueeze(1));
  } else if (bags->mode == Bag::Mode::max) {
    values.mul_(bags->max_indices().index_select(0, bag) == rows.unsqueeze(1));
  } else if (const at::Tensor weights = bags->index_weights(); weights.defined()) {
    values.mul_(weights.index_select(0, at::tensor(lookups.position, options)).unsqueeze(1));
  }
  const std::vector<std::int64_t> owners = owners_of(layout, gradient.size(0));
  Layout each{.examples = layout.examples, .dim = 0};
  for (const std::int64_t place : lookups.bag) {
    each.owners.push_back(owners[static_cast<std::size_t>(place)]);
  }
  // Shifted, as examples with fewer lookups are filled up with zeros.
  return finish(each.by_example(rows + 1, 0) - 1, each.by_example(values, 0));
}

}  // namespace gradus::persample::internal
