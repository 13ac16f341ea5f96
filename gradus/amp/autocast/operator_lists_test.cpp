#include <gradus/amp/autocast/operator_lists.h>

#include <functional>
#include <set>
#include <sstream>

#include <ATen/core/dispatch/Dispatcher.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <gradus/base/error.h>

#include <tests/support/message_of.h>

namespace gradus::amp {
namespace {

using testing::HasSubstr;
using tests::message_of;

TEST(OperatorListsTest, OfTorchAreThoseThatThisLibTorchRegisters) {
  for (const auto& [device, key] :
       {std::pair(c10::DeviceType::CPU, c10::DispatchKey::AutocastCPU),
        std::pair(c10::DeviceType::CUDA, c10::DispatchKey::AutocastCUDA)}) {
    SCOPED_TRACE(c10::DeviceTypeName(device));
    const auto lists = OperatorLists::of_torch(device);
    std::set<std::string> registered;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findOp(name);
      if (!op || !op->hasSchema() || !op->hasKernelForDispatchKey(key)) continue;
      registered.insert(name.name);
      EXPECT_NE(lists.policy(c10::toString(name)), Policy::none) << name;
    }
    EXPECT_GT(registered.size(), 100);
    for (const auto policy : {Policy::lower_precision, Policy::fp32, Policy::fp32_result,
                              Policy::widest, Policy::banned}) {
      for (const auto& name : lists.operators(policy)) {
        EXPECT_TRUE(registered.contains(name.substr(0, name.find('.')))) << name;
      }
    }
  }
}

TEST(OperatorListsTest, DefaultsExtendTheCpusListByWhatIsSensitive) {
  const auto torch = OperatorLists::of_torch(c10::DeviceType::CPU);
  const auto ours = OperatorLists::defaults(c10::DeviceType::CPU, c10::ScalarType::BFloat16);
  for (const auto* name : {"softmax", "sum", "exp", "layer_norm", "pow", "norm.Scalar", "mean"}) {
    EXPECT_EQ(torch.policy(name), Policy::none) << name;
    EXPECT_TRUE(ours.policy(name) == Policy::fp32 || ours.policy(name) == Policy::fp32_result)
        << name;
  }
  for (const auto& name : torch.operators(Policy::lower_precision)) {
    EXPECT_EQ(ours.policy(name), Policy::lower_precision) << name;
  }
  EXPECT_EQ(ours.policy("binary_cross_entropy"), Policy::fp32);
  const auto half = OperatorLists::defaults(c10::DeviceType::CPU, c10::ScalarType::Half);
  EXPECT_EQ(half.policy("binary_cross_entropy"), Policy::banned);
  EXPECT_EQ(half.policy("masked_fill"), Policy::fp32);
  EXPECT_THROW(OperatorLists::defaults(c10::DeviceType::CPU, c10::ScalarType::Float), UserError);
}

TEST(OperatorListsTest, AreReadAndPrintedSorted) {
  OperatorLists lists;
  EXPECT_EQ(lists.text(), "");
  lists.set("mm", Policy::lower_precision).set("aten::bmm", Policy::lower_precision);
  lists.set("sum.dim_IntList", Policy::fp32_result).set("exp", Policy::none);
  std::ostringstream out;
  out << lists;
  EXPECT_EQ(out.str(),
            "lower_precision: aten::bmm, aten::mm\n"
            "fp32_result: aten::sum.dim_IntList\n"
            "none: aten::exp\n");
  EXPECT_EQ(lists.policy("sum"), Policy::none);
  EXPECT_EQ(lists.policy("sum.dim_IntList"), Policy::fp32_result);
}

TEST(OperatorListsTest, ACopyKeepsWhatTheOriginalHad) {
  auto lists = OperatorLists::defaults(c10::DeviceType::CPU, c10::ScalarType::BFloat16);
  const auto copy = lists;
  EXPECT_EQ(lists, copy);
  lists.set("linear", Policy::none);
  EXPECT_NE(lists, copy);
  EXPECT_EQ(copy.policy("linear"), Policy::lower_precision);
}

TEST(OperatorListsTest, RefusesUnknownNamesAndNamesNearOnes) {
  OperatorLists lists;
  EXPECT_THAT(message_of([&] { lists.set("linearr", Policy::fp32); }),
              testing::AllOf(HasSubstr("got 'linearr'"), HasSubstr("aten::linear")));
  EXPECT_THAT(message_of([&] { lists.set("aten::sum.dimm", Policy::fp32); }),
              HasSubstr("aten::sum.dim_IntList"));
  EXPECT_THAT(message_of([&] { lists.policy("mylib::thing"); }), HasSubstr("once it is loaded"));
  EXPECT_THAT(message_of([&] { lists.set("mm", Policy::fp32_result); }),
              HasSubstr("aten::mm has none. Use fp32"));
  EXPECT_EQ(lists, OperatorLists());
}

}  // namespace
}  // namespace gradus::amp
