"""Whether the token mixers of a decoder can take samples in one row: tried, not known by names.

One layer of each kind runs to the end of its mixers with random weights: samples apart by the model's own forward, then
all in one row as training would run them, first with hetmesh's functions in place of transformers', else padded. What
differs is refused; so is a layer that does not hand on which samples there are.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.mixers import CACHES, has_functions, looks_in_registry, mixers, use_in_mixer
from hetmesh.context import causal, join
from hetmesh.models.weights.fill_module import materialize

LENGTHS = (5, 70, 2)
TOLERANCE = 1e-4
"""Of outputs, as a share of the largest: transformers' own casts are to fp32. A state that leaks changes them by a
tenth and more."""


class _Reached(Exception):
    """All mixers of a layer have run: what comes behind them need not."""


def padded_mixers(decoder: Any, blocks: Mapping[str, nn.Module], name: str, axes: tuple[int, ...] = ()) -> bool | str:
    """Whether the mixers of a layer take samples in one row only if these are padded; or why they cannot.

    Args:
        decoder: without weights. Those of the mixers are made here, and layers but this one do nothing any more.
        blocks: all layers of the decoder, by names.
        axes: of positions, in front of `[1, rows]`.
    """
    if (block := blocks.get(name)) is None:
        return "they are not found among the layers of its decoder"
    for other in blocks.values():
        other.__dict__.pop("forward", None)
        if other is not block:
            other.forward = lambda hidden_states, *_, **__: hidden_states
    for part in decoder.modules():
        names = inspect.signature(part.forward).parameters.keys()
        if part is not decoder and CACHES & names and "input_ids" in names:
            return f"its {type(part).__name__} reads the ids of earlier tokens"
    found = list(mixers(block))
    if not found or any(looks_in_registry(part) for part in block.modules()):
        return "what they remember of earlier tokens is not known"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        norms = [part for part in block.modules() if all(p.ndim < 2 for p in part.parameters())]
        for part in (*found, *norms):
            empty = [name for name, p in part.named_parameters() if p.is_meta]
            materialize(part, torch.device("cpu"))
            for name in empty:
                made = part.get_parameter(name)
                made.normal_(std=made[0].numel() ** -0.5)
        samples = [torch.randn(1, length, decoder.config.hidden_size) for length in LENGTHS]
        try:
            apart = torch.cat([_mixed(decoder, found, sample, axes) for sample in samples], -2)
        except Exception as error:
            return f"they could not be tried: {type(error).__name__}: {error}"
        state = ContextAttention(join(map(causal, LENGTHS)), name="mixer probe")
        why = ""
        for padded in (False, True):
            if not padded and not all(map(has_functions, found)):
                continue
            for part in found:
                part.__dict__.pop("forward", None)
                use_in_mixer(part, padded)
            try:
                row = _mixed(decoder, found, torch.cat(samples, 1), axes, attention_state=state)
            except Exception as error:
                why = f"tried in one row: {type(error).__name__}: {error}"
                continue
            if float((row - apart).abs().max()) < TOLERANCE * float(apart.abs().max()):
                return padded
            why = "samples in one row change each other's results"
    return why


def _mixed(decoder: Any, parts: Sequence[nn.Module], tokens: Tensor, axes: tuple[int, ...], **more: Any) -> Tensor:
    """What the mixers make of samples in one row: `[mixers, rows, features]`."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        outputs.append(output if isinstance(output, Tensor) else output[0])
        if len(outputs) == len(parts):
            raise _Reached

    handles = [part.register_forward_hook(keep) for part in parts]
    lengths = LENGTHS if more else (tokens.shape[1],)
    at = torch.cat([torch.arange(length) for length in lengths]).expand(*axes, 1, -1)
    mask = tokens.new_zeros(1, 1, 1, 1) if more else None
    try:
        decoder(inputs_embeds=tokens, position_ids=at, attention_mask=mask, use_cache=False, **more)
    except _Reached:
        return torch.cat(outputs)
    finally:
        for handle in handles:
            handle.remove()
    raise RuntimeError(f"only {len(outputs)} of {len(parts)} mixers ran")
