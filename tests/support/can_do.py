"""In which layouts a model can be trained, from what its adapters declare: the row of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Adapter
from hetmesh.models.weights.build import build_empty
from hetmesh.models.weights.lora import add_lora

YES, LLM, TOWER, NO = "yes", "LLM", "tower", "no"
"""A cell: all modules can, only the LLM, only the modules before it, none."""


@dataclass(frozen=True)
class _Lora:
    rank: int = 1
    alpha: float = 1.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] | None = None


def _takes_lora(name: str, adapter: Adapter) -> bool:
    try:
        with torch.device("meta"):
            add_lora(build_empty(adapter), _Lora(), name, 0, adapter.layers())
    except RecipeError:
        return False
    return True


def _exports(_: str, adapter: Adapter) -> bool:
    """Whether each of its tensors (of tied ones, one) has a name in the checkpoint that it came from, so that it can be
    exported."""
    module = build_empty(adapter)
    kept: dict[int, set[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        kept.setdefault(id(tensor), set()).add(name)
    return any(all(names & known.keys() for names in kept.values()) for known in map(dict, adapter.checkpoint_names))


COLUMNS: Mapping[str, Callable[[str, Adapter], bool]] = {
    "TP": lambda _, adapter: bool(adapter.tensor_parallel_plan()),
    "SP": lambda _, adapter: bool(adapter.abilities.with_stages().token_sharded),
    "FSDP": lambda _, adapter: bool(adapter.layers()),
    "PP": lambda _, adapter: adapter.abilities.with_stages().activation is not None,
    "CP": lambda _, adapter: (
        adapter.abilities.use_packed is not None and "context_parallel" not in adapter.abilities.reasons
    ),
    "packing": lambda _, adapter: adapter.abilities.use_packed is not None,
    "LoRA": _takes_lora,
    "export": _exports,
}
"""What one module must declare, by column. (An encoder that is packed or shared along `cp` must say so too.)"""


def can_do(adapters: Mapping[str, Adapter], sink: str) -> dict[str, str]:
    """Cell by column.

    Args:
        adapters: the modules' adapters.
        sink: the LLM's name.
    """
    row = {}
    for column, declares in COLUMNS.items():
        llm = declares(sink, adapters[sink])
        others = all(declares(name, adapter) for name, adapter in adapters.items() if name != sink)
        row[column] = {(True, True): YES, (True, False): LLM, (False, True): TOWER, (False, False): NO}[llm, others]
    return row
