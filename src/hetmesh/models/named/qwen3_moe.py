"""Qwen3-MoE LLM (transformers' Qwen3MoeForCausalLM), and transformers' fused experts as hetmesh holds them.

transformers holds `gate_up_proj` as `[experts, 2 * inner, features]`, the gate's rows before those of up. A rank with a
share of `inner` needs rows of both, which are not contiguous; in `[experts, 2, inner, features]`, the same memory, they
are a shard of dim 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Abilities, AdapterRequest
from hetmesh.models.config_keys import hf, positive_int
from hetmesh.models.named.causal_lm import CausalLMAdapter
from hetmesh.models.named.qwen3 import derived_sizes
from hetmesh.parallel.experts.block import ExpertLayers

HALVES: Mapping[str, tuple[int, int]] = MappingProxyType({"experts.gate_up_proj": (1, 2)})
"""How `two_halves` splits a dim of a checkpoint's tensors: a value of `CausalLMAdapter.in_two_dims`."""


def two_halves(module: nn.Module) -> nn.Module:
    """Hold the fused experts inside `module` as `[experts, 2, inner, features]`, in place. It computes the same."""
    for part in list(module.modules()):
        weight = part._parameters.get("gate_up_proj")
        if weight is not None and weight.dim() == 3 and not getattr(part, "is_transposed", False):
            experts: Any = part
            experts.register_parameter(
                "gate_up_proj", nn.Parameter(weight.detach().unflatten(1, (2, -1)), requires_grad=weight.requires_grad)
            )
            experts.__class__ = _with_two_halves(type(part))
    return module


def fused_layers(config: Any, balance: float, prefix: str = "model.layers") -> ExpertLayers | None:
    """The experts' blocks of a model with a config like Qwen3-MoE's; None: none. `prefix`: of the decoder's layers."""
    dense, step = getattr(config, "mlp_only_layers", ()), getattr(config, "decoder_sparse_step", 1)  # Qwen3.5 has none
    layers = range(config.num_hidden_layers if config.num_experts > 0 else 0)
    sparse = [i for i in layers if i not in dense and (i + 1) % step == 0]
    if not sparse:
        return None
    blocks = tuple(f"{prefix}.{i}.mlp" for i in sparse)
    sizes = config.moe_intermediate_size, config.hidden_size
    return ExpertLayers(blocks, config.num_experts, config.num_experts_per_tok, *sizes, balance)


def balance_of(request: AdapterRequest, config: Any) -> float:
    """The weight of the load-balancing loss: `router_aux_loss_coef` of the recipe, else of the config. Where weights
    come from a directory whose config.json does not ask for router logits, the default is 0, as in transformers."""
    if (asked := request.config.get("output_router_logits")) is not None:
        raise RecipeError(
            f"{request.key}.config.output_router_logits = {asked!r}: router logits are never returned; set "
            f"{COEFFICIENT}, the weight of the load-balancing loss: 0 for none"
        )
    given = request.config.get(COEFFICIENT)
    if given is None and request.pretrained is not None and not getattr(config, "output_router_logits", False):
        return 0.0
    value = getattr(config, COEFFICIENT) if given is None else given
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise RecipeError(f"{request.key}.config.{COEFFICIENT} = {value!r}: must be 0 or more")
    return float(value)


COEFFICIENT = "router_aux_loss_coef"

_CLASSES: dict[Any, Any] = {}


def _with_two_halves(kind: Any) -> Any:
    """A subclass of a transformers experts class that runs its forward on the weights in their original shape."""
    if kind not in _CLASSES:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            theirs: Any = kind.forward
            if self.gate_up_proj.dtype == torch.float64:  # which grouped products do not support
                theirs = theirs.__wrapped__
            return theirs(_Joined(self), *args, **kwargs)

        _CLASSES[kind] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return _CLASSES[kind]


class _Joined:
    """The experts with gate and up in transformers' shape."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts

    @property
    def gate_up_proj(self) -> Tensor:
        return self._experts.gate_up_proj.flatten(1, 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


@dataclass(frozen=True)
class Qwen3MoeAdapter(CausalLMAdapter):
    """Qwen3 with mixture-of-experts blocks, whose experts ranks along `ep` can share."""

    balance: float = 0.0
    in_two_dims: ClassVar = HALVES

    @classmethod
    def make(cls, request: AdapterRequest) -> Qwen3MoeAdapter:
        """The adapter of a recipe's module. Keys not given are `expert_sizes`; `router_aux_loss_coef`, 0 for none, is
        the weight of the load-balancing loss, and that of a directory counts as `balance_of` says."""
        derived, given = expert_sizes(request), request.config.get("head_dim")
        if "head_dim" in request.config:  # which transformers reads, but does not declare
            derived["head_dim"] = positive_int(request, "head_dim", given)
            others = {key: value for key, value in request.config.items() if key != "head_dim"}
            request = replace(request, config=others)
        adapter: Any = cls.make_from(request, hf("Qwen3MoeConfig"), hf("Qwen3MoeForCausalLM"), derived)
        if given not in (None, own := adapter.config.head_dim):
            raise RecipeError(
                f"{request.key}.config.head_dim = {given!r}, but {request.pretrained} says {own!r} in its config.json; "
                "leave the key out"
            )
        return cls.with_experts(request, adapter)

    @classmethod
    def with_experts(cls, request: AdapterRequest, adapter: Any) -> Qwen3MoeAdapter:
        """`adapter` of a model with experts, with the weight of its load-balancing loss; raises RecipeError for numbers
        of experts that do not fit each other."""
        _check_experts(request, adapter.config)
        balanced: Qwen3MoeAdapter = replace(adapter, balance=balance_of(request, adapter.config))
        return balanced

    @property
    def abilities(self) -> Abilities:
        return replace(super().abilities, experts=fused_layers(self.config, self.balance))

    def build(self) -> nn.Module:
        return two_halves(super().build())

    def tensor_parallel_plan(self) -> Mapping[str, Any]:
        plan = super().tensor_parallel_plan()
        experts = self.abilities.experts
        dense = experts is None or len(experts.blocks) < self.config.num_hidden_layers
        return {
            pattern: style
            for pattern, style in plan.items()
            if ".mlp.experts" not in pattern and (dense or ".mlp." not in pattern or ".shared_expert." in pattern)
        }

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        return {**super().tensor_parallel_sizes(), "moe_intermediate_size": self.config.moe_intermediate_size}


def expert_sizes(request: AdapterRequest) -> dict[str, Any]:
    """`derived_sizes` and `moe_intermediate_size`, which is `hidden_size`."""
    derived = derived_sizes(request)
    if "hidden_size" in request.config:
        derived["moe_intermediate_size"] = request.config["hidden_size"]
    return derived


def _check_experts(request: AdapterRequest, config: Any) -> None:
    for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
        positive_int(request, key, getattr(config, key))
    step, layers = getattr(config, "decoder_sparse_step", 1), config.num_hidden_layers
    if not 1 <= step <= layers:
        raise RecipeError(
            f"{request.key}.config.decoder_sparse_step = {step!r}: the interval between layers with experts; valid are "
            f"1 (all) to num_hidden_layers = {layers} (only the last)"
        )
    if config.num_experts_per_tok > config.num_experts:
        raise RecipeError(
            f"{request.key}.config.num_experts_per_tok = {config.num_experts_per_tok}: a token cannot have more "
            f"experts than there are, num_experts = {config.num_experts}"
        )
    missing = sorted({*request.config.get("mlp_only_layers", ())} - {*range(config.num_hidden_layers)})
    if missing:
        raise RecipeError(
            f"{request.key}.config.mlp_only_layers: layers {missing} do not exist; valid are 0 to "
            f"{config.num_hidden_layers - 1}"
        )
    if config.num_experts > MOST_EXPERTS:
        raise RecipeError(f"{request.key}.config.num_experts = {config.num_experts}: valid are 1 to {MOST_EXPERTS}")


MOST_EXPERTS = 2**15 - 1
"""A token's choices travel as 16-bit numbers."""
