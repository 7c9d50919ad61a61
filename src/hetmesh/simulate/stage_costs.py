"""What a stage of a module costs: its layers on what its ranks compute, and what FSDP and context parallelism send."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetmesh.context.key_tiles import chunk_rows
from hetmesh.cost import LayerOptions, LayerShape, Machine, ModuleShape, StageBytes, StageCost, StageParts
from hetmesh.cost.collective_time import all_gather, all_reduce, carry_time, gradient_sum_time, link
from hetmesh.cost.head import most_targets
from hetmesh.cost.layer_time import Rates, layer_time, recurrence_seconds
from hetmesh.cost.machine import TYPICAL_PEAK
from hetmesh.cost.saved_operations import saved_names
from hetmesh.cost.work import Work
from hetmesh.graph import ModuleSpec, Stage, dense_mesh
from hetmesh.layout import MeshSpec
from hetmesh.layout.hashing import memoized
from hetmesh.simulate.action_parts import LayerSeconds, backward_parts, filled, forward_parts
from hetmesh.simulate.layer_costs import PARTS, LayerCosts
from hetmesh.simulate.rank_work import RankWork
from hetmesh.simulate.stage_contents import stage_contents

_FORWARD, _INPUT, _WEIGHT, _AGAIN, _SUMS, _SUMS_BACK, _KEPT, _SPLIT, *_MOMENTS = range(len(PARTS))
_MANY = 1 << 20  # rows, beside which what does not grow with them is nothing


@dataclass(frozen=True, eq=False)
class ModuleCosts:
    """What the costs of a module's stages follow from; `upstream`: whether a module that feeds it needs a gradient."""

    spec: ModuleSpec
    shape: ModuleShape
    upstream: bool
    layers: LayerCosts

    @property
    def machine(self) -> Machine:
        """Whose rates and links."""
        return self.layers.machine


class StageCosts:
    """The costs of one stage.

    Args:
        fed: whether a gradient flows back out of the stage: then the backward has a part for the input.
        backward: whether it has a backward.
        recompute: whether the whole stage runs its forward again.
    """

    def __init__(self, module: ModuleCosts, stage: Stage, *, fed: bool, backward: bool, recompute: bool) -> None:
        self.module, self.fed, self.backward, self.recompute = module, fed, backward, recompute
        spec, self.machine = module.spec, module.machine
        self._experts_mesh = spec.stage_mesh(stage.index)
        self.mesh, self.options = dense_mesh(self._experts_mesh), spec.options
        names = spec.stage_layers(stage.index) if spec.num_stages > 1 else None
        # What belongs to no layer is used in the first stage; ranks hold and sum it where they hold any stage.
        ep = self._experts_mesh.axis_size("ep")
        used = stage.index == 0, stage.index < spec.mesh.axis_size("pp")
        self.contents = stage_contents(module.shape, module.upstream, names, *used, self._size("tp"), ep)

    def _size(self, axis: str) -> int:
        return self.mesh.axis_size(axis)

    def _group(self, axis: str) -> tuple[int, ...]:
        return self._line(self.mesh, axis)

    def _experts_group(self, axis: str) -> tuple[int, ...]:
        """Of the mesh on which experts lie."""
        return self._line(self._experts_mesh, axis)

    @memoized
    def _line(self, mesh: MeshSpec, axis: str) -> tuple[int, ...]:
        line = tuple(slice(None) if name == axis else 0 for name in mesh.axes)
        return tuple(mesh.array[line].tolist()) if axis in mesh.axes else ()

    def costs(self, microbatches: Sequence[Sequence[RankWork]]) -> list[StageCost]:
        """Per microbatch, on the rank that takes longest. `microbatches`: what each of its ranks computes
        (`rank_work`)."""
        return [
            self._cost(parts[int(whole.argmax())], parts[:, _KEPT:].max(0), first=m == 0)
            for m, (_, parts, whole) in self._each(microbatches)
        ]

    def group_costs(
        self, microbatches: Sequence[Sequence[RankWork]], groups: Sequence[int]
    ) -> dict[int, tuple[StageCost, ...]]:
        """Per microbatch in which groups of lanes differ, the cost of each group, on its rank that takes longest.
        `groups`: per lane, the number of its group."""
        found = {}
        for m, (place, parts, whole) in self._each(microbatches):
            if len(parts) == 1:
                continue
            of_rank = np.repeat(np.asarray(groups), len(place) // len(groups))
            slowest: dict[int, int] = {}
            for group, row in zip(of_rank.tolist(), place, strict=True):
                if group not in slowest or whole[row] > whole[slowest[group]]:
                    slowest[group] = row
            costs = {row: self._cost(parts[row], parts[row, _KEPT:], first=m == 0) for row in set(slowest.values())}
            if len(costs) > 1:
                found[m] = tuple(costs[slowest[group]] for group in sorted(slowest))
        return found

    def _each(
        self, microbatches: Sequence[Sequence[RankWork]]
    ) -> Iterator[tuple[int, tuple[list[int], np.ndarray, np.ndarray]]]:
        """Per microbatch, for each rank its row of what follows; different parts of the costs; and their seconds."""
        each = [list(dict.fromkeys(ranks)) for ranks in microbatches]
        first = np.concatenate([[0], np.cumsum([len(ranks) for ranks in each])])
        ranks = [rank for microbatch in each for rank in microbatch]
        work = np.array([(1, r.work.rows, r.work.pairs, r.work.targets) for r in ranks], float)
        parts = work @ self._coefficients
        moments, targets = self._moments
        each_kind = np.tensordot(work[:, :3], moments[:3], 1) + np.minimum(work[:, 3:, None], targets) * moments[3]
        parts[:, _MOMENTS] = each_kind.max(-1, initial=0.0)
        if self._size("cp") > 1:
            fetch = np.array([(r.fetched, r.served) for r in ranks], float)
            ahead, back = self._exposed(work, fetch)
            parts[:, _SUMS] += ahead
            parts[:, _SUMS_BACK] += back + (ahead if self.recompute else 0.0)
            parts += self._carried(ranks)
        launches = self._launches
        parts[:, _FORWARD] += np.maximum(launches[0] - parts[:, [_FORWARD, _SUMS]].sum(1), 0.0)
        idle = np.maximum(launches[1:].sum() - parts[:, [_INPUT, _WEIGHT, _AGAIN, _SUMS_BACK]].sum(1), 0.0)
        parts[:, [_INPUT, _WEIGHT]] += idle[:, None] * launches[1:] / (launches[1:].sum() or 1.0)
        whole = parts[:, : _SUMS_BACK + 1].sum(1)
        for m, (a, b) in enumerate(itertools.pairwise(first.tolist())):
            row = {rank: i for i, rank in enumerate(each[m])}
            yield m, ([row[rank] for rank in microbatches[m]], parts[a:b], whole[a:b])

    def _cost(self, parts: np.ndarray, most: np.ndarray, *, first: bool) -> StageCost:
        """From the parts of the rank that takes longest, and bytes of the rank that holds most."""
        values, (kept, split, moment, moment_back, moment_input) = parts.tolist(), map(round, most.tolist())
        ahead = values[_SUMS] + (0.0 if first or self.options.whole_in_step else self.gather)
        forward = values[_FORWARD] + ahead + self._hooks
        if not self.backward:
            return StageCost(forward, collectives_forward=ahead, forward_bytes=moment + self._gathering)
        back = values[_SUMS_BACK] + self._gathered_again + self._scatter
        rest = values[_AGAIN] + back + self._hooks
        # What makes no gradient of the stage's own input is the part for its parameters.
        own = values[_INPUT] + rest if self.fed else 0.0
        weight = values[_WEIGHT] + (0.0 if self.fed else values[_INPUT] + rest)
        # whole gradients of a block, which are summed to shards, are all there when what it kept is gone
        bytes_back = max(moment_back, self._largest_block * self.options.sum_dtype.itemsize) + self._gathering
        of_parts = (split, moment_input) if self.fed else (0, 0)
        return StageCost(forward, own, weight, ahead, back, kept, moment + self._gathering, bytes_back, *of_parts)

    def parts(self, ranks: Sequence[RankWork], cost: StageCost) -> StageParts:
        """What the actions of one microbatch consist of on the rank that takes longest.

        Args:
            ranks: what each of its ranks computes.
            cost: of that microbatch (`costs`).
        """
        ((_, (_, _, whole)),) = self._each([ranks])
        slowest = list(dict.fromkeys(ranks))[int(whole.argmax())].work
        row = np.array([1, slowest.rows, slowest.pairs, slowest.targets], float)
        each = [
            (kind, LayerSeconds(*(row @ self.module.layers.of(kind, self._how(block, before)))[:_KEPT].tolist()))
            for kind, block, before in self.contents.order
        ]
        forward = [part for kind, s in each for part in forward_parts(kind, s.forward, s.sums_forward)]
        if not self.backward:
            return StageParts(filled(forward, cost.forward, cost.collectives_forward + self._hooks))
        back = [backward_parts(kind, s) for kind, s in reversed(each)]
        inner, own = [part for first, _ in back for part in first], [part for _, last in back for part in last]
        back_collectives = cost.collectives_backward + self._hooks
        if not self.fed:
            inner, own = [], inner + own
        return StageParts(
            filled(forward, cost.forward, cost.collectives_forward + self._hooks),
            filled(inner, cost.backward_input, back_collectives if self.fed else 0.0),
            filled(own, cost.backward_weight, 0.0 if self.fed else back_collectives),
        )

    def _how(self, block: bool, before: bool) -> LayerOptions:
        mode = self.options.activation_checkpoint if block else "none"
        saved = saved_names(self.options.save_ops if mode == "selective" and not self.recompute else ())
        dtype = self.options.row_dtype
        group = self._group("tp")
        return LayerOptions(
            str(dtype).removeprefix("torch."),
            before,
            self.backward and (self.recompute or mode != "none"),
            group,
            self.options.sequence_parallel and len(group) > 1,
            dtype != self.options.parameter_dtype and self._size("dp_shard") == 1 and not self.options.compute_copies,
            self._experts_group("ep"),
            self.options.compile_backend == "inductor" and block,
            saved,
            self._size("cp"),
        )

    @cached_property
    def _coefficients(self) -> np.ndarray:
        total = np.zeros((4, len(PARTS)))
        for layer, count in self._layers.items():
            total += count * self.module.layers.of(*layer)
        return total

    @cached_property
    def _layers(self) -> Counter[tuple[LayerShape, LayerOptions]]:
        """How many layers there are of each kind."""
        found: Counter[tuple[LayerShape, LayerOptions]] = Counter()
        for (kind, block, before), count in self.contents.counts.items():
            found[kind, self._how(block, before)] += count
        return found

    @cached_property
    def _launches(self) -> np.ndarray:
        """Seconds for which the host launches it all; as `LayerCosts.launches`."""
        return sum((count * self.module.layers.launches(*layer) for layer, count in self._layers.items()), np.zeros(3))

    @property
    def seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Constant, and per row, pair and target of a rank, of a forward and of all after it; float64 `[4]` each. What
        FSDP and context parallelism send is left out."""
        parts = self._coefficients
        back = parts[:, [_INPUT, _WEIGHT, _AGAIN, _SUMS_BACK]].sum(1)
        return parts[:, [_FORWARD, _SUMS]].sum(1), back if self.backward else np.zeros(4)

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 [4, 3, kinds of layers]: coefficients of what each holds for a moment: forward, backward, and in the
        input's part of a backward beyond what is left of that; and [kinds], the most targets for which it does."""
        each = [self.module.layers.of(*layer)[:, _MOMENTS] for layer in self._layers]
        targets = np.array([most_targets(*layer) for layer in self._layers])
        return np.stack(each, axis=-1) if each else np.zeros((4, len(_MOMENTS), 0)), targets

    def _exposed(self, work: np.ndarray, fetch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds, per rank, for which attention waits for keys of other ranks, in forwards and in backwards.

        Keys come beside the computation of those that are there, `CHUNKS_AHEAD` chunks before they are needed, so that
        only what takes longer than attention itself is waited for, and the last chunk is computed after it has come. In
        the backward the gradients of others' keys go back, too.
        """
        cp = self._size("cp")
        joined = link(self.machine, self._group("cp"))
        mean = work[:, 1].max(initial=0.0) * (self.module.spec.tokens_per_row or 1)
        chunk = chunk_rows(mean)
        chunks = np.ceil(fetch[:, 0] / chunk)
        ahead, back = np.zeros(len(work)), np.zeros(len(work))
        for (kind, how), count in self._layers.items():
            if not kind.key_width or self.module.layers.measured_collectives(kind, how) is not None:
                continue
            per_pair = self.module.layers.of(kind, how)[2]
            size = 2 * kind.keys_on(self._size("tp")) * how.itemsize
            for total, sent, seconds in (
                (ahead, fetch[:, 0], work[:, 2] * per_pair[_FORWARD]),
                (back, fetch.sum(1), work[:, 2] * per_pair[_INPUT] if how.upstream or self.backward else 0.0),
            ):
                if total is back and not self.backward:
                    continue
                moved = chunks * joined.latency + (size * sent / joined.bandwidth if joined.bandwidth else 0.0)
                last = seconds / np.maximum(chunks, 1) * (cp - 1) / cp
                total += count * np.where(chunks > 0, np.maximum(moved + last - seconds, 0.0), 0.0)
        return ahead, back

    def _carried(self, ranks: Sequence[RankWork]) -> np.ndarray:
        """What recurrences add at cuts of samples: float64 `[ranks, parts]`. Maps of the pieces before them take as
        much of their layer's seconds as the bytes that both keep say."""
        found = np.zeros((len(ranks), len(PARTS)))
        for (kind, how), count in self._layers.items():
            if not kind.recurrences:
                continue
            per_row, split = self.module.layers.of(kind, how)[1], self._size("tp") if kind.splits_attention else 1
            rates = Rates.of(self.machine, how.dtype, self.machine.peak(how.dtype) or TYPICAL_PEAK)
            whole = layer_time(kind, Work(_MANY), rates, upstream=True).forward
            measured = self.module.layers.measured_collectives(kind, how) is not None
            for own, (i, rank) in itertools.product(kind.recurrences, enumerate(ranks)):
                sent = carry_time(own.cut_bytes(how.itemsize, split), rank.cuts, self._group("cp"), self.machine)
                ahead, back = (0.0, 0.0) if measured else (sent.forward, sent.backward)
                share = recurrence_seconds(own, _MANY, rates) / whole
                share *= own.map_bytes(how.itemsize) / own.kept_bytes(how.itemsize)
                mapped = rank.cuts.rows * per_row[_FORWARD] * share
                found[i, [_FORWARD, _SUMS]] += count * np.array([mapped, ahead])
                if self.backward:
                    later = np.array([2 * mapped, how.recompute * mapped, back + how.recompute * ahead])
                    found[i, [_INPUT, _AGAIN, _SUMS_BACK]] += count * later
                    held = rank.cuts.rows * own.map_bytes(how.itemsize) / split
                    found[i, _MOMENTS[1:] if how.recompute else _KEPT] += held if how.recompute else count * held
        return found

    @cached_property
    def gather(self) -> float:
        """Seconds of gathering all parameters of the stage."""
        return self._gather_of(lambda _: True)

    @cached_property
    def _gathered_again(self) -> float:
        """Seconds of gathering for the backward what was let go after the forward."""
        reshard = self.options.reshard_after_forward
        return 0.0 if self.options.whole_in_step else self._gather_of(lambda owner: reshard == "always" or bool(owner))

    def _gather_of(self, chosen: Callable[[str], bool]) -> float:
        itemsize = self.options.row_dtype.itemsize
        gathered = (
            (self._gathered_together, self._group("dp_shard")),
            (self._gathered_experts, self._experts_group("dp_shard")),
        )
        return sum(
            all_gather(count * itemsize, group, self.machine)
            for held, group in gathered
            for owner, count in held.items()
            if chosen(owner)
        )

    @property
    def _hooks(self) -> float:
        """Seconds of FSDP's hooks around a forward or a backward of all that is gathered by itself."""
        return self.machine.shard_overhead * (len(self._gathered_together) + len(self._gathered_experts))

    @property
    def _gathered_together(self) -> Mapping[str, int]:
        """Elements of what FSDP gathers at once, by block; empty for the root."""
        return self.contents.held if self._size("dp_shard") > 1 else {}

    @property
    def _gathered_experts(self) -> Mapping[str, int]:
        """Elements of the experts that FSDP gathers beside their block."""
        return self.contents.experts if self._size("dp_shard") > 1 else {}

    @cached_property
    def _gathering(self) -> int:
        """Bytes of the block that is computed, where it is let go after that, and of the one that comes meanwhile."""
        blocks = 0 if self.options.whole_in_step else 2
        return blocks * self._largest_block * self.options.row_dtype.itemsize

    @cached_property
    def _scattered(self) -> int:
        """What FSDP sums of the root at the end of a backward: whole gradients as the backward left them, these copied
        into one message in the dtype of the sum, and what comes of it, for which the first are gone."""
        root, itemsize = self._gathered_together.get("", 0), self.options.sum_dtype.itemsize
        if not self.contents.trained:
            return 0
        shard = -(-root // self._size("dp_shard"))
        left = itemsize if self.options.whole_in_step else self.options.row_dtype.itemsize
        return root * itemsize + max(root * left, shard * itemsize)

    @cached_property
    def _largest_block(self) -> int:
        """Elements; of the root only where there is nothing else."""
        together, experts = self._gathered_together, self._gathered_experts
        found = {owner: together.get(owner, 0) + experts.get(owner, 0) for owner in (*together, *experts)}
        return max((count for owner, count in found.items() if owner), default=found.get("", 0))

    @cached_property
    def stage_bytes(self) -> StageBytes:
        """What the stage holds whatever the microbatches."""
        experts = -(-self.contents.experts_trained // self._experts_mesh.axis_size("dp_shard"))
        trained = -(-self.contents.trained // self._size("dp_shard")) + experts
        gradients = trained * self.options.parameter_dtype.itemsize
        whole = self.options.whole_in_step and bool(self._gathered_together)
        kept = {"default": ("",), "never": tuple(self._gathered_together), "always": ()}
        gathered = sum(self._gathered_together.get(owner, 0) for owner in kept[self.options.reshard_after_forward])
        gathered += sum(self._gathered_experts.values()) * whole
        replicas = self._size("cp") > 1 or (self._size("dp_replicate") > 1 and not self._gathered_together)
        kept_bytes = gathered * self.options.row_dtype.itemsize
        if not self.backward:
            return StageBytes(gathered=kept_bytes * whole, gathering=self._gathering, whole=whole)
        adding = self.contents.trained + self.contents.experts_trained if whole else 0
        added = adding * self.options.sum_dtype.itemsize
        return StageBytes(gradients, kept_bytes, gradients * replicas, self._gathering, self._scattered, whole, added)

    @cached_property
    def _sums(self) -> tuple[float, float, float]:
        """Of gradients over `dp_shard`, `dp_replicate` and `cp`."""
        dense = self._sums_of(self.contents.trained, self._group)
        experts = self._sums_of(self.contents.experts_trained, self._experts_group)
        return dense[0] + experts[0], dense[1] + experts[1], dense[2] + experts[2]

    def _sums_of(self, elements: int, group: Callable[[str], tuple[int, ...]]) -> tuple[float, float, float]:
        shards, replicas, context = (group(axis) for axis in ("dp_shard", "dp_replicate", "cp"))
        itemsize = (self.options.sum_dtype if shards else self.options.parameter_dtype).itemsize
        scatter, reduce = gradient_sum_time(elements, itemsize, shards, replicas, self.machine)
        shard = elements * self.options.parameter_dtype.itemsize / max(len(shards), 1)
        return scatter, reduce, all_reduce(shard, context, self.machine)

    @property
    def _scatter(self) -> float:
        """What FSDP reduces in the backward of every microbatch, over replicas too."""
        return 0.0 if self.options.whole_in_step else self._by_fsdp

    @property
    def _by_fsdp(self) -> float:
        return sum(self._sums[:2]) if self._group("dp_shard") else 0.0

    @property
    def reduce(self) -> float:
        """Seconds of the sums over lanes, and over ranks that share their tokens or compute with own rows, once per
        step."""
        rows = self.contents.own_rows * self.options.parameter_dtype.itemsize / max(self._size("dp_shard"), 1)
        shared = self._sums[2] + all_reduce(rows, self._group("tp"), self.machine)
        return shared + (self._by_fsdp - self._scatter if self._group("dp_shard") else self._sums[1])
