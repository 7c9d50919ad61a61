"""What one rank keeps and does while it runs one schedule: outputs, leaves, gradients and transfers in flight."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hetmesh.attention.packed_rows import with_tensors
from hetmesh.balance import BatchPlan
from hetmesh.boundary import Exchange, Label
from hetmesh.boundary.accelerator import Accelerator
from hetmesh.graph import Edge, Route, Stage
from hetmesh.parallel import local_part
from hetmesh.parallel.activation_checkpoint import backward_in_two_parts
from hetmesh.parallel.linear_cross_entropy import LOSS, asking_for_loss
from hetmesh.parallel.random_state import entering
from hetmesh.parallel.stage_views import PREVIOUS
from hetmesh.runtime.backward import SplitBackward, backward
from hetmesh.runtime.batches_ahead import BatchesAhead, LoadBatch
from hetmesh.runtime.stage_streams import StageStreams
from hetmesh.runtime.step_transfers import RoutedRows, StepTransfers
from hetmesh.schedule import Action, Kind, Schedule

if TYPE_CHECKING:
    from hetmesh.runtime.runtime import Runtime

Outputs = Mapping[str, Tensor]
"""The outputs of a stage by name; `""` is its rows, its activations, or the logits of the LLM."""

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(output of a module, its batch) -> the summed loss of this lane and microbatch, a scalar."""

TARGET = "target"
"""Name of an output: what a module itself makes its loss compare its output with, which is then `batch["targets"]`."""

Observe = Callable[[int, Tensor, Mapping[str, Tensor]], None]
"""(microbatch, detached output, batch) of a module with a loss: called after each forward of its last stage; of an LLM
in it, for some targets after others, where its loss comes so (`hetmesh.parallel.linear_cross_entropy.Observe`)."""

_Saved = Tensor | tuple[torch.device, Tensor]
"""What autograd saved: where it was, or its device and a copy in the host's memory."""


class StepRunner:
    """One rank's state of one step; see `Runtime.run`."""

    def __init__(
        self,
        runtime: Runtime,
        schedule: Schedule,
        plan: BatchPlan,
        load_batch: LoadBatch,
        observe: Mapping[str, Observe],
        step: int,
        transfers: StepTransfers | None = None,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self.runtime, self.schedule, self.plan, self.step, self.weights = runtime, schedule, plan, step, weights
        self.transfers = transfers or StepTransfers(plan, schedule, runtime.world.rank, runtime.world.ranks_per_node)
        accelerator, rank = runtime.world.accelerator, runtime.world.rank
        self.actions, self.observe = schedule.of_rank(rank), observe
        done = (action for action in self.actions if action.kind is Kind.FORWARD)
        forwards = ((action.target, action.microbatch) for action in done if isinstance(action.target, Stage))
        self.batches = BatchesAhead(load_batch, accelerator, forwards, runtime.copying)
        of_stages = Counter(action.target for action in self.actions if action.kind is not Kind.REDUCE)
        for stage, whole in runtime.whole.items():
            whole.begin(of_stages[stage])
        self.tags: dict[Edge, int] = {}
        for i, edge in enumerate(schedule.stages.edges):
            self.tags[edge], self.tags[edge.reversed] = 2 * i, 2 * i + 1
        self.forward_edges = frozenset(schedule.stages.edges)
        self.rows = RoutedRows(self.transfers)
        self.leaves: dict[tuple[Edge, int], Tensor] = {}
        self.outputs: dict[tuple[Stage, int], Outputs] = {}
        self.gradients: dict[tuple[Stage, int], dict[str, Tensor]] = {}
        self.deferred: dict[tuple[Stage, int], SplitBackward] = {}
        self.recomputed: dict[tuple[Stage, int], Callable[[], Outputs]] = {}
        self.exchanges: dict[Route, Exchange] = {}
        self.sent: set[Route] = set()
        self.over: deque[Route] = deque()  # of `exchanges`, those of which this rank has all it receives
        # Sums of the losses of all modules; 0 of those whose last stage is elsewhere.
        device = runtime.world.device
        self.loss_sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in runtime.graph.losses}
        # A recorded step shows its actions one after another.
        side = None if runtime.recording is not None else runtime.beside
        self.streams = StageStreams(accelerator, schedule, rank, side, runtime.first)

    def execute(self, action: Action) -> None:
        """Run one action in which this rank takes part, of any kind but REDUCE."""
        target, m = action.target, action.microbatch
        if isinstance(target, Edge):
            (self._send if action.kind is Kind.SEND else self._receive)(action.route)
            return
        whole = self.runtime.whole.get(target)
        with nullcontext() if whole is None else whole.action(action.kind is Kind.BACKWARD_WEIGHT):
            if action.kind is Kind.FORWARD:
                self._forward(target, m)
            elif action.kind is Kind.BACKWARD:
                backward(*self._outputs_and_gradients(target, m))
            elif action.kind is Kind.BACKWARD_INPUT:
                self._backward_input(target, m)
            else:
                self.deferred.pop((target, m)).weight_part()

    def _forward(self, stage: Stage, m: int) -> None:
        stages, schedule = self.schedule.stages, self.schedule
        batch = self.batches.take(stage, m)
        inputs = {PREVIOUS if e.internal else e.key: self._input(e, m) for e in stages.inputs(stage)}

        def compute() -> Outputs:
            # Without a gradient nothing is kept for a backward: a frozen encoder holds no activations.
            needed, split = schedule.training and stage in stages.backward_stages, stage in schedule.split
            parameters, accelerator = self.runtime.modules[stage].parameters(), self.runtime.world.accelerator
            offloaded = activations_on_host(parameters, accelerator) if stage in schedule.offload else nullcontext()
            with torch.set_grad_enabled(needed), offloaded, backward_in_two_parts(split):
                return self._run(stage, m, batch, inputs)

        def complete() -> Outputs:
            outputs = compute()
            return self._with_loss(stage, m, batch, dict(outputs)) if stage in stages.losses else outputs

        if stage in schedule.recompute and schedule.training:
            with torch.no_grad():
                self.outputs[stage, m] = self._run(stage, m, batch, inputs)
            self.recomputed[stage, m] = complete
        else:
            self.outputs[stage, m] = complete()
        self.batches.prepare()

    def _with_loss(self, stage: Stage, m: int, batch: Mapping[str, Tensor], outputs: dict[str, Tensor]) -> Outputs:
        """The outputs of a stage that go on, and its loss."""
        loss = outputs.pop(LOSS, None)
        if loss is None:
            if (observe := self._observer(stage, m)) is not None:
                observe(outputs[""].detach(), batch)
            if TARGET in outputs:
                batch = with_tensors(batch, {**batch, "targets": outputs.pop(TARGET)})
            loss = self.runtime.losses[stage.module](outputs[""], batch)
        self.loss_sums[stage.module] += loss.detach().double()
        sent = {edge.output for edge in self.schedule.stages.outputs(stage)}
        return {**{name: rows for name, rows in outputs.items() if name in sent}, LOSS: loss}

    def _run(self, stage: Stage, m: int, batch: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Outputs:
        place = replace(self.runtime.places[stage], step=self.step, microbatch=m)
        loss = self.runtime.losses[stage.module] if stage in self.schedule.stages.losses else None
        asking = asking_for_loss(loss, self._observer(stage, m))
        with asking, entering(place, self.runtime.device_module):  # computed again, it draws the same again
            result = self.runtime.modules[stage](batch, inputs)
        return {"": result} if isinstance(result, Tensor) else result

    def _observer(self, stage: Stage, m: int) -> Callable[[Tensor, Mapping[str, Tensor]], None] | None:
        observe = self.observe.get(stage.module) if stage in self.schedule.stages.losses else None
        return None if observe is None else partial(observe, m)

    def _outputs_and_gradients(self, stage: Stage, m: int) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs of a forward, on their autograd graph, and their gradients."""
        outputs = self.outputs.pop((stage, m))
        if (stage, m) in self.recomputed:
            outputs = self.recomputed.pop((stage, m))()
        gradients = self.gradients.pop((stage, m), {})
        for name in outputs.keys() - gradients.keys():  # others have no rows, and no route
            weight = self.weights.get(stage.module, 1.0) if name == LOSS else 0.0
            gradients[name] = torch.full_like(outputs[name], weight)
        return list(outputs.values()), [gradients.get(name) for name in outputs]

    def _backward_input(self, stage: Stage, m: int) -> None:
        leaves = [self.leaves[e, m] for e in self.schedule.stages.inputs(stage) if (e, m) in self.leaves]
        split = SplitBackward(list(self.runtime.modules[stage].parameters()))
        split.input_part(*self._outputs_and_gradients(stage, m), leaves)
        self.deferred[stage, m] = split

    def _input(self, edge: Edge, m: int) -> Tensor:
        """What came along an edge; kept for a backward only where its gradient is sent back."""
        if (edge, m) not in self.leaves:  # no microbatch has rows for this one
            source = self.runtime.graph[edge.source.module]
            device = self.runtime.world.device
            self._keep(edge, m, torch.empty(0, source.features, dtype=source.options.row_dtype, device=device))
        leaf = self.leaves[edge, m]
        if not leaf.requires_grad:
            del self.leaves[edge, m]
        return leaf

    def _keep(self, edge: Edge, m: int, rows: Tensor) -> None:
        needs_gradient = self.schedule.training and edge in self.schedule.stages.gradient_edges
        self.leaves[edge, m] = rows.requires_grad_(needs_gradient)

    def _send(self, route: Route) -> None:
        self._exchange(route)
        self.streams.sent(route)
        edge, m, _ = route
        if edge.source not in self.runtime.modules:
            return
        self.sent.add(route)
        stages = self.schedule.stages
        if edge not in self.forward_edges:
            if all(r.reversed in self.sent for r in self.schedule.routes.into((edge.reversed,), m)):
                self.leaves.pop((edge.reversed, m), None)
            return
        needed = self.schedule.training and edge.source in stages.backward_stages
        if not needed and all(r in self.sent for r in self.schedule.routes.out_of(stages.outputs(edge.source), m)):
            del self.outputs[edge.source, m]  # no gradient will come back for it

    def _receive(self, route: Route) -> None:
        self.streams.receive(route)
        received = self._exchange(route).finish_receiving()
        assert received is not None
        self.streams.received(route, received)
        self.over.append(route)
        edge, _, m = route
        forward = edge in self.forward_edges
        if not forward and (sent := self.exchanges.pop(route.reversed, None)) is not None:
            sent.finish()  # its gradient has come back, so it has arrived
        rows = self.rows.join(route if forward else route.reversed, received, "destination" if forward else "source")
        if rows is None:
            return  # other rows have yet to arrive
        if forward:
            self._keep(edge, m, rows)
            return
        sums = self.gradients.setdefault((edge.destination, m), {})
        # One module may feed several consumers: their gradients are summed, in the order of the schedule.
        sums[edge.output] = sums[edge.output] + rows if edge.output in sums else rows

    def _exchange(self, route: Route) -> Exchange:
        """The transfer along `route`; SEND starts it."""
        if route not in self.exchanges:
            self._forget()
            runtime, edge = self.runtime, route.edge
            forward = edge in self.forward_edges
            along = route if forward else route.reversed
            local = None
            if edge.source in runtime.modules:
                rows = self._output(along) if forward else self._leaf_gradient(along)
                local = self.rows.split(along, rows, "source" if forward else "destination")
                self.streams.sending(route, local)
            exchange = Exchange(
                runtime.world,
                self.transfers.transfer(along, forward),
                local,
                runtime.graph[along.edge.source.module].options.row_dtype,
                transfer_label(along, forward),
                tag=2 * len(self.forward_edges) * (route.source * self.schedule.routes.most + route.destination)
                + self.tags[edge],
                group=runtime.world.channel(runtime.channels.get(along.edge)),
            )
            self.exchanges[route] = exchange.start()
            if runtime.world.rank not in exchange.plan.dst.mesh:
                self.over.append(route)
        return self.exchanges[route]

    def _output(self, route: Route) -> Tensor:
        return self.outputs[route.edge.source, route.source][route.edge.output].detach()

    def _leaf_gradient(self, route: Route) -> Tensor:
        leaf = self.leaves[route.edge, route.destination]
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def _forget(self) -> None:
        """Release finished transfers, oldest first, so that their buffers do not pile up.

        Not all of them are checked each time: gloo reports a message as finished only after a wait for it.
        """
        while self.over and ((first := self.exchanges.get(self.over[0])) is None or first.completed()):
            self.exchanges.pop(self.over.popleft(), None)

    def drain(self) -> None:
        """Wait for the sends that are still in flight."""
        for exchange in self.exchanges.values():
            exchange.finish()


def activations_on_host(parameters: Iterable[nn.Parameter], accelerator: Accelerator) -> saved_tensors_hooks:
    """A context in which autograd keeps what it saves in the host's memory, until the backward needs it.

    `torch.autograd.graph.save_on_cpu` would move weights as well, one copy per microbatch; they stay where they are.

    Args:
        parameters: of the module that runs inside.
        accelerator: where it runs; if it is asynchronous nothing waits for a copy.
    """
    weights = {local_part(p).untyped_storage().data_ptr() for p in parameters}

    def pack(saved: Tensor) -> _Saved:
        # What FSDP has gathered is a parameter for as long as the forward lasts, and comes back into the same memory.
        gathered = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter)
        if gathered or saved.untyped_storage().data_ptr() in weights:
            return saved
        if not accelerator.asynchronous:
            return saved.device, saved.cpu()
        return saved.device, accelerator.empty_pinned(saved).copy_(saved, non_blocking=True)

    def unpack(saved: _Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        device, host = saved
        return host.to(device, non_blocking=accelerator.asynchronous)

    return saved_tensors_hooks(pack, unpack)


def transfer_label(route: Route, forward: bool) -> Label:
    """The name, in logs and errors, of what travels along a forward route, or of its gradient."""
    to = None if route.source == route.destination else route.destination
    return Label(edge_name(route.edge), route.source, "forward" if forward else "backward", to)


def edge_name(edge: Edge) -> str:
    """The name of a forward edge in logs and errors: its boundary, or `llm.0->llm.1` inside a module."""
    return str(edge) if edge.internal else f"{edge.key}->{edge.destination.module}"
