"""`hetmesh report FOLDER`: what a run did, as text and as a page: metrics, a recorded step beside the prediction."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and how to show it."""
    parser.add_argument("run", metavar="FOLDER", help="a run's dump folder, e.g. outputs/digits_pipeline")
    parser.add_argument("--png", metavar="FILE", help="also draw the recorded step, as .png or .svg (needs matplotlib)")
    parser.add_argument("--trace", metavar="FILE", help="also write it as a trace for ui.perfetto.dev")
    parser.add_argument("--html", metavar="FILE", help="where to write the page; default: report.html in FOLDER")
    parser.add_argument("--no-html", action="store_true", help="write no page (it needs matplotlib and jinja2)")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Read the run's folder."""
    from hetmesh.errors import HetmeshError, UsageError
    from hetmesh.records.run_view import read_run
    from hetmesh.report.gantt import save_gantt
    from hetmesh.report.page import save_page
    from hetmesh.report.page_sections import RECORD
    from hetmesh.report.page_story import state
    from hetmesh.report.timeline_text import (
        action_table,
        bubble_table,
        gantt_text,
        headline,
        save_trace,
    )

    if overrides:
        raise UsageError(f"report reads a finished run; {overrides[0]} is a recipe's key")
    if args.html and args.no_html:
        raise UsageError("--html and --no-html contradict each other; give one of them")
    view = read_run(args.run)
    if (args.png or args.trace) and not view.timelines:
        raise UsageError(f"{args.run}: {RECORD}")
    if args.png:
        save_gantt(view.timelines, args.png, f"step {view.step} of {args.run}")
    if args.trace:
        save_trace(view.timelines, args.trace)
    path = None if args.no_html else args.html or Path(args.run) / "report.html"
    problem: HetmeshError | None = None
    if path is not None:
        try:
            save_page(view, args.run, path)  # first: who reads what is printed may stop at any line
        except HetmeshError as error:
            problem = error
    print(state(view, None).text)
    print(view.as_text())
    width = shutil.get_terminal_size((120, 24)).columns
    for name, timeline in view.timelines.items():
        print(f"\nstep {view.step}, {name}: {headline(timeline)}\n")
        print(f"{gantt_text(timeline, width)}\n\n{bubble_table(timeline)}")
    if view.timelines:
        print(f"\nstep {view.step}, predicted beside measured\n\n{action_table(view.timelines)}")
    if problem is not None:
        raise problem
    if path is not None:
        print(f"\nthe page is {path}")
    return 0
