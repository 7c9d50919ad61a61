"""The trainer over experts on an `ep` axis: AdamW, clipping, one norm (U22), evaluation, checkpoints in any layout."""

from pathlib import Path

import pytest
import torch
from test_trainer_sharded import OVERRIDES, SINGLE, check_training_and_resuming, loaded, train

from hetmesh.recipe.recipe import parse_recipe

pytestmark = pytest.mark.slow

RECIPE = (Path(__file__).parents[2] / "recipes" / "digits_moe.toml").read_text()
HERE = (
    *("--parallelism.vision.ranks", "0-1", "--parallelism.llm.ranks", "0-3"),
    *("--parallelism.llm.expert_parallel_degree", "2"),
)
LAYOUTS = {
    "FSDP 2, EP 2": (
        *("--parallelism.llm.data_parallel_replicate_degree", "1", "--parallelism.llm.data_parallel_shard_degree", "4"),
        *("--training.local_batch_size", "3", "--parallelism.llm.expert_placement_interval", "1"),
    ),
    "EP 2, TP 2": ("--parallelism.llm.tensor_parallel_degree", "2"),
}
ALONE = (*SINGLE, "--parallelism.llm.expert_parallel_degree", "1")


@pytest.fixture(scope="module")
def expected(pool, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone"))
    (alone,) = pool(1).run(train, parse_recipe(RECIPE, (*OVERRIDES, *ALONE, "--job.dump_folder", folder)), 4)
    return alone


@pytest.mark.parametrize("name", ["FSDP 2, EP 2", pytest.param("EP 2, TP 2", marks=pytest.mark.exhaustive)])
def test_training_and_checkpoints_of_experts(pool4, pool, tmp_path, expected, name):
    folder = ("--job.dump_folder", str(tmp_path), "--checkpoint.enable", "true")
    recipe = parse_recipe(RECIPE, (*OVERRIDES, *HERE, *LAYOUTS[name], *folder))
    check_training_and_resuming(pool4, recipe, expected, tmp_path)
    for path in tmp_path.glob("checkpoint/step-4"):
        path.rename(tmp_path / "again")
    mine = pool4.run(loaded, recipe, timeout=120)[0]
    (state,) = pool(1).run(loaded, parse_recipe(RECIPE, (*OVERRIDES, *ALONE, *folder)), timeout=120)
    assert any("experts.gate_up_proj" in key and "exp_avg" in key for key in state)
    assert all(torch.equal(value, state[key]) for key, value in mine.items())
