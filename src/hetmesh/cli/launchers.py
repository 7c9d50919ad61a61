"""Which launcher started this process, and as which rank of how many: read from the environment, never guessed."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hetmesh.errors import LaunchError

TORCHRUN, SLURM = "torchrun", "srun"
HOST = "127.0.0.1"
_PORTS = range(20000, 30000)  # below those that systems hand out by themselves
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""torchrun's: rank, ranks, rank on this machine, ranks on this machine."""
_OTHERS = {"RANK": "", "WORLD_SIZE": "1", "PMIX_RANK": "", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"}
"""Variables of launchers, those of MPI among them, and what they are where a process is alone."""


@dataclass(frozen=True)
class Place:
    """A process's place in a job, as its launcher gives it.

    Attributes:
        launcher: its command.
        rank, size: of all processes.
        local_rank, local_size: of those on this machine.
        address, port: where rank 0 waits for the others.
        note: what rank 0 should say before it waits; empty: nothing.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    note: str = ""

    @property
    def environment(self) -> dict[str, str]:
        """The same in torchrun's variables, which torch.distributed reads."""
        names = (*_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
        values = self.rank, self.size, self.local_rank, self.local_size, self.address, self.port
        return {name: str(value) for name, value in zip(names, values, strict=True)}


def find_place(env: Mapping[str, str]) -> Place | None:
    """The place that the environment `env` gives this process; None where nothing started it as one of several.
    Raises LaunchError: the variables say that it is one of several, and not which, or not where the others are."""
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, size, local_rank, local_size = (_number(env, name) for name in _VARIABLES)
        if rank is None or size is None or not rank < size:
            raise LaunchError(f"RANK = {env['RANK']} is no rank of WORLD_SIZE = {env['WORLD_SIZE']} processes")
        missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name))
        if missing:
            raise LaunchError(f"RANK and WORLD_SIZE are set, but not {missing}: where rank 0 can be found")
        # as hetmesh.init reads what is not set
        return Place(TORCHRUN, rank, size, local_rank or 0, local_size or 1, env["MASTER_ADDR"], _port(env, ""))
    slurm = _slurm(env)
    others = [name for name, alone in _OTHERS.items() if env.get(name, alone) not in ("", alone)]
    if slurm is not None and not (slurm.note and others):  # srun sets some of these, too; mpirun in a batch script does
        return slurm if slurm.size > 1 else None
    if others:
        raise LaunchError(
            f"{others[0]} = {env[others[0]]} is set, so a launcher seems to have started this process as one of "
            "several, but RANK and WORLD_SIZE are not both set: start with torchrun or srun, set RANK, WORLD_SIZE, "
            f"MASTER_ADDR and MASTER_PORT, or unset {others[0]} to start local workers"
        )
    return None


def _slurm(env: Mapping[str, str]) -> Place | None:
    """The place of a task of a Slurm step.

    A batch script that runs without srun has SLURM_NTASKS and SLURM_PROCID = 0 too, but no SLURM_STEP_NUM_TASKS.
    """
    rank = _number(env, "SLURM_PROCID")
    size = _number(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if rank is None or size is None:
        return None
    if rank >= size:
        raise LaunchError(f"SLURM_PROCID = {rank} is no rank of {size} tasks")
    nodes = _number(env, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") or 1
    node = _number(env, "SLURM_NODEID") or 0
    tasks = tasks_on_node(_text(env, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), node)
    local_size = size if nodes == 1 else tasks or -(-size // nodes)
    local_rank = _number(env, "SLURM_LOCALID")
    local = rank % local_size if local_rank is None else local_rank, local_size
    hosts = _text(env, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    step = _text(env, "SLURM_STEP_ID", "SLURM_STEPID")
    note = "" if step or "SLURM_STEP_NUM_TASKS" in env else (
        f"note: waiting for {size - 1} more tasks (SLURM_NTASKS = {size}). In a batch script, start them all with "
        "`srun hetmesh train ...`; without srun nobody else comes"
    )  # fmt: skip
    address = env.get("MASTER_ADDR") or (first_host(hosts) if nodes > 1 and hosts else HOST)
    port = _port(env, f"{_text(env, 'SLURM_JOB_ID', 'SLURM_JOBID') or os.getppid()}.{step or 0}")
    return Place(SLURM, rank, size, *local, address, port, note)


def first_host(hosts: str) -> str:
    """The first of a Slurm list of hosts: `gpu[03-05,9],login1` -> `gpu03`."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", hosts)
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", first[0] if first else "")


def tasks_on_node(counts: str, node: int) -> int | None:
    """Entry `node` of Slurm's tasks per node: `4(x2),3` -> 4, 4, 3; None if it has none."""
    expanded: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        expanded += [int(tasks)] * int(nodes or 1)
    return expanded[node] if node < len(expanded) else None


def _text(env: Mapping[str, str], *names: str) -> str:
    """The value of the first of these variables that is set; empty if none is."""
    return next((env[name] for name in names if env.get(name)), "")


def _number(env: Mapping[str, str], *names: str) -> int | None:
    text = _text(env, *names)
    if text and not re.fullmatch(r"[0-9]+", text):
        raise LaunchError(f"{next(name for name in names if env.get(name))} = {text!r} is not a number")
    return int(text) if text else None


def _port(env: Mapping[str, str], job: str) -> int:
    """`MASTER_PORT`, or one that all processes of the job compute alike."""
    port = _number(env, "MASTER_PORT")
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if port is None else port
