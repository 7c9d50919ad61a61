"""Outputs kept in tools/results: at which commit each was made, what it judges, and whether that has changed since.

    python tools/kept.py                                           # each output, its date, and what has changed
    python tools/kept.py exhaustive.txt --judges src tests         # mark an output that no tool has marked
    python tools/kept.py exhaustive.txt --judges src --commit C    # as of an earlier commit

An output holds, under `kept`, its commit, its date, the load of the machine before, and of each file or folder that it
judges the hashes of the contents, those of the tool that made it too. A folder that is moved or renamed is the same:
what counts is whether every content is still somewhere in the repository. Neither imports of hetmesh nor comments and
docstrings are part of a content. Text files end with a line `kept: {...}`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tools" / "results"
PLACES = ("src", "tools", "recipes", "tests")
SUFFIXES = {".py", ".toml", ".csv"}
"""What code is: pages are not, nor outputs."""
LENGTH, LINE = 10, "kept: "

Stamp = dict[str, Any]


def stamp(judges: Sequence[str], *, module: ModuleType | None = None, before: Mapping[str, Any] | None = None) -> Stamp:
    """What an output says of itself: to be taken before the run begins.

    Args:
        judges: files and folders of the repository.
        module: what measures, judged too.
        before: the stamp of an output to which this one is added: its commit and date stay, and its contents count.

    Raises:
        FileNotFoundError: one of `judges` does not exist.
    """
    paths = [*judges, *([_own(module)] if module else ())]
    held = {path: _hashes(path) for path in paths}
    if before:
        earlier = {path: set(before["judges"].get(path, "").split()) for path in (*before["judges"], *paths)}
        held = {path: earlier[path] | held.get(path, set()) for path in earlier}
        return {**before, "judges": _texts(held)}
    return {
        "commit": _commit(paths),
        "date": datetime.now(UTC).date().isoformat(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "judges": _texts(held),
    }


def stamp_of_commit(judges: Sequence[str], commit: str) -> Stamp:
    """The stamp of an output of an earlier commit, which git still knows."""
    held = {}
    for path in judges:
        lines = (line.split(None, 3) for line in _git("ls-tree", "-r", commit, "--", path).splitlines())
        blobs = ((digest, Path(name).suffix) for _, _, digest, name in lines)
        held[path] = {_hash(_git_bytes("cat-file", "blob", blob), end) for blob, end in blobs if end in SUFFIXES}
        if not held[path]:
            raise FileNotFoundError(f"{path} has no code at {commit}")
    date = _git("show", "-s", "--format=%cs", commit)
    return {"commit": _git("rev-parse", "--short=10", commit), "date": date, "judges": _texts(held)}


def kept(output: Path) -> Stamp:
    """The stamp of a kept output.

    Raises:
        KeyError: it has none.
    """
    text = output.read_text(encoding="utf-8")
    if output.suffix == ".json":
        return json.loads(text)["kept"]
    last = text.rstrip().rpartition("\n")[2]
    if not last.startswith(LINE):
        raise KeyError(f"{output.name} does not end with a line '{LINE}{{...}}'")
    return json.loads(last.removeprefix(LINE))


def changed(of: Mapping[str, Any]) -> list[str]:
    """Which of the judged files and folders have contents that are nowhere in the repository any more."""
    return [path for path, held in of["judges"].items() if not set(held.split()) <= _everywhere()]


def _own(module: ModuleType) -> str:
    file = Path(str(module.__file__)).resolve()
    return str((file.parent if file.name == "__init__.py" else file).relative_to(ROOT))


def _hashes(path: str) -> set[str]:
    place = ROOT / path
    if not place.exists():
        raise FileNotFoundError(f"{path}, which is to be judged, does not exist")
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.suffix in SUFFIXES]
    return {_hash(file.read_bytes(), file.suffix) for file in files}


@functools.cache
def _hash(content: bytes, suffix: str) -> str:
    code = _code(content.decode()).encode() if suffix == ".py" else content
    return hashlib.sha1(code, usedforsecurity=False).hexdigest()[:LENGTH]


def _code(text: str) -> str:
    """The lines of a Python file without imports of hetmesh, docstrings, comments and empty lines."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        imports = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hetmesh"
        words = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and (imports or words):
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = (line for number, line in enumerate(text.splitlines(), 1) if number not in left_out)
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


@functools.cache
def _everywhere() -> frozenset[str]:
    return frozenset().union(*(_hashes(place) for place in PLACES))


def _texts(held: Mapping[str, set[str]]) -> dict[str, str]:
    return {path: " ".join(sorted(hashes)) for path, hashes in held.items()}


def _commit(paths: Sequence[str]) -> str | None:
    """Of the work tree; None outside of git."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
        return commit + (", with changes" if _git("status", "--porcelain", "--", *paths) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*command: str) -> str:
    return _git_bytes(*command).decode().strip()


def _git_bytes(*command: str) -> bytes:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, check=True).stdout


def _write(output: Path, of: Stamp) -> None:
    text = output.read_text(encoding="utf-8")
    if output.suffix == ".json":
        whole = json.loads(text) | {"kept": of}
        second = (text.splitlines() or [""])[1:2]  # indented as it was
        indent = len(second[0]) - len(second[0].lstrip()) if second else None
        output.write_text(json.dumps(whole, indent=indent) + "\n", encoding="utf-8")
        return
    body, _, last = text.rstrip().rpartition("\n")
    body = body if last.startswith(LINE) else text.rstrip()
    output.write_text(f"{body.rstrip()}\n\n{LINE}{json.dumps(of)}\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """List the outputs, or mark one; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", metavar="NAME", help="of tools/results, to be marked")
    parser.add_argument("--judges", nargs="+", default=[], metavar="PATH", help="files and folders that it judges")
    parser.add_argument("--commit", help="at which it was made (default: the work tree as it is)")
    args = parser.parse_args(argv)
    if args.output:
        if not args.judges:
            parser.error("--judges: name what the output judges")
        found = stamp_of_commit(args.judges, args.commit) if args.commit else stamp(args.judges)
        _write(RESULTS / args.output, found)
        return 0
    for output in sorted(path for path in RESULTS.iterdir() if path.suffix != ".md"):
        of = kept(output)
        since = ", ".join(changed(of)) or "nothing"
        print(f"{output.name:28} {of['date']}  {of['commit']}  changed since: {since}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
