"""Joining the job that the environment describes, as often as a process likes."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from hetmesh._torch_compat import one_gloo_device

_joined = 0  # times that this process has; equal on all ranks


def join(backend: str, patience: timedelta) -> None:
    """`init_process_group`, of the environment or, where there is none, of one rank.

    A launcher's store outlives the process groups made from it, with the addresses of their sockets: what is made
    after those are destroyed would look there for peers that are gone. So each has keys of its own, also after torchrun
    has restarted all workers: torch 2.13's agents give them the store of the attempt before.
    """
    global _joined
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with one_gloo_device():
        if "RANK" not in os.environ:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
        elif _joined == 0 and restarts == "0":
            dist.init_process_group(backend, timeout=patience)
        else:
            store, rank, size = next(dist.rendezvous("env://", timeout=patience))
            store.set_timeout(patience)
            own = dist.PrefixStore(f"hetmesh_{restarts}_{_joined}", store)
            dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=patience)
    _joined += "RANK" in os.environ
