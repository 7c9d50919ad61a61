"""Functions run by several ranks, each a process that joins as one that a launcher has started; on CUDA over NCCL.

NCCL refuses two ranks on one GPU unless it takes them for ranks of different hosts: where there are fewer GPUs than
ranks each gets a NCCL_HOSTID of its own, and messages go through sockets of the loopback interface. That shows hangs,
wrong orders and wrong sums as several machines would, and nothing about speed.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_checks.found import Place

OF_THIS_HOST = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
OF_ANOTHER_HOST = {
    "NCCL_SOCKET_IFNAME": "lo",
    **dict.fromkeys(("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"),
    "NCCL_NVLS_ENABLE": "0",
}


def environment(rank: int, size: int, port: int, gpus: int) -> dict[str, str]:
    """What a launcher tells rank `rank` of `size`, and NCCL's variables where there are fewer GPUs than ranks.

    Args:
        gpus: of this machine; 0 where ranks compute on the CPU.
    """
    apart = 0 < gpus < size
    place = {
        **{"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        "LOCAL_RANK": rank % gpus if gpus else 0,
        "LOCAL_WORLD_SIZE": 1 if apart else size,
    }
    env = {**OF_THIS_HOST, **{key: str(value) for key, value in place.items()}}
    return {**env, **OF_ANOTHER_HOST, "NCCL_HOSTID": f"rank{rank}"} if apart else env


def free_port() -> int:
    """A port of this machine that nobody listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Launched:
    """Processes of one command, a rank each, that end together.

    Args:
        command: of every rank.
        logs: a file per rank for what it prints.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], logs: Sequence[Path]) -> None:
        self.logs, self.processes = logs, []
        for env, log in zip(environments, logs, strict=True):
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("w") as file:
                both = {**os.environ, **env}
                self.processes.append(subprocess.Popen(command, env=both, stdout=file, stderr=subprocess.STDOUT))

    def wait(self, timeout: float) -> str | None:
        """Wait for all, or until one has failed, and kill those that are left.

        Returns:
            What went wrong: the last lines of the first rank that failed, or that time is over.
        """
        started = time.monotonic()
        try:
            while any(p.poll() is None for p in self.processes) and time.monotonic() - started < timeout:
                if any(p.returncode for p in self.processes):
                    break
                time.sleep(0.1)
            broken = next((rank for rank, p in enumerate(self.processes) if p.poll() not in (None, 0)), None)
            running = [rank for rank, p in enumerate(self.processes) if p.poll() is None]
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        if broken is not None:
            return f"rank {broken} ended with {self.processes[broken].returncode}: {self._told(broken)}"
        if running:
            return f"ranks {running} were not done after {timeout:g} s; rank {running[0]}: {self._told(running[0])}"
        return None

    def _told(self, rank: int) -> str:
        """The end of what a rank printed."""
        return " | ".join(self.logs[rank].read_text(errors="replace").strip().splitlines()[-6:])


def run_ranks(function: Callable[..., Any], size: int, place: Place, *args: Any, timeout: float) -> list[Any]:
    """Call `function(world, *args)` on `size` ranks; it must be a function of a module that can be imported.

    Args:
        timeout: seconds for all of it, with starting.

    Returns:
        The results, one per rank.

    Raises:
        RuntimeError: a rank failed, or time is over; says which, and the end of what it printed.
    """
    gpus = place.gpus if place.on_gpu else 0
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        task = (function.__module__, function.__qualname__, "cuda" if gpus else "cpu", args)
        (folder / "task").write_bytes(pickle.dumps(task))
        launched = Launched(
            [sys.executable, "-m", "gpu_checks.ranks", name],
            [environment(rank, size, port, gpus) for rank in range(size)],
            [folder / f"{rank}.log" for rank in range(size)],
        )
        wrong = launched.wait(timeout)
        if wrong is not None:
            raise RuntimeError(f"{function.__qualname__} on {size} ranks: {wrong}")
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(size)]


def main() -> int:
    """One rank."""
    import importlib

    import torch

    import hetmesh

    folder = Path(sys.argv[1])
    module, name, device, args = pickle.loads((folder / "task").read_bytes())
    if device == "cpu":
        torch.set_num_threads(1)
    world = hetmesh.init(device=device)
    result = getattr(importlib.import_module(module), name)(world, *args)
    (folder / f"{world.rank}.result").write_bytes(pickle.dumps(result))
    world.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
