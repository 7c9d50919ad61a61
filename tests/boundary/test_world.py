"""Processes that meet and part: a job that is restarted, a rank whose script ends before others have received."""

import textwrap

import pytest

from support.forked import ranks_of

SCRIPT = textwrap.dedent("""
    import os, time, torch, hetmesh
    from hetmesh import Layout, MeshSpec
    from torch.distributed.tensor import Shard
    world = hetmesh.init()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(1)
    src, dst = (Layout(MeshSpec.make([r], dp=1), (Shard(0),)) for r in (0, 1))
    x = torch.arange(1000.0) if world.rank == 0 else None
    if world.rank == 1:
        time.sleep(1.0)  # rank 0 has nothing left to do but to wait for this
    y = hetmesh.redistribute(x, dst, src=src, shape=(1000,), dtype=torch.float32, requires_grad=False)
    if world.rank == 1:
        assert y.to_local().sum() == 499500, y
        print("arrived", flush=True)
""")


@pytest.mark.slow
def test_a_rank_whose_script_ends_waits_until_its_messages_are_read(tmp_path):
    """Also where torchrun has started it again: the ranks meet, though its store still has addresses of the first."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ranks = ranks_of(script, 2, starts=2)
    assert [(status, out) for status, out, _ in ranks] == [(0, ""), (0, "arrived\n")], ranks
