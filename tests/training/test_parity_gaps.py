"""Encoders in the LLM's collectives: the bits of a run without, wherever a rank halts what it has begun."""

import random
import time

import pytest
import torch

from hetmesh.boundary import World
from hetmesh.cli.check import checked
from hetmesh.errors import BoundaryTimeout, RecipeError
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.recipe.section import FrozenDict
from hetmesh.resolve.resolved import resolve
from hetmesh.runtime import Runtime, step_transfers
from hetmesh.runtime.side import Side, _FlowState
from hetmesh.runtime.stage_streams import StageStreams
from hetmesh.runtime.step_runner import StepRunner
from hetmesh.schedule import windows
from hetmesh.testing.emulated_nccl import EmulatedNccl, emulated_world
from hetmesh.testing.parity import compare, reference, run
from hetmesh.training.job import Job
from support import tiny_vlms
from support.drawn_lending import drawn_lending
from support.parity_cases import INNER, filled, packed, table
from support.streams import streamed

KEY = "bubble_fill_in_collectives = true"
TWO = table("vision", "0-1"), table("projector", "0-1")
FOUR = table("vision", "0-3"), table("projector", "0-3")


def llm(ranks="0-1", more="", **degrees):
    return table("llm", ranks, tp=2, **degrees) + more


SP = "\nenable_sequence_parallel = true"


def checkpointed(mode):
    return f'[activation_checkpoint]\nmode = "{mode}"'


def both(*tables, extra="bubble_fill_layers_per_slice = 1", inner="1f1b", **options):
    """The same without and with the key, in the same microbatches: a balancer goes by the schedule. Each has a sample
    for every lane of the encoder, with an image."""
    lanes = 4 if "0-3" in "".join(tables) else 2
    tables = (*tables, '[balance]\npolicy = "none"')
    options |= {"batch": 4 * lanes, "microbatch": lanes, "media": "items = 1"}
    return [filled(inner, *tables, extra=f"{extra}\n{key}", **options) for key in ("", KEY)]


def dropping(recipes):
    """Masks in the attention of both modules: drawn in gaps and around them, from where the layer began."""
    drawn = {"vision": 0.3, "llm": 0.2}
    for given in recipes:
        modules = {
            name: module.model_copy(
                update={"frozen_config": FrozenDict({**module.config, "attention_dropout": drawn[name]})}
            )
            if name in drawn
            else module
            for name, module in given.modules.items()
        }
        yield given.model_copy(update={"modules": modules})


CASES = {
    "TP": both(*TWO, llm()),
    "sequence parallelism": both(*TWO, llm(more=SP)),
    "computed again": both(*TWO, llm(more=SP), checkpointed("full")),
    "computed again in part, frozen encoder": both(*TWO, llm(), checkpointed("selective"), trained="frozen encoder"),
    "packed, norms": [packed(each) for each in both(*TWO, llm(more=SP), trained="norms")],
    "projector alone": both(*TWO, llm(), trained="projector alone"),
    "LoRA, a tied head, key heads on both": both(*TWO, llm(), trained="lora", tied=True, key_heads=1),
    "slices as they cost, a cap": both(*TWO, llm(), extra="bubble_fill_in_flight = 3"),
    "dropout": [*dropping(both(*TWO, llm()))],
    "dropout, computed again": [*dropping(both(*TWO, llm(more=SP), checkpointed("full")))],
    "two encoders": both(*TWO, table("scanner", "0-1"), llm(), encoders=2, scanner="trainable = false"),
    "two encoders, one beside the LLM's ranks": both(
        table("vision", "0-1"), table("projector", "0-1"), table("scanner", "2-3"), llm(), encoders=2
    ),
    "experts": [packed(each) for each in both(*TWO, llm(), experts=True)],
    "LLM FSDP": both(*FOUR, llm("0-3", fsdp=2)),
    "LLM CP": both(*FOUR, llm("0-3", context_parallel_degree=2)),
    "an encoder pipeline": both(table("vision", "0-3", pp=2), table("projector", "0-3"), llm("0-3", pp=2)),
    "a projector on the first stage": both(table("vision", "0-3"), table("projector", "0-1"), llm("0-3", pp=2)),
    **{f"PP, {inner}": both(*FOUR, llm("0-3", pp=2), inner=inner) for inner in INNER},
    "PP, zero_bubble, dropout, computed again": [
        *dropping(both(*FOUR, llm("0-3", pp=2), checkpointed("full"), inner="zero_bubble"))
    ],
}
OFTEN = ("PP, zero_bubble",)
STEPS = 2  # the second with what the first has changed and left behind


def outcomes(rank, without, given, most):
    """Of the run without the key, with it greedily, and with drawn numbers of pieces, up to each of `most`; the pieces
    of each."""
    world = World.current()
    found, pieces = [run(without, world, STEPS), run(given, world, STEPS)], []
    for pieces_at_most in most:
        with drawn_lending(1, pieces_at_most) as done:
            found.append(run(given, world, STEPS))
        pieces.append(sum(done))
    return found, pieces


def equal(one, other):
    """Whether two outcomes are the same bits."""
    same = one.losses == other.losses and one.norm == other.norm
    for what in ("gradients", "parameters"):
        ones, others = getattr(one, what), getattr(other, what)
        same &= ones.keys() == others.keys()
        same &= all(a is b or torch.equal(a, others[name]) for name, a in ones.items() for b in [others[name]])
    return same


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each if each in OFTEN else pytest.param(each, marks=pytest.mark.exhaustive) for each in CASES]
)
def test_what_runs_in_collectives_changes_no_bit(pool, case):
    without, given = CASES[case]
    ranks = pool(2 if given.world_size == 2 else 4).run(outcomes, without, given, (4, 2), timeout=180)
    for rank, (found, pieces) in enumerate(ranks):
        assert [equal(found[0], each) for each in found] == [True] * len(found)
        assert min(pieces) > 0 or rank not in given.wiring.meshes["llm"].ranks
    if "dropout" not in case:
        compare(reference(given, STEPS), [found[-1] for found, _ in ranks], 1e-10)


def over_nccl(rank, given):
    """Outcomes over gloo without lending, and over emulated NCCL with it and delays."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "_lends", False)
        found.append(run(given, World.current(), 2))
    with emulated_world(EmulatedNccl(delay=0.002)) as world, drawn_lending(3) as done:
        found.append(run(given, world, 2))
    return equal(*found), sum(done)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["TP", "computed again", "PP, 1f1b", "an encoder pipeline"])
def test_messages_keep_the_rules_of_nccl(pool, case):
    given = CASES[case][1]
    for same, pieces in pool(given.world_size).run(over_nccl, given, timeout=180):
        assert same
        assert pieces > 0


TP_BESIDE = table("vision", "0-1", tp=2), table("projector", "0-1", tp=2)
ON_STREAMS = {
    "encoder TP": both(*TP_BESIDE, llm()),
    "encoder TP, sequence parallelism in both, computed again": both(
        table("vision", "0-1", tp=2) + SP, TP_BESIDE[1], llm(more=SP), checkpointed("full")
    ),
    "an encoder pipeline with TP over both stages": both(
        table("vision", "0-3", pp=2, tp=2), table("projector", "0-3", tp=2), llm("0-3", pp=2)
    ),
    "LLM FSDP": CASES["LLM FSDP"],
    "PP, zero_bubble": CASES["PP, zero_bubble"],
}


def on_streams(rank, without, given, fault):
    """Outcomes without the key, and with it on streams over emulated NCCL; races, streams, how many of these have a
    high priority, waits of the host."""
    found = [] if fault else [run(without, World.current(), 2)]
    with emulated_world() as world, streamed(world) as races, pytest.MonkeyPatch.context() as patch:
        if fault:
            patch.setattr(StageStreams, fault, lambda *_: None)
        found.append(run(given, world, 2))
    return found, sorted(set(races.found)), len(races.used), len(races.used & races.urgent), races.host_waits


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each if "pipeline" in each else pytest.param(each, marks=pytest.mark.exhaustive) for each in ON_STREAMS]
)
def test_on_an_asynchronous_device_streams_change_no_bit_and_are_in_order(pool, case):
    without, given = ON_STREAMS[case]
    for found, races, streams, urgent, waits in pool(given.world_size).run(
        on_streams, without, given, None, timeout=240
    ):
        assert races[:8] == []
        assert (equal(*found), waits) == (True, 0)
        assert streams >= 4  # of slices, of what they run beside, of batches; around them the norm
        assert urgent == 1  # of what slices run beside


@pytest.mark.exhaustive
def test_a_stream_that_is_not_waited_for_is_found(pool):
    results = pool(2).run(on_streams, *ON_STREAMS["encoder TP"], "receive", timeout=120)
    assert any("in use on stream" in found for _, races, *_ in results for found in races)


def with_delays(rank, given, runs):
    """Whether runs in which both flows stop now and then give the bits of one that does not lend."""
    execute, chance = StepRunner.execute, random.Random(rank)

    def slow(step, action):
        if chance.random() < 0.2:
            time.sleep(0.004 * chance.random())
        execute(step, action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "_lends", False)
        truth = run(given, World.current(), 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRunner, "execute", slow)
        return [equal(truth, run(given, World.current(), 2)) for _ in range(runs)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["sequence parallelism", "PP, interleaved", "a projector on the first stage"])
def test_random_delays_change_nothing(pool, case):
    given = CASES[case][1]
    for same in pool(given.world_size).run(with_delays, given, 3, timeout=180):
        assert all(same)


FAMILIES = ("llava", "llava_siglip", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen2_audio")
"""Towers of CLIP, SigLIP, InternVL, Qwen2.5-VL, Qwen3-VL, and Whisper's."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.exhaustive) for each in FAMILIES])
def test_towers_of_transformers_run_in_collectives_as_they_are(pool, tmp_path, name):
    (tower,) = tiny_vlms.TOWERS.get(name, ("vision",))
    key = f"""
        [parallelism.{tower}]
        ranks = [0, 1]
        [parallelism.llm]
        ranks = [0, 1]
        tensor_parallel_degree = 2
        pipeline_parallel_schedule = "bubble_fill"
        pipeline_parallel_microbatch_size = 1
        bubble_fill_in_collectives = true"""
    given = parse_recipe(tiny_vlms.recipe_text(tiny_vlms.save(name, tmp_path), key))
    found = pool(2).run(outcomes, given, given, (2,), timeout=180)
    for outcome, pieces in found:
        assert [equal(outcome[0], each) for each in outcome] == [True] * len(outcome)
        assert min(pieces) > 0
    compare(reference(given, STEPS), [outcome[-1] for outcome, _ in found], 1e-10)


def without_generators(rank, without, given):
    exchange = _FlowState.exchange

    def forgetful(state):
        generator = torch.get_rng_state()
        exchange(state)
        torch.set_rng_state(generator)

    with pytest.MonkeyPatch.context() as patch, drawn_lending(1, most=2):
        patch.setattr(_FlowState, "exchange", forgetful)
        return equal(run(without, World.current(), 1), run(given, World.current(), 1))


@pytest.mark.exhaustive
def test_generators_that_are_not_handed_over_are_found(pool):
    assert not all(pool(2).run(without_generators, *CASES["dropout, computed again"], timeout=120))


def receives_beside(rank, given):
    """A run whose ranks wait in a gap for gradients that come after it."""
    world = World.current()
    world.timeout = world.watchdog.timeout = 3.0

    def too_much(schedule, own, stays):
        early, begin, found = windows(schedule, own, stays), 0, {}
        for action in schedule.of_rank(own):
            begin = early.get(action, begin)
            gradients = str(action).startswith("llm.0->projector.0 RECV")
            if action in early or (gradients and own > 1):  # ranks of the last stage, behind the first
                found[action] = begin
        return found

    lend = Side.lend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_transfers, "windows", too_much)
        patch.setattr(Side, "lend", lambda side, _: lend(side, lambda: False))
        run(given, world, 1)


@pytest.mark.exhaustive
def test_a_message_of_another_rank_that_is_waited_for_in_a_gap_is_named(pool):
    with pytest.raises(BoundaryTimeout, match=r"llm\.0->projector\.0 RECV0"):
        pool(4).run(receives_beside, CASES["PP, 1f1b"][1], timeout=60)


def refusal(given):
    with pytest.raises(RecipeError) as caught:
        resolve(given)
    return str(caught.value)


def test_what_has_collectives_of_its_own_is_refused_beside_others():
    key = "parallelism.bubble_fill_in_collectives = True"
    (_, given) = both(table("vision", "0-3", fsdp=2), table("projector", "0-3", fsdp=2), llm("0-3", pp=2))
    assert f"{key}: 'vision' has a data_parallel_shard_degree = 2; what runs in" in refusal(given)
    (_, given) = both(*FOUR, table("llm", "0-3", pp=2))
    assert f"{key}: 'llm' has a tensor_parallel_degree of 1, and so no collectives in which" in refusal(given)
    resolve(both(*TWO, llm())[1])


FROZEN = {"trained": "frozen encoder", "projector": "trainable = false"}


@pytest.mark.parametrize(
    ("microbatch", "cap", "options", "given"),
    [
        (8, "", {}, "1 microbatch"),
        (2, "bubble_fill_in_flight = 1", {}, "4 microbatches and bubble_fill_in_flight = 1"),
        (2, "bubble_fill_in_flight = 2", {}, None),
        (2, "bubble_fill_in_flight = 1", FROZEN, None),  # the next forward runs beside the backward
    ],
)
def test_a_key_with_which_nothing_would_run_in_collectives_is_told(microbatch, cap, options, given):
    recipe = filled("1f1b", *TWO, llm(), extra=f"{KEY}\n{cap}", batch=8, microbatch=microbatch, **options)
    says = f"note: parallelism.bubble_fill_in_collectives = True: with {given} there is nothing that encoders could run"
    told = [line.startswith(says) for line in checked(recipe)[1] if "in_collectives" in line]
    assert told == ([] if given is None else [True])


def built(rank, given):
    with pytest.raises(RecipeError) as caught:
        Job.assemble(resolve(given), World.current())
    return str(caught.value)


def test_tensor_parallelism_beside_is_refused_where_a_run_is_on_cpus(pool):
    """A recipe does not say where it will run: `check` says what it needs, and a job on CPUs is not built."""
    given = both(TWO[0], llm())[1]
    says = (
        "parallelism.bubble_fill_in_collectives = True: 'projector' has a tensor_parallel_degree = 2 ('projector' "
        "takes the mesh of 'llm': give it a table), which needs GPUs: on CPUs ranks halt encoders"
    )
    assert any(line.startswith(f"note: {says}") for line in checked(given)[1])
    assert all(said.startswith(says) and "leave the key out" in said for said in pool(2).run(built, given))
