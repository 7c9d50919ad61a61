"""A small model in layouts with every axis of a mesh: what tests of state that goes from one to another share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetmesh.recipe.recipe import Recipe, parse_recipe
from support.parity_cases import table

# Optimizer: eps far above its default keeps AdamW smooth where gradients are rounding errors.
MODEL = """
[modules.vision]
model = "siglip"
[modules.vision.config]
hidden_size = 8
num_hidden_layers = 2
num_attention_heads = 4
patch_size = 4
image_size = 8
intermediate_size = 12
[modules.projector]
model = "mlp"
[modules.llm]
model = "qwen3_moe"
[modules.llm.config]
hidden_size = 16
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 4
head_dim = 4
moe_intermediate_size = 8
num_experts = 4
num_experts_per_tok = 2
router_aux_loss_coef = 0.1
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
text_only = 0.4
[training]
global_batch_size = 8
local_batch_size = 2
pack_samples = true
dtype = "float64"
max_norm = 0.05
steps = 30
[optimizer]
eps = 0.01
[lr_scheduler]
warmup_steps = 4
[checkpoint]
enable = true
"""
EXPERTS = """num_experts = 4
num_experts_per_tok = 2
router_aux_loss_coef = 0.1
"""
VARIANTS: dict[str, Callable[[str], str]] = {
    "all trained": lambda text: text,
    "2 key heads": lambda text: text.replace("num_key_value_heads = 4", "num_key_value_heads = 2"),
    "frozen encoder": lambda text: text.replace('"siglip"', '"siglip"\ntrainable = false'),
    "LoRA": lambda text: (
        text.replace("qwen3_moe", "qwen3")
        .replace("moe_intermediate_size", "intermediate_size")
        .replace(EXPERTS, "")
        .replace("[modules.llm.config]", "[modules.llm.lora]\nrank = 2\nalpha = 4\n[modules.llm.config]")
    ),
}


def both(ep: int = 1, **degrees: int) -> list[str]:
    return [table("vision", "0-3", **degrees), table("llm", "0-3", **degrees, expert_parallel_degree=ep)]


PIPELINE = 'pipeline_parallel_schedule = "1F1B"\npipeline_parallel_microbatch_size = 1'
LAYOUTS = {
    "one rank": [table("vision", "0"), table("llm", "0")],
    "dp 4": both(ep=4, data_parallel_replicate_degree=4),
    "tp 4": both(tp=4),
    "tp 2, dp 2": both(ep=2, tp=2, data_parallel_replicate_degree=2),
    "pp 2, fsdp 2": [
        table("vision", "0-3", data_parallel_replicate_degree=4),
        table("llm", "0-3", pp=2, fsdp=2, expert_parallel_degree=2) + f"\n{PIPELINE}",
    ],
    "disjoint": [table("vision", "0-1", fsdp=2), table("llm", "2-3", tp=2)],
    "overlapping, hsdp": [
        table("vision", "1", fsdp=1),
        table("llm", "0-3", data_parallel_replicate_degree=2, fsdp=2, expert_parallel_degree=2),
    ],
}


def recipe(
    folder: object,
    layout: list[str],
    variant: str = "all trained",
    variants: Mapping[str, Callable[[str], str]] = VARIANTS,
) -> Recipe:
    """The model, with something frozen, say (`variants`), in one of `LAYOUTS`, with checkpoints in `folder`."""
    text = variants[variant](MODEL)
    if variant == "LoRA":
        layout = [each.replace("expert_parallel_degree", "# expert_parallel_degree") for each in layout]
    return parse_recipe("\n".join([text, *layout]), ("--job.dump_folder", str(folder)))
