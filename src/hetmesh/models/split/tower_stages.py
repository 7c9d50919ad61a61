"""Pipeline stages of a tower that is only called as a whole, through its model's `get_..._features`.

A stage runs that method up to its own last layer. Layers of earlier stages are there without weights, for what others
take beside the hidden states (positions, masks, windows): it follows from the shapes of the items. The last of them
gives what the stage before returned. Their blocks hand on what they get; the rest (the embedding of patches) is small.

Where a tower can be cut is tried: with simple layers, it must make in stages what it makes in one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh._torch_compat import tree_leaves
from hetmesh.errors import HetmeshError
from hetmesh.graph.module_graph import Activation
from hetmesh.models.split.tower_plan import tower_blocks
from hetmesh.parallel.stage_views import is_absent, shared_parameters, view
from hetmesh.parallel.tensor_parallel import within

Encode = Callable[[nn.Module], Mapping[str, Tensor]]


class NoStages(HetmeshError):
    """Why a tower cannot be cut."""


class _EndOfStage(Exception):
    """The last layer of a stage has run."""


class TowerStage:
    """One stage of a tower, for a view of it (`hetmesh.parallel.stage_views`), in which layers are absent.

    Args:
        hollow: the whole tower without weights, of which the layers before the stage's own are taken.
        like: of the device and dtype of hidden states; None for the first stage.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str], hollow: nn.Module, like: Tensor | None) -> None:
        held = [i for i, name in enumerate(layers) if not is_absent(module.get_submodule(name))]
        for name in layers[: held[0]]:
            assert like is not None
            parent, _, child = name.rpartition(".")
            stand_in = _copied(hollow.get_submodule(name), partial(_without_weights, like=like))
            setattr(module.get_submodule(parent), child, stand_in.eval())
        if held[0]:
            module.get_submodule(layers[held[0] - 1]).register_forward_hook(self._begin)
        self.is_last = held[-1] == len(layers) - 1
        if not self.is_last:
            module.get_submodule(layers[held[-1]]).register_forward_hook(self._end)
        self.given: Tensor | None = None
        self.made: Tensor | None = None

    def run(self, module: nn.Module, encode: Encode, given: Tensor | None, empty: bool) -> Mapping[str, Tensor]:
        """What `encode` makes; of a stage that is not the last the hidden states after its last layer, flat.

        Args:
            given: what the stage before returned, None for the first one.
            empty: whether nothing passes, as the only item of the call is a blank.
        """
        self.given, self.empty, self.made = given, empty, None
        try:
            made = encode(module)
        except _EndOfStage:
            assert self.made is not None
            made = {"": self.made.flatten(0, -2)[: 0 if empty else None]}
        if self.given is not None or (self.made is None) != self.is_last:
            raise NoStages("its forward does not call the layers beside the cut")
        self.made = None
        return made

    def _begin(self, _: nn.Module, __: Any, output: Any) -> Any:
        hidden, given = _first(output), self.given
        if given is None:
            raise NoStages("its forward calls a layer twice")
        if self.empty:  # still a function of the input
            given = torch.cat([given, given.new_zeros(hidden.shape[:-1].numel(), hidden.shape[-1])])
        self.given = None
        return _with_first(output, given.view(hidden.shape))

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        self.made = _first(output)
        raise _EndOfStage


def stages_of(adapter: Any, tower: nn.Module, hollow: nn.Module) -> dict[str, Any]:
    """Where the tower of an `HfEncoderAdapter` can be cut, for `Abilities.find_stages`.

    Args:
        tower: on the meta device.
        hollow: with zeros for weights, its blocks handing on what they get.
    """
    layers, blocks = adapter.layers(), tower_blocks(tower)
    draw = torch.Generator().manual_seed(0)

    def call(batch: Mapping[str, Any]) -> tuple[Encode, Encode]:
        drawn = _with_values(batch, lambda shape: torch.randn(shape, generator=draw))
        return partial(adapter.encode, batch=drawn), partial(adapter.encode, batch=_with_values(batch, torch.ones))

    try:
        if outside := [name for name, _ in tower.named_parameters() if not within(name, *layers)]:
            raise NoStages(f"its parameters {outside[:3]} belong to none of its layers")
        if shared_parameters(tower) or not blocks:
            raise NoStages("its layers share parameters, or none are alike")
        batches, items = zip(*adapter.examples(), strict=True)
        activation, first, last = _find(hollow, layers, blocks, [call(batch) for batch in batches], items)
    except NoStages as reason:
        return {"reasons": {"activation": str(reason)}}
    except Exception as error:  # whatever the model makes of random items
        return {"reasons": {"activation": f"trying failed: {type(error).__name__}: {error!s:.200}"}}
    return {"activation": activation, "first_layers": first, "last_layers": last}


def _with_values(value: Any, make: Callable[[torch.Size], Tensor]) -> Any:
    """A batch whose numbers are those that `make` makes; whole ones (sizes) and masks stay."""
    if isinstance(value, Mapping):
        return {key: each if key.endswith("mask") else _with_values(each, make) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_values(each, make) for each in value]
    return make(value.shape) if isinstance(value, Tensor) and value.is_floating_point() else value


def _find(
    hollow: nn.Module,
    layers: Sequence[str],
    blocks: Sequence[str],
    calls: Sequence[tuple[Encode, Encode]],
    items: Sequence[int],
) -> tuple[Activation, tuple[str, ...], tuple[str, ...]]:
    """What passes between stages; the layers that the first and the last one must hold. `calls`, each
    with one for shapes alone, have these numbers of `items`."""
    shapes: list[dict[str, torch.Size]] = [{} for _ in calls]
    with torch.no_grad():
        outputs = [call(_marked(hollow, layers, seen)) for (call, _), seen in zip(calls, shapes, strict=True)]
        if any(blocks[0] not in seen for seen in shapes):
            raise NoStages("its blocks are not called as modules")
        if len(outputs[0]) > 1:
            raise NoStages("it has outputs of its blocks beside its rows")

        def works(cuts: Sequence[int], chosen: Sequence[int] = (0,)) -> bool:
            shape = (shapes[i][blocks[0]] for i in chosen)
            return all(_equal_in_stages(hollow, layers, cuts, calls[i], outputs[i], next(shape)) for i in chosen)

        at = layers.index(blocks[0]) + 1
        first = next((cut + 1 for cut in range(at, 0, -1) if not works([cut])), 1)
        last = next((cut for cut in range(len(layers) - 1, at - 1, -1) if works([cut])), 0)
        if first > at or not last or not works(range(first, last + 1)) or not works([last], range(1, len(calls))):
            raise NoStages("cut between its blocks, it computes something else")
    rows, passed = [len(output[""]) for output in outputs], [seen[blocks[0]][:-1].numel() for seen in shapes]
    ratio = Fraction(passed[0], rows[0])
    for n, more, of_items in zip(rows, passed, items, strict=True):
        if of_items == items[0] and n != rows[0]:
            ratio = Fraction(more - passed[0], n - rows[0])
    per_item = (passed[0] - ratio * rows[0]) / items[0]
    expected = [ratio * n + per_item * count for n, count in zip(rows, items, strict=True)]
    if min(ratio, per_item) < 0 or per_item.denominator > 1 or passed != expected:
        raise NoStages("how much passes between its blocks does not follow from its rows")
    features, per_row, of_rows = shapes[0][blocks[0]][-1], ratio.numerator, ratio.denominator
    activation = Activation(features, per_row=per_row, per_item=int(per_item), of_rows=of_rows)
    return activation, tuple(layers[:first]), tuple(layers[last:])


def _equal_in_stages(
    hollow: nn.Module,
    layers: Sequence[str],
    cuts: Sequence[int],
    call: tuple[Encode, Encode],
    whole: Mapping[str, Tensor],
    shape: torch.Size,
) -> bool:
    """Whether stages make what the whole tower does, and of something else from the stage before something else."""
    module, made, given = _marked(hollow, layers, {}), dict[str, Tensor](), None
    try:
        for i, (start, stop) in enumerate(pairwise((0, *cuts, len(layers)))):
            part, encode = view(module, layers, layers[start:stop]), call[min(i, 1)]
            stage = TowerStage(part, layers, hollow, next(module.parameters()))
            made = {**stage.run(part, encode, given, False)}
            if not stage.is_last and (given := made[""]).shape != (shape[:-1].numel(), shape[-1]):
                return False
        other = stage.run(part, encode, None if given is None else -given, False)
    except Exception:  # whatever a forward makes of layers that are not there
        return False
    alike = made.keys() == whole.keys() and all(_close(made[name], whole[name]) for name in whole)
    return alike and not _close(other[""], whole[""])


def _marked(hollow: nn.Module, layers: Sequence[str], shapes: dict[str, torch.Size]) -> nn.Module:
    """A tower whose weights are constants that take no memory, a different one for each, and whose layers change what
    they make by all that they are given; `shapes` gets those of what they make."""
    draw = torch.Generator().manual_seed(0)

    def constant(part: Any) -> None:
        for name, p in part._parameters.items():
            if p is not None:
                value = (0.5 + torch.rand((), generator=draw)) / max(p.shape[-1:], default=1)
                part._parameters[name] = nn.Parameter(value.expand(p.shape), requires_grad=False)
        if type(part) is nn.Linear:  # a product of such matrices takes time and says little
            taken = 7 * torch.arange(part.out_features) % part.in_features
            vars(part)["forward"] = partial(_mixed, part, taken)

    module = _copied(hollow, constant)
    parts: list[tuple[str, Any]] = [(name, module.get_submodule(name)) for name in layers]
    for i, (name, layer) in enumerate(parts):

        def forward(*args: Any, own: Any = layer.forward, i: int = i, name: str = name, **kwargs: Any) -> Any:
            output = own(*args, **kwargs)
            made, given = _first(output), [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            shapes[name] = made.shape
            mark = i + sum(x.float().clamp(-9, 9).mean() for x in given)  # masks are of infinities
            places = (torch.arange(made.numel()) % 61).view(made.shape)  # small: else rounding shows, see `_close`
            return _with_first(output, (made + mark + places).sin())

        layer.forward = forward
    return module


def _mixed(linear: Any, taken: Tensor, x: Tensor) -> Tensor:
    return (x[..., taken] + x.mean(-1, keepdim=True)) * (1 + linear.weight[0, 0])


def _copied(part: Any, change: Callable[[Any], None]) -> Any:
    """A copy with its own table of parameters and without hooks; `change` is called with each module in it."""
    twin = copy.copy(part)
    twin.__dict__ |= {key: copy.copy(value) for key, value in vars(nn.Module()).items() if "hooks" in key}
    twin.__dict__.pop("_output_capturing_hooks_installed", None)  # transformers'
    twin._parameters, twin._buffers = dict(part._parameters), dict(part._buffers)
    twin._modules = {name: child and _copied(child, change) for name, child in part._modules.items()}
    change(twin)
    return twin


def _without_weights(part: Any, like: Tensor) -> None:
    """Zeros that take no memory instead of parameters, which are no longer parameters or buffers of the module."""
    for table in (part._parameters, part._buffers):
        for name, tensor in [item for item in table.items() if item[1] is not None]:
            del table[name]
            dtype = like.dtype if tensor.is_floating_point() else tensor.dtype
            if table is part._parameters:
                tensor = torch.zeros((), dtype=dtype, device=like.device).expand(tensor.shape)
            part.__dict__[name] = tensor.to(like.device, dtype)


def _first(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _with_first(output: Any, first: Tensor) -> Any:
    return first if isinstance(output, Tensor) else (first, *output[1:])


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-5)
