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
    """Counts over the instructions of a loop without another loop or a branch inside."""

    instructions: int
    multiply_adds: int
    extremes: int
    stack_references: int


def inner_loop(assembly: str) -> InnerLoop:
    """The loop of one basic block with the most arithmetic in ``assembly`` (x86 in AT&T syntax, or AArch64).

    Raises:
        ValueError: there is no such loop.
    """
    loops: list[InnerLoop] = []
    label, block = "", [""]
    for line in assembly.splitlines():
        if match := _LABEL.match(line):
            label, block = match[1], []
            continue
        block.append(line)
        if match := _JUMP.match(line):
            if match[1] == label:
                loops.append(_count(block))
            label = ""
    if not loops:
        raise ValueError("the assembly holds no loop of one basic block")
    return max(loops, key=lambda found: (found.multiply_adds + found.extremes, -found.instructions))


def _count(lines: list[str]) -> InnerLoop:
    code = [line for line in lines if re.match(r"^\s+[a-z]", line)]
    return InnerLoop(
        instructions=len(code),
        multiply_adds=sum(bool(_FMA.match(line)) for line in code),
        extremes=sum(bool(_MINIMUM.match(line)) for line in code),
        stack_references=sum(bool(_STACK.search(line)) for line in code),
    )
