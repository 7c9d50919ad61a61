"""`hetmesh export RUN DIR`: what a run has learned, as a directory that transformers loads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hetmesh.errors import UsageError

DTYPES = ("float32", "float64", "bfloat16", "float16", "directory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the directory, and what becomes of adapters and dtypes."""
    parser.add_argument("run", metavar="RUN", help="the dump folder of a run that kept a checkpoint: outputs/digits")
    parser.add_argument("folder", metavar="DIR", help="the directory to write; it must not exist, or be empty")
    parser.add_argument("--step", type=int, help="the checkpoint of that step (the newest one)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="convert the weights (as they were trained); directory: each to what it is in the directory of the recipe",
    )
    parser.add_argument(
        "--lora",
        choices=("merged", "adapters"),
        default="merged",
        help="merged: adapters are added to the weights; adapters: they are a folder for peft beside the weights",
    )


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write the directory, and say what is in it."""
    from hetmesh.checkpoint.saved_run import saved_run
    from hetmesh.export.export import DTYPES as KNOWN
    from hetmesh.export.export import export

    if overrides:
        raise UsageError(f"{overrides[0]}: a run that is over cannot be changed; export takes no recipe keys")
    saved = saved_run(Path(args.run), args.step)
    print(f"exporting {saved.path}", flush=True)
    lines = export(saved, Path(args.folder), dtype=KNOWN.get(args.dtype, args.dtype), merge=args.lora == "merged")
    print("\n".join([*lines, f"written to {args.folder}"]))
    return 0
