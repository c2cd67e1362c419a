"""Windows of three texts that a search keeps apart: for statistics, for judging candidates, and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gossamer.compress._metric_search import Texts
from gossamer.compress._text import Text, default_text, python_documentation, read_text
from gossamer.core.assets import data_file

SHAKESPEARE = "text/tinyshakespeare/input.txt.gz"


@dataclass(frozen=True)
class SearchWindows:
    """Token ids: ``calibration`` for statistics, ``judged`` for candidates, ``report`` for the figures."""

    calibration: Tensor
    judged: Texts
    report: Tensor
    names: dict[str, str]


@dataclass(frozen=True)
class WindowSizes:
    """Numbers of windows and their tokens."""

    samples: int = 16
    seqlen: int = 512
    short: int = 4
    long: int = 16
    report: int = 8
    report_seqlen: int = 1024


def search_windows(
    tokenizer: Any, sizes: WindowSizes, text: Text | None = None, search_texts: Sequence[Text] | None = None
) -> SearchWindows:
    """Windows of three disjoint texts.

    Args:
        tokenizer: of the model.
        sizes: how many and how long.
        text: its halves calibrate and report; by default WikiText-2 where it is, else Python's documentation.
        search_texts: their evaluation halves judge candidates, windows in turn; by default Python's documentation, and
            TinyShakespeare where it is. Where this is ``text`` itself, candidates are judged on the beginning of the
            evaluation half and the report comes from its end.

    Raises:
        ValueError: a text is too short.
    """
    text = text or default_text()
    others = list(search_texts) if search_texts is not None else _default_search_texts()
    report_ids = _ids(tokenizer, text.evaluation)
    judged = [_ids(tokenizer, other.evaluation) for other in others if other.name != text.name]
    if not judged:
        half = len(report_ids) // 2
        judged, report_ids = [report_ids[:half]], report_ids[half:]
    calibration = _cut(
        _ids(tokenizer, text.calibration), sizes.seqlen, f"calibration part of {text.name}", sizes.samples
    )
    spread = [index * (len(calibration) - 1) // max(sizes.samples - 1, 1) for index in range(sizes.samples)]
    whole = _in_turn([_cut(ids, sizes.seqlen, "text to search on", 1) for ids in judged])
    if len(whole) < sizes.short + sizes.long:
        raise ValueError(f"the texts to search on have {len(whole)} windows, need {sizes.short + sizes.long}")
    report = _cut(report_ids, sizes.report_seqlen, f"evaluation part of {text.name}", sizes.report)[: sizes.report]
    names = {"calibration": text.name, "search": ", ".join(other.name for other in others), "report": text.name}
    texts = Texts(whole[: sizes.short], whole[sizes.short : sizes.short + sizes.long])
    return SearchWindows(calibration[spread], texts, report, names)


def _default_search_texts() -> list[Text]:
    texts = [python_documentation()]
    with suppress(FileNotFoundError):
        texts.append(read_text(data_file(SHAKESPEARE)))
    return texts


def _ids(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)


def _cut(ids: Tensor, seqlen: int, what: str, least: int) -> Tensor:
    whole = len(ids) // seqlen
    if whole < least:
        raise ValueError(f"the {what} has {len(ids)} tokens, but {least} windows of {seqlen} need {least * seqlen}")
    return ids[: whole * seqlen].view(whole, seqlen)


def _in_turn(groups: list[Tensor]) -> Tensor:
    """Windows of all groups, one of each in turn, as long as all last."""
    count = min(map(len, groups))
    return torch.stack([group[:count] for group in groups], 1).flatten(0, 1)
