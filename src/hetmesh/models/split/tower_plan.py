"""Tensor parallel plans of towers that come without one, from the names of the linear layers in their blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh.parallel.sequence_parallel import hidden_of, with_hidden
from hetmesh.parallel.tensor_parallel import matches

PAIRS: Sequence[tuple[frozenset[str], frozenset[str]]] = (
    (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"out_proj", "o_proj", "projection_layer", "proj"})),
    (frozenset({"query", "key", "value"}), frozenset({"dense", "proj"})),
    (frozenset({"gate_proj", "up_proj"}), frozenset({"down_proj"})),
    (frozenset({"fc1"}), frozenset({"fc2"})),
    (frozenset({"linear_fc1"}), frozenset({"linear_fc2"})),
    (frozenset({"lin1"}), frozenset({"lin2"})),
)
"""Names of linear layers that read one input -> of the one layer, any of these, that their outputs go to."""

DEGREE = 2
"""The degree at which a plan is tried."""


def repeated_blocks(module: nn.Module) -> tuple[str, ...]:
    """FQNs of the blocks of a module: the members of its ModuleLists whose members are of one class, several parts and
    not inside another block."""
    found: list[str] = []
    for name, part in module.named_modules():
        members = list(part.children()) if isinstance(part, nn.ModuleList) else []
        same = len({type(member) for member in members}) == 1
        if same and any(True for _ in members[0].children()) and not any(name.startswith(f"{b}.") for b in found):
            found += [f"{name}.{i}" for i in range(len(members))]
    return tuple(found)


def tower_blocks(module: nn.Module) -> tuple[str, ...]:
    """Of the blocks those of the longest list: a tower's, where others merge what it gives."""
    lists: dict[str, list[str]] = {}
    for name in repeated_blocks(module):
        lists.setdefault(name.rpartition(".")[0], []).append(name)
    longest: list[str] = max(lists.values(), key=len, default=[])
    return tuple(longest)


def largest_parts(module: nn.Module, blocks: Sequence[str], prefix: str = "") -> Iterator[str]:
    """The blocks, and the largest other parts that hold parameters, in order of registration."""
    for name, child in module.named_children():
        fqn = f"{prefix}{name}"
        if not any(True for _ in child.parameters()):
            continue
        if fqn in blocks or not any(block.startswith(f"{fqn}.") for block in blocks):
            yield fqn
        else:
            yield from largest_parts(child, blocks, f"{fqn}.")


def tower_plan(tower: nn.Module, works: Callable[[nn.Module], bool]) -> tuple[Mapping[str, str], Mapping[str, int]]:
    """The plan of a tower, and the sizes that a degree must divide.

    A group of layers is split only if halves of it compute the halves of what it computes: code that reshapes by full
    sizes does not, and its group stays whole. Layers that make queries, keys and values at once are never split.
    `tower`: on which `works` can be tried; blocks that compute nothing are like the first one.
    """
    plan: dict[str, str] = {}
    sizes: dict[str, int] = {}
    refused: set[str] = set()
    for block in repeated_blocks(tower):
        for name, part in tower.get_submodule(block).named_modules():
            holder = f"{block}.{name}" if name else block
            pattern = layer_pattern(holder)
            if pattern in refused or (group := linear_group(part)) is None:
                continue
            if f"{pattern}.{group[1]}" not in plan and not _splits(tower, holder, *group, works):
                refused.add(pattern)
                continue
            plan |= group_plan(pattern, *group)
            key, value = _size(part, group[0])
            sizes[key] = value
    return plan, sizes


def token_gathered(
    tower: nn.Module, block: str, plan: Mapping[str, str], works: Callable[[nn.Module], bool]
) -> tuple[str, ...]:
    """Patterns of the parts of blocks that read all tokens under sequence parallelism, although `plan` leaves them
    whole. Raises ValueError where what lies between these and the split parts mixes tokens: with random weights it is
    tried on all of some tokens and on halves of them. Changes `tower`, whose blocks then hand on more than they did.
    """
    holder: Any = tower.get_submodule(block)
    found = {name: plan[p] for name, _ in holder.named_modules() for p in plan if matches(f"{block}.{name}", p)}
    split = {name.rpartition(".")[0] for name, style in found.items() if style == "rowwise"} - {""}
    linears = [name for name, part in holder.named_modules() if isinstance(part, nn.Linear) and name not in found]
    whole = {name.partition(".")[0] for name in linears}
    lengths: dict[type, int] = {}
    for name in (*split, *whole):
        hand_on(holder.get_submodule(name), lengths)
    if (call := _first_call(tower, holder, works)) is None:
        raise ValueError("its blocks cannot be tried")
    args, kwargs = _with_random_input(*call, hidden_of(*call).shape[-1])
    every = hidden_of(args, kwargs)

    def run(tokens: Tensor) -> Tensor:
        given, more = with_hidden(args, kwargs, tokens)
        output = holder(*given, **more)
        return (output if isinstance(output, Tensor) else output[0]).flatten(0, -2)

    try:
        with _random_weights(holder), torch.no_grad():
            at_once, joined = run(every), torch.cat([run(half[None]) for half in every.flatten(0, -2).chunk(2)])
    except Exception as error:  # whatever it makes of other shapes
        raise ValueError(f"its blocks do not take shares of the tokens ({type(error).__name__})") from error
    if at_once.shape != joined.shape or not torch.allclose(at_once, joined, rtol=1e-3, atol=1e-4):
        raise ValueError("its blocks mix tokens outside of their attention")
    return tuple(f"{layer_pattern(block)}.{name}" for name in sorted(whole))


def layer_pattern(fqn: str) -> str:
    """An FQN with `*` for the numbers of layers."""
    return ".".join("*" if name.isdigit() else name for name in fqn.split("."))


def group_plan(holder: str, entering: Sequence[str], leaving: str) -> dict[str, str]:
    """The plan of the linear layers of a group, in modules that match `holder`."""
    return {f"{holder}.{name}": "colwise" for name in entering} | {f"{holder}.{leaving}": "rowwise"}


def linear_group(part: nn.Module) -> tuple[tuple[str, ...], str] | None:
    """The layers of `part` that a plan splits together, if all its linear layers are among them."""
    linear = {name for name, child in part.named_children() if type(child) is nn.Linear}
    for entering, leaving in PAIRS:
        if entering <= linear and len(out := linear - entering) == 1 and out <= leaving:
            return tuple(sorted(entering)), next(iter(out))
    return None


def _size(part: nn.Module, entering: Sequence[str]) -> tuple[str, int]:
    """What a degree must divide: the heads of an attention, else the width of an MLP."""
    heads = next((getattr(part, key) for key in ("num_heads", "num_attention_heads") if hasattr(part, key)), None)
    if heads is not None:
        return "num_attention_heads", int(heads)
    return "intermediate_size", part.get_submodule(entering[0]).out_features  # type: ignore[return-value]


def _splits(
    tower: nn.Module, holder: str, entering: Sequence[str], leaving: str, works: Callable[[nn.Module], bool]
) -> bool:
    """Whether what the leaving layer gets on each of two ranks is its half of what it gets on one: with random weights
    and inputs, as code that reshapes by full sizes may run and mix heads."""
    part = tower.get_submodule(holder)
    if (call := _first_call(tower, part, works)) is None:
        return False
    first: Any = part.get_submodule(entering[0])
    args, kwargs = _with_random_input(*call, width=first.in_features)
    with _random_weights(part), torch.no_grad():
        whole = _entering_last(part, leaving, args, kwargs)
        halves = []
        for rank in range(DEGREE):
            before = dict(part._modules)
            try:
                for name in (*entering, leaving):
                    part._modules[name] = _shard(part.get_submodule(name), int(name == leaving), rank)
                halves.append(_entering_last(part, leaving, args, kwargs))
            except Exception:  # whatever reshaping by full sizes leads to
                return False
            finally:
                part._modules.update(before)
    joined = torch.cat(halves, dim=-1)
    return joined.shape == whole.shape and torch.allclose(joined, whole, rtol=1e-3, atol=1e-4)


def _first_call(
    tower: nn.Module, part: nn.Module, works: Callable[[nn.Module], bool]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Args and kwargs of the first call of `part`; None where `tower` does not work, or does not call it."""
    calls: list[Any] = []
    handle = part.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    try:
        return calls[0] if works(tower) and calls else None
    finally:
        handle.remove()


def _entering_last(part: nn.Module, leaving: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the layer `leaving` gets when `part` is called."""
    taken: list[Tensor] = []
    handle = part.get_submodule(leaving).register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    try:
        part(*args, **kwargs)
    finally:
        handle.remove()
    return taken[0]


def _with_random_input(
    args: tuple[Any, ...], kwargs: dict[str, Any], width: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call with other hidden states: the first of its tensors that are `width` wide."""
    draw = torch.Generator().manual_seed(0)
    found = False

    def random(value: Any) -> Any:
        nonlocal found
        wide = isinstance(value, Tensor) and value.is_floating_point() and value.shape[-1:] == (width,)
        if found or not wide:
            return value
        found = True
        return torch.randn(value.shape, generator=draw, dtype=value.dtype)

    return tuple(map(random, args)), {name: random(value) for name, value in kwargs.items()}


@contextmanager
def _random_weights(part: nn.Module) -> Iterator[None]:
    """Random values for all parameters of a part, about as large as trained ones."""
    draw = torch.Generator().manual_seed(1)
    before = [(owner, dict(owner._parameters)) for owner in part.modules()]
    try:
        for owner, parameters in before:
            for name, p in parameters.items():
                if p is not None:
                    scale = max(p.shape[-1:], default=1) ** -0.5
                    values = torch.randn(p.shape, generator=draw, dtype=p.dtype) * scale
                    owner._parameters[name] = nn.Parameter(values, requires_grad=False)
        yield
    finally:
        for owner, parameters in before:
            owner._parameters.update(parameters)


def _shard(linear: nn.Module, dim: int, rank: int) -> nn.Module:
    """A linear layer as one of the ranks has it; `dim` of its weight is split."""
    shard = copy.copy(linear)
    shard._parameters = dict(linear._parameters)
    for name, parameter in linear._parameters.items():
        if parameter is not None and (name == "weight" or dim == 0):
            shard._parameters[name] = nn.Parameter(parameter.detach().chunk(DEGREE, dim)[rank], requires_grad=False)
    return shard


def hand_on(block: Any, lengths: dict[type, int]) -> None:
    """Let a block return what it gets, in a tuple as long as its own if it returns one, which is seen by its first run.
    `lengths`: what is known of kinds of blocks; 0 of one that returns no tuple."""
    own = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = (*args, *kwargs.values())[0]
        if type(block) not in lengths:
            made = own(*args, **kwargs)
            lengths[type(block)] = len(made) if isinstance(made, tuple) else 0
        others = [None] * (lengths[type(block)] - 1)
        return (hidden, *others) if lengths[type(block)] else hidden

    block.forward = forward
