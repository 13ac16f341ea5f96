#!/usr/bin/env python3
"""Writes gradus/data/internal/unicode_tables.cpp from Python's own Unicode data: run it with a newer Python to follow a
newer Unicode, and pipe its output into the file.

Folding is what BERT's tokenizer does to a character: canonical decomposition (NFD), marks of no width (Mn) dropped,
lower case. Hangul syllables are left out: they decompose by arithmetic.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Iterable

CODE_POINTS = range(0x110000)
WIDTH = 96


def folded(code: int) -> tuple[int, ...]:
    decomposed = unicodedata.normalize("NFD", chr(code))
    kept = "".join(c for c in decomposed if unicodedata.category(c) != "Mn")
    return tuple(ord(c) for part in kept for c in part.lower())


def folds() -> Iterable[str]:
    """Words FIRST[-LAST[/2]]+DELTA (each moves by DELTA) and CODE=TARGET[,TARGET...]; numbers in hexadecimal."""
    changed = {}
    for code in CODE_POINTS:
        if 0xD800 <= code < 0xE000 or 0xAC00 <= code <= 0xD7A3:
            continue
        target = folded(code)
        if target and target != (code,):
            changed[code] = target
    codes = sorted(changed)
    at = 0
    while at < len(codes):
        first = codes[at]
        target = changed[first]
        if len(target) > 1:
            yield f"{first:X}=" + ",".join(f"{code:X}" for code in target)
            at += 1
            continue
        delta = target[0] - first
        end, step = at + 1, 0
        while end < len(codes) and changed[codes[end]] == (codes[end] + delta,):
            gap = codes[end] - codes[end - 1]
            if gap > 2 or step not in (0, gap):
                break
            end, step = end + 1, gap
        if end == at + 1:
            yield f"{first:X}={target[0]:X}"
        else:
            sign = "-" if delta < 0 else ""
            yield f"{first:X}-{codes[end - 1]:X}{'/2' if step == 2 else ''}+{sign}{abs(delta):X}"
        at = end


def ranges(belongs: Callable[[int], bool]) -> Iterable[str]:
    first = None
    for code in [*CODE_POINTS, len(CODE_POINTS)]:
        inside = code < len(CODE_POINTS) and belongs(code)
        if inside and first is None:
            first = code
        elif not inside and first is not None:
            yield f"{first:X}" if code - 1 == first else f"{first:X}-{code - 1:X}"
            first = None


def category_is(*wanted: str) -> Callable[[int], bool]:
    return lambda code: unicodedata.category(chr(code)).startswith(wanted)


def write(name: str, words: Iterable[str]) -> None:
    lines, line = [], ""
    for word in words:
        if len(line) + 1 + len(word) > WIDTH:
            lines.append(line)
            line = ""
        line += (" " if line else "") + word
    lines.append(line)
    print(f"\nconst char* const {name} =")
    print("\n".join(f'    "{line} "' for line in lines) + ";")


def main() -> int:
    print(f"""// Made by scripts/unicode_tables.py from Unicode {unicodedata.unidata_version}: do not edit.
#include <gradus/data/internal/unicode_tables.h>

// clang-format off
namespace gradus::data::internal {{""")
    write("kFolds", folds())
    write("kNonSpacingMarks", ranges(category_is("Mn")))
    write("kPunctuation", ranges(category_is("P")))
    # Without Cn: what is unassigned here may be a letter of a later Unicode.
    write("kControls", ranges(category_is("Cc", "Cf", "Co", "Cs")))
    print("\n}  // namespace gradus::data::internal\n// clang-format on")
    return 0


if __name__ == "__main__":
    sys.exit(main())
