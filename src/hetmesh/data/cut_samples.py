"""Samples of which `training.seq_len` leaves a part, for people: such a sample trains on an answer without its end."""

from __future__ import annotations

import numpy as np

from hetmesh.data.loader import DrawnBatch

_SHOWN = 3


def describe_cut(drawn: DrawnBatch, seq_len: int) -> str:
    """Which samples are cut and still have targets, by their ids, and what they lose; empty if none is.

    Those that lose all of their targets are `describe_without_targets`'s.
    """
    shortened = (drawn.dropped_tokens > 0) | (drawn.dropped_media > 0)
    which = np.flatnonzero(shortened & (drawn.metas.num_targets > 0)).tolist()
    if not which:
        return ""
    shown = ", ".join(repr(drawn.given.ids[i]) for i in which[:_SHOWN])
    more = f" and {len(which) - _SHOWN} more" if len(which) > _SHOWN else ""
    answers = int((drawn.given.num_targets[which] > drawn.metas.num_targets[which]).sum())
    media = int(drawn.dropped_media[which].sum())
    lost = f"{int(drawn.dropped_tokens[which].sum())} tokens" + (f" and {media} media items" if media else "")
    return (
        f"training.seq_len = {seq_len} cuts {len(which)} of {len(drawn)} samples by {lost}: "
        f"{'sample' if len(which) == 1 else 'samples'} {shown}{more}; {answers} lose the end of an answer"
    )
