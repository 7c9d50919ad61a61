"""Which recipes with dropout one process can judge."""

from pathlib import Path

import pytest

from hetmesh.recipe.recipe import load_recipe
from support.dropout_oracles import draws_alike, has_dropout

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"
LORA = ("--modules.llm.lora.rank=2", "--modules.llm.lora.dropout=0.2")
BEFORE_COLUMNS = (*LORA, '--modules.llm.lora.target_modules=["q_proj", "up_proj"]')
TP = ("--parallelism.llm.ranks=[0, 1]", "--parallelism.llm.tensor_parallel_degree=2")


@pytest.mark.parametrize(
    ("keys", "alike"),
    [
        (LORA, True),
        ((*BEFORE_COLUMNS, *TP), True),
        ((*LORA, *TP), False),  # o_proj and down_proj too
        ((*LORA, *TP, '--modules.llm.lora.target_modules=["down_proj"]'), False),
        ((*BEFORE_COLUMNS, *TP, "--parallelism.llm.enable_sequence_parallel=true"), False),
        (("--modules.llm.config.attention_dropout=0.2",), True),
        (("--modules.llm.config.attention_dropout=0.2", *TP), False),
        ((*LORA, "--training.pack_samples=true"), False),
        ((*LORA, "--modules.llm.attention_mask=isolated_media"), False),
        ((*LORA, "--parallelism.llm.ranks=[0, 1]", "--parallelism.llm.data_parallel_shard_degree=2"), False),
        ((*LORA, "--parallelism.llm.ranks=[0, 1]", "--parallelism.llm.context_parallel_degree=2"), False),
        ((*LORA, "--parallelism.llm.ranks=[0, 1]", "--parallelism.llm.pipeline_parallel_degree=2"), True),
    ],
)
def test_dropout_that_one_process_draws_too(keys, alike):
    recipe = load_recipe(RECIPE, keys)
    assert has_dropout(recipe)
    assert draws_alike(recipe) == alike


def test_adapters_alone_draw_nothing():
    assert not has_dropout(load_recipe(RECIPE, LORA[:1]))
