"""Parity of LLMs whose layers remember earlier tokens otherwise than by attention: samples in one row, tokens shared by
ranks, shares of heads. Three steps of SGD equal transformers' own model, one sample at a time, in one process."""

from __future__ import annotations

import pytest

from hetmesh.recipe.recipe import parse_recipe
from hetmesh.testing import parity
from hetmesh.testing.parity import compare, run_as
from support import tiny_vlms
from support.whole_reference import whole_reference


def text_of(kind, **changes):
    """A LLaVA with the LLM of another family, of which transformers has all by the name of its config."""
    return lambda: tiny_vlms._llava(text={"model_type": kind, **tiny_vlms.TEXT, "head_dim": 6, **changes})


LAYERS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
FAMILIES = {
    "qwen3_next": text_of("qwen3_next", **tiny_vlms.DELTA_NET, **tiny_vlms.EXPERTS, shared_expert_intermediate_size=8),
    "olmo_hybrid": text_of("olmo_hybrid", **tiny_vlms.DELTA_NET),
    "lfm2": text_of("lfm2", layer_types=["conv", "full_attention", "conv"]),
    "mamba": tiny_vlms.mamba,
    "minimax": text_of("minimax", **LAYERS, num_local_experts=2, num_experts_per_tok=1, block_size=16),
}
"""Beside Gated DeltaNet: short convolutions, Mamba-2, lightning attention."""


def recipe(name, folder, monkeypatch, tables, longest=130):
    """With texts of up to 130 tokens chunks of 64 are full, and cut."""
    monkeypatch.setattr(tiny_vlms, "MODELS", {**tiny_vlms.MODELS, **FAMILIES})
    text = tiny_vlms.recipe_text(tiny_vlms.save(name, folder), tables).replace("max_text = 12", f"max_text = {longest}")
    return parse_recipe(text.replace('dtype = "float64"', 'dtype = "float64"\npack_samples = true'))


def check(pool, given):
    compare(whole_reference(given, 3), pool.run(run_as, given, 3, None, None, timeout=120), 1e-10)


def llm(more="", **degrees):
    names = {
        "pp": "pipeline_parallel",
        "tp": "tensor_parallel",
        "cp": "context_parallel",
        "fsdp": "data_parallel_shard",
        "ep": "expert_parallel",
    }
    lines = [f"{names.get(key, key)}_degree = {value}" for key, value in degrees.items()]
    return "\n".join(['[parallelism.vision]\nranks = "0-3"\n[parallelism.llm]\nranks = "0-3"', *lines, more]) + "\n"


def stages(schedule, microbatch=1, **degrees):
    size = f"pipeline_parallel_microbatch_size = {microbatch}"
    return llm(f'pipeline_parallel_schedule = "{schedule}"\n{size}', pp=2, **degrees)


SHARES = "enable_sequence_parallel = true"
AGAIN = '[activation_checkpoint]\nmode = "full"'
LORA = "[modules.vision]\ntrainable = false\n[modules.llm.lora]\nrank = 2"
LAYOUTS = {
    "packed": llm(),
    "packed, zero bubble": stages("zero_bubble"),
    "cp 2": llm(cp=2),
    "cp 4, dealt out": llm('context_parallel_assignment = "zigzag"', cp=4),
    "cp 4, pieces of 128": llm('context_parallel_assignment = "lpt"', cp=4),
    "cp 2, 1f1b": stages("1f1b", 2, cp=2),
    "cp 2, interleaved": stages("interleaved", 2, cp=2),
    "cp 2, zero bubble": stages("zero_bubble", 2, cp=2),
    "cp 2, fsdp 2, again": llm(AGAIN, cp=2, fsdp=2),
    "tp 2, sp": llm(SHARES, tp=2),
    "cp 2, tp 2": llm(cp=2, tp=2),
    "cp 2, tp 2, sp": llm(SHARES, cp=2, tp=2),
    "sp, pp": stages("1f1b", tp=2).replace("tensor", f"{SHARES}\ntensor"),
    "sp, fsdp, again": llm(f"{SHARES}\n{AGAIN}", tp=2, fsdp=2),
}
EXPERTS = {
    "ep 2": llm(ep=2),
    "ep 2, fsdp 2, again": llm(AGAIN, ep=2, fsdp=4),
    "ep 2, cp 2": llm(ep=2, cp=2),
    "ep 2, tp 2": llm(ep=2, tp=2),
    "ep 2, tp 2, sp": llm(SHARES, ep=2, tp=2),
    "ep 2, pp 2": stages("1f1b", 2, ep=2),
    "fsdp 2, cp 2, again": LAYOUTS["cp 2, fsdp 2, again"],
}
"""Of experts that ranks share, beside one that every token goes through."""
OFTEN = [("qwen3_5", "cp 2, tp 2, sp"), pytest.param("qwen3_5_moe", "ep 2, tp 2, sp", marks=pytest.mark.exhaustive)]
"""With a convolution; `attention/test_recurrence.py` has convolutions alone, and cuts of every kind."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), OFTEN)
def test_layers_that_remember_equal_transformers_own(pool4, tmp_path, monkeypatch, name, layout):
    check(pool4, recipe(name, tmp_path, monkeypatch, (LAYOUTS | EXPERTS)[layout], longest=40))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(pool4, tmp_path, monkeypatch, layout):
    check(pool4, recipe("qwen3_5", tmp_path, monkeypatch, LAYOUTS[layout]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next", "lfm2", "mamba", "minimax"])
@pytest.mark.parametrize("layout", ["packed", "tp 2, sp", "cp 2, 1f1b", "cp 4, dealt out", "cp 2, tp 2, sp"])
def test_every_family(pool4, tmp_path, monkeypatch, name, layout):
    if name in ("mamba", "minimax") and "cp" in layout:
        pytest.skip("refused: its mixers take whole samples")
    check(pool4, recipe(name, tmp_path, monkeypatch, LAYOUTS[layout]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("degrees", [{"cp": 2}, {"cp": 2, "tp": 2}, {"tp": 2, "more": SHARES}], ids=str)
def test_adapters(pool4, tmp_path, monkeypatch, degrees):
    more = degrees.pop("more", "")
    parity.check(pool4, recipe("qwen3_5", tmp_path, monkeypatch, llm(f"{more}\n{LORA}", **degrees)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "minimax"])
def test_padded_samples_under_sequence_parallelism(pool4, tmp_path, monkeypatch, name):
    given = recipe(name, tmp_path, monkeypatch, llm(SHARES, tp=2))
    check(pool4, given.model_copy(update={"training": given.training.model_copy(update={"pack_samples": False})}))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", EXPERTS)
def test_experts(pool4, tmp_path, monkeypatch, layout):
    check(pool4, recipe("qwen3_5_moe", tmp_path, monkeypatch, EXPERTS[layout]))
