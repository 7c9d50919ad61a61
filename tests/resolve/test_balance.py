"""`[balance]` of a recipe: what is refused, and that a run takes it."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from hetmesh.balance import assign
from hetmesh.balance.plan_batch import batch_loads, batch_plan_of, graph_slots
from hetmesh.boundary import World
from hetmesh.cli.check import checked
from hetmesh.cost import computed_work, sample_work, total_work
from hetmesh.data.loader import Loader
from hetmesh.errors import GraphError, RecipeError
from hetmesh.recipe.recipe import load_recipe
from hetmesh.report import explain
from hetmesh.resolve.predictions import simulate_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.job import Job

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"policy": "best"}, r"balance\.policy.*'auto', 'buckets', .* or 'two_dim'"),
        (
            {"max_tokens": "{vison = 5}"},
            r"balance\.max_tokens\.vison: no such module; there are llm, proj",
        ),
        ({"max_tokens": "{projector = 5}"}, r"balance\.max_tokens\.projector: it lies on the ranks of 'llm'"),
        (
            {"microbatch_sizes": "{vision = 2, llm = 2}"},
            r"balance\.microbatch_sizes\.llm: that of the LLM is parallelism\.pipeline_parallel_microbatch_size",
        ),
        (
            {"microbatch_sizes": "{projector = 5}"},
            r"microbatch_sizes\.projector: it lies on the ranks of 'llm' .*; give it ranks or degrees of its own",
        ),
        ({"microbatch_shares": "{vison = [1, 2]}"}, r"balance\.microbatch_shares\.vison: no such module"),
        ({"microbatch_shares": "{llm = [1, 2]}"}, r"balance\.microbatch_shares\.llm: lanes of encoders share"),
        ({"microbatch_shares": "{vision = [0, 2]}"}, r"balance\.microbatch_shares\.vision.*greater than or equal to 1"),
        (
            {"microbatch_shares": "{vision = [1, 2]}"},  # on ranks of its own
            r"balance\.microbatch_shares\.vision: 'vision' has \d lanes and 'llm' has \d: each of the latter needs",
        ),
        ({"microbatch_shares": "{projector = [1]}"}, r"microbatch_shares\.projector: it lies on the ranks of 'llm'"),
        (
            {"microbatch_shares": "{vision = [1, 2]}", "microbatch_sizes": "{vision = 1}"},
            r"balance\.microbatch_sizes\.vision and balance\.microbatch_shares\.vision: .*; give one of them",
        ),
        ({"policy": "none", "deferral": "true"}, r"balance\.deferral: balance\.policy = 'none' keeps samples"),
        (
            {"policy": "lpt", "deferral": "true"},
            r"balance\.deferral: .*'lpt' defers nothing; auto, entrain, two_dim do",
        ),
        ({"deferral": "maybe"}, r"balance\.deferral.* = 'maybe'"),
        (
            {"deferral": "false", "split_deferred_backward": "true"},
            r"balance\.split_deferred_backward: nothing is deferred; it takes balance\.deferral = true or 'auto'",
        ),
    ],
)
def test_check_refuses_what_cannot_be(keys, said):
    with pytest.raises(RecipeError, match=said):
        checked(load_recipe(RECIPES / "digits.toml", [f"--balance.{key}={value}" for key, value in keys.items()]))


def plan(*keys):
    recipe = load_recipe(RECIPES / "digits.toml", keys)
    resolved = resolve(recipe)
    loader = Loader(resolved.source, recipe.batch.global_batch_size, resolved.expander, seed=0)
    samples = [drawn.meta for drawn in loader.batch(0)]
    return resolved.plan(samples)


@pytest.mark.parametrize("policy", ["none", "auto"])
def test_an_encoder_has_microbatches_of_its_own_size(policy):
    made = plan(
        "--parallelism.vision.ranks=[0, 1]", "--balance.microbatch_sizes={vision = 4}", f"--balance.policy={policy}"
    )
    count = -(-len(made.samples) // (4 * made.graph["vision"].num_lanes))
    assert (len(made.lanes["vision"]), len(made.lanes["llm"])) == (count, 1)
    assert {i for lane in chain(*made.lanes["vision"]) for i in lane} == set(range(len(made.samples)))


def rows(made):
    """Rows of the encoder's lanes."""
    return [sum(made.samples[i].rows["vision"] for i in lane) for lane in chain(*made.lanes["vision"])]


def test_lanes_are_balanced_unless_the_recipe_says_otherwise():
    drawn, even = rows(plan("--balance.policy=none")), rows(plan())
    assert sum(drawn) == sum(even)
    assert max(even) - min(even) <= 8 < max(drawn) - min(drawn)


def tokens(made):
    """Tokens of the LLM's microbatches."""
    return [sum(made.samples[i].tokens for i in lane) for lane in chain(*made.lanes["llm"])]


def test_a_cap_holds_or_is_an_error_that_names_the_sample():
    keys = "--parallelism.llm.pipeline_parallel_microbatch_size=16"
    cap = max(tokens(plan(keys, "--balance.policy=none"))) - 1
    assert max(tokens(plan(keys, f"--balance.max_tokens={{llm = {cap}}}"))) <= cap
    with pytest.raises(GraphError, match=r"sample .* has \d+ tokens for module 'llm'; max_tokens .* is 3"):
        plan(keys, "--balance.max_tokens={llm = 3}")


def test_simulation_and_explanation_take_the_plan_of_the_recipe():
    drawn, even = (load_recipe(RECIPES / "digits.toml", [f"--balance.policy={name}"]) for name in ("none", "auto"))
    uneven = [explain(resolve(recipe)).modules[0].imbalance for recipe in (drawn, even)]
    assert uneven[0] > 1.04
    assert uneven[1] < 1.01
    seconds = [simulate_recipe(resolve(recipe), machine="h100").makespan for recipe in (drawn, even)]
    assert seconds[0] > seconds[1]


@pytest.mark.parametrize("keys", [(), ("--training.pack_samples=true",)])
def test_what_is_balanced_is_what_is_computed(keys):
    """The work of the LLM's microbatches as balancers see it, against what its lanes compute, padding included."""
    recipe = load_recipe(RECIPES / "digits.toml", ["--parallelism.llm.pipeline_parallel_microbatch_size=16", *keys])
    resolved = resolve(recipe)
    graph = resolved.graph
    balance = resolved.balance
    metas = Loader(resolved.source, 64, resolved.expander, seed=0).batch(0).metas
    loads, slots = batch_loads(graph, metas, balance), graph_slots(graph, 4, balance)
    found = assign(loads, slots, "lpt")
    seen = found.sums(loads.work)[-1] + found.padding_work(loads)
    made = batch_plan_of(graph, metas, found)
    for m in range(4):
        samples = [metas[i] for i in made.samples_of("llm", m, 0)]
        packed = total_work(sample_work(graph, "llm", sample) for sample in samples)
        work = packed if keys else computed_work(graph, "llm", samples)
        along = [balance.costs[name].work(graph, name, metas) for name in graph.order if name == "projector"]
        more = sum(int(each[list(made.samples_of("llm", m, 0))].sum()) for each in along)
        each = np.dot(balance.costs["llm"].forward, [work.rows, work.pairs, work.targets])
        assert seen[m, 0] == pytest.approx((int(each) + more) / 2, rel=1e-3)  # tensor parallel 2


def planned(rank, recipe):
    job = Job.assemble(resolve(recipe), World.current())
    return job.plan([drawn.meta for drawn in job.loader.batch(0)]).lanes


@pytest.mark.slow
def test_training_takes_the_plan_of_the_recipe(pool4):
    recipe = load_recipe(RECIPES / "digits.toml", ["--balance.policy=lpt"])
    assert pool4.run(planned, recipe) == [plan("--balance.policy=lpt").lanes] * 4
    assert plan("--balance.policy=lpt").lanes != plan("--balance.policy=none").lanes


@pytest.mark.parametrize(
    ("cap", "said"),
    [
        (
            3,
            r"balance\.max_tokens: the first batch .* sample '.+' has \d+ tokens for module 'llm'; .* is 3",
        ),
        (
            150,
            r"balance\.max_tokens: .*does not fit .*'llm': \d+ tokens in \d+ microbatches of \d lanes, max_tokens \d+",
        ),
    ],
)
def test_a_cap_that_the_first_batch_cannot_keep_is_refused_by_check(cap, said):
    with pytest.raises(RecipeError, match=said):
        checked(load_recipe(RECIPES / "digits_balanced.toml", [f"--balance.max_tokens={{llm = {cap}}}"]))
