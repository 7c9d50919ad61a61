"""What one device reaches in bf16: matrix products, memory, launches; fits the numbers of a machine file.

    python tools/bench.py rates                # on a GPU, about half a minute
    python tools/bench.py rates --device cpu   # small sizes, to try it

`efficiency` is fitted to products of 4096 rows and more, with their bytes at the measured bandwidth, by least squares
of the logarithm; smaller ones are bound by the host on fast devices. `launch` is the host's time for one product that
nothing waits for. src/hetmesh/cost/machines/h100.toml has the numbers of tools/results/rates.json.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hetmesh.cost.machine import find_machine

JUDGES = ()
"""What an output of it judges (`kept.py`)."""

ROWS = (1024, 4096, 8192, 16384)
BOUND_BY_THE_DEVICE = 4096  # rows
SIZES = (
    *((1024, 4096), (1152, 4304), (2048, 2048), (4096, 1376), (4096, 4096), (4096, 11008), (5120, 13824)),
    *((6144, 3072), (6144, 24576), (8192, 3584), (8192, 28672)),
)
"""Inputs and outputs of products: of LLMs and encoders of 0.4B to 70B, some as one of eight ranks holds them."""
COPIED = 1 << 30  # bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this benchmark."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--peak", type=float, metavar="FLOPS", help="FLOP/s; default: of the machine file of the GPU")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, then fit."""
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("rates: this machine has no GPU; --device cpu tries the benchmark with small sizes")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    machine = find_machine(name)
    peak = args.peak or (machine.peak("bfloat16") if machine else None)
    small = device.type == "cpu"
    scale = 64 if small else 1
    bandwidth = _copy(COPIED // scale, device)
    products = []
    for rows in ROWS:
        for inputs, outputs in SIZES:
            shape = rows // scale, inputs // scale, outputs // scale
            products.append({"shape": shape, "s": _product(*shape, device)})
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "dtype": "bfloat16"}
    result |= {"memory_bandwidth": bandwidth, "launch_s": _launch(device), "peak_flops": peak}
    if peak:
        large = [(each["shape"], each["s"]) for each in products if each["shape"][0] * scale >= BOUND_BY_THE_DEVICE]
        overhead = machine.operation_overhead if machine else 0.0
        result["efficiency"], result["efficiency_error"] = fit_efficiency(large, bandwidth, peak, overhead)
    return result | {"products": products}


def fit_efficiency(
    products: list[tuple[tuple[int, int, int], float]], bandwidth: float, peak: float, overhead: float = 0.0
) -> tuple[float, float]:
    """The share of `peak` (FLOP/s) with which FLOPs plus bytes explain the seconds of products best, to two digits.

    Args:
        products: rows, inputs and outputs of each, and its seconds.
        overhead: seconds of each beyond its FLOPs and bytes, as the machine file has it.

    Returns:
        The share, and the root of the mean squared logarithm of predicted over measured.
    """

    def error(share: float) -> float:
        logs = []
        for (rows, inputs, outputs), seconds in products:
            moved = 2 * (rows * inputs + rows * outputs + inputs * outputs) / bandwidth
            logs.append(math.log((overhead + 2 * rows * inputs * outputs / (share * peak) + moved) / seconds))
        return math.sqrt(statistics.fmean(x * x for x in logs))

    best = min((percent / 100 for percent in range(1, 101)), key=error)
    return best, error(best)


def _copy(size: int, device: torch.device) -> float:
    """Bytes/s, those read and those written."""
    source = torch.randn(size // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device)


def _product(rows: int, inputs: int, outputs: int, device: torch.device) -> float:
    x = torch.randn(rows, inputs, dtype=torch.bfloat16, device=device)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
    return _seconds(lambda: F.linear(x, weight), device)


def _launch(device: torch.device, count: int = 200) -> float:
    """Seconds of the host per product, while the device has nothing to wait for."""
    x = torch.randn(64, 256, dtype=torch.bfloat16, device=device)
    weight = torch.randn(256, 256, dtype=torch.bfloat16, device=device)
    rounds = []
    for _ in range(6):
        _idle(device)
        started = time.perf_counter()
        for _ in range(count):
            F.linear(x, weight)
        rounds.append((time.perf_counter() - started) / count)
    return statistics.median(rounds[1:])


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median of some repetitions, after two that warm up."""
    for _ in range(2):
        call()
    if device.type == "cpu":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    _idle(device)
    started = time.perf_counter()
    call()
    _idle(device)
    count = max(5, min(50, int(0.03 / (time.perf_counter() - started))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    _idle(device)
    return statistics.median(a.elapsed_time(b) * 1e-3 for a, b in itertools.pairwise(events))


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def table(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = [f"{result['device']}, torch {result['torch']}, {result['dtype']}"]
    for each in result["products"]:
        rows, inputs, outputs = each["shape"]
        rate = 2 * rows * inputs * outputs / each["s"] / 1e12
        lines.append(f"{rows:>6} x {inputs:>5} x {outputs:>5}: {1e6 * each['s']:8.1f} us, {rate:6.1f} TFLOP/s")
    lines.append(f"memory_bandwidth {result['memory_bandwidth']:.3g} bytes/s")
    lines.append(f"launch {1e6 * result['launch_s']:.1f} us")
    if "efficiency" in result:
        lines.append(f"efficiency {result['efficiency']:.2f} of {result['peak_flops'] / 1e12:g} TFLOP/s")
    return "\n".join(lines)
