"""The verbs ``gossamer weights pack``, ``unpack``, ``verify`` and ``inspect``."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn
from rich.table import Table

app = typer.Typer()
room = typer.Typer(no_args_is_help=True)
app.add_typer(room, name="weights", help="Checkpoints in fewer bytes, bit for bit. Every verb takes --json.")
_err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Pieces at a time; as many as processors by default.")]


@app.callback()
def _rooms() -> None:
    """Hold the room's verbs."""


_TELLING_BYTES = 4096
"""Of smaller tensors, the share says only that a record has a head."""


@room.command("pack")
def pack_command(
    source: Annotated[Path, typer.Argument(help="A safetensors file, an index of shards, or a model's folder.")],
    out: Annotated[Path, typer.Argument(help="The file to write; it must not exist.")],
    threads: Threads = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Throw an unfinished run away instead of resuming it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Pack a safetensors checkpoint into one smaller file; an interrupted run goes on where it was."""
    from gossamer.weights import pack_checkpoint

    with _progress() as progress:
        pack_checkpoint(source, out, threads, progress, fresh)
    _show(out, as_json, each_tensor=False)


@room.command("unpack")
def unpack_command(
    packed: Annotated[Path, typer.Argument(help="A file that gossamer weights pack wrote.")],
    out: Annotated[Path, typer.Argument(help="The file to write, or the folder for shards; it must not exist.")],
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Write the original checkpoint again, every byte as it was."""
    from gossamer.weights import PackedCheckpoint

    with _progress() as progress, PackedCheckpoint(packed) as checkpoint:
        checkpoint.unpack(out, threads, progress)
        files = list(checkpoint.files)
    if as_json:
        print(json.dumps({"out": str(out), "files": files}))
    else:
        Console().print(f"wrote {out}")


@room.command("verify")
def verify_command(
    packed: Annotated[Path, typer.Argument(help="A file that gossamer weights pack wrote.")],
    against: Annotated[Path | None, typer.Option(help="Compare with this checkpoint, byte by byte.")] = None,
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """Decode everything and check every checksum."""
    from gossamer.weights import PackedCheckpoint
    from gossamer.weights._safetensors_files import checkpoint_files

    with _progress() as progress, PackedCheckpoint(packed) as checkpoint:
        checkpoint.verify(checkpoint_files(against)[0] if against else None, threads, progress)
        tensors = sum(1 for _ in checkpoint.tensors())
    if as_json:
        print(json.dumps({"packed": str(packed), "ok": True, "tensors": tensors, "compared": against is not None}))
    else:
        compared = f", equal to {against}" if against else ""
        Console().print(f"{packed}: all {tensors} tensors are whole{compared}")


@room.command("inspect")
def inspect_command(
    packed: Annotated[Path, typer.Argument(help="A file that gossamer weights pack wrote.")], as_json: Json = False
) -> None:
    """Show how every tensor is stored and what that saves."""
    _show(packed, as_json, each_tensor=True)


def _show(packed: Path, as_json: bool, each_tensor: bool) -> None:
    from gossamer.weights import PackedCheckpoint

    with PackedCheckpoint(packed) as checkpoint:
        tensors = list(checkpoint.tensors())
        dense, stored = checkpoint.nbytes, checkpoint.packed_nbytes
        files = list(checkpoint.files)
    if as_json:
        listed = {"tensors": [asdict(tensor) for tensor in tensors]} if each_tensor else {}
        print(json.dumps({"packed": str(packed), "files": files, "bytes": dense, "packed_bytes": stored, **listed}))
        return
    if each_tensor:
        table = Table("tensor", "type", "shape", "coding", "MB", "of plain")
        for tensor in tensors:
            part = f"{100 * tensor.stored / tensor.nbytes:.1f} %" if tensor.nbytes >= _TELLING_BYTES else ""
            shape = "x".join(map(str, tensor.shape))
            table.add_row(
                escape(tensor.name), tensor.dtype, shape, escape(tensor.coding), f"{tensor.stored / 1e6:.3f}", part
            )
        Console().print(table)
    share = 100 * stored / dense
    Console().print(
        f"{packed}: {stored / 1e6:.1f} MB for {dense / 1e6:.1f} MB in {len(tensors)} tensors, {share:.1f} %"
    )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A callable ``progress(what, done, total)`` that draws a bar of bytes."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=_err) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield show
