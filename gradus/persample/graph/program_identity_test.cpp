// A plan made for one batch may serve another only if the program is the same in all that decides
// whose gradient is where: also in what it saves besides tensors, and in what values choose.

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/autograd.h>
#include <torch/nn/functional.h>
#include <torch/nn/utils/rnn.h>
#include <torch/types.h>

#include <gradus/base/error.h>
#include <gradus/persample/graph/analysis.h>
#include <gradus/persample/graph/graph_gradients.h>

namespace gradus::persample {
namespace {

namespace F = torch::nn::functional;
using Batch = std::vector<at::Tensor>;
using Loss = std::function<at::Tensor(const Batch&)>;

constexpr double kTolerance = 1e-9;

at::Tensor random(at::IntArrayRef sizes) { return torch::randn(sizes, at::kDouble); }
at::Tensor parameter(at::IntArrayRef sizes) {
  return (random(sizes) * 0.5).set_requires_grad(true);
}
at::Tensor integers(std::vector<std::int64_t> values) { return torch::tensor(values, at::kLong); }

struct Program {
  std::vector<at::Tensor> parameters{};
  Loss loss{};
  std::vector<Batch> batches{};
};

std::vector<NamedParameter> named(const std::vector<at::Tensor>& tensors) {
  std::vector<NamedParameter> result;
  for (const at::Tensor& each : tensors) {
    result.push_back({"p" + std::to_string(result.size()), each});
  }
  return result;
}

// The largest relative difference of the table from a batch of one at a time.
double error_of(const GraphGradients& table, const Program& program, const Batch& batch) {
  double total = 0;
  double error = 0;
  for (std::int64_t b = 0; b < batch[0].size(0); ++b) {
    Batch one;
    for (const at::Tensor& each : batch) one.push_back(each.slice(0, b, b + 1));
    const auto want = torch::autograd::grad({program.loss(one).sum()}, program.parameters, {},
                                            false, false, /*allow_unused=*/true);
    for (std::size_t i = 0; i < want.size(); ++i) {
      const at::Tensor got = table.gradients(i)[b];
      const at::Tensor expected = want[i].defined() ? want[i] : torch::zeros_like(got);
      total += expected.square().sum().item<double>();
      error += (got - expected).square().sum().item<double>();
    }
  }
  return std::sqrt(error / total);
}

struct Case {
  std::string name{};
  std::function<Program()> make{};
};

// Batch after batch: right where the examples were checked, right or refused where they were not.
void expect_right(const std::vector<Case>& cases) {
  for (const Case& each : cases) {
    for (const bool checked : {true, false}) {
      SCOPED_TRACE(each.name + (checked ? ", checked" : ", losses alone"));
      torch::manual_seed(7);
      const Program program = each.make();
      GraphGradients table(named(program.parameters), {.examples_checked = checked});
      for (std::size_t i = 0; i < program.batches.size(); ++i) {
        SCOPED_TRACE("batch " + std::to_string(i));
        table.clear();
        try {
          table.backward(program.loss(program.batches[i]));
          EXPECT_LE(error_of(table, program, program.batches[i]), kTolerance);
        } catch (const UserError& error) {
          EXPECT_FALSE(checked) << error.what();
        }
      }
    }
  }
}

at::Tensor summed(const at::Tensor& tensor) { return tensor.square().flatten(1).sum(1); }
std::int64_t at_index(const at::Tensor& tensor, std::int64_t i) {
  return tensor[i].item<std::int64_t>();
}

TEST(ProgramIdentityTest, LookupsInATableThatIsComputedAreLookedAtInEachBatch) {
  const std::vector<Batch> in_order_then_not{
      {torch::arange(4)}, {torch::arange(4, 8)}, {integers({3, 1, 6, 0})}};
  expect_right({
      {"embedding of layers over constants",
       [=] {
         const at::Tensor w = parameter({5, 6}), v = parameter({3, 5}), x = random({8, 6});
         return Program{{w, v},
                        [=](const Batch& b) {
                          const at::Tensor table = F::linear(F::linear(x, w).relu(), v);
                          return summed(torch::embedding(table, b[0]));
                        },
                        in_order_then_not};
       }},
      {"adapter on a frozen embedding",
       [=] {
         const at::Tensor frozen = random({4, 6}), w = parameter({5, 6});
         return Program{
             {w},
             [=](const Batch& b) { return summed(torch::embedding(F::linear(frozen, w), b[0])); },
             {{torch::arange(4)}, {integers({3, 1, 2, 0})}}};
       }},
      {"embedding_bag",
       [=] {
         const at::Tensor w = parameter({6, 3}), x = random({8, 6});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor ids = b[0].unsqueeze(1);
                          return summed(F::embedding_bag(ids, x.mm(w)));
                        },
                        in_order_then_not};
       }},
      {"layer_norm of a table",
       [=] {
         const at::Tensor w = parameter({4, 6});
         return Program{
             {w},
             [=](const Batch& b) {
               const at::Tensor table = torch::layer_norm(w, {6});
               return summed(torch::embedding(table, b[0]) * b[1]);
             },
             {{torch::arange(4), random({4, 6})}, {integers({3, 1, 2, 0}), random({4, 6})}}};
       }},
      {"index, index_select and gather",
       [=] {
         const at::Tensor w = parameter({6, 3}), x = random({8, 6});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor table = x.mm(w);
                          const at::Tensor ids = b[0].unsqueeze(1).expand({-1, 3});
                          return summed(table.index({b[0]})) +
                                 summed(table.tanh().index_select(0, b[0])) +
                                 summed(table.exp().gather(0, ids));
                        },
                        in_order_then_not};
       }},
      {"a product with rows of zeros and one 1",
       [=] {
         const at::Tensor w = parameter({6, 3}), x = random({8, 6});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor one_hot = torch::one_hot(b[0], 8).to(at::kDouble);
                          return summed(one_hot.mm(x.mm(w)));
                        },
                        in_order_then_not};
       }},
      {"a permutation by a product, and by a masked sum",
       [=] {
         const at::Tensor w = parameter({6, 3}), v = parameter({3, 3});
         return Program{
             {w, v},
             [=](const Batch& b) {
               const at::Tensor order = b[1].argsort().argsort();
               const at::Tensor p = torch::one_hot(order, b[0].size(0)).to(at::kDouble);
               const at::Tensor h = p.t().mm(b[0].mm(w).tanh()).mm(v).tanh();
               const at::Tensor back = (p.t().unsqueeze(2) * h.unsqueeze(1)).sum(0);
               return summed(back);
             },
             {{random({4, 6}), integers({1, 2, 3, 4})}, {random({4, 6}), integers({3, 1, 4, 2})}}};
       }},
  });
}

TEST(ProgramIdentityTest, PlacesThatTheHostChoosesArePartOfTheProgram) {
  const auto sorted_then_not = [] {
    return std::vector<Batch>{{random({4, 6}), integers({1, 2, 3, 4})},
                              {random({4, 6}), integers({3, 1, 4, 2})}};
  };
  expect_right({
      {"select and stack",
       [=] {
         const at::Tensor w = parameter({6, 5}), v = parameter({5, 5});
         return Program{{w, v},
                        [=](const Batch& b) {
                          const at::Tensor h = b[0].mm(w).tanh(), order = b[1].argsort();
                          const std::int64_t count = h.size(0);
                          std::vector<at::Tensor> rows, back(static_cast<std::size_t>(count));
                          for (std::int64_t i = 0; i < count; ++i)
                            rows.push_back(h.select(0, at_index(order, i)));
                          const at::Tensor y = torch::stack(rows).mm(v).tanh();
                          for (std::int64_t i = 0; i < count; ++i)
                            back[static_cast<std::size_t>(at_index(order, i))] = y.select(0, i);
                          return summed(torch::stack(back));
                        },
                        sorted_then_not()};
       }},
      {"narrow and cat",
       [=] {
         const at::Tensor w = parameter({6, 5}), v = parameter({5, 5});
         return Program{{w, v},
                        [=](const Batch& b) {
                          const at::Tensor h = b[0].mm(w).tanh(), order = b[1].argsort();
                          const std::int64_t count = h.size(0);
                          std::vector<at::Tensor> rows, back(static_cast<std::size_t>(count));
                          for (std::int64_t i = 0; i < count; ++i)
                            rows.push_back(h.narrow(0, at_index(order, i), 1));
                          const at::Tensor y = torch::cat(rows).mm(v).tanh();
                          for (std::int64_t i = 0; i < count; ++i)
                            back[static_cast<std::size_t>(at_index(order, i))] = y.narrow(0, i, 1);
                          return summed(torch::cat(back));
                        },
                        sorted_then_not()};
       }},
      {"roll",
       [=] {
         const at::Tensor w = parameter({6, 5}), v = parameter({5, 5});
         return Program{
             {w, v},
             [=](const Batch& b) {
               const std::int64_t k = b[1].argmax().item<std::int64_t>();
               const at::Tensor h = b[0].mm(w).tanh().roll(k, 0);
               return summed(h.mm(v).tanh().roll(-k, 0));
             },
             {{random({4, 6}), integers({9, 2, 3, 4})}, {random({4, 6}), integers({3, 1, 4, 2})}}};
       }},
      {"rows of a layer over constants",
       [=] {
         const at::Tensor w = parameter({6, 5}), x = random({4, 6});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor table = x.mm(w);
                          std::vector<at::Tensor> rows;
                          for (std::int64_t i = 0; i < b[0].size(0); ++i)
                            rows.push_back(table.select(0, at_index(b[0], i)));
                          return summed(torch::stack(rows));
                        },
                        {{torch::arange(4)}, {integers({3, 1, 2, 0})}}};
       }},
      {"windows of a convolution over constants",
       [=] {
         const at::Tensor w = parameter({3, 2, 3}), x = random({1, 2, 18});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor h = at::conv1d(x, w).squeeze(0);
                          std::vector<at::Tensor> rows;
                          for (std::int64_t i = 0; i < b[0].size(0); ++i) {
                            const std::int64_t at = 4 * at_index(b[0], i);
                            rows.push_back(h.slice(1, at, at + 4));
                          }
                          return summed(torch::stack(rows));
                        },
                        {{torch::arange(4)}, {integers({2, 3, 1, 0})}}};
       }},
      {"in-place writes to rows",
       [=] {
         const at::Tensor w = parameter({6, 5}), v = parameter({5, 5});
         return Program{{w, v},
                        [=](const Batch& b) {
                          const at::Tensor order = b[1].argsort();
                          const at::Tensor y = b[0].index({order}).mm(w).tanh().mm(v);
                          at::Tensor back = torch::zeros({b[0].size(0), 5}, at::kDouble);
                          for (std::int64_t i = 0; i < y.size(0); ++i)
                            back.select(0, at_index(order, i)).copy_(y.select(0, i));
                          return summed(back);
                        },
                        sorted_then_not()};
       }},
      {"index_put by indices of the host",
       [=] {
         const at::Tensor w = parameter({6, 5});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor order = b[1].argsort();
                          const at::Tensor y = b[0].index({order}).mm(w).tanh();
                          const at::Tensor back = torch::zeros_like(y);
                          return summed(back.index_put({order}, y));
                        },
                        sorted_then_not()};
       }},
      {"parts of chosen lengths",
       [=] {
         const at::Tensor w = parameter({5, 5}), v = parameter({5, 5});
         return Program{{w, v},
                        [=](const Batch& b) {
                          const at::Tensor h = b[0].matmul(w).tanh();
                          std::vector<at::Tensor> rows, losses;
                          std::vector<std::int64_t> lengths;
                          for (std::int64_t i = 0; i < h.size(0); ++i) {
                            lengths.push_back(at_index(b[1], i));
                            rows.push_back(h.select(0, i).slice(0, 0, lengths.back()));
                          }
                          const at::Tensor y = torch::cat(rows).mm(v).tanh();
                          for (const at::Tensor& part : y.split_with_sizes(lengths))
                            losses.push_back(part.square().sum());
                          return torch::stack(losses);
                        },
                        {{random({4, 6, 5}), integers({3, 3, 3, 3})},
                         {random({4, 6, 5}), integers({2, 4, 5, 1})}}};
       }},
      {"packed sequences of other lengths",
       [=] {
         const at::Tensor w = parameter({5, 5}), v = parameter({5, 5});
         namespace rnn = torch::nn::utils::rnn;
         return Program{
             {w, v},
             [=](const Batch& b) {
               const at::Tensor h = b[0].matmul(w).tanh();
               const auto packed = rnn::pack_padded_sequence(h, b[1], true, false);
               const rnn::PackedSequence out(packed.data().mm(v).tanh(), packed.batch_sizes(),
                                             packed.sorted_indices(), packed.unsorted_indices());
               return summed(std::get<0>(rnn::pad_packed_sequence(out, true, 0.0, h.size(1))));
             },
             {{random({4, 6, 5}), integers({3, 3, 3, 3})},
              {random({4, 6, 5}), integers({4, 3, 3, 2})}}};
       }},
  });
}

TEST(ProgramIdentityTest, DimensionsAndStridesArePartOfTheProgram) {
  const auto flag = std::make_shared<std::int64_t>(0);
  // One program with a switch, thrown after the first batch; examples and steps are four each.
  const auto switched = [flag](const std::function<at::Tensor(at::Tensor, bool)>& make) {
    return [=] {
      const at::Tensor w = parameter({5, 5}), v = parameter({5, 5});
      *flag = 0;
      return Program{{w, v},
                     [=](const Batch& b) {
                       const bool other = *flag > 0;
                       if (b[0].size(0) == 4) ++*flag;
                       const at::Tensor h =
                           b[0].size(0) == 1 ? b[0].matmul(w) : make(b[0].matmul(w), other);
                       const at::Tensor y = h.matmul(v).tanh();
                       return summed(b[0].size(0) == 1 ? y : make(y, other));
                     },
                     {{random({4, 4, 5})}, {random({4, 4, 5})}}};
    };
  };
  expect_right({
      {"permute", switched([](const at::Tensor& h, bool other) {
         return other ? h.permute({1, 0, 2}) : h.permute({0, 1, 2});
       })},
      {"transpose",
       switched([](const at::Tensor& h, bool other) { return h.transpose(other ? 0 : 1, 1); })},
      {"flip", switched([](const at::Tensor& h, bool other) { return h.flip(other ? 0 : 1); })},
      {"as_strided", switched([](const at::Tensor& h, bool other) {
         return h.contiguous().as_strided(
             {4, 4, 5}, other ? at::IntArrayRef{5, 20, 1} : at::IntArrayRef{20, 5, 1});
       })},
  });
}

// The structure of a program over 4 examples of 4 features.
std::uint64_t structure(const Loss& loss, std::int64_t examples = 4, std::int64_t steps = 3) {
  torch::manual_seed(3);
  const at::Tensor losses = loss({random({examples, steps, 6})});
  return structure_of(read_graph(losses, {}));
}

struct Custom : torch::autograd::Function<Custom> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t shift) {
    context->saved_data["shift"] = shift;
    return x.roll(shift, 0);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          std::vector<at::Tensor> gradients) {
    return {gradients[0].roll(-context->saved_data["shift"].toInt(), 0), at::Tensor()};
  }
};

TEST(ProgramIdentityTest, ProgramsThatDifferInOneSavedNumberHaveDifferentStructures) {
  torch::manual_seed(1);
  const at::Tensor w = parameter({6, 4});
  using Step = std::function<at::Tensor(const at::Tensor&)>;
  struct Pair {
    std::string name{};
    Step one{};
    Step other{};
  };
  const auto of = [&](const Step& step) {
    return [&w, step](const Batch& b) {  // of [4, 4], also between other operators
      return step(b[0].select(1, 0).mm(w).tanh()).flatten(1).square().sum(1);
    };
  };
  using T = const at::Tensor&;
  const std::vector<Pair> pairs{
      {"softmax", [](T h) { return h.softmax(1); }, [](T h) { return h.softmax(0); }},
      {"log_softmax", [](T h) { return h.log_softmax(1); }, [](T h) { return h.log_softmax(0); }},
      {"mean", [](T h) { return h.mean(1, true); }, [](T h) { return h.mean(0, true).t(); }},
      {"sum", [](T h) { return h.sum(1, true); }, [](T h) { return h.sum(0, true).t(); }},
      {"cumsum", [](T h) { return h.cumsum(1); }, [](T h) { return h.cumsum(0); }},
      {"logsumexp", [](T h) { return h.logsumexp(1, true); },
       [](T h) { return h.logsumexp(0, true).t(); }},
      {"roll", [](T h) { return h.roll(0, 0); }, [](T h) { return h.roll(1, 0); }},
      {"roll dims", [](T h) { return h.roll(1, 1); }, [](T h) { return h.roll(1, 0); }},
      {"flip", [](T h) { return h.flip(1); }, [](T h) { return h.flip(0); }},
      {"select", [](T h) { return h + h.select(0, 1); }, [](T h) { return h + h.select(0, 2); }},
      {"slice", [](T h) { return h + h.slice(0, 0, 1); }, [](T h) { return h + h.slice(0, 2, 3); }},
      {"slice step", [](T h) { return h.slice(1, 0, 4, 2); },
       [](T h) { return h.slice(1, 0, 4, 3); }},
      {"split", [](T h) { return h.split_with_sizes({1, 3}, 1)[1]; },
       [](T h) { return h.split_with_sizes({2, 2}, 1)[1]; }},
      {"diagonal", [](T h) { return h + h.diagonal(0).unsqueeze(1); },
       [](T h) { return h + at::constant_pad_nd(h.diagonal(1), {0, 1}).unsqueeze(1); }},
      {"unfold", [](T h) { return h.unfold(1, 2, 2); }, [](T h) { return h.unfold(0, 2, 2); }},
      {"triu", [](T h) { return h.triu(0); }, [](T h) { return h.triu(2); }},
      {"permute", [](T h) { return h.permute({0, 1}); }, [](T h) { return h.permute({1, 0}); }},
      {"as_strided", [](T h) { return h.as_strided({4, 4}, {4, 1}); },
       [](T h) { return h.as_strided({4, 4}, {1, 4}); }},
      {"gather", [](T h) { return h.gather(1, torch::zeros({4, 4}, at::kLong)); },
       [](T h) { return h.gather(0, torch::zeros({4, 4}, at::kLong)); }},
      {"sort", [](T h) { return std::get<0>(h.sort(1)); },
       [](T h) { return std::get<0>(h.sort(0)); }},
      {"norm", [](T h) { return h / h.norm(2, 1, true); },
       [](T h) { return h / h.norm(2, 0, true); }},
      {"power of norm", [](T h) { return h.norm(2, 1, true); },
       [](T h) { return h.norm(3, 1, true); }},
      {"power", [](T h) { return h.pow(3); }, [](T h) { return h.pow(5); }},
      {"clamp", [](T h) { return h.clamp(-1, 1); }, [](T h) { return h.clamp(-1); }},
      {"gelu", [](T h) { return at::gelu(h); }, [](T h) { return at::gelu(h, "tanh"); }},
      {"pooling", [](T h) { return at::avg_pool1d(h.unsqueeze(0), 2, 1); },
       [](T h) { return at::avg_pool1d(h.unsqueeze(0), 2, 1, 1).slice(2, 1, 4); }},
      {"view", [](T h) { return h.view({4, 1, 4}); }, [](T h) { return h.view({2, 2, 4}); }},
      {"expand", [](T h) { return h.unsqueeze(1).expand({4, 3, 4}); },
       [](T h) { return h.unsqueeze(1).expand({4, 7, 4}).flatten(1, 2).view({4, 7, 4}); }},
      {"cast", [](T h) { return h.to(at::kFloat); }, [](T h) { return h.to(at::kBFloat16); }},
      {"write",
       [](T h) {
         at::Tensor all = torch::zeros({4, 4}, at::kDouble);
         all.select(0, 1).copy_(h.select(0, 1));
         return all;
       },
       [](T h) {
         at::Tensor all = torch::zeros({4, 4}, at::kDouble);
         all.select(0, 2).copy_(h.select(0, 1));
         return all;
       }},
      {"custom", [](T h) { return Custom::apply(h, 0); }, [](T h) { return Custom::apply(h, 1); }},
  };
  for (const Pair& pair : pairs) {
    SCOPED_TRACE(pair.name);
    EXPECT_NE(structure(of(pair.one)), structure(of(pair.other)));
    EXPECT_EQ(structure(of(pair.one)), structure(of(pair.one)));
  }
}

TEST(ProgramIdentityTest, BatchesAndLengthsOfOtherSizesHaveOneStructure) {
  torch::manual_seed(1);
  const at::Tensor w = parameter({6, 34}), v = parameter({34, 37}), positions = parameter({64, 6});
  const at::Tensor scale = parameter({34});
  const Loss loss = [&](const Batch& b) {
    const std::int64_t steps = b[0].size(1);
    const at::Tensor x = b[0] + positions.slice(0, 0, steps);
    const at::Tensor h = at::layer_norm(x.matmul(w), {34}, scale).relu();
    const at::Tensor last = torch::cat({h.slice(1, 1), h.slice(1, 0, 1)}, 1).select(1, steps - 1);
    const at::Tensor heads = h.view({-1, steps, 2, 17}).transpose(1, 2);
    const at::Tensor mask = torch::ones({steps, steps}, at::kBool).triu(1);
    const at::Tensor scores =
        heads.matmul(heads.transpose(2, 3)).masked_fill(mask, -1e9).softmax(-1);
    const at::Tensor mixed = scores.matmul(heads).transpose(1, 2).flatten(2).matmul(v);
    return mixed.square().mean({1, 2}) + last.sum(1).repeat({1});
  };
  const std::uint64_t known = structure(loss, 7, 11);
  EXPECT_EQ(structure(loss, 9, 11), known);
  EXPECT_EQ(structure(loss, 7, 13), known);
  EXPECT_EQ(structure(loss, 19, 23), known);
}

TEST(ProgramIdentityTest, APlanServesOtherBatchSizesAndValuesOfTheSameProgram) {
  torch::manual_seed(1);
  const at::Tensor table = parameter({20, 6}), w = parameter({6, 10}), v = parameter({10, 10});
  const at::Tensor bias = parameter({9, 1});
  const Program program{
      {table, w, v, bias},
      [=](const Batch& b) {  // lookups and choices along steps and features, not along examples
        const std::int64_t steps = b[0].size(1);
        const at::Tensor h = torch::embedding(table, b[0]).matmul(w);
        const at::Tensor distance =
            torch::arange(steps).unsqueeze(1) - torch::arange(steps).unsqueeze(0) + steps - 1;
        const at::Tensor scores = h.matmul(h.transpose(1, 2)) + bias.index({distance}).squeeze(2);
        const at::Tensor mask = torch::ones({steps, steps}, at::kBool).triu(1);
        const at::Tensor y = scores.masked_fill(mask, -1e9).softmax(-1).matmul(h).matmul(v);
        const at::Tensor chosen = y.log_softmax(2).gather(2, b[0].unsqueeze(2) % 10).squeeze(2);
        return chosen.sum(1) + std::get<0>(y.sort(2)).select(2, 0).sum(1) +
               std::get<0>(y.topk(2, 1)).square().sum({1, 2}) + std::get<0>(y.max(2)).sum(1) +
               y.index_select(1, torch::tensor({1, 0})).sum({1, 2}) +
               F::max_pool1d(y, F::MaxPool1dFuncOptions(2)).square().sum({1, 2});
      }};
  GraphGradients table_of(named(program.parameters), {.examples_checked = true});
  for (const std::int64_t examples : {7, 7, 11, 13}) {
    const Batch batch{torch::randint(20, {examples, 5})};
    table_of.clear();
    table_of.backward(program.loss(batch));
    EXPECT_LE(error_of(table_of, program, batch), kTolerance);
  }
  EXPECT_EQ(table_of.analyses(), 1);
}

TEST(ProgramIdentityTest, HooksBetweenAParameterAndItsUseAreHonoured) {
  const auto clamped = [](at::Tensor tensor) {
    tensor.register_hook([](const at::Tensor& g) { return g.clamp(-0.3, 0.3); });
    return tensor;
  };
  const auto batches = [] { return std::vector<Batch>{{random({4, 5})}, {random({4, 5})}}; };
  expect_right({
      {"on a transposed weight",
       [=] {
         const at::Tensor w = parameter({5, 5});
         return Program{
             {w}, [=](const Batch& b) { return summed(b[0].mm(clamped(w.t()))); }, batches()};
       }},
      {"on a view",
       [=] {
         const at::Tensor w = parameter({25});
         return Program{{w},
                        [=](const Batch& b) { return summed(b[0].mm(clamped(w.view({5, 5})))); },
                        batches()};
       }},
      {"on a function of a weight",
       [=] {
         const at::Tensor w = parameter({5, 5});
         return Program{
             {w}, [=](const Batch& b) { return summed(b[0].mm(clamped(w.exp()))); }, batches()};
       }},
      {"on a weight used twice",
       [=] {
         const at::Tensor w = parameter({5, 5});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor hooked = clamped(w.t());
                          return summed(b[0].mm(hooked).tanh().mm(hooked)) +
                                 summed(b[0] * hooked.exp().sum(0));
                        },
                        batches()};
       }},
      {"below one that has none",
       [=] {
         const at::Tensor w = parameter({5, 5});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor half = clamped(w.clone());
                          return summed(b[0].mm(half.t()).tanh().mm(half));
                        },
                        batches()};
       }},
      {"on positions looked up for all",
       [=] {
         const at::Tensor w = parameter({9, 5});
         return Program{{w},
                        [=](const Batch& b) {
                          const at::Tensor rows =
                              clamped(torch::embedding(w, integers({3, 1, 3, 2, 0})));
                          return summed(b[0].mm(rows));
                        },
                        batches()};
       }},
  });
  // The first batch is too small for the hook to act.
  torch::manual_seed(2);
  const at::Tensor w = parameter({5, 5});
  const Program program{{w}, [=](const Batch& b) {
                          at::Tensor turned = w.t();
                          turned.register_hook([](const at::Tensor& g) { return g.clamp(-3, 3); });
                          return summed(b[0].mm(turned));
                        }};
  GraphGradients table(named({w}));
  for (const double size : {0.01, 9.0}) {
    const Batch batch{random({4, 5}) * size};
    table.clear();
    table.backward(program.loss(batch));
    EXPECT_LE(error_of(table, program, batch), kTolerance);
  }
}

TEST(ProgramIdentityTest, LossesOfParametersAloneAreRightOrRefused) {
  const auto entropy = [](const at::Tensor& scores, const at::Tensor& labels) {
    return F::cross_entropy(scores, labels, F::CrossEntropyFuncOptions().reduction(torch::kNone));
  };
  const std::vector<Batch> labels{{integers({0, 1, 2, 1})}, {integers({2, 2, 0, 1})}};
  expect_right({
      {"one vector of scores for all",
       [=] {
         const at::Tensor w = parameter({3});
         return Program{{w},
                        [=](const Batch& b) {
                          return entropy(torch::stack(std::vector<at::Tensor>(
                                             static_cast<std::size_t>(b[0].size(0)), w)),
                                         b[0]);
                        },
                        labels};
       }},
      {"transitions that the host looks up",
       [=] {
         const at::Tensor w = parameter({3, 3});
         return Program{{w},
                        [=](const Batch& b) {
                          std::vector<at::Tensor> scores;
                          const at::Tensor all = torch::logsumexp(w.reshape({-1}), 0);
                          for (std::int64_t i = 0; i < b[0].size(0); ++i) {
                            scores.push_back(all - w.select(0, at_index(b[0].select(1, 0), i))
                                                       .select(0, at_index(b[0].select(1, 1), i)));
                          }
                          return torch::stack(scores);
                        },
                        {{torch::tensor({{0, 1}, {2, 1}, {2, 2}, {1, 0}})}}};
       }},
      {"a row of scores an example",
       [=] {
         const at::Tensor w = parameter({4, 3}), v = parameter({3});
         return Program{{w, v},
                        [=](const Batch& b) {
                          const at::Tensor rows = w.slice(0, 0, b[0].size(0)) * v;
                          // Alone, an example takes the row of its number, which it knows.
                          const at::Tensor own = w.index({b[1]}) * v;
                          return entropy(b[0].size(0) == 1 ? own : rows, b[0]);
                        },
                        {{integers({0, 1, 2, 1}), torch::arange(4)}}};
       }},
  });
  // All of a batch must be reached, or nothing is returned.
  torch::manual_seed(4);
  const at::Tensor w = parameter({3});
  GraphGradients table(named({w}));
  table.backward(entropy(w.expand({4, 3}), labels[0][0]));
  EXPECT_GT(table.norms().min().item<double>(), 0);
}

TEST(ProgramIdentityTest, FunctionsOfParametersAloneNeedNoLossFunction) {
  torch::manual_seed(5);
  const at::Tensor w = parameter({5, 5}), g = parameter({5, 1}), t = parameter({}),
                   table = parameter({9, 1});
  const at::Tensor distance = torch::arange(5).unsqueeze(1) - torch::arange(5).unsqueeze(0) + 4;
  const at::Tensor slopes = torch::rand({5, 1}, at::kDouble), u = random({5});
  const std::vector<std::function<at::Tensor()>> weights{
      [&] { return w * t * t; },
      [&] { return w * t.exp(); },
      [&] { return g * w / w.norm(2, 1, true); },
      [&] { return w / at::linalg_matrix_norm(w, 2); },
      [&] { return w / u.dot(w.mv(u)); },
      [&] { return w / u.unsqueeze(0).mm(w).mm(u.unsqueeze(1)); },
      [&] { return w / 0.3 + 1; },
      [&] { return w.clamp(-0.2, 0.2); },
      [&] { return at::matrix_exp(w); },
      [&] { return table.index({distance}).squeeze(2) + w; },
      [&] { return w * slopes; },
      [&] { return torch::stack({w, w.t()}).mean(0); },
      [&] { return torch::cat({w.slice(0, 0, 2).softmax(1), w.slice(0, 2).cumsum(0)}); },
      [&] { return at::linalg_inv(w + torch::eye(5, at::kDouble) * 4); },
  };
  for (std::size_t i = 0; i < weights.size(); ++i) {
    SCOPED_TRACE(i);
    const Program program{{w, g, t, table},
                          [&](const Batch& b) { return summed(b[0].mm(weights[i]()).tanh()); }};
    GraphGradients table_of(named(program.parameters));
    for (int repeat = 0; repeat < 2; ++repeat) {
      const Batch batch{random({4, 5})};
      table_of.clear();
      table_of.backward(program.loss(batch));
      EXPECT_LE(error_of(table_of, program, batch), kTolerance);
    }
  }
}

TEST(ProgramIdentityTest, AStatisticOverTheBatchIsRefusedWhateverItIsMadeInto) {
  torch::manual_seed(6);
  const at::Tensor w = parameter({5, 5}), scale = parameter({5}), table = parameter({9, 5});
  const std::vector<Loss> mixing{
      [&](const Batch& b) { return summed(b[0].mm(w) * b[0].mm(w).mean(0)); },
      [&](const Batch& b) { return summed(b[0] - (b[0] * scale).mean(0)); },
      [&](const Batch& b) { return summed(b[0] - (b[0] * scale).sum(0).exp()); },
      [&](const Batch& b) {
        return summed(b[0] * torch::embedding(table, torch::arange(b[0].size(0))).mean(0));
      },
      [&](const Batch& b) {
        return summed(b[0] * table.index({torch::arange(b[0].size(0))}).sum(0));
      },
      [&](const Batch& b) { return summed(b[0].mm(w).softmax(0)); },
      [&](const Batch& b) { return summed(b[0] * b[0].mv(scale).dot(b[0].select(1, 0))); },
      [&](const Batch& b) { return summed(b[0] * b[0].t().mm(b[0].mm(w))); },
  };
  for (std::size_t i = 0; i < mixing.size(); ++i) {
    SCOPED_TRACE(i);
    GraphGradients table_of(named({w, scale, table}));
    EXPECT_THROW(table_of.backward(mixing[i]({random({5, 5})})), UserError);
  }
}

}  // namespace
}  // namespace gradus::persample
