"""How long a newcomer waits: a fresh copy of the repository, `make demo`, installation included."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

from gossamer.core.measure import Bench, Row, claim, largest
from gossamer.core.records import checkout


@claim(
    "demo",
    text="make demo on a fresh copy with two cores, installation included",
    peer="none",
    unit="s",
    bar=600,
    better="lower",
    summary=largest,
    sources=["compress/*.py"],
)
def demo(bench: Bench) -> Iterator[Row]:
    """Wall time of the whole target; beside it, the largest resident set of any of its processes."""
    with tempfile.TemporaryDirectory(prefix="gossamer-demo-") as folder:
        copy_tracked_files(checkout(), Path(folder))
        environment = bare_environment() | {
            "XDG_CACHE_HOME": str(Path(folder) / "cache")
        }  # nothing is known from before
        start = perf_counter()
        subprocess.run(["make", "demo"], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds = perf_counter() - start
        if not (Path(folder) / "build" / "demo" / "report.html").is_file():
            raise FileNotFoundError("make demo ended without its report")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    with bench.threads(os.cpu_count() or 1):
        yield bench.value("wall time", seconds, "s", note="package downloads included")
        yield bench.value("peak memory of one process", peak, "MiB", counted=False)


def copy_tracked_files(source: Path, target: Path) -> None:
    """What a clone of ``source`` would hold, with its uncommitted changes."""
    listed = subprocess.run(["git", "-C", str(source), "ls-files", "-z"], capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target / name)


def bare_environment() -> dict[str, str]:
    """The environment of a fresh shell: no virtual environment, no Python path."""
    dropped = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL"}
    return {name: value for name, value in os.environ.items() if name not in dropped}
