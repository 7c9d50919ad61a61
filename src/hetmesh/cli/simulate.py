"""`hetmesh simulate RECIPE`: the schedule of a step before it runs: who computes when, who waits and why."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence

from hetmesh.recipe.recipe import load_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The recipe, where its costs come from, and how to show the step."""
    parser.add_argument("recipe", metavar="RECIPE", help="a TOML file, e.g. recipes/digits_pipeline.toml")
    parser.add_argument("--machine", metavar="NAME", help="a machine's name or TOML file; default: [metrics] machine")
    parser.add_argument("--profile", metavar="FILE", help="what `hetmesh profile` wrote; default: [profiling] profile")
    parser.add_argument("--png", metavar="FILE", help="also draw it, as .png or .svg (needs matplotlib)")
    parser.add_argument("--trace", metavar="FILE", help="also write a trace for ui.perfetto.dev")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Simulate a step over the first global batch, in this one process."""
    recipe = load_recipe(args.recipe, overrides)
    from hetmesh.report.gantt import save_gantt
    from hetmesh.report.timeline_text import bubble_table, gantt_text, headline, hidden_text, save_trace
    from hetmesh.resolve.modules import notes_on_experts
    from hetmesh.resolve.predictions import notes_on_videos, simulate_recipe
    from hetmesh.resolve.resolved import resolve

    resolved = resolve(recipe)
    timeline = simulate_recipe(resolved, machine=args.machine, profile=args.profile)
    if args.png:
        save_gantt({"predicted": timeline}, args.png, recipe.job.description)
    if args.trace:
        save_trace({"predicted": timeline}, args.trace)
    notes = [*notes_on_experts(resolved.shapes), *notes_on_videos(resolved, timeline.makespan)]
    width = shutil.get_terminal_size((120, 24)).columns
    print(f"one step, schedule {recipe.schedule}: {headline(timeline)}\n")
    if any(timeline.hidden):
        print(f"encoders: {hidden_text(timeline)}\n")
    print(f"{gantt_text(timeline, width)}\n\n{bubble_table(timeline)}")
    for note in notes:
        print(f"note: {note}")
    return 0
