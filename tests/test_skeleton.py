"""The house rules that hold for every room."""

import ast
import importlib
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import gossamer
from gossamer.core.systems import STATUSES, read_systems

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "gossamer"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
SYSTEMS = read_systems()
BUILT = [system for system in SYSTEMS if system.status != "planned"]


def in_a_fresh_process(code):
    """Processor seconds that a Python process with ``code`` takes, the best of five, and what it printed."""

    def run():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout

    return min((run() for _ in range(5)), key=lambda taken: taken[0])


def test_importing_gossamer_takes_less_than_0_3_s_and_no_heavy_library():
    seconds, loaded = in_a_fresh_process("import gossamer, sys; print(*sys.modules)")
    assert seconds < 0.3
    assert not {"torch", "numpy", "numba", "typer", "transformers"} & set(loaded.split())


def test_help_takes_less_than_0_3_s_and_no_heavy_library():
    code = "import gossamer.cli, sys\ntry: gossamer.cli.app(['--help'])\nexcept SystemExit: print(*sys.modules)"
    seconds, shown = in_a_fresh_process(code)
    assert "compress" in shown
    assert seconds < 0.3
    assert not {"torch", "numpy", "numba", "rich", "transformers"} & set(shown.split())


def test_every_room_is_reached_from_the_package():
    assert dir(gossamer) == ["__version__", *ROOMS]
    with pytest.raises(AttributeError, match="its rooms are"):
        gossamer.no_such_room  # noqa: B018


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_is_for(room):
    assert len(importlib.import_module(f"gossamer.{room}").__doc__) > 60


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_room_reaches_into_another_rooms_private_modules():
    offences = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        for name in imports_of(path)
        if (match := re.match(r"gossamer\.(\w+)\._", name)) and match[1] != path.relative_to(PACKAGE).parts[0]
    ]
    assert offences == []


def test_files_hold_one_concept_each():
    assert [path.name for path in PACKAGE.rglob("*.py") if path.stem in {"utils", "helpers", "common"}] == []
    assert [path.name for path in PACKAGE.rglob("*.py") if len(path.read_text().splitlines()) > 600] == []


def test_the_extra_that_a_missing_module_is_answered_with_holds_it():
    from gossamer.cli import _EXTRAS

    extras = PROJECT["project"]["optional-dependencies"]
    for module, extra in _EXTRAS.items():
        assert any(re.match(rf"{module}\b", requirement) for requirement in extras[extra]), (module, extra)


def test_torch_is_pinned_exactly():
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text().splitlines()


def test_names_of_systems_are_unique_and_their_rooms_have_a_layer():
    names = [system.name.lower() for system in SYSTEMS]
    assert len(names) == len(set(names)) > 55
    (layers,) = PROJECT["tool"]["importlinter"]["contracts"]
    assert {system.room for system in SYSTEMS} <= set(re.findall(r"\w+", " ".join(layers["layers"])))


def test_systems_stand_room_by_room():
    rooms = [system.room for system in SYSTEMS]
    assert len([room for room, before in zip(rooms, ["", *rooms], strict=False) if room != before]) == len(set(rooms))


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_a_status_is_backed(system):
    assert system.status in STATUSES
    assert 20 < len(system.what) < 125
    assert bool(system.missing) == (system.status == "partial")
    built = system.status != "planned"
    assert bool(system.entry_points) == bool(system.docs) == bool(system.tests) == built


@pytest.mark.parametrize("system", BUILT, ids=lambda system: system.name)
def test_a_built_system_is_where_the_ledger_says(system):
    for entry_point in system.entry_points:
        module, _, name = entry_point.partition(":")
        assert module.split(".")[1] in (system.room, "weights")  # how a system of compress stores its weights
        assert getattr(importlib.import_module(module), name).__doc__
    assert (ROOT / "docs" / system.docs).is_file()
    assert all((ROOT / path).exists() for path in system.tests)
    assert system.docs in (ROOT / "mkdocs.yml").read_text()


def test_claims_and_ledger_name_each_other():
    from gossamer.core.records import load_claims

    claims = load_claims(ROOT)
    named = {claim: system.name for system in SYSTEMS for claim in system.claims}
    assert set(named) <= set(claims)
    assert {name for claim in claims.values() for name in claim.system} <= {system.name for system in SYSTEMS}
    for claim in claims.values():
        assert claim.function.__doc__ or claim.text
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", claim.id)
