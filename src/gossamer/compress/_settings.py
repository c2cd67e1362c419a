"""The settings of one compression run: a plain value that is checked once and written into the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gossamer.compress._budget import integer_pattern
from gossamer.compress._metric import SymbolicMetric

SCORES = ("magnitude", "wanda", "ria", "sparsegpt")
FORMATS = ("auto", "bitmap", "lossless", "nm", "stb", "dense")
PROPAGATIONS = ("sequential", "dense")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Settings:
    """What to do with every linear layer inside the model's blocks.

    sparsity: share of weights set to zero in every row (by SparseGPT: in every 128 columns of all rows together), in
        [0, 1). Ignored where ``pattern`` is given.
    pattern: None, or "N:M": keep N of every M consecutive inputs.
    score: what ranks the weights: "magnitude", "wanda", "ria", or "sparsegpt", which also corrects the kept ones; or a
        formula that a search found, as :meth:`SymbolicMetric.parse` reads it.
    allocation: None, or the sparsity of every block, for which ``sparsity`` is then only a name; with a ``pattern``,
        N is moved between blocks in these proportions while the mean stays. "owl" finds it by outliers first.
    format: "bitmap", "lossless", "dense", or "auto": per layer the smallest that is not slower than dense here; or
        "nm", which needs a ``pattern`` and keeps the same inputs for 32 neighbouring outputs; or "stb", which needs a
        pattern N:8 and binarises what is kept.
    propagate: "sequential" calibrates a block on the outputs of the blocks already compressed, "dense" on the original's.
    update: whether what a score keeps is corrected as SparseGPT does; SparseGPT's own score always is.
    samples, seqlen: calibration windows and tokens per window.
    dtype: of the stored weights.

    Raises:
        ValueError: from construction, naming the setting.

    >>> Settings(sparsity=1.5)
    Traceback (most recent call last):
        ...
    ValueError: sparsity must be in [0, 1), got 1.5
    """

    sparsity: float = 0.5
    pattern: str | None = None
    score: str = "wanda"
    format: str = "auto"
    propagate: str = "sequential"
    samples: int = 16
    seqlen: int = 512
    dtype: str = "bfloat16"
    allocation: tuple[float, ...] | str | None = None
    update: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.sparsity < 1.0:
            raise ValueError(f"sparsity must be in [0, 1), got {self.sparsity}")
        if self.score not in SCORES:
            self._check_formula()
        for name, accepted in (("format", FORMATS), ("propagate", PROPAGATIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        for name, least in (("samples", 1), ("seqlen", 8)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.format == "lossless" and self.dtype != "bfloat16":
            raise ValueError(f"format 'lossless' holds bfloat16 weights only, got dtype {self.dtype!r}")
        if isinstance(self.allocation, str):
            if self.allocation != "owl":
                raise ValueError(f"allocation must be sparsities or 'owl', got {self.allocation!r}")
        elif self.allocation is not None and not all(0.0 <= value < 1.0 for value in self.allocation):
            raise ValueError(f"allocation must be a sparsity in [0, 1) for every block, got {self.allocation}")
        if self.n_of_m is None and self.format == "nm":
            raise ValueError("format 'nm' needs a pattern N:M, like 2:4 or 16:32")
        if self.format == "stb" and (self.n_of_m is None or self.n_of_m[1] != 8 or self.score == "sparsegpt"):
            raise ValueError(
                "format 'stb' needs a pattern N:8 and a score that ranks weights, "
                f"got pattern {self.pattern!r} and score {self.score!r}"
            )
        if self.update and self.format == "stb":
            raise ValueError("format 'stb' corrects what is kept by itself; leave update out")
        if self.format == "nm" and self.score == "sparsegpt":
            raise ValueError(
                "format 'nm' takes one mask for 32 outputs, which score 'sparsegpt' cannot choose; use wanda"
            )

    @property
    def n_of_m(self) -> tuple[int, int] | None:
        """The pattern as two numbers."""
        if self.pattern is None:
            return None
        kept, _, window = self.pattern.partition(":")
        if not (kept.isdigit() and window.isdigit() and 0 < int(kept) < int(window)):
            raise ValueError(f"pattern must be N:M with 0 < N < M, like 2:4, got {self.pattern!r}")
        return int(kept), int(window)

    @property
    def metric(self) -> SymbolicMetric | None:
        """The formula that ranks the weights, None for SparseGPT and for what has code of its own."""
        return None if self.score in SCORES else SymbolicMetric.parse(self.score)

    def _check_formula(self) -> None:
        try:
            SymbolicMetric.parse(self.score)
        except ValueError as error:
            raise ValueError(
                f"score must be one of {', '.join(SCORES)} or a formula, got {self.score!r} ({error})"
            ) from error

    def of_block(self, index: int, sizes: Sequence[int]) -> Settings:
        """The settings for block ``index`` of a model whose blocks have ``sizes`` weights.

        Raises:
            ValueError: the allocation is for another number of blocks.
        """
        if self.allocation is None:
            return self
        if isinstance(self.allocation, str):
            raise ValueError(f"allocation {self.allocation!r} has to be found first")
        if len(self.allocation) != len(sizes):
            raise ValueError(f"allocation is for {len(self.allocation)} blocks, but the model has {len(sizes)}")
        if self.n_of_m is None:
            return replace(self, sparsity=self.allocation[index], allocation=None)
        kept, window = self.n_of_m
        densities = [1 - value for value in self.allocation]
        own = integer_pattern(densities, sizes, 1 - kept / window, window)[index]
        if self.format == "stb":
            own = min(own, window - 1)
        return replace(self, pattern=f"{own}:{window}" if own < window else None, sparsity=0.0, allocation=None)

    @property
    def needs_hessian(self) -> bool:
        """Whether calibration has to collect Hessians."""
        metric = self.metric
        return self.score == "sparsegpt" or self.update or self.format == "stb" or bool(metric and metric.needs_hessian)

    @property
    def prunes(self) -> bool:
        """Whether anything is set to zero."""
        return self.pattern is not None or self.sparsity > 0 or self.allocation is not None
