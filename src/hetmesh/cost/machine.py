"""Machines: peak rates, memory and link bandwidths, one TOML file each under machines/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hetmesh.errors import RecipeError
from hetmesh.files import from_toml, read_text
from hetmesh.formatting import toml

_FOLDER = Path(__file__).parent / "machines"

MACHINES = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""Names that `load_machine` knows."""

_MAX_NUMBER = 1e30  # of any number: what is made of it stays finite
_INTEGERS = ("memory_bytes", "context_bytes", "communicator_bytes", "ranks_per_node")


TYPICAL_PEAK = 5e10
"""FLOPs per second of a machine that says none: about a CPU core."""


@dataclass(frozen=True)
class Machine:
    """One kind of device and what connects it. Rates are what the vendor promises, not what programs reach.

    Attributes:
        name: the file's name.
        source: where the numbers are from.
        peak_flops: dense FLOP/s of one device by dtype (`"bfloat16"`). A dtype that is missing is unknown: on a CPU it
            is measured when a run starts.
        memory_bytes: of one device; 0 if unknown.
        context_bytes: of it, what a process holds before its first tensor: the driver's context, loaded kernels, the
            workspace of matrix products.
        communicator_bytes: of it, what each communicator that a process uses holds.
        memory_bandwidth: bytes/s; 0 if unknown.
        node_bandwidth: bytes/s that a device can send to others of its node, one direction.
        network_bandwidth: the same to other nodes.
        ranks_per_node: consecutive ranks that share a node; 0: all ranks do.
        busy_slowdown: how many times as long work takes while 1, 2, ... ranks of a node compute; with more ranks, the
            last. Empty: devices do not slow each other down.
        efficiency: the fraction of the peak that the matrix products of a layer reach; `tools/bench.py rates` measures
            it. Where a file has none: 0.46 lets a model of this kind meet the published seconds of Optimus's balanced
            baseline (arXiv 2408.03505, 3072 H100-class GPUs).
        operation_overhead: seconds that one operation (a product, a norm, attention) takes beyond its FLOPs and bytes,
            with the small ones around it.
        launch_overhead: seconds for which the host is busy with one such operation before a device with streams can
            begin it: a forward or backward of a stage takes at least as long as launching its operations.
        action_overhead: seconds that the runtime itself takes for each forward and backward of a stage.
        shard_overhead: seconds that FSDP's hooks take around each forward and backward of a layer.
        step_overhead: the same once per step: drawing and planning it, agreeing on its loss.
        hand_over: seconds that a rank's lending itself to another thread takes, both ways; 0: a device with streams.
        node_latency, network_latency: seconds of a message without content.
        devices: parts of the names under which CUDA reports such a device.
    """

    name: str
    source: str
    peak_flops: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    memory_bytes: int = 0
    context_bytes: int = 0
    communicator_bytes: int = 0
    memory_bandwidth: float = 0.0
    node_bandwidth: float = 0.0
    network_bandwidth: float = 0.0
    ranks_per_node: int = 0
    busy_slowdown: tuple[float, ...] = ()
    efficiency: float = 0.46
    operation_overhead: float = 0.0
    launch_overhead: float = 0.0
    action_overhead: float = 0.0
    shard_overhead: float = 0.0
    step_overhead: float = 0.0
    hand_over: float = 0.0
    node_latency: float = 0.0
    network_latency: float = 0.0
    devices: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float | None:
        """Dense FLOP/s in `dtype`, None if unknown."""
        return self.peak_flops.get(dtype)


def load_machine(name_or_path: str) -> Machine:
    """The machine of a name in `MACHINES`, or of a TOML file of your own. Raises RecipeError: there is none, or it has
    unknown keys or numbers that are none."""
    path = _FOLDER / f"{name_or_path}.toml" if name_or_path in MACHINES else Path(name_or_path)
    if path.suffix != ".toml" or not path.is_file():
        raise RecipeError(f"machine {name_or_path!r}: valid are {', '.join(MACHINES)}, or the path of a TOML file")
    try:
        table = from_toml(read_text(path))
    except OSError as error:
        raise RecipeError(f"machine {path}: cannot be read: {error}") from error
    except ValueError as error:
        raise RecipeError(f"machine {path}: not valid TOML: {error}") from error
    return _machine(path, table)


def machine_toml(machine: Machine, comment: str) -> str:
    """The text of a file that `load_machine` reads as `machine`. `comment`: its first line."""
    keys = {own.name: getattr(machine, own.name) for own in fields(machine) if own.name not in ("name", "peak_flops")}
    lines = [f"{key} = {toml(value)}" for key, value in keys.items() if value or key in ("source", "efficiency")]
    peaks = [f"{dtype} = {toml(flops)}" for dtype, flops in machine.peak_flops.items()]
    return "\n".join([f"# {comment}", *lines, *(["", "[peak_flops]", *peaks] if peaks else [])]) + "\n"


def find_machine(device_name: str) -> Machine | None:
    """The machine whose CUDA device reports itself as `device_name` (`"NVIDIA H100 80GB HBM3"`), None if unknown."""
    machines = (load_machine(name) for name in MACHINES)
    return next((machine for machine in machines if any(part in device_name for part in machine.devices)), None)


def _machine(path: Path, table: Mapping[str, Any]) -> Machine:
    valid = [field.name for field in fields(Machine) if field.name != "name"]
    if unknown := sorted(set(table) - set(valid)):
        raise RecipeError(f"machine {path}: unknown keys {unknown}; valid are {valid}")
    peaks = table.get("peak_flops", {})
    if not isinstance(peaks, dict):
        raise RecipeError(f"machine {path}: peak_flops must be a table of dtypes and FLOP/s, got {peaks!r}")
    numbers = {k: v for k, v in table.items() if k not in ("source", "devices", "peak_flops", "busy_slowdown")}
    for key, value in {**numbers, **{f"peak_flops.{k}": v for k, v in peaks.items()}}.items():
        if type(value) not in (int, float) or not 0 <= value <= _MAX_NUMBER:
            raise RecipeError(f"machine {path}: {key} must be a number from 0 to {_MAX_NUMBER:g}, got {value!r}")
    if numbers.get("efficiency") == 0:
        raise RecipeError(f"machine {path}: efficiency must be above 0")
    slowdown = table.get("busy_slowdown", [])
    if not isinstance(slowdown, list) or not all(
        type(value) in (int, float) and 0 <= value <= _MAX_NUMBER for value in slowdown
    ):
        raise RecipeError(f"machine {path}: busy_slowdown must be a list of numbers, got {slowdown!r}")
    if slowdown and (slowdown[0] != 1 or slowdown != sorted(slowdown)):
        raise RecipeError(f"machine {path}: busy_slowdown must begin with 1 and never fall, got {slowdown!r}")
    devices = table.get("devices", [])
    if not isinstance(devices, list) or not all(isinstance(device, str) for device in devices):
        raise RecipeError(f"machine {path}: devices must be a list of texts, got {devices!r}")
    typed: dict[str, Any] = {k: int(v) if k in _INTEGERS else float(v) for k, v in numbers.items()}
    typed |= {"busy_slowdown": tuple(map(float, slowdown)), "devices": tuple(devices)}
    peak_flops = MappingProxyType({k: float(v) for k, v in peaks.items()})
    return Machine(path.stem, str(table.get("source", path)), peak_flops, **typed)
