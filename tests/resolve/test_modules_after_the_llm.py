"""Modules after the LLM: what check says and refuses, and what is known of their costs."""

from pathlib import Path

import pytest

from hetmesh.cost.work import Work, sample_work
from hetmesh.errors import RecipeError
from hetmesh.graph import SampleMeta
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.report.balance_view import balance_view
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.summary import summary

DRAW = Path(__file__).parents[2] / "recipes" / "digits_draw.toml"
PARALLEL = "--parallelism.pipeline_parallel_schedule=bubble_fill", "--parallelism.drawer.ranks=0-1"
REFUSED = {
    "slices in collectives": (
        (*PARALLEL, "--parallelism.bubble_fill_in_collectives=true"),
        r"bubble_fill_in_collectives = True: drawer: no kernels of modules after the LLM run in its collectives",
    ),
    "gaps without anybody": (
        (*PARALLEL, "--parallelism.drawer.ranks=2-3", "--parallelism.vision.ranks=2-3"),
        r"no encoder, nor a module after the LLM, shares ranks with 'llm'",
    ),
    "microbatches of its own": (
        ("--balance.microbatch_sizes.drawer=1",),
        r"balance.microbatch_sizes.drawer: a module after the LLM has its microbatches",
    ),
    "shares of microbatches": (
        ("--balance.microbatch_shares.drawer=[1, 3]",),
        r"balance.microbatch_shares.drawer: a module after the LLM has its microbatches",
    ),
    "context parallel": (
        ("--parallelism.drawer.context_parallel_degree=2", "--parallelism.drawer.data_parallel_replicate_degree=1"),
        r"parallelism.drawer.context_parallel_degree = 2: of the modules only 'llm'",
    ),
    "sequence parallel": (
        (
            *("--parallelism.drawer.tensor_parallel_degree=2", "--parallelism.drawer.enable_sequence_parallel=true"),
            "--parallelism.drawer.data_parallel_replicate_degree=1",
        ),
        r"parallelism.drawer.enable_sequence_parallel: this flow cannot split its tokens",
    ),
    "placeholder that no sample has": (
        ("--data.options.draw=0",),
        r"boundaries\[2\].at = 'image_out': data source 'digits' has the placeholders \['image'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_modules_after_the_llm_cannot_do_is_refused_by_name(case):
    overrides, says = REFUSED[case]
    with pytest.raises(RecipeError, match=says):
        resolve(load_recipe(DRAW, overrides))


def test_the_loss_that_a_module_after_the_llm_lacks_is_named():
    text = DRAW.read_text().replace("[modules.drawer.loss] # added", "#").replace('kind = "flow_matching"', "#")
    text = text.replace("weight = 1.0", "#")
    with pytest.raises(RecipeError, match=r"modules.drawer.loss is missing: 'llm' reads tokens, as rows replace its"):
        parse_recipe(text)


def test_the_summary_says_what_is_added_up():
    lines = [*summary(resolve(load_recipe(DRAW, ("--modules.drawer.loss.weight=0.5",))))]
    flow = "0.5 x flow_matching of drawer per row of targets"
    assert f"  loss: 1 x cross_entropy of llm per target token + {flow}" in lines


def test_a_generator_is_no_llm_and_works_on_what_goes_through_its_blocks():
    resolved = resolve(load_recipe(DRAW))
    layers = {layer.name: layer for layer in resolved.shapes["drawer"].layers}
    block = layers["blocks.0"]
    assert block.attention_width == 64
    assert not any(layer.causal or layer.on_targets for layer in layers.values())
    assert [weight.name for weight in block.weights if weight.per_row == 0 and weight.name.endswith("weight")] == [
        "blocks.0.modulation.weight"  # of each image's time
    ]
    meta = next(meta for batch in range(9) for meta in resolved.loader().batch(batch).metas if meta.rows["drawer"])
    assert isinstance(meta, SampleMeta)
    assert sample_work(resolved.graph, "drawer", meta) == Work(8, 64)  # four tokens and four patches
    assert meta.rows["llm.image_out"] == 4


def test_lengths_of_a_file_do_not_say_what_modules_after_the_llm_read(tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"vision": 4, "llm": 20}\n')
    with pytest.raises(RecipeError, match="the recipe has drawer"):
        balance_view(resolve(load_recipe(DRAW)), lengths=str(file))


def test_only_encoders_can_be_simulated_in_collectives():
    with pytest.raises(RecipeError, match=r"beside = 'drawer': only modules before 'llm' .*: vision, projector"):
        simulate_recipe(resolve(load_recipe(DRAW)), beside=["drawer"])
