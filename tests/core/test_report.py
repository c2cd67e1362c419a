import json
import re

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.core.report import Report, read_report_data

DATA = {"perplexity": 44.09, "tokens": 31, "nasty": "</script><b>&", "list": [1, None, "ü"]}


def full_report():
    report = Report("A title with <angles>", "of a model")
    report.add_highlights([("perplexity", "44.09", "dense 23.61")])
    report.add_heading("Size")
    report.add_text("First.\n\nSecond & last.")
    report.add_table(["layer", "format", "density", "bytes"], [["q_proj", "bitmap", 0.5, 123456], ["k", None, 1.0, 2]])
    report.add_columns({"dense": "one\ntwo", "compressed": "<three>"})
    report.add_figure(go.Figure(go.Bar(x=["a", "b"], y=[1, 2])), "Bars")
    report.add_figure(go.Figure(go.Scatter(x=[1, 2], y=[3, 4])))
    report.add_json(DATA)
    return report


def test_data_come_back_as_they_were(tmp_path):
    path = full_report().write(tmp_path / "deep" / "report.html")
    assert read_report_data(path) == DATA
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
def test_any_text_survives_the_embedding(tmp_path_factory, data):
    report = Report("t")
    report.add_json(data)
    path = report.write(tmp_path_factory.mktemp("report") / "r.html")
    assert read_report_data(path) == data


def test_plotly_is_written_once_and_only_where_it_is_needed():
    assert full_report().html().count("plotly.js v") == 1
    assert len(Report("t").html()) < 10_000


def test_page_names_no_resource_outside_itself():
    page = re.sub(r"<script>.*?</script>", "", full_report().html(), flags=re.DOTALL)
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)[^"']*""", page)
    assert "@import" not in page


def test_texts_are_escaped():
    page = full_report().html()
    assert "&lt;angles&gt;" in page
    assert "<three>" not in page


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        (0.123456, "<td>0.1235</td>"),
        (1234567, "<td>1,234,567</td>"),
        (None, "<td></td>"),
        (12345.6, "<td>12,346</td>"),
        ("<", '<td class="text">&lt;</td>'),
    ],
)
def test_cells_show(cell, shown):
    report = Report("t")
    report.add_table(["x"], [[cell]])
    assert shown in report.html()


def test_ragged_rows_second_data_and_nan_are_refused():
    report = full_report()
    with pytest.raises(ValueError, match="2 cells"):
        report.add_table(["a", "b"], [[1]])
    with pytest.raises(ValueError, match="already"):
        report.add_json({})
    with pytest.raises(ValueError, match="JSON"):
        Report("t").add_json({"x": float("nan")})


def test_a_page_of_others_is_refused(tmp_path):
    (tmp_path / "x.html").write_text("<html></html>")
    with pytest.raises(ValueError, match="not a report"):
        read_report_data(tmp_path / "x.html")


@pytest.mark.browser
def test_page_works_in_a_browser_without_errors_or_requests(tmp_path, browse):
    page = browse(full_report().write(tmp_path / "r.html"))
    assert page.errors == []
    assert page.requests == []
    assert page.document.count('class="main-svg"') >= 2
    shown = re.search(r'id="gossamer-data">(.*?)</script>', page.document, re.DOTALL)
    assert json.loads(shown.group(1)) == DATA
    assert "44.09" in page.text
    assert "123,456" in page.text
