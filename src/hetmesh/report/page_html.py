"""A RunPage as one HTML file that needs nothing else: no network, no scripts. Every text is escaped."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from hetmesh.files import writing
from hetmesh.report.page_pictures import svg
from hetmesh.report.page_values import PageSection, PageTable, PageText, Picture, RunPage, Steps

STYLE = Path(__file__).with_name("page.css")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that HTML has no word for."""
LONG = 24  # characters of a cell whose text may take several lines


def save_page(page: RunPage, path: str | Path) -> None:
    """Write `page` to `path`.

    Raises:
        RecipeError: matplotlib is not installed.
        OutputError: `path` cannot be written.
    """
    text = as_html(page)
    with writing(path):
        Path(path).write_bytes(text.encode("utf-8", errors="replace"))


def as_html(page: RunPage) -> str:
    """The whole file.

    Raises:
        RecipeError: matplotlib is not installed.
    """
    return CONTROL.sub("\ufffd", "\n".join(_lines(page))) + "\n"


def _lines(page: RunPage) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    # nothing is loaded and nothing runs, whatever the texts of the run hold
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    yield f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    yield '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">'
    yield f"<title>{_text(page.title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n</head>\n<body>"
    yield f"<header>\n<h1>{_text(page.title)}</h1>"
    yield f'<p class="{" ".join(filter(None, ("state", page.state.mood)))}">{_text(page.state.text)}</p>'
    if page.facts:
        yield f'<ul class="facts">{"".join(f"<li>{_text(fact)}</li>" for fact in page.facts)}</ul>'
    yield f'<p class="run">{_text(page.run)}</p>\n</header>\n<main>'
    yield from _first(page)
    numbers = itertools.count(1)
    for section in page.sections:
        yield from _section(section, numbers)
    if page.recipe:
        yield '<section aria-labelledby="recipe">\n<h2 id="recipe">Recipe</h2>'
        yield "<details><summary>its keys with other values than their defaults</summary>"
        yield f'<div class="scroll" tabindex="0"><pre>{_text(page.recipe)}</pre></div></details>\n</section>'
    yield f"</main>\n<footer><p>{_text(page.written)}</p></footer>\n</body>\n</html>"


def _first(page: RunPage) -> Iterator[str]:
    """What is seen first: figures, what is wrong with the files, what to change."""
    yield '<section aria-label="In short">\n<dl class="tiles">'
    for tile in page.tiles:
        note = f'<dd class="note">{_text(tile.note)}</dd>' if tile.note else ""
        yield f"<div><dt>{_text(tile.name)}</dt><dd>{_text(tile.value)}</dd>{note}</div>"
    yield "</dl>"
    yield from (f'<p class="warning">{_text(note)}</p>' for note in page.notes)
    yield "</section>"
    yield '<section aria-labelledby="change">\n<h2 id="change">What to change</h2>'
    if page.advice:
        yield '<ol class="advice">'
        yield from (
            f"<li><p>{_text(_sentence(each.found))}</p><p>{_text(each.change)}</p></li>" for each in page.advice
        )
        yield "</ol>"
    else:
        yield "<p>Nothing stands out in what the run recorded.</p>"
    yield "</section>"


def _section(section: PageSection, numbers: Iterator[int]) -> Iterator[str]:
    name = re.sub(r"\W+", "-", section.name.lower())
    yield f'<section aria-labelledby="{name}">\n<h2 id="{name}">{_text(section.name)}</h2>'
    if section.lead:
        yield f"<p>{_text(section.lead)}</p>"
    yield '<div class="parts">'
    for part in section.parts:
        if isinstance(part, PageText):
            yield f'<div class="scroll" tabindex="0" role="group" aria-label="{_text(part.caption)}">'
            yield f"<pre>{_text(part.text)}</pre></div>"
        else:
            yield _table(part) if isinstance(part, PageTable) else _picture(part, next(numbers))
    yield "</div>"
    yield from (f'<p class="missing">Not shown: {_text(line)}.</p>' for line in section.missing)
    yield "</section>"


def _picture(part: Picture, number: int) -> str:
    kind = "wide" if isinstance(part, Steps) else type(part).__name__.lower()
    return (
        f'<figure class="{kind}"><figcaption>{_text(part.caption)}</figcaption>'
        f'<div class="scroll" tabindex="0" role="group" aria-label="{_text(part.caption)}">{svg(part, number)}</div>'
        "</figure>"
    )


def _table(part: PageTable) -> str:
    head, *rows = part.rows
    lines = ["<thead><tr>"]
    lines += [f'<th scope="col">{_text(cell)}</th>' for cell in head]
    lines.append("</tr></thead><tbody>")
    for row in rows:
        first, *others = row
        cells = (f"<td{' class=long' if len(cell) > LONG else ''}>{_text(cell)}</td>" for cell in others)
        lines.append(f'<tr><th scope="row">{_text(first)}</th>{"".join(cells)}</tr>')
    lines.append("</tbody>")
    kind = "numbers" if part.numbers else "words"
    label = _text(part.caption)
    return (
        f'<div class="table"><p class="caption">{label}</p>'  # outside of what scrolls, where it would be cut
        f'<div class="scroll" tabindex="0" role="group" aria-label="{label}">'
        f'<table class="{kind}" aria-label="{label}">{"".join(lines)}</table></div></div>'
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _text(text: str) -> str:
    """`text` as HTML, in attributes too."""
    return html.escape(text, quote=True)
