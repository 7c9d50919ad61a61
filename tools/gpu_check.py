"""The first hour on a machine with GPUs: a list of checks, what each found, what was skipped and why.

    python tools/gpu_check.py --json            # all checks on CUDA; where there is no GPU all are skipped
    python tools/gpu_check.py --device cpu      # what has a meaning on a CPU, small, ranks over gloo
    python tools/gpu_check.py --device fake     # what a dry run on a fake accelerator can say
    python tools/gpu_check.py --list            # the checks; --only NAME runs one (may be given several times)

One GPU will do: NCCL takes the ranks on it for ranks of different hosts. With several GPUs ranks have one each. A check
has a process of its own and a limit of time. With `--json` lines of progress go to standard error. Exit status 1 if a
check failed. tools/results/gpu_check.json keeps step times of one H100, from when these were the whole list,
gpu_check_parity.json and gpu_check_memory.json those checks on one H200;
gpu_check_cpu.json is the list's on a CPU, gpu_check_fake.json that on the fake accelerator.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from gpu_checks import CHECKS, descriptions
from gpu_checks.found import DEVICES, Place, Row
from gpu_checks.runner import Tell, run_check
from kept import stamp

JUDGES = (
    "src/hetmesh/layout",
    "src/hetmesh/graph",
    "src/hetmesh/schedule",
    "src/hetmesh/boundary",
    "src/hetmesh/attention",
    "src/hetmesh/parallel",
    "src/hetmesh/models",
    "src/hetmesh/runtime",
    "src/hetmesh/balance",
    "src/hetmesh/training",
    "src/hetmesh/context",
    "tools/gpu_checks",
)
"""What an output of it judges (`kept.py`)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the list; returns the exit status."""
    args = _arguments(argv)
    if args.list:
        known = descriptions()
        print(json.dumps(known, indent=1) if args.json else "\n".join(f"{k:12} {text}" for k, text in known.items()))
        return 0
    import torch

    from hetmesh.files import to_json, write_json

    def tell(line: str) -> None:
        print(line, file=sys.stderr if args.json else sys.stdout, flush=True)

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    place = Place(args.device, gpus, args.steps or (10 if args.device == "cuda" else 4))
    of = stamp(JUDGES)
    for result in run(place, args.only or list(CHECKS), tell, args.timeout):
        if args.output:  # after each check: a machine may be taken away before the last
            args.output.parent.mkdir(parents=True, exist_ok=True)
            write_json(args.output, result | {"kept": of}, indent=1)
    result |= {"kept": of}
    counts = "{passed} passed, {failed} failed, {skipped} skipped".format(**result)
    print(to_json(result, indent=1) if args.json else counts)
    return int(result["failed"] > 0)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=DEVICES, default="cuda", help="where checks run (default %(default)s)")
    parser.add_argument("--only", action="append", choices=CHECKS, metavar="NAME", help="a check of the list")
    parser.add_argument("--list", action="store_true", help="print the names of all checks and what they are")
    parser.add_argument("--steps", type=int, help="measured steps of each loop (default 10, on a CPU 4)")
    parser.add_argument("--timeout", type=float, help="seconds for each check (default: its own limit)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the JSON object to FILE")
    return parser.parse_args(argv)


def run(place: Place, names: Sequence[str], tell: Tell, timeout: float | None = None) -> Iterator[dict[str, Any]]:
    """What was found up to each check, one after the other."""
    import torch

    began, rows = time.monotonic(), []
    for number, name in enumerate(names, 1):
        if place.on_gpu and not place.gpus:
            row = Row(name, "skipped", "no CUDA device here: --device cpu or fake tries what they can")
        else:
            tell(f"{number} of {len(names)}: {name}")
            row = run_check(name, place, timeout or CHECKS[name], tell)
        tell(f"{row.status.upper()}  {row.line()}")
        rows.append(row)
        counts = Counter(row.status for row in rows)
        yield {
            "device": place.device,
            "gpu": torch.cuda.get_device_name() if place.on_gpu and place.gpus else None,
            "gpus": place.gpus,
            "torch": torch.__version__,
            **{status: counts[status] for status in ("passed", "failed", "skipped")},
            "seconds": round(time.monotonic() - began, 1),
            "checks": [row.as_json() for row in rows],
        }


if __name__ == "__main__":
    sys.exit(main())
