"""What running layouts gave, and the file that keeps it: what was measured counts, whoever is killed afterwards."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hetmesh.errors import UsageError
from hetmesh.files import from_json, read_file, write_json
from hetmesh.formatting import counted

PACE_NOISE = 0.05  # in logarithms: on two cores, with two to four ranks, between turns
UNUSUAL_PACE = 1.5  # times the usual one, or a share of it as small
USUAL_SCATTER, LEAST_SCATTER = 0.04, 0.005
"""Of a step: as one turn that says so, until others do; and no clock and no machine is better."""
_NUMBERS = "factors", "first_factors", "peak_flops"
DIED = "processes died with it, twice (out of memory?)"


@dataclass(frozen=True)
class Finding:
    """What one turn of a layout gave.

    Attributes:
        layout: `str` of its `LayoutPlan`.
        steps: seconds of its timed steps, on the rank that took longest, in proportion to tokens of a step with as many
            as the mean of the first.
        parts: of the last of them seconds on the mean rank, by kind of action (`guesses.step_parts`).
        peak_bytes: of tensors on the rank that held most; 0: the device does not count them.
        spent_s: seconds that the turn took, with building the modules.
        pace: seconds that the same small piece of work took between its steps, on the mean rank; 0: not measured.
        failed: why it did not run; empty: it did.
        out_of_memory: whether that was for want of memory.
    """

    layout: str
    steps: tuple[float, ...] = ()
    parts: Mapping[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    spent_s: float = 0.0
    pace: float = 0.0
    failed: str = ""
    out_of_memory: bool = False


def to_pace(pace: float, usual: float) -> float:
    """What seconds at a pace are multiplied by to be those at the usual one. 0: it is not measured."""
    apart = math.log(usual / pace) if pace and usual else 0.0
    return math.exp(math.copysign(max(abs(apart) - PACE_NOISE, 0.0), apart))


@dataclass
class Findings:
    """All of them, in order.

    Attributes:
        of: what they are findings about; those of something else are of no use.
        path: of the file; None: there is none.
        each: the findings.
        running, begun: the layout that has begun and is not over, and how often: where a file says so, a process died.
        factors, first_factors: logarithms by which the fit has changed the machine's constants so far, and by which the
            first one did: the planner has searched for these, too.
        peak_flops: of the machine, as measured at the first start where its file has none.
    """

    of: str = ""
    path: Path | None = None
    each: list[Finding] = field(default_factory=list)
    running: str = ""
    begun: int = 0
    factors: dict[str, float] = field(default_factory=dict)
    first_factors: dict[str, float] = field(default_factory=dict)
    peak_flops: dict[str, float] = field(default_factory=dict)

    def save(self) -> None:
        """Raises OutputError: the file cannot be written."""
        if self.path is not None:
            each = [asdict(finding) for finding in self.each]
            known = {name: getattr(self, name) for name in ("of", "running", "begun", *_NUMBERS)}
            write_json(self.path, {**known, "findings": each}, indent=1)

    @classmethod
    def load(cls, path: Path, of: str) -> Findings:
        """What `save` wrote; empty where there is none. A file of something else is kept under another name. A layout
        with which processes died twice has failed: once may have been a kill. Raises UsageError: the file is none that
        `save` wrote."""
        if not path.exists():
            return cls(of, path)
        try:
            raw = from_json(read_file(path))
            each = [Finding(**(own | {"steps": tuple(map(float, own["steps"]))})) for own in raw["findings"]]
            numbers = ({k: float(v) for k, v in raw[key].items()} for key in _NUMBERS)
            found = cls(str(raw["of"]), path, each, str(raw["running"]), int(raw["begun"]), *numbers)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: not one that `hetmesh tune` wrote ({error}); move it away") from error
        if found.of != of:
            kept = path.with_name(f"{path.stem}-{found.of}{path.suffix}")
            print(
                f"note: {path} is of another recipe, machine or --fix: now {kept}, and all is measured anew", flush=True
            )
            path.replace(kept)
            return cls(of, path)
        if found.begun > 1:
            found.add(Finding(found.running, failed=DIED))
        if found.each:
            print(f"goes on after {counted(len(found.each), 'turn')} in {path}", flush=True)
        return found

    def begin(self, layout: str) -> None:
        """A turn begins."""
        self.begun = self.begun + 1 if layout == self.running else 1
        self.running = layout
        self.save()

    def add(self, finding: Finding) -> None:
        """A turn is over."""
        self.each.append(finding)
        self.running, self.begun = "", 0
        self.save()

    @property
    def seconds(self) -> dict[str, float]:
        """The median step of each layout that ran, of all its turns at the usual pace."""
        return {layout: statistics.median(steps) for layout, steps in self.steps.items()}

    @property
    def steps(self) -> dict[str, list[float]]:
        """Seconds of each timed step at the usual pace, by layout; of disturbed turns where there are no others."""
        found: dict[str, list[float]] = {}
        calm, failed, usual, settling = self.calm, self.failed, self.usual_pace, self.settling
        for turn in self.each:
            if turn.steps and turn.layout not in failed and (self._is_calm(turn) or turn.layout not in calm):
                steps = turn.steps[0] / settling, *turn.steps[1:]
                found.setdefault(turn.layout, []).extend(to_pace(turn.pace, usual) * seconds for seconds in steps)
        return found

    @property
    def settling(self) -> float:
        """Times as long as its second timed step the first one of a turn takes, in the median turn."""
        return statistics.median([own.steps[0] / own.steps[1] for own in self.each if len(own.steps) > 1] or [1.0])

    @property
    def calm(self) -> set[str]:
        """Layouts with a turn at about the usual pace. Steps keep less well to one that is far from it."""
        return {turn.layout for turn in self.each if turn.steps and self._is_calm(turn)}

    def _is_calm(self, turn: Finding) -> bool:
        return not turn.pace or abs(math.log(turn.pace / self.usual_pace)) < math.log(UNUSUAL_PACE)

    @property
    def usual_pace(self) -> float:
        """That of the median turn; 0: none was measured."""
        paces = [own.pace for own in self.each if own.pace]
        return statistics.median(paces) if paces else 0.0

    @property
    def failed(self) -> dict[str, Finding]:
        """Why others did not."""
        return {finding.layout: finding for finding in self.each if finding.failed}

    @property
    def turns(self) -> dict[str, int]:
        """How often each layout ran."""
        return {layout: sum(own.layout == layout for own in self.each) for layout in self.steps}

    @property
    def spent_s(self) -> float:
        """Seconds of all turns."""
        return sum(finding.spent_s for finding in self.each)

    @property
    def scatter(self) -> float:
        """About the error of a turn's median step, as a share of it: half of the range of its steps, in the median
        turn, or the standard deviation of paces between turns (from their median distance), as far as steps are not
        corrected for it, whichever is more."""
        turns = [own.steps for own in self.each if len(own.steps) > 1]
        each = [(max(steps) - min(steps)) / (2 * statistics.median(steps)) for steps in turns]
        paces = [abs(math.log(own.pace / self.usual_pace)) for own in self.each if own.pace]
        between = 1.4826 * min(statistics.median(paces or [0.0]), PACE_NOISE)
        return max(statistics.median([*each, USUAL_SCATTER]), between, LEAST_SCATTER)

    def parts(self, layout: str) -> dict[str, float]:
        """The mean of the parts of its turns."""
        turns = [own for own in self.each if own.layout == layout and own.parts]
        each = [(own.parts, to_pace(own.pace, self.usual_pace)) for own in turns]
        names = turns[0].parts if turns else ()
        return {name: statistics.mean(scale * parts.get(name, 0.0) for parts, scale in each) for name in names}
