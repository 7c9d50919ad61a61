"""Predictions without a published row beside them: long contexts, and when an encoder deserves GPUs of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.planner.published_rows import Layout, Row
from benchmarks.planner.row_predictions import predicted, row_plan, row_problem
from hetmesh.planner import search

_LLM = 2, 8, 1, 2
_ENCODERS = 1.0, 3.0, 6.0, 12.0, 22.0


def long_context(machine: str) -> list[dict[str, Any]]:
    """64K tokens, 1B + 7B on 32 GPUs, the LLM at TP 2, CP 8, DP 2: colocated with the encoder at DP 32, against the
    encoder at the LLM's degrees, its images dealt out over the ranks along CP, or computed by each of these again (the
    time of an encoder at TP 2 and DP 2 alone, on four of the GPUs). The paper's best row of 64K gains 49.3%."""
    found = []
    for vision in (0.5, 0.75):
        steps = {}
        for name, encoder in (("dealt out", (2, 1, 1, 16)), ("again on every CP rank", (2, 1, 1, 2))):
            row = _row(1.0, 7.0, vision, 32, Layout(encoder, _LLM), Layout((1, 1, 1, 32), _LLM), seq=65536)
            problem = row_problem(row, machine)
            steps["colocated"] = predicted(problem, row_plan(row, 1), row).step_s
            steps[name] = predicted(problem, replace(row_plan(row, 0), placement="colocated"), row).step_s
        gains = {name: 100 * (s / steps["colocated"] - 1) for name, s in steps.items() if name != "colocated"}
        found.append({"vision_percent": 100 * vision, "step_s": steps, "gain_percent": gains})
    return found


def crossover(machine: str) -> dict[str, Any]:
    """Encoders of several sizes before an LLM of 120B on 256 GPUs: the best colocated and the best disjoint layout that
    a search finds, LLM at TP 8. The paper has disjoint ahead from about 6B on."""
    sizes: list[dict[str, Any]] = []
    for size in _ENCODERS:
        layout = Layout((8, 1, 1, 8), (8, 1, 4, 8))
        problem = row_problem(_row(size, 120.0, 0.5, 256, layout, layout), machine)
        best = search(replace(problem, fixed={("llm", "tp"): 8}), shown=1).best
        each = {name: best[name][0] for name in ("colocated", "disjoint") if best[name]}
        sizes.append(
            {
                "encoder_billions": size,
                "step_s": {name: found.step_s for name, found in each.items()},
                "layouts": {name: str(found.plan) for name, found in each.items()},
            }
        )
    ahead = [
        s["encoder_billions"] for s in sizes if s["step_s"].get("disjoint", 1e9) < s["step_s"].get("colocated", 1e9)
    ]
    return {"disjoint_ahead_from_billions": min(ahead, default=None), "sizes": sizes}


def _row(
    encoder: float, llm: float, vision: float, gpus: int, homogeneous: Layout, other: Layout, seq: int = 8192
) -> Row:
    batch = 256 if gpus == 256 else gpus
    return Row(
        model=f"{encoder:g}B+{llm:g}B",
        encoder=encoder,
        llm=llm,
        vision=vision,
        gpus=(gpus, gpus),
        layouts=(homogeneous, other),
        gain=0.0,
        peaks=(None, None),
        steps=(1.0, 1.0),
        seq=seq,
        global_batch=batch,
        microbatches=0,
        disjoint=False,
        forward_backward=False,
    )
