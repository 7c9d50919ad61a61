"""Whether a checkpoint fits the modules and optimizers at hand: names, shapes and types; of weights of another run also
which tensors are missing or left over, and adapters of another rank. Errors are the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetmesh.boundary import World
from hetmesh.boundary.world import gather_objects
from hetmesh.checkpoint.reading import first_of
from hetmesh.checkpoint.resume import RunState
from hetmesh.data.position import CHECKSUMS, ORDER, PART_CHECKSUMS, PART_LENGTHS
from hetmesh.errors import RecipeError
from hetmesh.formatting import listed
from hetmesh.models.weights.lora import ADAPTER, base_name, is_adapter

MODEL = "model."
"""Prefix of the names of parameters and buffers in a checkpoint."""

OPTIMIZER_STATE = "optimizer.state."
"""That of the names of what optimizers hold of parameters."""

_N_DIFFERENCES = 3  # that an error names
_N_NAMES = 8  # in one message


def check_fit(world: World, path: Path, state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Compare what this rank wants to read with what the checkpoint at `path` holds. Collective. Raises RecipeError:
    they differ on some rank; the same on all, before anything is read."""
    by_rank = gather_objects((set(state), differences(state, saved)), world, f"comparing {path} with the recipe")
    keys = set().union(*(names for names, _ in by_rank))
    expected, there = _modules(keys), _modules(saved)
    if expected != there:
        raise RecipeError(
            f"checkpoint {path} does not fit this recipe: it holds the modules {sorted(there)}, the recipe has "
            f"{sorted(expected)}"
        )
    surplus = sorted(key for key in saved if key not in keys and not key.startswith("random."))
    wrong = [*dict.fromkeys(text for _, texts in by_rank for text in texts), *(f"{key} is not used" for key in surplus)]
    if wrong:
        raise RecipeError(f"checkpoint {path} does not fit this recipe: {first_of(wrong, _N_DIFFERENCES)}")


def optional(key: str, saved: Iterable[str]) -> bool:
    """Whether a checkpoint may lack `key`: the random state of a rank that did not exist; the recipe and the samples
    looked at, which older ones do not hold; the optimizer's state of a parameter that never had a gradient (and none
    must be made up, for it would begin with another step count)."""
    newer = ("run", CHECKSUMS, PART_CHECKSUMS, PART_LENGTHS, ORDER)
    if key.startswith("random.") or key in [f"extra.{name}" for name in newer]:
        return True
    parameter = key.rpartition(".")[0]
    return key.startswith(OPTIMIZER_STATE) and not any(k.startswith(f"{parameter}.") for k in saved)


def differences(state: Mapping[str, Any], saved: Mapping[str, Any], cast: Collection[torch.dtype] = ()) -> list[str]:
    """What this rank needs and the checkpoint lacks or has in another shape or dtype, in words; those of `cast` are as
    good as each other."""
    wrong = []
    for key, value in state.items():
        if key not in saved:
            wrong.append(f"it lacks {key}")
            continue
        entry = saved[key]
        was = (list(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        now = (list(value.shape), value.dtype) if isinstance(value, Tensor) else None
        alike = was and now and was[0] == now[0] and {was[1], now[1]} <= {*cast}
        if was != now and not alike:
            wrong.append(f"{key} was {_described(was)} and is {_described(now)}")
    return wrong


def _described(tensor: tuple[list[int], torch.dtype] | None) -> str:
    return "no tensor" if tensor is None else f"{tensor[1]} {tensor[0]}".removeprefix("torch.")


def _modules(keys: Iterable[str]) -> set[str]:
    return {module_of(key) for key in keys if key.startswith(MODEL)}


@dataclass(frozen=True)
class Needs:
    """What the modules of one rank need of a checkpoint.

    Attributes:
        state: what is read, by name in the checkpoint.
        names: in the checkpoint, of all that the modules have, read or not.
        excluded: those of `exclude_from_loading` that match something.
        wrong: what the checkpoint does not have like that, in words.
        lora: rank and alpha of the modules' adapters.
    """

    state: Mapping[str, Tensor] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    wrong: tuple[str, ...] = ()
    lora: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, root: nn.Module, exclude: Sequence[str], saved: Mapping[str, Any], referred: Collection[str]) -> Needs:
        """Of the modules under `root`, each tensor by the name that it has there, else by that without adapters.
        `referred`: modules that the checkpoint does not hold."""
        lora = {name: found for name, module in root.named_children() if (found := _adapters(module))}
        ranks, wrapped = _ranks(saved), {base_name(key) for key in saved if base_name(key) != key}
        state: dict[str, Tensor] = {}
        names, excluded, fitting = set(), set(), {}
        for name, tensor in root.state_dict().items():
            key = f"{MODEL}{name}" if f"{MODEL}{name}" in saved else f"{MODEL}{base_name(name)}"
            names.add(key)
            matching = {prefix for prefix in exclude if _within(name, prefix)}
            excluded |= matching
            if matching or (is_adapter(name) and key not in saved):  # new adapters start afresh
                continue
            state[key] = tensor
            module = module_of(key)
            other_rank = is_adapter(key) and ranks.get(module) != lora.get(module, (None,))[0]
            absent = key not in saved and (key in wrapped or module in referred)
            if not other_rank and not absent:  # of which `verdict` has more to say
                fitting[key] = tensor
        # With `[training] dtype = "bfloat16"` what is frozen is in bf16, and what is trained is not.
        wrong = tuple(differences(fitting, saved, cast=(torch.float32, torch.bfloat16)))
        return cls(state, frozenset(names), frozenset(excluded), wrong, lora)


def verdict(ranks: Sequence[Needs], exclude: Sequence[str], saved: Mapping[str, Any], run: RunState) -> list[str]:
    """Why a checkpoint that holds `saved` does not fit what all `ranks` need; empty if it does. `run`: what the
    checkpoint says about its run."""
    names = frozenset().union(*(needs.names for needs in ranks))
    lora = {name: rank_and_alpha for needs in ranks for name, rank_and_alpha in needs.lora.items()}
    mine = {module_of(name) for name in names}
    wrong = [*_of_adapters(names, lora, saved, run)]
    for module in sorted(set(run.references) & mine - {module_of(k) for k in saved if k.startswith(MODEL)}):
        if any(module_of(name) == module and not _excluded(name, exclude) for name in names):
            place = run.references[module]["path"]
            wrong.append(
                f"it does not hold modules.{module}, which was frozen, but refers to {place}: give that as "
                f"modules.{module}.initial_load_path, and name {module!r} in checkpoint.exclude_from_loading"
            )
    wrong += dict.fromkeys(text for needs in ranks for text in needs.wrong)
    over: dict[str, list[str]] = {}
    for key in saved:
        if key.startswith(MODEL) and module_of(key) in mine and key not in names and not _excluded(key, exclude):
            over.setdefault(module_of(key), []).append(key.removeprefix(MODEL))
    for module, rest in sorted(over.items()):
        layers = sorted({layer for name in rest if is_adapter(name) and (layer := _layer(name))})
        if layers:
            wrong.append(_adapters_over(module, layers, lora, _ranks(saved)))
        if others := sorted(name for name in rest if _layer(name) not in layers):
            wrong.append(
                f"modules.{module} has no use for {len(others)} of its tensors: {listed(others, _N_NAMES)}; give the "
                "module the config that it had, or name them, or what they are in, in checkpoint.exclude_from_loading"
            )
    return wrong


def left_out(ranks: Iterable[Needs], exclude: Sequence[str], saved: Iterable[str]) -> list[str]:
    """Modules of the checkpoint that no rank has and that are not excluded."""
    mine = {module_of(name) for needs in ranks for name in needs.names}
    return sorted({module_of(k) for k in saved if k.startswith(MODEL) and not _excluded(k, exclude)} - mine)


def unused(ranks: Iterable[Needs], exclude: Sequence[str], saved: Iterable[str]) -> list[str]:
    """Those of `exclude` that match neither a tensor of the modules nor one of the checkpoint."""
    rest = set(exclude).difference(*(needs.excluded for needs in ranks))
    return sorted(rest - {prefix for key in saved if rest for prefix in rest if _excluded(key, [prefix])})


def module_of(key: str) -> str:
    """Whose tensor `model.<module>.<name>` is."""
    return key.split(".")[1]


def _excluded(key: str, exclude: Iterable[str]) -> bool:
    return key.startswith(MODEL) and any(_within(key.removeprefix(MODEL), prefix) for prefix in exclude)


def _within(name: str, prefix: str) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for key in (name, base_name(name)))


def _adapters(module: nn.Module) -> tuple[int, float] | None:
    """Rank and alpha of a module's adapters, which all have the same."""
    layers: Iterable[Any] = (layer for layer in module.modules() if ADAPTER in getattr(layer, "lora_alpha", ()))
    return next(((layer.r[ADAPTER], float(layer.lora_alpha[ADAPTER])) for layer in layers), None)


def _ranks(saved: Mapping[str, Any]) -> dict[str, int]:
    """Of the adapters in a checkpoint, by module."""
    entries = ((k, e) for k, e in saved.items() if k.startswith(MODEL) and ".lora_A." in k)
    return {module_of(k): e.size[0] for k, e in entries if isinstance(e, TensorStorageMetadata) and len(e.size)}


def _layer(name: str) -> str:
    """The linear layer that a tensor of an adapter, or one beside an adapter, belongs to; empty for others."""
    for part in (".lora_A.", ".lora_B.", ".base_layer."):
        if part in name:
            return name.partition(part)[0]
    return ""


def _of_adapters(
    names: Iterable[str], lora: Mapping[str, tuple[int, float]], saved: Mapping[str, Any], run: RunState
) -> Iterable[str]:
    """In what adapters that are read differ from those of the run."""
    there = _ranks(saved)
    for module in sorted({module_of(n) for n in names if is_adapter(n) and n in saved} & lora.keys()):
        rank, alpha = lora[module]
        if rank != there.get(module):
            yield f"modules.{module}.lora.rank = {rank}: its adapters have rank {there.get(module)}; write that"
        was: Any = run.recipe
        for key in ("modules", module, "lora", "alpha"):
            was = was.get(key) if isinstance(was, Mapping) else None
        if isinstance(was, int | float) and was != alpha:
            yield (
                f"modules.{module}.lora.alpha = {alpha:g}: its adapters were trained with {was:g}, and would count "
                "otherwise; write that"
            )


def _adapters_over(
    module: str, layers: Sequence[str], lora: Mapping[str, tuple[int, float]], ranks: Mapping[str, int]
) -> str:
    here = "other target_modules" if module in lora else "no adapters"
    return (
        f"it has adapters (LoRA) of rank {ranks.get(module)} beside {len(layers)} layers of modules.{module}, which "
        f"has {here} there ({listed(layers, 3)}): give it the modules.{module}.lora that the run had, or merge them "
        f"first (hetmesh export RUN DIR) and start from DIR (model.hf_path, or modules.{module}.initial_load_path)"
    )
