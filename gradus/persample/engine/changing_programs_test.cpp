// Models whose graph is another one in each batch.

#include <algorithm>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/persample/engine/sample_gradients.h>
#include <gradus/persample/vmap/loop.h>

namespace gradus::persample {
namespace {

namespace nn = torch::nn;
using at::Tensor;

constexpr std::int64_t kExamples = 6, kSteps = 7, kWidth = 4;

class ChangingProgramsTest : public testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(0);
    at::set_num_threads(1);
  }

  // Compares each batch with the loop; the number of calls of the loss in each.
  static std::vector<std::int64_t> calls(const std::vector<NamedParameter>& parameters,
                                         const LossFunction& loss,
                                         const std::function<Batch()>& draw, int batches) {
    SampleGradients table(parameters, {});
    std::vector<std::int64_t> calls;
    for (int i = 0; i < batches; ++i) {
      const Batch batch = draw();
      std::int64_t count = 0;
      table.clear();
      table.backward(
          [&](const Batch& part) {
            ++count;
            return loss(part);
          },
          batch);
      calls.push_back(count);
      const std::vector<Tensor> want = loop_gradients(parameters, loss, batch);
      for (std::size_t k = 0; k < want.size(); ++k) {
        EXPECT_LE((table.gradients(k) - want[k]).norm().item<double>(),
                  1e-9 * want[k].norm().item<double>())
            << parameters[k].name << " in batch " << i;
      }
    }
    return calls;
  }
};

TEST_F(ChangingProgramsTest, PackedSequencesOfManyLengthsAreExaminedAFewTimesOnly) {
  nn::Sequential model(nn::GRU(nn::GRUOptions(kWidth, 5).batch_first(true)), nn::Linear(5, 2));
  model->to(at::kDouble);
  const LossFunction loss = [&](const Batch& batch) {
    const auto packed = nn::utils::rnn::pack_padded_sequence(
        batch[0], batch[1], /*batch_first=*/true, /*enforce_sorted=*/false);
    const auto last = std::get<1>(model->at<nn::GRUImpl>(0).forward_with_packed_input(packed));
    return model->at<nn::LinearImpl>(1).forward(last[0]).square().sum(1);
  };
  const auto draw = [&]() -> Batch {
    Tensor lengths = at::randint(1, kSteps + 1, {kExamples});
    lengths[0] = kSteps;
    return {at::randn({kExamples, kSteps, kWidth}, at::kDouble), lengths};
  };
  const auto count = calls(parameters_of(*model), loss, draw, 24);
  EXPECT_GT(count.front(), 1);
  EXPECT_GE(std::count(count.begin(), count.end(), 1), 12);
}

TEST_F(ChangingProgramsTest, RowsThatTheHostOrdersKeepTheirOwners) {
  nn::Sequential model(nn::Linear(kWidth, 3), nn::Linear(3, 3));
  model->to(at::kDouble);
  // Sorted by the first feature on the host, computed, and put back.
  const LossFunction loss = [&](const Batch& batch) {
    const Tensor hidden = model->at<nn::LinearImpl>(0).forward(batch[0]).tanh();
    std::vector<std::int64_t> order(static_cast<std::size_t>(batch[0].size(0)));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::int64_t left, std::int64_t right) {
      return batch[0][left][0].item<double>() < batch[0][right][0].item<double>();
    });
    std::vector<Tensor> sorted;
    for (const std::int64_t row : order) sorted.push_back(hidden.select(0, row));
    const Tensor losses = model->at<nn::LinearImpl>(1).forward(at::stack(sorted)).square().sum(1);
    std::vector<Tensor> back(order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      back[static_cast<std::size_t>(order[i])] = losses.select(0, static_cast<std::int64_t>(i));
    }
    return at::stack(back);
  };
  const auto draw = [&]() -> Batch { return {at::randn({kExamples, kWidth}, at::kDouble)}; };
  const auto count = calls(parameters_of(*model), loss, draw, 24);
  EXPECT_GE(std::count(count.begin(), count.end(), 1), 12);
}

// The same operators along another dimension are another matter.
TEST_F(ChangingProgramsTest, AKindOfOperatorThatWasNotSeenIsExamined) {
  nn::Sequential model(nn::Linear(kWidth, kExamples));
  model->to(at::kDouble);
  std::int64_t dim = 1;
  const LossFunction loss = [&](const Batch& batch) {
    return model->at<nn::LinearImpl>(0).forward(batch[0]).softmax(dim).square().sum(1);
  };
  const auto draw = [&]() -> Batch { return {at::randn({kExamples, kWidth}, at::kDouble)}; };
  (void)calls(parameters_of(*model), loss, draw, 12);
  SampleGradients table(parameters_of(*model), {});
  for (int i = 0; i < 12; ++i) {
    table.clear();
    table.backward(loss, draw());
  }
  dim = 0;
  table.clear();
  EXPECT_THROW(table.backward(loss, draw()), UserError);
}

}  // namespace
}  // namespace gradus::persample
