"""Whether the weights of another run are those of the modules at hand: what is missing, what is left over, whose
adapters are others; in words that are the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hetmesh.checkpoint.fit import differences
from hetmesh.checkpoint.resume import RunState
from hetmesh.models.weights.lora import ADAPTER, base_name, is_adapter

MODEL = "model."
"""What names of parameters and buffers begin with in a checkpoint."""

_SHOWN = 8  # names in one message


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

        Args:
            referred: modules that the checkpoint does not hold.
        """
        lora = {name: found for name, module in root.named_children() if (found := _adapters(module))}
        ranks, wrapped = _ranks(saved), {base_name(key) for key in saved if base_name(key) != key}
        state: dict[str, Tensor] = {}
        names, excluded, fitting = set(), set(), {}
        for name, tensor in root.state_dict().items():
            key = f"{MODEL}{name}" if f"{MODEL}{name}" in saved else f"{MODEL}{base_name(name)}"
            names.add(key)
            matching = {each for each in exclude if _within(name, each) or _within(base_name(name), each)}
            excluded |= matching
            if matching or (is_adapter(name) and key not in saved):  # new adapters start afresh
                continue
            state[key] = tensor
            module = module_of(key)
            other_rank = is_adapter(key) and ranks.get(module) != lora.get(module, (None,))[0]
            absent = key not in saved and (key in wrapped or module in referred)
            if not other_rank and not absent:  # of which `verdict` has more to say
                fitting[key] = tensor
        wrong = tuple(differences(fitting, saved))
        return cls(state, frozenset(names), frozenset(excluded), wrong, lora)

    def without_tensors(self) -> Needs:
        """What other ranks are to know."""
        return Needs({}, self.names, self.excluded, self.wrong, self.lora)


def verdict(ranks: Sequence[Needs], exclude: Sequence[str], saved: Mapping[str, Any], run: RunState) -> list[str]:
    """Why a checkpoint that holds `saved` does not fit what all `ranks` need; empty if it does.

    Args:
        run: what the checkpoint says about its run.
    """
    names = frozenset().union(*(each.names for each in ranks))
    lora = {name: found for each in ranks for name, found in each.lora.items()}
    mine = {module_of(name) for name in names}
    found = [*_of_adapters(names, lora, saved, run)]
    for module in sorted(set(run.references) & mine - {module_of(k) for k in saved if k.startswith(MODEL)}):
        if any(module_of(name) == module and not _excluded(name, exclude) for name in names):
            place = run.references[module]["path"]
            found.append(
                f"it does not hold modules.{module}, which was frozen, but refers to {place}: give that as "
                f"modules.{module}.initial_load_path, and name {module!r} in checkpoint.exclude_from_loading"
            )
    found += dict.fromkeys(text for each in ranks for text in each.wrong)
    over: dict[str, list[str]] = {}
    for key in saved:
        if key.startswith(MODEL) and module_of(key) in mine and key not in names and not _excluded(key, exclude):
            over.setdefault(module_of(key), []).append(key.removeprefix(MODEL))
    for module, rest in sorted(over.items()):
        layers = sorted({layer for name in rest if is_adapter(name) and (layer := _layer(name))})
        if layers:
            found.append(_adapters_over(module, layers, lora, _ranks(saved)))
        if others := sorted(name for name in rest if _layer(name) not in layers):
            found.append(
                f"modules.{module} has no use for {len(others)} of its tensors: {_listed(others)}; give the module the "
                "config that it had, or name them, or what they are in, in checkpoint.exclude_from_loading"
            )
    return found


def left_out(ranks: Iterable[Needs], exclude: Sequence[str], saved: Iterable[str]) -> list[str]:
    """Modules of the checkpoint that no rank has and nobody has excluded."""
    mine = {module_of(name) for each in ranks for name in each.names}
    return sorted(
        {module_of(k) for k in saved if k.startswith(MODEL) and not _excluded(k, exclude)} - mine,
    )


def unused(ranks: Iterable[Needs], exclude: Sequence[str], saved: Iterable[str]) -> list[str]:
    """Those of `exclude` that match neither a tensor of the modules nor one of the checkpoint."""
    matched = frozenset().union(*(each.excluded for each in ranks))
    rest = set(exclude) - matched
    return sorted(rest - {each for key in saved if rest for each in rest if _excluded(key, [each])})


def module_of(key: str) -> str:
    """Whose tensor `model.<module>.<name>` is."""
    return key.split(".")[1]


def _excluded(key: str, exclude: Iterable[str]) -> bool:
    name = key.removeprefix(MODEL)
    return key.startswith(MODEL) and any(_within(name, each) or _within(base_name(name), each) for each in exclude)


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _adapters(module: nn.Module) -> tuple[int, float] | None:
    """Rank and alpha of a module's adapters, which all have the same."""
    layers: Iterable[Any] = (each for each in module.modules() if ADAPTER in getattr(each, "lora_alpha", ()))
    return next(((each.r[ADAPTER], float(each.lora_alpha[ADAPTER])) for each in layers), None)


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
        was = _given(run.recipe, "modules", module, "lora", "alpha")
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
        f"has {here} there ({_listed(layers, 3)}): give it the modules.{module}.lora that the run had, or merge them "
        f"first (hetmesh export RUN DIR) and start from DIR (model.hf_path, or modules.{module}.initial_load_path)"
    )


def _given(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _listed(names: Sequence[str], shown: int = _SHOWN) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
