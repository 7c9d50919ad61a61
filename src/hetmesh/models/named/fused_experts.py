"""transformers' fused experts as hetmesh holds them: gate and up as two tensors of one parameter.

transformers holds `gate_up_proj` as `[experts, 2 * inner, features]`, the gate's rows before those of up. A rank with a
share of `inner` needs rows of both, which are not contiguous; in `[experts, 2, inner, features]`, the same memory, they
are a shard of dim 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.parallel.experts.layers import ExpertLayers

HALVES: Mapping[str, tuple[int, int]] = MappingProxyType({"experts.gate_up_proj": (1, 2)})
"""How `two_halves` splits a dim of a checkpoint's tensors: a value of `CausalLMAdapter.in_two_dims`."""


def two_halves(module: nn.Module) -> nn.Module:
    """Hold the fused experts inside `module` as `[experts, 2, inner, features]`, in place. Its forward still computes
    what transformers' code computes."""
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
    """The mixture-of-experts blocks of a model with a config like Qwen3-MoE's; None where it has none. `prefix`: FQN of
    the decoder's layers."""
    sparse = [
        i
        for i in range(config.num_hidden_layers)
        if config.num_experts > 0 and i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0
    ]
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
