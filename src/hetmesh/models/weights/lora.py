"""LoRA (Hu et al., arXiv 2106.09685) through peft: only low-rank adapters of linear layers are trained."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hetmesh.errors import RecipeError
from hetmesh.parallel.tensor_parallel import matches
from hetmesh.recipe.sections import LoRA

ADAPTER = "default"
"""peft's name for the one set of adapters that a module has."""


def add_lora(module: nn.Module, lora: LoRA, name: str, seed: int, layers: Sequence[str]) -> None:
    """Add adapters to linear layers of `module`, in place, and freeze everything else.

    `q_proj` becomes a peft layer that holds the old one as `q_proj.base_layer`, with `q_proj.lora_A.default` and
    `q_proj.lora_B.default`. B starts at zero, so the module computes what it did before. A is drawn from the seed and
    the name: equal on every rank of any layout.

    Args:
        layers: FQNs of the module's layers; without `target_modules` every linear layer inside those that are blocks
            (have children) gets an adapter.

    Raises:
        RecipeError: a name in `target_modules` matches no linear layer, or one whose weight is another layer's too.
    """
    from peft import LoraConfig, inject_adapter_in_model

    key = f"modules.{name}.lora"
    linear = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    if lora.target_modules is None:
        blocks = [layer for layer in layers if list(module.get_submodule(layer).children())]
        targets = [n for n in linear if any(n.startswith(f"{block}.") for block in blocks)]
    else:
        targets = [n for n in linear if n.split(".")[-1] in lora.target_modules]
        missing = set(lora.target_modules) - {n.split(".")[-1] for n in targets}
        if missing:
            known = sorted({n.split(".")[-1] for n in linear})
            raise RecipeError(f"{key}.target_modules: no linear layer is called {sorted(missing)}; there are {known}")
    if not targets:
        raise RecipeError(f"{key}: the module has no linear layer inside its layers {list(layers)}")
    if tied := _tied(module, targets):
        raise RecipeError(
            f"{key}.target_modules: {', '.join(f'{n} has its weight from {other}' for n, other in tied.items())} "
            "(tie_word_embeddings), to which an adapter beside it could not be added; leave it out"
        )
    # peft scales by alpha / r and declares alpha as an int, but computes with any number.
    alpha: Any = lora.alpha
    # Wrapped: peft would ask a transformers model for its token embedding, which a part of a model does not have.
    holder = nn.ModuleDict({"module": module})
    names = [f"module.{target}" for target in targets]
    config = LoraConfig(r=lora.rank, lora_alpha=alpha, lora_dropout=lora.dropout, target_modules=names)
    dtype = next(module.parameters()).dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(f"{seed}:{name}:lora".encode()))
        inject_adapter_in_model(config, holder, adapter_name=ADAPTER)
    module.requires_grad_(False)
    for fqn, parameter in module.named_parameters():
        if is_adapter(fqn):
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(True)


def _tied(module: nn.Module, layers: Sequence[str]) -> dict[str, str]:
    """Those of `layers` that share their weight with another layer -> that layer."""
    owners: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        for parameter in part._parameters.values():
            owners.setdefault(id(parameter), []).append(name)
    shared = {name: owners[id(module.get_submodule(name).weight)] for name in layers}
    return {name: next(n for n in names if n != name) for name, names in shared.items() if len(names) > 1}


def is_adapter(parameter: str) -> bool:
    """Whether a parameter's FQN is that of an adapter."""
    return ".lora_A." in parameter or ".lora_B." in parameter


def base_name(parameter: str) -> str:
    """The FQN that a parameter had before adapters were added."""
    return parameter.replace(".base_layer.", ".")


def lora_plan(module: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """A tensor parallel plan for `module` with adapters, from the plan for the module without.

    A `colwise` layer has a colwise B, a `rowwise` layer a rowwise A. The other half is small and stays replicated.
    """
    wrapped = {n for n, m in module.named_modules() if hasattr(m, "base_layer")}
    if not wrapped:
        return dict(plan)
    out: dict[str, Any] = {}
    for name, _ in module.named_modules():
        style = next((s for pattern, s in plan.items() if matches(name, pattern)), None)
        if style is None:
            continue
        if name not in wrapped:
            out[name] = style
            continue
        out[f"{name}.base_layer"] = style
        out[f"{name}.lora_{'A' if style == 'rowwise' else 'B'}.{ADAPTER}"] = style
    return out
