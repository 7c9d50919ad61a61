"""`hetmesh init DIR --data FOLDER`: a first recipe for a Hugging Face directory, its layout chosen by the planner."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any

from hetmesh.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The directory, the data, and what the layout is for."""
    parser.add_argument("directory", metavar="DIR", help="a Hugging Face directory of a multimodal model")
    parser.add_argument(
        "--data",
        metavar="FOLDER|FILE",
        help="conversations: a file, or a folder of one with its images; default: random data of the model's sizes",
    )
    parser.add_argument("--machine", metavar="NAME", help="a machine's name or TOML file; default: this one")
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="how many there are; default: this machine's GPUs (one on a CPU), of another machine as few as hold the "
        "model",
    )
    parser.add_argument("--write", metavar="FILE.toml", help="write it there instead of printing it")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print or write the recipe, after every check that `hetmesh check` makes of it."""
    if args.ranks is not None and args.ranks < 1:
        raise UsageError(f"--ranks {args.ranks}: must be above 0")
    if args.write is not None and Path(args.write).exists():
        raise UsageError(f"--write {args.write}: it is there already, perhaps changed by hand; give another name")
    from hetmesh.recipe.hf_path import expand_hf_path
    from hetmesh.recipe.overrides import apply_override, parse_overrides

    raw: dict[str, Any] = {"model": {"hf_path": args.directory}, "data": {} if args.data else {"source": "synthetic"}}
    for path, value in parse_overrides(overrides):
        raw = apply_override(raw, path, value) if path[0] == "data" else raw
    expand_hf_path(raw)  # whatever is wrong with the directory is said before torch is imported
    from hetmesh.cli.check import checked
    from hetmesh.data.find_conversations import find_conversations
    from hetmesh.files import writing
    from hetmesh.recipe.recipe import parse_recipe
    from hetmesh.report.starter_text import starter_text
    from hetmesh.resolve.init_recipe import starter

    folder = raw["data"].get("options", {}).get("media_folder")
    data = None if args.data is None else find_conversations(args.data, folder)
    first = starter(args.directory, data, machine=args.machine, ranks=args.ranks, overrides=overrides)
    text = starter_text(first)
    lines = checked(parse_recipe(text))[1]
    for line in dropwhile(lambda line: not line.startswith("note: "), lines):  # of samples that it leaves out, say
        print(line, file=sys.stderr)
    if args.write is None:
        print(text, end="")
        return 0
    with writing(Path(args.write)):
        Path(args.write).write_text(text, encoding="utf-8")
    print(f"wrote {args.write}: train it with `hetmesh train {args.write}`", file=sys.stderr)
    return 0
