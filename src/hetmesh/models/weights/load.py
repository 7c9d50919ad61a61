"""Fill a module with the weights of a local checkpoint: each rank reads only the slices of its own shards.

The module is built without weights (`build_empty`), sharded, and only then gets memory for what this rank holds. So a
rank's peak is its shard and a view of one tensor in its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hetmesh.models.adapter import Adapter
from hetmesh.models.weights.fill_module import local_share, materialize, plain_name
from hetmesh.models.weights.lora import is_adapter
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.models.weights.stored_form import Read, StoredForm, reads
from hetmesh.parallel.stage_views import absent_layers


def check_weights(adapter: Adapter, module: nn.Module, pretrained: Pretrained) -> dict[str, str]:
    """The checkpoint's name of each parameter and persistent buffer of `module`, which may be sharded and on meta.
    Raises RecipeError if the checkpoint's tensors are not those of the module."""
    expected, aliases = own_tensors(module)
    elsewhere = tuple(rf"{re.escape(layer)}\..*" for layer in absent_layers(module))  # on other pipeline stages
    unused = (*adapter.checkpoint_unused, *elsewhere)
    return pretrained.match(expected, adapter.checkpoint_names, unused, aliases, stored_forms(adapter, pretrained))


def stored_forms(adapter: Adapter, pretrained: Pretrained) -> Mapping[str, StoredForm]:
    """The tensors of a checkpoint as the adapter's model reads them, by the names that `check_weights` gives."""
    own = adapter.abilities.stored_forms
    return pretrained.forms if own is None else own(pretrained)


def own_tensors(module: nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes of the parameters and persistent buffers of `module` without LoRA adapters, by name; and, for tied
    weights, every further name -> the first."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    expected: dict[str, tuple[int, ...]] = {}
    for name, tensor in _own(module):
        first = names.setdefault(id(tensor), name)
        if first == name:
            expected[name] = tuple(tensor.shape)
        else:
            aliases[name] = first
    return expected, aliases


def load_weights(
    adapter: Adapter,
    module: nn.Module,
    pretrained: Pretrained,
    device: torch.device | str = "cpu",
    roots: Sequence[nn.Module] = (),
) -> None:
    """Give `module` (from `build_empty`, sharded or not) memory on `device` and the weights of the checkpoint.

    Every rank reads for itself; nothing is sent. Values are converted to the dtype of the parameters. Tied parameters
    stay tied. LoRA adapters get memory but no values, which come from `draw_weights`.

    Args:
        roots: the modules that wrap `module` or parts of it, where FSDP was applied to these.

    Raises:
        RecipeError: the checkpoint's tensors are not those of the module; raised before anything is allocated.
    """
    found = check_weights(adapter, module, pretrained)
    materialize(module, torch.device(device), roots)
    read_tensors(adapter, pretrained, found, _own(module))


def read_tensors(
    adapter: Adapter, pretrained: Pretrained, found: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Read values into `tensors`, sharded or not, by their names in the module. `found`: from `check_weights`; tensors
    that are not in it are left unchanged."""
    from safetensors import safe_open

    forms = stored_forms(adapter, pretrained)
    by_file: dict[Path, list[tuple[Tensor, Read]]] = {}
    for name, tensor in tensors:
        if name in found:  # else it is tied to one that is
            local, share = local_share(tensor.detach())
            for read in reads(forms[found[name]], share):
                by_file.setdefault(pretrained.tensors[read.block.stored].file, []).append((local, read))
    with torch.no_grad():
        for file, wanted in by_file.items():
            with safe_open(file, "pt") as reader:
                for local, read in wanted:
                    value = reader.get_slice(read.block.stored)[read.source or ...]
                    local[read.target].copy_(read.block.to_module(value))


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under every name that they have."""
    for prefix, owner in module.named_modules():
        buffers = {n: b for n, b in owner._buffers.items() if n not in owner._non_persistent_buffers_set}
        for name, tensor in {**owner._parameters, **buffers}.items():
            if tensor is not None:
                yield (f"{prefix}.{name}" if prefix else name), tensor


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """`saved_tensors` without LoRA adapters, by the names before the module was wrapped."""
    return ((plain_name(name), tensor) for name, tensor in saved_tensors(module) if not is_adapter(name))


@contextmanager
def stand_ins(module: nn.Module) -> Iterator[None]:
    """In the body, meta parameters are replaced by expanded zeros on the CPU, which take no memory either.

    For code that makes real tensors on the device of a parameter (LoRA adapters).
    """
    zeros = {
        id(p): nn.Parameter(torch.zeros((), dtype=p.dtype).expand(p.shape), requires_grad=p.requires_grad)
        for p in module.parameters()
        if p.is_meta
    }
    originals = {id(zeros[id(p)]): p for p in module.parameters() if p.is_meta}
    _exchange(module, zeros)
    try:
        yield
    finally:
        _exchange(module, originals)


def _exchange(module: nn.Module, others: Mapping[int, nn.Parameter]) -> None:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in others:
                other = others[id(parameter)]
                other.requires_grad = parameter.requires_grad
                owner._parameters[name] = other
