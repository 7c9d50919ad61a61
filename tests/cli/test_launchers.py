"""What launchers leave in the environment: which process is which rank, or why that cannot be known."""

import socket
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.cli.launchers import find_place, first_host, tasks_on_node
from hetmesh.errors import LaunchError
from support.forked import train

ROOT = Path(__file__).parents[2]
# One rank for each of the two modules, so that few processes are started.
TWO_RANKS = (
    *("--parallelism.vision.ranks", "0", "--parallelism.vision.data_parallel_replicate_degree", "1"),
    *("--parallelism.llm.ranks", "1", "--parallelism.llm.tensor_parallel_degree", "1"),
)
ONE_STEP = ("--training.steps", "1", "--training.local_batch_size", "8", "--validation.samples", "4")
STEP = {"SLURM_JOB_ID": "81", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"}
TWO_NODES = {
    **STEP,
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {  # as Open MPI 5.0 sets them
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-vm-28969@1",
    "PMIX_RANK": "1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}  # MPICH 5.0
BATCH = {"SLURM_JOB_ID": "81", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "1"}


def test_torchrun():
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a"}
    place = find_place({**env, "MASTER_PORT": "29500", **TWO_NODES})  # also under srun
    assert (place.launcher, place.rank, place.size, place.local_rank, place.local_size) == ("torchrun", 5, 8, 1, 4)
    assert place.environment == {**env, "MASTER_PORT": "29500"}
    with pytest.raises(LaunchError, match="RANK and WORLD_SIZE are set, but not MASTER_PORT"):
        find_place(env)


def test_srun_on_two_nodes():
    place = find_place(TWO_NODES)
    assert (place.launcher, place.rank, place.size, place.local_rank, place.local_size) == ("srun", 5, 8, 1, 4)
    assert (place.address, place.note) == ("gpu03", "")
    assert find_place({**TWO_NODES, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).port == place.port
    assert find_place({**TWO_NODES, "SLURM_STEP_ID": "1"}).port != place.port
    assert find_place({**TWO_NODES, "MASTER_PORT": "7000"}).port == 7000
    assert find_place({**TWO_NODES, "PMI_RANK": "5", "PMI_SIZE": "8"}) == place  # srun --mpi=pmi2
    assert find_place({**STEP, "SLURM_PROCID": "1"}).address == "127.0.0.1"


def test_one_task_is_one_whole_job():
    assert find_place({}) is None
    assert find_place({**TWO_NODES, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None
    assert find_place({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}) is None
    assert find_place({"WORLD_SIZE": "1"}) is None


def test_a_batch_script_without_srun_says_whom_it_waits_for():
    assert "waiting for 1 more tasks (SLURM_NTASKS = 2)" in find_place(BATCH).note
    # mpirun in a batch script: its own variables count
    assert find_place({**BATCH, **OPEN_MPI}).rank == 1


@pytest.mark.parametrize("env", [OPEN_MPI, HYDRA], ids=["Open MPI", "MPICH"])
def test_mpirun_on_one_machine(env):
    place = find_place(env)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (1, 2, 1, 2)
    assert place.address == "127.0.0.1"
    assert find_place(dict.fromkeys(env, "0") | env | {"PMI_RANK": "0", "OMPI_COMM_WORLD_RANK": "0"}).port == place.port


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "set MASTER_ADDR and MASTER_PORT.*mpirun -x MASTER_ADDR"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "mpiexec started this process as rank 0 of 2, not all of them on this"),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK = 2 is no rank of"),
        ({**TWO_NODES, "SLURM_PROCID": "x"}, "SLURM_PROCID = 'x' is not a number"),
        ({"RANK": "1"}, "RANK = 1 is set, so a launcher seems .* but RANK and WORLD_SIZE are not both set"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE = 4 is set, so a launcher"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK = 0 is set, so a launcher"),
    ],
)
def test_what_does_not_make_a_job_is_said(env, says):
    with pytest.raises(LaunchError, match=says):
        find_place(env)


def test_lists_of_hosts_and_tasks():
    assert [first_host(h) for h in ("gpu[03-05,9],login1", "a,b", "n1", "r[1-2]n[07-8]x", "")] == [
        *("gpu03", "a", "n1", "r1n07x", ""),
    ]
    assert [tasks_on_node("4(x2),3", node) for node in range(4)] == [4, 4, 3, None]
    assert tasks_on_node("", 0) is None


def test_the_number_of_tasks_must_fit(monkeypatch, capsys):
    for name, value in {**STEP, "SLURM_PROCID": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train", str(ROOT / "recipes" / "digits.toml")]) == 2
    err = capsys.readouterr().err
    assert "describes 4 ranks, but srun started SLURM_NTASKS = 8; start 4 (srun --ntasks 4 hetmesh train ...)" in err


@pytest.mark.slow
def test_who_is_alone_says_whom_it_could_not_reach(start_forked):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    recipe, here = str(ROOT / "recipes" / "digits.toml"), {**BATCH, "MASTER_PORT": str(port)}
    process = start_forked(train, recipe, *TWO_RANKS, "--comm.init_timeout_seconds=2", environment=here)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    note, error = err.strip().splitlines()[0], err.strip().splitlines()[-1]
    assert note.startswith("note: waiting for 1 more tasks (SLURM_NTASKS = 2)")
    assert error.startswith(
        "error: rank 0: srun started this process as rank 0 of 2; meeting the others at "
        f"127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT) failed: "
    )
