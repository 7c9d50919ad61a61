"""Tables of published training runs, read from a CSV file and checked: one run per row."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, TypeVar

from hetmesh.cost import MACHINES
from hetmesh.cost.layer_options import ITEMSIZES
from hetmesh.errors import HetmeshError

CARDS = Path(__file__).parent / "cards.csv"

_NUMBERS = ("params_total_b", "params_active_b", "step_ms", "tokens_per_s_per_gpu", "peak_memory_gib")
_DEGREES = ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")
_WHOLE = ("gpus", *_DEGREES, "micro_batch", "global_batch", "seq_len")
_TEXTS = ("id", "model", "kind", "gpu", "dtype", "fsdp", "recompute", "trained")
COLUMNS = (*_TEXTS, *_NUMBERS, *_WHOLE, "packed", "overlap_notes", "what_is_not_said")
_UNREAD = ("source", "recorded", "mock_data", "tflops_per_gpu")  # for people
_NEEDED = ("model", "params_total_b", "gpu", "gpus", "global_batch")  # of a row, beside what can be left empty

Of = TypeVar("Of")
Kind = Literal["text", "vlm", "generation"]
Recompute = Literal["none", "full", "unknown"]
KINDS: tuple[Kind, ...] = ("text", "vlm", "generation")
PARTS: Mapping[Kind, tuple[str, ...]] = {
    "text": ("llm",),
    "vlm": ("vision", "projector", "llm"),
    "generation": ("llm",),
}
"""What is built of each kind."""
_PART_OF = {
    **dict.fromkeys(("llm", "language", "language_model", "text", "text_model", "decoder"), "llm"),
    **dict.fromkeys(("vision", "vision_model", "vision_tower", "vision_encoder", "encoder", "visual", "vit"), "vision"),
    **dict.fromkeys(("projector", "vision_projection", "connector", "merger", "multi_modal_projector"), "projector"),
    **dict.fromkeys(("generator", "vae"), "generator"),
}
"""Modules by the names that frameworks give them."""
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "": "bfloat16"}
_SHARDING = {
    **dict.fromkeys(("zero1", "zero2", ""), "never"),
    **dict.fromkeys(("fsdp", "fsdp2", "hsdp", "zero3", "megatron_fsdp"), "default"),
    **dict.fromkeys(("ddp", "none", "no"), "replicas"),
}
"""What FSDP gathers: once per step, in every microbatch, or nothing. Where nothing is said, Megatron-Bridge's default,
its distributed optimizer."""


class LeftOut(HetmeshError):
    """A row that is well-formed, but cannot be modelled."""


@dataclass(frozen=True)
class PublishedRun:
    """One row.

    Attributes:
        where: line and id, for messages.
        total, active: billions of parameters.
        ep, etp: 0 where nothing is said.
        tokens: of a sequence.
        packed: whether a sequence has several samples.
        dtype: as torch calls it.
        gathers: a value of `_SHARDING`.
        recompute: of blocks.
        trained: which of `PARTS` are trained; `lora`: adapters of the LLM.
        step_s: measured.
        peak_bytes: of tensors on the fullest rank; None: not measured.
        read_as: what was made of cells that say little.
    """

    where: str
    id: str
    model: str
    kind: Kind
    total: float
    active: float
    machine: str
    gpus: int
    dtype: str
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    dp: int
    gathers: str
    micro_batch: int
    global_batch: int
    tokens: int
    packed: bool
    recompute: Recompute
    trained: frozenset[str]
    step_s: float
    peak_bytes: float | None
    read_as: tuple[str, ...]

    @property
    def inputs(self) -> tuple:
        """All that it is predicted from: equal for repeats of one run."""
        layout = self.tp, self.pp, self.vpp, self.cp, self.ep, self.etp, self.dp, self.gathers
        size = self.total, self.active, self.micro_batch, self.global_batch, self.tokens, self.packed
        return self.model, self.kind, self.machine, self.dtype, *layout, *size, self.recompute, self.trained

    @property
    def lora(self) -> bool:
        return "lora" in self.trained


def read_runs(path: Path) -> tuple[list[PublishedRun], list[str]]:
    """The rows of a file, and what of it is left out: rows that cannot be modelled and columns that mean nothing here,
    by name. Lines that begin with # are comments.

    Raises:
        HetmeshError: the file cannot be read, or is not such a table; the message names row and column.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise HetmeshError(f"{path}: cannot be read: {error}") from error
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), len(lines))
    reader = csv.reader(io.StringIO("\n".join(lines[first:])))
    try:
        numbered = [(first + reader.line_num, row) for row in reader if any(row) and not row[0].startswith("#")]
    except csv.Error as error:
        raise HetmeshError(f"{path} line {first + reader.line_num}: {error}") from error
    if not numbered:
        raise HetmeshError(f"{path}: no line; the first one names the columns {', '.join(COLUMNS)}")
    (line, names), *rest = numbered
    missing = [name for name in COLUMNS if name not in names]
    if missing or len(set(names)) < len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise HetmeshError(f"{path} line {line}: columns {missing} are missing, {repeated} are there twice")
    found, left_out = [], [f"column {name}" for name in names if name not in COLUMNS + _UNREAD]
    for line, cells in rest:
        if len(cells) != len(names):
            raise HetmeshError(f"{path} line {line}: {len(cells)} cells for {len(names)} columns")
        row = _Cells(f"{path} line {line}", dict(zip(names, map(str.strip, cells), strict=True)))
        try:
            found.append(row.run())
        except LeftOut as error:
            left_out.append(str(error))
    if not rest:
        raise HetmeshError(f"{path}: no row below the names of the columns")
    return found, left_out


@dataclass(frozen=True)
class _Cells:
    line: str
    cells: Mapping[str, str]

    @property
    def where(self) -> str:
        return f"{self.line} ({self.cells['id'] or self.cells['model']})"

    def run(self) -> PublishedRun:
        for column in _NEEDED:
            if not self.cells[column]:
                self._wrong(column, "is empty")
        numbers = {column: self._number(column) for column in _NUMBERS}
        whole = {column: self._whole(column) for column in _WHOLE}
        said: list[str] = []
        kind = self._one_of("kind", {name: name for name in KINDS} | {"": "text"})
        total = numbers["params_total_b"] or 0.0
        active = numbers["params_active_b"] or total
        if active > total:
            self._wrong("params_active_b", f"{active:g} is more than params_total_b, {total:g}")
        degrees = {column: whole[column] or 1 for column in ("tp", "pp", "vpp", "cp")}
        gpus, lane = whole["gpus"] or 1, degrees["tp"] * degrees["pp"] * degrees["cp"]
        dp = whole["dp"] or gpus // lane
        if dp * lane != gpus:
            self._cannot(
                "dp", f"{gpus} GPUs are not TP {degrees['tp']} x PP {degrees['pp']} x CP {degrees['cp']} x DP {dp}"
            )
        batch, micro = whole["global_batch"] or 1, whole["micro_batch"] or 1
        if batch % (dp * micro):
            self._cannot("global_batch", f"{batch} is no multiple of DP {dp} x micro_batch {micro}")
        rate, step = numbers["tokens_per_s_per_gpu"], (numbers["step_ms"] or 0.0) / 1e3
        tokens = whole["seq_len"]
        if not tokens:
            if not (rate and step):
                self._cannot("seq_len", "is empty, and does not follow from tokens_per_s_per_gpu and step_ms")
            tokens = round(rate * step * gpus / batch)
            said.append(f"seq_len is empty: {tokens} tokens per sequence follow from tokens/s and the step")
        if not step:
            if not rate:
                self._cannot("step_ms", "is empty, and does not follow from tokens_per_s_per_gpu")
            step = tokens * batch / (rate * gpus)
        gib = numbers["peak_memory_gib"]
        return PublishedRun(
            self.where,
            self.cells["id"] or self.cells["model"],
            self.cells["model"],
            kind,
            total,
            active,
            self._machine(),
            gpus,
            self._dtype(),
            **degrees,
            ep=whole["ep"] or 0,
            etp=whole["etp"] or 0,
            dp=dp,
            gathers=self._one_of("fsdp", _SHARDING),
            micro_batch=micro,
            global_batch=batch,
            tokens=tokens,
            packed=self.cells["packed"].lower() not in ("", "no", "none", "false"),
            recompute=self._recompute(said),
            trained=self._trained(kind),
            step_s=step,
            peak_bytes=None if gib is None else gib * 2**30,
            read_as=tuple(said),
        )

    def _machine(self) -> str:
        """`H100`, `NVIDIA H100` or `H100-80GB`."""
        words = re.split(r"[^a-z0-9]+", self.cells["gpu"].lower().removeprefix("nvidia").strip())
        if words[0] not in MACHINES or words[0] == "cpu":
            known = ", ".join(name.upper() for name in MACHINES if name != "cpu")
            self._cannot("gpu", f"{self.cells['gpu']!r}: known are {known}")
        return words[0]

    def _dtype(self) -> str:
        text = self.cells["dtype"].lower()
        return text if text in ITEMSIZES else self._one_of("dtype", _DTYPES)

    def _recompute(self, said: list[str]) -> Recompute:
        """Of whole blocks. What is recomputed of chosen modules is in the notes; it takes a few percent of a block's
        forward at most, and counts as nothing. AutoModel's table does not have the column, but its configurations,
        which rows quote."""
        text, notes = self.cells["recompute"].lower(), self.cells["overlap_notes"].lower()
        known: dict[str, Recompute] = {
            "none": "none",
            "no": "none",
            "full": "full",
            "unknown": "unknown",
            "": "unknown",
        }
        if text in known:
            quoted = re.search(r"recompute in the table \(.*?: ([^)]*)\)", self.cells["what_is_not_said"].lower())
            modes: dict[str, Recompute] = {"activation checkpointing on": "full", "not set": "none", "off": "none"}
            if known[text] != "unknown" or quoted is None or quoted[1] not in modes:
                return known[text]
            said.append(f"recompute: {quoted[1]}, as the configuration quoted in what_is_not_said has it")
            return modes[quoted[1]]
        if text != "selective":
            self._cannot("recompute", f"{self.cells['recompute']!r}: known are none, selective, full, unknown")
        if "recompute modules" in notes or "recompute" not in notes:
            said.append("recompute: of chosen modules alone, counted as none")
            return "none"
        return "unknown"

    def _trained(self, kind: Kind) -> frozenset[str]:
        names = {name.strip().lower() for name in (self.cells["trained"] or "all").split("+")}
        if names <= {"all", "full"}:
            return frozenset(PARTS[kind])
        known = {*_PART_OF, "lora"}
        if unknown := sorted(names - known):
            self._cannot("trained", f"{', '.join(unknown)}: known are all, {', '.join(sorted(known))}")
        found = frozenset(_PART_OF.get(name, name) for name in names) & {*PARTS[kind], "lora"}
        if not found:
            self._cannot("trained", f"{self.cells['trained']!r} trains none of what is built of kind {kind}")
        return found

    def _one_of(self, column: str, known: Mapping[str, Of]) -> Of:
        text = self.cells[column].lower()
        if text not in known:
            self._cannot(column, f"{self.cells[column]!r}: known are {', '.join(filter(None, known))}")
        return known[text]

    def _whole(self, column: str) -> int | None:
        text = self.cells[column].removesuffix(".0")  # as tables with empty cells write whole numbers
        if text and (not text.isdecimal() or int(text) < 1):
            self._wrong(column, f"{text!r} is no whole number of at least 1")
        return int(text) if text else None

    def _number(self, column: str) -> float | None:
        if not (text := self.cells[column]):
            return None
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not 0 < found < math.inf:
            self._wrong(column, f"{text!r} is no number above 0")
        return found

    def _wrong(self, column: str, why: str) -> NoReturn:
        raise HetmeshError(f"{self.where}, column {column}: {why}")

    def _cannot(self, column: str, why: str) -> NoReturn:
        raise LeftOut(f"{self.where}, column {column}: {why}")
