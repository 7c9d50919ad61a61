"""A save that goes on beside training: each rank writes its own file, and rank 0 names the checkpoint when all have.

No rank talks to another meanwhile. Ranks leave word of what they have written in the folder itself, which they share
anyway. So training's collectives stay the only ones, and a checkpoint whose bytes are all written gets its name even
where training has ended in an error.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed.checkpoint.metadata import Metadata

from hetmesh.boundary.accelerator import Event
from hetmesh.checkpoint.frozen_tensors import Fingerprint, FrozenFile
from hetmesh.checkpoint.save_plan import SavedEntry
from hetmesh.checkpoint.writing import (
    WrittenPart,
    report_name,
    take_report,
    write_file,
    write_index,
    write_report,
)
from hetmesh.records import checkpoint_folders as folders

_LOOK = 0.02  # seconds between two looks at what other ranks have written


def file_names(rank: int) -> tuple[str, str]:
    """Of a rank's tensors that training changes, and of those that are frozen."""
    return f"__{rank}_0.distcp", f"__{rank}_1.distcp"


def cannot_write(path: Path) -> str:
    """What an error about writing the checkpoint `path` begins with."""
    return f"checkpoint {path} cannot be written"


@dataclass(frozen=True)
class SavePlace:
    """Where a checkpoint goes, and what it is beside this rank's entries.

    Attributes:
        path: its folder when it is complete.
        partial: its folder until then.
        rank, size: this rank, and how many write.
        metadata: for the index; on rank 0.
        keep_latest: how many are left when it is complete; 0: all.
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
        """What an error begins with."""
        return cannot_write(self.path)


@dataclass(frozen=True)
class Content:
    """What a rank writes of a checkpoint.

    Attributes:
        entries: they must not change before the save is written.
        frozen: those that no step changes, where they must be written.
        linked: those that no step changes, where an earlier checkpoint's file is in this one's folder.
        fingerprint: of what no step changes.
        file: keeps for later saves where it was written.
    """

    entries: Sequence[SavedEntry]
    frozen: Sequence[SavedEntry] = ()
    linked: Sequence[WrittenPart] = ()
    fingerprint: Fingerprint = ()
    file: FrozenFile = field(default_factory=FrozenFile)


class PendingSave:
    """A save that has begun on this rank.

    Args:
        content: what this rank writes.
        ready: the event after which the tensors have their values.
    """

    def __init__(self, place: SavePlace, content: Content, ready: Event) -> None:
        self.place = place
        self._deadline = time.monotonic() + place.timeout
        self._written, self._named, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._deciding, self._naming = threading.Lock(), False  # either named or given up, never both
        self._error = ""
        self._thread = threading.Thread(
            target=self._run, args=(content, ready), name=f"checkpoint {place.path.name}", daemon=True
        )
        self._thread.start()

    @property
    def error(self) -> str:
        """What has gone wrong here; empty while nothing has."""
        return self._error

    @property
    def running(self) -> bool:
        """Whether this rank is not done: on rank 0, as long as the checkpoint has no name."""
        return not self._named.is_set()

    def wait_written(self) -> str:
        """Wait until this rank's part is on the disk; what went wrong, if something did."""
        if not self._written.wait(max(0.0, self._deadline - time.monotonic())):
            place = self.place
            return f"{place.fails}: rank {place.rank} has not written its part within {place.timeout:g} s"
        return self._error

    def wait_named(self) -> str:
        """On rank 0, wait until the checkpoint has its name; what went wrong, if something did. Elsewhere nothing is
        left to wait for once this rank's part is written."""
        if not self._named.wait(max(0.0, self._deadline - time.monotonic()) + 1.0):  # it gives up by itself before
            return f"{self.place.fails}: rank 0 has not made it complete within {self.place.timeout:g} s"
        return self._error

    def end(self, patience: float) -> None:
        """Let old checkpoints be removed, at most `patience` seconds: what is left then the next start removes."""
        self._thread.join(patience)

    def give_up(self) -> bool:
        """A rank has failed, or is late: wait for no more reports. What this rank is writing is left to end by itself.

        Returns:
            Whether what is written may be removed; False while it is being made a checkpoint after all.
        """
        with self._deciding:
            self._given_up.set()
            return self._named.is_set() or not self._naming

    def leave(self, patience: float) -> str:
        """Wait for this save without other ranks, which may be gone: for as long as writing may take, and `patience`
        seconds more, on rank 0 for what other ranks have to report, on these for rank 0 to name the checkpoint: whoever
        waits for workers ends them all once one has ended. What is not done then, in words."""
        told = self.wait_written()
        if not told:
            self._deadline = min(self._deadline, time.monotonic() + patience)
            told = self.wait_named()
            while not told and self.place.partial.exists() and time.monotonic() < self._deadline:
                self._given_up.wait(_LOOK)
            self.end(max(0.0, self._deadline - time.monotonic()))
        return told

    def _run(self, content: Content, ready: Event) -> None:
        place = self.place
        try:
            ready.synchronize()
            changing, frozen = file_names(place.rank)
            written = write_file(place.partial / changing, content.entries) if content.entries else []
            written += content.linked
            written += content.file.write(place.partial, place.path, frozen, content.frozen, content.fingerprint)
            write_report(place.partial, place.rank, written)
        except Exception as error:
            self._error = f"{place.fails}: rank {place.rank}: {type(error).__name__}: {error}"
        finally:
            self._written.set()
        retired: list[Path] = []
        if place.rank == 0 and not self._error:
            try:
                retired = self._complete()
            except Exception as error:
                self._error = f"{place.fails}: {type(error).__name__}: {error}"
        self._named.set()
        for old in retired:
            shutil.rmtree(old, ignore_errors=True)

    def _complete(self) -> list[Path]:
        """Name the checkpoint; older ones that are to be removed now."""
        place = self.place
        assert place.metadata is not None
        missing = set(range(place.size))
        while missing := {rank for rank in missing if not (place.partial / report_name(rank)).exists()}:
            if self._given_up.wait(_LOOK):
                return []
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"rank 0 waited {place.timeout:g} s for what ranks {_few(missing)} write")
        written = [w for rank in range(place.size) for w in take_report(place.partial, rank)]
        write_index(place.partial, place.metadata, written)
        with self._deciding:
            if self._given_up.is_set():
                return []
            self._naming = True
        folders.complete(place.partial, place.path, {w.part: w.checksum for w in written})
        try:
            return folders.retire_old(place.path.parent, place.keep_latest)
        except OSError as error:
            self._error = f"old checkpoints in {place.path.parent} cannot be deleted: {error}"
            return []


def _few(ranks: set[int], shown: int = 8) -> str:
    first = ", ".join(map(str, sorted(ranks)[:shown]))
    return first if len(ranks) <= shown else f"{first} and {len(ranks) - shown} more"
