"""A measured profile in the place of FLOPs: loads of samples, default cuts, and what `auto` judges by."""

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from hetmesh.balance import assign, batch_loads, batch_plan_of, graph_slots, pipeline_score
from hetmesh.cost import Coefficients, Profile, computed_work, layer_kind, upstream_flags
from hetmesh.cost.fitted import PARTS
from hetmesh.errors import RecipeError
from hetmesh.graph import Stage
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import rank_work, simulate
from hetmesh.simulate.step_model import UNIT_S
from hetmesh.testing.sources import RandomMedia
from support.profiles import write_profile

RECIPES = Path(__file__).parents[2] / "recipes"


def profile_of(path, name, keys=(), slower=None):
    """A recipe with a profile that nobody measured."""
    write_profile(path, resolve(load_recipe(RECIPES / f"{name}.toml", keys)), slower)
    return resolve(load_recipe(RECIPES / f"{name}.toml", (*keys, f"--profiling.profile={path}")))


def test_loads_are_measured_seconds(tmp_path):
    resolved = profile_of(tmp_path / "profile.json", "digits_pipeline")
    metas, profile = resolved.loader().batch(0).metas, Profile.load(tmp_path / "profile.json")
    loads = batch_loads(resolved.graph, metas, resolved.balance)
    slots = graph_slots(resolved.graph, 4, resolved.balance)
    for i, name in enumerate(loads.modules):
        shape = resolved.shapes[name]
        layers = [*zip(shape.layers, upstream_flags(shape, name != "vision"), strict=True)]

        def seconds(work, layers=layers):
            times = [profile.predict(x, work, upstream=before) for x, before in layers if x.name and work.rows]
            return sum(t.forward for t in times), sum(t.backward for t in times)

        for sample, work in zip(metas, loads.work[:, i].tolist(), strict=True):
            each = computed_work(resolved.graph, name, [sample])
            constant = slots.overhead[i] * UNIT_S if each.rows else 0.0
            step = (constant + work * UNIT_S) * (1 + slots.backward[i])
            assert step == pytest.approx(sum(seconds(each)), rel=1e-6)
        forward, backward = seconds(resolved.typical.of(name))
        assert slots.backward[i] == pytest.approx(backward / forward, rel=1e-6)


def test_without_a_profile_loads_are_flops():
    resolved = resolve(load_recipe(RECIPES / "digits_pipeline.toml"))
    assert {cost.overhead for cost in resolved.costs.values()} == {None}


def test_another_profile_makes_another_assignment(tmp_path):
    """Each is the faster one by its own seconds: where the encoder takes nearly all of the time it is evened, and where
    the LLM does, that."""
    cases = {}
    for module in ("vision", "llm"):
        resolved = profile_of(tmp_path / f"{module}.json", "digits_pipeline", slower={module: 300})
        loads = batch_loads(resolved.graph, resolved.loader().batch(0).metas, resolved.balance)
        slots = graph_slots(resolved.graph, 4, resolved.balance)
        cases[module] = pipeline_score(loads, slots), assign(loads, slots)
    gains = []
    for module, other in itertools.permutations(cases):
        score, found = cases[module]
        gains.append(score(cases[other][1]) - score(found))
    assert min(gains) >= 0
    assert max(gains) > 0


@pytest.mark.parametrize(
    "name",
    ["digits_pipeline", "digits_interleaved", "digits_zero_bubble", "digits_three_phase", "digits_colocated"],
)
def test_the_score_of_auto_is_the_simulated_step(tmp_path, name):
    """By the placement and schedule of the recipe; but for how padding changes what a backward takes, which is the same
    for all."""
    keys = ("--parallelism.pipeline_parallel_microbatch_size=4",) if name == "digits_colocated" else ()
    resolved = profile_of(tmp_path / "profile.json", name, keys)
    model, metas = resolved.step_model("cpu"), resolved.loader().batch(0).metas
    loads = batch_loads(resolved.graph, metas, resolved.balance)
    slots = graph_slots(resolved.graph, resolved.recipe.batch.num_microbatches, resolved.balance, len(metas))
    score, ratios = pipeline_score(loads, slots), []
    for policy in ("none", "lpt", "two_dim", "sorted"):
        found = assign(loads, slots, policy)
        plan = batch_plan_of(resolved.graph, metas, found)
        schedule = resolved.schedules.of(plan)
        ratios.append(score(found) * UNIT_S / simulate(schedule, model.costs(plan, schedule)).makespan)
    assert ratios == pytest.approx([1.0] * 4, rel=0.2)
    assert max(ratios) / min(ratios) < 1.05


class OfManyWords(RandomMedia):
    def __init__(self, **options):
        super().__init__(**options)
        self.vocab_size = 60001


def test_default_cuts_follow_the_data():
    """A head that few tokens reach is less of a stage than one that all of them reach."""
    given, layers = tomllib.loads((RECIPES / "digits_pipeline.toml").read_text()), {}
    given["modules"]["llm"]["config"]["num_hidden_layers"] = 6
    for without in (0.0, 0.98):
        options = {"kinds": {"image": [1, 8, 8]}, "without_targets": without}
        given["data"] = {"source": f"{__name__}:OfManyWords", "options": options}
        layers[without] = len(resolve(parse_recipe(given)).graph["llm"].splits[-1])
    assert layers[0.0] < layers[0.98]


def test_default_cuts_follow_a_profile(tmp_path):
    """A head that was measured to take as long as all else together has a stage of its own."""
    keys = ("--modules.llm.config.num_hidden_layers=6",)
    before = resolve(load_recipe(RECIPES / "digits_pipeline.toml", keys)).graph["llm"].splits
    path = tmp_path / "profile.json"
    profile_of(path, "digits_pipeline", keys)
    profile = Profile.load(path)
    layers = dict(profile.layers)
    head = next(kind for kind in layers if "on targets" in kind)
    layers[head] = {part: Coefficients(1.0) for part in PARTS}
    replace(profile, layers=layers).save(path)
    after = resolve(load_recipe(RECIPES / "digits_pipeline.toml", (*keys, f"--profiling.profile={path}"))).graph["llm"]
    assert before[-1] != ("lm_head",)
    assert after.splits[-1] == ("lm_head",)


def test_a_profile_of_other_modules_is_refused(tmp_path):
    profile_of(tmp_path / "profile.json", "digits_pipeline")
    keys = (f"--profiling.profile={tmp_path / 'profile.json'}", "--modules.llm.config.intermediate_size=64")
    recipe = load_recipe(RECIPES / "digits.toml", keys)
    with pytest.raises(RecipeError, match=r"profiling.profile: .* not measured.*hetmesh profile"):
        resolve(recipe)


@pytest.mark.parametrize(("name", "degrees"), [("digits_colocated", {"tp": 2}), ("digits_long", {"cp": 2})])
def test_measured_collectives_take_the_place_of_a_machines_links(tmp_path, name, degrees):
    """Of tensor and of context parallelism: in predictions, and in what samples cost balancers."""
    path = tmp_path / "profile.json"
    resolved = profile_of(path, name)
    profile, shape = Profile.load(path), resolved.shapes["llm"]
    block = next(layer for layer in shape.layers if layer.attention_width)
    blocks = sum(layer.attention_width > 0 for layer in shape.layers)
    parts = {"collectives_forward": Coefficients(0.005, 2e-6), "collectives_backward": Coefficients(0.007)}
    kinds = {layer_kind(layer, **degrees): {part: Coefficients() for part in parts} for layer in shape.layers}
    replace(profile, collectives=kinds | {layer_kind(block, **degrees): parts}).save(path)
    assert Profile.load(path).collectives[layer_kind(block, **degrees)] == parts
    metas = resolved.loader().batch(0).metas
    plan = resolved.plan(metas)
    schedule = resolved.schedules.of(plan)
    (rows,) = {work.work.rows for work in rank_work(plan, "llm", 0)[:1]}
    cost = resolved.step_model("cpu").costs(plan, schedule).stages[Stage("llm"), 0]
    assert cost.collectives_forward == pytest.approx(blocks * (0.005 + 2e-6 * rows), rel=0.1)
    assert cost.collectives_backward == pytest.approx(blocks * 0.007)
    cheap = costs_of(path, name)
    parts["collectives_forward"] = Coefficients(0.005, 4e-6)
    replace(profile, collectives=kinds | {layer_kind(block, **degrees): parts}).save(path)
    dear = costs_of(path, name)
    before, after = (cost["llm"].forward[0] * (1 + cost["llm"].backward) for cost in (cheap, dear))
    per_row = (after - before) * UNIT_S
    assert per_row == pytest.approx(degrees.get("tp", 1) * blocks * 2e-6)  # which balancers divide by


def costs_of(path, name):
    return resolve(load_recipe(RECIPES / f"{name}.toml", (f"--profiling.profile={path}",))).costs
