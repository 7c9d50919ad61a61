"""The one way from samples to a BatchPlan, for training, simulation, explanation and planning alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from hetmesh.balance.batch_plan import BatchPlan
from hetmesh.balance.in_order import in_order
from hetmesh.errors import GraphError
from hetmesh.graph import ModuleGraph, SampleMeta

Policy = Callable[[ModuleGraph, Sequence[SampleMeta], int], BatchPlan]
"""(graph, expanded samples of a global batch, samples per microbatch and lane of the sink) -> the plan."""

POLICIES: Mapping[str, Policy] = MappingProxyType({"none": in_order})
"""Balancing policies by name. To add one: a file beside `in_order.py`, and its entry here."""


def plan_batch(
    graph: ModuleGraph, samples: Sequence[SampleMeta], microbatch_size: int, policy: str = "none"
) -> BatchPlan:
    """Which samples each lane and microbatch of each module handles; equal on every rank.

    Args:
        samples: the metadata of the global batch, expanded, in the order in which the loader drew it.
        microbatch_size: samples per microbatch and lane of the sink.
        policy: a key of `POLICIES`.

    Raises:
        GraphError: the policy is unknown, or the batch cannot be planned.
    """
    if policy not in POLICIES:
        raise GraphError(f"balance policy {policy!r}: valid are {sorted(POLICIES)}")
    return POLICIES[policy](graph, samples, microbatch_size)
