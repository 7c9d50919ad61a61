"""Parity of tensor parallelism over more ranks than key heads: ranks in a row share one."""

from __future__ import annotations

from functools import partial

import pytest

from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing import parity
from hetmesh.testing.parity import compare, run_as
from support import tiny_vlms
from support.often import some
from support.whole_reference import whole_reference

pytestmark = pytest.mark.slow

MODEL = """
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 8
num_key_value_heads = 2
head_dim = 4
intermediate_size = 16
attention_bias = true
[data]
source = "hetmesh.testing.sources:RandomMedia"
options = { kinds = {} }
[training]
local_batch_size = 4
dtype = "float64"
[parallelism.llm]
"""
TP4 = 'ranks = "0-3"\ntensor_parallel_degree = 4\n'
PACKED = ("dtype =", "pack_samples = true\ndtype =")
LORA = ("[modules.llm.config]", "[modules.llm.lora]\nrank = 2\n[modules.llm.config]")
FOUR = {
    "padded": (TP4,),
    "packed": (TP4, PACKED),
    "permuted ranks": ('ranks = "2,0,3,1"\ntensor_parallel_degree = 4\n',),
    "SP, recomputed": (TP4 + 'enable_sequence_parallel = true\n[activation_checkpoint]\nmode = "selective"\n',),
    "Llama, recomputed": (TP4 + '[activation_checkpoint]\nmode = "full"\n', ('"qwen3"', '"llama"')),
    "LoRA": (TP4, LORA),
    "LoRA of keys and values": (TP4, (LORA[0], LORA[1].replace("2\n", '2\ntarget_modules = ["k_proj", "v_proj"]\n'))),
    "compiled": (TP4 + '[compile]\nenable = true\nbackend = "aot_eager"\n', PACKED),
    "a key head for all": (TP4, ("value_heads = 2", "value_heads = 1"), PACKED),
}
DEGREES = 'ranks = "0-7"\ntensor_parallel_degree = 4\n'
EIGHT = {
    "TP 8": ('ranks = "0-7"\ntensor_parallel_degree = 8\n', PACKED),
    "CP 2": (DEGREES + "context_parallel_degree = 2\n",),
    "CP 2, SP, TP 4 of one head": (
        DEGREES + "context_parallel_degree = 2\nenable_sequence_parallel = true\n",
        ("value_heads = 2", "value_heads = 1"),
    ),
    "FSDP 2": (DEGREES + "data_parallel_shard_degree = 2\n",),
    "PP 2": (
        DEGREES + 'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "zero_bubble"\n'
        "pipeline_parallel_microbatch_size = 2\n",
    ),
}


def recipe(layout, *changes):
    text = MODEL + layout
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return parse_recipe(text)


@pytest.mark.parametrize("case", some(("SP, recomputed", "LoRA of keys and values"), FOUR))
def test_four_ranks_with_two_key_heads_equal_one_process(pool4, case):
    parity.check(pool4, recipe(*FOUR[case]), 2)


@pytest.mark.parametrize("case", some(("CP 2, SP, TP 4 of one head",), EIGHT))
def test_eight_ranks_equal_one_process(pool8, case):
    parity.check(pool8, recipe(*EIGHT[case]), 2)


FEW = ("qwen2_5_vl", "gemma3", "llava_gemma2")
REST = [name for name in tiny_vlms.MODELS if name not in (*FEW, "paligemma2", "llava_relu")]


def with_four_heads(make):
    """A model whose LLM has two heads, with four, of which two share a key head."""
    model = make()
    text = model.config.text_config
    text.num_attention_heads, text.num_key_value_heads = 4, 2
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [1, 1, 1]}
    return type(model)(model.config)


def llava_gemma2():
    """Its attention, which caps its logits, is eager: it repeats keys and values by itself."""
    return tiny_vlms._llava(text=tiny_vlms._text("gemma2", query_pre_attn_scalar=6, sliding_window=8))


MADE = {name: partial(with_four_heads, tiny_vlms.MODELS[name]) for name in ("qwen2_5_vl", "glm4v", "qwen2_5_omni")}
MADE["llava_gemma2"] = llava_gemma2


@pytest.mark.parametrize("name", some(("llava_gemma2",), [*FEW, *REST]))
def test_models_from_directories_equal_transformers_own(pool4, tmp_path, monkeypatch, name):
    monkeypatch.setitem(tiny_vlms.MODELS, name, MADE.get(name, tiny_vlms.MODELS.get(name)))
    towers = [f"[parallelism.{tower}]\nranks = [0, 1]" for tower in tiny_vlms.TOWERS.get(name, ("vision",))]
    layout = "\n".join([*towers, "[parallelism.llm]", TP4])
    given = parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save(name, tmp_path)) + layout)
    compare(whole_reference(given, 2), pool4.run(run_as, given, 2, None, None, timeout=120), 1e-10)
