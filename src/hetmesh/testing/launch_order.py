"""Whether ranks launch what they have on several communicators in orders that agree: pure values.

On a device each communicator has a queue of its own. What is at the head of two queues may run at once, or not: NCCL
promises nothing ("Using multiple NCCL communicators concurrently" in its manual), and where kernels of one rank hold
the device until those of another rank begin, which stand behind others there, nothing goes on. So launches must do
where each rank carries out one batch after another, whatever their communicators.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

Launch = tuple[str, str, Sequence[Sequence[int]]]
"""A batch: what it is, its communicator, and its messages: the peer, and 1 where it is sent to."""
_Message = tuple[str, int, int, int]  # communicator, sender, receiver, number among those


def stuck(launched: Mapping[int, Sequence[Launch]]) -> str:
    """Where ranks wait for each other in a circle, if each carries out its batches one after another; or nothing.

    Args:
        launched: per rank, its batches in the order of launching. Messages of one communicator between two ranks match
            in order.
    """
    messages = {rank: list(_messages(rank, batches)) for rank, batches in launched.items()}
    at = dict.fromkeys(launched, -1)
    left: dict[int, set[_Message]] = {rank: set() for rank in launched}
    begun: dict[_Message, int] = {}  # by the rank that came to it first
    todo = deque(launched)
    while todo:
        rank = todo.popleft()
        while not left[rank] and at[rank] + 1 < len(messages[rank]):
            at[rank] += 1
            for message in messages[rank][at[rank]]:
                if message in begun:
                    peer = begun.pop(message)
                    left[peer].discard(message)
                    todo.append(peer)
                else:
                    begun[message] = rank
                    left[rank].add(message)
    waiting = {rank: min(each) for rank, each in left.items() if each}
    if not waiting:
        return ""
    return ", ".join(
        f"rank {rank} stands at {launched[rank][at[rank]][0]} (communicator {message[0]}) and waits for rank "
        f"{message[2] if message[1] == rank else message[1]}"
        for rank, message in sorted(waiting.items())[:4]
    )


def _messages(rank: int, batches: Sequence[Launch]) -> list[set[_Message]]:
    counts: Counter[tuple[str, int, int]] = Counter()
    found = []
    for _, communicator, parts in batches:
        batch = set()
        for peer, sends in parts:
            way = (communicator, rank, peer) if sends else (communicator, peer, rank)
            batch.add((*way, counts[way]))
            counts[way] += 1
        found.append(batch)
    return found
