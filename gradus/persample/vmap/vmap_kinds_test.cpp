// What vmap computes, kind by kind, against the loop; docs/persample_vmap.md shows the same table.

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/persample/vmap/internal/compare.h>
#include <gradus/persample/vmap/loop.h>
#include <gradus/persample/vmap/vmap.h>

namespace gradus::persample {
namespace {

namespace nn = torch::nn;
using tests::any_nonzero;
using tests::gap;
using tests::named;

struct Case {
  std::vector<NamedParameter> parameters{};
  Batch batch{};
  LossFunction loss = nullptr;
};

// What vmap does with a kind.
enum class Outcome : std::uint8_t { one_pass, splits, refused };

struct Kind {
  std::string name{};
  std::function<Case()> make = nullptr;
  Outcome outcome = Outcome::one_pass;
  std::string refused_operator{};
  double relative = 1e-9;  // float32 kernels differ in the last digits
};

constexpr std::int64_t kB = 4, kT = 5, kD = 6;

at::Tensor series() { return torch::randn({kB, kT, kD}); }
at::Tensor rows() { return torch::randn({kB, kD}); }
at::Tensor ids() { return torch::randint(0, 10, {kB, kT}, torch::kLong); }

at::Tensor per_example(const at::Tensor& y) { return y.pow(2).flatten(1).sum(1); }
// Where the example dimension is not in front or not there: for a batch of one only.
at::Tensor whole(const at::Tensor& y) { return y.pow(2).sum(); }

template <typename Module>
Case of(Module module, Batch batch, std::function<at::Tensor(Module&, const Batch&)> loss) {
  module->to(torch::kDouble);
  for (at::Tensor& tensor : batch) {
    if (tensor.is_floating_point()) tensor = tensor.to(torch::kDouble);
  }
  return {named(*module), std::move(batch),
          [module, loss](const Batch& b) mutable { return loss(module, b); }};
}

template <typename Module>
Case simple(Module module, at::Tensor x) {
  return of<Module>(std::move(module), {std::move(x)},
                    [](Module& m, const Batch& b) { return per_example(m->forward(b[0])); });
}

template <typename Module>
Case recurrent(Module module) {
  return of<Module>(std::move(module), {series()}, [](Module& m, const Batch& b) {
    return per_example(std::get<0>(m->forward(b[0])).select(1, -1));
  });
}

// Two linear layers with something between them.
Case between(std::function<at::Tensor(at::Tensor)> fn, std::int64_t out = kD) {
  nn::Sequential layers(nn::Linear(kD, kD), nn::Linear(out, 3));
  return of<nn::Sequential>(layers, {rows()}, [fn](nn::Sequential& m, const Batch& b) {
    const at::Tensor h = fn(m[0]->as<nn::Linear>()->forward(b[0]));
    return per_example(m[1]->as<nn::Linear>()->forward(h));
  });
}

Case after_linear(std::function<at::Tensor(nn::Linear&, at::Tensor)> fn) {
  return of<nn::Linear>(nn::Linear(kD, kD), {rows()},
                        [fn](nn::Linear& m, const Batch& b) { return fn(m, m->forward(b[0])); });
}

struct Scale : torch::autograd::Function<Scale> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list g) {
    const auto saved = context->get_saved_variables();
    return {g[0] * saved[1], (g[0] * saved[0]).sum_to_size(saved[1].sizes())};
  }
};

template <typename Module>
Case packed(Module module, bool same_lengths) {
  const at::Tensor lengths =
      same_lengths ? torch::full({kB}, 3, torch::kLong) : torch::tensor({5, 3, 5, 2}, torch::kLong);
  return of<Module>(std::move(module), {series(), lengths}, [](Module& m, const Batch& b) {
    const auto sequence = nn::utils::rnn::pack_padded_sequence(b[0], b[1], true, false);
    const auto out = std::get<0>(m->forward_with_packed_input(sequence));
    const auto padded = nn::utils::rnn::pad_packed_sequence(out, true, 0.0, kT);
    return per_example(std::get<0>(padded));
  });
}

// A module with parameters of its own that is called with two arguments.
struct InnerImpl : nn::Module {
  explicit InnerImpl(double dropped) : dropped(dropped) {
    scale = register_parameter("scale", torch::randn({kD}));
    register_module("linear", linear);
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& t) {
    const at::Tensor h = linear(x) * scale + (t.unsqueeze(1) * scale).sin();
    return at::dropout(h, dropped, is_training());
  }
  at::Tensor scale{};
  nn::Linear linear{kD, kD};
  double dropped = 0;
};
TORCH_MODULE(Inner);

Case of_inner(double dropped) {
  return of<Inner>(Inner(dropped), {series(), torch::randn({kB, 1})}, [](Inner& m, const Batch& b) {
    return per_example(m->forward(b[0], b[1]).tanh());
  });
}

std::vector<Kind> kinds() {
  std::vector<Kind> all;
  const auto add = [&](std::string name, std::function<Case()> make,
                       Outcome outcome = Outcome::one_pass, std::string op = "") {
    all.push_back({.name = std::move(name),
                   .make = std::move(make),
                   .outcome = outcome,
                   .refused_operator = std::move(op)});
  };
  add("Linear", [] { return simple(nn::Linear(kD, 3), rows()); });
  add("Linear on [B,T,D]", [] { return simple(nn::Linear(kD, 3), series()); });
  add("LSTM", [] { return recurrent(nn::LSTM(nn::LSTMOptions(kD, 7).batch_first(true))); });
  add("LSTM, two layers, both directions", [] {
    return recurrent(
        nn::LSTM(nn::LSTMOptions(kD, 4).num_layers(2).bidirectional(true).batch_first(true)));
  });
  add("LSTM with projection",
      [] { return recurrent(nn::LSTM(nn::LSTMOptions(kD, 7).proj_size(3).batch_first(true))); });
  add("GRU",
      [] { return recurrent(nn::GRU(nn::GRUOptions(kD, 7).num_layers(2).batch_first(true))); });
  add("RNN, tanh", [] { return recurrent(nn::RNN(nn::RNNOptions(kD, 7).batch_first(true))); });
  add("RNN, relu", [] {
    return recurrent(nn::RNN(nn::RNNOptions(kD, 7).nonlinearity(torch::kReLU).batch_first(true)));
  });
  add("LSTMCell, GRUCell", [] {
    nn::Sequential cells(nn::LSTMCell(kD, kD), nn::GRUCell(kD, kD));
    return of<nn::Sequential>(cells, {rows()}, [](nn::Sequential& m, const Batch& b) {
      const auto h = std::get<0>(m[0]->as<nn::LSTMCell>()->forward(b[0]));
      return per_example(m[1]->as<nn::GRUCell>()->forward(h));
    });
  });
  add("packed LSTM, equal lengths",
      [] { return packed(nn::LSTM(nn::LSTMOptions(kD, 7).batch_first(true)), true); });
  add(
      "packed LSTM, other lengths",
      [] { return packed(nn::LSTM(nn::LSTMOptions(kD, 7).batch_first(true)), false); },
      Outcome::splits);
  add(
      "packed GRU, both directions, other lengths",
      [] {
        return packed(nn::GRU(nn::GRUOptions(kD, 4).bidirectional(true).batch_first(true)), false);
      },
      Outcome::splits);
  add("packed RNN, equal lengths",
      [] { return packed(nn::RNN(nn::RNNOptions(kD, 4).batch_first(true)), true); });
  add("MultiheadAttention", [] {
    return of<nn::MultiheadAttention>(
        nn::MultiheadAttention(kD, 2), {series()}, [](nn::MultiheadAttention& m, const Batch& b) {
          const at::Tensor x = b[0].transpose(0, 1);
          return per_example(std::get<0>(m->forward(x, x, x)).transpose(0, 1));
        });
  });
  add("MultiheadAttention, kdim and vdim, bias_kv, mask", [] {
    return of<nn::MultiheadAttention>(
        nn::MultiheadAttention(
            nn::MultiheadAttentionOptions(kD, 2).kdim(3).vdim(3).add_bias_kv(true)),
        {series(), torch::randn({kB, kT, 3}), torch::randn({kB, kT, 3}),
         torch::rand({kB, kT}) < 0.3},
        [](nn::MultiheadAttention& m, const Batch& b) {
          return per_example(std::get<0>(m->forward(b[0].transpose(0, 1), b[1].transpose(0, 1),
                                                    b[2].transpose(0, 1), b[3]))
                                 .transpose(0, 1));
        });
  });
  add("scaled_dot_product_attention", [] {
    return of<nn::Linear>(nn::Linear(kD, 3 * kD), {series()}, [](nn::Linear& m, const Batch& b) {
      auto parts = m->forward(b[0]).view({-1, kT, 3, 2, kD / 2}).permute({2, 0, 3, 1, 4}).unbind(0);
      return per_example(
          at::scaled_dot_product_attention(parts[0], parts[1], parts[2], std::nullopt, 0.0, true));
    });
  });
  add("TransformerEncoderLayer", [] {
    return of<nn::TransformerEncoderLayer>(
        nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(kD, 2).dim_feedforward(8)),
        {series()}, [](nn::TransformerEncoderLayer& m, const Batch& b) {
          return per_example(m->forward(b[0].transpose(0, 1)).transpose(0, 1));
        });
  });
  add("Embedding", [] { return simple(nn::Embedding(10, kD), ids()); });
  add("Embedding, padding, scaled by frequency (P13)", [] {
    return simple(
        nn::Embedding(nn::EmbeddingOptions(10, kD).padding_idx(0).scale_grad_by_freq(true)), ids());
  });
  add("Embedding, sparse",
      [] { return simple(nn::Embedding(nn::EmbeddingOptions(10, kD).sparse(true)), ids()); });
  add("EmbeddingBag, sum", [] {
    return simple(nn::EmbeddingBag(nn::EmbeddingBagOptions(10, kD).mode(torch::kSum)), ids());
  });
  add("EmbeddingBag, mean, sparse", [] {
    return simple(nn::EmbeddingBag(nn::EmbeddingBagOptions(10, kD).mode(torch::kSum).sparse(true)),
                  ids());
  });
  for (const bool mean : {false, true}) {  // P10: [1, 2, 4], [5, 4], [3, 2, 0]
    add(
        base::join("EmbeddingBag, ", mean ? "mean" : "sum", " by offsets (P10)"),
        [mean] {
          auto options = nn::EmbeddingBagOptions(10, kD);
          mean ? options.mode(torch::kMean) : options.mode(torch::kSum);
          return of<nn::EmbeddingBag>(
              nn::EmbeddingBag(options),
              {torch::tensor({{1, 2, 4}, {5, 4, 9}, {3, 2, 0}}, torch::kLong),
               torch::tensor({3, 2, 3}, torch::kLong)},
              [](nn::EmbeddingBag& m, const Batch& b) {
                const at::Tensor used =
                    torch::arange(3, torch::kLong).unsqueeze(0) < b[1].unsqueeze(1);
                return per_example(m->forward(b[0].index({used}), b[1].cumsum(0) - b[1]));
              });
        },
        Outcome::splits);
  }
  add("EmbeddingBag, max", [] {
    return simple(nn::EmbeddingBag(nn::EmbeddingBagOptions(10, kD).mode(torch::kMax)), ids());
  });
  add("Conv1d", [] {
    return simple(nn::Conv1d(nn::Conv1dOptions(3, 4, 3).padding(1)), torch::randn({kB, 3, 8}));
  });
  add("Conv2d, asymmetric (P11)", [] {
    return simple(
        nn::Conv2d(nn::Conv2dOptions(3, 4, {3, 1}).padding({1, 0}).stride({2, 1}).dilation({1, 2})),
        torch::randn({kB, 3, 8, 8}));
  });
  add("Conv2d, groups, circular", [] {
    return simple(
        nn::Conv2d(nn::Conv2dOptions(4, 4, 3).padding(1).groups(2).padding_mode(torch::kCircular)),
        torch::randn({kB, 4, 6, 6}));
  });
  add("Conv3d", [] { return simple(nn::Conv3d(2, 3, 3), torch::randn({kB, 2, 4, 4, 4})); });
  add("ConvTranspose2d", [] {
    return simple(nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 4, 3).stride(2).groups(2)),
                  torch::randn({kB, 4, 5, 5}));
  });
  add("LayerNorm", [] { return simple(nn::LayerNorm(nn::LayerNormOptions({kD})), series()); });
  add("GroupNorm",
      [] { return simple(nn::GroupNorm(nn::GroupNormOptions(2, 4)), torch::randn({kB, 4, 8})); });
  add("InstanceNorm, affine", [] {
    return of<nn::InstanceNorm1d>(nn::InstanceNorm1d(nn::InstanceNorm1dOptions(4).affine(true)),
                                  {torch::randn({kB, 4, 8})},
                                  [](nn::InstanceNorm1d& m, const Batch& b) {
                                    return m->forward(b[0]).pow(3).flatten(1).sum(1);
                                  });
  });
  add("rms_norm", [] {
    return of<nn::Linear>(nn::Linear(kD, kD), {series()}, [](nn::Linear& m, const Batch& b) {
      return per_example(at::rms_norm(m->forward(b[0]), {kD}, m->bias));
    });
  });
  add("BatchNorm, eval (P21)", [] {
    nn::BatchNorm1d norm(4);
    norm->eval();
    return simple(norm, torch::randn({kB, 4, 8}));
  });
  add(
      "BatchNorm, train, running statistics (P21)",
      [] { return simple(nn::BatchNorm1d(4), torch::randn({kB, 4, 8})); }, Outcome::refused,
      "aten::add_");
  add("Bilinear", [] {
    return of<nn::Bilinear>(nn::Bilinear(kD, kD, 3), {rows()}, [](nn::Bilinear& m, const Batch& b) {
      return per_example(m->forward(b[0], b[0] * 2));
    });
  });
  add("PReLU", [] { return simple(nn::PReLU(nn::PReLUOptions().num_parameters(kD)), rows()); });
  add("position embedding through a broadcast (P1)", [] {
    nn::Sequential tables(nn::Embedding(10, kD), nn::Embedding(kT, kD), nn::Linear(kD, 3));
    return of<nn::Sequential>(tables, {ids()}, [](nn::Sequential& m, const Batch& b) {
      const at::Tensor h =
          m[0]->as<nn::Embedding>()->forward(b[0]) +
          m[1]->as<nn::Embedding>()->forward(torch::arange(kT, torch::kLong).unsqueeze(0));
      return per_example(m[2]->as<nn::Linear>()->forward(h));
    });
  });
  add("tied weights (P2)", [] {
    return of<nn::Embedding>(nn::Embedding(10, kD), {ids()}, [](nn::Embedding& m, const Batch& b) {
      return per_example(at::linear(m->forward(b[0]).tanh(), m->weight));
    });
  });
  add("a layer used twice (P3)", [] {
    return of<nn::Linear>(nn::Linear(kD, kD), {rows()}, [](nn::Linear& m, const Batch& b) {
      return per_example(m->forward(m->forward(b[0]).tanh()));
    });
  });
  add("a frozen weight (P4)", [] {
    nn::Linear linear(kD, 3);
    linear->weight.requires_grad_(false);
    return simple(linear, rows());
  });
  add("an unused layer (P5)", [] {
    nn::Sequential layers(nn::Linear(kD, 3), nn::Linear(kD, 3));
    return of<nn::Sequential>(layers, {rows()}, [](nn::Sequential& m, const Batch& b) {
      return per_example(m[0]->as<nn::Linear>()->forward(b[0]));
    });
  });
  add("a second forward argument (P7)", [] { return of_inner(0); });
  add("dropout in a module with its own Parameter (P22)", [] { return of_inner(0.5); });
  add("folded with time (P8)", [] {
    return of<nn::Linear>(nn::Linear(kD, 3), {series()}, [](nn::Linear& m, const Batch& b) {
      return per_example(m->forward(b[0].reshape({-1, kD})).reshape({-1, kT, 3}));
    });
  });
  add("in place (P9)", [] {
    return between([](at::Tensor h) {
      h.mul_(2);
      h.narrow(1, 1, 2).add_(h.narrow(1, 3, 2));
      h += 0.1;
      return torch::relu_(h);
    });
  });
  add("ignored targets (P14)", [] {
    return of<nn::Linear>(nn::Linear(kD, 4),
                          {series(), torch::tensor({{1, 2, -100, -100, 0},
                                                    {3, -100, -100, -100, -100},
                                                    {0, 1, 2, 3, 0},
                                                    {-100, 1, -100, 1, -100}},
                                                   torch::kLong)},
                          [](nn::Linear& m, const Batch& b) {
                            const at::Tensor losses = at::cross_entropy_loss(
                                m->forward(b[0]).transpose(1, 2), b[1], {}, at::Reduction::None);
                            return losses.sum(1) / (b[1] != -100).sum(1);
                          });
  });
  add("flip within an example", [] {
    return of<nn::Linear>(nn::Linear(kD, 3), {series()}, [](nn::Linear& m, const Batch& b) {
      return per_example(m->forward(b[0].flip(1).cumsum(1)));
    });
  });
  add("writes into a fresh tensor", [] {
    return between([](at::Tensor h) {
      const at::Tensor out = torch::zeros({h.size(0), kD}, h.options());
      out.narrow(1, 0, 3).copy_(h.narrow(1, 3, 3));
      out.narrow(1, 3, 3).copy_(h.narrow(1, 0, 3));
      return out * out.narrow(1, 1, 1);
    });
  });
  add("writes step by step through views made before", [] {
    return of<nn::Linear>(nn::Linear(kD, kD), {series()}, [](nn::Linear& m, const Batch& b) {
      const at::Tensor out = torch::empty_like(b[0]);
      const std::vector<at::Tensor> steps = out.unbind(1);
      const at::Tensor flat = out.view({-1});
      for (std::int64_t t = 0; t < kT; ++t) {
        out.select(1, t).copy_(
            m->forward(t == 0 ? b[0].select(1, 0) : out.select(1, t - 1).clone()));
      }
      return (out * flat.view(out.sizes())).flatten(1).sum(1);
    });
  });
  add("adds into a constant of all examples", [] {
    return between([](at::Tensor h) {
      at::Tensor total = torch::ones({1, kD}, h.options()) * 3;
      const at::Tensor half = total.narrow(1, 0, 3);
      total += h;
      return torch::cat({half, total.narrow(1, 3, 3) * half}, 1).expand({h.size(0), kD});
    });
  });
  add("index_put_, scatter_, masked_fill_", [] {
    return between([](at::Tensor h) {
      at::Tensor out = torch::zeros_like(h);
      out.index_put_({torch::indexing::Slice(), torch::tensor({0, 2}, torch::kLong)},
                     h.narrow(1, 0, 2));
      out.scatter_add_(1, std::get<1>(h.sort(1)), h);
      return out.masked_fill(h > 1, 0.5);
    });
  });
  add(
      "control flow on item()",
      [] {
        return after_linear([](nn::Linear&, at::Tensor y) {
          if (y.sum().item<double>() > 0) y = y * 2;
          return per_example(y);
        });
      },
      Outcome::splits);
  add(
      "item() alike for all",
      [] {
        return after_linear([](nn::Linear& m, at::Tensor y) {
          return per_example(y * m->weight.abs().sum().item<double>() *
                             (y.abs().sum().item<double>() > 0.0 ? 1 : 2));
        });
      },
      Outcome::splits);
  add(
      "a boolean mask",
      [] {
        return after_linear([](nn::Linear&, at::Tensor y) { return whole(y.index({y > 0})); });
      },
      Outcome::splits);
  add("a boolean mask of equal counts", [] {
    return after_linear([](nn::Linear&, at::Tensor y) {
      const at::Tensor top = y >= std::get<0>(y.topk(2, 1)).select(1, 1).unsqueeze(1);
      return whole(y.index({top})) + whole(y.masked_select(top) + 1);
    });
  });
  add(
      "a write through a boolean mask",
      [] {
        return after_linear([](nn::Linear&, at::Tensor y) {
          at::Tensor z = y * 1;
          z.index_put_({y > 0}, y.index({y > 0}) * 3);
          z.index_put_({y < -0.5}, torch::zeros({}, y.options()));
          return per_example(z);
        });
      },
      Outcome::splits);
  add(
      "nonzero and where",
      [] {
        return after_linear([](nn::Linear&, at::Tensor y) {
          return whole(y.select(0, 0).index_select(0, at::where(y.select(0, 0) > 0)[0]));
        });
      },
      Outcome::splits);
  add("autograd::Function", [] {
    return after_linear([](nn::Linear& m, at::Tensor y) {
      return per_example(Scale::apply(y, y * 2) + Scale::apply(y, m->bias));
    });
  });
  add("a data pointer of a parameter", [] {
    return after_linear([](nn::Linear& m, at::Tensor y) {
      return per_example(y * m->weight.data_ptr<double>()[0]);
    });
  });
  add(
      "a data pointer of an activation",
      [] {
        return after_linear(
            [](nn::Linear&, at::Tensor y) { return per_example(y * y.data_ptr<double>()[0]); });
      },
      Outcome::refused);
  add("gradients by a parameter within the loss", [] {
    return after_linear([](nn::Linear& m, at::Tensor y) {
      const auto inner = torch::autograd::grad({y.pow(3).sum()}, {m->weight}, {}, true, true, true);
      return per_example((inner[0].pow(2).sum(1) + y.squeeze(0)).unsqueeze(0));
    });
  });
  add(
      "backward() within the loss",
      [] {
        return after_linear([](nn::Linear&, at::Tensor y) {
          y.pow(3).sum().backward({}, true);
          return per_example(y);
        });
      },
      Outcome::refused);
  add("gradients within the loss", [] {
    return after_linear([](nn::Linear& m, at::Tensor y) {
      const auto inner = torch::autograd::grad({y.pow(3).sum()}, {y}, {}, true, true);
      return per_example(inner[0] + m->bias);
    });
  });
  add("softmax, logsumexp, sort, cumprod", [] {
    return between([](at::Tensor h) {
      return h.softmax(1) + h.logsumexp(1, true) + std::get<0>(h.sort(1)) + h.tanh().cumprod(1);
    });
  });
  add("einsum, bmm, outer products", [] {
    return between([](at::Tensor h) {
      const at::Tensor outer = torch::einsum("bi,bj->bij", {h, h});
      return torch::bmm(outer, h.unsqueeze(2)).squeeze(2);
    });
  });
  add("max pooling, interpolation", [] {
    return of<nn::Conv2d>(nn::Conv2d(1, 2, 3), {torch::randn({kB, 1, 8, 8})},
                          [](nn::Conv2d& m, const Batch& b) {
                            at::Tensor h = at::max_pool2d(m->forward(b[0]), {2, 2});
                            h = at::upsample_bilinear2d(h, {7, 7}, false);
                            return per_example(at::adaptive_avg_pool2d(h, {2, 2}));
                          });
  });
  add(
      "rrelu in training",
      [] {
        return between([](at::Tensor h) { return at::rrelu(h, 0.1, 0.3, /*training=*/true); });
      },
      Outcome::refused, "aten::rrelu_with_noise");
  return all;
}

class VmapKindsTest : public testing::Test {
 protected:
  void SetUp() override {
    at::set_num_threads(1);
    torch::manual_seed(3);
  }
};

TEST_F(VmapKindsTest, EqualsTheLoopOrRefusesByName) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    const Case made = kind.make();
    VmapReport report;
    try {
      const auto got =
          vmap_gradients(made.parameters, made.loss, made.batch, {.seed = 5, .report = &report});
      const auto want = loop_gradients(made.parameters, made.loss, made.batch, {.seed = 5});
      EXPECT_EQ(gap(got, want, kind.relative), "");
      EXPECT_TRUE(any_nonzero(want));
      EXPECT_FALSE(kind.outcome == Outcome::refused);
      EXPECT_EQ(report.splits > 0, kind.outcome == Outcome::splits) << report.first_split;
    } catch (const Unsupported& error) {
      EXPECT_TRUE(kind.outcome == Outcome::refused) << error.what();
      EXPECT_EQ(error.operator_name(), kind.refused_operator) << error.what();
    } catch (const std::exception& error) {
      const std::string text = error.what();
      ADD_FAILURE() << text.substr(0, text.find('\n'));
    }
  }
}

TEST_F(VmapKindsTest, WithoutSplittingRefusesByTheOperatorThatReads) {
  const std::vector<std::pair<std::string, std::string>> expected{
      {"control flow on item()", "aten::_local_scalar_dense"},
      {"a boolean mask", "aten::index"},
      {"nonzero and where", "aten::nonzero"},
      {"packed LSTM, other lengths", "aten::_pack_padded_sequence"}};
  const std::vector<Kind> all = kinds();
  for (const auto& [name, op] : expected) {
    SCOPED_TRACE(name);
    const auto kind = std::find_if(all.begin(), all.end(),
                                   [&, &name = name](const Kind& k) { return k.name == name; });
    ASSERT_NE(kind, all.end());
    const Case made = kind->make();
    try {
      vmap_gradients(made.parameters, made.loss, made.batch, {.split = false});
      ADD_FAILURE() << "not refused";
    } catch (const Unsupported& error) {
      EXPECT_EQ(error.operator_name(), op);
      EXPECT_THAT(error.what(), testing::HasSubstr("differs between examples"));
    }
    EXPECT_TRUE(any_nonzero(loop_gradients(made.parameters, made.loss, made.batch)));
  }
}

}  // namespace
}  // namespace gradus::persample
