"""Parity of pipelines: every policy, whatever is frozen, on stages of different sizes, with ragged microbatches."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from hetmesh.boundary import World
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing import faults
from hetmesh.testing.parity import ParityError, compare, reference, run
from support.often import combinations

MODEL = """
[modules.vision]
model = "siglip"
{vision}
[modules.vision.config]
hidden_size = 8
num_hidden_layers = 3
num_attention_heads = 2
patch_size = 4
image_size = 8
intermediate_size = 10
[modules.projector]
model = "mlp"
{projector}
[modules.llm]
model = "qwen3"
{llm}
[modules.llm.config]
hidden_size = 12
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 4
intermediate_size = 14
tie_word_embeddings = {tied}
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = {{ image = [1, 8, 8] }}
text_only = 0.4
[training]
local_batch_size = {batch}
dtype = "float64"
[parallelism]
pipeline_parallel_schedule = "{policy}"
pipeline_parallel_microbatch_size = 1
{extra}
"""
TRAINED = {
    "all": {},
    "frozen encoder": {"vision": "trainable = false"},
    "frozen llm": {"llm": "trainable = false"},
    "projector alone": {"vision": "trainable = false", "llm": "trainable = false"},
    "lora": {"vision": "trainable = false", "llm": "lora = { rank = 2 }"},
}
POLICIES = ("sequential", "1f1b", "interleaved", "zero_bubble", "three_phase")


def table(module: str, ranks: str, **degrees: int) -> str:
    names = {"pp": "pipeline_parallel_degree", "tp": "tensor_parallel_degree", "fsdp": "data_parallel_shard_degree"}
    lines = [f"{names.get(key, key)} = {value}" for key, value in degrees.items()]
    return "\n".join([f'[parallelism.{module}]\nranks = "{ranks}"', *lines])


def recipe(
    policy: str,
    *tables: str,
    trained: str = "all",
    batch: int = 5,
    tied: bool = False,
    extra: str = "",
    **modules: str,
):
    """`modules`: further keys of a module's table."""
    keys = {"vision": "", "projector": "", "llm": ""} | TRAINED[trained] | modules
    text = MODEL.format(policy=policy, batch=batch, tied=str(tied).lower(), extra=extra, **keys)
    return parse_recipe("\n".join([text, *tables]))


def on_this_rank(rank, recipe, fault=None):
    return run(recipe, World.current(), steps=2, fault=fault)


def check(pool, recipe, fault=None):
    results = pool.run(on_this_rank, recipe, fault, timeout=120)
    return compare(reference(recipe, steps=2), results, 1e-10)


OFTEN = {
    *((policy, "all") for policy in POLICIES),
    ("sequential", "projector alone"),
    *(("1f1b", trained) for trained in ("frozen encoder", "lora")),
    ("interleaved", "frozen llm"),
    *(("zero_bubble", trained) for trained in ("frozen llm", "lora")),  # whose two parts of a backward differ
    *(("three_phase", trained) for trained in ("frozen encoder", "projector alone")),
}


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "trained"), combinations(OFTEN, POLICIES, TRAINED))
def test_every_policy_equals_one_process(pool4, policy, trained):
    """Encoder and LLM pipelines of different depths: three stages on two ranks where they interleave."""
    where = ("0-1", "0-1") if policy == "three_phase" else ("0-1", "2-3")
    check(pool4, recipe(policy, table("vision", where[0], pp=2), table("llm", where[1], pp=2), trained=trained))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "tables"),
    {
        "encoder data parallel over both stages": (
            "three_phase",
            (table("vision", "0-3"), table("llm", "0-3", pp=2, tp=2)),
        ),
        "stages of two lanes, encoder pipelined": (
            "1f1b",
            (table("vision", "0-3", pp=2), table("llm", "0-3", pp=2)),
        ),
        "stages with FSDP": ("1f1b", (table("vision", "0-1", fsdp=2), table("llm", "0-3", pp=2, fsdp=2))),
        "several stages per rank with FSDP": ("interleaved", (table("llm", "0-3", pp=2, fsdp=2),)),
        "tensor and sequence parallel stages": (
            "zero_bubble",
            (table("vision", "1-2", tp=2), table("llm", "0-3", pp=2, tp=2) + "\nenable_sequence_parallel = true"),
        ),
        "layers by name": (
            "1f1b",
            (
                table("llm", "1-2", pp=2)
                + '\nmodule_fqns_per_model_part = [["model.embed_tokens"], ["model.layers.0", "model.layers.1", '
                '"model.layers.2", "model.layers.3", "model.norm", "lm_head"]]',
            ),
        ),
    }.values(),
)
def test_stages_with_their_own_layouts(pool4, policy, tables):
    check(pool4, recipe(policy, *tables, batch=4))


@pytest.mark.slow
def test_a_backward_in_two_parts_where_a_stage_uses_a_parameter_twice(pool4):
    """The whole LLM is one stage, its head tied to its embedding."""
    check(pool4, recipe("zero_bubble", table("vision", "0-1", pp=2), table("llm", "2-3", tp=2), tied=True))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["1f1b", "interleaved", "zero_bubble"])
def test_a_tied_head_far_from_its_embedding(pool4, policy):
    given = recipe(policy, table("vision", "0"), table("llm", "0-3", pp=2, tp=2), tied=True, batch=3)
    check(pool4, given)
    with pytest.raises(ParityError):
        check(pool4, given, faults.ScaleGradient("llm"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["three_phase_window = 2", "three_phase_recompute = true", "three_phase_offload = true"]
)
def test_the_options_of_three_phases(pool4, options):
    check(pool4, recipe("three_phase", table("vision", "0-3"), table("llm", "0-3", pp=4), extra=options))


TWO_ENCODERS = """
[modules.scanner]
model = "siglip"
config = {{ hidden_size = 12, num_hidden_layers = 2, num_attention_heads = 2, patch_size = 4, image_size = 8 }}
[[boundaries]]
from = "scanner"
to = "llm"
at = "scan"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        each if each in ("1f1b", "zero_bubble") else pytest.param(each, marks=pytest.mark.exhaustive)
        for each in POLICIES
    ],
)
def test_two_encoders_of_unequal_depth_on_eight_processes(pool8, policy):
    text = MODEL.replace("image = [1, 8, 8]", "image = [1, 8, 8], scan = [2, 8, 8]") + TWO_ENCODERS
    text = text.format(policy=policy, batch=5, tied="false", extra="", vision="", projector="", llm="")
    tables = (table("vision", "0-2", pp=3), table("scanner", "3"), table("llm", "4-7", pp=2, tp=2))
    check(pool8, parse_recipe("\n".join([text, *tables])))


@st.composite
def pipelines(draw):
    """A policy, what is trained, and for each module ranks and degrees on four processes."""

    def placed(module, layers):
        pp = draw(st.sampled_from([1, 2, 3] if module == "vision" else [1, 2, 4]))
        tp = draw(st.sampled_from([1, 2])) if pp < 3 else 1
        lanes = draw(st.integers(1, 4 // (pp * tp)))
        ranks = draw(st.permutations(range(4)))[: pp * tp * lanes]
        return table(module, ",".join(map(str, ranks)), pp=pp, tp=tp)

    return recipe(
        draw(st.sampled_from(POLICIES)),
        placed("vision", 3),
        placed("llm", 4),
        trained=draw(st.sampled_from(sorted(TRAINED))),
        batch=draw(st.integers(1, 4)),
        tied=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=16, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(given_recipe=pipelines())
def test_random_pipelines_equal_one_process(pool4, given_recipe):
    check(pool4, given_recipe)
