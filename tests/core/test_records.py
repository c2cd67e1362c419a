import json
from dataclasses import asdict, fields, replace

import pytest

from gossamer.core import measure, records
from gossamer.core.measure import Bench, claim, geometric_mean
from gossamer.core.records import Record, checkout, read_records, rooms_of, sources_hash, standings

ARCHITECTURE_FIELDS = {
    "id", "text", "system", "command", "peer", "peer_version", "hardware", "date", "commit", "sources_hash", "measured",
    "unit", "bar", "better", "met", "rows",
}  # fmt: skip


@pytest.fixture
def one_claim(monkeypatch):
    monkeypatch.setattr(measure, "_CLAIMS", {})

    @claim(
        "unit-test", text="two against one", peer="one", peer_package="numpy", unit="ratio", bar=1.5, better="higher",
        summary=geometric_mean, sources=["core/files.py"],
    )  # fmt: skip
    def benchmark(bench):
        yield bench.value("counted", 2.0, "ratio")
        yield bench.value("in cache", 50.0, "ratio", counted=False)

    return measure.registered_claims()["unit-test"]


def test_record_holds_every_field_and_survives_its_file(one_claim, tmp_path):
    seen = []
    record = records.measure(one_claim, Bench(), on_row=seen.append)
    assert {field.name for field in fields(record)} >= ARCHITECTURE_FIELDS
    path = record.save(tmp_path)
    assert path == tmp_path / "benchmarks" / "records" / "unit-test" / f"{record.hardware['slug']}.json"
    assert read_records(tmp_path) == [Record.load(path)]
    assert json.loads(path.read_text()) == json.loads(json.dumps(asdict(record)))
    assert [row.case for row in seen] == ["counted", "in cache"]


def test_rows_that_do_not_count_stay_out_of_the_figure(one_claim):
    record = records.measure(one_claim)
    assert record.measured == 2.0
    assert record.met
    assert record.summary == "geometric_mean"
    assert record.command == "gossamer bench unit-test"
    assert record.peer_version.startswith("numpy ")


def test_claim_without_a_counted_row_is_refused(one_claim):
    empty = replace(one_claim, function=lambda bench: iter([bench.value("x", 1.0, "s", counted=False)]))
    with pytest.raises(ValueError, match="no row that counts"):
        records.measure(empty)


def test_unmet_and_stale_come_first(one_claim):
    met = records.measure(one_claim)
    claims = {name: replace(one_claim, id=name) for name in "abcd"}
    found = standings(
        claims.values(),
        [replace(met, id="a"), replace(met, id="c", sources_hash="old"), replace(met, id="d", measured=1.0)],
    )
    assert [(standing.claim.id, standing.state) for standing in found] == [
        ("d", "unmet"), ("c", "stale"), ("b", "unmeasured"), ("a", "met"),
    ]  # fmt: skip


def test_a_record_is_judged_by_the_bar_of_today(one_claim):
    record = replace(records.measure(one_claim), measured=2.0, met=True)
    assert standings([replace(one_claim, bar=3.0)], [record])[0].state == "unmet"


def write_claim(one_claim, tmp_path, source):
    file = tmp_path / "bench.py"
    file.write_text(source)
    return replace(one_claim, file=file, sources=())


def test_hash_ignores_comments_docstrings_and_layout(one_claim, tmp_path):
    plain = sources_hash(write_claim(one_claim, tmp_path, "def f(x):\n    return x + 1\n"))
    dressed = '"""Text."""\n# a remark\ndef f(x):\n    """More."""\n    return (x\n        + 1)\n'
    assert sources_hash(write_claim(one_claim, tmp_path, dressed)) == plain


@pytest.mark.parametrize(
    "changed", ["def f(x):\n    return x + 2\n", "def f(x):\n    return x - 1\n", "def f(y):\n    return y + 1\n"]
)
def test_hash_sees_every_change_of_meaning(one_claim, tmp_path, changed):
    before = sources_hash(write_claim(one_claim, tmp_path, "def f(x):\n    return x + 1\n"))
    assert sources_hash(write_claim(one_claim, tmp_path, changed)) != before


def test_hash_covers_the_named_sources(one_claim):
    assert sources_hash(one_claim) != sources_hash(replace(one_claim, sources=("core/measure.py",)))


def test_sources_that_match_nothing_are_refused(one_claim):
    with pytest.raises(ValueError, match="match no file"):
        sources_hash(replace(one_claim, sources=("weights/_no_such*.py",)))


@pytest.mark.parametrize(
    ("source", "rooms"),
    [
        ("import gossamer.weights", ["weights"]),
        ("from gossamer import weights, compress", ["compress", "weights"]),
        ("def f():\n    from gossamer.weights import BitmapWeight", ["weights"]),
        ("from gossamer.core.measure import claim\nimport numpy", []),
    ],
)
def test_rooms_of_a_claim_are_those_it_imports(one_claim, tmp_path, source, rooms):
    assert rooms_of(write_claim(one_claim, tmp_path, source)) == rooms


def test_a_file_that_is_no_record_is_named(tmp_path):
    path = tmp_path / "benchmarks" / "records" / "x" / "y.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"id": "x"}')
    with pytest.raises(ValueError, match=r"y\.json is not a record"):
        read_records(tmp_path)


def test_a_wheel_has_no_benchmarks(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "_PACKAGE", tmp_path / "site-packages" / "gossamer")
    with pytest.raises(FileNotFoundError, match="in a checkout"):
        checkout()


def test_outside_git_the_commit_is_empty(tmp_path):
    assert records.commit(tmp_path) == ""
