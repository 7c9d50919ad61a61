"""Token mixers of transformers that are no attention: recurrences and short convolutions, which know no samples.

They are known by their forward: it takes a cache, and does not look in the registry of attention functions. What they
remember of earlier tokens goes through functions of their file. Where hetmesh has these (`FUNCTIONS`), the forward runs
with hetmesh's own in their place, which begin anew at each sample and go on across ranks. Any other mixer gets the
samples beside each other, padded. Which of the two is right, models try
(`models/split/mixer_probe.py`). As attention does, they get the microbatch as the keyword `attention_state`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from hetmesh._torch_compat import not_compiled
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.flex import on_device
from hetmesh.attention.in_transformers import counter
from hetmesh.attention.recurrence import shared_convolution, shared_delta_rule
from hetmesh.context.pieces import sample_starts
from hetmesh.errors import BoundaryError

CACHES = frozenset({"cache", "past_key_values", "cache_params"})
"""The names by which forwards of transformers have called their cache."""


def mixers(block: nn.Module) -> Iterator[nn.Module]:
    """The parts of a decoder layer that remember earlier tokens otherwise than by attention."""
    for part in list(block.modules())[1:]:
        below = list(part.modules())
        if _remembers(part) and not any(map(_remembers, below[1:])) and not any(map(looks_in_registry, below)):
            yield part


def looks_in_registry(part: nn.Module) -> bool:
    """Whether it is an attention that goes through transformers' registry of attention functions."""
    return "ALL_ATTENTION_FUNCTIONS" in _forward(part).__code__.co_names


def _remembers(part: nn.Module) -> bool:
    return bool(CACHES & inspect.signature(_forward(part)).parameters.keys())


def _forward(part: nn.Module) -> Any:
    """What its class computes, without decorators."""
    return inspect.unwrap(type(part).forward)


def has_functions(mixer: nn.Module) -> bool:
    """Whether hetmesh has functions by which it remembers: if no others, ranks can share its tokens."""
    return bool(FUNCTIONS.keys() & set(_forward(mixer).__code__.co_names))


def uses_delta_rule(mixer: nn.Module) -> bool:
    """Whether its forward calls a function for the delta rule."""
    return any("delta_rule" in name for name in _forward(mixer).__code__.co_names)


def use_in_mixer(mixer: nn.Module, padded: bool) -> None:
    """Let `mixer` take samples in one row. `padded`: as if they lay beside each other, by its own forward."""
    forward: Any = mixer.forward
    if not padded:
        plain = _forward(mixer)
        functions = {n: partial(own, plain.__globals__[n]) for n, own in FUNCTIONS.items() if n in plain.__globals__}
        changed = types.FunctionType(
            plain.__code__, {**plain.__globals__, **functions}, plain.__name__, plain.__defaults__, plain.__closure__
        )
        changed.__kwdefaults__ = plain.__kwdefaults__
        forward = types.MethodType(changed, mixer)
    mixer.forward = not_compiled(partial(_beside if padded else _in_one_row, forward, mixer))


def _in_one_row(forward: Callable[..., Any], mixer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    state = _counted(mixer, kwargs)
    return forward(*args, **kwargs, **({} if state is None else {"attention_state": state}))


def _beside(forward: Callable[..., Any], mixer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Samples `[1, rows, ...]` one after another -> the same through a forward of `[samples, longest, ...]`."""
    state = _counted(mixer, kwargs)
    if state is None or not state.rows:
        return forward(*args, **kwargs)
    if len(state.shares) > 1:
        raise BoundaryError(f"{state.name}: ranks cannot share the tokens of a {type(mixer).__name__}")
    starts = sample_starts(state.mask)
    lengths = np.diff(starts, append=state.rows)
    column = np.arange(lengths.max())
    real = column < lengths[:, None]
    device = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).device
    rows = on_device(np.where(real, starts[:, None] + column, 0), device)
    back = on_device(np.flatnonzero(real), device)

    def padded(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(padded, x))
        return x[0][rows] if isinstance(x, Tensor) and x.shape[:2] == (1, state.rows) else x

    out = forward(*map(padded, args), **{name: padded(x) for name, x in kwargs.items()})
    first = (out if isinstance(out, Tensor) else out[0]).flatten(0, 1)[back][None]
    return first if isinstance(out, Tensor) else (first, *out[1:])


def _counted(mixer: nn.Module, kwargs: dict[str, Any]) -> ContextAttention | None:
    """The microbatch among the arguments, of which it and masks are taken out; None where samples are padded."""
    state = kwargs.pop("attention_state", None)
    if state is not None:
        kwargs |= {name: None for name in ("attention_mask", "conv_mask") if name in kwargs}
        counter[state.name, getattr(mixer, "layer_idx", -1)] += 1
    return state


def _convolution(
    plain: Callable[..., Any],
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    attention_state: ContextAttention | None = None,
    **kwargs: Any,
) -> Tensor:
    """transformers' `causal_conv1d_fn`: `[1, features, rows]`."""
    if attention_state is None:
        return plain(hidden_states, weight, bias, activation=activation, **kwargs)
    return shared_convolution(hidden_states[0].T, weight, bias, activation, attention_state).T[None]


def _delta_rule(
    plain: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    attention_state: ContextAttention | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' `torch_chunk_gated_delta_rule`: `[1, rows, heads, features]`."""
    if attention_state is None:
        return plain(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs)
    query, key, value, g, beta = (x[0] for x in (query, key, value, g, beta))
    return shared_delta_rule(query, key, value, g, beta, attention_state, use_qk_l2norm_in_kernel)[None], None


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
}
"""Functions of transformers through which tokens reach later ones, and hetmesh's own, which get theirs first."""
