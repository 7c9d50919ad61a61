"""A small model of encoder, projector and LLM in any layout: the recipes that tests of parity have in common."""

from __future__ import annotations

import random
import time

from hetmesh.boundary import World
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.runtime.step_runner import StepRunner
from hetmesh.testing.parity import compare, reference, run

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
num_key_value_heads = {key_heads}
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
{media}
[training]
local_batch_size = {batch}
dtype = "float64"
[parallelism]
pipeline_parallel_schedule = "{policy}"
pipeline_parallel_microbatch_size = {microbatch}
{extra}
"""
SCANNER = """
[modules.scanner]
model = "siglip"
{scanner}
[modules.scanner.config]
hidden_size = 12
num_hidden_layers = 2
num_attention_heads = 2
patch_size = 4
image_size = 8
[[boundaries]]
from = "scanner"
to = "llm"
at = "scan"
"""
"""A second encoder."""
EXPERTS = """
moe_intermediate_size = 6
num_experts = 8
num_experts_per_tok = 3
norm_topk_prob = true
router_aux_loss_coef = 0.5
mlp_only_layers = [1]"""
"""Keys of an LLM whose layers but the second have eight experts."""
TRAINED: dict[str, dict[str, str]] = {
    "all": {},
    "frozen encoder": {"vision": "trainable = false"},
    "frozen llm": {"llm": "trainable = false"},
    "projector alone": {"vision": "trainable = false", "llm": "trainable = false"},
    "lora": {"vision": "trainable = false", "llm": "lora = { rank = 2 }"},
    "norms": {"vision": "trainable = ['norm']", "projector": "trainable = false", "llm": "trainable = ['norm']"},
    "some layers": {
        "vision": r"trainable = ['!embeddings', '!layers\.[01]\.']",
        "llm": r"trainable = ['layers\.[12]\..*proj', 'layers\.3\.']",
    },
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
    experts: bool = False,
    encoders: int = 1,
    key_heads: int = 2,
    microbatch: int = 1,
    media: str = "text_only = 0.4",
    extra: str = "",
    **modules: str,
) -> Recipe:
    """The model under a schedule, with tables for modules' layouts.

    Args:
        trained: what is, of `TRAINED`.
        batch, microbatch: samples per lane of the LLM, and of these in a microbatch.
        media: how many they have, as an option of `RandomMedia`.
        key_heads: of the LLM, which has four query heads.
        extra: further keys of [parallelism].
        modules: further keys of a module's table.
    """
    keys = {"vision": "", "projector": "", "llm": "", "scanner": ""} | TRAINED[trained] | modules
    sizes = {"batch": batch, "microbatch": microbatch, "media": media}
    sizes |= {"tied": str(tied).lower(), "key_heads": key_heads}
    text = MODEL.format(policy=policy, extra=extra, **sizes, **keys)
    if experts:
        text = text.replace('"qwen3"', '"qwen3_moe"').replace("[modules.llm.config]", f"[modules.llm.config]{EXPERTS}")
    if encoders == 2:
        text = text.replace("image = [1, 8, 8]", "image = [1, 8, 8], scan = [2, 8, 8]") + SCANNER.format(**keys)
    return parse_recipe("\n".join([text, *tables]))


def packed(given: Recipe) -> Recipe:
    return given.model_copy(update={"training": given.training.model_copy(update={"pack_samples": True})})


def cp(ranks: str, size: int, **degrees: int) -> str:
    return table("llm", ranks, context_parallel_degree=size, **degrees)


INNER = ("1f1b", "interleaved", "zero_bubble")
SLICES = "bubble_fill_layers_per_slice = 1"


def filled(inner, *tables, extra=SLICES, **options):
    """Encoder slices of a layer each in the gaps of an LLM under `inner`."""
    return recipe("bubble_fill", *tables, extra=f'bubble_fill_schedule = "{inner}"\n{extra}', **options)


OVER_BOTH_STAGES = (table("vision", "0-3"), table("llm", "0-3", pp=2))


def delayed_run(rank, recipe, policy, fault=None):
    """Two steps, in which every rank stops now and then."""
    chance, execute = random.Random(rank), StepRunner.execute

    def slow(step, action):
        if chance.random() < 0.2:
            time.sleep(0.004 * chance.random())
        execute(step, action)

    StepRunner.execute = slow
    try:
        return run(recipe, World.current(), steps=2, policy=policy, fault=fault)
    finally:
        StepRunner.execute = execute


def check(pool, recipe, policies):
    truth = reference(recipe, steps=2)
    for policy in policies:
        compare(truth, pool.run(delayed_run, recipe, policy, timeout=120), 1e-10)
