"""What a search for layouts found, as text: the best of every placement side by side, and why others lose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetmesh.formatting import counted, ranks_text, table
from hetmesh.planner import Found, LayoutPlan, MacroBatch, Prediction, Problem, plan_fit
from hetmesh.planner.macro_batch import SHARE
from hetmesh.planner.search import BATCHES
from hetmesh.recipe.section import schedule_spelling
from hetmesh.records.metrics import amount
from hetmesh.report.text import contents, verdict
from hetmesh.resolve.modules import notes_on_experts
from hetmesh.resolve.plan_phases import MIN_GAIN, PhasePlan
from hetmesh.simulate import CLASSES

_BUBBLES = {name: name.replace("_", " ") for name in CLASSES} | {"tp": "collectives in layers"}
CLOSE = 0.1
"""Of the step: smaller differences between predictions say little. Predicted gains over the homogeneous layout are 10
points off the published ones (`bench.py planner`)."""


class PlanReport(NamedTuple):
    """What `hetmesh plan` says: what was searched and found, in how many seconds; what is certified of how ranks are
    parted (None: there is nothing to part); the number of sampled batches whose mean decided; the steps whose data were
    looked at; and what is planned for each phase of the data."""

    problem: Problem
    found: Found
    seconds: float
    macro: MacroBatch | None = None
    batches: int = BATCHES
    steps: range | None = None
    phases: Sequence[PhasePlan] = ()


def plan_text(planned: PlanReport) -> str:
    """Tables for people, lines of at most about 120 characters."""
    return "\n".join(line.rstrip() for line in (*_lines(planned), *_phase_lines(planned.problem, planned.phases)))


def macro_batch_lines(macro: MacroBatch, modules: Sequence[str], steps: range | None = None) -> Iterator[str]:
    """What is certified of how ranks are parted between modules, or why nothing is, and in which of `steps` (None: it
    is not known how many there are)."""
    split = ", ".join(f"{name} {count}" for name, count in zip(modules, macro.split, strict=True))
    if macro.samples:
        yield (
            f"macro batch: {counted(macro.samples, 'sample')}; {macro.agreed} random batches of it, from {macro.drawn} "
            f"samples, part disjoint ranks alike: {split}"
        )
        return
    if not macro.drifts:
        yield (
            f"macro batch: none certified: random batches of {macro.drawn} samples part the ranks in {macro.splits} "
            f"ways, on the whole {split}"
        )
        return
    yield f"macro batch: refused, the data drift; plan again for the part of the run that matters. On the whole {split}"
    for drift in macro.drifts:
        where = "from {} to {}% of the run".format(*(round(100 * part) for part in drift.place))
        if steps:
            first, last = (part * len(steps) for part in drift.place)
            where = f"from step {steps.start + int(first) + 1} to {steps.start + math.ceil(last)}"
        share = drift.measure == SHARE
        values = [f"{100 * x:.1f}%" if share else f"{amount(x)}FLOP" for x in (drift.here, drift.elsewhere)]
        yield f"   {drift.module}: {drift.measure} {values[0]} {where}, {values[1]} elsewhere"


def _phase_lines(problem: Problem, phases: Sequence[PhasePlan]) -> Iterator[str]:
    if phases:
        yield from ("", "phases of the data, each planned for itself:")
    for number, phase in enumerate(phases, 1):
        yield f"{number}  steps {phase.steps.start + 1:,} to {phase.steps.stop:,}"
        if phase.macro is not None:
            yield from (f"   {line}" for line in macro_batch_lines(phase.macro, problem.own, phase.steps))
        if phase.best is None:
            yield "   no layout fits"
            continue
        yield f"   best: {phase.best.plan.placement}, {phase.best.step_s * 1e3:,.0f} ms a step"
        if phase.pays:
            gain = "the layout before does not fit"
            if phase.kept is not None:
                gain = f"{phase.saved:.1%} less time than the {phase.kept.step_s * 1e3:,.0f} ms of the layout before"
            yield f"   plan anew here: {gain};"
            how = f"`hetmesh plan --phase {number} --write FILE` writes the recipe with which to resume the checkpoint"
            yield f"   {how} of step {phase.steps.start}"
        elif not phase.first:
            saved = max(phase.saved, 0.0)
            yield f"   stay with the layout before: a change would save {saved:.1%}, which is below {MIN_GAIN:.0%}"


def _lines(planned: PlanReport) -> Iterator[str]:
    problem, found, seconds, macro, batches, steps, _ = planned
    limit = f", at most {amount(problem.limit)}B on a rank" if problem.limit else ""
    ranks = f"{counted(problem.ranks, 'rank')} of {problem.machine.name}"
    yield f"{ranks}, {problem.global_batch_size} samples per step{limit}"
    yield (
        f"{found.considered} layouts estimated, {found.simulated} simulated, {found.too_large} of them too large; "
        f"{seconds:.1f} s; the best by {counted(batches, 'sampled batch', 'sampled batches')}"
    )
    if macro is not None:
        yield from macro_batch_lines(macro, problem.own, steps)
    if found.fastest is None:
        yield from _refused(found)
        return
    yield ""
    yield from layout_lines(problem, found)
    if said := advice(found):
        yield from ("", said)
    yield from _refused(found)
    yield from (f"note: {note}" for note in _notes(problem))


def layout_lines(problem: Problem, found: Found) -> Iterator[str]:
    """The layouts that were found, side by side and one by one, with why others are slower."""
    shown = [layout for best in found.best.values() for layout in best]
    fastest = min(shown, key=lambda layout: layout.step_s)
    heads = ("", "placement", "step ms", "tokens/s/rank", "MFU %", "peak", "idle %", "waits most for", "schedule", "mb")
    yield from table([heads, *(_row(layout, i, layout is fastest) for i, layout in enumerate(shown, 1))])
    for i, layout in enumerate(shown, 1):
        yield ""
        fit = plan_fit(problem, layout.plan)
        large = "; its largest batch does not fit" if fit.fits is False else ""
        yield f"{i}  {layout.plan.placement}: {_why(layout, fastest)}{large}"
        for name, module in layout.plan.modules.items():
            yield f"   {name:10} ranks {ranks_text(range(*module.ranks))}: {module}"
        first = found.best[layout.plan.placement][0]
        if layout is not first:
            yield f"   unlike {1 + shown.index(first)}: {difference(layout.plan, first.plan)}"
        yield f"   memory, largest batch: {verdict(fit)}"
        yield f"      {contents(fit.ranks[fit.fullest])}"
    for placement, best in found.best.items():
        if not best and problem.fixed.get(("", "placement"), placement) == placement:
            yield from ("", f"{placement}: nothing that was tried fits or can run")


def advice(found: Found) -> str:
    """Whether a layout per module pays, as far as predictions can tell; empty where only one kind was found."""
    shared = next(iter(found.best.get("homogeneous", ())), None)
    others = [best[0] for placement, best in found.best.items() if best and placement != "homogeneous"]
    if shared is None or not others:
        return ""
    best = min(others, key=lambda layout: layout.step_s)
    saved = 1 - best.step_s / shared.step_s
    pays = "pays" if saved > CLOSE else "hardly pays" if saved > 0 else "does not pay"
    than = f"{abs(saved):.1%} {'less' if saved > 0 else 'more'} time than the best homogeneous layout"
    off = f"; predicted gains err by about {100 * CLOSE:.0f} points, so begin with that one" if pays[0] == "h" else ""
    return f"A layout per module {pays} here: {best.plan.placement} is predicted to take {than}{off}."


def difference(plan: LayoutPlan, other: LayoutPlan) -> str:
    """What tells a plan from another one of its placement: `"microbatches of 2 instead of microbatches of 4"`."""
    parts, others = (str(either).split("; ") for either in (plan, other))
    here = "; ".join(part for part in parts if part not in others)
    there = "; ".join(part for part in others if part not in parts)
    return f"{here} instead of {there}" if here and there else here or f"without {there}"


def _notes(problem: Problem) -> tuple[str, ...]:
    return notes_on_experts({name: facts.shape for name, facts in problem.facts.items()})


def nothing_found(problem: Problem, found: Found) -> str:
    """Why a search found no layout."""
    ranks = counted(problem.ranks, "rank")
    if not found.considered:
        return f"no layout of {ranks} agrees with the models, the batch and what is fixed"
    if found.least_bytes is None or not problem.limit:
        return f"no layout of {ranks} can run"
    return (
        f"no layout of {ranks} fits into {amount(problem.limit)}B: the smallest that was simulated holds "
        f"{amount(found.least_bytes)}B on a rank; allow more (--memory), or take more ranks"
    )


def _row(layout: Prediction, number: int, fastest: bool) -> tuple[str, ...]:
    idle = {name: layout.bubbles.get(name, 0.0) for name in CLASSES}
    most = max(idle, key=lambda name: idle[name])
    return (
        f"{number}{'*' if fastest else ' '}",
        layout.plan.placement,
        f"{layout.step_s * 1e3:,.0f}",
        amount(layout.tokens_per_s).strip(),
        "-" if layout.mfu is None else f"{100 * layout.mfu:.1f}",
        f"{amount(layout.peak_bytes)}B",
        f"{100 * sum(idle.values()) / layout.step_s:.0f}",
        f"{_BUBBLES[most]} ({100 * idle[most] / layout.step_s:.0f}%)" if idle[most] else "-",
        schedule_spelling(layout.plan.schedule),
        str(layout.plan.microbatch_size),
    )


def _why(layout: Prediction, fastest: Prediction) -> str:
    """How much slower than the fastest, and what takes the time."""
    if layout is fastest:
        return "the fastest"
    longer = layout.step_s - fastest.step_s
    if longer < 5e-4 * fastest.step_s:
        return "as fast as the fastest"
    parts = {name: layout.bubbles.get(name, 0.0) - fastest.bubbles.get(name, 0.0) for name in ("compute", *CLASSES)}
    most = max(parts, key=lambda name: parts[name])
    what = "computing" if most == "compute" else f"waiting ({_BUBBLES[most]})"
    return f"{100 * longer / fastest.step_s:.1f}% longer; {parts[most] * 1e3:,.0f} ms more of {what} on the mean rank"


def _refused(found: Found) -> Iterator[str]:
    for reason, count in sorted(found.refused.items(), key=lambda refusal: -refusal[1])[:3]:
        yield f"not possible ({count} layouts): {reason}"
