"""Lending by chance: where what runs in gaps is halted must not matter, so tests halt it anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

from hetmesh.graph import Routes
from hetmesh.runtime.side import Side
from hetmesh.schedule import PolicyOptions, Schedule, bubble_fill
from hetmesh.simulate import StepModel


@contextmanager
def drawn_lending(seed: int, most: int = 4) -> Iterator[list[int]]:
    """In the body this rank does a drawn number of pieces in each gap, 0 to `most`, however long the gap is. Places are
    as late as they can be, so that there is most to do.

    Args:
        seed: of the draws, together with the rank.

    Yields:
        The pieces that were done in each gap with something to do, once it is over.
    """
    lend, done, draws = Side.lend, list[int](), dict[int, Random]()

    def drawn(side: Side, _: Callable[[], bool]) -> None:
        random = draws.setdefault(side.rank, Random(f"{seed} {side.rank}"))
        pieces, count = random.randint(0, most), 0

        def enough() -> bool:
            nonlocal count
            count += 1
            return count > pieces

        lend(side, enough)
        if count:
            done.append(count - 1)

    def late(model: StepModel, routes: Routes, options: PolicyOptions, *_: object) -> Schedule:
        return bubble_fill(model.stages, routes, True, options)

    with patch.object(Side, "lend", drawn), patch("hetmesh.resolve.schedules.fill_typical_beside", late):
        yield done
