"""What FSDP gathers together: the rest of a module with its first block, where it is no larger than that."""

import pytest
from torch import nn

from hetmesh.parallel.fully_shard import gathered_alone


def module(outside, blocks=3, width=4):
    """Blocks of width^2 parameters and `outside` more."""
    root = nn.Module()
    root.embedding = nn.Linear(outside, 1, bias=False) if outside else nn.Identity()
    root.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(blocks))
    return root


@pytest.mark.parametrize(
    ("outside", "alone"),
    [
        (0, [0, 1, 2]),  # a stage in the middle of a pipeline has nothing else: nothing is saved
        (1, [1, 2]),
        (16, [1, 2]),
        (17, [0, 1, 2]),  # a large vocabulary
    ],
)
def test_the_first_block_is_gathered_with_a_smaller_rest(outside, alone):
    root = module(outside)
    assert gathered_alone(root, root.layers) == [root.layers[i] for i in alone]


def test_a_module_without_blocks_is_gathered_whole():
    assert gathered_alone(module(5, blocks=0), []) == []
