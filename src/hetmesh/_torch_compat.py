"""Every private torch name that hetmesh uses, in one place, so that a torch upgrade is checked in one place."""

from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard", "set_group_timeout"]

set_group_timeout = _set_pg_timeout
"""`set_group_timeout(timeout, group)`: how long collectives of an existing process group may wait."""
