"""The piece of a drawn recipe that makes its LLM a mixture of experts."""

from __future__ import annotations

from hypothesis import strategies as st

from support.recipe_draft import SINK, Draft, sometimes

MIXTURES = {"qwen3": "qwen3_moe", "qwen3_vl_text": "qwen3_vl_moe_text"}


def experts(draw: st.DrawFn, draft: Draft) -> None:
    """A Qwen3 or Qwen3-VL LLM becomes a mixture of experts, in all blocks or in some."""
    module, table = draft.tables["modules"][SINK], draft.layout(SINK)
    named = "target_modules" in module.get("lora", {}) or "module_fqns_per_model_part" in table
    if (
        module["model"] not in MIXTURES
        or draft.tables["data"]["source"] == "digits"
        or named
        or draft.drops
        or not (sometimes(draw) or draft.experts)
    ):
        return
    config = module["config"]
    count = draw(st.sampled_from([4, 8, 6, 1]))
    module["model"] = MIXTURES[module["model"]]
    config |= {
        "num_experts": count,
        "num_experts_per_tok": min(count, draw(st.sampled_from([1, 2, 3, 8]))),
        "moe_intermediate_size": 8,
        **({"norm_topk_prob": draw(st.booleans())} if module["model"] == "qwen3_moe" else {}),
        "router_aux_loss_coef": draw(st.sampled_from([0.0, 0.1])),
        "mlp_only_layers": draw(st.sampled_from([[], [0]])) if config["num_hidden_layers"] > 1 else [],
    }
    draft.table("training")["pack_samples"] = True


def expert_layout(draw: st.DrawFn, draft: Draft) -> None:
    """Lanes that hold different experts together, and when these move."""
    module, table, tp = draft.tables["modules"][SINK], draft.layout(SINK), draft.degree(SINK, "tensor")
    if module["model"] not in MIXTURES.values():
        return
    config, count = module["config"], module["config"]["num_experts"]
    shards = draft.degree(SINK, "shard")
    lanes = shards if shards > 1 else table.get("data_parallel_replicate_degree", 1)

    def fits(degree: int) -> bool:
        rest = shards // degree if shards > 1 else 1
        within = count // degree < rest  # FSDP then splits each expert
        return not (within and (8 // tp % rest or config["hidden_size"] % rest))

    degrees = [degree for degree in (2, 3, 4) if lanes % degree == 0 == count % degree and fits(degree)]
    if degrees:
        table["expert_parallel_degree"] = draw(st.sampled_from(degrees))
        table["expert_placement_interval"] = draw(st.sampled_from([0, 1, 2]))
