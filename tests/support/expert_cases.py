"""A small model whose LLM has experts, in any layout: the recipes that tests of experts have in common."""

from __future__ import annotations

from hetmesh.recipe.recipe import parse_recipe
from support.parity_cases import table

MODEL = """
[modules.vision]
model = "siglip"
{vision}
[modules.vision.config]
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 2
patch_size = 4
image_size = 8
intermediate_size = 10
[modules.projector]
model = "mlp"
[modules.llm]
model = "qwen3_moe"
{llm}
[modules.llm.config]
hidden_size = 12
num_hidden_layers = 3
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 4
intermediate_size = 14
moe_intermediate_size = 6
num_experts = 8
num_experts_per_tok = 3
norm_topk_prob = true
router_aux_loss_coef = 0.5
mlp_only_layers = [1]
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
pack_samples = true
[parallelism]
pipeline_parallel_schedule = "{policy}"
pipeline_parallel_microbatch_size = 1
"""


def recipe(*tables, policy="sequential", batch=2, vision="", llm="", changes=()):
    text = MODEL.format(policy=policy, batch=batch, vision=vision, llm=llm)
    for change in changes:
        text = text.replace(*change, 1)
    return parse_recipe("\n".join([text, *tables]))


def experts(ranks, ep, dp=1, **degrees):
    keys = {"expert_parallel_degree": ep, "data_parallel_replicate_degree": dp, **degrees}
    return table("llm", ranks, **keys)


SEQUENCE = "\nenable_sequence_parallel = true"
FLAT = 'ranks = "0-3"\ndata_parallel_replicate_degree = 4\nexpert_parallel_degree = 2'
PERMUTED = "[parallelism.llm]\nranks = [3, 1, 2, 0]\ndata_parallel_replicate_degree = 4\nexpert_parallel_degree = 2"
FULL = '\n[activation_checkpoint]\nmode = "full"'
CASES = {
    "one rank": ((table("vision", "0"), table("llm", "0")), {}),
    "EP 2, disjoint": ((table("vision", "0-1"), experts("2-3", 2, 2)), {}),
    "EP 4, colocated": ((experts("0-3", 4, 4),), {}),
    "EP 2 of 4": ((table("vision", "0-3"), experts("0-3", 2, 4)), {}),
    "TP 2": ((table("vision", "0"), table("llm", "2-3", tp=2)), {}),
    "TP 2, sequence": ((table("vision", "0"), table("llm", "2-3", tp=2) + SEQUENCE), {}),
    "EP 2, TP 2": ((table("vision", "0-3"), experts("0-3", 2, 2, tp=2)), {}),
    "EP 2, TP 2, sequence": ((table("vision", "0-3"), experts("0-3", 2, 2, tp=2) + SEQUENCE), {}),
    "EP 2, CP 2": ((table("vision", "0-3"), experts("0-3", 2, 2, context_parallel_degree=2)), {}),
    "CP 4": ((table("vision", "0-3"), table("llm", "0-3", context_parallel_degree=4)), {}),
    "EP 2, PP 2": ((table("vision", "0-1"), experts("0-3", 2, 2, pp=2)), {"policy": "1f1b"}),
    "EP 2, PP 2, split": ((table("vision", "0-1"), experts("0-3", 2, 2, pp=2)), {"policy": "zero_bubble"}),
    "FSDP 2": ((table("vision", "0-1"), table("llm", "2-3", fsdp=2)), {}),
    "FSDP, all of it EP": ((table("vision", "0-1"), experts("2-3", 2, fsdp=2)), {}),
    "FSDP 2, EP 2": ((table("vision", "0-3"), experts("0-3", 2, fsdp=4)), {}),
    "HSDP 2, EP 2": ((table("vision", "0-3"), experts("0-3", 2, 2, fsdp=2)), {}),
    "FSDP 2, all of it EP, PP 2": ((table("vision", "0-1"), experts("0-3", 2, fsdp=2, pp=2)), {"policy": "1f1b"}),
    "recomputed": ((table("vision", "0-1"), experts("2-3", 2, 2) + FULL), {}),
    "recomputed, PP 2": ((table("vision", "0-1"), experts("0-3", 2, 2, pp=2) + FULL), {"policy": "1f1b"}),
    "recomputed, FSDP": ((table("vision", "0-3"), experts("0-3", 2, fsdp=4) + FULL), {}),
    "selectively, FSDP": ((table("vision", "0-3"), experts("0-3", 2, fsdp=4) + FULL.replace("full", "selective")), {}),
    "selectively": ((experts("0-1", 2, 2) + FULL.replace("full", "selective"),), {}),
    "fewer experts than shards": (
        (table("vision", "0-1"), experts("0-3", 2, fsdp=4)),
        {"changes": [("num_experts = 8", "num_experts = 2"), ("per_tok = 3", "per_tok = 2")]},
    ),
    "more experts than tokens": (
        (table("vision", "0-1"), experts("0-3", 4, 4)),
        {"batch": 1, "changes": [("num_experts = 8", "num_experts = 32")]},
    ),
    "FSDP 1, EP 2, TP 2": ((table("vision", "0-1"), experts("0-3", 2, fsdp=2, tp=2)), {}),
    "permuted ranks": ((table("vision", "0-1"), PERMUTED), {}),
    "one layout for all": ((FLAT,), {}),
    "interleaved": (
        (table("vision", "0-1"), experts("0-3", 2, 2, pp=2) + "\npipeline_parallel_layers_per_stage = 1"),
        {"policy": "interleaved", "changes": [("num_hidden_layers = 3", "num_hidden_layers = 4")]},
    ),
    "bubble_fill": ((table("vision", "0-3"), experts("0-3", 2, 2, pp=2)), {"policy": "bubble_fill", "batch": 4}),
    "three_phase": ((table("vision", "0-3"), experts("0-3", 2, 2, pp=2)), {"policy": "three_phase"}),
    "tied": (
        (table("vision", "0-1"), experts("0-3", 2, 2, pp=2)),
        {"policy": "1f1b", "changes": [("norm_topk_prob = true", "tie_word_embeddings = true")]},
    ),
    "another mask": (
        (table("vision", "0-3"), experts("0-3", 2, 4)),
        {"llm": 'attention_mask = "bidirectional_media"', "changes": [("pack_samples = true", "")]},
    ),
    "offloaded": (
        (table("vision", "0-1"), experts("0-3", 2, fsdp=4)),
        {"changes": [("pack_samples = true", "pack_samples = true\nenable_cpu_offload = true")]},
    ),
    "compiled": ((experts("0-1", 2, 2), '[compile]\nenable = true\nbackend = "eager"'), {}),
    "frozen": ((table("vision", "0-1"), experts("2-3", 2, 2)), {"llm": "trainable = false"}),
    "LoRA": ((table("vision", "0-1"), experts("2-3", 2, 2)), {"llm": "lora = { rank = 2 }"}),
}
