"""Which launcher started this process, and as which rank of how many: read from the environment, never guessed."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hetmesh.errors import LaunchError

TORCHRUN = "torchrun"
SLURM = "srun"
MPI = "mpirun"
PMI = "mpiexec"
_HOST = "127.0.0.1"
_PORTS = range(20000, 30000)  # below those that systems hand out by themselves
# Launcher -> its names for rank, world size, rank on this machine, processes on this machine.
_VARIABLES = {
    TORCHRUN: ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    MPI: ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "mpirun_rsh": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    PMI: ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "flux run": ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
}
_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "FLUX_JOB_ID")


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
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def find_place(env: Mapping[str, str]) -> Place | None:
    """The place that the environment `env` gives this process; None where nothing started it as one of several.

    Raises:
        LaunchError: the variables say that it is one of several, and not which, or not where the others are.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _place(TORCHRUN, env, *_numbers(TORCHRUN, env))
    slurm = _slurm(env)
    for launcher, names in _VARIABLES.items():
        if launcher == TORCHRUN or names[0] not in env or names[1] not in env:
            continue
        rank, size, local_rank, local_size = _numbers(launcher, env)
        if launcher == PMI and slurm is not None and slurm.size == size and not slurm.note:
            return slurm  # srun --mpi=pmi2 sets both; its own variables say more
        return _place(launcher, env, rank, size, local_rank, local_size) if size > 1 else None
    if slurm is not None:
        return slurm if slurm.size > 1 else None
    for name, harmless in (("RANK", ""), ("WORLD_SIZE", "1"), ("PMIX_RANK", "")):
        if env.get(name, "") not in ("", harmless):
            raise LaunchError(
                f"{name} = {env[name]} is set, so a launcher seems to have started this process as one of several, but "
                "RANK and WORLD_SIZE are not both set: start with torchrun or srun, set RANK, WORLD_SIZE, MASTER_ADDR "
                f"and MASTER_PORT, or unset {name} to train with workers of its own"
            )
    return None


def _numbers(launcher: str, env: Mapping[str, str]) -> tuple[int, int, int | None, int | None]:
    names = _VARIABLES[launcher]
    rank, size = _number(env, names[0]), _number(env, names[1])
    if rank is None or size is None or not rank < size:
        raise LaunchError(f"{names[0]} = {env[names[0]]} is no rank of {names[1]} = {env[names[1]]} processes")
    return rank, size, _number(env, names[2]), _number(env, names[3])


def _place(
    launcher: str, env: Mapping[str, str], rank: int, size: int, local_rank: int | None, local_size: int | None
) -> Place:
    if launcher == TORCHRUN:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
        if missing:
            raise LaunchError(
                f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}: where rank 0 can be found"
            )
        # as hetmesh.init reads what is not set
        local = 0 if local_rank is None else local_rank, 1 if local_size is None else local_size
        return Place(launcher, rank, size, *local, env["MASTER_ADDR"], _port(env, ""))
    alone = local_size == size
    if not alone and not (env.get("MASTER_ADDR") and env.get("MASTER_PORT")):
        raise LaunchError(
            f"{launcher} started this process as rank {rank} of {size}, not all of them on this machine: set "
            "MASTER_ADDR and MASTER_PORT, a host and a free port on it, to the same on all of them"
            + (" (mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 ...)" if launcher == MPI else "")
        )
    job = next((env[name] for name in _JOB_IDS if env.get(name)), str(os.getppid()))
    local = rank if local_rank is None else local_rank, size if local_size is None else local_size
    return Place(launcher, rank, size, *local, env.get("MASTER_ADDR") or _HOST, _port(env, job))


def _slurm(env: Mapping[str, str]) -> Place | None:
    """The place of a task of a Slurm step.

    A batch script that runs without srun has SLURM_NTASKS and SLURM_PROCID = 0 too, but no SLURM_STEP_NUM_TASKS.
    """
    rank = _number(env, "SLURM_PROCID")
    size = _number(env, "SLURM_STEP_NUM_TASKS") or _number(env, "SLURM_NTASKS") or _number(env, "SLURM_NPROCS")
    if rank is None or size is None:
        return None
    if rank >= size:
        raise LaunchError(f"SLURM_PROCID = {rank} is no rank of {size} tasks")
    nodes = _number(env, "SLURM_STEP_NUM_NODES") or _number(env, "SLURM_NNODES") or 1
    local_size = tasks_on_node(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", ""), _number(env, "SLURM_NODEID") or 0
    )
    local_rank = _number(env, "SLURM_LOCALID")
    local_size = size if nodes == 1 else local_size or -(-size // nodes)
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    job = env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID") or str(os.getppid())
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID")
    note = "" if step is not None or "SLURM_STEP_NUM_TASKS" in env else (
        f"note: waiting for {size - 1} more tasks (SLURM_NTASKS = {size}). In a batch script, start them all with "
        "`srun hetmesh train ...`; without srun nobody else comes"
    )  # fmt: skip
    return Place(
        SLURM,
        rank,
        size,
        rank % local_size if local_rank is None else local_rank,
        local_size,
        env.get("MASTER_ADDR") or (first_host(hosts) if nodes > 1 and hosts else _HOST),
        _port(env, f"{job}.{step or 0}"),
        note,
    )


def first_host(hosts: str) -> str:
    """The first of a Slurm list of hosts: `gpu[03-05,9],login1` -> `gpu03`."""
    depth, end = 0, len(hosts)
    for i, letter in enumerate(hosts):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            end = i
            break
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", hosts[:end])


def tasks_on_node(counts: str, node: int) -> int | None:
    """Entry `node` of Slurm's tasks per node: `4(x2),3` -> 4, 4, 3; None if it has none."""
    expanded: list[int] = []
    for entry in counts.split(","):
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip()):
            expanded += [int(found[1])] * int(found[2] or 1)
    return expanded[node] if node < len(expanded) else None


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text):
        raise LaunchError(f"{name} = {text!r} is not a number")
    return int(text)


def _port(env: Mapping[str, str], job: str) -> int:
    """`MASTER_PORT`, or one that all processes of the job compute alike."""
    given = _number(env, "MASTER_PORT")
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)] if given is None else given
