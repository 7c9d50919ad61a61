"""The search for layouts: against brute force, within what is fixed and what fits; a few lanes stand for all."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.cost import Coefficients, Profile, layer_kind
from hetmesh.cost.fitted import PARTS
from hetmesh.errors import UsageError
from hetmesh.graph import MetaArrays, Stage
from hetmesh.planner import PLACEMENTS, LayoutPlan, ModulePlan, Predictor, candidates, search
from hetmesh.planner.candidates import can_run, homogeneous, microbatch_sizes, module_plans, variants
from hetmesh.planner.estimate import Estimator
from hetmesh.planner.layout_plan import laid_out
from hetmesh.planner.predict import MIN_LANES, deciding_predictor, some_lanes
from hetmesh.planner.search import BATCHES
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.records.metrics import amount
from hetmesh.report.plan_text import nothing_found
from hetmesh.resolve.planning import not_kept, planned_text, recipe_problem
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import LayerCosts
from support.often import some

pytestmark = pytest.mark.slow

PLANNED = ("digits_single", "digits_cp_pp", "digits_lora", "digits_omni")

RECIPES = Path(__file__).parents[2] / "recipes"


def problem(ranks=4, size=16, recipe="digits", **kwargs):
    sizes = [f"--training.global_batch_size={size}", "--training.local_batch_size=1"]
    given = load_recipe(RECIPES / f"{recipe}.toml", sizes)
    return recipe_problem(resolve(given), machine="h100", ranks=ranks, **kwargs)


def alike(given):
    """The problem with samples that are all the same."""
    return replace(given, samples=MetaArrays.of([given.samples[0]] * len(given.samples)))


@pytest.fixture(scope="module")
def four():
    """A problem of four ranks, and what the search finds."""
    given = problem(4, 16)
    return given, search(given)


def test_a_colocated_pipeline_with_its_gaps_filled_is_written_as_it_was_planned():
    given = problem(4, 16)
    modules = {"vision": ModulePlan((0, 4), (1, 4, 1, 1, 1)), "llm": ModulePlan((0, 4), (2, 2, 1, 1, 1))}
    plan = LayoutPlan("colocated", modules, "bubble_fill", 2)
    assert Predictor(given).predict(plan).step_s > 0
    text = (RECIPES / "digits.toml").read_text()
    assert parse_recipe(planned_text(parse_recipe(text), text, (), given, plan)).fills_bubbles


def test_a_pipeline_gathers_once_per_step_where_memory_allows_it():
    """Its default; a candidate that gathers in every microbatch holds less, and takes longer."""
    given = problem(4, 32, fixed={"llm.pipeline_parallel_degree": 2, "llm.data_parallel_shard_degree": 2})
    sink = next(plan for plan in module_plans(given, "llm", 0, 4) if plan.activation_checkpoint == "none")
    plan = LayoutPlan("homogeneous", next(homogeneous(given, sink)), "1f1b", 1)
    plans = list(variants(given, plan))
    whole, each = (Predictor(given).predict(plan) for plan in plans)
    assert [str(plan.modules["llm"]) for plan in plans] == ["PP 2 x FSDP 2", "PP 2 x FSDP 2, gathered per microbatch"]
    assert whole.step_s < each.step_s
    assert whole.peak_bytes > each.peak_bytes
    text = (RECIPES / "digits.toml").read_text()
    for plan, key in zip(plans, ("default", "always"), strict=True):
        written = parse_recipe(planned_text(parse_recipe(text), text, (), given, plan))
        assert written.parallelism.modules["llm"].fsdp_reshard_after_forward == key
    assert len(list(variants(given, replace(plan, schedule="zero_bubble")))) == 1  # which must keep parameters
    (seconds, size), (seconds_each, size_each) = map(Estimator(given, LayerCosts(given.machine)).estimate, plans)
    assert seconds < seconds_each
    assert size > size_each


def test_modules_after_the_llm_are_placed_as_encoders_are_and_behind_its_last_stage():
    given = problem(4, 16, "digits_draw")
    assert given.own == ("vision", "drawer", "llm")
    assert given.with_llm == {"drawer"}
    llm = ModulePlan((0, 4), (2, 2, 1, 1, 1))
    behind = [each["drawer"].ranks for each in homogeneous(given, llm) if each["drawer"].degree("pp") == 1]
    assert set(behind) == {(2, 4)}
    modules = {"vision": ModulePlan((0, 1), (1, 1, 1, 1, 1)), "drawer": ModulePlan((1, 2), (1, 1, 1, 1, 1))}
    plan = LayoutPlan(
        "disjoint", {**modules, "llm": ModulePlan((2, 4), (1, 2, 1, 1, 1))}, "1f1b", 2, with_llm=given.with_llm
    )
    assert Predictor(given).predict(plan).step_s > 0
    text = (RECIPES / "digits_draw.toml").read_text()
    meshes = parse_recipe(planned_text(parse_recipe(text), text, (), given, plan)).wiring.meshes
    assert {name: mesh.ranks for name, mesh in meshes.items()} == {
        "vision": (0,),
        "projector": (2, 3),
        "llm": (2, 3),
        "drawer": (1,),
    }
    wide = {
        **plan.modules,
        "drawer": ModulePlan((0, 4), (1, 4, 1, 1, 1)),
        "vision": ModulePlan((0, 4), (1, 4, 1, 1, 1)),
    }
    sizes = replace(plan, placement="colocated", modules=wide, microbatch_size=1).encoder_sizes
    assert sizes == {"vision": 1}  # what follows the LLM has its microbatches


def slower(given, times):
    """The problem on processors so many times as slow, but for the overhead of operations and of launching them, which
    hides all else."""
    machine = given.machine
    rates = {kind: peak / times for kind, peak in machine.peak_flops.items()}
    overheads = {"operation_overhead": machine.operation_overhead / 10, "launch_overhead": 0.0}
    machine = replace(machine, peak_flops=rates, memory_bandwidth=machine.memory_bandwidth / times)
    return replace(given, machine=replace(machine, **overheads))


FEW = {
    "placement": "colocated",
    "llm.activation_checkpoint": "none",
    "vision.activation_checkpoint": "none",
    "microbatch_size": 1,
}


def test_the_best_colocated_pipeline_is_tried_with_its_gaps_filled():
    """However few candidates there are."""
    fixed = {**FEW, "llm.pipeline_parallel_degree": 4, "vision.data_parallel_replicate_degree": 4}
    given = slower(problem(4, 8, fixed=fixed), 1000)
    (plan,) = candidates(given, "colocated")
    found = search(given, shown=20)
    by_plan = {each.plan.key(): each for each in found.best["colocated"]}
    filled, plain = by_plan[replace(plan, schedule="bubble_fill").key()], by_plan[plan.key()]
    assert filled.step_s < 0.99 * plain.step_s
    assert 2 < found.considered == found.simulated  # splits over the lanes of the encoder, too


def test_a_pipeline_is_tried_with_its_gaps_filled_where_another_layout_is_faster(monkeypatch):
    asked, predict = set(), Predictor.predict

    def asking(self, plan):
        asked.add(plan.schedule)
        return predict(self, plan)

    monkeypatch.setattr(Predictor, "predict", asking)
    found = search(problem(2, 8, fixed={**FEW, "llm.tensor_parallel_degree": 1}))
    assert found.fastest.plan.schedule == "sequential"
    assert asked == {"sequential", "three_phase", "bubble_fill"}


def test_what_is_known_of_layouts_from_another_machine_changes_no_prediction():
    """Of all but gaps, which stay filled as they were first."""
    given = problem(2, 8, fixed={**FEW, "llm.tensor_parallel_degree": 1})
    other, knowing = slower(given, 1000), deciding_predictor(given, 1)
    search(given, exact=knowing.on(given.machine))
    once, anew = (
        {own.plan.key(): (own.step_s, own.peak_bytes) for own in found.every if own.plan.schedule != "bubble_fill"}
        for found in (search(other, exact=knowing.on(other.machine)), search(other, batches=1))
    )
    assert len(once) > 2
    assert once == anew


def test_o4_uneven_splits_are_searched_written_as_planned_and_refused_where_they_cannot_run():
    """The stages of the LLM are as uneven as its layers divide: the lanes of the encoder on them take what gains."""
    given = problem(2, 8, fixed={"llm.pipeline_parallel_degree": 2, "vision.data_parallel_replicate_degree": 2})
    machine = replace(given.machine, peak_flops=dict.fromkeys(given.machine.peak_flops, 1e9))
    given = replace(given, machine=machine)
    found = search(given).best["colocated"]
    uneven = [each for each in found if each.plan.shares]
    assert uneven
    plan = uneven[0].plan
    size, count = plan.microbatch_size, given.global_batch_size // plan.microbatch_size
    exact = Predictor(given, BATCHES, MIN_LANES)
    every = [replace(plan, shares={"vision": (i, count - i)}) for i in range(1, count)]
    assert uneven[0].step_s == min(exact.predict(each).step_s for each in every), size
    assert "for the lanes of vision" in str(plan)
    text = (RECIPES / "digits.toml").read_text()
    written = parse_recipe(planned_text(parse_recipe(text), text, (), given, plan))
    assert written.balance.microbatch_shares == plan.shares
    modules = {**plan.modules, "vision": ModulePlan((0, 2), (2, 1, 1, 1, 1))}
    assert can_run(plan)
    assert not can_run(replace(plan, modules=modules))  # a single lane
    assert not can_run(replace(plan, shares={"vision": (1, 1, 1)}))
    assert not can_run(replace(plan, placement="disjoint"))


@pytest.mark.parametrize("schedule", some(("bubble_fill",), ("zero_bubble", "bubble_fill")))
def test_a_fixed_schedule_leaves_what_a_recipe_may_say(schedule):
    """Disjoint modules have no gaps to fill, and of a backward in two parts the second needs parameters."""
    given = problem(2, 16, fixed={"schedule": schedule})
    text = (RECIPES / "digits.toml").read_text()
    every = [plan for placement in PLACEMENTS for plan in candidates(given, placement)]
    assert {(plan.modules["llm"].degree("dp_shard"), plan.modules["llm"].activation_checkpoint) for plan in every} == {
        *itertools.product((1, 2), ("none", "full"))
    }
    plans = [plan for plan in every if plan.microbatch_size == 8]
    assert {plan.placement for plan in plans} >= {"homogeneous", "colocated"}
    for plan in plans:
        assert parse_recipe(planned_text(parse_recipe(text), text, (), given, plan)).schedule == schedule


def test_predictions_come_in_order_and_are_deterministic(four):
    given, one = four
    two = search(given)
    for placement, best in one.best.items():
        assert [each.plan for each in best] == [each.plan for each in two.best[placement]]
        assert [each.step_s for each in best] == sorted(each.step_s for each in best)
        assert all(each.fits and each.plan.placement == placement for each in best)
    assert set(one.best) == set(PLACEMENTS)
    assert all(one.best.values())
    for placement in PLACEMENTS:
        ranks = [own.ranks for own in one.best[placement][0].plan.modules.values()]
        if placement == "disjoint":
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranks))
        else:
            assert ranks[-1] == (0, 4)


def test_a_layout_per_module_is_no_slower_than_the_shared_one_on_the_same_ranks(monkeypatch):
    """Which microbatch size is fast is what estimates know least: the best of each is simulated."""
    fixed = {"llm.tensor_parallel_degree": 1, "llm.pipeline_parallel_degree": 1}
    given = load_recipe(RECIPES / "siglip_qwen3_8b.toml", [])
    eight = recipe_problem(resolve(given), machine="h100", ranks=8, fixed=fixed)
    eight = replace(
        eight, machine=replace(eight.machine, launch_overhead=0.0)
    )  # a shared layout has as many operations
    of_all = min(found[0].step_s for found in search(eight, shown=1).best.values())
    # Where each microbatch gathers: once per step the memory for the encoder's replicas is the LLM's.
    monkeypatch.setattr(sys.modules["hetmesh.planner.search"], "variants", lambda problem, plan: iter([plan]))
    monkeypatch.setattr(sys.modules["hetmesh.planner.search"], "gathered_once", lambda plan: plan)
    best = search(eight, shown=1).best
    assert best["colocated"][0].step_s <= best["homogeneous"][0].step_s
    assert of_all <= min(found[0].step_s for found in best.values())
    assert best["colocated"][0].plan.microbatch_size == 4
    for each in best["colocated"]:  # else it is the shared one
        assert len({own.degrees for own in each.plan.modules.values()}) > 1


def test_what_is_fixed_stays():
    fixed = {"llm.tensor_parallel_degree": 2, "vision.activation_checkpoint": "full", "microbatch_size": 2}
    found = search(problem(4, 8, fixed=fixed))
    for best in found.best.values():
        for each in best:
            assert each.plan.modules["llm"].degree("tp") == 2
            assert each.plan.modules["vision"].activation_checkpoint == "full"
            assert each.plan.microbatch_size == 2


def test_degrees_and_sizes_that_are_no_powers_of_two_are_tried_where_they_are_fixed_or_nothing_else_divides():
    fixed = {"llm.data_parallel_shard_degree": 3, "microbatch_size": 5}
    plans = list(candidates(problem(12, 120, fixed=fixed), "homogeneous"))
    assert {(plan.modules["llm"].degree("dp_shard"), plan.microbatch_size) for plan in plans} == {(3, 5)}
    wide = problem(8, 1000)
    assert any(plan.modules["llm"].lanes == 8 for plan in candidates(wide, "homogeneous"))
    assert [microbatch_sizes(wide, lanes, 1) for lanes in (1, 8)] == [[40, 100, 200, 500], [1, 5, 25]]
    assert microbatch_sizes(problem(1, 127), 1, 1) == [1]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llm.tensor", 2, r"--fix llm\.tensor: valid are placement, .* MODULE\.KEY"),
        ("projector.tensor_parallel_degree", 2, r"MODULE of \['vision', 'llm'\]"),
        ("placement", "anywhere", r"--fix placement: 'anywhere' is not valid"),
        ("llm.tensor_parallel_degree", True, r"--fix llm\.tensor_parallel_degree: True is not valid"),
        ("llm.tensor_parallel_degree", 0, r"--fix llm\.tensor_parallel_degree: 0 is not valid"),
    ],
)
def test_wishes_that_cannot_be_are_named(key, value, said):
    with pytest.raises(UsageError, match=said):
        problem(fixed={key: value})


def test_tensor_parallelism_stays_within_a_node():
    given = problem(8, 16)
    for per_node in (1, 2, 4):
        few = replace(given, machine=replace(given.machine, ranks_per_node=per_node))
        plans = [own for name in PLACEMENTS for plan in candidates(few, name) for own in plan.modules.values()]
        assert max(own.degree("tp") for own in plans) == per_node


def test_measured_layers_take_the_place_of_analytic_ones(tmp_path):
    given = problem(2, 8, fixed={"placement": "homogeneous"})
    kinds = {layer_kind(layer) for facts in given.facts.values() for layer in facts.shape.layers if layer.name}
    slow = {part: Coefficients(1e-2, 1e-6, 1e-9) for part in PARTS}
    path = tmp_path / "profile.json"
    Profile(dict.fromkeys(kinds, slow)).save(path)
    measured = problem(2, 8, fixed={"placement": "homogeneous"}, profile=str(path))
    plan = next(iter(candidates(given, "homogeneous")))
    seconds, analytic = (Predictor(each).predict(plan).step_s for each in (measured, given))
    assert seconds > 5 * analytic
    assert search(measured).fastest is not None


def test_nothing_that_does_not_fit_is_proposed(four):
    given, whole = four
    largest = whole.fastest.peak_bytes
    found = search(replace(given, memory_bytes=largest - 1))
    assert all(each.peak_bytes < largest for best in found.best.values() for each in best)
    none = search(replace(given, memory_bytes=1))
    assert none.fastest is None
    (least,) = {each.least_bytes for each in (none, search(replace(given, memory_bytes=none.least_bytes - 1)))}
    assert 1 < least <= whole.least_bytes
    says = (
        f"no layout of 4 ranks fits into 1 B: the smallest that was simulated holds {amount(least)}B on a rank; allow"
    )
    assert nothing_found(replace(given, memory_bytes=1), none).startswith(says)


def test_what_estimates_take_for_too_large_is_found_if_it_fits(four, monkeypatch):
    given, _ = four
    monkeypatch.setattr(Estimator, "estimate", lambda self, plan, most=0.0: (1.0, 10**15))
    assert search(given).fastest is not None


def test_o3_what_encoders_keep_until_the_tail_prunes_plans():
    """Under three_phase the activations of all microbatches of the encoder are there at once, those of the LLM's
    pipeline are not: with more microbatches the same plan holds more, and where that is too much it is not proposed."""
    degrees = {"llm.pipeline_parallel_degree": 2, "vision.data_parallel_replicate_degree": 2}
    held, vision = [], Stage("vision")
    for size in (4, 16):
        given = alike(problem(2, size, fixed={**FEW, **degrees, "schedule": "three_phase"}))
        (plan,) = candidates(given, "colocated")
        ((_, _, costs),) = Predictor(given).steps(plan)
        each = [cost.activation_bytes for (stage, _), cost in costs.stages.items() if stage == vision]
        shape, rows = given.facts["vision"].shape, given.samples[0].rows["vision"]
        blocks = [layer for layer in shape.layers if layer.attention_width]
        assert min(each) >= len(blocks) * rows * blocks[0].attention_width * 4  # each keeps its input at least
        held.append((Predictor(given).predict(plan).peak_bytes, sum(each), len(each)))
        assert search(given).best["colocated"][0].plan == plan
        found = search(replace(given, memory_bytes=held[-1][0] - 1))
        assert max(costs.static_bytes.values()) + min(each) < held[-1][0] - 1
        assert found.best["colocated"] == ()
        assert found.too_large == found.simulated >= 1  # in windows, too
    few, many = held
    assert many[2] > few[2]
    assert many[0] - few[0] >= many[1] - few[1]


@pytest.mark.parametrize("placement", ["colocated", "disjoint"])
def test_a_few_lanes_stand_for_all_where_samples_are_alike(placement):
    given = alike(problem(8, 32))
    own = {"colocated": ((0, 8), (0, 8)), "disjoint": ((0, 4), (4, 8))}[placement]
    vision = ModulePlan(own[0], (1, own[0][1] - own[0][0], 1, 1, 1))
    llm = ModulePlan(own[1], (1, 1, (own[1][1] - own[1][0]) // 2, 1, 2))
    plan = LayoutPlan(placement, {"vision": vision, "llm": llm}, "sequential", 2)
    graph, share = some_lanes(laid_out(given, plan))
    assert share < 1
    assert set(graph.ranks) < set(range(8))
    few, all_of_them = (Predictor(given, lanes=lanes).predict(plan) for lanes in (1, 100))
    assert few.step_s == pytest.approx(all_of_them.step_s, rel=1e-9)
    assert few.peak_bytes == all_of_them.peak_bytes


@pytest.mark.parametrize("recipe", some(("digits_cp_pp",), PLANNED))
def test_what_is_planned_is_what_is_written_and_all_else_stays(recipe):
    """Packing, frozen layers and stages too: `planned_text` refuses what differs."""
    path = RECIPES / f"{recipe}.toml"
    key = "parallelism.llm.enable_sequence_parallel"
    extra = [] if recipe == "digits_lora" else [f"--{key}=true"]
    overrides = ["--debug.seed=3", "--boundaries.0.from=vision", *extra]
    before, text = load_recipe(path, overrides), path.read_text(encoding="utf-8")
    given = recipe_problem(resolve(before), machine="h100", ranks=8)
    assert not_kept(before) == []  # tokens are shared wherever they can be
    for placement in PLACEMENTS:
        plans = list(itertools.islice(candidates(given, placement), 0, 4000, 571))[:3]
        assert plans
        for plan in plans:
            after = parse_recipe(planned_text(before, text, overrides, given, plan))
            assert after.debug.seed == 3
            assert after.batch.global_batch_size == before.batch.global_batch_size
            assert after.batch.microbatch_size == plan.microbatch_size
            assert (after.schedule, after.optimizer) == (plan.schedule, before.optimizer)


def test_keys_of_a_layout_that_plans_do_not_have_are_named():
    three_phase = load_recipe(RECIPES / "digits_three_phase.toml", ["--parallelism.three_phase_offload=true"])
    assert "parallelism.three_phase_offload" in not_kept(three_phase)


def test_stages_that_the_recipe_would_cut_otherwise_are_named():
    given = problem(2, 4, fixed={"llm.pipeline_parallel_degree": 2})
    many = replace(given.samples, targets=given.samples.targets * [1, 10_000])  # so the head takes the time
    plan = next(plan for plan in candidates(given, "homogeneous"))
    path, sizes = RECIPES / "digits.toml", ["--training.global_batch_size=4", "--training.local_batch_size=1"]
    text = path.read_text(encoding="utf-8")
    assert "module_fqns" not in planned_text(load_recipe(path, sizes), text, sizes, given, plan)
    other = replace(given, samples=many)
    cut = laid_out(other, plan)["llm"].splits
    assert cut != laid_out(given, plan)["llm"].splits
    after = parse_recipe(planned_text(load_recipe(path, sizes), text, sizes, other, plan))
    assert after.parallelism.modules["llm"].module_fqns_per_model_part == cut


def test_the_command_prints_and_writes(tmp_path, capsys):
    keys = ["--machine", "h100", "--ranks", "2", "--fix", "placement=disjoint", "--fix", "schedule=1F1B"]
    sizes = ["--training.global_batch_size", "4", "--training.local_batch_size", "1", "--modules.vision.lr", "0.5"]
    recipe, target = tmp_path / "dos.toml", tmp_path / "planned.toml"
    recipe.write_bytes((RECIPES / "digits.toml").read_bytes().replace(b"\n", b"\r\n"))
    assert main(["plan", str(recipe), *keys, "--draw", "--write", str(target), *sizes]) == 0
    out = capsys.readouterr().out
    assert "2 ranks of h100, 4 samples per step, at most 72 GB on a rank" in out
    assert "disjoint: the fastest" in out
    assert "nothing that was tried" not in out  # of placements that --fix rules out
    assert "disjoint, some of the lanes: " in out
    assert "|0" in out.partition("some of the lanes")[2]
    assert all(len(line) <= 120 for line in out.partition("some of the lanes")[0].splitlines())
    written = load_recipe(target)
    assert written.schedule == "1f1b"
    assert written.world_size == 2
    assert written.modules["vision"].lr == 0.5
    assert b"\r\n" in target.read_bytes()
    assert main(["plan", str(RECIPES / "digits.toml"), *keys, "--memory", "1e-9", *sizes]) == 1
    assert capsys.readouterr().err.startswith(
        "error: no layout of 2 ranks fits into 1 B: the smallest that was simulated holds "
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--ranks", "0"], "--ranks 0: must be above 0"),
        (["--memory", "nan"], "--memory nan: must be above 0"),
        (["--memory", "inf"], "--memory inf: must be above 0"),
        (["--fix", "schedule=1f1b", "--fix", "schedule=sequential"], "--fix schedule: it is given twice"),
    ],
)
def test_arguments_that_mean_nothing_are_errors(given, said, capsys):
    assert main(["plan", str(RECIPES / "digits.toml"), *given]) == 2
    assert said in capsys.readouterr().err
