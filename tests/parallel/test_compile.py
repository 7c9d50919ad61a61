"""torch.compile: without a compiler, and how many graphs it makes of blocks."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from hetmesh.graph.module_graph import SAVE_OPS
from hetmesh.parallel.activation_checkpoint import apply_activation_checkpoint
from hetmesh.parallel.compile import apply_compile, missing_compiler
from hetmesh.parallel.random_state import RandomPlace, entering, seed_by_place


def test_without_a_compiler_modules_run_uncompiled_and_it_says_so(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert missing_compiler("inductor", "cpu") == "no C++ compiler was found"
    assert missing_compiler("aot_eager", "cpu") is None
    block = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="no C.. compiler was found, so modules run uncompiled"):
        apply_compile([block], "inductor", "cpu")
    assert "forward" not in vars(block)
    apply_compile([block], "eager", "cpu")
    assert "forward" in vars(block)
    assert list(block.state_dict()) == ["weight", "bias"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.5)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.drop(x))))


def graphs_and_gradients(mode: str, backend: str = "aot_eager", save_ops=SAVE_OPS):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(6)))
    seed_by_place(blocks, [str(i) for i in range(6)], {"*.up": "colwise", "*.down": "rowwise"})
    apply_activation_checkpoint(blocks, mode, save_ops)
    apply_compile(blocks, backend, "cpu")
    gradients = []
    for _ in range(2):
        with entering(RandomPlace(seed=0, step=0, module="llm", microbatch=0)):
            output = blocks(torch.ones(2, 8))
        with entering(RandomPlace(seed=0, step=0, module="vision", microbatch=0)):
            output.square().sum().backward()
        gradients.append([p.grad.clone() for p in blocks.parameters()])
        blocks.zero_grad()
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), gradients[0]


@pytest.fixture(scope="module")
def without():
    """`graphs_and_gradients` without checkpoints."""
    return graphs_and_gradients("none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "save_ops"),
    [
        ("selective", SAVE_OPS),
        pytest.param("full", SAVE_OPS, marks=pytest.mark.exhaustive),
        pytest.param("selective", ["aten.mm"], marks=pytest.mark.exhaustive),
    ],
)
def test_blocks_are_compiled_also_under_activation_checkpointing(without, mode, save_ops):
    """As many graphs as without (the first block's input needs no gradient), none of them interrupted."""
    graphs, breaks, expected = without
    assert (graphs, breaks) == (2, 0)
    graphs, breaks, gradients = graphs_and_gradients(mode, save_ops=save_ops)
    assert (graphs, breaks) == (2, 0)
    for one, other in zip(expected, gradients, strict=True):
        torch.testing.assert_close(one, other)
