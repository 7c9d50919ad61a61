"""Tables of published steps: two layouts of one model on as many GPUs, read from a CSV file and checked."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetmesh.errors import HetmeshError
from hetmesh.planner.layout_plan import ModulePlan

REFERENCE = Path(__file__).parent / "colocated_8k.csv"
"""Heterogeneous Parallelism (arXiv 2605.27678), table A2."""

COLUMNS = (
    "model",
    "vision_percent",
    "gpus",
    "homogeneous_E",
    "homogeneous_L",
    "colocated_E",
    "colocated_L",
    "gain_percent",
    "peak_gb_homogeneous",
    "peak_gb_colocated",
    "step_ms_homogeneous",
    "step_ms_colocated",
)
OPTIONAL = ("seq", "global_batch", "microbatches", "placement", "gpus_other", "phase")
_MEASURED = COLUMNS[7:10]  # may be left empty: gains follow from steps, and peaks are not always published
_BATCHES = {72: 288, 256: 256}  # global batch by GPUs in table A2; elsewhere one sample per GPU


@dataclass(frozen=True)
class Layout:
    """TP/CP/PP/DP of an encoder and an LLM."""

    encoder: tuple[int, int, int, int]
    llm: tuple[int, int, int, int]

    def plans(self, disjoint: bool, recompute: bool) -> dict[str, ModulePlan]:
        """On ranks from 0 on: the LLM on the same ones, or behind the encoder. Optimizer state is sharded over the
        replicas, while parameters and gradients are whole during a step (ZeRO-1, Megatron's distributed optimizer)."""
        first = math.prod(self.encoder) if disjoint else 0
        (tp, cp, pp, dp), (own_tp, own_cp, own_pp, own_dp) = self.encoder, self.llm
        checkpoint = "full" if recompute else "none"
        vision = ModulePlan(
            (0, math.prod(self.encoder)), (pp, 1, dp, cp, tp), checkpoint, reshard="never", sequence_parallel=tp > 1
        )
        llm = ModulePlan(
            (first, first + math.prod(self.llm)),
            (own_pp, 1, own_dp, own_cp, own_tp),
            reshard="never",
            sequence_parallel=own_tp > 1,
        )
        return {"vision": vision, "llm": llm}


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        encoder, llm: billions of parameters.
        gpus: of the homogeneous layout, and of the other one.
        layouts: the same two.
        gain: in percent, of TFLOPS per GPU; worked out of the steps where the file does not say.
        peaks: bytes; None where the file does not say.
        steps: seconds.
        microbatches: of the homogeneous layout; 0: one sample per lane and microbatch.
        forward_backward: whether steps are without the optimizer and its communication.
    """

    model: str
    encoder: float
    llm: float
    vision: float
    gpus: tuple[int, int]
    layouts: tuple[Layout, Layout]
    gain: float
    peaks: tuple[float | None, float | None]
    steps: tuple[float, float]
    seq: int
    global_batch: int
    microbatches: int
    disjoint: bool
    forward_backward: bool

    def microbatch_size(self, which: int) -> int:
        """Samples per lane and microbatch of one of the layouts; `microbatches` are those of both."""
        each = self.global_batch // self.layouts[which].llm[3]
        return each // self.microbatches if self.microbatches else 1


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; lines that begin with # and columns that are not known are left out.

    Raises:
        HetmeshError: the file cannot be read, or is not such a table; the message names row and column.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HetmeshError(f"{path}: cannot be read: {error}") from error
    numbered = [(i, line) for i, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    if not numbered:
        raise HetmeshError(f"{path}: no line; the first one names the columns {', '.join(COLUMNS)}")
    names, *rest = list(csv.reader(line for _, line in numbered))
    missing = [name for name in COLUMNS if name not in names]
    if missing or len(set(names)) < len(names):
        raise HetmeshError(
            f"{path} line {numbered[0][0]}: columns {missing} are missing; each once are {', '.join(COLUMNS)}, and may "
            f"be {', '.join(OPTIONAL)}"
        )
    found = []
    for (line, _), cells in zip(itertools.islice(numbered, 1, None), rest, strict=True):
        if len(cells) != len(names):
            raise HetmeshError(f"{path} line {line}: {len(cells)} cells for {len(names)} columns")
        found.append(_Cells(f"{path} line {line}", dict(zip(names, map(str.strip, cells), strict=True))).row())
    if not found:
        raise HetmeshError(f"{path}: no row below the names of the columns")
    return found


def unknown_columns(path: Path) -> list[str]:
    """Columns of a file, which has been read, that mean nothing here."""
    lines = (line for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    names = next(csv.reader(line for line in lines if not line.startswith("#")))
    return [name for name in names if name not in COLUMNS + OPTIONAL]


@dataclass(frozen=True)
class _Cells:
    where: str
    cells: Mapping[str, str]

    def row(self) -> Row:
        gpus = self._whole("gpus")
        disjoint = self._one_of("placement", "colocated", "disjoint") == "disjoint"
        others = self._whole("gpus_other", gpus)
        layouts = tuple(
            Layout(self._degrees(f"{which}_E"), self._degrees(f"{which}_L")) for which in ("homogeneous", "colocated")
        )
        for which, layout, ranks, apart in zip(COLUMNS[3::2], layouts, (gpus, others), (False, disjoint), strict=False):
            self._fits(which.rpartition("_")[0], layout, ranks, apart)
        steps = self._number("step_ms_homogeneous") / 1e3, self._number("step_ms_colocated") / 1e3
        gain = 100 * (steps[0] * gpus / (steps[1] * others) - 1)
        sizes = self._sizes()
        row = Row(
            self.cells["model"],
            *sizes,
            self._number("vision_percent", most=100) / 100,
            (gpus, others),
            (layouts[0], layouts[1]),
            self._measured("gain_percent", signed=True) if self.cells["gain_percent"] else gain,
            tuple(1e9 * self._measured(each) if self.cells[each] else None for each in _MEASURED[1:]),  # type: ignore[arg-type]
            steps,
            self._whole("seq", 8192),
            self._whole("global_batch", _BATCHES.get(gpus, gpus)),
            self._whole("microbatches", 0),
            disjoint,
            self._one_of("phase", "step", "forward_backward") == "forward_backward",
        )
        for which, layout in zip(("homogeneous", "colocated"), layouts, strict=True):
            count = layout.llm[3] * (row.microbatches or 1)
            if row.global_batch % count:
                self._wrong(
                    "microbatches" if row.microbatches else f"{which}_L",
                    f"global_batch = {row.global_batch} does not divide over {layout.llm[3]} lanes"
                    + (f" and {row.microbatches} microbatches" if row.microbatches else ""),
                )
        return row

    def _fits(self, which: str, layout: Layout, gpus: int, apart: bool) -> None:
        encoder, llm = math.prod(layout.encoder), math.prod(layout.llm)
        if llm + (encoder if apart else 0) != gpus:
            self._wrong(f"{which}_L", f"the layout takes {llm + (encoder if apart else 0)} GPUs, not {gpus}")
        if encoder > gpus:
            self._wrong(f"{which}_E", f"the layout takes {encoder} GPUs of {gpus}")

    def _sizes(self) -> tuple[float, float]:
        parts = self.cells["model"].split("+")
        try:
            encoder, llm = (float(part.strip().removesuffix("B")) for part in parts)
            if not 0 < encoder < math.inf or not 0 < llm < math.inf:
                raise ValueError
        except ValueError:
            self._wrong("model", f"{self.cells['model']!r}: write billions of parameters of both, as 3B+14B")
        return encoder, llm

    def _degrees(self, column: str) -> tuple[int, int, int, int]:
        try:
            tp, cp, pp, dp = map(int, self.cells[column].split("/"))
            if min(tp, cp, pp, dp) < 1:
                raise ValueError
        except ValueError:
            self._wrong(column, f"{self.cells[column]!r}: write TP/CP/PP/DP, as 4/1/1/18")
        return tp, cp, pp, dp

    def _whole(self, column: str, default: int | None = None) -> int:
        text = self.cells.get(column, "")
        if not text and default is not None:
            return default
        if not text.isdecimal() or int(text) < 1:
            self._wrong(column, f"{text!r} is no whole number of at least 1")
        return int(text)

    def _number(self, column: str, most: float = math.inf) -> float:
        found = self._measured(column)
        if not 0 < found <= most:
            self._wrong(
                column, f"{self.cells[column]!r} must be above 0" + (f", at most {most:g}" if most < 1e9 else "")
            )
        return found

    def _measured(self, column: str, *, signed: bool = False) -> float:
        try:
            found = float(self.cells[column])
        except ValueError:
            found = math.nan
        if not math.isfinite(found) or (found < 0 and not signed):
            self._wrong(column, f"{self.cells[column]!r} is no number")
        return found

    def _one_of(self, column: str, *valid: str) -> str:
        text = self.cells.get(column, "") or valid[0]
        if text not in valid:
            self._wrong(column, f"{text!r}: valid are {', '.join(valid)}")
        return text

    def _wrong(self, column: str, why: str) -> None:
        raise HetmeshError(f"{self.where}, column {column}: {why}")
