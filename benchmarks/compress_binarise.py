"""SmolLM2 binarised on an N:8 structure: perplexity against plainer binarisation, and the bits that it really takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor

from gossamer.compress import (
    binarise,
    calibrate,
    calibration_windows,
    dense_weight,
    evaluation_windows,
    flip_signs,
    linears,
    load_dense,
    perplexity,
    set_dense_weight,
    sign_times_scale,
)
from gossamer.compress._scores import wanda
from gossamer.compress._text import wikitext2
from gossamer.core.measure import Bench, Row, claim, largest
from gossamer.weights import STBWeight

SOURCES = ["compress/_binarise.py", "weights/_stb*.py"]
Layer = Callable[[Tensor, Any], Tensor]
FLIPPED = (0.01, 0.05, 0.1, 0.2, 0.5)


@claim(
    "stb-perplexity",
    text="SmolLM2 at 4:8 by STBLLM's quantiser against magnitude 4:8 and signs: perplexity on WikiText-2 test",
    system=["STBLLM"],
    peer="magnitude 4:8, sign times the row's mean magnitude",
    unit="ratio of perplexities",
    bar=1.0,
    better="lower",
    summary=largest,
    sources=SOURCES,
)
def stb_perplexity(bench: Bench) -> Iterator[Row]:
    """Sequential calibration. Beside it other N, BiLLM-style at the same N and without zeros, no compensation."""
    plain = _perplexity(lambda weight, statistics: sign_times_scale(weight, 4))
    for name, layer in _variants().items():
        found = _perplexity(layer)
        note = f"{found:.1f} against {plain:.1f}, dense {_dense():.2f}"
        if name.startswith("STBLLM"):
            note += f"; {_bits(int(name.split()[1][0]))}"
        yield bench.value(name, found / plain, "ratio of perplexities", counted=name == "STBLLM 4:8", note=note)


@claim(
    "sign-flips",
    text="SmolLM2 with a fifth of its signs flipped, the least important ones against random ones: perplexity",
    system=["STBLLM"],
    peer="as many random flips",
    unit="ratio of perplexities",
    bar=0.1,
    better="lower",
    summary=largest,
    sources=SOURCES,
)
def sign_flips(bench: Bench) -> Iterator[Row]:
    """The experiment behind structured binarisation; 1 to 50 % of the signs."""
    for share in FLIPPED:
        least, random = _perplexity(_flipped(share, by_score=True)), _perplexity(_flipped(share, by_score=False))
        note = f"{least:.1f} against {random:.1f}"
        yield bench.value(f"{share:.0%}", least / random, "ratio of perplexities", counted=share == 0.2, note=note)


def _flipped(share: float, by_score: bool) -> Layer:
    """Flip the signs of a share: the least important by Wanda's score, or random ones."""
    return lambda weight, statistics: flip_signs(weight, share, wanda(weight, statistics) if by_score else None)


def _variants() -> dict[str, Layer]:
    def by(**options: Any) -> Layer:
        return lambda weight, statistics: binarise(weight, statistics, **options).to_dense()

    return {
        "STBLLM 4:8": by(n=4),
        "STBLLM 5:8": by(n=5),
        "STBLLM 6:8": by(n=6),
        "STBLLM 4:8 without compensation": by(n=4, compensate=False),
        "BiLLM-style 4:8": by(n=4, regions=2),
        "BiLLM-style, no zeros": by(n=8, regions=2),
    }


def _bits(n: int) -> str:
    dense, _, _ = _setting()
    layer = dense.model.model.layers[0].mlp.up_proj
    _, windows, _ = _setting()
    step = next(iter(calibrate(dense.model, windows, hessian=True)))
    weight = STBWeight.from_levels(binarise(dense_weight(layer), step.statistics["mlp.up_proj"], n))
    return f"{weight.nominal_bits:.2f} nominal and {weight.stored_bits:.2f} stored bits a weight"


@lru_cache(maxsize=1)
def _setting() -> tuple[Any, Tensor, Tensor]:
    dense, text = load_dense("smollm2-135m"), wikitext2()
    windows = calibration_windows(text, dense.tokenizer, 16, 512)
    return dense, windows, evaluation_windows(text, dense.tokenizer, 1024, 8)


@lru_cache(maxsize=1)
def _dense() -> float:
    dense, _, test = _setting()
    return perplexity(dense.model, test.flatten(), test.shape[1])


def _perplexity(layer_of: Layer) -> float:
    """Of the model whose layers were replaced block by block, each calibrated on those before; dense again afterwards."""
    dense, windows, test = _setting()
    before: list[tuple[Any, Tensor]] = []
    for step in calibrate(dense.model, windows, hessian=True):
        statistics = step.statistics
        for name, layer in linears(step.block).items():
            before.append((layer, dense_weight(layer).clone()))
            set_dense_weight(layer, layer_of(before[-1][1], statistics[name]))
    found = perplexity(dense.model, test.flatten(), test.shape[1])
    for layer, weight in before:
        set_dense_weight(layer, weight)
    return found
