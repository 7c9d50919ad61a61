"""Seconds of collectives and messages between ranks, from a machine's links. Ring algorithms; nothing overlaps.

A group within a node uses the links of the node. Across nodes each rank has a network port of its own, and the members
on one node share the traffic between nodes; a bandwidth of 0 is unknown and takes no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hetmesh.cost.head import targets_of_chunk
from hetmesh.cost.layer_options import LayerOptions
from hetmesh.cost.machine import Machine
from hetmesh.cost.recurrence import CutBytes, RankCuts
from hetmesh.cost.shapes import LayerShape
from hetmesh.cost.work import Work


@dataclass(frozen=True)
class Link:
    """What joins the ranks of a group: bytes/s in one direction (0: unknown) and seconds of an empty message."""

    bandwidth: float
    latency: float

    def seconds(self, size: float, messages: int = 1) -> float:
        """Of `size` bytes sent as `messages` messages, one after the other; 0 for nothing."""
        if not size:
            return 0.0
        return messages * self.latency + (size / self.bandwidth if self.bandwidth else 0.0)


def link(machine: Machine, ranks: Sequence[int]) -> Link:
    """The slowest link of a ring through `ranks`."""
    nodes, fewest, most = _on_nodes(tuple(ranks), machine.ranks_per_node)
    if nodes <= 1:
        return Link(machine.node_bandwidth, machine.node_latency)
    across = machine.network_bandwidth * fewest
    inside = machine.node_bandwidth if most > 1 else across
    return Link(min(across, inside) if inside else across, machine.network_latency)


@lru_cache(maxsize=4096)
def _on_nodes(ranks: tuple[int, ...], per_node: int) -> tuple[int, int, int]:
    """How many nodes hold `ranks`, and how many of these the node with fewest and the one with most have."""
    counts = Counter(rank // per_node for rank in ranks).values() if per_node else [len(ranks)]
    return len(counts), min(counts, default=0), max(counts, default=0)


def all_gather(size: float, ranks: Sequence[int], machine: Machine) -> float:
    """Seconds until every rank has all `size` bytes, of which each starts with its share; a reduce-scatter, until each
    has its share of the sum of all ranks' `size` bytes, takes as long."""
    n = len(ranks)
    return link(machine, ranks).seconds(size * (n - 1) / n, n - 1) if n > 1 else 0.0


def all_reduce(size: float, ranks: Sequence[int], machine: Machine) -> float:
    """Seconds until every rank has the sum of all ranks' `size` bytes: a reduce-scatter, then an all-gather."""
    return 2 * all_gather(size, ranks, machine)


def all_to_all(size: float, ranks: Sequence[int], machine: Machine) -> float:
    """Seconds until every rank has its `size` bytes, as many from each of the others. What comes from other nodes and
    what comes from the own one come at once; each rank has its own port to the network."""
    n = len(ranks)
    if n < 2:
        return 0.0
    nodes, fewest, most = _on_nodes(tuple(ranks), machine.ranks_per_node)
    node = Link(machine.node_bandwidth, machine.node_latency)
    if nodes == 1:
        return node.seconds(size, n - 1)
    each, away = size / (n - 1), n - fewest
    network = Link(machine.network_bandwidth, machine.network_latency)
    return max(network.seconds(each * away, away), node.seconds(each * (most - 1), most - 1))


@dataclass(frozen=True)
class TensorParallelTime:
    """Seconds of a layer's own collectives."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: TensorParallelTime) -> TensorParallelTime:
        return TensorParallelTime(self.forward + other.forward, self.backward + other.backward)


def tensor_parallel_time(
    layer: LayerShape, work: Work, how: LayerOptions, machine: Machine, again: Sequence[int] = ()
) -> TensorParallelTime:
    """Of one layer on its tensor parallel ranks; `again`: widths of rows that the backward gathers once more.

    Each weight split along its inputs ends in a sum of its outputs over the ranks, and the weights split along their
    outputs before it start, in the backward, with a sum of their input's gradient: two and two for a transformer block.
    A layer with none but the latter (the first linear of an MLP) has only that; a head gathers its logits, or
    sends three numbers of each target where ranks keep shares of them. Ranks that share a key head put the parts of its
    key and value together, and sum their gradients. An attention that is not split gathers its rows under sequence
    parallelism.
    """
    ranks, itemsize = how.group, how.itemsize
    if len(ranks) < 2:
        return TensorParallelTime()
    rows = layer.rows(work)
    products = [weight for weight in layer.weights if weight.per_row and weight.shared]
    sums = [weight.outputs for weight in products if weight.splits_inputs]
    needed = how.upstream or layer.trainable
    if sums:
        each = sum(all_reduce(itemsize * rows * width, ranks, machine) for width in sums)
        if layer.key_heads and (sharing := len(ranks) // layer.key_heads) > 1:
            each += 2 * all_gather(itemsize * rows * layer.keys_on(len(ranks)), ranks[:sharing], machine)
        if how.sequence_parallel and (layer.attention_width or layer.recurrences) and not layer.splits_attention:
            each += all_gather(itemsize * rows * sums[0], ranks, machine)
        back = each + sum(all_gather(itemsize * rows * width, ranks, machine) for width in again)
        return TensorParallelTime(each, back if needed else 0.0)
    forward = backward = 0.0
    if products:
        if layer.on_targets and layer.shares_logits:  # a maximum, then a sum and a logit, of each target
            chunks = max(rows / targets_of_chunk(layer, itemsize, len(ranks)), 1.0)
            forward = sum(chunks * all_reduce(round(n * rows / chunks), ranks, machine) for n in (4, 8))
        elif layer.on_targets:
            forward = all_gather(itemsize * rows * products[0].shape[0], ranks, machine)
        if how.upstream:
            backward = all_reduce(itemsize * rows * products[0].shape[1], ranks, machine)
    return TensorParallelTime(forward, backward)


def carry_time(sent: CutBytes, cuts: RankCuts, ranks: Sequence[int], machine: Machine) -> TensorParallelTime:
    """Seconds in which one of `ranks`, which share tokens, sends and gets what a layer remembers at `cuts`: inputs of
    the convolution, then maps to the ranks by heads, then states back; in the backward gradients the other way."""
    n = len(ranks)

    def by_heads(size: int, own: int) -> float:  # what a rank has of its own heads stays
        return all_to_all(size * max(own * (n - 1), cuts.all - own) / n, ranks, machine)

    halo = all_to_all(sent.halo * max(cuts.before, cuts.behind), ranks, machine)
    states = by_heads(sent.states, cuts.behind)
    forward = halo + by_heads(sent.maps, cuts.before) + states
    return TensorParallelTime(forward, halo + states + by_heads(sent.states, cuts.before))


def gradient_sum_time(
    elements: int, itemsize: int, shards: Sequence[int], replicas: Sequence[int], machine: Machine
) -> tuple[float, float]:
    """Seconds of summing the gradients of `elements` parameters over a module's lanes: of the reduce-scatter over
    shards, and of the all-reduce of a share over replicas. `shards`, `replicas`: the ranks of one `dp_shard` and one
    `dp_replicate` group."""
    size = elements * itemsize
    return (all_gather(size, shards, machine), all_reduce(size / max(len(shards), 1), replicas, machine))
