"""Search for a metric or an allocation, and report it beside what a user would pick without a search.

Three texts are kept apart: statistics come from one, candidates are judged on a second, and the perplexities in the
report come from a third, which the search never sees. Whoever reports on the text that was searched on reports the
search's luck.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from gossamer.compress._ablations import ablations
from gossamer.compress._allocation import half_cosine, line, owl, protected_ends, uniform
from gossamer.compress._allocation_genome import BlockValues
from gossamer.compress._allocation_search import AllocationBench, FunctionProblem, LevelProblem
from gossamer.compress._evolution import Evolution, EvolutionSettings, SearchResult
from gossamer.compress._expression import Expr
from gossamer.compress._metric import METRIC_VOCABULARY, NAMED_METRICS, SymbolicMetric
from gossamer.compress._metric_search import MetricProblem
from gossamer.compress._metric_space import MetricSpace, leaves, same_ranking
from gossamer.compress._models import DenseModel, load_dense
from gossamer.compress._ranks import RankedLayers
from gossamer.compress._search_windows import SearchWindows, WindowSizes, search_windows
from gossamer.compress._sparsegpt import sparsegpt
from gossamer.compress._workbench import BenchLayer, Progress, Workbench
from gossamer.core.files import write_json

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
    repeats: int = 1,
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
        repeats: how many searches, each with the next seed and a control of its own, on the same statistics.
        progress: told how far statistics have come. log: given a line for every generation.

    Returns:
        what the file holds. Rows of ``candidates`` tell whether a formula was ``found`` by a search, whether it is ``new``
        (ranks unlike every named metric), and its perplexity on the text of the ``search`` and on that of the ``report``.

    Raises:
        ValueError: bad settings, texts too short, or ``out`` holds another search.
    """
    settings, space = settings or EvolutionSettings(evaluations=120), space or MetricSpace()
    dense, windows, out = _prepare(model, windows, out)
    bed = Workbench(dense.model, windows.calibration, progress=progress)
    problem = MetricProblem(bed, windows.judged, space, sparsity, pattern)
    what = {"space": _space_json(space), "sparsity": sparsity, "pattern": list(pattern) if pattern else None}
    identity = _identity(dense, windows, what)
    runs = _repeated(problem, settings, out, "metric", identity, control, repeats, log)
    if ablate:
        spent = runs["search"].history[-1]["scored"]
        for name, own, changed in ablations(problem, replace(settings, evaluations=spent)):
            file = f"ablation-{name.replace(' ', '-')}"
            runs[name] = _run_both(own, changed, out, file, {**identity, "ablation": name}, False, log)["search"]
    rows = []
    candidates = {**_metric_rivals(space), **{name: run.best for name, run in runs.items()}}
    for name in [name for name in runs if _is_search(name)]:
        if not _is_new(candidates[name]) and (new := _best_new(runs[name], problem, settings.finalists)) is not None:
            candidates[f"{name}: new"] = new
    dense_report = bed.perplexity(iter(()), windows.report)
    known: dict[str, dict[str, float]] = {}  # runs often agree
    for name, text in candidates.items():
        tree = Expr.from_string(text)
        row: dict[str, Any] = {"name": name, "formula": text, "latex": METRIC_VOCABULARY.latex(tree), "size": tree.size}
        if text not in known:
            report = bed.perplexity(problem.weights(tree), windows.report)
            known[text] = {"search": problem.final(tree), "report": report}
        row |= known[text] | {"found": _is_search(name), "new": _is_new(text)}
        rows.append(row)
        log(f"{name}: search text {row['search']:.2f}, report text {row['report']:.2f}  {text}")
    if correct:
        best = min((row for row in rows if row["found"]), key=lambda row: row["search"])
        for name, text in (("wanda", NAMED_METRICS["wanda"]), (best["name"], best["formula"])):
            tree = Expr.from_string(text)
            row = {"name": f"{name}, corrected", "formula": text, "latex": METRIC_VOCABULARY.latex(tree)}
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


def _is_search(name: str) -> bool:
    """Whether a run, or a candidate from it, comes from a search and not from a control or an ablation."""
    return name.split(",")[0].split(": ")[-1] == "search" or name.endswith(": new")


def _is_new(formula: str) -> bool:
    """Whether it ranks weights unlike every named metric: to find one of those proves nothing."""
    tree = Expr.from_string(formula)
    return not any(same_ranking(tree, Expr.from_string(named)) for named in NAMED_METRICS.values())


def _best_new(run: SearchResult, problem: MetricProblem, finalists: int) -> str | None:
    """The best by final score among the ``finalists`` new metrics with the best scores; None if the run scored none."""
    scored = [own for own in run.judged if own.score is not None and _is_new(own.genome)]
    scored.sort(key=lambda own: (own.score, own.size, own.key))
    for own in scored[:finalists]:
        own.final = problem.final(problem.decode(own.genome)) if own.final is None else own.final
    best = min(scored[:finalists], key=lambda own: (own.final, own.size, own.key), default=None)
    return None if best is None else best.genome


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
    repeats: int = 1,
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
    settings = settings or EvolutionSettings(population=20, generations=40, evaluations=75, finalists=5)
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
        found = _repeated(problem, settings, out, kind, identity, control, repeats, log)
        runs |= {f"{kind}: {name}": run for name, run in found.items()}
        for name, run in found.items():
            candidates[f"{kind}: {name}"] = (run.best, problem.offsets(problem.decode(run.best)))
    rows = []
    for name, (text, offsets) in candidates.items():
        row: dict[str, Any] = {"name": name, "formula": text, "sparsities": bench.sparsities(offsets)}
        row["found"] = _is_search(name)
        row["search"] = bench.final(offsets)
        row["report"] = bench.final(offsets, windows.report)
        rows.append(row)
        log(f"{name}: search text {row['search']:.2f}, report text {row['report']:.2f}  {text}")
    if correct:
        best = min((row for row in rows if row["found"]), key=lambda row: row["search"])
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
        found = [row for row in result["candidates"] if row.get("found")]
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


def _repeated(
    problem: Any, settings: EvolutionSettings, out: Path, name: str, identity: dict[str, Any], control: bool,
    repeats: int, log: Log,
) -> dict[str, SearchResult]:  # fmt: skip
    """So many searches with their controls, the first by the seed of ``settings``, further ones by the next seeds.

    Raises:
        ValueError: ``repeats`` is less than 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    runs = _run_both(problem, settings, out, name, identity, control, log)
    for seed in range(settings.seed + 1, settings.seed + repeats):
        own = _run_both(problem, replace(settings, seed=seed), out, f"{name}-seed{seed}", identity, control, log)
        runs |= {f"{what}, seed {seed}": run for what, run in own.items()}
    return runs


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
