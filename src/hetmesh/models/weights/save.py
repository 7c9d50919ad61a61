"""Write tensors as the safetensors files of a Hugging Face directory, and read them again to see that they are there.

The inverse of `load.py`: one file after the other, so that no more than one of them is in memory at a time.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hetmesh.errors import OutputError
from hetmesh.files import to_json, writing

LARGEST_FILE = 5_000_000_000
"""Bytes of a file, unless one tensor is larger; transformers' limit up to version 4."""

NAME = "model"


@dataclass(frozen=True)
class Stored:
    """One tensor of a directory: how many numbers of which type it will have."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in a file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What was written: number of tensors, their bytes, and the files they are in."""

    tensors: int
    bytes: int
    files: tuple[str, ...]


def write_tensors(
    folder: Path,
    tensors: Mapping[str, Stored],
    read: Callable[[Sequence[str]], Mapping[str, Tensor]],
    largest: int = LARGEST_FILE,
    name: str = NAME,
) -> Written:
    """Write `tensors` into `folder`: one file, or several with their index. Each is read again and compared bit by bit.

    Args:
        read: values of some of the tensors, by name; asked for those of one file at a time.
        largest: bytes of a file.
        name: what the files are called.

    Raises:
        OutputError: a file cannot be written, or holds something else than was written.
    """
    from safetensors.torch import save_file

    groups = _groups(tensors, largest)
    width = len(groups)
    several = [f"{name}-{i + 1:05}-of-{width:05}.safetensors" for i in range(width)]
    files = several if width > 1 else [f"{name}.safetensors"]
    for file, names in zip(files, groups, strict=True):
        values = {each: value.contiguous() for each, value in read(names).items()}
        for each in names:
            found = Stored(tuple(values[each].shape), values[each].dtype)
            if found != tensors[each]:
                raise OutputError(f"{folder / file}: {each} should be {tensors[each]}, and is {found}")
        with writing(folder / file):
            try:
                save_file(values, folder / file, metadata={"format": "pt"})
            except Exception as error:  # safetensors has its own for a full disk
                raise OutputError(f"{folder / file} cannot be written: {error}") from error
            with open(folder / file, "rb") as stream:
                os.fsync(stream.fileno())
        _compare(folder / file, values)
    total = sum(each.bytes for each in tensors.values())
    if width > 1:
        places = {each: file for file, names in zip(files, groups, strict=True) for each in names}
        with writing(folder / f"{name}.safetensors.index.json"):
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (folder / f"{name}.safetensors.index.json").write_text(to_json(index, 2) + "\n", encoding="utf-8")
    return Written(len(tensors), total, tuple(files))


def _groups(tensors: Mapping[str, Stored], largest: int) -> list[list[str]]:
    """Names of each file, in their order, filled up to `largest` bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, each in tensors.items():
        if groups[-1] and filled + each.bytes > largest:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += each.bytes
    return groups


def _compare(file: Path, values: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as reader:
            if set(reader.keys()) != set(values):
                raise OutputError(f"{file}: it holds other tensors than were written")
            for name, value in values.items():
                found = reader.get_tensor(name)
                if (
                    found.dtype != value.dtype
                    or found.shape != value.shape
                    or not torch.equal(_bits(found), _bits(value))
                ):
                    raise OutputError(f"{file}: {name} is not what was written")
    except (SafetensorError, OSError) as error:
        if isinstance(error, OutputError):
            raise
        raise OutputError(f"{file} cannot be read again: {error}") from error


def as_dtype(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`value`, a tensor `name`, as `dtype`. Raises OutputError where that makes a finite value infinite."""
    found = value.to(dtype)
    if found.dtype != value.dtype and not torch.equal(found.isfinite(), value.isfinite()):
        largest = float(value.nan_to_num(0, 0, 0).abs().max())
        raise OutputError(f"{name} has values up to {largest:.3g}, which {dtype} does not hold; choose another dtype")
    return found


def _bits(tensor: Tensor) -> Tensor:
    """Values as integers: equal where every bit is, also of what is no number."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def with_dtype(config: object, dtype: torch.dtype) -> object:
    """A config.json's content, in which it and the parts it describes say that weights are of `dtype`."""
    if isinstance(config, list):
        return [with_dtype(each, dtype) for each in config]
    if not isinstance(config, Mapping):
        return config
    named = str(dtype).removeprefix("torch.")
    return {
        key: named if key in ("dtype", "torch_dtype") and not isinstance(value, Mapping) else with_dtype(value, dtype)
        for key, value in config.items()
    }


def write_config(folder: Path, config: Mapping[str, object], dtype: torch.dtype | None) -> None:
    """Write config.json, for weights of `dtype`; None: as it is."""
    told: object = dict(config)
    if dtype is not None:
        told = with_dtype({**config} if {"dtype", "torch_dtype"} & set(config) else {**config, "dtype": None}, dtype)
    with writing(folder / "config.json"):
        text = json.dumps(told, indent=2, ensure_ascii=False)
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")
