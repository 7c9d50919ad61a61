"""A transfer that starts on one stream and arrives on another."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

from hetmesh.boundary import Exchange, Label, World
from hetmesh.boundary.accelerator import Buffers
from hetmesh.layout import Layout, MeshSpec, plan_transfer
from support.streams import streamed

MESH = MeshSpec.make(range(4), dp=4)
SHAPE = (8, 8)


def across(rank, source, transport):
    """Start on a stream of its own, arrive on the usual one, let go, and take memory on the first: the races."""
    world = World.current()
    plan = plan_transfer(SHAPE, Layout(MESH, (Shard(source),)), Layout(MESH, (Shard(1 - source),)))
    whole = torch.arange(64.0).view(SHAPE)
    with streamed(world) as races, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffers, "take", lambda self, numel, dtype: torch.empty(numel, dtype=dtype))  # as on a device
        patch.setattr(Buffers, "give", lambda self, buffer: None)
        side, accelerator = world.accelerator.stream(), world.accelerator
        started = accelerator.event()
        with accelerator.on(side):
            local = whole.narrow(source, 2 * rank, 2).clone()
            accelerator.used_by(local, accelerator.current_stream())
            exchange = Exchange(world, plan, local, torch.float32, Label("a"), transport=transport).start()
            started.record()
        accelerator.current_stream().wait_event(started)
        result = exchange.finish_receiving()
        accelerator.used_by(result, accelerator.current_stream())
        kept = len(exchange._messages.buffers)
        exchange.finish()
        del exchange
        with accelerator.on(side):
            for _ in range(8):
                torch.ones(64)
        found = list(races.found)
    return found, kept, result.tolist()


@pytest.mark.parametrize(("source", "transport"), [(1, "p2p"), (0, "all_to_all")])
def test_what_arrives_on_another_stream_is_read_before_its_memory_is_taken_again(pool4, source, transport):
    """Messages whose place is not one run of the result: they arrive in buffers."""
    whole = torch.arange(64.0).view(SHAPE)
    for rank, (found, kept, result) in enumerate(pool4.run(across, source, transport)):
        assert kept
        assert found == []
        assert result == whole.narrow(1 - source, 2 * rank, 2).tolist()
