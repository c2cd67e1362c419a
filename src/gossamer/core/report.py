"""A report as one HTML file that needs nothing else: no network, no folder beside it.

Parts are added in reading order; figures are Plotly's, whose script is written into the file once. The numbers behind
the page travel with it as JSON, for programs that read reports.

>>> report = Report("Compression of a model", "SmolLM2-135M at 50 %")
>>> report.add_heading("Size")
>>> report.add_table(["", "MB"], [["dense", 269.1], ["compressed", 151.0]])
>>> report.add_json({"dense": 269.1, "compressed": 151.0})
>>> "<td>269.1</td>" in report.html()
True
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gossamer.core.files import atomic_write

Cell = str | int | float | None

_DATA_ID = "gossamer-data"


class Report:
    """A report that is put together part by part and written once.

    title, subtitle: plain text at the top. All texts are plain: they are escaped, never read as HTML.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self.title = title
        self.subtitle = subtitle
        self._parts: list[str] = []
        self._data: Any = None
        self._figures = 0

    def add_heading(self, text: str) -> None:
        """Start a section."""
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def add_text(self, text: str) -> None:
        """Add paragraphs; an empty line divides them."""
        paragraphs = [escape(paragraph.strip()) for paragraph in text.split("\n\n")]
        self._parts += [f"<p>{paragraph}</p>" for paragraph in paragraphs if paragraph]

    def add_highlights(self, items: Sequence[tuple[str, str, str]]) -> None:
        """Add large figures side by side, each with a label above and a note below: ``(label, figure, note)``."""
        cards = "".join(
            f'<div class="card"><span>{escape(label)}</span><b>{escape(figure)}</b><small>{escape(note)}</small></div>'
            for label, figure, note in items
        )
        self._parts.append(f'<div class="cards">{cards}</div>')

    def add_table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], caption: str = "") -> None:
        """Add a table. Numbers are right-aligned, floats shown with four significant digits, None as an empty cell.

        Raises:
            ValueError: a row has not as many cells as the header.
        """
        for row in rows:
            if len(row) != len(header):
                raise ValueError(f"every row must have {len(header)} cells like the header, got {list(row)}")
        head = "".join(f"<th>{escape(name)}</th>" for name in header)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
        below = f"<caption>{escape(caption)}</caption>" if caption else ""
        table = f"<table>{below}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._parts.append(f'<div class="scroll">{table}</div>')

    def add_columns(self, texts: Mapping[str, str]) -> None:
        """Add texts side by side under their titles, line breaks kept: samples of two models, for instance."""
        columns = "".join(
            f"<div><h3>{escape(title)}</h3><pre>{escape(text)}</pre></div>" for title, text in texts.items()
        )
        self._parts.append(f'<div class="columns">{columns}</div>')

    def add_figure(self, figure: Any, caption: str = "") -> None:
        """Add a ``plotly.graph_objects.Figure``; its colours follow the reader's light or dark setting."""
        self._figures += 1
        figure.update_layout(
            template="plotly_white", paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)",
            colorway=_COLOURS, font_family="system-ui, sans-serif", margin={"l": 60, "r": 20, "t": 50, "b": 50},
        )  # fmt: skip
        drawn = figure.to_html(
            full_html=False, include_plotlyjs=False, div_id=f"figure-{self._figures}",
            config={"displayModeBar": False, "responsive": True},
        )  # fmt: skip
        below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
        self._parts.append(f"<figure>{drawn}{below}</figure>")

    def add_json(self, data: Any) -> None:
        """Embed ``data`` as JSON; :func:`read_report_data` reads it back. A report carries one such value.

        Raises:
            ValueError: the report carries data already, or ``data`` holds NaN or an infinity, which JSON lacks.
        """
        if self._data is not None:
            raise ValueError("the report carries data already; add one object with everything in it")
        json.dumps(data, allow_nan=False)
        self._data = data

    def html(self) -> str:
        """The whole page."""
        subtitle = f'<p class="subtitle">{escape(self.subtitle)}</p>' if self.subtitle else ""
        scripts = f"<script>{_plotly_js()}</script>" if self._figures else ""
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{escape(self.title)}</title>'
            f"<style>{_STYLE}</style>{scripts}</head>\n"
            f"<body><main><h1>{escape(self.title)}</h1>{subtitle}\n"
            + "\n".join(self._parts)
            + f'</main>\n<script type="application/json" id="{_DATA_ID}">{_embedded(self._data)}</script>'
            + (f"<script>{_FOLLOW_COLOUR_SCHEME}</script>" if self._figures else "")
            + "</body></html>\n"
        )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the page to ``path``, atomically; returns the absolute path.

        Raises:
            OSError: the folder cannot be made or written to.
        """
        path = Path(path).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            temporary.write_text(self.html(), encoding="utf-8")
        return path


def read_report_data(path: str | os.PathLike[str]) -> Any:
    """The JSON that a written report carries.

    Raises:
        ValueError: the file is not a report of ours.
    """
    page = Path(path).read_text(encoding="utf-8")
    _, found, rest = page.rpartition(f'<script type="application/json" id="{_DATA_ID}">')
    if not found:
        raise ValueError(f"{path} is not a report that Gossamer wrote: it carries no data")
    return json.loads(rest.partition("</script>")[0])


def shown_number(value: int | float) -> str:
    """How tables show a number: integers in full, floats with four significant digits but never an exponent.

    >>> shown_number(0.12345), shown_number(10723.7), shown_number(162826560)
    ('0.1235', '10,724', '162,826,560')
    """
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:,.0f}"


def _cell(value: Cell) -> str:
    if value is None:
        return "<td></td>"
    if isinstance(value, str):
        return f'<td class="text">{escape(value)}</td>'
    return f"<td>{shown_number(value)}</td>"


def _embedded(data: Any) -> str:
    """JSON that cannot end its script element early."""
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")


def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


_COLOURS = ["#0f766e", "#d97706", "#6366f1", "#be123c", "#64748b"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1b2430; --soft: #5c6773; --line: #dde2e8; --paper: #fff; --card: #f5f7fa;
  --accent: #0f766e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --soft: #9aa5b1; --line: #2c343f; --paper: #12161c;
  --card: #1a2029; --accent: #5eead4; } }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line); }
h3 { font-size: .95rem; margin: 0 0 .4rem; color: var(--soft); font-weight: 600; }
p { max-width: 46rem; } .subtitle, figcaption, caption { color: var(--soft); } .subtitle { margin: .3rem 0 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .8rem; margin: 1.5rem 0; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
.card span, .card small { display: block; color: var(--soft); font-size: .82rem; }
.card b { display: block; font-size: 1.55rem; line-height: 1.3; color: var(--accent); }
.scroll { overflow: auto; max-height: 34rem; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td.text { text-align: left; }
th { position: sticky; top: 0; background: var(--paper); color: var(--soft); font-weight: 600; }
caption { caption-side: bottom; text-align: left; padding-top: .5rem; font-size: .85rem; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); gap: 1rem; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; margin: 0;
  white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.5 ui-monospace, monospace; }
figure { margin: 1rem 0; } figcaption { font-size: .85rem; }
"""

_FOLLOW_COLOUR_SCHEME = """
const dark = matchMedia('(prefers-color-scheme: dark)');
function recolour() {
  for (const plot of document.querySelectorAll('.plotly-graph-div')) {
    const change = {'font.color': dark.matches ? '#e6e9ee' : '#1b2430'};
    for (const key of Object.keys(plot.layout)) {
      if (/^[xy]axis/.test(key)) {
        change[key + '.gridcolor'] = change[key + '.zerolinecolor'] = dark.matches ? '#2c343f' : '#dde2e8';
      }
    }
    Plotly.relayout(plot, change);
  }
}
addEventListener('load', recolour);
dark.addEventListener('change', recolour);
"""
