#!/usr/bin/env python3
"""Tests check_layers.py on small trees, one for each rule."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

import check_layers


class CheckLayersTest(unittest.TestCase):
    def setUp(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)
        self.root = pathlib.Path(self._folder.name).resolve()
        # A clean tree of two modules: base below accumulate.
        self.write("gradus/base/CMakeLists.txt", "gradus_module(base HEADERS error.h TESTS error_test.cpp)")
        self.write("gradus/base/error.h", "#pragma once\n#include <string>\n")
        self.write("gradus/base/error_test.cpp", "#include <gradus/base/error.h>\n")
        self.write("docs/base.md", "# base\n")
        self.write(
            "gradus/accumulate/CMakeLists.txt",
            "gradus_module(accumulate HEADERS window.h TESTS window_test.cpp DEPS gradus::base)",
        )
        self.write("gradus/accumulate/window.h", "#pragma once\n#include <gradus/base/error.h>\n")
        self.write("gradus/accumulate/window_test.cpp", "#include <gradus/accumulate/window.h>\n")
        self.write("docs/accumulate.md", "# accumulate\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")

    def add_module(self, module: str, name: str, text: str) -> None:
        """Adds a module of one file, with its page and an empty test."""
        self.write(f"gradus/{module}/CMakeLists.txt", f"gradus_module({module} SOURCES {name} TESTS a_test.cpp)")
        self.write(f"gradus/{module}/{name}", text)
        self.write(f"gradus/{module}/a_test.cpp", "")
        self.write(f"docs/{module.replace('/', '_')}.md", "")

    def problems(self) -> list[str]:
        return check_layers.Checker(self.root).run()

    def test_accepts_a_clean_tree(self) -> None:
        self.assertEqual(self.problems(), [])

    def test_rejects_an_upward_include_with_its_line(self) -> None:
        self.write("gradus/base/error.h", "#pragma once\n\n#  include <gradus/accumulate/window.h>\n")
        self.assertEqual(
            self.problems(),
            ["gradus/base/error.h:3: includes upward: base/ is below accumulate/ (<gradus/accumulate/window.h>)"],
        )

    def test_rejects_an_upward_include_written_with_quotes(self) -> None:
        self.write("gradus/base/error.h", '#include "gradus/accumulate/window.h"\n')
        self.assertIn("includes upward", self.problems()[0])

    def test_rejects_an_upward_cmake_dependency(self) -> None:
        self.write(
            "gradus/base/CMakeLists.txt",
            "gradus_module(base HEADERS error.h TESTS error_test.cpp\n  DEPS gradus::accumulate)",
        )
        self.assertEqual(self.problems(), ["gradus/base/CMakeLists.txt:2: depends upward: base/ is below accumulate/"])

    def test_orders_the_folders_of_one_group_too(self) -> None:
        self.add_module("plane/op", "mode.cpp", "#include <gradus/plane/grad/walk.h>\n")
        self.assertIn("plane/op/ is below plane/grad/", self.problems()[0])

    def test_rejects_private_headers_of_another_folder_but_not_of_its_own(self) -> None:
        self.write("gradus/base/internal/clock.h", "")
        self.write("gradus/base/error_test.cpp", "#include <gradus/base/internal/clock.h>\n")
        self.assertEqual(self.problems(), [])
        self.write("gradus/accumulate/window_test.cpp", "#include <gradus/base/internal/clock.h>\n")
        self.assertEqual(
            self.problems(),
            ["gradus/accumulate/window_test.cpp:1: <gradus/base/internal/clock.h> is private to base/"],
        )

    def test_rejects_models_that_use_gradus_at_all(self) -> None:
        self.add_module("models", "gpt.cpp", "#include <gradus/base/error.h>\n")
        self.assertIn("models/ knows nothing of gradus", self.problems()[0])

    def test_rejects_internal_headers_outside_the_planes(self) -> None:
        for header in (
            "torch/csrc/autograd/engine.h",
            "torch/csrc/autograd/saved_variable_hooks.h",
            "torch/csrc/autograd/function.h",
            "torch/csrc/autograd/generated/Functions.h",
            "c10/core/impl/LocalDispatchKeySet.h",
        ):
            with self.subTest(header=header):
                self.write("gradus/accumulate/window_test.cpp", f"#include <{header}>\n")
                self.assertIn(f"<{header}> is LibTorch's internal", self.problems()[0])

    def test_rejects_internal_names_outside_the_planes(self) -> None:
        for code in (
            "c10::impl::ExcludeDispatchKeyGuard guard(key);",
            "c10::impl::IncludeDispatchKeyGuard g(key);",
            "auto key = c10::DispatchKey::TESTING_ONLY_GenericMode;",
            "at::AutoDispatchBelowAutograd guard;",
            "auto keys = c10::impl::tls_local_dispatch_key_set();",
        ):
            with self.subTest(code=code):
                self.write("gradus/accumulate/window_test.cpp", f"\n{code}\n")
                self.assertEqual(len(self.problems()), 1)
                self.assertIn("window_test.cpp:2:", self.problems()[0])

    def test_rejects_internals_in_the_tools(self) -> None:
        self.write("tools/gradus.cpp", "#include <torch/csrc/autograd/engine.h>\n")
        self.assertIn("tools/gradus.cpp:1:", self.problems()[0])

    def test_allows_internals_in_the_planes_and_public_neighbours_elsewhere(self) -> None:
        self.add_module(
            "plane/op",
            "mode.cpp",
            "#include <torch/csrc/autograd/engine.h>\n"
            "c10::impl::ExcludeDispatchKeyGuard guard(c10::DispatchKey::TESTING_ONLY_GenericMode);\n",
        )
        self.write(
            "gradus/accumulate/window_test.cpp",
            "#include <torch/csrc/autograd/autograd.h>\n#include <torch/csrc/autograd/grad_mode.h>\n",
        )
        self.assertEqual(self.problems(), [])

    def test_ignores_names_in_comments_and_strings(self) -> None:
        self.write(
            "gradus/accumulate/window_test.cpp",
            '// TESTING_ONLY_GenericMode\n/* ExcludeDispatchKeyGuard\n*/ const char* a = "IncludeDispatchKeyGuard";\n',
        )
        self.assertEqual(self.problems(), [])

    def test_rejects_torch_h_in_a_header_but_not_in_a_source(self) -> None:
        self.write("gradus/accumulate/window.h", "#include <torch/torch.h>\n")
        self.write("gradus/accumulate/window_test.cpp", "#include <torch/torch.h>\n")
        self.assertEqual(
            self.problems(),
            ["gradus/accumulate/window.h:1: a library header includes torch/torch.h: include what it uses instead"],
        )

    def test_rejects_a_module_without_page_or_test(self) -> None:
        (self.root / "docs/base.md").unlink()
        (self.root / "gradus/base/error_test.cpp").unlink()
        self.assertEqual(
            self.problems(),
            [
                "gradus/base/CMakeLists.txt:1: base/ has no page docs/base.md",
                "gradus/base/CMakeLists.txt:1: base/ has no test (*_test.cpp)",
            ],
        )

    def test_rejects_a_file_that_cmake_does_not_name(self) -> None:
        self.write("gradus/base/clock_test.cpp", "")
        self.assertIn("does not name it", self.problems()[0])

    def test_rejects_a_folder_in_no_layer(self) -> None:
        self.write("gradus/utils/CMakeLists.txt", "gradus_module(utils SOURCES a.cpp)")
        self.assertIn("utils/ is in no layer", self.problems()[0])

    def test_rejects_the_umbrella_header_inside_the_library(self) -> None:
        self.write("gradus/accumulate/window.h", "#include <gradus/gradus.h>\n")
        self.assertIn("for programs only", self.problems()[0])

    def test_skips_a_module_that_is_only_planned(self) -> None:
        self.write("gradus/train/CMakeLists.txt", "# gradus_module(train ...)\n")
        self.assertEqual(self.problems(), [])


if __name__ == "__main__":
    unittest.main()
