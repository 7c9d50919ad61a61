"""The `hetmesh` command: one file per verb, imported when the verb is used."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import errno
import gc
import importlib
import os
import sys
from collections.abc import Mapping, Sequence

from hetmesh.errors import HetmeshError, RecipeError, UsageError

VERBS: Mapping[str, str] = {
    "init": "write a first recipe for a Hugging Face directory, its layout chosen by the planner",
    "train": "train a recipe, on this machine or under torchrun",
    "check": "check a recipe in one process and say what it will do",
    "explain": "show which rank holds what, what it costs and what moves between modules",
    "simulate": "show what a step will take: who computes when, who waits and why",
    "dryrun": "run one rank's real step on a fake device: memory, host waits, kernels and messages, without a GPU",
    "plan": "find the layout that a model should have on a number of ranks of a machine",
    "tune": "find the layout that is fastest on these ranks, by real steps of a few",
    "balance": "show how uneven batches are, and what every balancer makes of them",
    "report": "show what a run did, as text and as a page: how well, how fast, where the time went",
    "index": "look through a recipe's data once: lengths, sizes and offsets, kept beside it",
    "generate": "answer a question with what a run has learned",
    "export": "write what a run has learned as a directory that transformers loads",
    "profile": "measure what the layers of a recipe cost on this machine",
}
"""Verb -> what it does. Each is a module of this package with `add_arguments(parser)` and `run(args, overrides)`."""

USAGE_ERROR = 2  # exit status where the recipe or the command line is wrong, as argparse's
FAILURE = 1
INTERRUPTED = 130  # what a shell reports for Ctrl-C
OUTPUT_CLOSED = 141  # and where who read what was printed is gone (SIGPIPE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hetmesh VERB RECIPE [--section.key value ...]`. Returns the exit status: 0; 1: the run failed; 2: the recipe
    or the command line is wrong; 129: SIGHUP; 130: SIGINT; 141: nobody reads standard output any more; 143: SIGTERM."""
    if argv is None:
        atexit.register(gc.freeze)  # or the end of the process looks through a million imported objects again
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else USAGE_ERROR
    verb, *arguments = argv
    if verb not in VERBS:
        close = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        print(f"error: unknown verb {verb!r}; {hint}valid are {', '.join(VERBS)}", file=sys.stderr)
        return USAGE_ERROR
    module = importlib.import_module(f"hetmesh.cli.{verb}")
    parser = argparse.ArgumentParser(
        prog=f"hetmesh {verb}",
        description=VERBS[verb],
        epilog="Any key of the recipe can be overridden: --section.key value, e.g. --training.steps 20",
    )
    module.add_arguments(parser)
    arguments, overrides = split_overrides(arguments)
    try:
        status = module.run(parser.parse_args(arguments), overrides)
        sys.stdout.flush()
        return status
    except HetmeshError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE_ERROR if isinstance(error, RecipeError | UsageError) else FAILURE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # of `hetmesh report RUN | head`
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would try once more at its end
        return OUTPUT_CLOSED
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        print(f"error: standard output cannot be written: {str(error.strerror).lower()}", file=sys.stderr)
        return FAILURE


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate `--section.key value` and `--section.key=value` (a dot in the name) from a verb's own arguments."""
    own: list[str] = []
    overrides: list[str] = []
    pending = list(reversed(arguments))
    while pending:
        argument = pending.pop()
        name, equals, _ = argument.partition("=")
        if not (name.startswith("--") and "." in name):
            own.append(argument)
            continue
        overrides.append(argument)
        if not equals and pending and not pending[-1].startswith("--"):
            overrides.append(pending.pop())
    return own, overrides


def _help() -> str:
    verbs = "\n".join(f"  {verb:<8} {does}" for verb, does in VERBS.items())
    return (
        "usage: hetmesh VERB RECIPE [--section.key value ...]\n\n"
        "Train multimodal LLMs whose modules each have their own DeviceMesh.\n\n"
        f"verbs:\n{verbs}\n\n`hetmesh VERB --help` shows a verb's arguments."
    )
