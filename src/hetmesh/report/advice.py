"""What a run's figures say should be changed: each finding with the key or command that changes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import mean, variance

from hetmesh.formatting import counted, ranks_text
from hetmesh.recipe.recipe import Recipe
from hetmesh.records.run_lines import at, names_in, number, series
from hetmesh.records.run_view import RunView, run_load
from hetmesh.report.page_parts import Advice
from hetmesh.report.values import RecipeView
from hetmesh.simulate import Timeline, average_bubbles, bubbles

WAIT, IDLE, UNEVEN, PADDING = 0.05, 0.15, 0.1, 0.1
"""Shares of a step from which waits for samples, idle ranks, uneven loads and padding are worth advice."""
BUSIEST, EXPERT, PREDICTION, FALLING, SPARE = 1.25, 1.5, 0.25, 0.02, 0.4
"""Busiest rank and expert over the mean one; relative errors of a prediction; of the loss over a fifth of the steps;
share of a device's memory that stays free."""
MIN_LOSSES = 20  # that say where they go
SHIFT = 0.1  # of a step's work that has gone from some modules to others, from which a layout is outgrown
NOISE = 3.0  # standard errors that means of losses must be apart


def advice(run: RunView, recipe: Recipe | None, view: RecipeView | None) -> tuple[Advice, ...]:
    """What stands out, what costs most first."""
    found = [
        *_losses(run),
        *_samples(run, recipe),
        *_loads(run, recipe),
        *_outgrown(run),
        *_experts(run),
        *_unused(recipe, view),
    ]
    if "measured" in run.timelines:
        found += _idle(run.timelines["measured"], recipe)
    if len(run.timelines) == 2:
        found += _predicted(run.timelines["predicted"].makespan, run.timelines["measured"].makespan)
    return tuple(sorted(found, key=lambda advice: -advice.share))


def _losses(run: RunView) -> Iterator[Advice]:
    wrong = sum("loss" in record and number(record["loss"]) is None for record in run.records)
    if wrong:
        lower = "lower [optimizer] lr or [training] max_norm; a longer warm-up is [lr_scheduler] warmup_steps"
        yield Advice(f"{counted(wrong, 'step')} had a loss that is no finite number", lower, 1.0)
    losses = series(run.records, "loss").values
    if len(losses) < MIN_LOSSES:
        return
    fifth = len(losses) // 5
    fourth, last = losses[-2 * fifth : -fifth], losses[-fifth:]
    before, after = mean(fourth), mean(last)
    noise = NOISE * math.sqrt((variance(fourth) + variance(last)) / fifth)
    change = after / before - 1 if before > 0 and abs(after - before) > noise else 0.0
    span = "from the fourth to the last fifth of the steps"
    if change < -FALLING:
        yield Advice(f"the loss still fell by {-change:.0%} {span}", "raise [training] steps to go on")
    if change > FALLING:
        lower = "lower [optimizer] lr, or let it fall earlier ([lr_scheduler])"
        yield Advice(f"the loss rose by {change:.0%} {span}", lower, 0.9)


def _samples(run: RunView, recipe: Recipe | None) -> Iterator[Advice]:
    share = waits_for_samples(run)
    if share is not None and share > WAIT:
        now = f" (it is {recipe.data.num_workers})" if recipe else ""
        yield Advice(f"ranks wait for samples during {share:.0%} of a step", f"raise [data] num_workers{now}", share)
    load, wait, step = (series(run.usual, *keys) for keys in (("data", "load_s"), ("data", "wait_s"), ("time_s",)))
    workers = max(recipe.data.num_workers, 1) if recipe else 1
    if load and wait and step and (took := load.median / workers) > (rest := step.median - wait.median) > 0:
        found = f"preparing the samples of a step takes {took / rest:.1f} times as long as the rest of it"
        change = "raise [data] num_workers, or let processor_options ask for smaller media or fewer frames"
        yield Advice(found, change, 1 - rest / took)
    dropped, skipped = (sum(series(run.records, key).values) for key in ("tokens_dropped", "samples_skipped"))
    if dropped:
        yield Advice(f"{dropped:,.0f} tokens did not fit into seq_len and were cut off", "raise [training] seq_len")
    if skipped:
        yield Advice(f"{skipped:,.0f} samples could not be read and were left out", "the log of the run names them")


def waits_for_samples(run: RunView) -> float | None:
    """Share of the median logged step that the rank which waited longest for samples did."""
    shares = [
        {"step": record["step"], "share": wait / seconds}
        for record in run.usual
        if (wait := number(at(record, "data", "wait_s"))) is not None and (seconds := number(record.get("time_s")))
    ]
    found = series(shares, "share")
    return found.median if found else None


def _loads(run: RunView, recipe: Recipe | None) -> Iterator[Advice]:
    load = run_load(run.usual) or run.load
    if load is None:
        return
    flops = {name: series(run.usual, "flops", name) for name in load.modules}
    work = {name: line.median if line else 0.0 for name, line in flops.items()}
    all_work = sum(work.values())
    for name, means in load.means()["load"].items():
        part = work[name] / all_work if all_work else 1.0
        most, padding = means["max_over_mean"], means["padding"]
        lost = part * (1 - 1 / max(most, 1.0))
        if lost > UNEVEN:
            how = "hetmesh balance RECIPE compares what balancers make of this data"
            if recipe is not None and recipe.balance.policy == "none":
                how = '[balance] policy = "auto"'
            yield Advice(f"the fullest microbatch of {name} has {most:.2f} times the work of the mean one", how, lost)
        if padding * part > PADDING and not (recipe and recipe.training.pack_samples):
            found = f"{padding:.0%} of the positions that {name} computes are padding"
            yield Advice(found, "[training] pack_samples = true leaves none", padding * part)


def _outgrown(run: RunView) -> Iterator[Advice]:
    """Whether modules share the work of a step in another way than when the run began in its layout."""
    work = {name: series(run.usual, "flops", name).values for name in names_in(run.usual, "flops")}
    if (fifth := min(map(len, work.values()), default=0) // 5) < MIN_LOSSES // 5:
        return
    first, last = ({name: mean(v[part]) for name, v in work.items()} for part in (slice(fifth), slice(-fifth, None)))
    before, now = ({name: v / (sum(work.values()) or 1.0) for name, v in work.items()} for work in (first, last))
    name = max(work, key=lambda name: now[name] - before[name])
    if (gained := now[name] - before[name]) > SHIFT:
        found = f"{name} does {now[name]:.0%} of the work of a step, and did {before[name]:.0%}: the layout is outgrown"
        how = "hetmesh plan RECIPE (--phase N) finds one for it; resume in that, or `Job.relayout(recipe)` on the way"
        yield Advice(found, how, gained)


def _experts(run: RunView) -> Iterator[Advice]:
    for name in names_in(run.records, "experts"):
        busiest = series(run.records, "experts", name, "max_over_mean")
        idle = series(run.records, "experts", name, "without_tokens")
        if busiest and busiest.values[-1] > EXPERT:
            none = f", and {idle.values[-1]:.0f} got none" if idle and idle.values[-1] else ""
            tokens = f"got {busiest.values[-1]:.1f} times the tokens of the mean one{none}, in step {busiest.steps[-1]}"
            change = f"raise router_aux_loss_coef in [modules.{name}.config]; early steps are uneven by nature"
            yield Advice(f"the busiest expert of {name} {tokens}", change, 0.1)


def _unused(recipe: Recipe | None, view: RecipeView | None) -> Iterator[Advice]:
    if recipe is not None and not recipe.checkpoint.enable:
        yield Advice("its weights are not kept", "[checkpoint] enable = true keeps them, and lets the run resume")
    fit = view.fit if view else None
    if fit is not None and fit.fits and fit.spare_bytes > SPARE * fit.memory_bytes:
        free = f"the fullest rank leaves {fit.spare_bytes / fit.memory_bytes:.0%} of {fit.machine}'s memory free"
        change = "larger microbatches, less recomputation or fewer ranks per module fit too: hetmesh plan RECIPE"
        yield Advice(free, change)


def _idle(timeline: Timeline, recipe: Recipe | None) -> Iterator[Advice]:
    idle, total = average_bubbles(timeline), timeline.makespan
    if not total or idle.fraction < IDLE:
        return
    share = idle.fraction
    busy = [track.compute for track in bubbles(timeline)]
    most, least = busy.index(max(busy)), busy.index(min(busy))
    uneven = max(busy) > BUSIEST * sum(busy) / len(busy)
    if uneven:
        busiest = f"{_who(timeline, most)} computes {busy[most] / total:.0%} of the recorded step"
        idlest = f"{_who(timeline, least)} {busy[least] / total:.0%}"
        found = f"{busiest}, {idlest}: the average rank is idle for {share:.0%} of it"
        change = "give the busiest module more ranks or fewer layers per stage: hetmesh plan RECIPE finds such layouts"
        yield Advice(found, change, share)
    ends, apart = (idle.pp_warmup + idle.pp_cooldown) / total, (idle.dp_gather + idle.dp_scatter) / total
    if ends > IDLE:
        now = f" (it is {recipe.schedule})" if recipe else ""
        found = f"ranks wait during {ends:.0%} of the recorded step for its first microbatch, or after their last"
        change = f"smaller pipeline_parallel_microbatch_size, or another pipeline_parallel_schedule{now}"
        yield Advice(found, change, ends)
    if apart > IDLE:
        found = f"ranks wait during {apart:.0%} of the recorded step for parameters and sums of gradients"
        yield Advice(found, "more samples per step (local_batch_size), or fewer data-parallel ranks", apart)
    if share > IDLE and not uneven and max(ends, apart) <= IDLE:
        found = f"the average rank waits during {share:.0%} of the recorded step, mostly between its own actions"
        change = "another pipeline_parallel_schedule, or another cut: hetmesh plan RECIPE compares them"
        yield Advice(found, change, share)


def _who(timeline: Timeline, track: int) -> str:
    """The ranks of a track, and which of its stages keeps them busiest."""
    busy = dict.fromkeys(timeline.holds[track], 0.0)
    for span in timeline.spans(track):
        if span.target in busy:
            busy[span.target] += span.stop - span.start
    most = max(busy, key=lambda stage: busy[stage])
    more = f" and {len(busy) - 1} more" if len(busy) > 1 else ""
    return f"rank {ranks_text(timeline.tracks[track])} ({most}{more})"


def _predicted(predicted: float, measured: float) -> Iterator[Advice]:
    if predicted and measured and abs(predicted / measured - 1) > PREDICTION:
        change = "hetmesh profile RECIPE measures this machine; [profiling] profile = FILE predicts by that"
        yield Advice(f"the recorded step took {measured / predicted:,.3g} times what was predicted", change)
