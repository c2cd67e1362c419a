"""Search for a metric or an allocation, and report it beside what a user would pick without a search.

Three texts are kept apart: statistics come from one, candidates are judged on a second, and the perplexities in the
report come from a third, which the search never sees. Whoever reports on the text that was searched on reports the
search's luck.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gossamer.compress._ablations import ablations
from gossamer.compress._allocation import half_cosine, line, owl, protected_ends, uniform
from gossamer.compress._allocation_genome import BlockValues
from gossamer.compress._allocation_search import AllocationBench, FunctionProblem, LevelProblem
from gossamer.compress._evolution import Evolution, EvolutionSettings, SearchResult
from gossamer.compress._expression import Expr
from gossamer.compress._metric import METRIC_VOCABULARY, NAMED_METRICS, SymbolicMetric
from gossamer.compress._metric_search import MetricProblem, Texts
from gossamer.compress._metric_space import MetricSpace, leaves, same_ranking
from gossamer.compress._models import DenseModel, load_dense
from gossamer.compress._ranks import RankedLayers
from gossamer.compress._sparsegpt import sparsegpt
from gossamer.compress._text import Text, default_text, python_documentation, read_text
from gossamer.compress._workbench import BenchLayer, Progress, Workbench
from gossamer.core.assets import data_file
from gossamer.core.files import write_json

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


Log = Callable[[str], None]


def _no_log(line: str) -> None:
    pass


def search_metric(
    model: str | os.PathLike[str] | DenseModel,
    out: str | os.PathLike[str],
    sparsity: float = 0.5,
    pattern: tuple[int, int] | None = None,
    settings: EvolutionSettings | None = None,
    space: MetricSpace | None = None,
    windows: SearchWindows | None = None,
    control: bool = True,
    ablate: bool = False,
    correct: bool = False,
    progress: Progress = lambda what, done, total: None,
    log: Log = _no_log,
) -> dict[str, Any]:
    """Search for a pruning metric for ``model``; write ``out/search.json``, resumable checkpoints beside it, and return it.

    Args:
        model: as for :func:`load_dense`, or a loaded one in float32.
        out: folder; made if it is not there. A search that was interrupted in it is taken up again.
        sparsity: share of zeros per row; ``pattern``: (N, M) instead.
        settings, space, windows: of the search, the trees, the texts.
        control: also search by drawing at random, with the same number of evaluations.
        ablate: also search with each part of the search missing, see :mod:`gossamer.compress._ablations`.
        correct: also report the best found and Wanda with SparseGPT's correction of what is kept, and SparseGPT itself.
        progress: told how far statistics have come. log: given a line for every generation.

    Raises:
        ValueError: bad settings, texts too short, or ``out`` holds another search.
    """
    settings, space = settings or EvolutionSettings(), space or MetricSpace()
    dense, windows, out = _prepare(model, windows, out)
    bed = Workbench(dense.model, windows.calibration, progress=progress)
    problem = MetricProblem(bed, windows.judged, space, sparsity, pattern)
    what = {"space": _space_json(space), "sparsity": sparsity, "pattern": list(pattern) if pattern else None}
    identity = _identity(dense, windows, what)
    runs = _run_both(problem, settings, out, "metric", identity, control, log)
    if ablate:
        spent = runs["search"].history[-1]["scored"]
        for name, own, changed in ablations(problem, replace(settings, evaluations=spent)):
            file = f"ablation-{name.replace(' ', '-')}"
            runs[name] = _run_both(own, changed, out, file, {**identity, "ablation": name}, False, log)["search"]
    rows = []
    candidates = {**_metric_rivals(space), **{name: run.best for name, run in runs.items()}}
    dense_report = bed.perplexity(iter(()), windows.report)
    for name, text in candidates.items():
        tree = Expr.from_string(text)
        row: dict[str, Any] = {"name": name, "formula": text, "latex": METRIC_VOCABULARY.latex(tree), "size": tree.size}
        row["search"] = problem.final(tree)
        row["report"] = bed.perplexity(problem.weights(tree), windows.report)
        row["ranks_as_wanda"] = same_ranking(tree, Expr.from_string(NAMED_METRICS["wanda"]))
        rows.append(row)
        log(f"{name}: search text {row['search']:.2f}, report text {row['report']:.2f}  {text}")
    if correct:
        for name in ("wanda", "search"):
            tree = Expr.from_string(candidates[name])
            row = {"name": f"{name}, corrected", "formula": candidates[name], "latex": METRIC_VOCABULARY.latex(tree)}
            rows.append(row | _judged(bed, windows, corrected(problem.weights(tree))))
        row = {"name": "sparsegpt", "formula": "", "latex": ""}
        rows.append(row | _judged(bed, windows, by_sparsegpt(bed, sparsity, pattern)))
    result = {"kind": "metric", **identity, "dense": dense_report, "candidates": rows, **_runs_json(runs)}
    write_json(out / "search.json", result)
    return result


Weights = Iterator[tuple[BenchLayer, Tensor]]


def _judged(bed: Workbench, windows: SearchWindows, weights: Weights) -> dict[str, float]:
    """Perplexity on the long search text and on the report's, computed from one set of weights."""
    made = list(weights)
    texts = {"search": windows.judged.long, "report": windows.report}
    return {name: bed.perplexity(iter(made), text) for name, text in texts.items()}


def corrected(weights: Weights) -> Weights:
    """Masked dense weights with SparseGPT's correction of what the mask keeps."""
    for layer, weight in weights:
        assert layer.statistics.hessian is not None
        yield layer, sparsegpt(layer.weight, layer.statistics.hessian, keep=weight != 0)


def by_sparsegpt(bed: Workbench, sparsity: float | Sequence[float], pattern: tuple[int, int] | None = None) -> Weights:
    """SparseGPT by the statistics of the dense model; ``sparsity`` of all blocks, or of each."""
    for layer in bed.layers:
        assert layer.statistics.hessian is not None
        own = sparsity if isinstance(sparsity, float) else sparsity[layer.block]
        yield layer, sparsegpt(layer.weight, layer.statistics.hessian, own, pattern)


def _metric_rivals(space: MetricSpace) -> dict[str, str]:
    known = set(space.terminals)
    return {
        name: text
        for name, text in NAMED_METRICS.items()
        if {leaf.op for leaf in leaves(Expr.from_string(text))} <= known
    }


def search_allocation(
    model: str | os.PathLike[str] | DenseModel,
    out: str | os.PathLike[str],
    sparsity: float = 0.6,
    metric: str = "wanda",
    by: Iterable[str] = ("function", "levels"),
    settings: EvolutionSettings | None = None,
    windows: SearchWindows | None = None,
    control: bool = True,
    correct: bool = False,
    progress: Progress = lambda what, done, total: None,
    log: Log = _no_log,
) -> dict[str, Any]:
    """Search for the sparsity of every block; write ``out/search.json`` and return it.

    Args:
        metric: what ranks the weights: a name or expression, see :meth:`SymbolicMetric.parse`.
        by: "function" searches an allocation function (DSA), "levels" the densities themselves.
        others: as for :func:`search_metric`.

    Raises:
        ValueError: as :func:`search_metric`, or ``by`` is unknown.
    """
    kinds = tuple(by)
    if not kinds or set(kinds) - {"function", "levels"}:
        raise ValueError(f"by must name function, levels or both, got {', '.join(kinds) or 'nothing'}")
    settings = settings or EvolutionSettings(population=20, generations=40, evaluations=150, finalists=5)
    dense, windows, out = _prepare(model, windows, out)
    bed = Workbench(dense.model, windows.calibration, progress=progress)
    symbolic = SymbolicMetric.parse(metric)
    ranked = RankedLayers(bed, lambda layer: symbolic(layer.weight, layer.statistics, layer.gradients))
    bench = AllocationBench(ranked, windows.judged, sparsity)
    problems = {
        "function": lambda: FunctionProblem(bench, BlockValues(bed)),
        "levels": lambda: LevelProblem(bench),
    }
    identity = _identity(dense, windows, {"sparsity": sparsity, "metric": str(symbolic.tree)})
    runs: dict[str, SearchResult] = {}
    candidates = _allocation_rivals(bed, bench)
    for kind in kinds:
        problem: Any = problems[kind]()
        found = _run_both(problem, settings, out, kind, identity, control, log)
        runs |= {f"{kind}: {name}": run for name, run in found.items()}
        for name, run in found.items():
            candidates[f"{kind}: {name}"] = (run.best, problem.offsets(problem.decode(run.best)))
    rows = []
    for name, (text, offsets) in candidates.items():
        row: dict[str, Any] = {"name": name, "formula": text, "sparsities": bench.sparsities(offsets)}
        row["search"] = bench.final(offsets)
        row["report"] = bench.final(offsets, windows.report)
        rows.append(row)
        log(f"{name}: search text {row['search']:.2f}, report text {row['report']:.2f}  {text}")
    if correct:
        best = min((row for row in rows if row["name"].endswith(": search")), key=lambda row: row["search"])
        for name, per_block in (("uniform", [sparsity] * bench.blocks), (best["name"], best["sparsities"])):
            row = {"name": f"{name}, SparseGPT", "formula": "", "sparsities": per_block}
            rows.append(row | _judged(bed, windows, by_sparsegpt(bed, per_block)))
    dense_report = bed.perplexity(iter(()), windows.report)
    result = {"kind": "allocation", **identity, "dense": dense_report, "candidates": rows, **_runs_json(runs)}
    write_json(out / "search.json", result)
    return result


def found_allocation(path: str | os.PathLike[str]) -> tuple[float, ...]:
    """The sparsities of the allocation that a search found and that was best on the text searched on.

    Raises:
        ValueError: the file is not the ``search.json`` of a search for an allocation.
    """
    try:
        result = json.loads(Path(path).read_text())
        found = [row for row in result["candidates"] if row["name"].endswith(": search")]
        return tuple(min(found, key=lambda row: row["search"])["sparsities"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the search.json of a search for an allocation") from error


def _allocation_rivals(bed: Workbench, bench: AllocationBench) -> dict[str, tuple[str, list[float]]]:
    blocks = bench.blocks
    return {
        "uniform": ("", uniform(blocks)),
        "straight line": ("0.08", line(blocks)),
        "OWL": ("M 5, 0.08", owl(bed)),
        "half cosine": ("0.08", half_cosine(blocks)),
        "protected ends": ("0.2", protected_ends(blocks, bench.sparsity)),
        "second-order loss": ("", bench.sensitivity()),
    }


def _run_both(
    problem: Any, settings: EvolutionSettings, out: Path, name: str, identity: dict[str, Any], control: bool, log: Log
) -> dict[str, SearchResult]:
    """The search, and if asked its control with as many scores as the search took."""
    runs = {}

    def report(record: dict[str, Any]) -> None:
        best = "none" if record["best"] is None else f"{record['best']:.3f}"
        log(f"{name} generation {record['generation']}: best {best} of {record['scored']}; leader {record['leader']}")

    search = Evolution(problem, replace(settings, control=False), out / f"{name}.json", identity, report)
    runs["search"] = search.run()
    if control:
        spent = runs["search"].history[-1]["scored"]
        same = replace(settings, control=True, evaluations=spent, generations=10**6, patience=10**6)
        runs["random control"] = Evolution(problem, same, out / f"{name}-control.json", identity, report).run()
    return runs


def _prepare(model: Any, windows: SearchWindows | None, out: Any) -> tuple[DenseModel, SearchWindows, Path]:
    dense = model if isinstance(model, DenseModel) else load_dense(model)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    return dense, windows or search_windows(dense.tokenizer, WindowSizes()), folder


def _identity(dense: DenseModel, windows: SearchWindows, what: dict[str, Any]) -> dict[str, Any]:
    texts = {
        "texts": windows.names,
        "windows": {
            "calibration": list(windows.calibration.shape),
            "short": list(windows.judged.short.shape),
            "long": list(windows.judged.long.shape),
            "report": list(windows.report.shape),
        },
    }
    return {"model": dense.name, "weights": dense.fingerprint, **what, **texts}


def _space_json(space: MetricSpace) -> dict[str, Any]:
    names = ("terminals", "unary", "binary", "max_depth", "max_size", "oos", "by_rank")
    return {name: getattr(space, name) for name in names}


def _runs_json(runs: dict[str, SearchResult]) -> dict[str, Any]:
    return {
        "runs": {
            name: {
                "best": run.best,
                "finalists": [asdict(own) for own in run.finalists],
                "history": run.history,
                "judged": [[own.genome, _finite(own.screen), _finite(own.score)] for own in run.judged],
                "invalid": run.invalid,
                "correlation": run.correlation,
                "screened": run.screened,
                "stopped": run.stopped,
            }
            for name, run in runs.items()
        }
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None
