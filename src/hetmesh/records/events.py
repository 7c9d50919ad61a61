"""What happens to a run besides its steps: start, save, resume, end. Rank 0 writes it to events.jsonl."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from hetmesh.errors import LOST_PEER
from hetmesh.files import to_json, writing

EVENTS_FILE = "events.jsonl"
"""In a run's folder: a line for each, with a `timestamp`. Locked by the run that writes it, which tells readers whether
that one still lives."""

STARTED, SAVED, ENDED = "started", "checkpoint", "ended"
"""Values of a line's `event`."""
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""How a run ended, as `how` of its last line says. A run that is killed has no such line."""
LONGEST_REASON = 2000  # characters
_TRIES, _PAUSE_S = 5, 0.02


class RunEvents:
    """Writes events.jsonl of a run's folder; what is in the file of a run that begins `anew` is dropped. Raises
    OutputError: the file cannot be written. So does `add`."""

    def __init__(self, folder: Path, *, anew: bool) -> None:
        self._path = folder / EVENTS_FILE
        self._ended = False
        with writing(self._path):
            folder.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = self._path.open("w" if anew else "a", encoding="utf-8")
            if not anew:
                with self._path.open("rb") as file:
                    file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                    if file.read(1) not in (b"", b"\n"):  # a kill may have cut the last line short
                        self._file.write("\n")
        for _ in range(_TRIES):  # a reader has it for an instant
            with suppress(OSError):  # or a file system knows no locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_PAUSE_S)

    def add(self, event: str, **values: Any) -> None:
        """Write a line; what is None is left out."""
        known = {key: value for key, value in values.items() if value is not None}
        with writing(self._path):
            self._file.write(to_json({"event": event, "timestamp": now(), **known}) + "\n")
            self._file.flush()

    def started(self, step: int, **values: Any) -> None:
        """The process is about to train the step after `step`."""
        self.add(STARTED, step=step, host=socket.gethostname(), pid=os.getpid(), **values)

    def ended(self, step: int, how: str, reason: str | None = None) -> None:
        """The run is over; only the first word about it counts."""
        if not self._ended:
            self._ended = True
            if how == FAILED and reason and LOST_PEER.search(reason):
                reason = f"a process was gone, and it may be another one than rank 0 names: {reason}"
            self.add(ENDED, step=step, how=how, reason=reason and reason[:LONGEST_REASON])

    def close(self) -> None:
        with writing(self._path):
            self._file.close()


def is_writing(folder: Path) -> bool | None:
    """Whether a run writes its events to `folder` now, as far as locks of its file system tell; None: they do not."""
    try:
        with (folder / EVENTS_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def now() -> float:
    """Seconds since 1970, as lines of a run's files have them."""
    return round(time.time(), 3)
