"""`hetmesh plan RECIPE`: which layout a model should have on a number of ranks, before any of them is booked."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetmesh.errors import UsageError
from hetmesh.files import read_text
from hetmesh.recipe.overrides import parse_value
from hetmesh.recipe.recipe import load_recipe

if TYPE_CHECKING:
    from hetmesh.planner import Found, Problem


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, the machine, and what the layout must keep to."""
    add_layout_arguments(parser)
    parser.add_argument("--ranks", metavar="N", type=int, help="how many there are; default: those of the recipe")
    parser.add_argument("--memory", metavar="GB", type=float, help="of a rank; default: nine tenths of the machine's")
    parser.add_argument("--shown", metavar="N", type=int, default=2, help="layouts of each placement (default 2)")
    parser.add_argument("--phase", metavar="N", type=int, help="plan for one phase of the data alone, 1 for the first")
    parser.add_argument("--write", metavar="FILE.toml", help="also write the recipe with the fastest layout")
    parser.add_argument("--draw", action="store_true", help="also print the step of the best layout of each placement")


def add_layout_arguments(parser: argparse.ArgumentParser) -> None:
    """Of verbs that look for a layout."""
    parser.add_argument("recipe", metavar="RECIPE", help="models, data and batch size; its layout counts for nothing")
    parser.add_argument("--machine", metavar="NAME", help="a machine's name or TOML file; default: [metrics] machine")
    parser.add_argument("--profile", metavar="FILE", help="what `hetmesh profile` wrote; default: [profiling] profile")
    parser.add_argument(
        "--fix",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="keep to this: llm.tensor_parallel_degree=8, placement=disjoint, schedule=1F1B; may be repeated",
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Search in this one process, without weights."""
    recipe = load_recipe(args.recipe, overrides)
    for name, value in (("--ranks", args.ranks), ("--shown", args.shown), ("--memory", args.memory)):
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"{name} {value}: must be above 0")
    from hetmesh.files import writing
    from hetmesh.planner import search
    from hetmesh.report.plan_text import PlanReport, nothing_found, plan_text
    from hetmesh.resolve.plan_phases import plan_phases, run_phases
    from hetmesh.resolve.planning import certified, not_kept, planned_text, recipe_macro_batch, recipe_problem
    from hetmesh.resolve.resolved import resolve

    memory = None if args.memory is None else math.ceil(args.memory * 1e9)
    fixed = fixed_keys(args.fix)
    started = time.perf_counter()
    resolved, phases = resolve(recipe), run_phases(recipe)
    if args.phase is not None and not 1 <= args.phase <= len(phases):
        raise UsageError(f"--phase {args.phase}: the data of {args.recipe} have {len(phases)}; valid are 1 to that")

    def problem_of(steps: range | None) -> Problem:
        asked = {"machine": args.machine, "ranks": args.ranks, "profile": args.profile}
        return recipe_problem(resolved, **asked, fixed=fixed, memory_bytes=memory, steps=steps)

    steps = None if args.phase is None else phases[args.phase - 1]
    problem = problem_of(steps)
    macro = recipe_macro_batch(problem)
    problem, batches = certified(problem, macro)
    found = search(problem, shown=args.shown, batches=batches)
    planned = tuple(plan_phases(phases, problem_of)) if len(phases) > 1 and steps is None else ()
    seconds = time.perf_counter() - started
    result = PlanReport(problem, found, seconds, macro, batches, steps or range(recipe.training.steps), planned)
    print(plan_text(result))
    if found.fastest is None:
        print(f"error: {nothing_found(problem, found)}", file=sys.stderr)
        return 1
    if args.draw:
        _draw(problem, found)
    if args.write:
        text = planned_text(recipe, read_text(args.recipe), overrides, problem, found.fastest.plan)
        with writing(Path(args.write)):
            Path(args.write).write_bytes(text.encode())  # with the line ends that are there
        print(f"\nwrote {args.write}: look at it with `hetmesh explain {args.write}`")
        if left := not_kept(recipe):
            print(f"not in it, and planned without: {', '.join(left)}", file=sys.stderr)
    return 0


def fixed_keys(texts: Sequence[str]) -> dict[str, object]:
    """What `--fix` says. Raises UsageError: one is no KEY=VALUE, or a key has two values."""
    fixed: dict[str, object] = {}
    for text in texts:
        key, equals, given = text.partition("=")
        if not equals:
            raise UsageError(f"--fix {text}: write KEY=VALUE")
        value = parse_value(given)
        if fixed.setdefault(key, value) != value:
            raise UsageError(f"--fix {key}: it is given twice, as {fixed[key]!r} and as {value!r}")
    return fixed


def _draw(problem: Problem, found: Found) -> None:
    """The simulated step of the best layout of each placement, all on one axis of time."""
    from hetmesh.planner.predict import MIN_LANES, Predictor
    from hetmesh.report.timeline_text import gantt_text, headline

    predictor = Predictor(problem, lanes=MIN_LANES)
    steps = {name: predictor.timelines(best[0].plan)[0] for name, best in found.best.items() if best}
    width, longest = shutil.get_terminal_size((120, 24)).columns, max(step.makespan for step in steps.values())
    for name, step in steps.items():
        print(f"\n{name}, some of the lanes: {headline(step)}\n{gantt_text(step, width, longest)}")
