"""Parity of LLMs whose head and loss come in several chunks of targets: every layout of the head equals one process,
which makes all logits at once."""

from __future__ import annotations

import pytest

from hetmesh.boundary import World
from hetmesh.parallel import linear_cross_entropy
from hetmesh.parallel.linear_cross_entropy import CrossEntropy
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import ParityError, compare, reference, run
from support import tiny_vlms
from support.drawer_parts import FLOW, HEAD, LLM
from support.parity_cases import cp, filled, packed, recipe, table
from support.split_layouts import DP_TP, LAYOUTS
from support.whole_reference import whole_reference

pytestmark = pytest.mark.slow

ADAPTED = "lora = { rank = 2, target_modules = ['q_proj', 'lm_head'] }"
FULL = '[activation_checkpoint]\nmode = "full"'
TWO = table("vision", "0-1")


def chunked_run(rank, given, fault=None):
    """Two steps with a chunk for each target; also the most chunks of a microbatch."""
    most, whole = 0, CrossEntropy.by_chunks

    def counting(loss, rows, batch, observe=None):
        nonlocal most
        backward, chunks = rows.backward, 0

        def counted(back):
            nonlocal chunks
            chunks += 1
            backward(back)

        rows.backward = counted
        if fault is not None:
            rows.logits = fault(rows.logits)
        result = whole(loss, rows, batch, observe)
        most = max(most, chunks)
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(linear_cross_entropy, "CHUNK_BYTES", 1)
        patched.setattr(CrossEntropy, "by_chunks", counting)
        return run(given, World.current(), steps=2), most


def check(pool, given, truth=None, fault=None):
    outcomes = pool.run(chunked_run, given, fault, timeout=120)
    assert max(most for _, most in outcomes) > 1
    compare(reference(given, 2) if truth is None else truth, [outcome for outcome, _ in outcomes], 1e-10)


def before_generators(schedule, **llm):
    """An LLM whose hidden states two modules read, which add gradients of theirs to that of its own weighed loss."""
    loss = '[modules.llm.loss]\nkind = "cross_entropy"\nweight = 0.4'
    tables = table("llm", "0-3", **llm), table("drawer", "0-1"), table("head", "2-3")
    drawer = FLOW.replace("queries = 3", "queries = 8")  # of the hidden states that both read
    return parse_recipe("\n".join([LLM.replace("1f1b", schedule), drawer, HEAD, loss, *tables]))


CASES = {
    "TP, split backward, generators": before_generators("zero_bubble", pp=2, tp=2),
    "interleaved, FSDP, generators": before_generators("interleaved", pp=2, fsdp=2),
    "bubble_fill, split backward": filled("zero_bubble", table("vision", "0-3"), table("llm", "0-3", pp=2, tp=2)),
    "TP, tied": recipe("1f1b", TWO, table("llm", "2-3", tp=2), tied=True),
    "TP, LoRA": recipe("1f1b", TWO, table("llm", "2-3", tp=2), vision="trainable = false", llm=ADAPTED),
    "FSDP x TP, LoRA, computed again": recipe(
        "1f1b", TWO, table("llm", "0-3", fsdp=2, tp=2), FULL, vision="trainable = false", llm=ADAPTED
    ),
    "FSDP, CP, packed": packed(recipe("1f1b", TWO, cp("0-3", 2, fsdp=2))),
    "FSDP, frozen head": recipe("1f1b", TWO, table("llm", "2-3", fsdp=2), llm="trainable = ['!lm_head']"),
    "FSDP kept whole, split backward": recipe(
        "zero_bubble", TWO, table("llm", "0-3", pp=2, fsdp=2) + '\nfsdp_reshard_after_forward = "never"'
    ),
    "SP, computed again with its stage": recipe(
        "three_phase", TWO, table("llm", "0-3", pp=2, tp=2) + "\nenable_sequence_parallel = true"
    ),
    "tied, PP, split backward": recipe("zero_bubble", TWO, table("llm", "0-3", pp=2, tp=2), tied=True),
    "split backward, LoRA": recipe(
        "zero_bubble", TWO, table("llm", "2-3", pp=2), vision="trainable = false", llm=ADAPTED
    ),
}
OFTEN = ("TP, split backward, generators", "TP, tied")


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES]
)
def test_chunks_of_targets_equal_one_process(pool4, name):
    check(pool4, CASES[name])


def soft_capped(folder, monkeypatch, **text):
    def make():
        model = tiny_vlms._paligemma("gemma2")
        config = model.config
        config.text_config.final_logit_softcapping, config.text_config.attn_logit_softcapping = 2.0, None
        text["layer_types"] = ["full_attention"] * config.text_config.num_hidden_layers
        for key, value in text.items():
            setattr(config.text_config, key, value)
            setattr(config, key, value)
        return type(model)(config)

    monkeypatch.setattr(tiny_vlms, "MODELS", {"soft_capped": make})
    return parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save("soft_capped", folder), LAYOUTS[DP_TP]))


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["shares", "tied"])
def test_chunks_of_soft_capped_logits_equal_transformers_own(pool4, tmp_path, monkeypatch, tied):
    given = soft_capped(tmp_path, monkeypatch, tie_word_embeddings=tied)
    llm = resolve(given).adapters["llm"]
    assert not llm.plain_head
    assert llm.abilities.head == ("" if tied else "lm_head")
    check(pool4, given, whole_reference(given, 2))


def scaled(logits):
    return lambda span: logits(span) * 1.001


def test_what_chunks_get_wrong_is_found(pool4):
    with pytest.raises(ParityError):
        check(pool4, CASES["TP, tied"], fault=scaled)
