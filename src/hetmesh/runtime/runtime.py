"""The runtime: each rank runs its own subsequence of a schedule. The autograd graph is cut at the edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hetmesh.balance import BatchPlan
from hetmesh.boundary import Exchange, Label, World
from hetmesh.boundary.watchdog import timed_out
from hetmesh.errors import BoundaryError, BoundaryTimeout
from hetmesh.graph import BoundarySpec, Edge, ModuleGraph, Stage
from hetmesh.layout import TransferPlan, plan_transfer
from hetmesh.schedule import Action, Kind, Schedule

LoadBatch = Callable[[str, int], Mapping[str, Tensor]]
"""(module, microbatch) -> the module's own inputs on this rank's lane, on the CPU."""

Loss = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""(output of the sink, its batch) -> the summed loss of this lane and microbatch, a scalar."""

Observe = Callable[[int, Tensor, Mapping[str, Tensor]], None]
"""(microbatch, detached output of the sink, its batch): called after each forward of the sink."""


class Runtime:
    """Executes schedules on this rank.

    Args:
        world: this process.
        graph: the modules.
        modules: the modules of which this rank is a member, parallelised; called with a batch and the rows by source.
        reducers: per such module, what sums its gradients over its mesh (the REDUCE action).
        loss: the summed loss.
        dtypes: of the rows that each module emits, and so of their gradients.
        lowering: of boundary transfers; see `hetmesh.boundary.lowering`.

    Build it on every rank of the job: it creates the process groups that boundaries may need.
    """

    def __init__(
        self,
        world: World,
        graph: ModuleGraph,
        modules: Mapping[str, nn.Module],
        *,
        reducers: Mapping[str, Callable[[], None]],
        loss: Loss,
        dtypes: Mapping[str, torch.dtype],
        lowering: str = "auto",
    ) -> None:
        self.world, self.graph, self.modules = world, graph, modules
        self.reducers, self.loss, self.dtypes, self.lowering = reducers, loss, dtypes, lowering
        for boundary in graph.boundaries:
            ends = graph[boundary.source].mesh.ranks + graph[boundary.destination].mesh.ranks
            world.group(sorted(set(ends)))

    def run(self, schedule: Schedule, plan: BatchPlan, load_batch: LoadBatch, observe: Observe | None = None) -> Tensor:
        """Run one step on this rank.

        Returns:
            The summed loss of this rank's lane over all microbatches, detached, float64 on the CPU; 0 on ranks
            outside the sink. Gradients, if the schedule trains, are added to `.grad` as sums over the whole batch.

        Raises:
            BoundaryTimeout: a wait outlasted the timeout; names boundary or action, microbatch and rank.
        """
        step = _Step(self, schedule, plan, load_batch, observe)
        with torch.set_grad_enabled(schedule.training):
            for action in schedule.actions:
                if step.takes_part(action):
                    with self._guarded(action):
                        step.execute(action)
            step.drain()
        return step.loss_sum

    @contextmanager
    def _guarded(self, action: Action) -> Iterator[None]:
        rank = self.world.rank
        try:
            with self.world.watchdog.watching(f"{action} on rank {rank}"):
                yield
        except BoundaryError as error:
            raise BoundaryError(f"{action}: {error}") from error
        except Exception as error:
            if isinstance(error, RuntimeError) and timed_out(error):
                raise BoundaryTimeout(
                    f"{action}: rank {rank} waited {self.world.timeout:g} s in a collective of the module"
                ) from error
            error.add_note(f"during {action} on rank {rank}")
            raise


class _Step:
    """What one rank keeps while it runs one schedule."""

    def __init__(
        self, runtime: Runtime, schedule: Schedule, plan: BatchPlan, load_batch: LoadBatch, observe: Observe | None
    ) -> None:
        self.runtime, self.schedule, self.plan = runtime, schedule, plan
        self.load_batch, self.observe = load_batch, observe
        self.boundaries: dict[Edge, BoundarySpec] = {}
        self.tags: dict[Edge, int] = {}
        for i, (boundary, edge) in enumerate(zip(runtime.graph.boundaries, schedule.stages.edges, strict=True)):
            self.boundaries[edge] = self.boundaries[edge.reversed] = boundary
            self.tags[edge], self.tags[edge.reversed] = 2 * i, 2 * i + 1
        self.leaves: dict[tuple[Edge, int], Tensor] = {}
        self.outputs: dict[tuple[Stage, int], Tensor] = {}
        self.gradients: dict[tuple[Stage, int], Tensor] = {}
        self.plans: dict[tuple[BoundarySpec, int], TransferPlan] = {}
        self.exchanges: dict[tuple[Edge, int], Exchange] = {}
        self.sent: set[tuple[Edge, int]] = set()
        self.taken: set[tuple[Edge, int]] = set()
        self.loss_sum = torch.zeros((), dtype=torch.float64)

    def takes_part(self, action: Action) -> bool:
        """Whether this rank belongs to what the action works on.

        Both sides of an edge take part in its SEND: the receiving one posts its receives there. So every rank starts
        its transfers in the schedule's order, which collectives need, and NCCL's messages, which have no tags.
        """
        modules, target = self.runtime.modules, action.target
        if isinstance(target, Stage):
            return target.module in modules
        receives = target.destination.module in modules
        return receives or (action.kind is Kind.SEND and target.source.module in modules)

    def execute(self, action: Action) -> None:
        target, m = action.target, action.microbatch
        if isinstance(target, Edge):
            (self._send if action.kind is Kind.SEND else self._receive)(target, m)
        elif action.kind is Kind.FORWARD:
            self._forward(target, m)
        elif action.kind is Kind.BACKWARD:
            self._backward(target, m)
        elif action.kind is Kind.REDUCE:
            self.runtime.reducers[target.module]()
        else:
            raise NotImplementedError(f"the runtime cannot execute {action}")

    def _forward(self, stage: Stage, m: int) -> None:
        runtime, stages = self.runtime, self.schedule.stages
        device = runtime.world.device
        batch = {key: value.to(device) for key, value in self.load_batch(stage.module, m).items()}
        inputs = {edge.source.module: self._input(edge, m) for edge in stages.inputs(stage)}
        # Where no gradient is needed nothing is kept for a backward: a frozen encoder holds no activations.
        with torch.set_grad_enabled(self.schedule.training and stage in stages.backward_stages):
            output = runtime.modules[stage.module](batch, inputs)
        if stage == stages.sink:
            if self.observe is not None:
                self.observe(m, output.detach(), batch)
            output = runtime.loss(output, batch)
            self.loss_sum += output.detach().double().cpu()
        self.outputs[stage, m] = output

    def _backward(self, stage: Stage, m: int) -> None:
        output = self.outputs.pop((stage, m))
        if stage == self.schedule.stages.sink:
            output.backward()
        else:
            torch.autograd.backward(output, self.gradients.pop((stage, m)))

    def _input(self, edge: Edge, m: int) -> Tensor:
        """The rows of an edge; kept for a backward only where their gradient is sent back."""
        leaf = self.leaves[edge, m]
        if not leaf.requires_grad:
            del self.leaves[edge, m]
        return leaf

    def _send(self, edge: Edge, m: int) -> None:
        self._exchange(edge, m)
        if edge.source.module not in self.runtime.modules:
            return
        self.sent.add((edge, m))
        stages = self.schedule.stages
        kept = self.schedule.training and edge.source in stages.backward_stages
        if edge in stages.edges and not kept and all((e, m) in self.sent for e in stages.outputs(edge.source)):
            del self.outputs[edge.source, m]  # nothing will come back for it

    def _receive(self, edge: Edge, m: int) -> None:
        received = self._exchange(edge, m).finish_receiving()
        assert received is not None
        self.taken.add((edge, m))
        if edge in self.schedule.stages.edges:
            needs_gradient = self.schedule.training and edge in self.schedule.stages.gradient_edges
            self.leaves[edge, m] = received.requires_grad_(needs_gradient)
            return
        key = (edge.destination, m)
        # One module may feed several consumers: their gradients are summed, in the order of the schedule.
        self.gradients[key] = self.gradients[key] + received if key in self.gradients else received

    def _exchange(self, edge: Edge, m: int) -> Exchange:
        """The transfer along `edge`; SEND starts it."""
        if (edge, m) not in self.exchanges:
            self._forget()
            runtime = self.runtime
            forward = edge in self.schedule.stages.edges
            boundary = self.boundaries[edge]
            label = Label(boundary.name, m, "forward" if forward else "backward")
            local = None
            if edge.source.module in runtime.modules:
                local = self.outputs[edge.source, m].detach() if forward else self._leaf_gradient(edge.reversed, m)
            tag = 2 * len(runtime.graph.boundaries) * m + self.tags[edge]
            exchange = Exchange(
                runtime.world,
                self._transfer_plan(boundary, m, forward),
                local,
                runtime.dtypes[boundary.source],
                label,
                lowering=runtime.lowering,
                tag=tag,
            )
            self.exchanges[edge, m] = exchange.start()
        return self.exchanges[edge, m]

    def _transfer_plan(self, boundary: BoundarySpec, m: int, forward: bool) -> TransferPlan:
        if (boundary, m) not in self.plans:
            shape, src, dst = self.plan.layouts(boundary, m)
            plan = plan_transfer(shape, src, dst, ranks_per_node=self.runtime.world.ranks_per_node)
            self.plans[boundary, m] = plan
        plan = self.plans[boundary, m]
        return plan if forward else plan.transpose()

    def _leaf_gradient(self, edge: Edge, m: int) -> Tensor:
        leaf = self.leaves.pop((edge, m))
        return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad

    def _forget(self) -> None:
        """Let go of transfers that are over, so that their buffers do not pile up over many microbatches."""
        rank = self.runtime.world.rank
        over = [
            key
            for key, exchange in self.exchanges.items()
            if (key in self.taken or rank not in exchange.plan.dst.mesh) and exchange.completed()
        ]
        for key in over:
            del self.exchanges[key]

    def drain(self) -> None:
        """Wait for the sends that are still in flight."""
        for exchange in self.exchanges.values():
            exchange.finish()
