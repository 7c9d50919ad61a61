"""Every private torch name that hetmesh uses, in one place, so that a torch upgrade is checked in one place."""

from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
