"""Record how a module's constructor initialises its parameters, without memory for them.

Uninitialised memory that a constructor allocates (`torch.empty`, as every layer of torch does) is put on the meta
device, and the in-place operations that fill it are recorded. Everything else runs normally: a parameter made from
values (`nn.Parameter(torch.ones(n))`), a buffer, a table of sines. To the constructor all tensors are on the CPU.

This keeps what reset_parameters alone would lose: weights that a constructor sets by hand after it has made a layer,
and rows that a rank can draw without the others. Constructors that read such memory, or write to it in ways that cannot
be replayed row by row (`orthogonal_`, `eye_`), cannot be recorded. torchdistX's deferred initialisation
(github.com/pytorch/torchdistx) replays whole tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hetmesh._torch_compat import TorchDispatchMode, tree_leaves, trunc_normal_calls
from hetmesh.models.weights.initial import Elements, Identity, Initial, Operation

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")

EMPTY = {aten.empty.memory_format, aten.empty_strided.default}
EMPTY_LIKE = {aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default}
VALUES_LIKE = {
    *(aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.rand_like.default, aten.randn_like.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
}
OVERWRITE = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default}
DRAW = {
    *(aten.normal_.default, aten.uniform_.default, aten.exponential_.default, aten.log_normal_.default),
    *(aten.cauchy_.default, aten.bernoulli_.float),
}


class NotRepeatable(RuntimeError):
    """What a constructor does with a parameter cannot be replayed row by row."""


@dataclass(eq=False)
class Memory:
    """What was done to allocated memory.

    Attributes:
        dtype: in which its values are drawn.
        cast: whether they were converted since; then it can only be overwritten.
    """

    identity: Identity
    numel: int
    dtype: torch.dtype
    steps: tuple[Operation, ...] = ()
    cast: bool = False


class Recorder(TorchDispatchMode):
    """Records while it is entered, possibly several times.

    Args:
        place: seeds the draws, together with the parameters' names: `seed:module`.

    Attributes:
        failed: why the constructor cannot be replayed; None if it can.
    """

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.failed: str | None = None
        self._memory: dict[int, Memory] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._count = 0
        self._inside = ExitStack()

    def __enter__(self) -> Recorder:
        self._inside.enter_context(_OnCpu(self))
        self._inside.enter_context(trunc_normal_calls(self._trunc_normal))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._inside.close()

    def name(self, module: nn.Module) -> None:
        """Give recorded memory without a name that of its parameter or buffer in `module`."""
        for name, tensor in _tensors(module):
            memory = self.memory(tensor)
            if memory is not None and memory.identity.name.startswith("#"):
                memory.identity.name = name

    def memory(self, tensor: Tensor) -> Memory | None:
        """The record of the memory of `tensor`; None if it is ordinary memory."""
        return self._memory.get(id(tensor.untyped_storage()))

    def initial(self, where: str, tensor: Tensor) -> Initial:
        """The initial values of `tensor`, recorded or not. Raises NotRepeatable: they cannot be drawn by rows."""
        memory = self.memory(tensor)
        if memory is None:
            if tensor.is_meta:
                raise NotRepeatable(f"{where} has neither memory nor values")
            return Initial.of_value(where, tensor.detach())
        found = Initial(where, tuple(tensor.shape), memory.dtype, memory.steps)
        if not tensor.is_contiguous() or tensor.numel() != memory.numel:
            raise NotRepeatable(f"{where} is a part of other memory, or not contiguous")
        if not all(step.part.can_be_cut(found.width) for step in memory.steps):
            raise NotRepeatable(f"{where} is not initialised by rows")
        return found

    def held_by_others(self, module: nn.Module) -> bool:
        """Whether a tensor that is neither parameter nor buffer of `module` has recorded memory."""
        known = {id(tensor.untyped_storage()) for _, tensor in _tensors(module)}
        return not known.issuperset(self._memory)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in EMPTY:
            return self._empty(func, args, keywords)
        if keywords.get("device") == META:  # torch code that passes on a tensor's device
            keywords["device"] = CPU
        recorded = [t for t in tree_leaves((args, keywords)) if isinstance(t, Tensor) and self.memory(t) is not None]
        if not recorded:
            return func(*args, **keywords)
        if func in EMPTY_LIKE:
            return self._remember(func(*args, **{**keywords, "device": META}))
        if func in VALUES_LIKE:
            return func(*args, **{**keywords, "device": CPU})
        if func.is_view:
            return func(*args, **keywords)
        if func in (aten.clone.default, aten._to_copy.default):
            return self._copied(func, args[0], keywords)
        if func is aten.copy_.default and len(recorded) == 2:
            return self._taken_over(args[0], args[1])
        in_place = torch.Tag.inplace in func.tags and len(recorded) == 1 and recorded[0] is args[0]
        by_element = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        if in_place and (func in DRAW or func in OVERWRITE or by_element):
            return self._step(func, args[0], args[1:], keywords, func in DRAW)
        if by_element and len(args) == 1 and not keywords and hasattr(aten, name := f"{func._opname}_"):
            copied = self._copied(aten.clone.default, args[0], {})
            return self._step(getattr(aten, name).default, copied, (), {}, draws=False)
        self._fail(f"{func.name()} of a parameter")

    def _empty(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        dtype = keywords.get("dtype") or torch.get_default_dtype()
        if keywords.get("device") not in (None, CPU, META) or not dtype.is_floating_point:
            return func(*args, **keywords)
        return self._remember(func(*args, **{**keywords, "device": META, "pin_memory": None}))

    def _remember(self, tensor: Tensor, memory: Memory | None = None) -> Tensor:
        storage = tensor.untyped_storage()
        key = id(storage)
        if memory is None:
            memory = Memory(self._new(), tensor.numel(), tensor.dtype)
        self._memory[key] = memory
        self._alive[key] = weakref.ref(storage, partial(self._gone, key))  # one Python object per storage
        return tensor

    def _gone(self, key: int, _: Any) -> None:
        del self._memory[key], self._alive[key]

    def _new(self) -> Identity:
        self._count += 1
        return Identity(self.place, f"#{self._count}")

    def _step(self, apply: Any, target: Tensor, arguments: Sequence[Any], keywords: Any, draws: bool) -> Tensor:
        memory = self._memory[id(target.untyped_storage())]
        part = Elements.of(target)
        kept = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in arguments)
        kept = tuple(a.expand(target.shape).squeeze() if isinstance(a, Tensor) and a.dim() else a for a in kept)
        if any(isinstance(a, Tensor) for a in keywords.values()) or any(
            isinstance(a, Tensor) and a.is_meta for a in kept
        ):
            self._fail("an operation with a tensor without values")
        number = None
        if draws:
            if keywords.pop("generator", None) is not None:
                self._fail("a draw from a custom generator")
            number = (memory.identity, memory.identity.draws)
            memory.identity.draws += 1
        step = Operation(apply, part, kept, keywords, number)
        if part.covers(memory.numel) and (draws or apply in OVERWRITE):
            memory.steps, memory.dtype, memory.cast = (), target.dtype, False
        if memory.cast:
            self._fail("an operation on a parameter after its conversion to another dtype")
        memory.steps += (step,)
        return target

    def _copied(self, func: Any, source: Tensor, keywords: dict[str, Any]) -> Tensor:
        memory = self._memory[id(source.untyped_storage())]
        dtype, device = keywords.pop("dtype", None) or source.dtype, keywords.pop("device", None)
        if device not in (None, CPU, META) or not dtype.is_floating_point or not self._is_whole(source, memory):
            self._fail(f"{func.name()} of a part of a parameter, or to {dtype} on {device or CPU}")
        if func is aten._to_copy.default and dtype == source.dtype:
            return source  # to the constructor it is on the CPU already
        casts = dtype != source.dtype
        # A cast is the same parameter in another dtype; a clone has draws of its own from here on.
        identity = memory.identity if casts else self._new()
        out = torch.empty_like(source, dtype=dtype, device=META)
        return self._remember(out, replace(memory, identity=identity, cast=memory.cast or casts))

    def _taken_over(self, target: Tensor, source: Tensor) -> Tensor:
        ours, theirs = (self._memory[id(t.untyped_storage())] for t in (target, source))
        if ours is theirs and Elements.of(target) == Elements.of(source):  # how `w[0] *= 2` ends
            return target
        same = target.shape == source.shape and target.dtype == source.dtype
        if not (same and self._is_whole(target, ours) and self._is_whole(source, theirs)):
            self._fail("a copy of a part of a parameter")
        ours.steps, ours.dtype, ours.cast = theirs.steps, theirs.dtype, theirs.cast
        return target

    def _is_whole(self, tensor: Tensor, memory: Memory) -> bool:
        return tensor.is_contiguous() and tensor.numel() == memory.numel

    def _trunc_normal(self, original: Callable[..., Tensor], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.memory(tensor) is None:
            return original(tensor, *args, **kwargs)
        return self._step(original, tensor.detach(), args, kwargs, draws=True)

    def _fail(self, why: str) -> Any:
        self.failed = self.failed or why
        raise NotRepeatable(why)


class _OnCpu(TorchFunctionMode):
    """Makes recorded memory report the CPU as its device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        tensor: Any = Tensor
        self.answers = {tensor.device.__get__: CPU, tensor.is_meta.__get__: False, tensor.is_cpu.__get__: True}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self.answers.get(func)
        if answer is not None and self.recorder.memory(args[0]) is not None:
            return answer
        return func(*args, **(kwargs or {}))


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers, each under its first name."""
    yield from module.named_parameters()
    yield from module.named_buffers()
