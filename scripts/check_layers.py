#!/usr/bin/env python3
"""Checks the rules that keep gradus in layers; prints each break with file and line, and exits 1 if there is one.

Rules:
  1. Includes and CMake dependencies only go down LAYERS, and never into another folder's internal/ (the folders of
     one group, as plane/, may share); models/ uses nothing of gradus.
  2. Only plane/ touches LibTorch's internals: engine, nodes, saved variables, dispatch keys.
  3. No library header includes torch/torch.h, which costs every file that includes it 17 s.
  4. Every module folder is in LAYERS, has a page docs/<module>.md and a test, and its CMakeLists.txt names every file.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import sys

# Lowest first: a folder may include those above it in this list, and itself.
LAYERS = [
    "base",
    "solve",
    "privacy/accountant",
    "privacy/noise",
    "plane/op",
    "plane/saved",
    "plane/grad",
    "amp/autocast",
    "recompute",
    "offload",
    "compress",
    "plan",
    "accumulate",
    "persample/vmap",
    "persample/graph",
    "persample/engine",
    "optim",
    "amp/scaler",
    "amp/levels",
    "distributed/comm",
    "models",
    "privacy/nn",
    "privacy/training",
    "state",
    "data",
    "metrics",
    "report",
    "train",
]

# Modules that may be used without gradus, and so include nothing of it.
STANDALONE = {"models"}

INTERNAL_HEADER = re.compile(
    r"torch/csrc/autograd/(engine|saved_variable|function|node|graph_task|generated)"
    r"|c10/core/impl/LocalDispatchKeySet\.h"
)
INTERNAL_NAME = re.compile(
    r"\bTESTING_ONLY_GenericMode\b"
    r"|\b(?:Exclude|Include|Force)DispatchKeyGuard\b|\bAutoDispatchBelow\w+"
    r"|\bc10::impl::\w*(?:DispatchKey|dispatch_key)\w*"
    r"|\bset_default_engine_stub\b"
)
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
# Comments and string literals, longest first; a raw string has no escapes.
NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"', re.DOTALL)
CXX_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def code_only(text: str) -> str:
    """Blanks comments and string literals, keeping every line where it is."""
    return NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def layer_of(path: str) -> str | None:
    """The layer that a path below gradus/ belongs to: the longest that is a prefix of its folder."""
    folder = path.rpartition("/")[0] + "/"
    return max((layer for layer in LAYERS if folder.startswith(layer + "/")), key=len, default=None)


def sources(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in CXX_SUFFIXES)


class Checker:
    """Collects the breaks of one tree in `problems`."""

    def __init__(self, root: pathlib.Path):
        self.root = root
        self.problems: list[str] = []

    def report(self, path: pathlib.Path, line: int, message: str) -> None:
        self.problems.append(f"{path.relative_to(self.root)}:{line}: {message}")

    def check_include(self, path: pathlib.Path, line: int, user: str, header: str) -> None:
        """Checks one `gradus/...` include of a file in layer `user`."""
        target = header.removeprefix("gradus/")
        used = layer_of(target)
        if target == "gradus.h":
            self.report(path, line, "includes the umbrella header gradus/gradus.h, which is for programs only")
        elif used is None:
            self.report(path, line, f"includes <{header}>, whose folder is in no layer")
        elif used.split("/")[0] != user.split("/")[0] and "/internal/" in target:
            self.report(path, line, f"<{header}> is private to {used.split('/')[0]}/")
        elif used != user and user in STANDALONE:
            self.report(path, line, f"{user}/ knows nothing of gradus, but includes <{header}>")
        elif used != user and LAYERS.index(used) > LAYERS.index(user):
            self.report(path, line, f"includes upward: {user}/ is below {used}/ (<{header}>)")

    def check_internals(self, path: pathlib.Path, text: str) -> None:
        for match in INCLUDE.finditer(text):
            if INTERNAL_HEADER.match(match[1]):
                self.report(
                    path,
                    line_of(text, match.start()),
                    f"<{match[1]}> is LibTorch's internal: only gradus/plane includes it",
                )
        for match in INTERNAL_NAME.finditer(code_only(text)):
            self.report(
                path, line_of(text, match.start()), f"{match[0]} is LibTorch's internal: only gradus/plane uses it"
            )

    def check_library_file(self, path: pathlib.Path) -> None:
        inside = path.relative_to(self.root / "gradus").as_posix()
        layer = layer_of(inside)
        text = path.read_text(encoding="utf-8")
        if layer is None:
            if inside != "gradus.h":
                self.report(path, 1, "its folder is in no layer: add it to LAYERS in scripts/check_layers.py")
            return
        for match in INCLUDE.finditer(text):
            line = line_of(text, match.start())
            if match[1].startswith("gradus/"):
                self.check_include(path, line, layer, match[1])
            elif match[1] == "torch/torch.h" and path.suffix == ".h":
                self.report(path, line, "a library header includes torch/torch.h: include what it uses instead")
        if not layer.startswith("plane/"):
            self.check_internals(path, text)

    def check_module(self, cmake: pathlib.Path) -> None:
        folder = cmake.parent
        module = folder.relative_to(self.root / "gradus").as_posix()
        text = re.sub(r"#[^\n]*", "", cmake.read_text(encoding="utf-8"))
        if "gradus_module(" not in text:
            return
        if module not in LAYERS:
            self.report(cmake, 1, f"{module}/ is in no layer: add it to LAYERS in scripts/check_layers.py")
            return
        name = module.replace("/", "_")
        if not (self.root / "docs" / f"{name}.md").is_file():
            self.report(cmake, 1, f"{module}/ has no page docs/{name}.md")
        if not any(path.name.endswith("_test.cpp") for path in sources(folder)):
            self.report(cmake, 1, f"{module}/ has no test (*_test.cpp)")
        named = set(re.findall(r"[\w./-]+", text))
        for path in sources(folder):
            private_header = path.parent.name == "internal" and path.suffix == ".h"
            if not private_header and path.relative_to(folder).as_posix() not in named:
                self.report(path, 1, f"{module}/CMakeLists.txt does not name it, so it is never built or installed")
        targets = {layer.replace("/", "_"): layer for layer in LAYERS}
        for match in re.finditer(r"gradus::(\w+)", text):
            used = targets.get(match[1])
            if used is not None and LAYERS.index(used) >= LAYERS.index(module):
                self.report(cmake, line_of(text, match.start()), f"depends upward: {module}/ is below {used}/")

    def run(self) -> list[str]:
        for path in sources(self.root / "gradus"):
            self.check_library_file(path)
        for path in sources(self.root / "tools"):
            self.check_internals(path, path.read_text(encoding="utf-8"))
        for cmake in sorted((self.root / "gradus").rglob("CMakeLists.txt")):
            self.check_module(cmake)
        return self.problems


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks the layers of gradus.")
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parents[1])
    problems = Checker(parser.parse_args().root.resolve()).run()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
