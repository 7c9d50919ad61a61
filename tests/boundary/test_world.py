"""Processes that meet and part: a job that is restarted, a rank whose script ends before others have received."""

import os
import subprocess
import sys
import textwrap

import pytest

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
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=1"]
    run.append(str(script))
    done = subprocess.run(run, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("arrived") == 1
