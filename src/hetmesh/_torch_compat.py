"""Every private torch name that hetmesh uses, in one place, so that a torch upgrade is checked in one place."""

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack, _push_mode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

StridedShard = _StridedShard
not_compiled = _disable_dynamo  # torch.compiler.disable imports the compiler at once


def keeps_are_hooked() -> bool:
    """Whether hooks decide what autograd keeps of the operations that follow: those of checkpointing or offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# torch 2.13 renamed these two and warns at every use of the old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Public from torch 2.10 on.
grouped_mm: Any = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)

# What names a range of work for the profiler.
PROFILER_OPS: tuple[Any, ...] = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)

# autograd's name of a reentrant checkpoint, whose backward is a forward and a backward of its own.
REENTRANT = "CheckpointFunctionBackward"

# And of what torch.compile has made, whose backward is one piece: it runs once, for inputs and weights.
COMPILED = "CompiledFunctionBackward"

# scaled_dot_product_attention's kernel for the CPU, with the logsumexp that the public function does not return.
cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def whole_tensor(tensor: Any) -> torch.Tensor:
    """`tensor.full_tensor()` without torch's warning that several dims of a mesh are gathered one after another."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return cast(torch.Tensor, tensor.full_tensor())
    finally:
        logger.setLevel(level)


def split_backward() -> Any:
    """torch's module of `stage_backward_input`, `stage_backward_weight` and what these find in a graph. What it imports
    takes a second; only the schedule zero_bubble needs it."""
    from torch.distributed.pipelining import _backward

    return _backward


current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node of autograd's graph whose backward runs in this thread; None outside of a backward."""


def averaged_over(roots: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """FSDP2 modules in the autograd graph of `roots` that average their gradients because nobody asked for
    anything else (`set_gradient_divide_factor`): name and over how many ranks.

    FSDP puts a node of its own on the inputs of a module, where they carry a gradient; it knows the parameters.
    """
    if "torch.distributed.fsdp._fully_shard._fsdp_param_group" not in sys.modules:
        return
    for node in graph_nodes(roots):
        if type(node).__name__ == "RegisterPostBackwardFunctionBackward":
            group = node.param_group
            ranks = group.mesh_info.mesh.size()
            trained = any(parameter.sharded_param.requires_grad for parameter in group.fsdp_params)
            if trained and ranks > 1 and group.gradient_divide_factor is None:
                yield repr(group._module_fqn or ""), ranks


def graph_nodes(roots: Iterable[Any]) -> Iterator[Any]:
    """All nodes of the autograd graph of `roots`, some of which may be None."""
    todo, seen = [node for node in roots if node is not None], set()
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            todo += [before for before, _ in node.next_functions if before is not None]


def fsdp_groups(module: Any) -> Iterator[tuple[str, Any]]:
    """What FSDP2 gathers and reduces at a time, inside `module`: FQN of the part, and its `FSDPParamGroup`, which has
    `mesh_info.mesh`, `fsdp_params` with a `sharded_param` each, `gradient_divide_factor` (None: the ranks of the mesh)
    and `reduce_grads`."""
    from torch.distributed.fsdp import FSDPModule

    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            one = getattr(state, "_fsdp_param_group", None)  # before torch 2.13
            for group in several or ([one] if one is not None else []):
                yield name, group


def exchange_data(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Give `parameter` the memory and dtype of `values`, which has its shape and layout."""
    from torch.distributed.tensor import DTensor

    parameter.data = values
    if isinstance(parameter, DTensor) and isinstance(values, DTensor):
        parameter._local_tensor, parameter._spec = values._local_tensor, values._spec


def drop_data(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor, of a DTensor this rank's part, whoever else refers to it. It is empty then."""
    from torch.distributed.tensor import DTensor

    storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
    if isinstance(tensor, DTensor):
        tensor._local_tensor = tensor._local_tensor.detach().new_empty(0)
    else:
        tensor.data = tensor.detach().new_empty(0)
    if storage.resizable():  # what is pinned in the host's memory is not
        storage.resize_(0)


def sum_in_reduce_dtype(root: Any) -> None:
    """Let autograd bring gradients of what FSDP2 has gathered inside `root` to the dtype in which they are summed. FSDP
    does so only where it lets them add up first, and asserts that all of a block are of one dtype."""
    for _, group in fsdp_groups(root):
        for parameter in group.fsdp_params:
            trained = parameter.sharded_param.requires_grad and hasattr(parameter, "_unsharded_param")
            if trained and parameter.reduce_dtype is not None:  # another than that of the computation
                parameter._unsharded_param.grad_dtype = parameter.reduce_dtype


def finish_fsdp_backward(root: Any) -> None:
    """Let FSDP2 reduce whole gradients inside `root` that no backward has reduced, and let go of what is gathered; so
    does torch.distributed.pipelining after the last backward of a stage. `root` has run forward."""
    root._get_fsdp_state()._root_post_backward_final_callback()


def abandon_fsdp_step(module: Any) -> None:
    """Make FSDP2 forget a step that ended in the middle: shards are in place, whole gradients are dropped, and the next
    forward begins anew. What had been reduced stays in `.grad`."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    for part in module.modules():
        if not isinstance(part, FSDPModule):
            continue
        state: Any = part._get_fsdp_state()
        if state._is_root and hasattr(part, "reset_iter_state"):  # from torch 2.13 on; it keeps whole gradients
            part.reset_iter_state()
        state._training_state = TrainingState.IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
    for _, group in fsdp_groups(module):
        group._training_state = TrainingState.IDLE
        group._to_sharded()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):  # from the first gather on
                parameter._unsharded_param.grad = None


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """Gloo groups made in the body share one device, whose thread wakes up a hundred times a second whether anything
    arrives or not: with a device for each of 60 groups, four idle processes spend a third of a core on it.

    `new_group` takes no options for gloo. Connections are made at once: those made on first contact get their numbers
    per group, which one device cannot tell apart, and making one waits for the peer where no timeout is looked at.
    """
    if not dist.is_gloo_available():
        yield
        return
    theirs = distributed_c10d.ProcessGroupGloo

    class OnSharedDevice(theirs):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **more: Any) -> None:
            options: Any = theirs._Options()  # type: ignore[attr-defined]
            for name, value in more.items():  # torch 2.14 passes enable_reconfigure, which is an option too
                if value:
                    setattr(options, name, value)
            options._devices = _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
            options._threads, options._timeout = 2 * len(options._devices), timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = theirs  # type: ignore[misc]


@cache
def _gloo_devices(interfaces: str) -> list[Any]:
    """As gloo groups make them by default: one per interface."""
    if not interfaces:
        return [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    return [dist.ProcessGroupGloo.create_device(interface=name, lazy_init=False) for name in interfaces.split(",")]


def shared_buffer(size: int, pieces: Iterable[tuple[int, torch.Tensor]]) -> torch.Tensor:
    """uint8 `[size]` in memory that other processes can map, with tensors at their offsets: one made elsewhere would be
    copied there. Written as a file: a page of a mapping costs more when it is first touched than the copy. Raises
    OSError: there is no more such memory."""
    storage = torch.UntypedStorage._new_using_fd_cpu(size)
    for start, tensor in pieces:
        left = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        while left:
            done = os.pwrite(storage._share_fd_cpu_()[0], left, start)
            left, start = left[done:], start + done
    return torch.empty(0, dtype=torch.uint8).set_(storage)


set_group_timeout = _set_pg_timeout
"""`set_group_timeout(timeout, group)`: how long collectives of an existing process group may wait."""


@contextmanager
def fake_process_group(size: int, rank: int = 0) -> Iterator[None]:
    """This process as `rank` of `size` that do not exist: collectives send nothing, and what they return has the right
    shape and no meaning. Only where there is no process group yet."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_prop_cache()  # of meshes whose groups are gone, and which equal the next one's


@cache
def python_device(name: str, module: Any) -> torch.device:
    """Make `name` a type of device beside those of this build of torch, with `module` as its `torch.cuda`. Once per
    process, and for its life: torch has room for one such device. It is available while `module.is_available()`."""
    from torch.utils import backend_registration

    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return bool(module.is_available())

        is_built = is_available

        def has_primary_context(self, _: int) -> bool:
            return self.is_available()

    backend_registration._setup_privateuseone_for_python_backend(name, backend_module=module, hook=Hook())
    return torch.device(name, 0)


_STATE = slice(3, 3 + 624)  # of Mersenne Twister, in a CPU generator's state as 64-bit words


def seeded_generator(seed: int) -> torch.Generator:
    """A generator of the CPU that depends on all bits of `seed`, at least 0, however many; `manual_seed` takes 32.
    Raises RuntimeError: this torch lays out a generator's state in another way than has been stored in checkpoints so
    far."""
    generator = torch.Generator().manual_seed(5489)
    state = generator.get_state()
    words = state.numpy()[: _STATE.stop * 8].view(np.uint64)
    if words[_STATE.start] != 5489:
        raise RuntimeError(f"the state of a generator of torch {torch.__version__} is laid out in an unknown way")
    words[_STATE] = np.random.SeedSequence(seed).generate_state(624)
    generator.set_state(state)
    return generator


@contextmanager
def tensors_made_on_host() -> Iterator[None]:
    """`torch.tensor(values, device=...)` makes a tensor on the host and copies it, so that dispatch modes see the copy
    (as torch's own fake tensors need it); without, it is made where no mode looks."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


def fake_mode_in_use() -> FakeTensorMode | None:
    """The FakeTensorMode that is entered. It comes after all other dispatch modes, whenever these were entered."""
    found: FakeTensorMode | None = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return found


def finished_work() -> Any:
    """The handle of a collective that is over, as an operation of `c10d` returns it."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


@contextmanager
def without_autocast(key: str) -> Iterator[None]:
    """Operations of the body pass over dispatch key `key` (an autocast key)."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    with torch._C._ExcludeDispatchKeyGuard(keys):
        yield


dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
"""The dispatch modes of this thread, outermost first."""

push_dispatch_mode: Callable[[Any], None] = _push_mode
"""Let this thread have one more, innermost."""

without_modes = _disable_current_modes
"""`with without_modes():` no dispatch mode sees the operations of the body."""


def storage_prefix(text: str) -> Any:
    """By which a plan tells DCP's FileSystemWriter what names of files begin with."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return _StoragePrefix(text)


def default_store() -> dist.Store:
    """The store of the default process group, on which all ranks can leave word."""
    return distributed_c10d._get_default_store()


@contextmanager
def trunc_normal_calls(instead: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, `torch.nn.init.trunc_normal_` calls `instead(original, tensor, mean, std, a, b, generator)`.

    It is no operation that a dispatch mode could see: it rejects draws in a loop, and does nothing on the meta device.
    """
    from torch.nn import init

    owner: Any = init
    original = owner._no_grad_trunc_normal_
    owner._no_grad_trunc_normal_ = partial(instead, original)
    try:
        yield
    finally:
        owner._no_grad_trunc_normal_ = original


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called on it."""
    return bool(parameter._backward_hooks) or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
