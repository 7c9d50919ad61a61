"""Build a module: in full, deferred (values without memory), or without weights at all."""

from __future__ import annotations

import gc
import logging
import random
import zlib
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from hetmesh._torch_compat import has_gradient_hooks
from hetmesh.errors import RecipeError
from hetmesh.models.adapter import Adapter
from hetmesh.models.weights.fill_module import draw_weights, empty_parameter, materialize, plain_name
from hetmesh.models.weights.init_recorder import META, Recorder
from hetmesh.models.weights.initial import Initial

logger = logging.getLogger(__name__)


def build_module(adapter: Adapter, name: str, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The full module on the CPU, with random weights drawn from `(seed, name)` in fp32 and cast to `dtype`.

    Every rank of any layout gets the same weights as one process would, without communication; fp64 runs start from the
    fp32 ones. The global RNG is left as it was. Raises RecipeError if nothing initialises one of its parameters.
    """
    return build_deferred(adapter, name, seed, dtype).materialized()


def build_deferred(adapter: Adapter, name: str, seed: int, dtype: torch.dtype = torch.float32) -> DeferredModule:
    """What `build_module` makes, before its parameters have memory: each rank fills in what it keeps.

    A module whose constructor computes with its weights is built eagerly, and held in full until it is sharded.
    """

    def build() -> nn.Module:
        return nn.Module.to(_build(adapter, name), dtype)  # that of diffusers' models warns of modules in fp32 of none

    found = recorded(build, name, seed)
    return built_eagerly(build, name, seed, found) if isinstance(found, str) else found


def reason_built_whole(adapter: Adapter, name: str) -> str | None:
    """Why every rank of a module builds it in full; None if its weights are drawn row by row. Takes no memory."""
    found = recorded(lambda: _build(adapter, name), name, 0)
    return found if isinstance(found, str) else None


def build_empty(adapter: Adapter, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The full module without weights: parameters on the meta device, buffers with values, the same on every rank.

    A parameter has memory only while its layer is constructed, so the peak is one parameter.
    """
    with random_state("", 0), _parameters_on_meta():
        return nn.Module.to(_build(adapter), dtype)


def build_on_meta(adapter: Adapter) -> nn.Module | None:
    """The full module without any memory, for inspection; None if it cannot be built on the meta device."""
    try:
        with torch.device("meta"):
            return adapter.build()
    except Exception:  # a user's constructor may compute with its weights
        return None


def _build(adapter: Adapter, name: str = "") -> nn.Module:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        module = adapter.build()
    finally:
        torch.set_default_dtype(default)
    for fqn, tensor in (*module.named_parameters(), *module.named_buffers()):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        where = f"{f'modules.{name}' if name else type(module).__name__}: {kind} {fqn}"
        if has_gradient_hooks(tensor):
            raise RecipeError(
                f"{where} has a gradient hook, which sharding would drop, or call with a share of a microbatch's "
                "gradient: change the gradient in forward, by a torch.autograd.Function"
            )
        if tensor.is_complex():
            raise RecipeError(
                f"{where} is complex, and would lose its imaginary part when the module is cast to its dtype: "
                "register torch.view_as_real of it, and use torch.view_as_complex in forward"
            )
    return module


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters move to the meta device as they are registered. (`torch.device("meta")` would move the buffers too,
    and those that no checkpoint holds, such as rotary frequencies, would be lost.)"""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: Any) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            param._is_hf_initialized = True  # else transformers draws values that nothing holds: a quarter of `resolve`
        register(self, name, param)

    owner: Any = nn.Module
    owner.register_parameter = on_meta
    try:
        yield
    finally:
        owner.register_parameter = register


@dataclass
class DeferredModule:
    """A module as its constructor leaves it, without memory for its parameters.

    Attributes:
        module: its parameters are on the meta device; buffers are as ever.
        initial: the values of parameters, by all of their names. Those of a checkpoint are not among them.
        reason_built_whole: why its weights are held in full until they are sharded; None if they are drawn row by row.
    """

    module: nn.Module
    initial: dict[str, Initial] = field(default_factory=dict)
    reason_built_whole: str | None = None

    def materialized(self) -> nn.Module:
        """The module on the CPU with its values. May be called once: values are given up as they are drawn."""
        materialize(self.module, torch.device("cpu"))
        draw_weights(self.module, self.initial)
        return self.module

    def extend(self, name: str, seed: int, change: Callable[[], None]) -> None:
        """Run `change`, which adds parameters to the module, and record their values too."""
        recorder, before = Recorder(f"{seed}:{name}"), {id(p) for p in self.module.parameters()}
        with random_state(name, seed), recorder:
            change()
        recorder.name(self.module)
        self.initial |= _take_values(self.module, name, recorder, before)


def recorded(build: Callable[[], nn.Module], name: str, seed: int) -> DeferredModule | str:
    """The module that `build` makes, with the recorded operations that initialise it; or why there are none."""
    recorder = Recorder(f"{seed}:{name}")
    try:
        with random_state(name, seed), _nan_in_new_memory(), recorder:
            module = build()
        if recorder.failed:
            return recorder.failed
        recorder.name(module)
        _check_apart(module, name)
        if recorder.held_by_others(module):
            gc.collect()  # temporary modules may be alive still, in reference cycles
            if recorder.held_by_others(module):
                return "a tensor that is neither parameter nor buffer"
        for owner in module.modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None and (memory := recorder.memory(buffer)) is not None:
                    # A buffer that nothing was written to is scratch memory.
                    owner._buffers[key] = (
                        recorder.initial(f"modules.{name}: buffer {key}", buffer)[...].to(buffer.dtype)
                        if memory.steps
                        else torch.zeros(buffer.shape, dtype=buffer.dtype)
                    )
        return DeferredModule(module, _take_values(module, name, recorder))
    except RecipeError:
        raise
    except Exception as error:  # not only NotRepeatable: code may look at what is not there
        return recorder.failed or f"{type(error).__name__}: {error}"


def built_eagerly(build: Callable[[], nn.Module], name: str, seed: int, reason: str) -> DeferredModule:
    """The module that `build` makes, with its weights held in full until they are sharded."""
    logger.info(
        f"modules.{name} is built whole before it is sharded: its constructor computes with its weights ({reason})"
    )
    with random_state(name, seed), _nan_in_new_memory():
        module = build()
    _check_apart(module, name)
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            # Scratch memory, as in `recorded`; integers cannot be told from values.
            if buffer is not None and buffer.is_floating_point() and buffer.numel() and bool(buffer.isnan().all()):
                owner._buffers[key] = torch.zeros_like(buffer)
    return DeferredModule(module, _take_values(module, name, Recorder(f"{seed}:{name}")), reason)


@contextmanager
def random_state(name: str, seed: int) -> Iterator[None]:
    """Seed torch, numpy and `random` while a module's constructor runs, and restore their states afterwards."""
    place = zlib.crc32(f"{seed}:{name}".encode())  # 32 bits: torch's CPU generator and numpy's take no more
    python, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(place)
        np.random.seed(place)
        random.seed(place)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


@contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """torch fills new memory with NaN (integers: their largest value), so that what nobody initialises shows."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        memory.fill_uninitialized_memory = fills


def _take_values(module: nn.Module, name: str, recorder: Recorder, known: Container[int] = ()) -> dict[str, Initial]:
    """The values of all parameters of `module` that are not `known`, which then have no memory any more."""
    taken: dict[int, tuple[nn.Parameter, Initial]] = {}
    originals: list[nn.Parameter] = []  # keeps them alive, so that no id is used twice
    found: dict[str, Initial] = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in known:
                continue
            fqn = plain_name(f"{prefix}.{key}" if prefix else key)  # torch.compile may have wrapped the layer
            if id(parameter) not in taken:
                originals.append(parameter)
                where = f"modules.{name}: parameter {fqn}"
                _check_values(where, parameter, recorder)
                empty = parameter if parameter.is_meta else empty_parameter(parameter, META)
                taken[id(parameter)] = empty, recorder.initial(where, parameter)
            empty, found[fqn] = taken[id(parameter)]
            owner._parameters[key] = empty
            taken[id(empty)] = empty, found[fqn]
    for parameter in originals:
        if not parameter.is_meta:  # a reference kept elsewhere would compute with values that nobody trains
            parameter.data = parameter.data.new_empty(0)
    return found


def _check_values(where: str, parameter: nn.Parameter, recorder: Recorder) -> None:
    if isinstance(parameter, UninitializedParameter):
        raise RecipeError(f"{where} has no shape yet; lazy modules learn it as they run, after they are sharded")
    memory = recorder.memory(parameter)
    if not parameter.numel() or (memory is not None and memory.steps):
        return
    if memory is not None or (not parameter.is_meta and _as_new(parameter.detach())):
        raise RecipeError(
            f"{where}: nothing initialises it; it would hold whatever was in memory, different on every rank. Give it "
            "values in its constructor"
        )


def _as_new(value: Tensor) -> bool:
    """Whether it looks as `_nan_in_new_memory` leaves it; booleans never do."""
    if value.is_floating_point():
        return bool(value.isnan().any())
    return value.dtype != torch.bool and bool((value == torch.iinfo(value.dtype).max).all())


def _check_apart(module: nn.Module, name: str) -> None:
    """Raise RecipeError for a parameter or buffer that shares memory with another: sharding would separate the two."""
    places: dict[tuple[int, int], str] = {}
    tensors = [("parameter", *named) for named in module.named_parameters()]
    for kind, fqn, tensor in (*tensors, *(("buffer", *named) for named in module.named_buffers())):
        if isinstance(tensor, UninitializedBuffer | UninitializedParameter) or not tensor.numel():
            continue
        place = id(tensor.untyped_storage()), int(tensor.storage_offset())
        other = places.setdefault(place, fqn) if kind == "parameter" else places.get(place, fqn)
        if other != fqn:
            raise RecipeError(
                f"modules.{name}: {kind} {fqn} shares memory with parameter {other}; parameters get memory of "
                "their own when they are sharded, and the two would diverge. Tie them by registering the same "
                "nn.Parameter, or copy the values"
            )
