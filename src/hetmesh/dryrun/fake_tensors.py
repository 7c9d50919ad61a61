"""FakeTensors: on the fake device tensors have shapes and no values; the host's are real.

Operations on the host run as usual, those on the device give torch's FakeTensors. A copy to the host brings zeros where
values would have to be computed. Small tensors whose values came from the host without floating-point arithmetic
(indices, masks, lengths of sequences) keep them; where a shape depends on anything else the dry run ends with an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hetmesh._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    fake_mode_in_use,
    finished_work,
    tensors_made_on_host,
    tree_leaves,
    tree_map_only,
)
from hetmesh.dryrun.fake_device import FakeAccelerator
from hetmesh.dryrun.fake_kernels import CASTS
from hetmesh.dryrun.fake_values import MAX_KNOWN, forget, known_value, learn
from hetmesh.dryrun.host_waits import HostWaits, listing

aten = torch.ops.aten

_SHAPED_BY_VALUES = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
    aten.bincount.default,
}
"""Operations for which the host must wait, to know the shape of the result or the result itself."""

_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class FakeTensors(TorchDispatchMode):
    """While it is entered, tensors of `accelerator`'s device are fake.

    Args:
        waits: counts where the host would wait for the device.

    Attributes:
        observe: called with each operation on the device and its arguments and result.

    Raises:
        RuntimeError: a shape depends on values that only the device could compute; names the line.
    """

    def __init__(self, accelerator: FakeAccelerator, waits: HostWaits) -> None:
        super().__init__()
        self.accelerator, self.waits, self.kind = accelerator, waits, accelerator.device.type
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.observe: Callable[[Any, Any, Any, Any], None] | None = None

    def __enter__(self) -> Self:
        self._around = ExitStack()
        self._around.enter_context(self.accelerator.used(self.waits))
        self._around.enter_context(tensors_made_on_host())
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._around.close()
        CASTS.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        kwargs = dict(kwargs or {})
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations come here one by one, on local tensors
        if fake_mode_in_use() not in (None, self.fake):
            return func(*args, **kwargs)  # DTensor works out the shapes of whole tensors, which are on no device
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        onto = kwargs.get("device")
        here = onto is not None and torch.device(onto).type == self.kind
        if not here and not any(isinstance(x, FakeTensor) for x in tensors):
            return self._on_host(func, args, kwargs)
        if not torch.is_autocast_enabled(self.kind):
            CASTS.clear()
        if func.namespace == "c10d":
            return self._collective(func, args, tensors)
        if func is aten._local_scalar_dense.default:
            if not listing():
                self.waits.device_to_host("item")
            return self._value(args[0])
        if func is aten.is_set_to.default:
            one, other = ((x.untyped_storage(), x.storage_offset(), x.shape, x.stride()) for x in args)
            return one[0] is other[0] and one[1:] == other[1:]
        if func is aten.unbind.int and listing() == 1:
            self.waits.device_to_host("tolist")
        if func in (aten._to_copy.default, aten.copy_.default):
            out = self._copy(func, args, kwargs, onto)
        else:
            out = self._operation(func, args, kwargs, tensors)
        if self.observe is not None:
            self.observe(func, args, kwargs, out)
        return out

    def _on_host(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What touches no tensor of the device; memory is pinned for it."""
        if func is aten.is_pinned.default:
            return self.accelerator.is_pinned(args[0])
        if func is aten._pin_memory.default:
            return self.accelerator.pinned(args[0])
        return func(*args, **kwargs)

    def _collective(self, func: Any, args: Any, tensors: list[Tensor]) -> Any:
        for x in tensors:
            forget(x)
        if self.observe is not None:
            self.observe(func, args, {}, None)
        return (args[0], finished_work()) if len(func._schema.returns) > 1 else finished_work()

    def _copy(self, func: Any, args: Any, kwargs: dict[str, Any], onto: Any) -> Any:
        """A copy between host and device, or on the device."""
        target, source = args[:2] if func is aten.copy_.default else (None, args[0])
        waiting = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        from_device = isinstance(source, FakeTensor)
        if target is not None:
            to_device = isinstance(target, FakeTensor)
        else:
            to_device = from_device if onto is None else torch.device(onto).type == self.kind
        if from_device and not to_device:
            return self._to_host(source, target, kwargs.get("dtype"), waiting)
        if not from_device and (source.ndim or target is None):  # a number is an argument of a kernel
            if waiting or not self.accelerator.is_pinned(source):
                self.waits.host_to_device("copy")
            if target is None:
                return self._as_fake(source.to(kwargs.get("dtype") or source.dtype, copy=True))
        return self._operation(func, args, kwargs, [x for x in (source, target) if x is not None])

    def _to_host(self, source: Tensor, target: Tensor | None, dtype: torch.dtype | None, waiting: bool) -> Tensor:
        if target is not None:
            host, waiting = target, waiting or not self.accelerator.is_pinned(target)
        else:  # into pinned memory, if the host need not wait
            host = torch.empty(source.shape, dtype=dtype or source.dtype)
        if waiting:
            self.waits.device_to_host("copy")
        known = known_value(source)
        return host.zero_() if known is None else host.copy_(known)

    def _operation(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        known = self._computed(func, args, kwargs, tensors)
        if func._schema.is_mutable and known is None:
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for x in tree_leaves(value):
                        forget(x)
        if func in _SHAPED_BY_VALUES:
            self.waits.device_to_host(func.overloadpacket.__name__)
            if known is None:
                raise self._unknown(func, "its result depends on values")
            return tree_map_only(Tensor, self._as_fake, known)
        if func in _INDEXED and any(_is_mask(index) for index in args[1]):
            self.waits.device_to_host("a mask as index")
            args = (args[0], self._without_masks(func, args[1]), *args[2:])
        with self.fake:
            out = func(*args, **kwargs)
        if known is not None:
            for fake, value in zip(tree_leaves(out), tree_leaves(known), strict=True):
                if isinstance(fake, FakeTensor) and isinstance(value, Tensor):
                    learn(fake, value)
        return out

    def _without_masks(self, func: Any, indices: Any) -> list[Tensor | None]:
        """`indices`, masks replaced by the indices of their true elements."""
        plain: list[Tensor | None] = []
        for index in indices:
            known = known_value(index) if isinstance(index, FakeTensor) else index
            if not _is_mask(index):
                plain.append(index)
            elif known is None:
                raise self._unknown(func, "a mask decides its shape, and is")
            else:
                plain += map(self._as_fake, known.nonzero(as_tuple=True))
        return plain

    def _unknown(self, func: Any, why: str) -> RuntimeError:
        return RuntimeError(
            f"{func.overloadpacket}: {why} that the device computes, which a dry run does not have: "
            f"{self.waits.place()}"
        )

    def _as_fake(self, value: Tensor) -> Tensor:
        with self.fake:
            out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.accelerator.device)
        learn(out, value)
        return out

    def _value(self, x: Tensor) -> Any:
        """Of one element: 0 or False where unknown, so that nothing seems not finite."""
        known = known_value(x)
        if known is not None:
            return known.item()
        return False if x.dtype == torch.bool else 0.0 if x.is_floating_point() else 0

    def _computed(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        """The result on the host, where all values are known and few."""
        if torch.Tag.nondeterministic_seeded in func.tags or not (tensors or _small(args, kwargs)):
            return None
        values = {id(x): known_value(x) if isinstance(x, FakeTensor) else x for x in tensors}
        if any(x is None or x.numel() > MAX_KNOWN[x.is_floating_point()] for x in values.values()):
            return None
        on_host = kwargs | ({"device": torch.device("cpu")} if "device" in kwargs else {})
        args, on_host = tree_map_only(Tensor, lambda x: values[id(x)], (args, on_host))
        try:
            return func(*args, **on_host)
        except RuntimeError:  # an operation of the device alone, or one that needs its strides
            return None


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _small(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the result of a tensor factory has few elements."""
    dtype = kwargs.get("dtype")
    floating = dtype is None or dtype.is_floating_point
    sizes = args[0] if args and isinstance(args[0], (list, tuple)) else None
    if sizes is None:  # arange and the like
        return not floating or all(isinstance(x, (int, float)) and abs(x) <= MAX_KNOWN[True] for x in args)
    return math.prod(sizes) <= MAX_KNOWN[floating]
