"""Trying hetmesh as strangers do: drawn inputs, judged by what must hold for all of them.

    python tools/fuzz.py recipes --n 100 --seed 0    # drawn recipes against one process and a plain loop
    python tools/fuzz.py misuse --n 500 --seed 0     # wrong arguments and files: only the project's own errors
    python tools/fuzz.py --help

Each is a module of `fuzzing/` with `add_arguments(parser)`, `run(args)`, `table(result)` and `JUDGES`, what its
output judges (`kept.py`); exit status 1 where the result has failures. The same seed draws the same inputs.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kept import stamp

FOLDER = Path(__file__).parent / "fuzzing"
sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for `support`, which hetmesh's own tests share


def main(argv: Sequence[str] | None = None) -> int:
    """Run one fuzzer; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    files = {path.stem.removeprefix("fuzz_"): path for path in sorted(FOLDER.glob("fuzz_*.py"))}
    texts = {name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in files.items()}
    listing = "\n".join(f"  {name:8} {(text or '').partition(chr(10))[0]}" for name, text in texts.items())
    parser = argparse.ArgumentParser(
        prog="fuzz.py",
        description="Drawn inputs for hetmesh.",
        epilog=f"fuzzers:\n{listing}\n\n`fuzz.py NAME --help` shows the options of one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", choices=files, metavar="NAME", help="one of those below")
    name = parser.parse_args(argv[:1]).name
    module = importlib.import_module(f"fuzzing.fuzz_{name}")
    parser = argparse.ArgumentParser(
        prog=f"fuzz.py {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n", type=int, default=100, help="inputs to draw")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws others")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON object to FILE")
    module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    of = stamp(module.JUDGES, module=module)
    result = module.run(args) | {"kept": of}
    text = json.dumps(result, indent=2)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text if args.json else module.table(result))
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
