"""The pieces of a drawn recipe that say who handles which sample, and when encoders run."""

from __future__ import annotations

from hypothesis import strategies as st

from hetmesh.balance import DEFERRING
from hetmesh.balance import POLICIES as BALANCERS
from hetmesh.schedule.bubble_fill import INNER_SCHEDULES
from support.recipe_draft import SINK, Draft, lane_ranks, some, sometimes


def balance(draw: st.DrawFn, draft: Draft) -> None:
    """Who handles which sample; deferral and other numbers of microbatches where the policy has them."""
    if sometimes(draw):
        return  # the default
    policy = draw(st.sampled_from(sorted(BALANCERS)))
    table = draft.table("balance")
    table["policy"] = policy
    if policy in DEFERRING and sometimes(draw, 2):
        table["deferral"] = True
        if sometimes(draw, 2):
            table["split_deferred_backward"] = True
    free = policy != "none" and sometimes(draw)
    if free:
        table["microbatches"] = "free"
    shares = {name: lanes for name in _alone(draft) if (lanes := _lanes_on_lanes(draft, name)) and sometimes(draw, 2)}
    if shares:
        table["microbatch_shares"] = {
            name: draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)) for name, n in shares.items()
        }
    elif not free and (alone := _alone(draft)):
        table["microbatch_sizes"] = {name: draw(st.integers(1, 3)) for name in alone if sometimes(draw, 2)}


def _alone(draft: Draft) -> list[str]:
    """Encoders with ranks that no other module has in that order: they go along with nobody."""
    tables = {name: t["ranks"] for name, t in draft.tables["parallelism"].items() if isinstance(t, dict)}
    return [
        name for name, ranks in tables.items() if name in draft.encoders and list(tables.values()).count(ranks) == 1
    ]


def _lanes_on_lanes(draft: Draft, name: str) -> int:
    """How many lanes of an encoder lie on the ranks of each lane of the LLM, and on no other's; 0 if there is none such
    number."""
    own, llm = (lane_ranks(draft.layout(module)) for module in (name, SINK))
    inside = [[at for at, ranks in enumerate(llm) if lane & ranks] for lane in own]
    if any(len(at) != 1 for at in inside):
        return 0
    counts = {sum(at == [lane] for at in inside) for lane in range(len(llm))}
    return counts.pop() if len(counts) == 1 else 0


def bubble_fill(draw: st.DrawFn, draft: Draft) -> None:
    """Encoders on the LLM's ranks run in the gaps of the schedule that it has."""
    table = draft.table("parallelism")
    inner = table["pipeline_parallel_schedule"]
    if inner not in INNER_SCHEDULES or not any(_on_sink_ranks(draft, name) for name in draft.modules if name != SINK):
        return
    if draft.gaps or sometimes(draw, 2):
        keys = {"bubble_fill_in_flight": st.just(16)}
        if any(_cut_by_slices(draft, name) for name in draft.modules if name != SINK):
            keys["bubble_fill_layers_per_slice"] = st.integers(1, 2)
        others = [name for name in draft.modules if name != SINK]
        able = draft.degree(SINK, "tensor") > 1 and not draft.after_llm and not any(map(draft.meets_inside, others))
        if able:
            keys["bubble_fill_in_collectives"] = st.just(True)
        table |= {"pipeline_parallel_schedule": "bubble_fill", "bubble_fill_schedule": inner, **some(draw, **keys)}
        if able and draft.gaps:
            table["bubble_fill_in_collectives"] = True


def _cut_by_slices(draft: Draft, name: str) -> bool:
    """Whether an encoder is cut where bubble_fill says: its own ranks are some of the LLM's, and nothing else cuts
    it."""
    tables = draft.tables["parallelism"]
    own, flat = tables.get(name), any(key.endswith("_degree") for key in tables)
    cut = {"pipeline_parallel_layers_per_stage", "module_fqns_per_model_part"} & set(own or ())
    return name in draft.layers and (own is not None or flat) and not cut and _on_sink_ranks(draft, name)


def _on_sink_ranks(draft: Draft, name: str) -> bool:
    """Whether a module reads media on ranks that the LLM has too; without ranks of its own it lies where that lies."""
    reads = name in draft.after_llm or all(b["to"] != name for b in draft.tables.get("boundaries", ()))
    own, llm = (draft.layout(each).get("ranks", range(draft.world)) for each in (name, SINK))
    return reads and bool(set(own) & set(llm))
