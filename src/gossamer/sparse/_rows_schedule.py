"""How the rows of a matrix are dealt out to a GPU's thread blocks: short rows in groups, long ones in segments.

Graphs have rows of one entry and rows of ten thousand. Rows of up to ``longest`` entries are multiplied by a few lanes
each, four side by side in a warp, and so rows of about equal length are put next to each other; only inside windows of
rows, because neighbours in the matrix often read the same rows of the dense operand, which a cache then holds. Longer
rows are cut into segments, a thread block each. Made once per pattern, by torch on whatever device it is on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

LONGEST, SEGMENT, WINDOW = 128, 4096, 512
_STEP = 8


@dataclass(frozen=True, eq=False)
class RowsSchedule:
    """Units of work of one pattern.

    order: int32, the rows of at most ``longest`` entries, empty ones too.
    segments: int32 ``(segments, 4)``: row, first entry, end, and the number of its partial sum, -1 where the row has only
        this segment. The longest come first.
    sums: int32 ``(rows with several segments, 3)``: row, its first partial sum, how many.
    partials: partial sums in all.
    """

    order: Tensor
    segments: Tensor
    sums: Tensor
    partials: int

    @classmethod
    def build(cls, indptr: Tensor, longest: int = LONGEST, segment: int = SEGMENT, window: int = WINDOW) -> Self:
        """Deal out the rows of a CSR pattern.

        longest: entries of a row that is not cut. segment: most entries of a segment. window: rows that are sorted by
        length together.
        """
        start = indptr.to(torch.int64)
        length = start.diff()
        is_long = length > longest
        short = torch.nonzero(~is_long).squeeze(1)
        steps = (length[short] + _STEP - 1) // _STEP
        most = longest // _STEP + 2
        order = short[torch.argsort(short // window * most + (most - 1 - steps), stable=True)]
        long = torch.nonzero(is_long).squeeze(1)
        counts = (length[long] + segment - 1) // segment
        size = (length[long] + counts - 1) // counts.clamp(min=1)
        which = torch.repeat_interleave(torch.arange(len(long), device=long.device), counts)
        number = torch.arange(len(which), device=long.device) - (counts.cumsum(0) - counts)[which]
        begin = start[long][which] + number * size[which]
        end = torch.minimum(begin + size[which], start[1:][long][which])
        several = counts[which] > 1
        partial = torch.where(several, several.cumsum(0) - 1, -1)
        segments = torch.stack([long[which], begin, end, partial], 1)
        segments = segments[torch.argsort(begin - end, stable=True)]
        cut = counts > 1
        first = counts[cut].cumsum(0) - counts[cut]
        sums = torch.stack([long[cut], first, counts[cut]], 1)
        order, segments, sums = (array.to(torch.int32).contiguous() for array in (order, segments, sums))
        return cls(order, segments, sums, int(several.sum()))
