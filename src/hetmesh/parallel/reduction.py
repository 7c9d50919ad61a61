"""The REDUCE action: complete the gradients of one stage, once per step, without waiting for the device.

A head tied to the embedding is a parameter that the first and the last pipeline stage both hold, each a copy: both
start alike, get the sum of both gradients, and so stay alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from hetmesh.boundary import World
from hetmesh.boundary.accelerator import Accelerator, Stream
from hetmesh.graph import ModuleSpec, Stage
from hetmesh.parallel.apply import ParallelModule
from hetmesh.parallel.gradient_axes import SUM_ORDER
from hetmesh.parallel.gradient_sums import (
    have_gradients,
    local_gradient,
    local_part,
    make_missing,
    set_local_gradient,
    start_sum,
)


class Reduction:
    """Sums the gradients of entry `stage` of `parallel.stages` over those `parallel.axes` that the backward has not.

    Call it once per step, after the stage's last backward, collectively over the mesh of the stage; it returns what
    waits for the sums and writes them into the gradients.

    Which gradients exist on any rank is agreed in the first step, and assumed from then on: gradients that no rank had
    are not sent, and all others are sums, in which a missing one counts as zero. A rank that has other gradients than
    it had then sets `changed`; if any rank does, `settle` corrects what was assumed.

    Args:
        accelerator: of these gradients. Where it is asynchronous, sums have a separate stream: what is packed there
            takes the memory of what was packed before, and neither the host nor later computation waits.
        stream: for them; several may share one.
        always: ids of parameters that always have a gradient in the end (tied to another stage).
    """

    def __init__(
        self,
        parallel: ParallelModule,
        stage: int = 0,
        *,
        accelerator: Accelerator | None = None,
        stream: Stream | None = None,
        always: Collection[int] = (),
    ) -> None:
        self.accelerator = Accelerator() if accelerator is None else accelerator
        self.stream = self.accelerator.stream() if stream is None else stream
        named = parallel.parameters_of(stage)
        over = {
            axis: [p for name, p in named.items() if axis in parallel.axes[name].after_backward] for axis in SUM_ORDER
        }
        self.sums = [(parallel.device_mesh.get_group(axis), ps) for axis, ps in over.items() if ps]
        self.few_first = len(self.sums) > 1 and len(self.sums[0][1]) < len(named)
        self.parameters = [*{id(p): p for _, parameters in self.sums for p in parameters if p.requires_grad}.values()]
        self.always = frozenset(always)
        self.used = parallel.used.get(stage)
        # FSDP fills those that it sums, and a lane's blank item uses scalars, which it leaves alone.
        filled = {name for name, p in named.items() if parallel.axes[name].in_backward or not p.ndim}
        self.filled = {name: p for name, p in named.items() if self.used is not None and name in filled}
        axes = [parallel.axes[name].summed for name in self.filled]
        self.agreeing = [
            (parallel.device_mesh.get_group(axis), [i for i, summed in enumerate(axes) if axis in summed])
            for axis in SUM_ORDER
            if any(axis in summed for summed in axes)
        ]
        self.changed = False
        self._here: tuple[bool, ...] = ()  # which of `parameters` had a gradient on this rank, in this step
        self._agreed_on: tuple[bool, ...] | None = None  # and in that in which ranks last agreed
        self._anywhere: frozenset[int] = frozenset()  # ids of those that had one on any rank then

    def __call__(self) -> Callable[[], None]:
        if self.used is not None:
            self._drop_unused(self.used)
        self._here = tuple(p.grad is not None or id(p) in self.always for p in self.parameters)
        if self._agreed_on is None:
            self._agree()
        self.changed = self._here != self._agreed_on
        return self._start_on_stream() if self.accelerator.asynchronous else self._start()

    def _drop_unused(self, used: set[int]) -> None:
        """Set gradients to None that are sums of zeros alone, of parameters that no rank used (`fill_unused`)."""
        here = [id(p) in used or id(p) in self.always for p in self.filled.values()]
        for parameter, has in zip(self.filled.values(), have_gradients(here, self.agreeing), strict=True):
            if not has:
                parameter.grad = None
        used.clear()

    def settle(self) -> None:
        """Agree again: sum gradients that no rank had when ranks last agreed; set to None those that no rank has now.
        Call it after the sums, on all ranks of the mesh or none; the host waits."""
        if self._agreed_on is None:
            return
        before = self._anywhere
        self._agree()
        self.changed = False
        for parameter in self.parameters:
            if id(parameter) in before - self._anywhere:
                parameter.grad = None
        for group, parameters in self._chosen(self._anywhere - before):
            start_sum(parameters, group)()

    def _agree(self) -> None:
        place = {id(p): i for i, p in enumerate(self.parameters)}
        sums = [(group, [place[id(p)] for p in ps if id(p) in place]) for group, ps in self.sums]
        anywhere = have_gradients(self._here, sums)
        self._agreed_on = self._here
        self._anywhere = frozenset(id(p) for p, has in zip(self.parameters, anywhere, strict=True) if has)

    def _chosen(self, ids: Collection[int]) -> list[tuple[dist.ProcessGroup, list[nn.Parameter]]]:
        return [(group, [p for p in parameters if id(p) in ids]) for group, parameters in self.sums]

    def _start(self) -> Callable[[], None]:
        sums = self._chosen(self._anywhere)
        if self.few_first:  # finished before the others start
            group, few = sums.pop(0)
            start_sum(few, group)()
        if not sums:
            return lambda: None
        group, parameters = sums.pop(0)
        first = start_sum(parameters, group)

        def finish() -> None:
            first()
            for group, parameters in sums:
                start_sum(parameters, group)()

        return finish

    def _start_on_stream(self) -> Callable[[], None]:
        accelerator = self.accelerator
        for _, parameters in (sums := self._chosen(self._anywhere)):
            make_missing(parameters)  # here, where they will be freed
        ready, over = accelerator.event(), accelerator.event()
        ready.record()
        with accelerator.on(self.stream):
            if self.stream is not None:
                self.stream.wait_event(ready)
            for group, parameters in sums:
                start_sum(parameters, group)()
            over.record()

        def finish() -> None:
            if (current := accelerator.current_stream()) is not None:
                current.wait_event(over)

        return finish


@dataclass(frozen=True, eq=False)
class TiedParameter:
    """A parameter of this rank and who holds the other copy.

    Attributes:
        name: its FQN, with the module's name in front.
        group: the two ranks that hold the same shard.
        first: whether this rank's is the copy that counts in norms.
    """

    name: str
    parameter: nn.Parameter
    group: dist.ProcessGroup
    first: bool


def tied_parameters(
    spec: ModuleSpec, stages: Sequence[Stage], parallel: ParallelModule, groups: Mapping[int, dist.ProcessGroup]
) -> list[TiedParameter]:
    """The tied parameters of this rank, by name; none where both stages live on it.

    Args:
        stages: those of the module that this rank holds.
        groups: per rank of the first and last stage, the pair's group.
    """
    rank = dist.get_rank()
    if rank not in groups:
        return []
    kept = {layer for stage in stages for layer in spec.stage_layers(stage.index)}
    last = stages[-1].index == spec.num_stages - 1
    shared = []
    for name, parameter in parallel.module.named_parameters():
        layer = next((layer for layer in spec.layers if name.startswith(f"{layer}.")), None)
        if last and layer is not None and layer not in kept:  # a layer that this rank keeps brought it along
            shared.append((name, parameter, False))
        elif stages[0].index == 0 and name in parallel.tied:
            shared.append((name, parameter, True))
    return [
        TiedParameter(f"{spec.name}.{name}", p, groups[rank], first) for name, p, first in shared if p.requires_grad
    ]


def sum_tied_parameters(copies: Sequence[TiedParameter], world: World) -> None:
    """Give both copies the sum of their gradients. Called when the gradients are summed over lanes."""
    for copy in sorted(copies, key=lambda copy: copy.name):
        gradient = local_gradient(copy.parameter)
        if gradient is None:
            total = torch.zeros_like(local_part(copy.parameter), dtype=copy.parameter.grad_dtype)
        else:
            total = gradient.clone()
        with world.waiting(f"gradient of {copy.name}, which two pipeline stages hold"):
            dist.all_reduce(total, group=copy.group)
        set_local_gradient(copy.parameter, total)
