"""StepCosts of recipes: what is frozen, split, sharded and sent."""

from dataclasses import replace
from pathlib import Path

import pytest

from hetmesh.balance import edge_layouts, plan_batch, row_space
from hetmesh.cost import Coefficients, HeldOut, Machine, Profile, layer_kind
from hetmesh.data.loader import Loader
from hetmesh.errors import HetmeshError
from hetmesh.graph import Activation, Edge, ModuleGraph, Stage, stage_graph
from hetmesh.layout import MeshSpec, plan_transfer
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.recipe_step_model import recipe_step_model
from hetmesh.resolve.resolved import resolve
from hetmesh.schedule import POLICIES

RECIPES = Path(__file__).parents[2] / "recipes"
MACHINE = Machine("test", "", {"float32": 1e9}, memory_bandwidth=1e10, node_bandwidth=1e9, efficiency=1.0)
OPTIONS = ("--parallelism.pipeline_parallel_microbatch_size", "16")


def setup(name, *overrides, splits=None):
    recipe = load_recipe(RECIPES / name, (*OPTIONS, *overrides))
    resolved = resolve(recipe)
    graph = resolved.graph
    if splits:
        modules = tuple(replace(m, **splits.get(m.name, {})) for m in graph.modules)
        graph = ModuleGraph(modules, graph.boundaries)
    prepare = resolved.expander
    drawn = Loader(resolved.source, recipe.batch.global_batch_size, prepare, seed=0).batch(0)
    plan = plan_batch(graph, [d.meta for d in drawn], recipe.batch.microbatch_size)
    schedule = POLICIES["sequential"](stage_graph(graph), plan.num_microbatches, True)
    return recipe, plan, schedule, {"graph": graph, "shapes": resolved.shapes}


def costs_of(name, *overrides, splits=None, **kwargs):
    recipe, plan, schedule, rest = setup(name, *overrides, splits=splits)
    return recipe_step_model(recipe, machine=MACHINE, **rest, **kwargs).costs(plan, schedule), plan, schedule


VISION, PROJECTOR, LLM = (Stage(name) for name in ("vision", "projector", "llm"))


@pytest.fixture(scope="module")
def digits():
    return costs_of("digits.toml")


def test_every_stage_microbatch_and_transfer_has_a_cost(digits):
    costs, plan, schedule = digits
    assert set(costs.stages) == {(s, m) for s in schedule.stages.stages for m in range(plan.num_microbatches)}
    assert plan.num_microbatches == 4
    sent = {edge for edge, *_ in costs.transfers}
    assert sent == {*schedule.stages.edges, *(e.reversed for e in schedule.stages.gradient_edges)}
    for cost in costs.stages.values():
        assert cost.forward > 0
        assert cost.activation_bytes > 0
    assert set(costs.static_bytes) == set(costs.optimizer) == {0, 1, 2, 3}


def test_bytes_are_those_of_the_plan(digits):
    costs, plan, schedule = digits
    edge = next(e for e in schedule.stages.edges if e.source == VISION)
    rows = row_space(plan, plan.graph.boundaries[0], 0).total
    assert costs.transfers[edge, 0, 0].bytes == rows * 64 * 4  # each of ranks 2 and 3 takes all rows
    (step,) = plan_transfer(*edge_layouts(plan, edge, 0)).steps
    most = max(sum(piece.numel for piece in step.sent(rank)) for rank in (0, 1))  # to both of them
    assert most > rows * 64
    assert costs.transfers[edge, 0, 0].seconds == pytest.approx(most * 4 / 1e9)


def test_a_backward_has_a_part_for_the_input_only_where_a_gradient_goes_on(digits):
    costs, *_ = digits
    assert costs.stages[VISION, 0].backward_input == 0
    assert costs.stages[VISION, 0].backward_weight > costs.stages[VISION, 0].forward
    llm = costs.stages[LLM, 0]
    assert 1.5 * llm.forward < llm.backward < 2.5 * llm.forward
    assert llm.collectives_forward > 0
    assert costs.reduce[VISION] > 0
    assert costs.reduce[LLM] == 0


def test_a_frozen_encoder_has_no_backward_and_keeps_nothing():
    costs, _, schedule = costs_of("digits.toml", "--modules.vision.trainable", "false")
    assert costs.stages[VISION, 0].backward == costs.stages[VISION, 0].activation_bytes == 0
    assert VISION not in costs.reduce
    assert not any(edge.destination == VISION for edge, *_ in costs.transfers)
    assert VISION not in schedule.stages.backward_stages


def test_full_recomputation_costs_a_forward_and_keeps_less(digits):
    plain = digits[0].stages[LLM, 0]
    again = costs_of("digits.toml", "--activation_checkpoint.mode", "full")[0].stages[LLM, 0]
    assert again.forward == plain.forward
    assert plain.backward < again.backward < plain.backward + 1.01 * plain.forward
    assert again.activation_bytes < 0.6 * plain.activation_bytes


def test_fsdp_gathers_and_scatters():
    costs, *_ = costs_of("digits_fsdp.toml")
    sharded = [s for s, seconds in costs.gather.items() if seconds > 0]
    assert sharded
    for stage in sharded:
        first, second = (costs.stages[stage, m] for m in (0, 1))
        assert second.collectives_forward - first.collectives_forward > 0
        assert first.collectives_backward > 0
        assert costs.reduce[stage] == 0


def test_fitted_seconds_take_the_place_of_analytic_ones():
    recipe, plan, schedule, rest = setup("digits.toml")
    parts = dict.fromkeys(("forward", "backward_input", "backward_weight"), Coefficients(1.0))
    parts["backward"] = Coefficients(2.0)
    layers = {layer_kind(layer): parts for shape in rest["shapes"].values() for layer in shape.layers}
    profile = Profile(layers, HeldOut())
    machine = replace(MACHINE, node_bandwidth=0.0)
    costs = recipe_step_model(recipe, machine=machine, profile=profile, **rest).costs(plan, schedule)
    assert costs.stages[LLM, 0].forward == 8  # embeddings, three blocks, norm, head with its gradients
    assert costs.stages[LLM, 0].backward == 10
    with pytest.raises(HetmeshError, match="was not measured"):
        recipe_step_model(recipe, machine=machine, profile=Profile(), **rest).costs(plan, schedule)


def test_the_stages_of_a_module_share_its_costs():
    blocks = [f"model.layers.{i}" for i in range(3)]
    runs = (("model.embed_tokens", blocks[0]), (*blocks[1:], "model.norm", "lm_head"))
    whole, plan, _ = costs_of("digits.toml", splits={"llm": {"mesh": MeshSpec.make([2], tp=1)}})
    own = {"mesh": MeshSpec.make([2, 3], pp=2), "splits": runs, "activation": Activation(96, padded=True)}
    split, _, schedule = costs_of("digits.toml", splits={"llm": own})
    first, second = Stage("llm", 0), Stage("llm", 1)
    for part in ("forward", "backward", "backward_input", "activation_bytes"):
        parts = [getattr(split.stages[stage, 1], part) for stage in (first, second)]
        assert sum(parts) == pytest.approx(getattr(whole.stages[LLM, 1], part))
        assert min(parts) > 0
    samples = [plan.samples[i] for i in plan.samples_of("llm", 1, 0)]
    sent = len(samples) * max(sample.tokens for sample in samples) * 96 * 4
    edge = Edge(first, second)
    assert split.transfers[edge, 1, 1].bytes == split.transfers[edge.reversed, 1, 1].bytes == sent
    assert edge in schedule.stages.gradient_edges
