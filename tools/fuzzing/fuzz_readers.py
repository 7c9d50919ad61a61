"""Spoiled files for every reader: only the project's own errors, no hang, no file outside of its folder, no bombs.

Recipes, overrides, data, indices, Hugging Face directories, checkpoints and run folders are made once and changed by
one to three edits each; then whoever reads such a folder does. An input offends where anything but a HetmeshError comes
out, where reading computes for over 20 s or takes over 3 GiB more memory (what a file only claims to hold must not be
allocated), or opens a file of a folder beside it (told by the kernel, so what extensions open counts). One of 50 is
read by `hetmesh check`, which must say what is wrong in a message that begins with `error:`. What fails is shown with
the fewest edits.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import io
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fuzzing.mutations import Place, linked, mutate
from fuzzing.reader_inputs import Kind
from fuzzing.reader_kinds import KINDS, make_bases
from hetmesh.cli import main as hetmesh
from hetmesh.errors import HetmeshError

JUDGES = (
    "src/hetmesh/recipe",
    "src/hetmesh/data",
    "src/hetmesh/report",
    "src/hetmesh/cost/machine.py",
    "src/hetmesh/cost/fitted.py",
    "src/hetmesh/checkpoint",
    "src/hetmesh/records/checksums.py",
    "src/hetmesh/checkpoint/initial_load.py",
    "src/hetmesh/export/directory_files.py",
    "src/hetmesh/records/dump_folder.py",
    "src/hetmesh/records/run_lines.py",
    "src/hetmesh/records/run_view.py",
    "src/hetmesh/files.py",
)
"""What an output of it judges (`kept.py`)."""

SECONDS, WAIT, BYTES = 20, 300, 3 << 30
CHECKED_EVERY = 50
_OPEN, _IS_FOLDER = 0x20, 0x40000000  # of inotify(7)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options beside --n and --seed."""
    parser.add_argument("--kind", choices=tuple(KINDS), help="only one kind of input")
    parser.add_argument("--number", type=int, help="only the input of this number")
    parser.add_argument("--processes", type=int, default=1, help="that read at once")
    parser.add_argument(
        "--progress", action="store_true", help="tell each number on stderr: which one ended the process"
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Read `--n` spoiled inputs; a dict of counts and offenders."""
    start = time.monotonic()
    processes = getattr(args, "processes", 1)
    given = getattr(args, "number", None)
    shares = [range(i, args.n, processes) for i in range(processes)] if given is None else [range(given, given + 1)]
    read = partial(_read_all, args.seed, args.kind, getattr(args, "progress", False))
    if len(shares) == 1:
        done = [read(shares[0])]
    else:
        with multiprocessing.get_context("spawn").Pool(len(shares)) as pool:
            done = pool.map(read, shares)
    counts = sum((each[0] for each in done), Counter())
    failures = sorted((failure for each in done for failure in each[1]), key=lambda failure: failure["number"])
    slowest = max(each[2] for each in done)
    return {
        "n": args.n,
        "seed": args.seed,
        "seconds": round(time.monotonic() - start, 1),
        "slowest": round(slowest, 1),
        "counts": {name: count for name, count in sorted(counts.items()) if count},
        "failures": failures,
    }


def _read_all(
    seed: int, kind: str | None, progress: bool, numbers: Sequence[int]
) -> tuple[Counter[str], list[dict[str, Any]], float]:
    """Counts of outcomes, offenders, and seconds of the slowest of the inputs of these numbers."""
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    slowest = 0.0
    with _Fuzzer(seed, kind) as fuzzer:
        for number in numbers:
            if progress:
                print(number, fuzzer.kind_of(number), file=sys.stderr, flush=True)
            began = time.process_time()
            name, how, edits, outcome, told = fuzzer.read(number)
            slowest = max(slowest, time.process_time() - began)
            counts[f"{name}: {outcome}"] += 1
            counts["check: " + outcome] += how == "check"
            if outcome == "offends":
                failures.append({"number": number, "kind": name, "by": how, "edits": edits, "raised": told})
                print(f"{number} {name} by {how}: {'; '.join(edits)}\n    {told}", file=sys.stderr, flush=True)
    return counts, failures, slowest


class _Fuzzer:
    """Makes and reads inputs by their number."""

    def __init__(self, seed: int, only: str | None) -> None:
        self.seed = seed
        self.kinds = {only: KINDS[only]} if only else dict(KINDS)
        self.checked = [name for name, kind in self.kinds.items() if kind.checked]
        self.stack = contextlib.ExitStack()

    def __enter__(self) -> _Fuzzer:
        self.root = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="hetmesh-readers-")))
        with _quiet():
            make_bases(self.root)
        self.opened = self.stack.enter_context(_watched(self.root / "outside"))
        here = os.getcwd()
        self.stack.callback(os.chdir, here)
        self.stack.enter_context(_bounded_memory())
        self.stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def kind_of(self, number: int) -> str:
        """Which kind an input is of."""
        rng = random.Random(f"{self.seed}/{number}/kind")
        if number % CHECKED_EVERY == 0 and self.checked:
            return self.checked[number // CHECKED_EVERY % len(self.checked)]
        return rng.choices(list(self.kinds), [kind.share for kind in self.kinds.values()])[0]

    def read(self, number: int) -> tuple[str, str, list[str], str, str]:
        """Kind, who read it, edits, `accepted`, `refused` or `offends`, and what was raised."""
        name = self.kind_of(number)
        how = "check" if number % CHECKED_EVERY == 0 and self.kinds[name].checked else "reader"
        chosen = list(range(random.Random(f"{self.seed}/{number}").choice((1, 1, 2, 3))))
        edits, outcome, told = self._attempt(name, number, how, chosen)
        for edit in list(chosen) if outcome == "offends" else ():  # as few as still offend
            fewer = [each for each in chosen if each != edit]
            found = self._attempt(name, number, how, fewer) if fewer else ([], "", "")
            if found[1] == "offends":
                chosen, (edits, outcome, told) = fewer, found
        return name, how, edits, outcome, told

    def _attempt(self, name: str, number: int, how: str, chosen: Sequence[int]) -> tuple[list[str], str, str]:
        kind = self.kinds[name]
        folder = self.root / f"input-{number}"
        shutil.copytree(self.root / kind.base, folder, copy_function=shutil.copy)
        try:
            with _quiet():
                kind.prepare(folder)
            edits = [self._edit(kind, number, i, folder) for i in chosen]
            self.opened()
            os.chdir(folder)
            outcome, told = _outcome(lambda: self._read(kind, how, folder, number))
            if names := self.opened():
                outcome, told = "offends", f"opened {names} outside of its folder; {told}"
            return edits, outcome, told.replace(str(self.root), "")[:600]
        finally:
            os.chdir(self.root)
            shutil.rmtree(folder, ignore_errors=True)

    def _edit(self, kind: Kind, number: int, i: int, folder: Path) -> str:
        rng = random.Random(f"{self.seed}/{number}/{i}")
        files = sorted(file for pattern in kind.files for file in folder.glob(pattern) if not file.is_dir())
        if not files:
            return "nothing"
        file = rng.choice(files)
        place = Place(file, self.root / "outside", kind.base == "recipes" or file.suffix == ".toml")
        if kind.links and rng.random() < 0.05:
            return linked(place)
        return mutate(rng, place)

    def _read(self, kind: Kind, how: str, folder: Path, number: int) -> None:
        if how == "reader":
            return void(kind.read(folder, random.Random(f"{self.seed}/{number}/read")))
        recipes = [folder / "recipe.toml"] if kind.base == "project" else sorted(folder.glob("*.toml"))
        recipe = max(recipes, key=lambda file: file.lstat().st_mtime_ns)
        command("check", str(recipe))
        return None


def void(_: object) -> None:
    """Nothing of a value."""


def command(*arguments: str) -> None:
    """A verb, as from a shell: a HetmeshError where it says what is wrong, AssertionError where it does not."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = hetmesh(arguments)
    said = errors.getvalue()
    assert "Traceback" not in said, said
    assert status == 0 or (status in (1, 2) and re.search("^error: .", said, re.MULTILINE)), f"{status}: {said!r}"
    if status:
        raise HetmeshError(said)


def _outcome(call: Any) -> tuple[str, str]:
    def late(*_: object) -> None:
        raise _Late(f"no answer within {SECONDS} s of computing, or {WAIT} s")

    before = {number: signal.signal(number, late) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(WAIT)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    start = time.process_time()
    try:
        with _quiet():
            call()
        outcome, told = "accepted", ""
    except HetmeshError as error:
        outcome, told = ("refused", str(error)) if str(error).strip() else ("offends", "an error without a message")
        if _lacked_memory(error):
            outcome, told = "offends", f"memory was asked for without bound: {told}"
    except SystemExit as error:  # argparse
        outcome, told = "refused", f"usage {error.code}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/hetmesh/" in f.filename]
        place = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[:-4:-1])
        outcome, told = "offends", f"{type(error).__name__}: {str(error)[:300]} ({place})"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    if (seconds := time.process_time() - start) > SECONDS + 1:  # in code that signals wait for
        outcome, told = "offends", f"took {seconds:.0f} s; {told}"
    return outcome, told


class _Late(BaseException):
    """No TimeoutError, which is an OSError: readers would take it for one of theirs."""


def _lacked_memory(error: BaseException | None) -> bool:
    """Whether it came of a MemoryError."""
    return error is not None and (
        isinstance(error, MemoryError) or _lacked_memory(error.__cause__ or error.__context__)
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    """The process may have so much more address space than it has now."""
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmSize:\s+(\d+) kB", status)
    before = resource.getrlimit(resource.RLIMIT_AS)
    assert match is not None
    resource.setrlimit(resource.RLIMIT_AS, (1024 * int(match[1]) + BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def _watched(folder: Path) -> Iterator[Any]:
    """Gives a function: names of files in `folder` that were opened since it was last called."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(folder), _OPEN) < 0:
        raise OSError(ctypes.get_errno(), f"{folder} cannot be watched (inotify)")

    def names() -> list[str]:
        found: set[str] = set()
        with contextlib.suppress(BlockingIOError):
            while data := os.read(descriptor, 1 << 16):
                at = 0
                while at < len(data):
                    _, mask, _, length = struct.unpack_from("iIII", data, at)
                    name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
                    at += 16 + length
                    found |= set() if mask & _IS_FOLDER else {name}
        return sorted(found)

    try:
        yield names
    finally:
        os.close(descriptor)


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{name:24} {count}" for name, count in result["counts"].items()]
    lines += [
        f"{each['number']} {each['kind']} by {each['by']}: {'; '.join(each['edits'])}\n    {each['raised']}"
        for each in result["failures"]
    ]
    lines.append(
        f"{len(result['failures'])} of {result['n']} offend, in {result['seconds']} s; the slowest took "
        f"{result['slowest']} s"
    )
    return "\n".join(lines)
