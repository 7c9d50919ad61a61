"""A save beside training: each rank writes its own file, and rank 0 names the checkpoint when all have.

Ranks do not communicate meanwhile: they record what they have written in the folder, which they share anyway.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from hetmesh.boundary.accelerator import Event
from hetmesh.checkpoint.writing import report_name, write_index, write_report
from hetmesh.formatting import listed
from hetmesh.records import checkpoint_folders as folders

_POLL_S = 0.02  # seconds between two looks at what other ranks have written


@dataclass(frozen=True)
class SavePlace:
    """Where a checkpoint goes.

    Attributes:
        path: its folder when it is complete; `partial`: until then.
        rank, size: this rank, and the number of ranks.
        metadata: for the index; on rank 0.
        keep_latest: number of checkpoints to keep when it is complete; 0: all.
        timeout: seconds that writing may take.
    """

    path: Path
    partial: Path
    rank: int
    size: int
    metadata: Metadata | None
    keep_latest: int
    timeout: float

    @property
    def fails(self) -> str:
        """The beginning of an error."""
        return f"checkpoint {self.path} cannot be written"


class PendingSave:
    """A save that has begun on this rank.

    Args:
        write: called on a thread, writes this rank's files.
        ready: the event after which what it writes has its values.
    """

    def __init__(self, place: SavePlace, write: Callable[[], list[WriteResult]], ready: Event) -> None:
        self.place = place
        self._deadline = time.monotonic() + place.timeout
        self._written, self._named, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._deciding, self._naming = threading.Lock(), False  # either named or given up, never both
        self.error = ""
        """What has gone wrong on this rank; empty while nothing has."""
        name = f"checkpoint {place.path.name}"
        self._thread = threading.Thread(target=self._run, args=(write, ready), name=name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether this rank is not done; on rank 0 until the checkpoint has its name."""
        return not self._named.is_set()

    def wait_written(self) -> str:
        """Wait until this rank's part is on the disk; returns the error, if any."""
        if not self._written.wait(max(0.0, self._deadline - time.monotonic())):
            place = self.place
            return f"{place.fails}: rank {place.rank} has not written its part within {place.timeout:g} s"
        return self.error

    def wait_named(self) -> str:
        """On rank 0, wait until the checkpoint has its name; returns the error, if any. Other ranks need not wait."""
        if not self._named.wait(max(0.0, self._deadline - time.monotonic()) + 1.0):  # it gives up by itself before
            return f"{self.place.fails}: rank 0 has not made it complete within {self.place.timeout:g} s"
        return self.error

    def end(self, patience: float) -> None:
        """Wait at most `patience` seconds while old checkpoints are removed; the next start removes the rest."""
        self._thread.join(patience)

    def give_up(self) -> bool:
        """A rank has failed, or is late: wait for no more reports. This rank's writing ends by itself. Returns whether
        the files may be removed; False while they are being named after all."""
        with self._deciding:
            self._given_up.set()
            return self._named.is_set() or not self._naming

    def leave(self, patience: float) -> str:
        """Wait for this save without other ranks, which may be gone: for as long as writing may take, and `patience`
        seconds more, on rank 0 for the reports of other ranks, on these for rank 0 to name the checkpoint: launchers
        end all workers once one has ended. Returns the error, if any."""
        error = self.wait_written()
        if not error:
            self._deadline = min(self._deadline, time.monotonic() + patience)
            error = self.wait_named()
            while not error and self.place.partial.exists() and time.monotonic() < self._deadline:
                self._given_up.wait(_POLL_S)
            self.end(max(0.0, self._deadline - time.monotonic()))
        return error

    def _run(self, write: Callable[[], list[WriteResult]], ready: Event) -> None:
        place = self.place
        try:
            ready.synchronize()
            write_report(place.partial, place.rank, write())
        except Exception as error:
            self.error = f"{place.fails}: rank {place.rank}: {type(error).__name__}: {error}"
        finally:
            self._written.set()
        retired: list[Path] = []
        if place.rank == 0 and not self.error:
            try:
                retired = self._complete()
            except Exception as error:
                self.error = f"{place.fails}: {type(error).__name__}: {error}"
        self._named.set()
        for old in retired:
            shutil.rmtree(old, ignore_errors=True)

    def _complete(self) -> list[Path]:
        """Name the checkpoint; returns older ones to remove."""
        place = self.place
        assert place.metadata is not None
        missing = set(range(place.size))
        while missing := {rank for rank in missing if not (place.partial / report_name(rank)).exists()}:
            if self._given_up.wait(_POLL_S):
                return []
            if time.monotonic() > self._deadline:
                ranks = listed([str(rank) for rank in sorted(missing)], 8)
                raise TimeoutError(f"rank 0 waited {place.timeout:g} s for what ranks {ranks} write")
        sums = write_index(place.partial, place.metadata, place.size)
        with self._deciding:
            if self._given_up.is_set():
                return []
            self._naming = True
        folders.complete(place.partial, place.path, sums)
        try:
            return folders.retire_old(place.path.parent, place.keep_latest)
        except OSError as error:
            self.error = f"old checkpoints in {place.path.parent} cannot be deleted: {error}"
            return []
