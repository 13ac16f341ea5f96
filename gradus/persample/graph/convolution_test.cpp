#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <gradus/base/error.h>
#include <gradus/base/memory_tracker.h>
#include <gradus/persample/graph/convolution_term.h>
#include <gradus/persample/graph/graph_gradients.h>
#include <gradus/persample/graph/internal/loop_testing.h>
#include <gradus/persample/graph/internal/patches.h>

namespace gradus::persample {
namespace {

using at::Tensor;
using internal::relative;
namespace nn = torch::nn;
using Form = ConvolutionTerm::Form;
using Norms = ConvolutionTerm::Norms;
using Integers = std::vector<std::int64_t>;

constexpr double kTolerance = 1e-9;

// One layer, with what its backward pass needs. `run` is the layer on a batch of images.
struct Case {
  Integers kernel{};
  Integers stride{};
  Integers padding{};
  Integers dilation{};
  Integers output_padding{};
  std::int64_t groups = 1;
  bool transposed = false;
  Tensor input{};  // [N, C, *extents]
  Tensor weight{};
  Tensor bias{};

  Tensor run(const Tensor& images) const {
    return at::convolution(images, weight, bias, stride, padding, dilation, transposed,
                           output_padding, groups);
  }
  std::string describe() const {
    return base::join(
        "kernel ", at::IntArrayRef(kernel), " stride ", at::IntArrayRef(stride), " padding ",
        at::IntArrayRef(padding), " dilation ", at::IntArrayRef(dilation), " output padding ",
        at::IntArrayRef(output_padding), " groups ", groups, transposed ? " transposed" : "",
        " input ", input.sizes(), " weight ", weight.sizes());
  }
};

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_(seed) {}
  std::int64_t operator()(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine_);
  }

 private:
  std::mt19937_64 engine_;
};

Case random_case(Dice& dice, std::int64_t images) {
  Case made;
  const std::int64_t dims = dice(1, 3);
  made.transposed = dice(0, 2) == 0;
  made.groups = dice(0, 2) == 0 ? dice(2, 3) : 1;
  const std::int64_t in = made.groups * dice(1, 3);
  const std::int64_t out = made.groups * dice(1, 3);
  Integers sizes{images, in};
  for (std::int64_t dim = 0; dim < dims; ++dim) {
    const std::int64_t kernel = dice(1, 3);
    const std::int64_t stride = dice(1, 3);
    const std::int64_t dilation = dice(1, 2);
    const std::int64_t padding = dice(0, 2);
    const std::int64_t reach = dilation * (kernel - 1) + 1;
    std::int64_t least = made.transposed ? 1 : std::max<std::int64_t>(1, reach - 2 * padding);
    if (made.transposed) {  // an output of at least one element
      while ((least - 1) * stride - 2 * padding + reach < 1) ++least;
    }
    made.kernel.push_back(kernel);
    made.stride.push_back(stride);
    made.dilation.push_back(dilation);
    made.padding.push_back(padding);
    made.output_padding.push_back(made.transposed ? dice(0, std::max(stride, dilation) - 1) : 0);
    sizes.push_back(least + dice(0, dims == 3 ? 2 : 5));
  }
  Integers weight =
      made.transposed ? Integers{in, out / made.groups} : Integers{out, in / made.groups};
  weight.insert(weight.end(), made.kernel.begin(), made.kernel.end());
  made.input = at::randn(sizes, at::kDouble);
  made.weight = at::randn(weight, at::kDouble).requires_grad_();
  made.bias = at::randn({out}, at::kDouble).requires_grad_();
  return made;
}

// The loss of each example: images of one example lie `step` apart in the batch.
enum class Fold : std::uint8_t { none, inner, time_major };

Tensor by_example(const Tensor& images, std::int64_t examples, Fold fold) {
  if (fold == Fold::time_major) return images.unflatten(0, {-1, examples}).transpose(0, 1);
  return images.unflatten(0, {examples, -1});
}

Tensor losses_of(const Case& layer, const Tensor& cotangent, std::int64_t examples, Fold fold) {
  const Tensor output = layer.run(layer.input);
  return by_example((output * cotangent).tanh(), examples, fold).flatten(1).sum(1);
}

struct Wanted {
  Tensor weight{};
  Tensor bias{};
};

Wanted loop(const Case& layer, const Tensor& cotangent, std::int64_t examples, Fold fold) {
  const Tensor inputs = by_example(layer.input, examples, fold);
  const Tensor cotangents = by_example(cotangent, examples, fold);
  std::vector<Tensor> weights;
  std::vector<Tensor> biases;
  for (std::int64_t b = 0; b < examples; ++b) {
    const Tensor loss = (layer.run(inputs[b]) * cotangents[b]).tanh().sum();
    const auto gradients = torch::autograd::grad({loss}, {layer.weight, layer.bias});
    weights.push_back(gradients[0]);
    biases.push_back(gradients[1]);
  }
  return {at::stack(weights), at::stack(biases)};
}

TEST(ConvolutionTest, EveryWayEqualsTheLoopForRandomLayers) {
  at::set_num_threads(1);
  at::manual_seed(11);
  Dice dice(12);
  for (int trial = 0; trial < internal::random_trials(); ++trial) {
    const std::int64_t examples = dice(1, 4);
    const std::int64_t images = dice(1, 3);
    const Case layer = random_case(dice, examples * images);
    SCOPED_TRACE(base::join("trial ", trial, " ", layer.describe()));
    const Tensor output = layer.run(layer.input).detach();
    const Tensor gradient = at::randn_like(output);
    // Images folded either way, as views.
    const Fold fold = dice(0, 1) == 0 ? Fold::inner : Fold::time_major;
    const Tensor inputs = by_example(layer.input, examples, fold);
    const Tensor gradients = by_example(gradient, examples, fold);
    std::vector<Tensor> rows;
    for (std::int64_t b = 0; b < examples; ++b) {
      rows.push_back(
          torch::autograd::grad({layer.run(inputs[b])}, {layer.weight}, {gradients[b]})[0]);
    }
    const Tensor want = at::stack(rows);
    Correlation correlation{.kernel = layer.kernel,
                            .stride = layer.stride,
                            .padding = layer.padding,
                            .dilation = layer.dilation,
                            .groups = layer.groups};
    bool fits = true;  // else the rule pads; see the test by the graph below
    for (std::size_t dim = 0; layer.transposed && dim < layer.kernel.size(); ++dim) {
      fits = fits && layer.output_padding[dim] < layer.stride[dim];
    }
    if (!fits) continue;
    ConvolutionTerm term(layer.transposed ? gradients : inputs,
                         layer.transposed ? inputs : gradients, correlation);
    EXPECT_EQ(at::IntArrayRef(term.sizes()), layer.weight.sizes());
    for (const Form way : {Form::unfold, Form::convolution}) {
      EXPECT_LE(relative(term.form(way), want), kTolerance) << static_cast<int>(way);
    }
    const Tensor squared = want.flatten(1).square().sum(1);
    for (const Norms way : {Norms::patches, Norms::positions, Norms::forget}) {
      EXPECT_LE(relative(term.squared_norms(way), squared), kTolerance) << static_cast<int>(way);
    }
    const Tensor weights = at::randn({examples}, at::kDouble);
    const Tensor sum = at::tensordot(weights, want, {0}, {0});
    EXPECT_LE(relative(term.weighted_sum(weights), sum), kTolerance);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(ConvolutionTest, GraphEqualsTheLoopForRandomLayersAndFoldedBatches) {
  at::set_num_threads(1);
  at::manual_seed(21);
  Dice dice(22);
  for (int trial = 0; trial < internal::random_trials(); ++trial) {
    const Fold fold = std::vector{Fold::none, Fold::inner,
                                  Fold::time_major}[static_cast<std::size_t>(dice(0, 2))];
    const std::int64_t examples = dice(2, 4);
    const Case layer = random_case(dice, examples * (fold == Fold::none ? 1 : dice(2, 3)));
    SCOPED_TRACE(
        base::join("trial ", trial, " fold ", static_cast<int>(fold), " ", layer.describe()));
    const Tensor cotangent = at::randn_like(layer.run(layer.input).detach());
    const Wanted want = loop(layer, cotangent, examples, fold);
    GraphGradients table({{"weight", layer.weight}, {"bias", layer.bias}},
                         {.keep = dice(0, 1) == 0 ? Keep::factors : Keep::cheapest,
                          .reproducible = dice(0, 1) == 0});
    table.backward(losses_of(layer, cotangent, examples, fold));
    EXPECT_LE(relative(table.gradients(0), want.weight), kTolerance);
    EXPECT_LE(relative(table.gradients(1), want.bias), kTolerance);
    EXPECT_LE(relative(table.norms(0), want.weight.flatten(1).norm(2, 1)), kTolerance);
    const Tensor weights = at::rand({examples}, at::kDouble);
    EXPECT_LE(
        relative(table.weighted_sum(0, weights), at::tensordot(weights, want.weight, {0}, {0})),
        kTolerance);
    for (const std::string& line : table.explain()) {
      EXPECT_THAT(line, testing::Not(testing::HasSubstr("by its own formula")));
    }
    if (testing::Test::HasFailure()) return;
  }
}

TEST(ConvolutionTest, LargePositionGramsInBlocksEqualFormedNorms) {
  at::set_num_threads(1);
  at::manual_seed(31);
  const Tensor wide = at::randn({3, 1, 4, 17, 18}, at::kDouble);
  for (const std::int64_t stride : {1, 2}) {
    const Tensor narrow =
        at::randn({3, 1, 5, stride == 1 ? 17 : 9, stride == 1 ? 18 : 9}, at::kDouble);
    const ConvolutionTerm term(
        wide, narrow,
        {.kernel = {3, 3}, .stride = {stride, stride}, .padding = {1, 1}, .dilation = {1, 1}});
    const Tensor want = term.form(Form::convolution).flatten(1).square().sum(1);
    EXPECT_LE(relative(term.squared_norms(Norms::positions), want), kTolerance);
    EXPECT_LE(relative(term.squared_norms(Norms::patches), want), kTolerance);
  }
}

TEST(ConvolutionTest, GathersWindowsAlikeByItsKernelAndByOperators) {
  at::manual_seed(41);
  Dice dice(42);
  for (int trial = 0; trial < 100; ++trial) {
    const Tensor values = at::randn({2, dice(1, 2), 3, dice(1, 4), dice(1, 5), dice(1, 6)});
    const internal::Triple stride{dice(1, 3), dice(1, 3), dice(1, 4)};
    const internal::Triple extents{dice(1, 3), dice(1, 4), dice(1, 5)};
    std::vector<internal::Triple> offsets;
    for (int i = 0; i < 3; ++i) offsets.push_back({dice(-6, 6), dice(-6, 6), dice(-8, 8)});
    EXPECT_TRUE(at::equal(internal::gather_windows(values, stride, offsets, extents),
                          internal::gather_windows_by_operators(values, stride, offsets, extents)));
  }
}

ConvolutionTerm typical_term(at::ScalarType type, std::int64_t examples) {
  at::manual_seed(51);
  const Tensor wide = at::randn({examples, 1, 16, 20, 20}).to(type);
  const Tensor narrow = at::randn({examples, 1, 24, 20, 20}).to(type);
  return {
      wide, narrow, {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}, .dilation = {1, 1}}};
}

TEST(ConvolutionTest, SinglePrecisionAgreesWithDouble) {
  at::set_num_threads(1);
  const ConvolutionTerm term = typical_term(at::kFloat, 3);
  const ConvolutionTerm oracle = typical_term(at::kDouble, 3);
  const Tensor want = oracle.form(Form::convolution);
  const Tensor squared = want.flatten(1).square().sum(1);
  for (const Form way : {Form::unfold, Form::convolution}) {
    EXPECT_EQ(term.form(way).scalar_type(), at::kFloat);
    EXPECT_LE(relative(term.form(way), want), 1e-5);
  }
  for (const Norms way : {Norms::patches, Norms::positions, Norms::forget}) {
    EXPECT_LE(relative(term.squared_norms(way), squared), 1e-5);
  }
  const Tensor weights = at::rand({3});
  EXPECT_LE(relative(term.weighted_sum(weights), oracle.weighted_sum(weights)), 1e-5);
}

TEST(ConvolutionTest, SixteenBitFactorsAreSummedInSinglePrecision) {
  at::set_num_threads(1);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const ConvolutionTerm term = typical_term(type, 3);
    // The oracle has the same rounded factors, so that only the sums differ.
    at::manual_seed(51);
    const Tensor rounded_wide = at::randn({3, 1, 16, 20, 20}).to(type).to(at::kDouble);
    const Tensor rounded_narrow = at::randn({3, 1, 24, 20, 20}).to(type).to(at::kDouble);
    const ConvolutionTerm oracle(
        rounded_wide, rounded_narrow,
        {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}, .dilation = {1, 1}});
    const Tensor want = oracle.form(Form::convolution);
    for (const Form way : {Form::unfold, Form::convolution}) {
      EXPECT_EQ(term.form(way).scalar_type(), at::kFloat);
      EXPECT_LE(relative(term.form(way), want), 1e-5);
    }
    for (const Norms way : {Norms::patches, Norms::positions, Norms::forget}) {
      EXPECT_LE(relative(term.squared_norms(way), want.flatten(1).square().sum(1)), 1e-5);
    }
    const Tensor weights = at::rand({3});
    EXPECT_EQ(term.weighted_sum(weights).scalar_type(), at::kFloat);
    EXPECT_LE(relative(term.weighted_sum(weights), oracle.weighted_sum(weights)), 1e-5);
  }
}

std::int64_t extra_bytes(const std::function<Tensor()>& work) {
  auto& tracker = base::MemoryTracker::install();
  work();
  const std::int64_t before = tracker.live().total();
  tracker.reset_peak();
  const Tensor result = work();
  return tracker.peak().total() - before - static_cast<std::int64_t>(result.nbytes());
}

TEST(ConvolutionTest, ConvolutionFormTakesLessMemoryThanPatches) {
  at::set_num_threads(1);
  at::manual_seed(61);
  const Tensor wide = at::randn({4, 1, 8, 64, 64});
  const Tensor narrow = at::randn({4, 1, 8, 64, 64});
  const ConvolutionTerm term(
      wide, narrow, {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}, .dilation = {1, 1}});
  const std::int64_t by_patches = extra_bytes([&] { return term.form(Form::unfold); });
  const std::int64_t by_convolution = extra_bytes([&] { return term.form(Form::convolution); });
  const std::int64_t patches_of_one = std::int64_t{8} * 9 * 64 * 64 * 4;
  EXPECT_GE(by_patches, patches_of_one);
  EXPECT_LE(by_patches, patches_of_one * 3 / 2) << "only a few examples are unfolded at once";
  // The operator may copy one example's factors, but unfolds nothing.
  EXPECT_LE(by_convolution, patches_of_one / 4);
}

TEST(ConvolutionTest, ChoosesGramMatricesForFewPositionsAndGradientsForMany) {
  const auto term = [](std::int64_t channels, std::int64_t extent) {
    return ConvolutionTerm(
        at::zeros({2, 1, channels, extent, extent}), at::zeros({2, 1, channels, extent, extent}),
        {.kernel = {3, 3}, .stride = {1, 1}, .padding = {1, 1}, .dilation = {1, 1}});
  };
  const ConvolutionTerm deep = term(256, 4);
  EXPECT_NE(deep.norms_way(), Norms::forget);
  EXPECT_LT(deep.norm_operations(), deep.form_operations() / 10);
  const ConvolutionTerm shallow = term(8, 32);
  EXPECT_EQ(shallow.norms_way(), Norms::forget);
}

TEST(ConvolutionTest, MeasuredChoiceIsRememberedAndChangesNoValue) {
  at::set_num_threads(1);
  ConvolutionTerm term = typical_term(at::kDouble, 3);
  const Tensor want = term.squared_norms();
  const Tensor gradients = term.form();
  term.choose_by_measurement();
  EXPECT_LE(relative(term.squared_norms(), want), kTolerance);
  EXPECT_LE(relative(term.form(), gradients), kTolerance);
  ConvolutionTerm again = typical_term(at::kDouble, 3);
  again.choose_by_measurement();
  EXPECT_EQ(again.form_way(), term.form_way());
  EXPECT_EQ(again.norms_way(), term.norms_way());
}

// P11, P3, and a use of images of other sizes, which cannot be joined.
TEST(ConvolutionTest, ModulesUsedSeveralTimesEqualTheLoop) {
  at::set_num_threads(1);
  at::manual_seed(71);
  nn::Conv2d layer(nn::Conv2dOptions(3, 3, {3, 1}).padding({1, 0}).stride({1, 1}).dilation({1, 2}));
  nn::Conv2d odd(nn::Conv2dOptions(3, 4, {3, 1}).padding({1, 0}).stride({2, 1}).dilation({1, 2}));
  layer->to(at::kDouble);
  odd->to(at::kDouble);
  const Tensor input = at::randn({4, 3, 6, 5}, at::kDouble);
  std::vector<NamedParameter> parameters;
  for (const auto& [prefix, module] :
       std::vector<std::pair<std::string, std::shared_ptr<nn::Module>>>{{"layer", layer.ptr()},
                                                                        {"odd", odd.ptr()}}) {
    for (const auto& each : module->named_parameters()) {
      parameters.push_back({prefix + "." + each.key(), each.value()});
    }
  }
  for (const bool same_extents : {true, false}) {
    const auto losses = [&](const Tensor& images) {
      Tensor hidden = layer(images).tanh();
      if (!same_extents) hidden = hidden.narrow(2, 0, 4);
      return odd(layer(hidden).tanh()).tanh().flatten(1).sum(1);
    };
    for (const Keep keep : {Keep::factors, Keep::formed, Keep::cheapest}) {
      GraphGradients table(parameters, {.keep = keep});
      table.backward(losses(input));
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        SCOPED_TRACE(parameters[i].name);
        std::vector<Tensor> rows;
        for (std::int64_t b = 0; b < 4; ++b) {
          rows.push_back(torch::autograd::grad({losses(input.narrow(0, b, 1)).sum()},
                                               {parameters[i].tensor})[0]);
        }
        const Tensor want = at::stack(rows);
        EXPECT_LE(relative(table.gradients(i), want), kTolerance);
        EXPECT_LE(relative(table.norms(i), want.flatten(1).norm(2, 1)), kTolerance);
      }
    }
  }
}

TEST(ConvolutionTest, PaddingModesAndReshapedWeightsEqualTheLoop) {
  at::set_num_threads(1);
  at::manual_seed(81);
  const Tensor input = at::randn({3, 2, 7, 6}, at::kDouble);
  const Tensor flat = at::randn({4, 2 * 2 * 3}, at::kDouble).requires_grad_();
  const std::vector<std::function<Tensor(const Tensor&)>> models = {
      [&](const Tensor& images) {
        return at::conv2d(at::reflection_pad2d(images, {1, 1, 2, 0}), flat.view({4, 2, 2, 3}));
      },
      [&](const Tensor& images) {
        return at::conv2d(at::pad(images, {2, 1, 1, 1}, "circular"), flat.view({4, 2, 2, 3}));
      },
      [&](const Tensor& images) {
        return at::conv2d(images, flat.view({4, 2, 2, 3}), {}, at::IntArrayRef{1, 1}, "same");
      },
      [&](const Tensor& images) {
        return at::conv2d(images.contiguous(at::MemoryFormat::ChannelsLast),
                          flat.view({4, 2, 2, 3}), {}, 2);
      },
      [&](const Tensor& images) {  // unbatched, one image after another
        std::vector<Tensor> outputs;
        for (const Tensor& image : images.unbind()) {
          outputs.push_back(at::conv2d(image, flat.view({4, 2, 2, 3})));
        }
        return at::stack(outputs);
      }};
  for (std::size_t i = 0; i < models.size(); ++i) {
    SCOPED_TRACE(i);
    const auto losses = [&](const Tensor& images) {
      return models[i](images).tanh().flatten(1).sum(1);
    };
    std::vector<Tensor> rows;
    for (std::int64_t b = 0; b < 3; ++b) {
      rows.push_back(torch::autograd::grad({losses(input.narrow(0, b, 1)).sum()}, {flat})[0]);
    }
    const Tensor want = at::stack(rows);
    for (const Keep keep : {Keep::factors, Keep::formed, Keep::cheapest}) {
      GraphGradients table({{"flat", flat}}, {.keep = keep});
      table.backward(losses(input));
      EXPECT_LE(relative(table.gradients(0), want), kTolerance);
      EXPECT_LE(relative(table.norms(0), want.flatten(1).norm(2, 1)), kTolerance);
      const Tensor weights = at::rand({3}, at::kDouble);
      EXPECT_LE(relative(table.weighted_sum(0, weights), at::tensordot(weights, want, {0}, {0})),
                kTolerance);
    }
  }
}

TEST(ConvolutionTest, RefusesFactorsThatDoNotFit) {
  const auto term = [](Integers wide, Integers narrow, std::int64_t groups) {
    return ConvolutionTerm(
        at::zeros(wide), at::zeros(narrow),
        {.kernel = {3}, .stride = {1}, .padding = {0}, .dilation = {1}, .groups = groups});
  };
  EXPECT_NO_THROW(term({2, 1, 4, 6}, {2, 1, 4, 4}, 1));
  EXPECT_THROW(term({2, 1, 4, 6}, {2, 1, 4, 5}, 1), UserError);
  EXPECT_THROW(term({2, 1, 4, 6}, {3, 1, 4, 4}, 1), UserError);
  EXPECT_THROW(term({2, 1, 4, 6}, {2, 1, 4, 4}, 3), UserError);
}

}  // namespace
}  // namespace gradus::persample
