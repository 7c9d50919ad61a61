"""The sizes of token mixers that are no attention, by what their modules call them, whatever the family."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hetmesh.attention.mixers import uses_delta_rule
from hetmesh.cost.recurrence import Recurrence

_STATES = (
    ("num_v_heads", "num_k_heads", "head_k_dim", "head_v_dim", ""),
    ("num_heads", "n_groups", "ssm_state_size", "head_dim", "chunk_size"),
    ("num_attention_heads", "num_attention_heads", "head_dim", "head_dim", "block_size"),
)
"""Attributes of `Recurrence` in its order, heads to chunk, as Gated DeltaNet, Mamba-2 and lightning attention have
them."""
LEAVING = ("out_proj", "o_proj")
"""Names of the projection behind a mixer."""


def recurrence_of(mixer: nn.Module) -> Recurrence:
    """What `mixer` remembers. Of one that names its sizes otherwise only a convolution is known."""
    depthwise = (part for part in mixer.modules() if isinstance(part, nn.Conv1d) and part.groups > 1)
    convolution = next(depthwise, None)
    short = Recurrence()
    if convolution is not None:
        short = Recurrence(convolved=convolution.in_channels, kernel=convolution.kernel_size[0])
    for *names, chunk in _STATES:
        sizes: list[Any] = [getattr(mixer, name, None) for name in names]
        if all(isinstance(size, int) for size in sizes):
            of_states = dict(zip(("heads", "key_heads", "key_width", "value_width"), sizes, strict=True))
            tokens = getattr(mixer, chunk, Recurrence.chunk)
            return replace(short, **of_states, delta_rule=uses_delta_rule(mixer), chunk=tokens)
    return short


def in_order(names: Collection[str], mixers: Sequence[str]) -> list[str]:
    """Names of a layer's parameters, those of `mixers` first and in the order in which they are used: what enters, a
    convolution, what leaves."""

    def place(name: str) -> int:
        mixer = next((mixer for mixer in mixers if name.startswith(f"{mixer}.")), None)
        if mixer is None:
            return 4
        part = name.removeprefix(f"{mixer}.").split(".")[0]
        return 3 if part in LEAVING else 1 if part.startswith("conv") else 2 if "norm" in part else 0

    return sorted(names, key=place)
