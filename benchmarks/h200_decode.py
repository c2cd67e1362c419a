"""Decoding a LLaMA-3.1-8B-shaped model on one GPU: compressed blocks against dense ones in the very same loop.

Weights are random: 32 blocks, hidden 4096, 32 query and 8 key heads of 128, inner 14336, vocabulary 128256, normal
numbers with a deviation of 0.02. One block is encoded and its bytes are copied for the others, so that every block has
memory of its own. A step is one CUDA graph for every format: queries, keys and values are one matrix, gate and up too, and
between the products run the same four kernels. The dense peer is that loop with ``torch.nn.functional.linear``, by cuBLAS
or cuBLASLt, whichever makes the faster loop at this batch.

Bitmap and N:M weights are pruned, and as pruning methods do, the blocks alone are: their LM head is the dense one. Lossless
weights cover the head too.

A prompt of 128 tokens, then so many steps as a row says, from the same position every time, dense and compressed in turn.
Memory is what torch allocated for one model and its decoder, at most, from its construction to its last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gossamer.compress import BatchDecoder, Joint, LlamaBlock, LlamaWeights, plain_rotary
from gossamer.core.measure import Bench, Row, claim, median, worst
from gossamer.weights import FragmentBitmapWeight, FragmentLosslessWeight, NMPattern, NMWeight, WeightFormat

BLOCKS, HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, INNER, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
PROMPT = 128
BATCHES = (1, 8, 32)
COUNTED_STEPS, STEPS = 64, 16
LIBRARIES = ("cublas", "cublaslt")
SOURCES = (
    "compress/_batch_decode.py", "compress/_llama_*.py", "compress/kernels/decode_*.cu", "weights/_fragments*.py",
    "weights/_bitmap_fragments.py", "weights/_lossless_fragments.py", "weights/_nm*.py", "weights/_gpu_source.py",
    "weights/kernels/*.cu", "core/nvrtc.py",
)  # fmt: skip

Matrix = Tensor | WeightFormat
Encode = Callable[[Tensor], Matrix]


def pruned(sparsity: float) -> Encode:
    """Bitmaps of matrices without so many of their entries, at random places."""

    def encode(weight: Tensor) -> Matrix:
        weight[torch.rand(weight.shape, device="cuda") < sparsity] = 0
        return FragmentBitmapWeight.from_dense(weight)

    return encode


FORMATS: dict[str, Encode] = {
    "50 % bitmap": pruned(0.5),
    "60 % bitmap": pruned(0.6),
    "70 % bitmap": pruned(0.7),
    "lossless 12 bits": FragmentLosslessWeight.from_dense,
    "4:8, L = 32": lambda weight: NMWeight.from_dense(weight, NMPattern(4, 8, 32)),
}
COMPRESSED_HEAD = "lossless 12 bits"


@dataclass(frozen=True)
class Model:
    """Weights, and the bytes that torch allocated for them."""

    weights: LlamaWeights
    allocated: int


@claim(
    "h200-decode-e2e",
    text="LLaMA-3.1-8B-shaped decode on an H200, 1 and 8 sequences: 50 % bitmap blocks against dense ones in the same loop",
    system=["SpInfer", "ZipServ"],
    peer="the same loop with torch.nn.functional.linear, the faster of cuBLAS and cuBLASLt",
    peer_package="torch",
    unit="ratio",
    bar=1.1,
    better="higher",
    summary=worst,
    sources=SOURCES,
)
def decode(bench: Bench) -> Iterator[Row]:
    torch.manual_seed(1234)
    dense = build(lambda weight: weight, False)
    models = {name: build(encode, name == COMPRESSED_HEAD) for name, encode in FORMATS.items()}
    for batch in BATCHES:
        peer_name, peer, peer_memory = fastest_dense(dense, batch)
        for name, model in models.items():
            counted = name.startswith("50 %") and batch <= 8
            steps = COUNTED_STEPS if counted else STEPS
            ours, memory = decoder_of(model, batch)
            if batch == 1:
                check(ours)
            row = bench.compare("", partial(run, ours, steps), {peer_name: partial(run, peer, steps)})
            assert row.peer is not None
            speeds = [f"{batch * steps / seconds:.0f}" for seconds in (row.ours, row.peer)]
            sizes = [f"{model.weights.nbytes / 1e9:.2f}", f"{dense.weights.nbytes / 1e9:.2f}"]
            peaks = [f"{memory / 1e9:.2f}", f"{peer_memory / 1e9:.2f}"]
            note = (
                f"{speeds[0]} tokens/s, dense {speeds[1]}; weights {sizes[0]} GB, dense {sizes[1]}; "
                f"peak {peaks[0]} GB, dense {peaks[1]}; {steps} steps"
            )
            yield replace(row, case=f"{name}, batch {batch}", counted=counted, note=note)
            del ours
        del peer


def build(encode: Encode, with_head: bool) -> Model:
    """One matrix at a time is dense while it is encoded."""
    before = torch.cuda.memory_allocated()
    ones = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
    shapes = (
        ((HEADS + 2 * KEY_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HEADS * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER),
    )  # fmt: skip
    first = [encode(normal(shape)) for shape in shapes]
    blocks = []
    for _ in range(BLOCKS):
        qkv, output, gate_up, down = (Joint((copied(matrix),)) for matrix in first)
        blocks.append(LlamaBlock(ones, qkv, output, ones, gate_up, down))
    head = normal((VOCABULARY, HIDDEN))
    head_matrix = encode(head) if with_head else head
    weights = LlamaWeights(
        heads=HEADS, key_heads=KEY_HEADS, head_dim=HEAD_DIM, epsilon=1e-5, scale=HEAD_DIM**-0.5,
        embedding=normal((VOCABULARY, HIDDEN)), blocks=blocks, norm=ones, head=Joint((head_matrix,)),
        rotary=plain_rotary(HEAD_DIM, 500_000.0, "cuda"),
    )  # fmt: skip
    del first, head, head_matrix
    return Model(weights, torch.cuda.memory_allocated() - before)


def normal(shape: tuple[int, int]) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)


def copied(matrix: Matrix) -> Matrix:
    if isinstance(matrix, NMWeight):
        return matrix.to("cuda", copy=True)
    assert isinstance(matrix, Tensor | FragmentBitmapWeight | FragmentLosslessWeight)
    return matrix.clone()


def decoder_of(model: Model, batch: int) -> tuple[BatchDecoder, int]:
    """A decoder with its prompt, and the most bytes that the model and it took."""
    ids = torch.randint(0, VOCABULARY, (batch, PROMPT))
    BatchDecoder(model.weights, batch, 32).prefill(ids[:, :32])  # plans are measured, on copies of weights
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    decoder = BatchDecoder(model.weights, batch, PROMPT + COUNTED_STEPS)
    decoder.prefill(ids)
    run(decoder, STEPS)
    return decoder, model.allocated + torch.cuda.max_memory_allocated() - before


def run(decoder: BatchDecoder, steps: int) -> None:
    """So many steps from the end of the prompt."""
    decoder.rewind(PROMPT)
    decoder.generate(steps + 1)  # the first token is the prompt's
    torch.cuda.synchronize()


def fastest_dense(dense: Model, batch: int) -> tuple[str, BatchDecoder, int]:
    """The library whose loop is faster, that loop, and its memory."""
    known = {}
    for name in LIBRARIES:
        with library(name):
            known[name] = decoder_of(dense, batch)
    bench = Bench(samples=3)
    seconds = {name: median(bench.seconds(partial(run, decoder, STEPS))) for name, (decoder, _) in known.items()}
    best = min(seconds, key=seconds.__getitem__)
    return best, *known[best]


@contextmanager
def library(name: str) -> Iterator[None]:
    """What torch multiplies dense matrices with while a step is captured."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def check(decoder: BatchDecoder) -> None:
    """The captured step computes what the same blocks compute in torch: one prompt, its last token by either.

    Both round to bfloat16 between operations, each in its own way, 32 blocks deep.
    """
    ids = torch.randint(0, VOCABULARY, (decoder.batch, PROMPT), device="cuda")
    expected = decoder.prefill(ids).float()
    decoder.prefill(ids[:, :-1])
    error = float((decoder.step(ids[:, -1]).float() - expected).norm() / expected.norm())
    assert error < 0.2, f"relative error {error}"
    decoder.prefill(ids)
