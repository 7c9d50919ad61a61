"""How the processes of a job meet: by the store of their launcher, from which process groups are made."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from hetmesh._torch_compat import one_gloo_device
from hetmesh.errors import LaunchError

_joined = 0  # jobs that this process has joined; equal on all ranks
_kept: list[dist.Store] = []  # where rank 0 hosts the store itself, process groups are made from it later


def join(backend: str, timeout: timedelta) -> None:
    """`init_process_group`, of the environment or, where there is none, of one rank.

    A launcher's store outlives the process groups made from it, with the addresses of their sockets: what is made
    after those are destroyed would look there for peers that are gone. So each has keys of its own, also after torchrun
    has restarted all workers: torch 2.13's agents give them the store of the attempt before.
    """
    global _joined
    with one_gloo_device():
        if "RANK" not in os.environ:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            store, rank, size = _store(timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    _joined += "RANK" in os.environ


def from_first_rank(decide: Callable[[], str], timeout: timedelta) -> str:
    """What `decide` returns on rank 0, on all ranks; before there is a process group. Collective, once in a process.

    Where `decide` raises, so does this on rank 0, and returns nothing (`""`) on the others. Raises LaunchError: a rank
    cannot be reached, or `timeout` is over.
    """
    found, raised = "", None
    try:
        store, rank, size = _store(timeout)
        _kept.append(store)
        if rank == 0:
            try:
                found = decide()
            except Exception as error:
                raised = error
            store.set("found", found)
        found = store.get("found").decode()
        if store.add("read", 1) == size:
            store.set("all have read", "")
        if rank == 0:  # it may host the store, which others need until then
            store.wait(["all have read"])
    except dist.DistError as error:
        first = str(error).strip().partition("\n")[0]
        raise LaunchError(f"waiting for all ranks to know what rank 0 has decided failed: {first}") from error
    if raised is not None:
        raise raised
    return found


def _store(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """The launcher's store, with keys of this start and job; this process's rank, and the number of ranks."""
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"hetmesh_{_restarts()}_{_joined}", store), rank, size


def _restarts() -> str:
    """How often all workers were started again with one store; "0" where each start has a store of its own, hosted by
    rank 0: each of torchrun's agents counts for itself, and one that came later has counted less."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if shared else "0"
