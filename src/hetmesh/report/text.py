"""A RecipeView as text: ranks across, modules down, then what each module and boundary costs, and whether the layout
fits a machine's memory, by how much, and what the fullest rank is full of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetmesh.formatting import counted, ranks_text, table
from hetmesh.records.metrics import amount
from hetmesh.report.values import BoundaryView, ModuleView, RecipeView, Traffic
from hetmesh.simulate import MemoryFit, RankMemory

_MEMORY_WORDS = {
    "optimizer": "optimizer state",
    "gathered": "gathered by FSDP",
    "sums": "gradients being summed",
    "rows": "rows of boundaries",
}


def as_text(view: RecipeView, width: int = 100) -> str:
    """The whole view. The picture of the ranks is cut into parts that fit into `width` characters."""
    return "\n".join(line.rstrip() for line in _lines(view, width))


def _lines(view: RecipeView, width: int) -> Iterator[str]:
    if view.description:
        yield view.description
    yield (
        f"{counted(view.ranks, 'rank')}, {view.steps} steps of {view.global_batch_size} samples in "
        f"{counted(view.microbatches, 'microbatch', 'microbatches')}, schedule {view.schedule}"
    )
    yield from ("", *_ranks(view, width), "")
    yield from (f"  {line}" for line in table(module_rows(view)))
    yield f"  forward and backward: FLOPs of one step over all ranks, first global batch ({amount(view.tokens)}tokens)"
    yield from (f"  {note}" for note in view.notes)
    yield f"  state: parameters, gradients and {view.optimizer}'s state in {view.dtype}; activations come on top"
    yield (
        f"  {counted(view.process_groups, 'process group')}, at most {view.process_groups_per_rank} on one rank, on "
        "NCCL: per mesh axis, for the messages of edges and of context parallelism, and one of all ranks"
    )
    for once, how in ((True, "once per step, and holds them whole meanwhile"), (False, "in every microbatch")):
        if names := [module.name for module in view.modules if module.once_per_step is once]:
            yield f"  FSDP gathers parameters and sums gradients {how}: {', '.join(names)}"
    yield from _stages(view)
    yield from ("", f"deferral is {view.deferral}")
    yield from _held(view)
    yield from ("", *fit_lines(view.fit)) if view.fit is not None else ()
    if view.boundaries:
        alike = all(boundary.microbatches == (0, 0) for boundary in view.boundaries)
        yield from ("", f"boundaries, {'in the first microbatch' if alike else 'along the first of their routes'}:")
    for boundary in view.boundaries:
        yield from _boundary(boundary)


def _ranks(view: RecipeView, width: int) -> Iterator[str]:
    names = max(len("memory"), *(len(module.name) for module in view.modules))
    memory = {rank: f"{amount(view.memory(rank))}B" if view.memory(rank) else "" for rank in range(view.ranks)}
    cells = [text for module in view.modules for text in module.cells.values()]
    cell = max(map(len, [*cells, *memory.values(), f"rank {view.ranks - 1}"])) + 2
    columns = max(1, (width - names - 4) // (cell + 1))
    columns = -(-view.ranks // -(-view.ranks // columns))  # as many parts, but of equal size
    for start in range(0, view.ranks, columns):
        ranks = range(start, min(start + columns, view.ranks))
        line = lambda texts: "│".join(f" {text:<{cell - 1}}" for text in texts)  # noqa: E731
        rule = "┼".join("─" * cell for _ in ranks)
        yield f"  {'':<{names}} │{line(f'rank {rank}' for rank in ranks)}"
        yield f"  {'─' * names}─┼{rule}"
        for module in view.modules:
            yield f"  {module.name:<{names}} │{line(module.cells.get(rank, '') for rank in ranks)}"
        yield f"  {'─' * names}─┼{rule}"
        yield f"  {'memory':<{names}} │{line(memory[rank] for rank in ranks)}"
        if ranks.stop < view.ranks:
            yield ""
    if view.idle_ranks:
        yield f"  note: no module uses rank {ranks_text(view.idle_ranks)}"


def module_rows(view: RecipeView) -> list[Sequence[str]]:
    """A row per module and their head, as cells."""
    header = ("module", "model", "mesh", "ranks", "parameters", "per rank", "state/rank", "training", "dtype")
    return [(*header, "forward", "backward", "imbalance"), *map(_module_cells, view.modules)]


def _module_cells(module: ModuleView) -> Sequence[str]:
    memory = module.memory.values()
    held = f"{amount(max(rank.elements for rank in memory))}".strip() if memory else "?"
    state = f"{amount(max(rank.total for rank in memory))}B" if memory else "?"
    flops = module.flops
    training = module.training
    if training == "partly" and module.parameters and module.trainable_parameters:
        training = f"{module.trainable_parameters / module.parameters:.1%}"
    return (
        module.name,
        module.model,
        " x ".join(f"{axis} {size}" for axis, size in module.axes.items()),
        ranks_text(module.ranks),
        "?" if module.parameters is None else f"{amount(module.parameters)}".strip(),
        *(held, state, training, module.dtype),
        *((amount(flops.forward), amount(flops.backward)) if flops else ("?", "?")),
        f"{module.imbalance:.2f}",
    )


def _stages(view: RecipeView) -> Iterator[str]:
    split = [module for module in view.modules if len(module.stages) > 1]
    yield from ("", "pipeline stages:") if split else ()
    for module in split:
        for i, layers in enumerate(module.stages):
            shown = layers[0] if len(layers) == 1 else f"{layers[0]} ... {layers[-1]} ({len(layers)} layers)"
            yield f"  {module.name}.{i} at pp{i % module.axes.get('pp', 1)}: {shown}"


def _held(view: RecipeView) -> Iterator[str]:
    yield from ("", "held at most between forward and backward, on the lane that holds most:")
    for module in view.modules:
        unit = "tokens" if module.name == view.llm else "rows"
        for i, held in enumerate(module.held):
            of = counted(module.microbatches, "microbatch", "microbatches")
            yield f"  {module.name}.{i}: {held.microbatches} of {of}, {held.rows:,} {unit}"


def _boundary(boundary: BoundaryView) -> Iterator[str]:
    rows, features = boundary.shape
    at = f" at {boundary.at!r}" if boundary.at else ""
    at += f" after {boundary.layer}" if boundary.layer else ""
    m, to = boundary.microbatches
    which = f", microbatch {m} to {to}" if m != to else ""
    yield f"  {boundary.source} -> {boundary.destination}{at}{which}: {rows} rows x {features}"
    yield f"    from      {boundary.source_layout}"
    yield f"    to        {boundary.destination_layout}"
    yield f"    forward   {traffic_text(boundary.forward)}"
    back = boundary.backward
    yield f"    backward  {traffic_text(back) if back else 'none: nothing upstream is trained'}"


def traffic_text(traffic: Traffic) -> str:
    """What one direction of a boundary moves, in words."""
    if not traffic.bytes and not traffic.bound:
        return "no bytes between ranks: every rank already holds what it needs"
    links: dict[str, list[str]] = {}
    for link, name in traffic.transport.items():
        links.setdefault(name, []).append("memory (CPUs of one host)" if link == "memory" else link)
    transport = ", ".join(name if len(links) == 1 else f"{name} on {' and '.join(on)}" for name, on in links.items())
    bound = "the least possible" if traffic.bytes == traffic.bound else f"at least {amount(traffic.bound)}B needed"
    return f"{amount(traffic.bytes)}B between ranks, {bound}; by {transport}"


def verdict(fit: MemoryFit) -> str:
    """Whether a machine has room: `room`, of the fullest rank."""
    return room(fit.machine, fit.memory_bytes, fit.peak_bytes)


def room(machine: str, memory: int, peak: int, where: str = "on the fullest rank") -> str:
    """`"fits h100: 44.1 GB of 80.0 GB on the fullest rank, 35.9 GB (45%) to spare"`; `memory` 0: not known."""
    held, spare = bytes_text(peak), memory - peak
    if not memory:
        return f"{held} {where}; the memory of machine {machine} is not known: name one (--machine)"
    share = f"{bytes_text(abs(spare))} ({100 * abs(spare) / memory:.0f}%)"
    fits, rest = ("fits", "to spare") if spare >= 0 else ("does not fit", "too much")
    return f"{fits} {machine}: {held} of {bytes_text(memory)} {where}, {share} {rest}"


def fit_lines(fit: MemoryFit) -> Iterator[str]:
    """The verdict, what the fullest rank holds, and on which batch."""
    yield f"memory: {verdict(fit)}"
    memory = fit.ranks[fit.fullest]
    alike = [rank for rank, other in fit.ranks.items() if other.total == memory.total]
    yield f"  rank {ranks_text(tuple(alike))} in {memory.at}: {contents(memory)}"
    yield (
        f"  on the largest batch that {counted(fit.samples, 'sample')} of {fit.drawn:,} can make; what kernels "
        "allocate inside, and fragments, are not in it"
    )


def contents(memory: RankMemory) -> str:
    """What a rank holds, largest first, without what is less than a hundredth."""
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    shown = [(name, size) for name, size in parts if 100 * size >= memory.total > 0]
    return ", ".join(f"{_MEMORY_WORDS.get(name, name)} {bytes_text(size)}" for name, size in shown)


def bytes_text(size: int) -> str:
    """`bytes_text(12_345_678)` is `"12.3 MB"`."""
    return f"{amount(size).strip()}B"
