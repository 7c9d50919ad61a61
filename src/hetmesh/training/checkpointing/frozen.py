"""Parameters that nobody trains: written once by each rank, and linked into every later checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hetmesh.training.checkpointing.plan import SavedEntry
from hetmesh.training.checkpointing.writing import WrittenPart, write_file


def frozen_names(root: nn.Module) -> set[str]:
    """Names of the parameters of `root` that are not trained."""
    return {name for name, p in root.named_parameters(remove_duplicate=False) if not p.requires_grad}


class FrozenFile:
    """A rank's file of what does not change from one checkpoint of a run to the next.

    A hard link makes it part of each, so that every folder is whole, may be copied or deleted by itself, and the bytes
    are on the disk once. A file system without links gets a copy in each. Whether values have changed all the same
    is told by torch's count of changes in place.
    """

    def __init__(self) -> None:
        self._kept: tuple[Path, Any, list[WrittenPart]] | None = None

    def has(self, unchanged: Any) -> bool:
        """Whether there is a file of entries in that state."""
        return self._kept is not None and unchanged is not None and self._kept[1] == unchanged

    def put(
        self, partial: Path, final: Path, name: str, entries: Sequence[SavedEntry], unchanged: Any
    ) -> list[WrittenPart]:
        """Make the file `name` of `entries` in the folder `partial`, which will be called `final`.

        Args:
            unchanged: of `state_of` these entries.

        Raises:
            OSError: it cannot be written.
        """
        if not entries:
            return []
        if self._kept is not None and self.has(unchanged):
            try:
                os.link(self._kept[0], partial / name)
            except OSError:  # the checkpoint is gone, or the file system knows no links
                pass
            else:
                self._kept = (final / name, unchanged, self._kept[2])
                return self._kept[2]
        written = write_file(partial / name, entries)
        self._kept = (final / name, unchanged, written)
        return written


def state_of(entries: Sequence[SavedEntry]) -> Any:
    """What is equal as long as the values of `entries` are; None where nothing tells."""
    try:
        return [(e.index, e.value.data_ptr(), e.value._version) for e in entries if isinstance(e.value, Tensor)]
    except RuntimeError:  # tensors made in inference mode are not counted
        return None
