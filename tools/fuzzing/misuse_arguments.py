"""Wrong arguments for the public functions of hetmesh, in a job of one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import hetmesh
from hetmesh.layout import RowSplit

NUMBERS = (-4, -1, 0, 1, 2, 3, 5, 0.5, 1.5, float("nan"), float("inf"), True, "1", "x", None, 10**20)
AXES = ("dp", "tp", "", "dp", None, 3)


def arguments(rng: random.Random) -> Iterator[tuple[str, Callable[[], object]]]:
    """Endless calls, each with a description."""
    calls = (_mesh, _rows, _layout, _shapes, _plan, _redistribute, _device_mesh, _backward, _init)
    while True:
        yield rng.choice(calls)(rng)


def _ranks(rng: random.Random, wrong: bool) -> tuple[Any, ...]:
    if not wrong:
        return tuple(rng.sample(range(4), rng.randint(1, 4)))
    return tuple(rng.choice(NUMBERS) for _ in range(rng.randint(0, 4)))


def _good_mesh(rng: random.Random) -> hetmesh.MeshSpec:
    ranks = _ranks(rng, False)
    return hetmesh.MeshSpec(ranks, ("dp",), (len(ranks),))


def _placement(rng: random.Random) -> Any:
    return rng.choice(
        [Shard(0), Shard(1), Shard(-1), Shard(7), Replicate(), Partial(), Partial("avg"), None, "S(0)", 0, Shard]
    )


def _mesh(rng: random.Random) -> tuple[str, Callable[[], object]]:
    ranks = _ranks(rng, rng.random() < 0.7)
    axes = tuple(rng.choice(AXES) for _ in range(rng.randint(0, 3)))
    sizes = tuple(rng.choice(NUMBERS) for _ in range(rng.randint(0, 3)))
    if rng.random() < 0.3:
        ranks = rng.choice([None, 3, "0-3", [[0, 1]], {0, 1}])
    return f"MeshSpec({ranks}, {axes}, {sizes})", lambda: hetmesh.MeshSpec(ranks, axes, sizes)


def _rows(rng: random.Random) -> tuple[str, Callable[[], object]]:
    def interval() -> Any:
        return rng.choice([(0, 3), (3, 1), (-2, 2), (0.5, 1.5), (0,), (0, 1, 2), 5, "ab", None, ("a", "b"), (0, None)])

    dim = rng.choice([0, 1, -1, 0.5, "0", None])
    rows = tuple(tuple(interval() for _ in range(rng.randint(0, 2))) for _ in range(rng.randint(0, 3)))
    if rng.random() < 0.3:
        counts = [rng.choice([3, 0, -1, 1.5, "2", None]) for _ in range(3)]
        return f"RowSplit.counts({dim}, {counts})", lambda: RowSplit.counts(dim, counts)
    return f"RowSplit({dim}, {rows})", lambda: RowSplit(dim, rows)


def _layout(rng: random.Random) -> tuple[str, Callable[[], object]]:
    mesh = _good_mesh(rng) if rng.random() < 0.8 else rng.choice([None, "mesh", (0, 1)])
    placements = rng.choice([tuple(_placement(rng) for _ in range(rng.randint(0, 2))), None, Shard(0), "S"])
    return f"Layout({mesh}, {placements})", lambda: hetmesh.Layout(mesh, placements)  # type: ignore[arg-type]


def _shape(rng: random.Random) -> Any:
    return rng.choice(
        [(-4, 3), (4, 3), (4,), (), (0, 3), (1.5, 2), ("4", 3), (None, 3), None, 4, "4x3", [4, 3], (True, 3), (4.0, 3)]
    )


def _shapes(rng: random.Random) -> tuple[str, Callable[[], object]]:
    layout = hetmesh.Layout(_good_mesh(rng), (rng.choice([Shard(0), Shard(1), Replicate(), Partial()]),))
    shape, rank = _shape(rng), rng.choice([0, 1, 9, -1, None, "0", 0.5])
    method = rng.choice(["local_shape", "intervals", "cells", "canonical"])
    call = getattr(layout, method)
    if method in ("cells", "canonical"):
        return f"{layout}.{method}({shape})", lambda: call(shape)
    return f"{layout}.{method}({shape}, {rank!r})", lambda: call(shape, rank)


def _some_layout(rng: random.Random) -> Any:
    if rng.random() < 0.15:
        return rng.choice([None, "layout", _good_mesh(rng), (Shard(0),)])
    mesh = _good_mesh(rng)
    split = RowSplit(0, tuple(((i, i + 1),) for i in range(mesh.size)))
    return hetmesh.Layout(mesh, (rng.choice([Shard(0), Shard(1), Replicate(), Partial(), split]),))


def _plan(rng: random.Random) -> tuple[str, Callable[[], object]]:
    shape, src, dst = _shape(rng), _some_layout(rng), _some_layout(rng)
    return f"plan_transfer({shape}, {src}, {dst})", lambda: hetmesh.plan_transfer(shape, src, dst)


def _join() -> None:
    if not torch.distributed.is_initialized():
        hetmesh.init(timeout=5)


def _redistribute(rng: random.Random) -> tuple[str, Callable[[], object]]:
    x = rng.choice(
        [torch.ones(4, 3), torch.ones(4), torch.tensor(1.0), torch.ones(4, 3, dtype=torch.int64), None, 3, [1]]
    )
    here = hetmesh.Layout(hetmesh.MeshSpec((0,), ("dp",), (1,)), (rng.choice([Shard(0), Replicate(), Partial()]),))
    src = rng.choice([here, here, None, _some_layout(rng)])
    dst = rng.choice([here, here, _some_layout(rng)])
    keys: dict[str, Any] = {
        "src": src,
        "shape": _shape(rng),
        "dtype": rng.choice([torch.float32, None, "float32", float]),
    }
    if rng.random() < 0.3:
        keys["transport"] = rng.choice(["p2p", "all_to_all", "dtensor", "magic", None, 3])
    if rng.random() < 0.3:
        keys["grad_placements"] = rng.choice([(Partial(),), (Replicate(), Replicate()), (), Shard(0), "S", (None,)])
    if rng.random() < 0.2:
        keys["name"] = rng.choice(["edge", "", 3])
    shown = x if x is None or not isinstance(x, torch.Tensor) else f"{tuple(x.shape)} {x.dtype}"

    def call() -> object:
        _join()
        return hetmesh.redistribute(x, dst, **keys)  # type: ignore[arg-type]

    return f"redistribute({shown}, {dst}, {', '.join(f'{k}={v}' for k, v in keys.items())})", call


def _device_mesh(rng: random.Random) -> tuple[str, Callable[[], object]]:
    spec = rng.choice([hetmesh.MeshSpec((0,), ("dp",), (1,)), hetmesh.MeshSpec((7,), ("dp",), (1,)), None, (0,), "0"])

    def call() -> object:
        _join()
        return hetmesh.device_mesh(spec)  # type: ignore[arg-type]

    return f"device_mesh({spec})", call


def _backward(rng: random.Random) -> tuple[str, Callable[[], object]]:
    loss = rng.choice([None, torch.ones(3, requires_grad=True), torch.ones(3), 1.0, "loss", torch.zeros(0)])

    def call() -> object:
        _join()
        return hetmesh.backward(loss)  # type: ignore[arg-type]

    return f"backward({loss})", call


def _init(rng: random.Random) -> tuple[str, Callable[[], object]]:
    keys = {rng.choice(["timeout", "init_timeout"]): rng.choice([-1, 0, "5", None, float("nan"), float("inf")])}
    if rng.random() < 0.5:
        keys = {"device": rng.choice(["tpu", "", 3, "cuda:7", "gpu"])}

    def call() -> object:
        if torch.distributed.is_initialized():
            hetmesh.World.current().close()
        return hetmesh.init(**keys)  # type: ignore[arg-type]

    return f"init({keys})", call
