"""The piece of a drawn recipe that only a whole run has: an optimizer, checkpoints, evaluations, a recorded step."""

from __future__ import annotations

from hypothesis import strategies as st

from support.recipe_draft import SINK, Draft, Table, some, sometimes

BEHIND = 3
"""Steps between the one at which a drawn run is interrupted and its last."""


def runs(draw: st.DrawFn, draft: Draft) -> None:
    """What `hetmesh train` does beside steps; a run that is interrupted is so `BEHIND` steps before its end."""
    if not (draft.runs or sometimes(draw, 2)):
        return
    training, tables = draft.table("training"), draft.tables
    training["steps"] = steps = BEHIND + draw(st.integers(1, 2))
    training["max_norm"] = draw(st.sampled_from([1.0, 0.05, 0.0]))
    tables["optimizer"] = _optimizer(draw, draft)
    if sometimes(draw):
        tables["lr_scheduler"] = {"warmup_steps": draw(st.integers(1, 3))}
    _evaluation(draw, draft)
    if not sometimes(draw, 4):
        tables["checkpoint"] = _checkpoint(draw, draft)
    if sometimes(draw, 2):
        tables["profiling"] = {"timeline": True, "timeline_step": draw(st.integers(1, steps))}
    if sometimes(draw):
        tables["metrics"] = {"log_freq": draw(st.integers(1, 2)), **some(draw, verbose=st.just(True))}
    if sometimes(draw):
        draft.table("debug")["check_replicas"] = draw(st.integers(1, 2))


def _optimizer(draw: st.DrawFn, draft: Draft) -> Table:
    """Any optimizer. An eps far above its default keeps it smooth where gradients are rounding errors."""
    if sometimes(draw):
        llm = draft.tables["modules"][SINK]
        may_move = "moe" in llm["model"] or "initial_load_path" in llm  # experts, now or in the layout that goes on
        name = "RMSprop" if may_move else draw(st.sampled_from(["RMSprop", "Adafactor"]))
        options = {"eps": 0.01, "momentum": 0.5} if name == "RMSprop" else {"eps": [0.01, 0.001]}
        table = {"name": f"torch.optim:{name}", "lr": 0.01, "options": options}
        if sometimes(draw):  # other parameters in every model
            table["param_groups"] = [
                {"pattern": "weight$", "optimizer_name": "AdamW", "optimizer_kwargs": {"eps": 0.01}}
            ]
        return table
    name = draw(st.sampled_from(["AdamW", "Adam", "SGD"]))
    eps = {} if name == "SGD" else {"eps": 0.01}
    return {"name": name, **eps, "lr": 0.01, **some(draw, implementation=st.sampled_from(["foreach", "for-loop"]))}


def _evaluation(draw: st.DrawFn, draft: Draft) -> None:
    """Held-out samples, some of which a run also answers by itself."""
    digits, count = draft.tables["data"]["source"] == "digits", draw(st.integers(2, 5))
    if "processor" in draft.tables["data"].get("options", ()):  # samples of several answers
        return
    if not digits and not sometimes(draw, 2):
        return
    if not digits:
        draft.tables["data"]["options"]["held_out"] = count
    draft.tables["validation"] = {"samples": count, **some(draw, freq=st.integers(1, 2))}
    if sometimes(draw, 2):
        draft.tables["validation"] |= {
            "free_running": draw(st.integers(1, count)),
            "free_running_tokens": draw(st.integers(1, 3)),
        }


def _checkpoint(draw: st.DrawFn, draft: Draft) -> Table:
    modules = draft.tables["modules"].values()
    frozen = [each for each in modules if not each.get("trainable", True) and "lora" not in each]
    kept = ["reference" if any("initial_load_path" in each for each in frozen) else "each", "once", "each"]
    table = {
        "enable": True,
        "interval": draw(st.sampled_from([1, 2, 500])),
        "keep_latest_k": draw(st.sampled_from([1, 2, 0])),
        **some(draw, async_mode=st.just("async")),
    }
    if frozen:
        table["frozen"] = draw(st.sampled_from(kept))
    if sometimes(draw):
        table |= {"last_save_in_hf": True, **some(draw, export_dtype=st.sampled_from(["float32", "bfloat16"]))}
    return table
