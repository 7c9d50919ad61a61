"""Parity of mixture-of-experts LLMs: experts spread over ranks in any layout equal one plain process."""

import pytest

from hetmesh.boundary import World
from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.testing.parity import ParityError, compare, reference, run, run_as
from hetmesh.testing.precision import exact_dtypes
from hetmesh.training.job import Job
from support import faults
from support.expert_cases import CASES, MODEL, experts, recipe
from support.parity_cases import table


def check(pool, given, fault=None):
    results = pool.run(run_as, given, 2, fault, timeout=120)
    return compare(reference(given, steps=2), results, 1e-10)


OFTEN = ("fewer experts than shards",)
"""What pairs of features (`test_parity_matrix.py`) do not show; the others are exhaustive."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in OFTEN else pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES]
)
def test_experts_in_any_layout_equal_one_process(pool4, case):
    tables, keys = CASES[case]
    check(pool4, recipe(*tables, **keys))


OVER_8 = {
    "FSDP 2, TP 2, PP 2, EP 2": (experts("0-7", 2, fsdp=2, tp=2, pp=2), table("vision", "0-3", fsdp=2, tp=2)),
    "FSDP 2, CP 2, PP 2, EP 2": (experts("0-7", 2, fsdp=2, context_parallel_degree=2, pp=2), table("vision", "0-7")),
    "FSDP 4, PP 2, EP 4": (experts("0-7", 4, fsdp=4, pp=2), table("vision", "0-3")),
}
"""torchtitan's integration tests of mixtures of experts, which assert that they finish; its EP 4 takes ranks of TP or
CP too, hetmesh's those of data parallelism."""


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", OVER_8)
def test_experts_on_eight_processes_equal_one(pool8, case):
    results = pool8.run(run_as, given := recipe(*OVER_8[case], policy="1f1b"), 2, timeout=240)
    compare(reference(given, steps=2), results, 1e-10)


def losses(rank, given):
    """And whether all gradients are finite."""
    outcome = run(given, World.current(), steps=2)
    return outcome.losses, all(g is None or g.isfinite().all() for g in outcome.gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("case", ["EP 2, disjoint", pytest.param("recomputed, FSDP", marks=pytest.mark.exhaustive)])
def test_half_precision(pool4, case):
    """bf16 by autocast and by FSDP, which rows of tokens travel in."""
    sizes = [("hidden_size = 12", "hidden_size = 16"), ("moe_intermediate_size = 6", "moe_intermediate_size = 8")]
    sums = []
    for dtype in ('"float32"', '"float32"\nmixed_precision_param = "bfloat16"'):
        given = recipe(*CASES[case][0], changes=[*sizes, ('"float64"', dtype)])
        ranks = pool4.run(losses, given)
        assert all(finite for _, finite in ranks)
        sums.append([sum(each[step] for each, _ in ranks) for step in range(2)])
    assert sums[0] == pytest.approx(sums[1], rel=0.01)
    assert sums[0] != sums[1]


def unbalanced(job):
    """The load-balancing loss of one rank is lost."""
    if job.world.rank == 2:
        for part in job.root.modules():
            part.balances = False


def swapped(job):
    """One rank holds its experts in another order than all think."""
    if job.world.rank == 3:
        for name, p in job.root.named_parameters():
            if name.endswith("experts.down_proj"):
                p.data.to_local().copy_(p.data.to_local().flip(0))


@pytest.mark.slow
def test_injected_faults_are_found(pool4):
    given = recipe(*CASES["EP 2, disjoint"][0])
    for fault in (unbalanced, swapped, faults.ScaleGradient("llm")):
        with pytest.raises(ParityError):
            check(pool4, given, fault)


def routed(rank, given):
    """What this rank noted of its experts in one step, and the tokens of the global batch."""
    job = Job.assemble(resolve(given), World.current())
    loads = job.expert_placement.loads
    with exact_dtypes(job.root):
        job.forward_backward()
    return loads.mine(), loads.read(loads.mine(), 1, job.expert_placement.placements)


@pytest.mark.slow
def test_loads_are_those_of_one_process_in_any_layout(pool, pool4):
    """And some experts get nothing, as routing is of few tokens."""
    ((alone, told),) = pool(1).run(routed, recipe(table("vision", "0"), table("llm", "0"), batch=4))
    assert told["llm"]["max_over_mean"] > 1.5
    assert told["llm"]["balance_loss"] > 0
    for case in ("EP 2, CP 2", "EP 2, TP 2, sequence", "EP 2, PP 2", "recomputed"):
        tables, keys = CASES[case]
        ranks = pool4.run(routed, recipe(*tables, batch=2, **keys))
        assert sum(mine for mine, _ in ranks).tolist() == pytest.approx(alone.tolist(), rel=1e-9)


@pytest.mark.parametrize(
    ("tables", "changes", "says"),
    [
        (("",), ("pack_samples = true", ""), r"modules.llm: .* get no padding.*training.pack_samples = true"),
        (
            (experts("0-2", 3, 3),),
            ("", ""),
            r"expert_parallel_degree = 3: must divide num_experts = 8 .*\[1, 2, 4, 8\]",
        ),
        ((table("vision", "0-1", expert_parallel_degree=2),), ("", ""), "this siglip has no experts"),
        (
            (table("vision", "0-1", expert_parallel_degree=2), table("llm", "0-1", expert_parallel_degree=2)),
            ("", ""),
            r"parallelism\.vision\.expert_parallel_degree = 2: this siglip has no experts",
        ),
        (("",), ("num_experts_per_tok = 3", "num_experts_per_tok = 9"), "cannot have more experts than there are"),
        (
            (table("llm", "0-7", fsdp=8) + "\nexpert_parallel_degree = 2",),
            ("num_experts = 8", "num_experts = 4"),
            r"4 ranks of data_parallel_shard_degree share 2 experts .* 4 must divide its 6 inner features",
        ),
    ],
)
def test_what_experts_cannot_do_is_refused(tables, changes, says):
    text = MODEL.format(policy="sequential", batch=2, vision="", llm="").replace(*changes, 1)
    with pytest.raises(RecipeError, match=says):
        resolve(parse_recipe("\n".join([text, *tables])))


def test_a_flat_expert_degree_means_nothing_to_modules_without_experts():
    text = MODEL.format(policy="sequential", batch=2, vision="", llm="")
    flat = "ranks = [0, 1]\ndata_parallel_shard_degree = 2\nexpert_parallel_degree = 2"
    resolve(parse_recipe("\n".join([text, flat])))
