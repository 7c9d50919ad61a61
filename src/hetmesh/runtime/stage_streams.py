"""Which stream a rank runs each stage on: slices that fill gaps of other stages have a separate one, so that the device
fills a gap whenever it occurs, not only where the schedule expects it. Where they run in collectives of the others,
these have one of high priority: the device then gives slices only what the others leave."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from hetmesh.boundary.accelerator import Accelerator, Event, Stream
from hetmesh.graph import Edge, Route, Stage
from hetmesh.schedule import Action, Kind, Schedule


class StageStreams:
    """The streams of one rank in one step. What is queued on the current stream when this is made runs first.

    A transfer starts on the stream of its source, and arrives on that of its destination, where this rank has both;
    what passes between two streams waits for an event, and keeps its memory until the second has read it. `side`: for
    the slices; None runs everything on the current stream. `first`: for the others, where slices run in their
    collectives. The same in all steps: memory is a stream's.
    """

    def __init__(
        self, accelerator: Accelerator, schedule: Schedule, rank: int, side: Stream | None, first: Stream | None
    ) -> None:
        self.accelerator, self.schedule = accelerator, schedule
        self._stages = frozenset(s for s in schedule.stages.stages if rank in schedule.stages.ranks_of(s))
        beside = self._stages & schedule.beside
        self._side = side if beside and beside != self._stages else None
        self._beside = frozenset() if self._side is None else beside
        self._around = accelerator.current_stream()
        self._first = first if schedule.in_collectives and self._side is not None else None
        self._own = self._first or self._around
        self._sent: dict[Route, Event] = {}
        self._started = [stream for stream in (self._side, self._first) if stream is not None]
        for stream in self._started:
            stream.wait_event(self._reached())

    def of(self, action: Action) -> AbstractContextManager[object]:
        """A context in which `action` is queued."""
        target = action.target
        stage = target if isinstance(target, Stage) else self._end(target, action.kind)
        stream = self._side if stage in self._beside else self._first
        return nullcontext() if stream is None else self.accelerator.on(stream)

    def sending(self, route: Route, rows: Tensor) -> None:
        """`rows` are about to start along `route`, on the stream of its source."""
        if self._crosses(route.edge):
            self.accelerator.used_by(rows, self._stream(route.edge.destination))

    def sent(self, route: Route) -> None:
        """The rows of `route` have started."""
        if self._crosses(route.edge):
            self._sent[route] = self._reached()

    def receive(self, route: Route) -> None:
        """What comes along `route` is about to be received, on the stream of its destination."""
        if route in self._sent and (stream := self._stream(route.edge.destination)) is not None:
            stream.wait_event(self._sent[route])

    def received(self, route: Route, rows: Tensor) -> None:
        """`rows` have come along `route`, on the stream of its destination; they were made on that of its source."""
        if self._sent.pop(route, None) is not None:
            self.accelerator.used_by(rows, self._stream(route.edge.destination))

    def join(self) -> None:
        """What is queued from here on runs after everything on all streams."""
        for stream in self._started:
            with self.accelerator.on(stream):
                over = self._reached()
            if self._around is not None:
                self._around.wait_event(over)

    def _end(self, edge: Edge, kind: Kind) -> Stage:
        """The end of an edge that this rank holds; for a SEND the source, if it holds both."""
        here = edge.source in self._stages and (kind is Kind.SEND or edge.destination not in self._stages)
        return edge.source if here else edge.destination

    def _crosses(self, edge: Edge) -> bool:
        return {edge.source, edge.destination} <= self._stages and (
            (edge.source in self._beside) != (edge.destination in self._beside)
        )

    def _stream(self, stage: Stage) -> Stream | None:
        return self._side if stage in self._beside else self._own

    def _reached(self) -> Event:
        event = self.accelerator.event()
        event.record()
        return event
