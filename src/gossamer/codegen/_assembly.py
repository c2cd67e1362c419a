"""Reading emitted assembly: does the inner loop stay in registers, and does it hold as many multiply-adds as planned?"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L\w+):")
_JUMP = re.compile(r"^\s+(?:j\w+|b(?:\.\w+)?|cbn?z\s+\w+,|tbn?z\s+\w+,\s*#\w+,)\s+(\.L\w+)")
_STACK = re.compile(r"\(%rsp|\[sp\b")
_FMA = re.compile(r"^\s+(?:vfn?m(?:add|sub)\d+[ps][sd]|fmla|fmad)\b")
_MINIMUM = re.compile(r"^\s+(?:v(?:min|max)[ps][sd]|vp(?:min|max)sd|f(?:min|max)(?:nm)?|s(?:min|max))\b")


@dataclass(frozen=True)
class InnerLoop:
    """Counts over the instructions of the longest loop without another loop inside."""

    instructions: int
    multiply_adds: int
    extremes: int
    stack_references: int


def inner_loop(assembly: str) -> InnerLoop:
    """The innermost loop with the most arithmetic in ``assembly`` (x86 in AT&T syntax, or AArch64).

    Raises:
        ValueError: there is no loop.
    """
    lines = assembly.splitlines()
    labels = {match[1]: number for number, line in enumerate(lines) if (match := _LABEL.match(line))}
    loops = []
    for number, line in enumerate(lines):
        match = _JUMP.match(line)
        if match and match[1] in labels and labels[match[1]] < number:
            loops.append((labels[match[1]], number))
    inner = [loop for loop in loops if not any(_inside(other, loop) for other in loops)]
    if not inner:
        raise ValueError("the assembly holds no loop")
    # The blocks of an outer loop that are laid out apart can look like a loop with the last step's arithmetic in it.
    counts = [_count(lines[start : end + 1]) for start, end in inner]
    return max(counts, key=lambda found: (found.multiply_adds + found.extremes, -found.instructions))


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _count(lines: list[str]) -> InnerLoop:
    code = [line for line in lines if re.match(r"^\s+[a-z]", line)]
    return InnerLoop(
        instructions=len(code),
        multiply_adds=sum(bool(_FMA.match(line)) for line in code),
        extremes=sum(bool(_MINIMUM.match(line)) for line in code),
        stack_references=sum(bool(_STACK.search(line)) for line in code),
    )
