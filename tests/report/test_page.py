"""The page of a run: what it says of figures, and of what is missing; nothing of it is markup."""

import base64
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetmesh.cli import main
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.recipe.rewrite import recipe_toml
from hetmesh.records.run_lines import Series, series
from hetmesh.records.run_view import RunView, read_run
from hetmesh.report.page import outgrown
from hetmesh.report.page_parts import PageTable
from hetmesh.report.page_sections import sections
from support.written_runs import write_run

RECIPES = Path(__file__).parents[2] / "recipes"


class Outline(HTMLParser):
    """Tags in order, ids, all text, and of images what they say to who does not see them and the SVG that they hold."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.labels, self.text, self.svgs = [], [], [], "", []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.labels += [found.get("alt", "")] if tag == "img" else []
        for address in (found[key] for key in ("src", "srcset") if key in found):
            kind, data = address.split(",")
            assert kind == "data:image/svg+xml;base64"
            self.svgs.append(base64.b64decode(data).decode())

    def handle_data(self, data):
        self.text += data


def shown(folder, capsys):
    assert main(["report", str(folder)]) == 0
    assert f"the page is {folder / 'report.html'}" in capsys.readouterr().out
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a run, with its page."""
    pytest.importorskip("matplotlib")
    folder = write_run(tmp_path_factory.mktemp("run"), RECIPES / "digits_moe.toml")
    assert main(["report", str(folder)]) == 0
    return folder


def test_a_page_has_every_part_and_needs_nothing_else(folder):
    text = (folder / "report.html").read_text(encoding="utf-8")
    outline = Outline(text)
    names = ("Loss", "Throughput", "Where the time went", "A recorded step", "Load balance", "Experts")
    for name in (*names, "Layout", "Answers", "Boundaries", "Memory", "Data", "Recipe"):
        assert f">{name}</h2>" in text
    assert "script" not in outline.tags
    assert "http" not in re.sub(r"base64,[^\"]*", "", text).replace("http-equiv", "")
    vocabulary = re.compile(r"http://(www.w3.org|purl.org|creativecommons.org)/|https://matplotlib.org/")
    for svg in outline.svgs:
        ElementTree.fromstring(svg)
        assert "http" not in vocabulary.sub("", svg)
        assert "url(h" not in svg
    light, dark = outline.svgs[1], outline.svgs[0]
    assert light != dark
    assert light.count("<path") == dark.count("<path")
    assert outline.tags.count("picture") == outline.tags.count("img") == len(outline.svgs) / 2
    assert len(outline.ids) == len(set(outline.ids))
    assert len(outline.labels) >= 10
    assert all(outline.labels)
    assert outline.tags.count("h1") == outline.tags.count("title") == 1
    assert "Not shown" not in text
    assert "finished: 30 steps, which took " in text
    assert "<pre>  ##\n  @@  \nQ: llm</pre>" in text
    assert "pack_samples = true" in text  # the recipe
    assert main(["report", str(folder), "--no-html", "--html", "x"]) == 2


HOSTILE = "</script><img src=x onerror=alert(1)>&\"'$x_$\x00\u202e"


def test_texts_of_a_run_are_no_markup(folder, tmp_path, capsys):
    plain = Outline((folder / "report.html").read_text(encoding="utf-8"))
    hostile = write_run(tmp_path / "<b>bold", RECIPES / "digits_moe.toml", name=HOSTILE, description=HOSTILE)
    text = shown(hostile, capsys)
    found = Outline(text)
    assert found.tags.count("img") == len(found.svgs) / 2
    assert "onerror" not in re.sub(r"&lt;img src=x onerror", "", text)
    for svg in found.svgs:
        ElementTree.fromstring(svg)
    assert "<b>" not in text
    assert set(found.tags) == set(plain.tags)
    assert "<img src=x onerror=alert(1)>&\"'" in found.text
    assert "\x00" not in text


def test_a_page_says_what_was_not_recorded(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"st')
    text = Outline(shown(tmp_path, capsys)).text
    assert re.search(r"not finished: step 1; its last line was written \d+ s ago, and no end is recorded", text)
    assert "there is no recipe.json" in text
    assert "[profiling] timeline_step has not come yet" in text
    assert "1 line of metrics.jsonl cannot be read" in text
    assert "1 step without a finite loss: 1" in text
    (tmp_path / "recipe.json").write_text("{")
    assert "is no JSON" in Outline(shown(tmp_path, capsys)).text


def test_no_page_without_a_step_or_without_matplotlib(tmp_path, capsys, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text("\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no step yet" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "none" / "page.html")]) == 1
    assert "page.html cannot be written" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "2.5" in said.out
    assert "pip install 'hetmesh[report]'" in said.err
    assert not (tmp_path / "report.html").exists()
    assert main(["report", str(tmp_path), "--no-html"]) == 0
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(tmp_path)]) == 2
    assert "the page needs jinja2: pip install 'hetmesh[report]'" in capsys.readouterr().err


def test_lines_that_came_again_or_cannot_be_read_count_once_or_not(tmp_path):
    lines = [
        f'{{"step": {step}, "loss": {part}.{step}}}'
        for part, steps in ((1, (1, 2, 3)), (2, (2, 3, 4)), (3, (3,)))
        for step in steps
    ]
    lines[1:1] = ["[" * 100_000, '{"step": 1, "x": "\\ud800"}', "\udcff", "", '{"step": true}', "null"]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode("utf-8", "surrogateescape") + b'\n{"step": 4, "l')
    run = read_run(tmp_path)
    assert series(run.records, "loss") == Series("loss", (1, 2, 3), (1.1, 2.2, 3.3))
    bad, again = run.notes
    assert bad.startswith("6 lines of metrics.jsonl cannot be read and are left out, first line 2: ")
    assert again.startswith("4 steps were done again")


VALUES = st.sampled_from([None, True, -1, 0, 1e308, "x", [], {}, {"x": {}}, [3]])


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_run_of_any_records_is_told(data):
    """Values of another kind, or none, wherever a line has one."""
    records = []
    for step in (1, 2, 3):
        record = json.loads(RECORD)
        for _ in range(data.draw(st.integers(0, 6))):
            table = record
            while True:
                key = data.draw(st.sampled_from(sorted(table)))
                if not isinstance(table[key], dict) or not table[key] or data.draw(st.booleans()):
                    break
                table = table[key]
            table[key] = data.draw(VALUES)
        records.append(record | {"step": step})
    run = RunView(records[-1], {}, 0, {}, records=tuple(records))
    list(outgrown(run))
    assert sections(run, None)


RECORD = json.dumps(
    {
        "loss": 2.0,
        "time_s": 0.5,
        "flops": {"llm": 5},
        "module_mfu": {"llm": 0.5},
        "mfu": 0.5,
        "boundary_bytes": {"vision->llm": {"forward": 3, "backward": 3}},
        "wait_s": {"vision->llm": 0.1},
        "data": {"bytes_read": 3, "bytes_needed": 3, "wait_s": 0.1},
        "experts": {"llm": {"max_over_mean": 2.0, "without_tokens": 1, "balance_loss": 2.0}},
        "memory_bytes": 5,
        "samples_by_source": {"a": 3},
        "lending": {"gap_s": 0.2, "lent_s": 0.1},
        "tokens_dropped": 3,
    }
)


def test_seconds_lent_to_encoders_have_a_curve():
    record = json.loads(RECORD)
    run = RunView(record, {}, 0, {}, records=tuple(record | {"step": step} for step in (1, 2)))
    parts = [part for section in sections(run, None) for part in section.parts]
    (curves,) = [part for part in parts if "beside which encoders" in getattr(part, "caption", "")]
    assert [(line.name, line.values) for line in curves.lines] == [("gap", (0.2, 0.2)), ("lent", (0.1, 0.1))]


def test_each_of_several_losses_has_a_curve_and_a_column():
    record = json.loads(RECORD)
    losses = [{"llm": 2.0, "drawer": 0.5}, {"llm": 1.0}]  # a batch without a drawing
    kept = tuple(record | {"step": step, "losses": each} for step, each in zip((1, 2), losses, strict=True))
    held_out = ({"step": 2, "validation": {"loss": 1.4, "losses": {"llm": 1.1, "drawer": 0.3}}},)
    run = RunView(record, {}, 0, {}, records=kept, evaluations=held_out)
    parts = [part for section in sections(run, None) for part in section.parts]
    (curves,) = [part for part in parts if "each loss" in getattr(part, "caption", "")]
    found = {line.name: (line.steps, line.values) for line in curves.lines}
    assert found["llm"] == ((1, 2), (2.0, 1.0))
    assert found["drawer"] == ((1,), (0.5,))
    assert found["drawer, held-out"] == ((2,), (0.3,))
    (table,) = [part for part in parts if "evaluations" in getattr(part, "caption", "")]
    assert table.rows[0][1:4] == ("loss", "loss of llm", "loss of drawer")


def records(count=40, **values):
    return tuple({"step": i + 1, "time_s": 1.0} | {k: v(i) for k, v in values.items()} for i in range(count))


def test_a_layout_is_outgrown_where_work_has_gone_to_another_module():
    grown = records(flops=lambda i: {"vision": 10.0 + i, "llm": 40.0})
    (said,) = outgrown(RunView({}, {}, 0, {}, records=grown))
    assert said.startswith("vision does 53% of the work of a step, and did 26%: the layout is outgrown; hetmesh plan")
    noise = records(flops=lambda i: {"vision": 10.0 + i % 7, "llm": 40.0})
    assert not [*outgrown(RunView({}, {}, 0, {}, records=noise))]


def test_the_page_says_what_preparing_samples_takes():
    data = [{"frames_decoded": 20 + (i == 0), "frames_needed": 20, "load_s": 0.25} for i in range(2)]
    run = RunView({}, {}, 0, {}, records=records(2, data=lambda i: data[i]))
    (found,) = [section for section in sections(run, None) if section.name == "Data"]
    (table,) = [part for part in found.parts if isinstance(part, PageTable)]
    shown = dict(map(tuple, table.rows))
    assert shown["frames of videos decoded in logged steps, over those needed"] == "1.025"
    assert shown["seconds of preparing samples in it, on the rank that took longest"] == "0.25"


def test_the_recipe_on_a_page_is_the_run_s():
    for name in ("digits_moe", "digits_omni", "digits_lora"):
        recipe = load_recipe(RECIPES / f"{name}.toml")
        again = parse_recipe(recipe_toml(recipe))
        assert again.model_dump(mode="json") == recipe.model_dump(mode="json")
