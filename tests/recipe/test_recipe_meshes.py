"""Ranks and degrees of a recipe to meshes; batch arithmetic."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetmesh.errors import RecipeError
from hetmesh.graph import ModuleOptions
from hetmesh.layout.mesh import MeshSpec
from hetmesh.recipe.batch_sizes import batch_sizes
from hetmesh.recipe.module_options import module_options
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.recipe.values import parse_ranks

MODULES = """
[modules]
vision = { model = "siglip" }
audio = { model = "siglip", media = "sound" }
projector = { model = "mlp" }
llm = { model = "qwen3" }
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[[boundaries]]
from = "audio"
to = "llm"
at = "audio"
"""


def meshes(text: str) -> dict[str, MeshSpec]:
    return dict(parse_recipe(MODULES + text).wiring.meshes)


@pytest.mark.parametrize(
    ("given_ranks", "expected"),
    [
        ([0, 1], (0, 1)),
        ([3, 1], (3, 1)),
        ("0-1", (0, 1)),
        ("0-3,6", (0, 1, 2, 3, 6)),
        (" 0 - 1 , 4", (0, 1, 4)),
        ("5", (5,)),
        (5, (5,)),
        ("all", None),
        (None, None),
    ],
)
def test_rank_syntax(given_ranks, expected):
    assert parse_ranks(given_ranks) == expected


@pytest.mark.parametrize("wrong", ["", "a", "1-", "-1", "2-1", [0.5], [True], [[0]], 1.0, [], [1, 1], "0-2,1", {}])
def test_no_ranks(wrong):
    with pytest.raises(ValueError, match="rank"):
        parse_ranks(wrong)


def test_nothing_said_is_one_rank():
    assert set(meshes("").values()) == {MeshSpec.make([0], dp_replicate=1)}


def test_modules_without_a_table_take_their_consumers_mesh():
    found = meshes("[parallelism.llm]\nranks = '2-3'\ntensor_parallel_degree = 2\n[parallelism.vision]\nranks = '0-1'")
    llm = MeshSpec.make([2, 3], tp=2)
    assert found == {"vision": MeshSpec.make([0, 1], dp_replicate=2), "audio": llm, "projector": llm, "llm": llm}


def test_a_module_with_two_consumers_takes_the_first_ones_mesh():
    text = '[modules.head]\nmodel = "mlp"\n[[boundaries]]\nfrom = "vision"\nto = "head"\n'
    text += '[[boundaries]]\nfrom = "head"\nto = "llm"\nat = "thumb"\n'
    text += "[parallelism]\nprojector = {ranks = 1}\nhead = {ranks = 2}\nllm = {ranks = 0}"
    found = parse_recipe(MODULES + text, ("--modules.vision.media", "image")).wiring.meshes
    assert found["vision"] == found["projector"] == MeshSpec.make([1], dp_replicate=1)


def test_a_flat_table_gives_every_module_the_same_layout():
    found = meshes("[parallelism]\ntensor_parallel_degree = 2\ndata_parallel_replicate_degree = 3")
    assert set(found.values()) == {MeshSpec.make(range(6), dp_replicate=3, tp=2)}


def test_a_flat_table_is_overridden_per_module():
    found = meshes(
        "[parallelism]\nranks = '0-3'\ntensor_parallel_degree = 2\n[parallelism.vision]\ntensor_parallel_degree=1"
    )
    assert found["vision"] == MeshSpec.make(range(4), dp_replicate=4)
    assert found["llm"] == found["projector"] == MeshSpec.make(range(4), dp_replicate=2, tp=2)


def test_all_means_every_rank_that_is_named():
    found = meshes("[parallelism]\nvision = {ranks = '0-1'}\naudio = {ranks = [5]}\nllm = {ranks = 'all'}")
    assert found["llm"] == found["projector"] == MeshSpec.make([0, 1, 5], dp_replicate=3)


def test_run_wide_keys_give_no_layout():
    recipe = parse_recipe(MODULES + "[parallelism]\npipeline_parallel_microbatch_size = 2\nllm = {ranks = '0-1'}")
    assert recipe.wiring.meshes["vision"] == MeshSpec.make([0, 1], dp_replicate=2)
    assert recipe.batch.microbatch_size == 2
    recipe = parse_recipe(MODULES + "[parallelism.llm]\npipeline_parallel_microbatch_size = 4\nranks = '0-1'")
    assert (recipe.batch.microbatch_size, recipe.batch.num_microbatches) == (4, 2)
    assert recipe.wiring.meshes["vision"] == MeshSpec.make([0, 1], dp_replicate=2)


def test_world_size_counts_idle_ranks():
    assert parse_recipe(MODULES + "[parallelism]\nllm = {ranks = [2, 6]}").world_size == 7


@given(dp=st.integers(1, 4), tp=st.integers(1, 4), first=st.integers(0, 5), infer=st.booleans())
def test_degrees_multiply_to_the_ranks(dp, tp, first, infer):
    text = f"[parallelism.llm]\nranks = '{first}-{first + dp * tp - 1}'\ntensor_parallel_degree = {tp}\n"
    text += f"data_parallel_replicate_degree = {-1 if infer else dp}\n"
    mesh = meshes(text)["llm"]
    assert mesh.ranks == tuple(range(first, first + dp * tp))
    assert (mesh.axis_size("dp_replicate"), mesh.axis_size("tp")) == (dp, tp)
    assert mesh.axes in {("dp_replicate",), ("tp",), ("dp_replicate", "tp")}


@given(
    local=st.integers(1, 12),
    overall=st.none() | st.integers(1, 60),
    micro=st.none() | st.integers(1, 12),
    lanes=st.integers(1, 5),
)
def test_batch_arithmetic(local, overall, micro, lanes):
    try:
        sizes = batch_sizes(local_batch_size=local, global_batch_size=overall, microbatch_size=micro, lanes=lanes)
    except RecipeError:
        assert (micro and local % micro) or (overall and overall % (local * lanes))
        return
    assert sizes.num_microbatches * sizes.microbatch_size * lanes == sizes.global_batch_size
    assert sizes.global_batch_size == (overall or local * lanes)
    assert math.gcd(sizes.microbatch_size, local) == sizes.microbatch_size


def test_the_batch_error_without_any_valid_local_size():
    with pytest.raises(RecipeError, match=r"3 x 4 = 12; nearest are \[12\]$"):
        batch_sizes(local_batch_size=3, global_batch_size=2, microbatch_size=None, lanes=4)


def test_options_come_with_the_mesh_and_own_keys_go_first():
    text = """
    [training]
    mixed_precision_param = "bfloat16"
    [activation_checkpoint]
    mode = "full"
    [compile]
    enable = true
    backend = "eager"
    [parallelism.llm]
    ranks = "0-3"
    tensor_parallel_degree = 2
    enable_sequence_parallel = true
    data_parallel_shard_degree = 2
    fsdp_reshard_after_forward = "never"
    [parallelism.audio]
    ranks = [0]
    """
    own = 'llm = { model = "qwen3", activation_checkpoint = "none", mixed_precision_param = "float32" }'
    recipe = parse_recipe(MODULES.replace('llm = { model = "qwen3" }', own) + text)
    common = ModuleOptions(
        activation_checkpoint="full",
        parameter_dtype=torch.float32,
        compute_dtype=torch.bfloat16,
        compile_backend="eager",
    )
    options = {name: module_options(recipe, name) for name in recipe.modules}
    assert options["audio"] == common
    assert options["projector"] == options["vision"] == replace(common, reshard_after_forward="never")
    assert options["llm"] == ModuleOptions("never", "none", sequence_parallel=True, compile_backend="eager")
    assert [options[name].row_dtype for name in ("llm", "vision")] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("given", "means"), [("default", "never"), ("always", "always"), ("never", "never")])
def test_in_a_pipeline_parameters_stay_whole_during_a_step_by_default(given, means):
    """As in torchtitan; also of a module that takes the mesh of its first stage."""
    text = f"""
    [parallelism.llm]
    ranks = "0-3"
    pipeline_parallel_degree = 2
    data_parallel_shard_degree = 2
    fsdp_reshard_after_forward = "{given}"
    [parallelism.audio]
    ranks = "0-1"
    data_parallel_shard_degree = 2
    """
    recipe = parse_recipe(MODULES + text)
    options = {name: module_options(recipe, name).reshard_after_forward for name in recipe.modules}
    assert options == {"audio": "default", "projector": means, "vision": means, "llm": means}


def test_degrees_beyond_any_job_are_refused():
    """Not by running out of memory for a list of the ranks."""
    text = '[modules.llm]\nmodel = "qwen3"\n[parallelism.llm]\ndata_parallel_shard_degree = 9223372036854775807'
    with pytest.raises(RecipeError, match="the degrees need 9223372036854775807 ranks; there can be 1000000 at most"):
        parse_recipe(text)


def test_an_encoder_of_a_module_after_the_llm_lies_where_that_lies():
    modules = {"llm": {"model": "qwen3"}, "autoencoder": {"model": "siglip", "media": "drawing"}}
    modules["drawer"] = {"model": "flow", "loss": {"kind": "flow_matching"}}
    recipe = parse_recipe(
        {
            "modules": modules,
            "boundaries": [{"from": "llm", "to": "drawer", "at": "drawing"}, {"from": "autoencoder", "to": "drawer"}],
            "parallelism": {"llm": {"ranks": [0, 1, 2, 3], "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2}},
            "data": {"source": "digits"},
            "training": {"local_batch_size": 4},
        }
    )
    meshes = recipe.wiring.meshes
    assert meshes["drawer"] == meshes["autoencoder"] == MeshSpec.make([2, 3], tp=2)
