"""One check in a process of its own: `python -m gpu_checks.one NAME DEVICE GPUS STEPS FILE`.

The row goes to FILE as JSON. What the check prints are lines of progress.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from gpu_checks import load
from gpu_checks.found import Place, Row, Skip


def check(name: str, place: Place) -> Row:
    """The row of a check that is run here; an error is a failure."""
    try:
        return Row.of(name, load(name).run(place))
    except Skip as skip:
        return Row(name, "skipped", str(skip))
    except Exception as error:
        traceback.print_exc()
        told = "; ".join([*f"{error}".splitlines()[:3], *getattr(error, "__notes__", ())])
        return Row(name, "failed", f"{type(error).__name__}: {told}"[:2000])


def main() -> int:
    """Run it and write the row."""
    import torch

    name, device, gpus, steps, file = sys.argv[1:]
    if device == "cpu":
        torch.set_num_threads(1)
    row = check(name, Place(device, int(gpus), int(steps)))
    Path(file).write_text(json.dumps(row.as_json()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
