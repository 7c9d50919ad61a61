"""Parity of what a single module can do on its mesh, on meshes that are apart, the same, or overlap."""

from dataclasses import dataclass

import pytest
import tomli
import torch
from torch.distributed.fsdp import FSDPModule

from hetmesh.balance import plan_batch
from hetmesh.boundary import World
from hetmesh.data.loader import Loader
from hetmesh.errors import RecipeError
from hetmesh.graph import Stage
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import Outcome, ParityError, compare, reference, run
from support import faults
from support.received_rows import received_rows

pytestmark = pytest.mark.slow

# Odd sizes: no dim of most parameters divides evenly over the shards, and some shards are empty.
MODEL = """
[modules.vision]
model = "siglip"
[modules.vision.config]
hidden_size = 12
num_hidden_layers = 2
num_attention_heads = 2
patch_size = 4
image_size = 8
intermediate_size = 14
[modules.projector]
model = "mlp"
config = { hidden_features = 7 }
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 10
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 6
intermediate_size = 18
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
kinds = { image = [1, 8, 8] }
text_only = 0.5
[training]
local_batch_size = 4
dtype = "float64"
"""

STEPS = 2  # the second with what the first has changed and left behind
FSDP = "data_parallel_shard_degree = -1"
HSDP = "data_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 2"
FSDP_TP = "data_parallel_shard_degree = 2\ntensor_parallel_degree = 2"
SEQUENCE = "enable_sequence_parallel = true\n"
RANKS = {  # ranks of the encoder, of the LLM
    "disjoint": ("0-3", "4-7"),
    "colocated": ("0-3", "0-3"),
    "overlapping": ("0-3", "2-5"),
}


def layout(vision: str, llm: str, where: str, extra: str = "") -> str:
    """A recipe: the layouts of encoder and LLM, on ranks that relate as `where` says, in several microbatches."""
    first, second = RANKS[where]
    return (
        f'{MODEL}\n[parallelism.vision]\nranks = "{first}"\n{vision}\n'
        f'[parallelism.llm]\nranks = "{second}"\n{llm}\npipeline_parallel_microbatch_size = 2\n{extra}'
    )


def on_this_rank(rank, recipe, fault=None):
    return run(recipe, World.current(), STEPS, fault=fault)


def check(pool, text: str | dict, fault=None) -> list[Outcome]:
    """The outcomes of all ranks, once they equal the reference."""
    recipe = parse_recipe(text)
    ranks = pool(4 if recipe.world_size <= 4 else 8).run(on_this_rank, recipe, fault, timeout=120)
    compare(reference(recipe, STEPS), ranks, 1e-10)
    return ranks


@pytest.mark.exhaustive  # without images it is below
def test_hsdp_of_both_modules_equals_one_process(pool):
    check(pool, layout(HSDP, HSDP, "colocated"))


@pytest.mark.exhaustive  # test_parity_matrix.py has each with FSDP and with FSDP x TP
@pytest.mark.parametrize("reshard", ["always", "never"])
def test_when_gathered_parameters_are_let_go_makes_no_difference(pool, reshard):
    key = f'\nfsdp_reshard_after_forward = "{reshard}"'
    check(pool, layout(FSDP + key, FSDP_TP + key, "overlapping"))


def test_with_sequence_parallelism_a_row_reaches_the_rank_that_keeps_its_token_and_no_other(pool):
    """Decision 4: over all ranks of the LLM every row arrives once."""
    vision = "tensor_parallel_degree = 2"
    llm = "tensor_parallel_degree = 2\n" + SEQUENCE
    projector = '[parallelism.projector]\nranks = "0-3"\n'
    recipe = parse_recipe(layout(vision, llm, "disjoint", projector))
    results = pool(8).run(received_rows, recipe, timeout=120)
    assert [bytes_ for bytes_, *_ in results] == [needed for _, needed, _ in results]
    assert sum(bytes_ for bytes_, *_ in results) == results[0][2] > 0


def lanes_with_images(recipe) -> list[list[bool]]:
    """Per step and microbatch, which encoder lanes have any."""
    resolved = resolve(recipe)
    loader = Loader(resolved.source, recipe.batch.global_batch_size, resolved.expander, seed=0)
    found = []
    for _ in range(STEPS):
        plan = plan_batch(resolved.graph, [d.meta for d in next(loader)], recipe.batch.microbatch_size)
        found += [[any(plan.samples[i].media for i in lane) for lane in lanes] for lanes in plan.lanes["vision"]]
    return found


@pytest.mark.parametrize(
    "where", [where if where == "colocated" else pytest.param(where, marks=pytest.mark.exhaustive) for where in RANKS]
)
def test_u2_an_encoder_lane_without_rows_under_fsdp(pool, where):
    """Some lanes have no image, others of the same microbatch do; and some microbatches have none at all."""
    text = layout(FSDP, FSDP, where).replace("text_only = 0.5", "text_only = 0.8")
    seen = lanes_with_images(parse_recipe(text))
    assert any(any(lanes) and not all(lanes) for lanes in seen)
    assert any(not any(lanes) for lanes in seen)
    check(pool, text)


def test_u1_no_image_anywhere_leaves_exact_zeros_in_a_sharded_encoder(pool):
    outcomes = check(pool, layout(FSDP, HSDP, "colocated").replace("text_only = 0.5", "text_only = 1.0"))
    gradients = [g for o in outcomes for k, g in o.gradients.items() if k.startswith("vision.")]
    assert gradients
    assert all(g is not None and torch.count_nonzero(g) == 0 for g in gradients)


@dataclass(frozen=True)
class Averaged:
    """FSDP as it comes: gradients divided by the number of lanes."""

    module: str

    def __call__(self, job):
        stage = job.runtime.modules.get(Stage(self.module))
        for module in stage.modules() if stage is not None else ():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(4.0)


@dataclass(frozen=True)
class PartialLeft:
    """Gradients of a module that are partial over tp are not summed."""

    module: str

    def __call__(self, job):
        if Stage(self.module) in job.runtime.reducers:
            job.runtime.reducers[Stage(self.module)] = lambda: lambda: None


MORE_FAULTS = [
    pytest.param(fault, marks=pytest.mark.exhaustive)
    for fault in (Averaged("llm"), PartialLeft("llm"), faults.ScaleGradient("llm"))
]


@pytest.mark.parametrize("fault", [Averaged("vision"), *MORE_FAULTS], ids=str)
def test_faults_of_sharded_modules_are_found(pool, fault):
    with pytest.raises(ParityError):
        check(pool, layout(FSDP, FSDP_TP, "colocated"), fault)


@pytest.mark.exhaustive  # test_parity_matrix.py has each
def test_one_module_may_be_checkpointed_and_another_not(pool):
    text = layout(FSDP, "tensor_parallel_degree = 4", "colocated", '[activation_checkpoint]\nmode = "selective"\n')
    text = text.replace("num_key_value_heads = 2", "num_key_value_heads = 4")
    check(pool, text.replace('model = "siglip"', 'model = "siglip"\nactivation_checkpoint = "full"'))


@pytest.mark.exhaustive  # pairs of test_parity_matrix.py
def test_sequence_parallelism_with_tied_embeddings_biases_and_checkpointing(pool):
    llm = "tensor_parallel_degree = 2\n" + SEQUENCE
    text = layout(FSDP, llm, "colocated", '[activation_checkpoint]\nmode = "selective"\n')
    check(pool, text.replace("head_dim = 6", "head_dim = 6\ntie_word_embeddings = true\nattention_bias = true"))
    check(
        pool,
        text.replace("selective", "full").replace('"qwen3"', '"llama"').replace("hidden_size = 10", "hidden_size = 20"),
    )


ADAPTERS = {
    "all layers": "lora = { rank = 2 }",
    "some": 'lora = { rank = 3, target_modules = ["q_proj", "o_proj", "up_proj"] }',  # beside layers without
    "rows": 'lora = { rank = 1, target_modules = ["down_proj"] }',
}


def adapted(text: str, adapters: str) -> str:
    both = text.replace('"siglip"', f'"siglip"\n{ADAPTERS[adapters]}') if adapters == "all layers" else text
    return both.replace('"qwen3"', f'"qwen3"\n{ADAPTERS[adapters]}')


@pytest.mark.parametrize(
    "adapters", ["some", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("all layers", "rows"))]
)
def test_adapters_with_sequence_parallelism_equal_one_process(pool, adapters):
    """Gradients of the halves that every rank has in full are summands: of features, or of tokens."""
    keys = f"{FSDP_TP}\n{SEQUENCE}"
    check(pool, adapted(layout(keys, keys, "colocated"), adapters))


@pytest.mark.exhaustive  # test_parity_matrix.py has stages and shares
def test_stages_of_encoders_with_sequence_parallelism_equal_one_process(pool):
    """Whisper's blocks have the linears of their MLP in themselves; its three rows per item are not even shares."""
    given = tomli.loads(
        layout("tensor_parallel_degree = 2\npipeline_parallel_degree = 2\n" + SEQUENCE, FSDP, "overlapping").replace(
            "{ image = [1, 8, 8] }", "{ image = [1, 8, 8], sound = [3, 6] }"
        )
    )
    config = {"d_model": 8, "encoder_layers": 3, "encoder_attention_heads": 2, "encoder_ffn_dim": 10}
    given["modules"]["audio"] = {"model": "whisper", "config": config, "activation_checkpoint": "full"}
    given["boundaries"].append({"from": "audio", "to": "llm", "at": "sound"})
    given["modules"]["llm"]["config"]["hidden_size"] = 8
    given["parallelism"]["audio"] = given["parallelism"]["vision"] | {"pipeline_parallel_layers_per_stage": 1}
    check(pool, given)


@pytest.mark.parametrize("adapters", [pytest.param("all layers", marks=pytest.mark.exhaustive), "rows"])
def test_gradients_of_adapters_that_are_not_summed_over_shares_of_tokens_are_found(pool, adapters):
    text = layout(FSDP, "tensor_parallel_degree = 2\n" + SEQUENCE, "colocated")
    with pytest.raises(ParityError):
        check(pool, adapted(text, adapters), PartialLeft("llm"))


@pytest.mark.parametrize(
    "fault",
    [
        PartialLeft("llm"),
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (PartialLeft("vision"), faults.PermuteRows("llm"))
        ),
    ],
    ids=str,
)
def test_faults_of_sequence_parallelism_are_found(pool, fault):
    with pytest.raises(ParityError):
        check(
            pool,
            layout(f"{FSDP_TP}\n{SEQUENCE}", "tensor_parallel_degree = 4\n" + SEQUENCE, "colocated").replace(
                "num_key_value_heads = 2", "num_key_value_heads = 4"
            ),
            fault,
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            layout(FSDP, FSDP, "disjoint", f'[parallelism.projector]\nranks = "0-3"\n{FSDP_TP}\n{SEQUENCE}'),
            "parallelism.projector.enable_sequence_parallel: this mlp",
        ),
    ],
)
def test_what_a_module_cannot_do_is_an_error(text, says):
    with pytest.raises(RecipeError, match=says.replace(".", r"\.")):
        resolve(parse_recipe(text))


@pytest.mark.exhaustive  # up to half a minute of tracing; test_compile.py has a pipeline and FSDP
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param("data_parallel_shard_degree = 2", id="FSDP x TP, checkpointed"),
        pytest.param(SEQUENCE, id="sequence parallel"),
    ],
)
def test_a_compiled_block_equals_one_process(pool, keys):
    """Traced, but not compiled to machine code: whether torch.compile keeps what hooks and collectives do."""
    extra = '[compile]\nenable = true\nbackend = "aot_eager"\n'
    if keys != SEQUENCE:
        extra += '[activation_checkpoint]\nmode = "selective"\n'
    text = layout("tensor_parallel_degree = 2", f"tensor_parallel_degree = 2\n{keys}\n", "colocated", extra)
    text = text.replace("num_hidden_layers = 2", "num_hidden_layers = 1")
    recipe = parse_recipe(text.replace('"0-3"', '"0-1"') if keys == SEQUENCE else text)
    ranks = pool(recipe.world_size).run(on_this_rank, recipe, timeout=400)
    compare(reference(recipe, STEPS), ranks, 1e-10)
