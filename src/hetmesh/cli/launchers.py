"""Which launcher started this process, and as which rank of how many: read from the environment, never guessed."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hetmesh.errors import LaunchError

TORCHRUN, SLURM, _MPIRUN, _MPIEXEC = "torchrun", "srun", "mpirun", "mpiexec"
HOST = "127.0.0.1"
_PORTS = range(20000, 30000)  # below those that systems hand out by themselves
_VARIABLES = {  # rank, ranks, rank on this machine, ranks on this machine
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _MPIRUN: tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    _MPIEXEC: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


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
        names = (*_VARIABLES[TORCHRUN], "MASTER_ADDR", "MASTER_PORT")
        values = self.rank, self.size, self.local_rank, self.local_size, self.address, self.port
        return {name: str(value) for name, value in zip(names, values, strict=True)}


def find_place(env: Mapping[str, str]) -> Place | None:
    """The place that the environment `env` gives this process; None where nothing started it as one of several.
    Raises LaunchError: the variables say that it is one of several, and not which, or not where the others are."""
    for launcher, names in _VARIABLES.items():
        if names[0] not in env or names[1] not in env:
            continue
        rank, size, local_rank, local_size = (_number(env, name) for name in names)
        if rank is None or size is None or not rank < size:
            raise LaunchError(f"{names[0]} = {env[names[0]]} is no rank of {names[1]} = {env[names[1]]} processes")
        if launcher == TORCHRUN:
            missing = " and ".join(name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name))
            if missing:
                raise LaunchError(f"RANK and WORLD_SIZE are set, but not {missing}: where rank 0 can be found")
            # as hetmesh.init reads what is not set
            return Place(launcher, rank, size, local_rank or 0, local_size or 1, env["MASTER_ADDR"], _port(env, ""))
        if launcher == _MPIEXEC and (slurm := _slurm(env)) and slurm.size == size and not slurm.note:
            return slurm  # srun --mpi=pmi2 sets both; its own variables tell more
        return _mpi_place(launcher, env, rank, size, local_rank, local_size) if size > 1 else None
    if (slurm := _slurm(env)) is not None:
        return slurm if slurm.size > 1 else None
    for name, harmless in (("RANK", ""), ("WORLD_SIZE", "1"), ("PMIX_RANK", "")):
        if env.get(name, "") not in ("", harmless):
            raise LaunchError(
                f"{name} = {env[name]} is set, so a launcher seems to have started this process as one of several, but "
                "RANK and WORLD_SIZE are not both set: start with torchrun or srun, set RANK, WORLD_SIZE, MASTER_ADDR "
                f"and MASTER_PORT, or unset {name} to start local workers"
            )
    return None


def _mpi_place(
    launcher: str, env: Mapping[str, str], rank: int, size: int, local_rank: int | None, local_size: int | None
) -> Place:
    if local_size != size and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        raise LaunchError(
            f"{launcher} started this process as rank {rank} of {size}, not all of them on this machine: set "
            "MASTER_ADDR and MASTER_PORT, a host and a free port on it, to the same on all of them"
            + (" (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...)" if launcher == _MPIRUN else "")
        )
    local = rank if local_rank is None else local_rank, size if local_size is None else local_size
    job = env.get("PMIX_NAMESPACE") or str(os.getppid())
    return Place(launcher, rank, size, *local, env.get("MASTER_ADDR") or HOST, _port(env, job))


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
