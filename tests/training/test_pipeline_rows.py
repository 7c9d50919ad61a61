"""What pipelines must not do: pay for what is frozen, make encoders wait for each other, hide where time goes."""

import pytest
import torch
from test_parity_pipeline import MODEL, TWO_ENCODERS, recipe, table
from torch import nn

from hetmesh.balance import edge_layouts, plan_batch
from hetmesh.boundary import World
from hetmesh.cost import StageCost, StepCosts
from hetmesh.data.loader import Loader
from hetmesh.errors import RecipeError
from hetmesh.graph import Stage
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.schedule import Kind
from hetmesh.simulate import Timeline, bubbles, simulate
from hetmesh.training.describe import make_prepare
from hetmesh.training.feed import Feed
from hetmesh.training.job import Job, describe
from hetmesh.training.recipe_schedule import recipe_schedule


class Saved(nn.Module):
    """Counts the elements that autograd keeps of a stage's forwards."""

    def __init__(self, stage):
        super().__init__()
        self.stage, self.elements = stage, 0

    def forward(self, batch, inputs):
        def keep(tensor):
            self.elements += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return self.stage(batch, inputs)


def one_step(rank, recipe):
    """Of this rank: directions of the messages of each edge, elements saved per stage, what it did when."""
    world = World.current()
    job = Job.assemble(recipe, world)
    drawn = next(job.loader)
    plan = job.plan([d.meta for d in drawn])
    schedule = job.schedule(plan)
    stages = {stage: Saved(module) for stage, module in job.runtime.modules.items()}
    job.runtime.modules = stages
    job.runtime.recording = []
    world.log.clear()
    job.runtime.run(schedule, plan, Feed(job.loader, drawn, plan, job.adapters, rank), step=0)
    messages = {(m.label.boundary, m.label.direction) for m in world.log.messages}
    return messages, {str(s): saved.elements for s, saved in stages.items()}, job.runtime.recording


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
    saved = {stage: n for _, stages, _ in results for stage, n in stages.items()}
    assert saved["vision.0"] == saved["vision.1"] == 0
    assert saved["llm.0"] > 0
    assert saved["llm.1"] > 0


@pytest.mark.slow
def test_the_bubbles_of_a_real_step_add_up(pool4):
    """O1: compute and all classes are the step, within 1%, from the trace of a real run."""
    given = recipe("1f1b", table("vision", "0-1", pp=2), table("llm", "2-3", pp=2))
    results = pool4.run(one_step, given, timeout=60)
    zero = min(start for _, _, record in results for _, start, _ in record)
    records = {r: [(a, b - zero, e - zero) for a, b, e in record] for r, (_, _, record) in enumerate(results)}
    _, _, graph = describe(given)
    timeline = Timeline.recorded(recipe_schedule(given, graph, 5), records)
    assert len(timeline.tracks) == 4
    for row in bubbles(timeline):
        assert row.compute + row.idle == pytest.approx(timeline.makespan, rel=0.01)
        assert row.compute > 0
        assert row.pp_warmup + row.pp_cooldown + row.pp_other > 0


def test_encoder_branches_run_at_the_same_time():
    """C4: two encoders on ranks of their own, joined at the LLM."""
    text = MODEL.replace("image = [1, 8, 8]", "image = [1, 8, 8], scan = [2, 8, 8]") + TWO_ENCODERS
    text = text.format(policy="1f1b", batch=4, tied="false", extra="", vision="", projector="", llm="")
    tables = (table("vision", "0-1", pp=2), table("scanner", "2"), table("llm", "3-4", pp=2))
    given = parse_recipe("\n".join([text, *tables]))
    _, _, graph = describe(given)
    schedule = recipe_schedule(given, graph, 4)
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
    source, adapters, graph = describe(given)
    prepare = make_prepare(given, graph, adapters)
    drawn = Loader(source, 5, prepare, seed=0).batch(0)
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
    _, _, graph = describe(given)
    stages = recipe_schedule(given, graph, 4).stages
    assert [str(s) for s in stages.stages] == ["vision.0", "projector.0", "llm.0", "llm.1"]
    assert stages.ranks_of(Stage("vision")) == (0,)
    assert [len(graph["llm"].stage_layers(i)) for i in (0, 1)] == [3, 3]


@pytest.mark.parametrize(
    ("tables", "extra", "says"),
    [
        (('[parallelism.projector]\nranks = "0-1"\npipeline_parallel_degree = 2',), "", "a mlp cannot be split"),
        ((table("llm", "0-7", pp=8),), "", "8 pipeline stages for 7 layers"),
        (
            (table("llm", "0-1", pp=2) + '\nmodule_fqns_per_model_part = [["model.norm"], ["lm_head"]]',),
            "",
            "parallelism.llm.module_fqns_per_model_part",
        ),
        ((table("llm", "0-3", pp=2, fsdp=2),), "", "zero_bubble"),
        ((table("llm", "0-1", pp=2),), '[activation_checkpoint]\nmode = "full"', "zero_bubble"),
    ],
)
def test_what_cannot_be_split_is_refused(tables, extra, says):
    with pytest.raises(RecipeError, match=says):
        describe(recipe("zero_bubble", *tables, extra="", trained="all") if not extra else _with(tables, extra))


def _with(tables, extra):
    return recipe("zero_bubble", *tables, extra)


def test_the_kinds_of_a_zero_bubble_schedule():
    given = recipe("zero_bubble", table("llm", "0-1", pp=2), trained="frozen encoder")
    _, _, graph = describe(given)
    schedule = recipe_schedule(given, graph, 3)
    kinds = {str(s): {a.kind for a in schedule.actions if a.target == s} for s in schedule.stages.stages}
    assert kinds["vision.0"] == {Kind.FORWARD}
    assert kinds["projector.0"] == {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE}  # nobody waits for a part of it
    assert kinds["llm.1"] == {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.REDUCE}
