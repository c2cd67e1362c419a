import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from gossamer import __version__, cli

RUNNER = CliRunner()


def gossamer(*arguments):
    return RUNNER.invoke(cli.app, list(arguments))


def test_help_lists_every_verb():
    shown = gossamer("--help").output
    for verb in cli._VERBS:
        assert f"  {verb} " in shown


def test_version():
    assert gossamer("--version").output == f"gossamer {__version__}\n"


@pytest.mark.parametrize("verb", cli._VERBS)
def test_every_verb_is_there_and_explains_itself(verb):
    result = gossamer(verb, "--help")
    assert result.exit_code == 0
    assert f"gossamer {verb}" in result.output
    assert "--json" in result.output


def test_unknown_verb_is_a_usage_error():
    result = gossamer("comprss")
    assert result.exit_code == 2
    assert "comprss" in result.output


@pytest.fixture
def failing_verb(monkeypatch):
    """Let `gossamer systems` end in a given exception."""

    def fail_with(error):
        def raise_it(verb, arguments):
            raise error

        monkeypatch.setattr(cli, "_call", raise_it)

    return fail_with


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("sparsity must be in [0, 1),\n got 2"), "gossamer systems: sparsity must be in [0, 1), got 2\n"),
        (FileNotFoundError(2, "No such file", "a.txt"), "gossamer systems: [Errno 2] No such file: 'a.txt'\n"),
        (OSError(28, "No space left on device"), "gossamer systems: [Errno 28] No space left on device\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "gossamer systems: needs torch, which is not installed: pip install 'gossamer[llm]'\n",
        ),
        (
            ModuleNotFoundError("No module named 'plotly.offline'", name="plotly.offline"),
            "gossamer systems: needs plotly, which is not installed: pip install 'gossamer[report]'\n",
        ),
        (TypeError(), "gossamer systems: TypeError\n"),
    ],
)
def test_what_a_user_can_mend_is_told_in_one_line(failing_verb, error, line):
    failing_verb(error)
    result = gossamer("systems")
    assert result.exit_code == 2
    assert result.stderr == line
    assert result.stdout == ""


def test_debug_shows_the_traceback(failing_verb):
    failing_verb(ValueError("inner"))
    assert isinstance(gossamer("--debug", "systems").exception, ValueError)


def test_a_bug_is_not_hidden(failing_verb):
    failing_verb(AssertionError("bug"))
    assert isinstance(gossamer("systems").exception, AssertionError)


def test_exit_codes_of_verbs_are_kept(failing_verb):
    failing_verb(typer.Exit(1))
    assert gossamer("systems").exit_code == 1


def test_systems_as_json_holds_every_entry():
    from gossamer.core.systems import read_systems

    shown = json.loads(gossamer("systems", "--json").output)
    assert [entry["name"] for entry in shown] == [system.name for system in read_systems()]


def test_systems_can_be_chosen_by_status_and_name():
    planned = json.loads(gossamer("systems", "--status", "planned", "--json").output)
    assert planned
    assert {entry["status"] for entry in planned} == {"planned"}
    assert json.loads(gossamer("systems", "zipserv", "--json").output)["name"] == "ZipServ"
    assert "weights" in gossamer("systems", "SpInfer").output


def test_misspelt_system_is_answered_with_close_names():
    result = gossamer("systems", "spinfr")
    assert result.exit_code == 2
    assert "did you mean SpInfer" in result.stderr


def test_unknown_status_is_refused():
    assert "status must be one of works, partial, planned" in gossamer("systems", "--status", "done").stderr


def test_claims_and_bench_need_a_checkout(monkeypatch, tmp_path):
    from gossamer.core import records

    monkeypatch.setattr(records, "_PACKAGE", tmp_path / "site-packages" / "gossamer")
    for verb in ("claims", "bench"):
        result = gossamer(verb)
        assert result.exit_code == 2
        assert "checkout" in result.stderr


def test_bench_names_the_claims_when_asked_for_another():
    result = gossamer("bench", "no-such-claim")
    assert result.exit_code == 2
    assert "no claim or room is called 'no-such-claim'" in result.stderr


def test_closed_pipe_is_no_traceback():
    run = f"{sys.executable} -m gossamer.cli systems --json | head -c 10"
    done = subprocess.run(["bash", "-c", run], capture_output=True, text=True)
    assert done.stdout == '[{"name": '
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("verb", "line"),
    [
        ("systems", "gossamer systems: interrupted\n"),
        ("compress", "gossamer compress: interrupted; the same command goes on from there\n"),
    ],
)
def test_an_interruption_is_told_and_has_the_usual_exit_code(failing_verb, verb, line):
    failing_verb(KeyboardInterrupt())
    result = gossamer(verb)
    assert result.exit_code == 130
    assert result.output == line


def test_tables_are_whole_where_nobody_looks():
    shown = gossamer("systems").output
    assert "\u2026" not in shown
    assert "dense products from generated micro-kernels with model-driven tiling" in shown
