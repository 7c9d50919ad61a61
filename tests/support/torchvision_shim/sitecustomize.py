"""Lets torchvision from PyPI, a CUDA build, be imported beside a CPU build of torch, in this process and, with this
folder on PYTHONPATH, in those that it starts.

Its kernels cannot be loaded there, and its import fails where it registers fake ones for them; so their schemas are
defined first. Image processors use torch operations alone. hetmesh itself has no such thing: where torchvision does not
load it says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.metadata
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    library: Any = None  # schemas last as long as it

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name != "torchvision" or self.library is not None:
            return
        import torch

        if torch.version.cuda is None and "+cpu" not in importlib.metadata.version("torchvision"):
            self.library = torch.library.Library("torchvision", "DEF")
            for schema in _SCHEMAS:
                self.library.define(schema)


if not any(type(finder).__name__ == _BeforeTorchvision.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, _BeforeTorchvision())
