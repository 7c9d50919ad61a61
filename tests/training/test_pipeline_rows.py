"""What pipelines must not do: pay for what is frozen, make encoders wait for each other, hide where time goes."""

import random
import time

import pytest
import torch
from torch import nn

from hetmesh.balance import edge_layouts, plan_batch
from hetmesh.boundary import World
from hetmesh.cost import StageCost, StepCosts
from hetmesh.data.loader import Loader
from hetmesh.errors import RecipeError
from hetmesh.graph import Stage
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.resolve.schedules import recipe_schedule
from hetmesh.schedule import Kind
from hetmesh.simulate import Timeline, bubbles, simulate
from hetmesh.training.job import Job
from support.parity_cases import recipe, table


class Saved(nn.Module):
    """Counts the elements that autograd keeps of a stage's forwards, and times these."""

    def __init__(self, stage):
        super().__init__()
        self.stage, self.elements, self.ran = stage, 0, []

    def forward(self, batch, inputs):
        def keep(tensor):
            self.elements += tensor.numel()
            return tensor

        started = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            out = self.stage(batch, inputs)
        self.ran.append((started, time.perf_counter()))
        return out


def one_step(rank, recipe):
    """Of this rank: directions of the messages of each edge, elements saved and forwards run per stage, what it did
    when."""
    world = World.current()
    job = Job.assemble(resolve(recipe), world)
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    schedule = job.schedule(plan)
    stages = {stage: Saved(module) for stage, module in job.runtime.modules.items()}
    job.runtime.modules = stages
    job.runtime.recording = []
    world.log.clear()
    job.runtime.run(schedule, plan, job.feed(drawn, plan, 0), step=0)
    messages = {(m.label.boundary, m.label.direction) for m in world.log.messages}
    of_stages = {str(s): (saved.elements, saved.ran) for s, saved in stages.items()}
    return messages, of_stages, job.runtime.recording


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["1f1b", "zero_bubble"])
def test_frozen_stages_post_no_backward_messages_and_save_no_activations(pool4, policy):
    """C3, U11: a frozen encoder of two stages before a trained LLM of two stages."""
    given = recipe(policy, table("vision", "0-1", pp=2), table("llm", "2-3", pp=2), trained="frozen encoder")
    results = pool4.run(one_step, given, timeout=60)
    messages = set().union(*(messages for messages, _, _ in results))
    assert ("vision.0->vision.1", "forward") in messages
    assert ("vision->projector", "forward") in messages
    assert ("llm.0->llm.1", "backward") in messages
    assert not {edge for edge, direction in messages if direction == "backward" and edge.startswith("vision")}
    saved = {stage: n for _, stages, _ in results for stage, (n, _) in stages.items()}
    assert saved["vision.0"] == saved["vision.1"] == 0
    assert saved["llm.0"] > 0
    assert saved["llm.1"] > 0


COMPUTED = (Kind.FORWARD, Kind.BACKWARD)


def judge(schedule, records, ran):
    """That what ranks recorded is what they did: all of it in order, around the forwards that the modules timed
    themselves, no stage of the LLM before the one that it waits for; and that the bubbles of this follow from it.

    Args:
        ran: stage -> start and stop of each of its forwards.
    """
    when = {}
    for rank, record in records.items():
        own = [action for action, _, _ in record if action.kind in COMPUTED]
        assert own == [a for a in schedule.actions if a.kind in COMPUTED and rank in schedule.stages.ranks_of(a.target)]
        stops = [0.0, *(stop for _, _, stop in record)]
        assert all(before <= start <= stop for before, (_, start, stop) in zip(stops, record, strict=False))
        when |= {(action.kind, str(action.target), action.microbatch): span for action, *span in record}
    for stage, times in ran.items():
        for m, (started, stopped) in enumerate(times):
            start, stop = when[Kind.FORWARD, stage, m]
            assert max(start, started) < min(stop, stopped)
            assert stop - start >= stopped - started
    for m in range(5):  # encoders wait only where there are images
        assert when[Kind.FORWARD, "llm.0", m][1] <= when[Kind.FORWARD, "llm.1", m][0]
        assert when[Kind.BACKWARD, "llm.1", m][1] <= when[Kind.BACKWARD, "llm.0", m][0]
    timeline = Timeline.recorded(schedule, records)
    rows = bubbles(timeline)
    for track, row in zip(timeline.tracks, rows, strict=True):
        spans = [(start, stop) for a, start, stop in records[track[0]] if a.kind in COMPUTED]
        assert row.compute == pytest.approx(sum(stop - start for start, stop in spans), rel=1e-6)
        assert row.pp_warmup == pytest.approx(min(spans)[0], abs=1e-9)
        assert row.compute + row.idle == pytest.approx(timeline.makespan, rel=0.01)
    assert rows[3].pp_warmup > rows[2].pp_warmup >= 0  # llm.1 begins after llm.0, and ends its backwards before it
    assert rows[3].pp_cooldown + rows[3].dp_scatter > 0


@pytest.mark.slow
def test_the_bubbles_of_a_real_step_add_up(pool4):
    """O1: the trace of a real run is what happened, and its bubbles follow from it; other traces are found."""
    given = recipe("1f1b", table("vision", "0-1", pp=2), table("llm", "2-3", pp=2))
    results = pool4.run(one_step, given, timeout=60)
    zero = min(start for _, _, record in results for _, start, _ in record)
    records = {r: [(a, b - zero, e - zero) for a, b, e in record] for r, (_, _, record) in enumerate(results)}
    ran = {
        stage: [(b - zero, e - zero) for b, e in times]
        for _, stages, _ in results
        for stage, (_, times) in stages.items()
    }
    resolved = resolve(given)
    schedule = recipe_schedule(given, resolved.graph, 5)
    judge(schedule, records, ran)
    rng = random.Random(0)
    drawn = {r: [(a, *sorted((rng.random(), rng.random()))) for a, _, _ in record] for r, record in records.items()}
    half = max(stop for record in records.values() for _, _, stop in record) / 2
    early = records | {3: [(a, max(b - half, 0.0), max(e - half, 0.0)) for a, b, e in records[3]]}
    left_out = records | {1: [*records[1][1:], (records[1][0][0], 0.0, 0.0)]}
    empty = {r: [(a, b, b) for a, b, _ in record] for r, record in records.items()}
    for spoiled in (drawn, early, left_out, empty):
        with pytest.raises(AssertionError):
            judge(schedule, spoiled, ran)


def test_encoder_branches_run_at_the_same_time():
    """C4: two encoders on ranks of their own, joined at the LLM."""
    tables = (table("vision", "0-1", pp=2), table("scanner", "2"), table("llm", "3-4", pp=2))
    given = recipe("1f1b", *tables, batch=4, encoders=2)
    resolved = resolve(given)
    schedule = recipe_schedule(given, resolved.graph, 4)
    costs = StepCosts({(s, m): StageCost(1.0, 1.0, 1.0) for s in schedule.stages.stages for m in range(4)})
    spans = list(simulate(schedule, costs).spans())
    first = {s.target: s.start for s in reversed(spans) if s.kind == "F" and s.microbatch == 0}
    assert first["vision.0"] == first["scanner.0"] == 0
    assert first["llm.0"] == 3  # after two stages of the deeper encoder and the projector, not after all three stages
    ranks = {stage: set(schedule.stages.ranks_of(stage)) for stage in schedule.stages.stages}
    assert not ranks[Stage("vision", 0)] & ranks[Stage("scanner", 0)]


def test_every_microbatch_has_its_own_shape_and_every_rank_knows_it():
    """U9: batches and lengths differ between microbatches; both sides of every edge agree without a message."""
    given = recipe("1f1b", table("vision", "0-1", pp=2), table("llm", "2-3", pp=2))
    resolved = resolve(given)
    graph = resolved.graph
    prepare = resolved.expander
    drawn = Loader(resolved.source, 5, prepare, seed=0).batch(0)
    plan = plan_batch(graph, [d.meta for d in drawn], 1)
    schedule = recipe_schedule(given, graph, 5)
    shapes = {e: [edge_layouts(plan, e, m)[0] for m in range(5)] for e in schedule.stages.edges}
    inside = next(e for e in shapes if e.internal and e.source.module == "llm")
    assert len(set(shapes[inside])) > 1
    for m in range(5):
        tokens = drawn[m].meta.tokens
        assert shapes[inside][m] == (tokens, 12)


def test_u8_an_encoder_is_a_stage_of_its_own_and_not_the_load_of_the_first():
    """U8: the encoder's work is its own stage's; the LLM's stages are cut by their own time alone."""
    given = load_recipe("recipes/digits_pipeline.toml")
    resolved = resolve(given)
    graph = resolved.graph
    stages = recipe_schedule(given, graph, 4).stages
    assert [str(s) for s in stages.stages] == ["vision.0", "projector.0", "llm.0", "llm.1"]
    assert stages.ranks_of(Stage("vision")) == (0,)
    assert [len(graph["llm"].stage_layers(i)) for i in (0, 1)] == [3, 3]


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (('[parallelism.projector]\nranks = "0-1"\npipeline_parallel_degree = 2',), "a mlp cannot be split"),
        ((table("llm", "0-7", pp=8),), "8 pipeline stages for 7 layers"),
        (
            (table("llm", "0-1", pp=2) + '\nmodule_fqns_per_model_part = [["model.norm"], ["lm_head"]]',),
            "parallelism.llm.module_fqns_per_model_part",
        ),
        (
            (table("llm", "0-3", pp=2, fsdp=2) + '\nfsdp_reshard_after_forward = "always"',),
            r'parallelism\.llm\.fsdp_reshard_after_forward = "always": pipeline_parallel_schedule = "zero_bubble" puts '
            'off gradients of weights, which would then be gone; valid are "never" and "default", or the schedule 1f1b',
        ),
    ],
)
def test_what_cannot_be_split_is_refused(tables, says):
    with pytest.raises(RecipeError, match=says):
        resolve(recipe("zero_bubble", *tables))


def test_the_kinds_of_a_zero_bubble_schedule():
    given = recipe("zero_bubble", table("llm", "0-1", pp=2), trained="frozen encoder")
    resolved = resolve(given)
    schedule = recipe_schedule(given, resolved.graph, 3)
    kinds = {str(s): {a.kind for a in schedule.actions if a.target == s} for s in schedule.stages.stages}
    assert kinds["vision.0"] == {Kind.FORWARD}
    assert kinds["projector.0"] == {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE}  # nobody waits for a part of it
    assert kinds["llm.1"] == {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.REDUCE}


@pytest.mark.parametrize("reshard", ["default", "always", "never"])
def test_a_backward_is_whole_where_its_parameters_are_let_go_in_every_microbatch(reshard):
    """In a pipeline they are not, by default."""
    projector = table("projector", "0-1", fsdp=2) + f'\nfsdp_reshard_after_forward = "{reshard}"'
    given = recipe("zero_bubble", table("vision", "0-1"), projector, table("llm", "0-3", pp=2, fsdp=2))
    split = {str(stage) for stage in recipe_schedule(given, resolve(given).graph, 3).split}
    assert split == {"llm.0", "llm.1"} | ({"projector.0"} if reshard == "never" else set())
    compiled = given.model_copy(update={"compile": given.compile.model_copy(update={"enable": True})})
    assert not recipe_schedule(compiled, resolve(compiled).graph, 3).split
