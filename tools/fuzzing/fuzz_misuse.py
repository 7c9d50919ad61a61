"""Wrong arguments, wrong values, wrong files: nothing but the project's own errors may come out.

Each kind of misuse draws its inputs from a seeded generator and calls what a user would call. What raises anything but
a HetmeshError (or takes more than 20 s) is an offender. A value that is accepted is none: many drawn ones are right.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzzing.misuse_arguments import arguments
from fuzzing.misuse_files import files
from hetmesh.cli import main as hetmesh
from hetmesh.errors import HetmeshError
from hetmesh.recipe.keys import SECTIONS, valid_keys
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.recipe.sections import LoRA
from support.recipes import RecipeCase, draw_recipes

JUDGES = (
    "src/hetmesh/recipe",
    "src/hetmesh/cli",
    "src/hetmesh/boundary",
    "src/hetmesh/layout",
    "src/hetmesh/resolve/refusals.py",
    "src/hetmesh/resolve/module_refusals.py",
)
"""What an output of it judges (`kept.py`)."""

SECONDS = 20
VALUES = (
    *("-1", "0", "1", "2", "3", "7", "64", "1000000", "-0.5", "0.5", "1e300", "nan", "inf", "-inf", "true", "false"),
    *(
        '""',
        '" "',
        '"x"',
        '"0-1"',
        '"3-1"',
        '"all"',
        '"-1"',
        '"1,,2"',
        '"\\u0000"',
        '"../x"',
        '"os:path"',
        '"torch.nn:ReLU"',
    ),
    *(
        '"a.b:C"',
        '":"',
        '"none"',
        '"float16"',
        "[]",
        "[1]",
        "[-1]",
        "[0, 0]",
        "[1.5]",
        '["x"]',
        "[[]]",
        "[[0]]",
        '[["x"]]',
    ),
    *("{}", "{ a = 1 }", "{ 1 = 2 }", "2020-01-01", "07:30:00", "12:00", "[true]", "9223372036854775807"),
)
"""TOML values that a key may be given, most of them wrong for most keys."""


@dataclass(frozen=True)
class Misuse:
    """One thing to try: what it is, and the call."""

    what: str
    call: Callable[[], object]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside --n and --seed."""
    parser.add_argument("--kind", choices=tuple(KINDS), help="only one kind of misuse")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Try `--n` misuses; a dict of counts and offenders."""
    kinds = [args.kind] if args.kind else list(KINDS)
    counts: Counter[str] = Counter()
    failures: list[dict[str, str]] = []
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hetmesh-misuse-") as folder:
        streams = {kind: KINDS[kind](random.Random(f"{args.seed}/{kind}"), Path(folder)) for kind in kinds}
        for i in range(args.n):
            kind = kinds[i % len(kinds)]
            misuse = next(streams[kind])
            outcome, told = attempt(misuse.call)
            counts[f"{kind}: {outcome}"] += 1
            if outcome == "offends":
                failures.append({"kind": kind, "what": misuse.what, "raised": told})
    return {
        "n": args.n,
        "seed": args.seed,
        "seconds": round(time.monotonic() - start, 1),
        "counts": dict(sorted(counts.items())),
        "failures": failures,
    }


def attempt(call: Callable[[], object]) -> tuple[str, str]:
    """`accepted`, `refused` or `offends`, and what was raised."""

    def late(*_: object) -> None:
        raise TimeoutError(f"no answer within {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            call()
        return "accepted", ""
    except HetmeshError as error:
        return "refused", str(error)
    except SystemExit:  # argparse
        return "refused", "usage"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)
        inside = next((frame for frame in reversed(where) if "hetmesh" in frame.filename), where[-1])
        place = f"{Path(inside.filename).name}:{inside.lineno}"
        return "offends", f"{type(error).__name__}: {str(error)[:300]} ({place})"
    finally:
        signal.alarm(0)


def recipe_values(rng: random.Random, folder: Path) -> Iterator[Misuse]:
    """Every key of a recipe, drawn from the model of its tables, given a value of any type."""
    bases = _bases()
    while True:
        base = rng.choice(bases)
        path, value = ".".join(rng.choice(_paths(base))), rng.choice(VALUES)
        verb = rng.choice(["check", "check", "explain", "simulate"])

        def call(base: RecipeCase = base, path: str = path, value: str = value, verb: str = verb) -> None:
            parse_recipe(base.text, [f"--{path}={value}"])
            file = folder / "recipe.toml"
            file.write_text(base.text)
            hetmesh([verb, str(file), f"--{path}={value}"])

        yield Misuse(f"{verb} --{path}={value}", call)


def recipe_texts(rng: random.Random, folder: Path) -> Iterator[Misuse]:
    """Recipes that are cut off, garbled, or hold lines twice or not at all."""
    bases = _bases()
    while True:
        text = rng.choice(bases).text
        how = rng.choice(["cut", "byte", "drop", "double", "swap", "typo", "rename", "indent"])
        lines = text.split("\n")
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        at = rng.randrange(len(text))
        if how == "cut":
            data = text[:at].encode()
        elif how == "byte":
            data = text[:at].encode() + bytes([rng.randrange(256)]) + text[at + 1 :].encode()
        elif how == "typo":
            data = (text[:at] + text[at + 1 :]).encode()
        elif how == "rename":
            words = [w for w in text.replace("=", " ").replace(".", " ").split() if w.isidentifier()]
            data = text.replace(rng.choice(words), rng.choice(words)).encode()
        else:
            changed = list(lines)
            if how == "drop":
                del changed[i]
            elif how == "double":
                changed.insert(i, changed[i])
            elif how == "swap":
                changed[i], changed[j] = changed[j], changed[i]
            else:
                changed[i] = "  [" + changed[i]
            data = "\n".join(changed).encode()

        def call(data: bytes = data) -> None:
            file = folder / "text.toml"
            file.write_bytes(data)
            _strict("check", str(file))

        yield Misuse(f"{how}: {data[max(0, at - 60) : at + 60]!r}", call)


def commands(rng: random.Random, folder: Path) -> Iterator[Misuse]:
    """The command line: missing files, folders, unknown verbs, overrides that are none."""
    base = _bases()[0]
    good = folder / "good.toml"
    good.write_text(base.text)
    locked = folder / "locked.toml"
    locked.write_text(base.text)
    locked.chmod(0)
    places = [good, locked, folder, folder / "none.toml", good / "below.toml", Path("\0"), Path("x" * 300), Path("")]
    overrides = ["--a", "--.", "--training.", "--training.steps", "steps=3", "--training.steps=", "--=1", "--x.y=1"]
    overrides += ["--modules.nobody.lr=1", "--boundaries.7.at=x", "--boundaries.x.at=y", "--job.description.x=1"]
    flags = [f"--{flag}={place}" for flag in ("png", "trace", "machine", "profile", "output") for place in places]
    flags += ["--machine=h1000", "--seconds=x", "--png=x.gif", "--json=1", "--unknown"]
    verbs = ["check", "explain", "simulate", "report", "profile", "train", "chekc", ""]
    while True:
        verb, place = rng.choice(verbs), rng.choice(places)
        if verb in ("train", "profile") and place in (good, locked):  # root reads both
            place = folder
        given = [verb, str(place), *rng.sample(overrides, rng.randrange(2)), *rng.sample(flags, rng.randrange(2))]
        yield Misuse(" ".join(given), lambda given=given: hetmesh(given))


def _strict(*command: str) -> None:
    """A verb, with errors raised instead of printed."""
    from hetmesh.cli.check import checked
    from hetmesh.recipe.recipe import load_recipe

    checked(load_recipe(command[1]))


def _bases() -> list[RecipeCase]:
    shipped = Path(__file__).parents[2] / "recipes"
    texts = [(shipped / f"{name}.toml").read_text() for name in ("digits", "digits_qwen3vl", "digits_three_phase")]
    return [*map(RecipeCase, texts), *draw_recipes(9, 7)]


def _paths(base: RecipeCase) -> list[tuple[str, ...]]:
    """Every key that the recipe could hold."""
    recipe = base.recipe
    paths: list[tuple[str, ...]] = [(section,) for section in SECTIONS]
    for section in SECTIONS:
        keys = valid_keys(section)
        if section == "modules":
            paths += [(section, module, key) for module in recipe.modules for key in keys]
            paths += [(section, module, "lora", key) for module in recipe.modules for key in LoRA.model_fields]
            for name, module in recipe.modules.items():
                paths += 2 * [
                    (section, name, "config", key) for key in (*module.config, "torch_dtype", "rope_parameters")
                ]
        elif section == "boundaries":
            paths += [(section, str(i), key) for i in range(len(recipe.boundaries)) for key in keys]
        else:
            paths += [(section, key) for key in keys]
        if section == "parallelism":
            paths += 2 * [(section, module, key) for module in recipe.modules for key in keys]
    paths += 4 * [("data", "options", key) for key in recipe.data.options]
    return [path for path in paths if len(path) > 1]


KINDS: dict[str, Callable[[random.Random, Path], Iterator[Misuse]]] = {
    "values": recipe_values,
    "texts": recipe_texts,
    "commands": commands,
    "arguments": lambda rng, _: (Misuse(*each) for each in arguments(rng)),
    "files": lambda rng, folder: (Misuse(*each) for each in files(rng, folder)),
}
"""Kind of misuse -> an endless stream of them."""


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{name:24} {count}" for name, count in result["counts"].items()]
    lines += [f"{each['kind']}: {each['what']}\n    {each['raised']}" for each in result["failures"]]
    lines.append(f"{len(result['failures'])} of {result['n']} offend, in {result['seconds']} s")
    return "\n".join(lines)
