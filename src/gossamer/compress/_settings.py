"""The settings of one compression run: a plain value that is checked once and written into the result."""

from __future__ import annotations

from dataclasses import dataclass

SCORES = ("magnitude", "wanda", "ria", "sparsegpt")
FORMATS = ("auto", "bitmap", "lossless", "nm", "dense")
PROPAGATIONS = ("sequential", "dense")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Settings:
    """What to do with every linear layer inside the model's blocks.

    sparsity: share of weights set to zero in every row (by SparseGPT: in every 128 columns of all rows together), in
        [0, 1). Ignored where ``pattern`` is given.
    pattern: None, or "N:M": keep N of every M consecutive inputs.
    score: what ranks the weights: "magnitude", "wanda", "ria", or "sparsegpt", which also corrects the kept ones.
    format: "bitmap", "lossless", "dense", or "auto": per layer the smallest that is not slower than dense here; or
        "nm", which needs a ``pattern`` and keeps the same inputs for 32 neighbouring outputs.
    propagate: "sequential" calibrates a block on the outputs of the blocks already compressed, "dense" on the original's.
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

    def __post_init__(self) -> None:
        if not 0.0 <= self.sparsity < 1.0:
            raise ValueError(f"sparsity must be in [0, 1), got {self.sparsity}")
        for name, accepted in (("score", SCORES), ("format", FORMATS), ("propagate", PROPAGATIONS), ("dtype", DTYPES)):
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {getattr(self, name)!r}")
        for name, least in (("samples", 1), ("seqlen", 8)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.format == "lossless" and self.dtype != "bfloat16":
            raise ValueError(f"format 'lossless' holds bfloat16 weights only, got dtype {self.dtype!r}")
        if self.n_of_m is None and self.format == "nm":
            raise ValueError("format 'nm' needs a pattern N:M, like 2:4 or 16:32")
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
    def prunes(self) -> bool:
        """Whether anything is set to zero."""
        return self.pattern is not None or self.sparsity > 0
