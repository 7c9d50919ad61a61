"""Every torchtitan name that hetmesh uses, imported on first use. One contract test per name: tests/test_titan.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def optimizers_container(factories: Mapping[str, Callable[..., Any]]) -> Any:
    """`OptimizersContainer` with optimizers of its own, by the names in its groups, which have all of their options."""
    from torchtitan.components.optimizer import OptimizersContainer

    class Container(OptimizersContainer):
        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return factories[name]

        @staticmethod
        def _build_impl_kwargs(config: Any) -> dict[str, Any]:
            return {}

        def _log_optimizer(self, *args: Any, **kwargs: Any) -> None:
            """Silent: torchtitan logs every group of every rank."""

    return Container


def param_group_config() -> Any:
    """`ParamGroupConfig`: a parameter name pattern and its optimizer."""
    from torchtitan.components.optimizer import ParamGroupConfig

    return ParamGroupConfig


def lr_schedulers_container() -> Any:
    """`LRSchedulersContainer`: warm-up, stable, decay."""
    from torchtitan.components.optimizer import LRSchedulersContainer

    return LRSchedulersContainer


def tensorboard_logger() -> Any:
    from torchtitan.components.metrics import TensorBoardLogger

    return TensorBoardLogger


def wandb_logger() -> Any:
    """`WandBLogger(log_dir, config_dict, tag)`."""
    from torchtitan.components.metrics import WandBLogger

    return WandBLogger
