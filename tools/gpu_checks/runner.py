"""Runs a check in a process of its own, so that a crash or a hang is one failure in the list."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

from gpu_checks.found import Place, Row

TOOLS = Path(__file__).parents[1]
Tell = Callable[[str], None]
COMMAND = (sys.executable, "-m", "gpu_checks.one")
"""Takes the name of a check, the device, GPUs, steps and the file that the row goes to."""


def run_check(name: str, place: Place, timeout: float, tell: Tell) -> Row:
    """The row of one check; what it prints is told as it comes.

    Args:
        timeout: seconds; then the process and all that it has started are killed.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        row = _run(name, place, timeout, tell, Path(folder))
    return replace(row, seconds=time.monotonic() - began)


def _run(name: str, place: Place, timeout: float, tell: Tell, folder: Path) -> Row:
    file, errors = folder / "row.json", folder / "errors.txt"
    command = [*COMMAND, name, place.device, str(place.gpus), str(place.steps), str(file)]
    with errors.open("wb") as stream:
        process = subprocess.Popen(
            command, env=_environment(place), stdout=subprocess.PIPE, stderr=stream, text=True, start_new_session=True
        )
    assert process.stdout is not None
    forward = threading.Thread(target=_forward, args=(process.stdout, tell), daemon=True)
    forward.start()
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        return Row(name, "failed", f"no end within {timeout:g} s; {_last_lines(errors)}")
    finally:
        _end(process)
        forward.join(5.0)
    if not file.exists():
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return Row(name, "failed", f"the process ended with {how}; {_last_lines(errors)}")
    return Row(**json.loads(file.read_text(encoding="utf-8")))


def _environment(place: Place) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")])}
    return env if place.on_gpu else {**env, "CUDA_VISIBLE_DEVICES": ""}


def _forward(stream: IO[str], tell: Tell) -> None:
    for line in stream:
        tell(f"    {line.rstrip()}")


def _end(process: subprocess.Popen[str]) -> None:
    """Kill what is left of the process and of those that it has started: they are a process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(file: Path, count: int = 6) -> str:
    lines = file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-count:]
    return "it printed: " + " | ".join(lines) if lines else "it printed no error"
