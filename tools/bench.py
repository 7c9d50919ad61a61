"""The benchmarks of hetmesh.

    python tools/bench.py boundary          # a table
    python tools/bench.py boundary --json   # one JSON object, and nothing else on standard output
    python tools/bench.py --help            # the list

Each benchmark is a module of `benchmarks/` with `add_arguments(parser)`, `run(args)`, `table(result)` and `JUDGES`, the
files and folders that its output judges (`kept.py`); the first line of its docstring is what the list says. Times mean
something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hetmesh.errors import HetmeshError
from kept import stamp

FOLDER = Path(__file__).parent / "benchmarks"
sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for `support`, which hetmesh's own tests share


def benchmarks() -> dict[str, str]:
    """Name -> what it measures. Nothing is imported."""
    files = {p.stem: p for p in FOLDER.glob("*.py") if p.stem != "__init__"}
    files |= {p.parent.name: p for p in FOLDER.glob("*/__init__.py")}
    texts = {name: ast.get_docstring(ast.parse(files[name].read_text(encoding="utf-8"))) for name in sorted(files)}
    return {name: (text or "").partition("\n")[0] for name, text in texts.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    known = benchmarks()
    listing = "\n".join(f"  {name:12} {what}" for name, what in known.items())
    parser = argparse.ArgumentParser(
        prog="bench.py",
        description="Benchmarks of hetmesh.",
        epilog=f"benchmarks:\n{listing}\n\n`bench.py NAME --help` shows the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=known, metavar="NAME", help="one of those below")
    name = parser.parse_args(argv[:1]).name
    module = importlib.import_module(f"benchmarks.{name}")
    parser = argparse.ArgumentParser(
        prog=f"bench.py {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON object to FILE")
    module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    of = stamp(module.JUDGES, module=module)
    try:
        result = module.run(args) | {"kept": of}
    except HetmeshError as error:
        print(f"bench.py {name}: {error}", file=sys.stderr)
        return 2
    text = json.dumps(result, indent=2)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text if args.json else module.table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
