"""Build the wheel, install it with its base dependencies into an empty environment, and use it there."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Run every check; the first that fails ends the script with its message."""
    with tempfile.TemporaryDirectory(prefix="gossamer-wheel-") as folder:
        wheel = build(Path(folder))
        check_contents(wheel)
        check_use(wheel, Path(folder))
    print(f"{wheel.name}: contents, --help without extras, and messages about extras are right")


def build(folder: Path) -> Path:
    """The wheel of this checkout."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """The wheel holds the package, its ledger, its device sources and the licence, and nothing of the checkout else."""
    names = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "gossamer"
    shipped = {".py", ".cu", ".toml"}
    wanted = {f"gossamer/{file.relative_to(package)}" for file in package.rglob("*") if file.suffix in shipped}
    expect(wanted <= names, f"the wheel lacks {sorted(wanted - names)}")
    others = {name for name in names - wanted if ".dist-info/" not in name and not name.endswith("py.typed")}
    expect(not others, f"the wheel holds what it should not: {sorted(others)}")
    expect(any(name.endswith("licenses/LICENSE") for name in names), "the wheel lacks the licence")


def check_use(wheel: Path, folder: Path) -> None:
    """With base dependencies only, help works and every verb that needs more says what."""
    environment = folder / "empty"
    run(sys.executable, "-m", "venv", str(environment))
    python, gossamer = environment / "bin" / "python", str(environment / "bin" / "gossamer")
    constraints = str(ROOT / "constraints.txt")
    run(str(python), "-m", "pip", "install", "--quiet", "--constraint", constraints, str(wheel))
    expect("compress" in run(gossamer, "--help"), "gossamer --help does not list the verbs")
    expect("SpInfer" in run(gossamer, "systems", "SpInfer"), "gossamer systems does not work in a wheel")
    for verb, remedy in {
        ("bench",): "checkout",
        ("claims",): "checkout",
        ("compress", "smollm2-135m", "--out", str(folder / "model")): "pip install 'gossamer[llm]'",
        ("evaluate", str(folder)): "pip install 'gossamer[llm]'",
        ("generate", str(folder), "--prompt", "x"): "pip install 'gossamer[llm]'",
    }.items():
        done = subprocess.run([gossamer, *verb], capture_output=True, text=True, cwd=folder)
        said = done.stderr.strip()
        expect(done.returncode == 2, f"gossamer {verb[0]} should exit with 2, got {done.returncode}: {said}")
        expect(
            remedy in said and "\n" not in said, f"gossamer {verb[0]} should name {remedy} in one line, said: {said}"
        )


def run(*command: str) -> str:
    """Standard output of a command that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    expect(done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def expect(holds: bool, message: str) -> None:
    """End the script with ``message`` unless ``holds``."""
    if not holds:
        sys.exit(f"wheel check: {message}")


if __name__ == "__main__":
    main()
