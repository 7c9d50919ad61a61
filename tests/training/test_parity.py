"""Training parity: any layout gives the loss, gradients and parameters of one plain process, to 1e-10 in fp64."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from hetmesh.balance import boundary_layouts
from hetmesh.boundary import World
from hetmesh.recipe.recipe import load_recipe, parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.bounds import minimal_elements
from hetmesh.testing.parity import TOLERANCE, ParityError, compare, reference, run
from hetmesh.training.job import Job
from support import faults
from support.often import combinations

RECIPES = Path(__file__).parents[2] / "recipes"

ONE_ENCODER = """
[modules.vision]
model = "siglip"
[modules.vision.config]
hidden_size = 8
num_hidden_layers = 1
num_attention_heads = 4
patch_size = 4
image_size = 8
intermediate_size = 12
[modules.projector]
model = "mlp"
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 4
head_dim = 4
intermediate_size = 20
[[boundaries]]
from = "vision"
to = "projector"
[[boundaries]]
from = "projector"
to = "llm"
at = "image"
[data]
source = "hetmesh.testing.sources:RandomMedia"
[data.options]
kinds = { image = [1, 8, 8] }
"""
TWO_ENCODERS = (
    ONE_ENCODER.replace("image = [1, 8, 8]", "image = [1, 8, 8], scan = [2, 8, 8]")
    + """
[modules.scanner]
model = "siglip"
config = { hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, patch_size = 4, image_size = 8 }
[[boundaries]]
from = "scanner"
to = "llm"
at = "scan"
"""
)
TWO_CONSUMERS = (
    ONE_ENCODER.replace("kinds", 'same = { glance = "image" }\nkinds').replace('"siglip"', '"siglip"\nmedia = "image"')
    + """
[modules.second]
model = "mlp"
config = { hidden_features = 6 }
[[boundaries]]
from = "vision"
to = "second"
[[boundaries]]
from = "second"
to = "llm"
at = "glance"
"""
)
GRAPHS = {"one encoder": ONE_ENCODER, "two encoders": TWO_ENCODERS, "two consumers": TWO_CONSUMERS}


STEPS = 2  # the second with what the first has changed and left behind


def on_this_rank(rank, recipe, fault=None, steps=STEPS):
    return run(recipe, World.current(), steps=steps, fault=fault)


def check(pool, recipe, fault=None):
    results = pool.run(on_this_rank, recipe, fault, timeout=120)
    return compare(reference(recipe, STEPS), results, TOLERANCE[recipe.training.dtype])


LOCAL = {"digits_single": 8, "digits": 8, "digits_colocated": 4, "digits_overlapping": 4, "digits_balanced": 16}
RECIPES_OFTEN = {("digits_balanced", "float64"), ("digits_colocated", "float32")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), combinations(RECIPES_OFTEN, LOCAL, TOLERANCE))
def test_the_recipes_equal_one_process(pool4, name, dtype):
    overrides = ("--training.dtype", dtype, "--training.local_batch_size", str(LOCAL[name]))
    assert check(pool4, load_recipe(RECIPES / f"{name}.toml", overrides)) < TOLERANCE[dtype]


@st.composite
def layouts(draw, world):
    """A recipe: a graph, and for each module any ranks of the world with any degrees; batches of any size."""
    text = GRAPHS[draw(st.sampled_from(sorted(GRAPHS)))]
    lines = []
    for module in ("vision", "scanner", "projector", "second", "llm"):
        if f"[modules.{module}]" not in text or (module != "llm" and draw(st.integers(0, 3)) == 0):
            continue  # on its consumer's mesh
        count = draw(st.integers(1, world))
        ranks = draw(st.permutations(range(world)))[:count]
        degrees = [d for d in (1, 2, 4) if count % d == 0 and not (module == "scanner" and d == 4)]
        degree = draw(st.sampled_from(degrees))
        lines += [f"[parallelism.{module}]", f"ranks = {list(ranks)}", f"tensor_parallel_degree = {degree}"]
        if module == "llm":
            size = draw(st.integers(1, 2))
            lines.append(f"pipeline_parallel_microbatch_size = {size}")
            local = size * draw(st.integers(1, 2))
    share = draw(st.sampled_from([0.3, 0.9, 1.0]))  # lanes and whole microbatches without any image
    options = f"text_only = {share}\nseed = {draw(st.integers(0, 99))}\nkinds"
    text = text.replace("kinds", options, 1)
    return "\n".join([text, *lines, "[training]", f"local_batch_size = {local}", 'dtype = "float64"'])


@pytest.mark.exhaustive  # the covering array and drawn recipes have what it draws
@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(text=layouts(4))
def test_random_layouts_equal_one_process(pool4, text):
    """Two encoders, one encoder feeding two consumers, text-only lanes, microbatches without any image."""
    check(pool4, parse_recipe(text))


@pytest.mark.exhaustive  # tools/fuzz.py draws them
@pytest.mark.slow
@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(text=layouts(8))
def test_random_layouts_on_eight_processes_equal_one(pool8, text):
    check(pool8, parse_recipe(text))


CROSSING = (
    TWO_ENCODERS.replace("kinds", "text_only = 0.3\nseed = 56\nkinds", 1)
    + """
[parallelism.vision]
ranks = [2, 0]
tensor_parallel_degree = 2
[parallelism.scanner]
ranks = [1, 2, 0, 3]
[parallelism.projector]
ranks = [2]
[parallelism.llm]
ranks = [0, 3, 1, 2]
pipeline_parallel_microbatch_size = 2
[training]
local_batch_size = 4
dtype = "float64"
"""
)


@pytest.mark.slow
def test_transfers_of_two_producers_start_in_one_order_on_all_ranks(pool4):
    """U15: two all-to-alls among the same ranks, one of which sends in the first and only receives in the second."""
    check(pool4, parse_recipe(CROSSING))


FAULTY = (
    ONE_ENCODER.replace("kinds", "items = 2\nkinds")  # as many rows in every lane, so that swapping them stays silent
    + """
[parallelism.vision]
ranks = [0, 1, 2, 3]
[parallelism.llm]
ranks = [0, 1, 2, 3]
tensor_parallel_degree = 2
[training]
local_batch_size = 4
dtype = "float64"
"""
)


@pytest.fixture(scope="module")
def sound(pool4):
    """A recipe into which faults are put, which equals one process without them."""
    recipe = parse_recipe(FAULTY, ["--balance.policy=two_dim"])  # lanes of equal rows: shapes alone say nothing
    assert check(pool4, recipe) < 1e-10
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        faults.SwapSiblings("vision"),
        faults.DropReplica("vision", 2),
        faults.PermuteRows("llm"),
        *(
            pytest.param(fault, marks=pytest.mark.exhaustive)
            for fault in (
                faults.ScaleGradient("vision"),
                faults.ScaleGradient("llm", 0.5),
                faults.DropReplica("llm", 1),
                faults.PermuteRows("projector"),
            )
        ),
    ],
    ids=str,
)
def test_each_injected_fault_is_found(pool4, sound, fault):
    with pytest.raises(ParityError):
        check(pool4, sound, fault)


@pytest.mark.slow
def test_text_only_batches_leave_exact_zero_gradients_in_the_encoder(pool4):
    """U1, U3: no image anywhere, every rank still enters every module, and nothing hangs."""
    recipe = parse_recipe(FAULTY.replace("items = 2", "text_only = 1.0"))
    outcomes = pool4.run(on_this_rank, recipe)
    assert compare(reference(recipe, STEPS), outcomes, 1e-10) < 1e-10
    gradients = [g for o in outcomes for k, g in o.gradients.items() if k.startswith("vision.")]
    assert gradients
    assert all(torch.count_nonzero(g) == 0 for g in gradients)


@pytest.mark.slow
def test_the_loss_is_per_token_whatever_the_microbatches_and_lanes(pool4):
    """U5: the same loss for any microbatch size and any number of lanes."""
    losses = []
    for ranks, microbatch, local in (([0], 4, 8), ([0], 1, 8), ([0, 1], 2, 4), ([0, 1, 2, 3], 1, 2)):
        layout = f"[parallelism.llm]\nranks = {ranks}\npipeline_parallel_microbatch_size = {microbatch}\n"
        text = ONE_ENCODER + layout + f'[training]\nlocal_batch_size = {local}\ndtype = "float64"'
        outcomes = pool4.run(on_this_rank, parse_recipe(text))
        losses.append(sum(o.losses[0] for o in outcomes))
    assert max(losses) - min(losses) < 1e-12


@pytest.mark.slow
def test_each_rank_receives_the_rows_of_its_own_lane_and_nothing_else(pool4):
    """H4, decision 4: the log holds exactly the bound's bytes, so no sizes are exchanged and no row goes astray."""
    results = pool4.run(received_bytes, parse_recipe(FAULTY.replace("items = 2", "text_only = 0.4")))
    assert [received for received, _ in results] == [needed for _, needed in results]
    assert sum(sum(needed.values()) for _, needed in results) > 0


def received_bytes(rank, recipe):
    world = World.current()
    world.log.clear()
    run(recipe, world, steps=1)
    job = Job.assemble(resolve(recipe), world)
    plan = job.plan([d.meta for d in next(job.loader)])
    received, needed = {}, {}
    for boundary in job.graph.boundaries:
        received[boundary.name] = world.log.bytes_received(boundary.name, "forward")
        each = [
            minimal_elements(*boundary_layouts(plan, boundary, m)).get(rank, 0) for m in range(plan.num_microbatches)
        ]
        needed[boundary.name] = 8 * sum(each)
    return received, needed


def test_missing_outcomes_and_gradients_are_errors():
    recipe = parse_recipe(ONE_ENCODER + '[training]\nlocal_batch_size = 2\ndtype = "float64"')
    expected = reference(recipe, steps=1)
    with pytest.raises(ParityError, match="no rank holds gradient"):
        compare(expected, [], 1e-10)
    assert compare(expected, [expected], 1e-10) == 0
    without = type(expected)(expected.losses, dict.fromkeys(expected.gradients), expected.parameters)
    with pytest.raises(ParityError, match="inf"):
        compare(expected, [without], 1e-10)
