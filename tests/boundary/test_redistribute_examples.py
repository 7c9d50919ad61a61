"""hetmesh.redistribute by example: what it returns where, its guards, and gradients that need care."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hetmesh.boundary import World, backward, device_mesh, redistribute
from hetmesh.errors import BoundaryError, BoundaryTimeout, LayoutError
from hetmesh.layout import Layout, MeshSpec, RowSplit

pytestmark = pytest.mark.slow

FIRST, LAST = MeshSpec.make([0, 1], dp=2), MeshSpec.make([2, 3], tp=2)
ALL = MeshSpec.make(range(4), dp=2, tp=2)


def rows(n=4):
    return torch.arange(2.0 * n).reshape(n, 2)


def results(rank):
    x = rows()[2 * rank : 2 * rank + 2].requires_grad_() if rank < 2 else None
    y = redistribute(x, Layout(LAST, (Replicate(),)), src=Layout(FIRST, (Shard(0),)), shape=(4, 2), dtype=torch.float32)
    backward(y.full_tensor().sum() if isinstance(y, DTensor) else y)
    return type(y).__name__, None if y is None else tuple(y.shape), None if x is None else x.grad


def test_what_each_rank_gets(pool4):
    got = pool4.run(results)
    assert [r[:2] for r in got] == 2 * [("Tensor", (0, 2))] + 2 * [("DTensor", (4, 2))]
    assert all(torch.equal(r[2], torch.ones(2, 2)) for r in got[:2])


def outside(rank):
    one = Layout(MeshSpec.make([1], a=1), (Replicate(),))
    y = redistribute(rows() if rank == 1 else None, one, src=one, shape=(4, 2), dtype=torch.float32)
    backward(None)
    return y is None


def test_a_rank_outside_both_layouts_gets_none_and_may_pass_none(pool4):
    assert pool4.run(outside) == [True, False, True, True]


def from_dtensors(rank):
    mesh = device_mesh(ALL)
    full = rows(8)
    x = DTensor.from_local(full.chunk(2)[rank // 2], mesh, (Shard(0), Replicate())).requires_grad_()
    y = redistribute(x, Layout(ALL, (Shard(1), Shard(0))))  # src, shape and dtype from the DTensor
    assert torch.equal(y.full_tensor(), full)
    backward((y.to_local() * y.to_local()).sum())
    assert x.grad.placements == (Shard(0), Replicate())
    return torch.equal(x.grad.full_tensor(), 2 * full)


def test_dtensors_say_their_layout_themselves(pool4):
    assert all(pool4.run(from_dtensors))


def same_placements_other_mesh(rank):
    """torch's own redistribute returns the tensor on the old mesh, silently."""
    x = rows()[2 * rank : 2 * rank + 2] if rank < 2 else None
    src, dst = Layout(FIRST, (Shard(0),)), Layout(LAST, (Shard(0),))
    y = redistribute(x, dst, src=src, shape=(4, 2), dtype=torch.float32, requires_grad=False)
    return isinstance(y, DTensor) and y.device_mesh == device_mesh(LAST) and torch.equal(y.full_tensor(), rows())


def test_the_same_placements_on_another_mesh_move_the_tensor(pool4):
    assert pool4.run(same_placements_other_mesh)[2:] == [True, True]


def permuted(rank):
    spec = MeshSpec.make([3, 1, 0], a=3)
    y = redistribute(
        rows() if rank == 2 else None,
        Layout(spec, (Shard(0),)),
        src=Layout(MeshSpec.make([2], a=1), (Replicate(),)),
        shape=(4, 2),
        dtype=torch.float32,
        requires_grad=False,
    )
    return torch.equal(y.full_tensor(), rows()) if rank in spec else None  # a collective that torch would permute


def test_a_permuted_mesh_keeps_its_order_in_torch_collectives(pool4):
    assert pool4.run(permuted) == [True, True, None, True]


def foreign_permuted_mesh(rank):
    groups = [dist.new_group([1, 0])]  # sorted silently
    if rank > 1:
        return None
    mesh = DeviceMesh("cpu", [1, 0], _init_backend=False)
    mesh._dim_group_names = [groups[0].group_name]
    x = DTensor.from_local(rows(2), mesh, (Shard(0),), run_check=False)
    with pytest.raises(BoundaryError, match="sorts the ranks"):
        redistribute(x, Layout(FIRST, (Shard(0),)))
    return True


def test_a_permuted_mesh_that_torch_built_is_refused(pool4):
    assert pool4.run(foreign_permuted_mesh)[:2] == [True, True]


def unused(rank):
    """Nobody uses the result: the backward still runs on all ranks, and the gradient is zero."""
    x = rows()[2 * rank : 2 * rank + 2].requires_grad_() if rank < 2 else None
    redistribute(x, Layout(LAST, (Replicate(),)), src=Layout(FIRST, (Shard(0),)), shape=(4, 2), dtype=torch.float32)
    backward(None)
    return None if x is None else float(x.grad.abs().sum())


def test_an_unused_modality_does_not_hang(pool4):
    assert pool4.run(unused)[:2] == [0.0, 0.0]


def chain(rank):
    """Ranks 0-1 -> 2-3 -> 0-1 again, squared on the way: two boundaries, backwards in reverse order on every rank."""
    src, dst = Layout(FIRST, (Shard(0),)), Layout(LAST, (Shard(0),))
    x = rows()[2 * rank : 2 * rank + 2].requires_grad_() if rank < 2 else None
    y = redistribute(x, dst, src=src, shape=(4, 2), dtype=torch.float32, name="there")
    z = y.to_local() ** 2 if rank in LAST else None
    back = redistribute(z, src, src=dst, shape=(4, 2), dtype=torch.float32, name="back")
    backward(back.to_local().sum() if rank in FIRST else back)
    return None if x is None else torch.equal(x.grad, 2 * x.detach())


def test_two_boundaries_in_a_row(pool4):
    assert pool4.run(chain)[:2] == [True, True]


def summands(rank):
    """Each replica of the destination computes with its own weight: their gradients are summands."""
    dst = Layout(LAST, (Replicate(),))
    split = Layout(MeshSpec.make([2, 3], rows=1, tp=2), (RowSplit.counts(0, [4]), Replicate()))
    x = rows().requires_grad_() if rank == 0 else None
    src = Layout(MeshSpec.make([0], a=1), (Replicate(),))
    y = redistribute(
        x, split, src=src, shape=(4, 2), dtype=torch.float32, grad_placements=(split.placements[0], Partial())
    )
    backward((y * (rank + 1)).sum() if rank in LAST else y)
    with pytest.raises(BoundaryError, match="grad_placements"):
        redistribute(None, dst, src=src, shape=(4, 2), dtype=torch.float32, grad_placements=(Partial(),))
    return None if x is None else torch.equal(x.grad, torch.full((4, 2), 7.0))


def test_gradients_of_replicas_may_be_summands(pool4):
    assert pool4.run(summands)[0] is True


def overlapping_consumers(rank):
    fetch = Layout(LAST, (RowSplit(0, (((0, 3),), ((2, 4),))),))  # row 2 goes to both, row by row a consumer each
    x = rows().requires_grad_() if rank == 0 else None
    src = Layout(MeshSpec.make([0], a=1), (Replicate(),))
    y = redistribute(x, fetch, src=src, shape=(4, 2), dtype=torch.float32)
    backward((y * 10**rank).sum() if rank in LAST else y)
    return None if x is None else x.grad[:, 0].tolist()


def test_rows_that_several_consumers_took_get_the_sum_of_their_gradients(pool4):
    assert pool4.run(overlapping_consumers)[0] == [100.0, 100.0, 1100.0, 1000.0]


def transports(rank):
    world = World.current()
    world.connect()
    local_peers, seen = world.local_peers, {}
    x = rows()[rank % 2 * 2 :][:2]
    mesh = MeshSpec.make(range(4), dp=2, tp=2)
    src, dst = Layout(mesh, (Replicate(), Shard(0))), Layout(mesh, (Replicate(), Replicate()))
    for name in ("auto", "auto on gloo", "p2p", "all_to_all", "dtensor"):
        world.log.clear()
        world.local_peers = None if name == "auto on gloo" else local_peers
        way = name.partition(" ")[0]
        y = redistribute(x, dst, src=src, shape=(4, 2), dtype=torch.float32, requires_grad=False, transport=way)
        assert torch.equal(y.to_local(), rows())
        world.local_peers = local_peers
        seen[name] = ({m.transport for m in world.log.messages}, world.log.bytes_received())
    with pytest.raises(BoundaryError, match="cannot carry"):
        redistribute(y, Layout(mesh, (Shard(0), Shard(1))), transport="dtensor")
    with pytest.raises(BoundaryError, match="valid are auto, p2p, all_to_all, dtensor"):
        redistribute(y, dst, transport="nccl")
    return seen


def test_every_transport_moves_the_same_bytes(pool4):
    for seen in pool4.run(transports):
        assert seen["auto on gloo"] == seen["dtensor"] == ({"dtensor"}, 16)
        assert seen["auto"] == seen["p2p"] == ({"p2p"}, 16)  # by memory that all of them see
        assert seen["all_to_all"] == ({"all_to_all"}, 16)


def bad_calls(rank):
    src, dst = Layout(FIRST, (Shard(0),)), Layout(LAST, (Shard(0),))
    x = rows(3) if rank < 2 else None
    given = {"src": src, "shape": (4, 2), "dtype": torch.float32}
    if rank < 2:
        with pytest.raises(BoundaryError, match=r"promises a local \(2, 2\)"):
            redistribute(x, dst, **given, name="images")
        with pytest.raises(BoundaryError, match="float64"):
            redistribute(rows(2).double(), dst, **given)
        with pytest.raises(BoundaryError, match="must pass its share"):
            redistribute(None, dst, **given)
    else:
        with pytest.raises(BoundaryError, match="must pass None"):
            redistribute(rows(2), dst, **given)
    with pytest.raises(BoundaryError, match="src, shape, dtype must be given"):
        redistribute(None, dst)
    with pytest.raises(LayoutError, match="no source rank holds row 2"):
        redistribute(x, dst, src=Layout(FIRST, (RowSplit.counts(0, [1, 1]),)), shape=(4, 2), dtype=torch.float32)
    with pytest.raises(LayoutError, match="ranks 0-3"):
        redistribute(x, Layout(MeshSpec.make([9], a=1), (Replicate(),)), **given)
    with pytest.raises(BoundaryError, match="scalar"):
        backward(rows().requires_grad_())
    return True


def test_bad_calls_name_what_is_wrong(pool4):
    assert all(pool4.run(bad_calls))


def device_threads(rank):
    """Threads of gloo devices before and after this rank joins six more groups."""
    world = World.current()

    def count():
        names = (path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))
        return sum(name == "gloo_tcp_loop" for name in names)

    world.group(range(4))
    before = count()
    groups = [world.group(ranks) for size in (2, 3) for ranks in itertools.combinations(range(4), size)]
    for i, group in enumerate(groups):  # messages of one do not reach another
        if group is not None:
            total = torch.tensor([float(i)])
            dist.all_reduce(total, group=group)
            assert total == i * group.size()
    return before, count(), sum(group is not None for group in groups)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_groups_share_one_gloo_device(pool4):
    """Its thread wakes up a hundred times a second, also when nothing is sent."""
    for before, after, joined in pool4.run(device_threads):
        assert after == before
        assert joined == 6


def stalled_peer(rank):
    world = World.current()
    kept, world.timeout = world.timeout, 0.5
    src, dst = Layout(FIRST, (Replicate(),)), Layout(LAST, (Replicate(),))
    if rank == 0:
        return None  # never sends
    try:
        redistribute(
            rows() if rank in FIRST else None, dst, src=src, shape=(4, 2), dtype=torch.float32, name="vision->llm"
        )
    except BoundaryTimeout as error:
        return str(error)
    finally:
        world.timeout = kept
    return None


def test_a_rank_that_stalls_is_named_with_the_boundary(pool4):
    got = pool4.run(stalled_peer)
    pool4.close()  # a timeout poisons gloo
    assert "boundary 'vision->llm', microbatch 0, forward: rank 2 waited 0.5 s for rank 0" in got[2]
