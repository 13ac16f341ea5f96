#include <gradus/plane/grad/saved_numbers.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/plane/grad/internal/unpack_testing.h>
#include <gradus/plane/grad/operands.h>
#include <gradus/plane/saved/saved_plane.h>

namespace gradus::plane::grad {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::IsEmpty;
using testing::Not;

SavedNumbers numbers_of(const at::Tensor& tensor) {
  SavedNumbers numbers;
  read_saved_numbers(gradient_edge(tensor).node, numbers);
  return numbers;
}

at::Tensor leaf() { return torch::randn({4, 6}).requires_grad_(); }

struct Shift : torch::autograd::Function<Shift> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            std::int64_t by) {
    context->saved_data["by"] = by;
    context->save_for_backward({x});
    return x.roll(by, 0);
  }
  static std::vector<at::Tensor> backward(torch::autograd::AutogradContext* context,
                                          std::vector<at::Tensor> gradients) {
    return {gradients[0].roll(-context->saved_data["by"].toInt(), 0), at::Tensor()};
  }
};

TEST(SavedNumbersTest, DimensionsPlacesAndSizesAreToldApart) {
  const SavedNumbers roll = numbers_of(leaf().roll({3, 2}, {0, 1}));
  EXPECT_THAT(roll.dims, ElementsAre(0, 1));
  EXPECT_THAT(roll.places, ElementsAre(3, 2));
  const SavedNumbers slice = numbers_of(leaf().slice(1, 2, 5));
  EXPECT_THAT(slice.dims, ElementsAre(1));
  EXPECT_THAT(slice.sizes, ElementsAre(4, 6));
  EXPECT_THAT(slice.places, testing::UnorderedElementsAre(2, 5));
  EXPECT_THAT(numbers_of(leaf().select(1, 3)).places, ElementsAre(3));
  EXPECT_THAT(numbers_of(leaf().softmax(1)).dims, ElementsAre(1));
  EXPECT_THAT(numbers_of(leaf().view({2, 12})).sizes, ElementsAre(4, 6));
  EXPECT_THAT(numbers_of(leaf().mm(torch::ones({6, 2}))).places, IsEmpty());
}

TEST(SavedNumbersTest, WholeNumbersAndSignsCountAndFractionsDoNot) {
  EXPECT_EQ(numbers_of(leaf().pow(0.5)).exact, numbers_of(leaf().pow(0.7)).exact);
  EXPECT_NE(numbers_of(leaf().pow(0.5)).exact, numbers_of(leaf().pow(-0.5)).exact);
  EXPECT_NE(numbers_of(leaf().pow(2)).exact, numbers_of(leaf().pow(3)).exact);
  EXPECT_NE(numbers_of(at::gelu(leaf())).exact, numbers_of(at::gelu(leaf(), "tanh")).exact);
  EXPECT_NE(numbers_of(leaf().clamp(-1)).exact, numbers_of(leaf().clamp(-1, 1)).exact);
}

TEST(SavedNumbersTest, AWriteIntoAViewTellsWhere) {
  const auto written = [](std::int64_t row) {
    const at::Tensor all = torch::zeros({4, 6});
    all.select(0, row).copy_(leaf().select(0, 1));
    return numbers_of(all);
  };
  EXPECT_THAT(written(2).places, Contains(12));
  EXPECT_THAT(written(3).places, Not(Contains(12)));
}

TEST(SavedNumbersTest, ACustomFunctionShowsItsDataAndUnpacksNothingThatIsElsewhere) {
  EXPECT_EQ(numbers_of(Shift::apply(leaf(), 1)).exact, numbers_of(Shift::apply(leaf(), 1)).exact);
  EXPECT_NE(numbers_of(Shift::apply(leaf(), 1)).exact, numbers_of(Shift::apply(leaf(), 2)).exact);
  int unpacked = 0;
  const saved::Guard guard =
      saved::push(saved::Order::offload, std::make_shared<internal::UnpackCounter>(unpacked));
  const at::Tensor h = leaf().relu().softmax(1);
  for (const at::Tensor& each : {h, h.mm(h.t()), Shift::apply(h, 1)}) {
    for (const NodeView& node : walk({each})) {
      SavedNumbers numbers;
      read_saved_numbers(node, numbers);
    }
  }
  EXPECT_EQ(unpacked, 0);
}

TEST(ChoiceTest, TellsAlongWhichDimensionsValuesChoose) {
  const at::Tensor x = leaf();
  const auto dims = [](const at::Tensor& tensor, std::size_t edge = 0) {
    return as_choice(gradient_edge(tensor).node, edge)->dims;
  };
  using Dims = std::vector<std::int64_t>;
  const at::Tensor rows = torch::tensor({0, 1});
  EXPECT_EQ(dims(x.gather(1, torch::zeros({4, 2}, at::kLong))), Dims{1});
  EXPECT_EQ(dims(x.index({rows})), Dims{0});
  EXPECT_EQ(dims(x.index({torch::indexing::Slice(), rows})), Dims{1});
  EXPECT_EQ(dims(x.index({x > 0})), std::nullopt);
  EXPECT_EQ(dims(x.masked_select(x > 0)), std::nullopt);
  EXPECT_EQ(dims(x.mm(x.t()), 0), Dims{-1});
  EXPECT_EQ(dims(x.mm(x.t()), 1), Dims{-2});
  EXPECT_EQ(dims(torch::addmm(x.select(0, 0), x, torch::ones({6, 6})), 1), Dims{-1});
  EXPECT_EQ(dims(torch::embedding(x, rows)), Dims{0});
  EXPECT_EQ(dims(std::get<0>(x.max(1))), Dims{1});
  EXPECT_EQ(dims(x.max()), std::nullopt);
  EXPECT_EQ(as_choice(gradient_edge(x.masked_fill(x > 0, 1)).node, 0), std::nullopt);
  EXPECT_EQ(as_choice(gradient_edge(x.softmax(1)).node, 0), std::nullopt);
  EXPECT_TRUE(as_choice(gradient_edge(x.index({rows})).node, 0)->by_saved);
  EXPECT_FALSE(as_choice(gradient_edge(std::get<0>(x.sort(1))).node, 0)->by_saved);
}

TEST(BackwardRowsTest, HooksWhereWaysMeetGetEachRowsSum) {
  const at::Tensor w = torch::randn({3}, at::kDouble).requires_grad_();
  const at::Tensor turned = w.clone();
  turned.register_hook([](const at::Tensor& g) { return g.clamp(-1, 1); });
  const at::Tensor a = turned * 2, b = turned * 3;
  const at::Tensor rows = torch::tensor({{0.1, -0.1, 1.0}, {5.0, 0.0, -5.0}}, at::kDouble);
  const auto given =
      backward_rows({gradient_edge(a), gradient_edge(b)}, {rows, rows}, {gradient_edge(w)});
  ASSERT_EQ(given.size(), 1u);
  EXPECT_TRUE(given[0].allclose((rows * 5).clamp(-1, 1)));
}

}  // namespace
}  // namespace gradus::plane::grad
