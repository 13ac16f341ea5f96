#include <gradus/data/python_data.h>

#include <gtest/gtest.h>

#include <gradus/data/internal/temporary_folder.h>

#include <tests/support/message_of.h>

namespace gradus::data {
namespace {

using tests::message_of;

const PythonDataFile kFile{"some-package==1.2", "some_package/data/table.csv"};

TEST(PythonDataTest, FindsTheFileInTheFirstEnvironmentThatHasIt) {
  const internal::TemporaryFolder folder;
  folder.write("empty/lib/python3.11/site-packages/other/x", "");
  const std::string older =
      folder.write("a/lib/python3.10/site-packages/some_package/data/table.csv", "1");
  const std::string second =
      folder.write("b/lib/python3.12/site-packages/some_package/data/table.csv", "2");
  const auto find = [&](std::vector<std::string> names) {
    for (std::string& name : names) name = folder.path() + "/" + name;
    return find_python_data(kFile, names);
  };
  EXPECT_EQ(find({"missing", "empty", "a", "b"}), older);
  EXPECT_EQ(find({"b", "a"}), second);
}

TEST(PythonDataTest, NamesThePackageAndTheCommandWhereNoneHasIt) {
  EXPECT_EQ(message_of([] { find_python_data(kFile, {"/nowhere/venv"}); }),
            "[data] 'table.csv' is part of the Python package some-package==1.2, which must be "
            "installed; looked in '/nowhere/venv'. Install it: scripts/setup.sh --data, or: "
            "/nowhere/venv/bin/pip install --no-deps some-package==1.2");
  EXPECT_NE(message_of([] { find_python_data(kFile, {}); }).find("looked in no environment"),
            std::string::npos);
}

}  // namespace
}  // namespace gradus::data
