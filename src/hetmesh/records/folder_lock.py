"""One run at a time in a folder: a file in it is locked. Where the file system knows no locks, a name is taken that
processes of this machine share. Both end with the process that has them, however it ends."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO


@dataclass(frozen=True, eq=False)
class Claim:
    """A file of a folder that is this process's alone. Made by `claim_by`.

    Attributes:
        file: open to be read and written.
        unnoticed: which runs in the same folder nobody would notice; empty: none.
        name: taken in place of a lock.
    """

    file: IO[str]
    unnoticed: str = ""
    name: socket.socket | None = None

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self.file.fileno()

    def close(self) -> None:
        """Let others have the folder."""
        self.file.close()
        if self.name is not None:
            self.name.close()


def claim_by(path: Path) -> Claim | None:
    """Claim the folder of `path`, a file that is made where there is none; None: another run has it. Raises OSError."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return Claim(file)
    except BlockingIOError:
        file.close()
        return None
    except OSError:  # a file system that knows no locks
        pass
    try:
        return Claim(file, "one of another machine", _taken(path))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            file.close()
            return None
        return Claim(file, "another one")  # only Linux has such names


def _taken(path: Path) -> socket.socket:
    """A name that stands for `path`, in no file system: a socket's, which nobody else can bind. Raises OSError."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0hetmesh-{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()}")
    except OSError:
        name.close()
        raise
    return name
