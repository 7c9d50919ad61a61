"""What `hetmesh tune` found: predicted beside measured steps, as lines and as a page, and the files it writes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from hetmesh.cost import machine_toml
from hetmesh.errors import UsageError
from hetmesh.files import writing
from hetmesh.formatting import counted, table
from hetmesh.report.page import render
from hetmesh.report.page_parts import PageSection, PageTable, Picture, State, Tile, pairs_figure
from hetmesh.training.tune.constants import BUSY, LEAST
from hetmesh.training.tune.tuner import Asked, Tuner

RECIPE, MACHINE, PAGE = "recipe.toml", "machine.toml", "tune.html"
SHOWN = 12  # layouts that never ran, the fastest first


def turn_line(tuner: Tuner) -> str:
    """The newest turn."""
    findings, finding = tuner.findings, tuner.findings.each[-1]
    said = f"failed: {finding.failed}" if finding.failed else f"{1e3 * findings.seconds[finding.layout]:.1f} ms a step"
    predicted = f"predicted {1e3 * tuner.before[finding.layout]:.1f}" if finding.layout in tuner.before else ""
    return f"turn {len(findings.each)}  {said}  {predicted}  {finding.layout}"


def _rows(tuner: Tuner) -> Iterator[tuple[str, ...]]:
    """The layouts that ran, the fastest that did not, and those that failed; the head first."""
    yield ("ms a step: measured", "predicted", "before", "layout")
    findings, ranking = tuner.findings, tuner.ranking
    ran = sorted(findings.seconds, key=lambda name: findings.seconds[name])
    never = ranking.seconds.keys() - findings.seconds.keys() - findings.failed.keys()
    for name in (*ran, *sorted(never, key=lambda name: ranking.seconds[name])[:SHOWN]):
        each = (findings.seconds.get(name), ranking.seconds.get(name), tuner.before.get(name))
        yield *("-" if seconds is None else f"{1e3 * seconds:.1f}" for seconds in each), name
    yield from (("failed", "-", "-", f"{name}: {own.failed}") for name, own in findings.failed.items())


def _constants(tuner: Tuner) -> Iterator[tuple[str, ...]]:
    """The machine's constants before and after; the head first."""
    yield ("constant", "given", "fitted")
    for dtype, given in tuner.given.peak_flops.items():
        if (fitted := tuner.machine.peak_flops[dtype]) != given:
            yield f"peak flops {dtype}", f"{given:.4g}", f"{fitted:.4g}"
    for name in (*LEAST, BUSY, "context_bytes", "memory_bytes"):
        given, fitted = getattr(tuner.given, name), getattr(tuner.machine, name)
        if fitted != given:
            texts = (", ".join(f"{x:.4g}" for x in (own if name == BUSY else (own,))) for own in (given, fitted))
            yield name.replace("_", " "), *texts


def _summary(tuner: Tuner) -> tuple[str, str]:
    """Which layout is fastest, and what was done to know it."""
    findings, best = tuner.findings, tuner.best
    turns, layouts = counted(len(findings.each), "turn"), counted(len(tuner.layouts.plans), "layout")
    done = f"{turns} of {len(findings.seconds)} of {layouts} in {findings.spent_s:.0f} s"
    if findings.seconds:
        done += f"; median steps, all at the pace of the median turn, scatter by {findings.scatter:.1%}"
    if tuner.untried is not None:
        done += f"; the budget of {tuner.budget:g} s ended it before a turn of {tuner.untried.layout}"
    if best is None:
        return "no layout ran", done
    if (least := min(findings.seconds.values())) < findings.seconds[best]:
        done += f"; a median of {1e3 * least:.1f} ms is of too few steps to outweigh a slower prediction"
    common = [seconds for name, seconds in findings.seconds.items() if name in tuner.layouts.common]
    gain = f", {min(common) / findings.seconds[best]:.2f} times as fast as the fastest common layout" if common else ""
    return f"{1e3 * findings.seconds[best]:.1f} ms a step{gain}: {best}", done


def result_text(tuner: Tuner, files: list[Path]) -> str:
    """All of it. `files`: what `save_result` wrote."""
    lines = [*table(list(_rows(tuner))), "", *table(list(_constants(tuner))), "", *_summary(tuner)]
    if files:
        lines.append(f"wrote {', '.join(map(str, files))}")
        lines.append(f"train with it: hetmesh train {files[0]}; --machine {files[1]} predicts with these constants")
    return "\n".join(lines)


def save_result(asked: Asked, tuner: Tuner) -> list[Path]:
    """Write the recipe, the machine and, where what it needs is installed, the page. Returns their paths; none where no
    layout ran. Raises OutputError: one cannot be written."""
    if tuner.best is None or asked.folder is None:
        return []
    text = asked.recipe_text(tuner.layouts.problem, tuner.layouts.plans[tuner.best])
    ran, when = counted(len(tuner.findings.seconds), "layout"), datetime.now(UTC).date()
    comment = f"{tuner.given.name}, fitted by hetmesh tune to real steps of {ran}, {when}"
    files = {RECIPE: text, MACHINE: machine_toml(tuner.machine, comment)}
    try:
        files[PAGE] = _page(asked, tuner, text)
    except UsageError as error:  # the result counts without it
        print(f"note: no page: {error}", flush=True)
    for name, content in files.items():
        with writing(asked.folder / name):
            (asked.folder / name).write_bytes(content.encode())
    return [asked.folder / name for name in files]


def _page(asked: Asked, tuner: Tuner, recipe: str) -> str:
    """One HTML file. Raises UsageError: jinja2 or matplotlib is not installed."""
    found, done = _summary(tuner)
    ran = sorted((seconds, name) for name, seconds in tuner.findings.seconds.items())
    bars = [(str(i), 1e3 * tuner.ranking.seconds[name], 1e3 * own) for i, (own, name) in enumerate(ran, 1)]
    picture = Picture(
        "layouts that ran, the fastest first",
        "predicted and measured steps",
        partial(pairs_figure, bars, "ms"),
        "pairs",
    )
    layouts = PageTable("predicted: by the fitted machine", list(_rows(tuner)), numbers=False)
    constants = PageTable(f"constants, as {MACHINE} has them for --machine", list(_constants(tuner)))
    lead = f"Fastest: {found}. Train with it: hetmesh train {asked.folder}/{RECIPE}"
    return render(
        title=asked.recipe.job.description or Path(asked.path).stem,
        run=str(asked.folder),
        state=State(done),
        facts=(counted(asked.ranks, "rank"), f"{asked.recipe.batch.global_batch_size} samples per step"),
        tiles=(Tile("fastest", found.partition(" a step")[0], "a step, median"),),
        sections=(PageSection("Layouts", lead, (picture, layouts)), PageSection("Machine", "", (constants,))),
        notes=(),
        recipe=recipe,
        written=f"Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by hetmesh tune.",
    )
