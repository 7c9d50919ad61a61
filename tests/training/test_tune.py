"""`hetmesh tune`: its search over a table of made steps, and the command on real ranks."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from hetmesh.boundary import World
from hetmesh.boundary.accelerator import Accelerator
from hetmesh.cli import main
from hetmesh.cost import Machine, load_machine, machine_toml
from hetmesh.errors import LaunchError, UsageError
from hetmesh.planner import LayoutPlan
from hetmesh.planner.layout_plan import ModulePlan
from hetmesh.recipe.recipe import load_recipe
from hetmesh.training.environment import open_payloads
from hetmesh.training.tune import tuner as tuning
from hetmesh.training.tune.constants import corrected_memory, fit_constants, fitted_names, with_factors
from hetmesh.training.tune.findings import DIED, LEAST_SCATTER, PACE_NOISE, Finding, Findings
from hetmesh.training.tune.guesses import Guess
from hetmesh.training.tune.measure import Ranks
from hetmesh.training.tune.tuner import Tuner
from hetmesh.training.tune.turns import FEWEST, SHORT, STEPS, Ranking, next_turn, rank
from support import layout_pairs
from support.parity_cases import table
from support.relayouts import recipe_in

TRUE = Machine(
    "made",
    "here",
    {"float32": 1e11},
    memory_bytes=1000,
    memory_bandwidth=1e10,
    node_bandwidth=1e9,
    efficiency=0.5,
    operation_overhead=1e-4,
    action_overhead=1e-4,
    step_overhead=1e-2,
    node_latency=1e-4,
)
DEGREES = ((1, 1, 2, 1, 1), (1, 2, 1, 1, 1), (1, 1, 1, 1, 2), (2, 1, 1, 1, 1))


def module(degrees, again="none"):
    return ModulePlan((0, 2), degrees, again)


PLANS = [
    LayoutPlan(
        "homogeneous" if vision == llm else "colocated",
        {"vision": module(vision), "llm": module(llm, again)},
        "1f1b",
        size,
    )
    for vision in DEGREES
    for llm in DEGREES
    for again in ("none", "full")
    for size in (1, 2, 4)
]


class MadeLayouts:
    """Layouts of which every step is a sum over constants, as the simulator's mostly is."""

    complete = True

    def __init__(self, plans=PLANS):
        self.plans = {str(plan): plan for plan in plans}
        self.common = {name for name, plan in self.plans.items() if plan.placement == "homogeneous"}
        self.problem = SimpleNamespace(ranks=2)

    def limit(self, machine):
        return machine.memory_bytes

    def guesses(self, machine, names=None, *, parts=False):
        return {name: self.guess(machine, self.plans[name]) for name in (self.plans if names is None else names)}

    def guess(self, m, plan):
        count, parts = 16 // plan.microbatch_size, {"sums": 0.0, "optimizer": m.step_overhead, "collectives": 0.0}
        held = m.context_bytes + 40 * plan.microbatch_size
        for name, flops in (("vision", 4e8), ("llm", 2e9)):
            pp, _, shard, _, tp = plan.modules[name].degrees
            again = 4 / 3 if plan.modules[name].activation_checkpoint == "full" else 1.0
            rate = m.efficiency * m.peak_flops["float32"]
            each = again * (flops / rate / 2 + 20 * m.operation_overhead) * (1 + (pp > 1) / count) + m.action_overhead
            sent = (tp > 1) * 8 * (m.node_latency + 1e5 / m.node_bandwidth)
            sent += (shard > 1) * 4 * (m.node_latency + 4e5 / m.node_bandwidth)
            parts |= {
                f"{name} forward": count * (each / 3 + sent / 2),
                f"{name} backward": count * (2 * each / 3 + sent / 2),
            }
            parts["collectives"] += count * sent
            parts["optimizer"] += 1e7 / m.memory_bandwidth / (2 if shard > 1 else 1)
            held += (200 if shard == 1 else 100) + (100 if again == 1 else 0)
        seconds = sum(parts.values()) - parts["collectives"]
        return Guess(seconds, held - m.context_bytes, m.context_bytes, parts)


def off(name):
    """What the simulator does not know of a layout: up to 4%."""
    return 1 + 0.04 * math.sin(sum(map(ord, name)))


def ran(layouts, turn, *, limit=1000):
    """The turn of a layout in truth."""
    guess = layouts.guess(TRUE, layouts.plans[turn.layout])
    if guess.peak_bytes > limit:
        return Finding(turn.layout, spent_s=1.0, failed="rank 0: OutOfMemoryError", out_of_memory=True)
    steps = tuple(guess.seconds * off(turn.layout) * (1 + 0.01 * math.cos(i)) for i in range(turn.steps))
    return Finding(turn.layout, steps, guess.parts, 0, 1.0)


WRONG = {
    "efficiency": 1,
    "memory_bandwidth": -1,
    "operation_overhead": -1,
    "action_overhead": -1,
    "step_overhead": -1,
    "node_bandwidth": -1,
    "node_latency": 1,
}


def wrong(sign):
    return with_factors(TRUE, {name: sign * way * math.log(3) for name, way in WRONG.items()})


def searched(tuner, **truth):
    while (turn := tuner.next()) is not None:
        tuner.add(ran(tuner.layouts, turn, **truth))
    return tuner


@pytest.mark.parametrize("sign", [1, -1])
def test_the_best_of_many_is_found_from_wrong_constants(sign):
    """Few of 96 run, the best among them; those that did not are predicted."""
    layouts = MadeLayouts()
    tuner = searched(Tuner(layouts, wrong(sign), Findings()))
    truth = {name: layouts.guess(TRUE, plan).seconds * off(name) for name, plan in layouts.plans.items()}
    before, after = (
        sum(abs(seconds[name] / truth[name] - 1) for name in truth) / len(truth)
        for seconds in (tuner.before, tuner.ranking.seconds)
    )
    assert truth[tuner.best] <= 1.03 * min(truth.values())
    assert len(tuner.findings.seconds) <= len(truth) / 5
    assert after < 0.08 < 0.3 < before
    assert layouts.common & tuner.findings.seconds.keys()


def test_what_is_killed_goes_on_where_it_was(tmp_path):
    """Every next turn follows from the file, also the fit from where it was; a layout whose process died has failed."""
    path = tmp_path / "tune.json"
    tuner, turns = Tuner(MadeLayouts(), wrong(1), Findings("a", path)), []
    while (turn := tuner.next()) is not None:
        turns.append(turn)
        again = Tuner(MadeLayouts(), wrong(1), Findings.load(path, "a"))
        assert again.next() == turn
        tuner.add(ran(tuner.layouts, turn))
    assert len(turns) > 4
    tuner.findings.begin("one")
    again = Findings.load(path, "a")  # it may have been killed from outside
    assert "one" not in again.failed
    again.begin("one")
    assert Findings.load(path, "a").failed["one"].failed == DIED
    assert not Findings.load(path, "another recipe").each
    assert Findings.load(tmp_path / "tune-a.json", "a").each  # kept


def test_no_turn_begins_that_would_end_beyond_the_budget():
    tuner = searched(Tuner(MadeLayouts(), wrong(1), Findings(), budget=3.5))
    assert tuner.findings.spent_s == 3.0
    assert tuner.best is not None
    assert tuner.untried.layout not in tuner.findings.seconds
    assert searched(Tuner(MadeLayouts(), wrong(1), Findings(), budget=1e6)).untried is None


@pytest.mark.parametrize(("number", "steps", "times"), [(1, 3, 10), (2, 3, 10), (1, 1, 1.4)])
def test_a_turn_that_other_work_disturbs_does_not_decide(number, steps, times):
    """The layout that is fastest in truth takes longer in all steps of its first turn or second, or in one step."""
    layouts = MadeLayouts()
    fastest = min(layouts.plans, key=lambda name: layouts.guess(TRUE, layouts.plans[name]).seconds * off(name))
    tuner, seen = Tuner(layouts, TRUE, Findings()), 0
    while (turn := tuner.next()) is not None:
        finding = ran(layouts, turn)
        if turn.layout == fastest:
            seen += 1
            if seen == number:
                finding = replace(
                    finding, steps=(*(times * own for own in finding.steps[:steps]), *finding.steps[steps:])
                )
        tuner.add(finding)
    assert seen > 0
    assert tuner.best == fastest


def test_steps_are_compared_at_one_pace():
    """A layout that ran while the machine was half as fast is hardly slower for it, nor are its parts. Paces that
    differ by no more than they do anyway change nothing."""
    slow = Finding("a", (2.1, 2.1), {"optimizer": 0.4}, pace=0.2)
    usual = [Finding(name, (1.5,), {"optimizer": 0.3}, pace=0.1) for name in ("b", "c")]
    found = Findings(each=[slow, *usual])
    assert found.seconds == pytest.approx({"a": 1.05 * math.exp(PACE_NOISE), "b": 1.5, "c": 1.5})
    assert found.parts("a") == pytest.approx({"optimizer": 0.2 * math.exp(PACE_NOISE)})
    found.add(Finding("d", (1.0, 1.0), pace=0.1 * math.exp(-PACE_NOISE)))
    assert found.seconds["d"] == 1.0
    assert Findings(each=[replace(slow, pace=0.0)]).seconds == {"a": pytest.approx(2.1)}  # no pace is known


def test_a_layout_is_not_slower_for_the_first_step_of_its_turn():
    """In which caches are cold and kernels are chosen: of two steps it is half, of three the median leaves it out."""
    found = Findings(each=[Finding("a", (1.1, 1.0, 1.0)), Finding("b", (2.2, 2.0)), Finding("c", (0.55, 0.5, 0.5))])
    assert found.seconds == pytest.approx({"a": 1.0, "b": 2.0, "c": 0.5})


def test_a_leader_that_was_disturbed_runs_again():
    """At another pace steps were 3.1 times as long, and are taken to be half as long: calm ones say otherwise."""
    layouts = MadeLayouts(PLANS[:FEWEST])
    first, *others = layouts.plans
    each = [Finding(first, (1.5, 1.5), pace=0.3), *[Finding(name, (1.0, 1.0), pace=0.1) for name in others]]
    guesses = dict.fromkeys(layouts.plans, Guess(1.0))
    findings = Findings(each=each)
    assert findings.seconds[first] == pytest.approx(0.5 * math.exp(PACE_NOISE))
    assert findings.calm == {*others}
    assert next_turn(rank(layouts, guesses, findings), findings, set()) == (first, STEPS)
    findings.add(Finding(first, (1.1,) * STEPS, pace=0.1))
    assert findings.seconds[first] == 1.1
    assert first in findings.calm


@pytest.mark.parametrize("way", ["alike", "otherwise", "out of memory", "out of memory but for one"])
def test_a_search_ends_where_all_fail_alike(way):
    """Another layout may fit."""
    names = [str(plan) for plan in PLANS]
    ranking = Ranking(dict.fromkeys(names, 1.0))
    findings = Findings()
    for number, name in enumerate(names[:20]):
        full = way.startswith("out of memory") and (number != 3 or way == "out of memory")
        said = "out of memory" if full else f"KeyError: {number if way == 'otherwise' else 'label'}"
        findings.add(Finding(name, failed=f"rank 0: {said}", out_of_memory=full))
        if next_turn(ranking, findings, set()) is None:
            break
    assert len(findings.each) == (ranking.first if way == "alike" else 20)


@pytest.mark.parametrize(("layouts", "first"), [(10, 7), (48, 8), (96, 12)])
def test_one_in_six_layouts_runs_first(layouts, first):
    assert Ranking(dict.fromkeys(map(str, range(layouts)), 1.0)).first == first


@pytest.mark.parametrize(("far_s", "chosen"), [(1.1, "far"), (4.0, "near")])
def test_a_first_turn_without_new_traits_goes_to_what_is_unlike_those_that_ran(far_s, chosen):
    """Where it is worth its seconds: `near` differs in one trait from a layout that ran, `far` in three."""
    traits = {"a": "vwx", "b": "xyz", "near": "vw", "far": "vz"}
    seconds = {"a": 1.0, "b": 1.0, "near": 1.0, "far": far_s}
    ranking = Ranking(seconds, traits={name: frozenset(own) for name, own in traits.items()})
    findings = Findings(each=[Finding(name, (1.0, 1.0, 1.0)) for name in ("a", "b")])
    assert next_turn(ranking, findings, set()) == (chosen, SHORT)


def test_workers_that_die_before_a_turn_end_the_command(tmp_path, monkeypatch):
    """Started again they would die again: nothing has been found meanwhile."""
    (tmp_path / "tiny.toml").write_text(TINY.replace("failing:FailsOnce", "hetmesh.testing.sources:RandomMedia"))
    (tmp_path / "tune.json").write_text('{"running": "some layout", "begun": 1}')
    starts = []

    def dies(*_):
        starts.append(1)
        raise LaunchError("rank 0 was killed")

    monkeypatch.setattr("hetmesh.cli.launch.launch", dies)
    assert main(["tune", str(tmp_path / "tiny.toml"), "--output", str(tmp_path)]) == 1
    assert len(starts) == 2


def test_steps_count_in_proportion_to_their_tokens():
    """As all turns take the same batches, a turn of the first two would else look faster than one of all."""
    tokens = [10, 20, 30, 20]
    batches = SimpleNamespace(
        batch=lambda step: SimpleNamespace(metas=SimpleNamespace(tokens=np.array([tokens[step]])))
    )
    ranks = Ranks(SimpleNamespace(accelerator=Accelerator()), None)
    assert ranks._scales(SimpleNamespace(loader=batches), 3) == pytest.approx([2.0, 1.0, 2 / 3])
    assert ranks._scales(SimpleNamespace(loader=batches), 4) == pytest.approx([2.0, 1.0, 2 / 3, 1.0])


def known(seconds, predicted, steps):
    """What is predicted and known of layouts that took `seconds` in so many steps each; of half of them the first step
    takes 6% less than the second, of the others more."""
    layouts = MadeLayouts(PLANS[: len(seconds)])
    tilts = [0.03 * np.sign(i - (len(seconds) - 1) / 2) for i in range(len(seconds))]
    guesses = {name: Guess(own) for name, own in zip(layouts.plans, predicted, strict=True)}
    each = []
    for name, own, tilt, count in zip(layouts.plans, seconds, tilts, steps, strict=True):
        each.append(Finding(name, ((1 + tilt) * own, (1 - tilt) * own, *[own] * (count - 2))))
    findings = Findings(each=each)
    return list(layouts.plans), rank(layouts, guesses, findings), findings


def test_what_is_expected_is_nearer_to_what_is_surer():
    """One was unlucky in two steps, another in nine, of a simulator that is right of all others."""
    names, ranking, _ = known([0.9, 0.9, 1.0, 1.0, 1.0], [0.6, 0.6, 1.0, 1.0, 1.0], [2, 9, 3, 3, 3])
    few, many, right, *_ = (ranking.expected[name] for name in names)
    assert 0.6 < few < many < 0.9
    assert right == 1.0


def test_leaders_that_scatter_cannot_tell_apart_run_for_longer():
    seconds, steps = [1.0, 1.01, 1.02, 1.03, *[2.0] * 4], [2] * 8
    names, ranking, findings = known(seconds, seconds, steps)
    turns = []
    while (turn := next_turn(ranking, findings, set())) is not None:
        turns.append((names.index(turn.layout), turn.steps))
        steps[names.index(turn.layout)] += turn.steps
        _, ranking, findings = known(seconds, seconds, steps)
    assert turns == [(0, STEPS), (1, STEPS), (2, STEPS), (0, STEPS), (1, STEPS)]


@pytest.mark.parametrize(("predicted", "count"), [(1.05, 1), (0.9, 4)])
def test_hopes_end_where_predictions_are_off_the_same_way(predicted, count):
    """Layouts take 1.3 times what is predicted. Four that are left take 1.4: one of them has a turn where they could
    win only if they were off the other way, and each that is predicted to win."""
    seconds = [1.0, *[1.3 + 0.1 * i for i in range(FEWEST - 1)]]
    _, ranking, findings = known(seconds, [1.0, *[own / 1.3 for own in seconds[1:]]], [9, *[2] * (FEWEST - 1)])
    left = [str(plan) for plan in PLANS[FEWEST : FEWEST + 4]]
    ranking, turns = replace(ranking, seconds={**ranking.seconds, **dict.fromkeys(left, predicted)}), set()
    while (turn := next_turn(ranking, findings, set())) is not None and turn.layout in left:
        findings = replace(findings, each=[*findings.each, Finding(turn.layout, (1.4, 1.4))])
        ranking = replace(ranking, expected={**ranking.expected, turn.layout: 1.4})
        turns.add(turn.layout)
    assert len(turns) == count


def test_turns_that_do_not_count_end_too():
    """Leaders that cannot be told apart run beside other work from then on."""
    layouts = MadeLayouts(PLANS[:FEWEST])
    guesses = dict.fromkeys(layouts.plans, Guess(1.0))
    findings = Findings(each=[Finding(name, (1.0, 1.0), pace=0.1) for name in layouts.plans])
    while (turn := next_turn(rank(layouts, guesses, findings), findings, set())) is not None:
        findings.add(Finding(turn.layout, (3.0,) * turn.steps, pace=0.3))
        assert max(findings.turns.values()) <= 5


def test_what_goes_on_has_the_candidates_of_the_first_fit(tmp_path):
    """Of many layouts the planner then searches for other ones: with these constants, however often they changed."""

    class Searched(MadeLayouts):
        complete = False

        def __init__(self):
            super().__init__()
            self.machines = []

        def search(self, machine):
            self.machines.append(machine)

    path = tmp_path / "tune.json"
    tuner = searched(Tuner(Searched(), wrong(1), Findings("a", path)))
    name = next(name for name in tuner.ranking.seconds if name not in tuner.findings.seconds)
    tuner.add(Finding(name, (2 * tuner.ranking.seconds[name],) * 3))
    assert tuner.findings.factors != tuner.findings.first_factors
    again = Tuner(Searched(), wrong(1), Findings.load(path, "a"))
    assert again.layouts.machines == tuner.layouts.machines
    assert len(again.layouts.machines) == 1


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_constants_are_fitted_again_where_they_are_wrong(times):
    tuner = searched(Tuner(MadeLayouts(), wrong(1), Findings()))
    before = dict(tuner.findings.factors)
    name = next(name for name in tuner.ranking.seconds if name not in tuner.findings.seconds)
    tuner.add(Finding(name, (times * tuner.ranking.seconds[name],) * 3))
    assert (tuner.findings.factors != before) == (times > 1)


@pytest.mark.filterwarnings("error")
def test_constants_that_are_right_stay():
    layouts, names = MadeLayouts(PLANS[:FEWEST]), fitted_names(TRUE, 2)
    right = with_factors(TRUE, dict.fromkeys(names, 0.0))
    guesses = {name: layouts.guess(right, plan) for name, plan in layouts.plans.items()}
    exact = [Finding(name, (guess.seconds,), guess.parts) for name, guess in guesses.items()]
    assert fit_constants(layouts, right, Findings(each=exact)) == dict.fromkeys(names, 0.0)


@pytest.mark.parametrize("sign", [1, -1])
def test_first_turns_show_all_that_layouts_differ_in(sign):
    """Constants of what has never run could not be fitted."""
    tuner = Tuner(MadeLayouts(), wrong(sign), Findings())
    for _ in range(tuner.ranking.first):
        tuner.add(ran(tuner.layouts, tuner.next()))
    plans = [tuner.layouts.plans[name] for name in tuner.findings.seconds]
    for module_name in ("vision", "llm"):
        assert {plan.modules[module_name].degrees for plan in plans} == set(DEGREES)
    assert {plan.microbatch_size for plan in plans} == {1, 2, 4}
    assert {plan.modules["llm"].activation_checkpoint for plan in plans} == {"none", "full"}


def test_turns_scatter_as_their_paces_do():
    """Three steps of one turn may all be slow. One turn beside other work does not count, nor does what steps are
    corrected for."""

    def scatter(*paces):
        return Findings(each=[Finding(str(i), (1.0, 1.0), pace=pace) for i, pace in enumerate(paces)]).scatter

    assert scatter(0.097, 0.1, 0.1) == LEAST_SCATTER
    assert scatter(0.097, 0.1, 0.1, 0.103, 0.5) == pytest.approx(1.4826 * math.log(1.03))
    assert scatter(0.05, 0.1, 0.2, 0.4) == pytest.approx(1.4826 * PACE_NOISE)


def test_what_scatters_more_than_layouts_differ_is_left():
    """No layout is asked that could win by less than scatter."""
    plans = PLANS[:8]
    tuner = Tuner(MadeLayouts(plans), TRUE, Findings())
    for _ in range(tuner.ranking.first):
        turn = tuner.next()
        tuner.add(Finding(turn.layout, (0.5, 1.0, 1.5), {}, 0, 1.0))
    assert tuner.findings.scatter == 0.5
    turn = tuner.next()
    assert turn is None or turn.layout in tuner.findings.seconds


def test_a_layout_that_runs_out_of_memory_corrects_what_is_held():
    """Those that hold as much are no candidates any more, and the search goes on without them."""
    layouts = MadeLayouts()
    tuner = searched(Tuner(layouts, wrong(1), Findings()), limit=500)
    failed = [layouts.guess(TRUE, layouts.plans[name]).peak_bytes for name in tuner.findings.failed]
    assert failed
    left = [layouts.guess(tuner.machine, layouts.plans[name]) for name in tuner.ranking.seconds]
    assert max(guess.peak_bytes for guess in left) < min(failed)
    assert tuner.best is not None
    unknown = replace(TRUE, memory_bytes=0)
    assert (
        0
        < corrected_memory(layouts, unknown, tuner.findings, layouts.guesses(unknown)).memory_bytes
        <= min(failed) * 10 / 9
    )


def test_processes_that_died_say_nothing_of_memory():
    """They may have been killed from outside, twice."""
    layouts, unknown = MadeLayouts(), replace(TRUE, memory_bytes=0)
    died = Findings(each=[Finding(next(iter(layouts.plans)), failed=DIED)])
    assert corrected_memory(layouts, unknown, died, layouts.guesses(unknown)) == unknown


def test_a_measured_peak_corrects_the_context():
    layouts = MadeLayouts()
    name = next(iter(layouts.plans))
    held = layouts.guess(TRUE, layouts.plans[name]).peak_bytes
    found = Findings(each=[Finding(name, (1.0,), {}, held + 70)])
    assert corrected_memory(layouts, TRUE, found, layouts.guesses(TRUE)).context_bytes == 70


def turns(rank, recipes):
    """Of each layout what was found, which job took its steps, and the step of its data that would be next."""
    with open_payloads(recipes[0]) as payloads:
        ranks = Ranks(World.current(), payloads)
        return [(ranks.measure(recipe, "made", 2), id(ranks.job), ranks.job.loader.step) for recipe in recipes]


@pytest.mark.slow
def test_one_job_takes_all_turns(pool4):
    """All take the first samples. Collectives are those inside of layers, as the simulator has them, and no waits."""
    one_each = layout_pairs.recipe("unused", [table("vision", "0"), table("llm", "1")])
    for found in pool4.run(turns, [recipe_in("tp 2, dp 2"), one_each], timeout=240):
        (tensor, job, taken), (alone, same, again) = found
        assert (same, again) == (job, taken)
        assert all(len(own.steps) == 2 and own.parts["llm forward"] > 0 for own, *_ in found)
        assert all(0 < own.pace < min(own.steps) for own, *_ in found)
        assert tensor.parts["collectives"] > 0 == alone.parts["collectives"]


TINY = """
[modules.llm]
model = "qwen3"
[modules.llm.config]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 16
intermediate_size = 64
[data]
source = "failing:FailsOnce"
options = { kinds = {} }
[training]
local_batch_size = 4
[parallelism.llm]
ranks = [0]
"""
FAILS_ONCE = """
import os, torch
from hetmesh.testing.sources import RandomMedia

class FailsOnce(RandomMedia):
    loaded = 0

    def load(self, *args, **kwargs):
        FailsOnce.loaded += 1
        if os.environ["RANK"] == "1" and FailsOnce.loaded == 3:
            raise torch.OutOfMemoryError("made here")
        return super().load(*args, **kwargs)
"""


def command(*arguments):
    return main([*arguments])


@pytest.mark.slow
def test_the_command_finds_a_layout_behind_one_that_fails_on_one_rank(tmp_path, start_forked):
    """Rank 1 runs out of memory in the first turn, in the middle of a step: both ranks go on in the same processes."""
    (tmp_path / "failing.py").write_text(FAILS_ONCE)
    (tmp_path / "tiny.toml").write_text(TINY)
    folder = tmp_path / "out"
    fixed = ("microbatch_size=2", "llm.activation_checkpoint=none", "llm.pipeline_parallel_degree=1")
    keys = [key for own in fixed for key in ("--fix", own)]
    process = start_forked(command, "tune", str(tmp_path / "tiny.toml"), "--ranks", "2", "--output", str(folder), *keys)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    findings = json.loads((folder / "tune.json").read_text())["findings"]
    first, *others = findings
    assert first["failed"] == "rank 1: OutOfMemoryError: made here"
    assert first["out_of_memory"]
    assert others
    assert all(own["steps"] and own["parts"]["llm forward"] > 0 for own in others)
    assert load_recipe(folder / "recipe.toml").world_size == 2
    machine = load_machine(str(folder / "machine.toml"))
    assert machine.memory_bytes > 0  # what the first layout would have taken was too much
    assert machine.operation_overhead > 0
    assert "failed" in out
    assert "OutOfMemoryError" in (folder / "tune.html").read_text()


def test_a_signal_to_the_command_condemns_no_layout(tmp_path, monkeypatch, capsys):
    """Once for each start: otherwise the layout whose turn it was twice would have failed."""
    (tmp_path / "tiny.toml").write_text(TINY.replace("failing:FailsOnce", "hetmesh.testing.sources:RandomMedia"))
    path = tmp_path / "tune.json"

    def stopped(*_):
        Findings("a", path, [Finding("other", (1.0,))]).begin("one")
        raise SystemExit(143)

    monkeypatch.setattr("hetmesh.cli.launch.launch", stopped)
    with pytest.raises(SystemExit):
        main(["tune", str(tmp_path / "tiny.toml"), "--output", str(tmp_path)])
    assert "stopped; the same command goes on after turn 1" in capsys.readouterr().out
    found = Findings.load(path, "a")
    assert (found.running, found.begun, len(found.each)) == ("", 0, 1)
    assert f"goes on after 1 turn in {path}" in capsys.readouterr().out


def test_a_rank_on_which_a_layout_fails_waits_for_those_that_wait_for_it(tmp_path, monkeypatch):
    """Where no connection breaks, they notice after the timeout, and then are to find that rank in the new job."""
    (tmp_path / "tiny.toml").write_text(TINY.replace("failing:FailsOnce", "hetmesh.testing.sources:RandomMedia"))
    asked = tuning.Asked(load_recipe(tmp_path / "tiny.toml"), "tiny.toml", "")
    joined, turns = [], [("made", "", 2), None]
    world = SimpleNamespace(rank=1, device=None, accelerator=Accelerator("cpu"), close=lambda: None)
    monkeypatch.setattr(tuning, "init", lambda **timeouts: joined.append(timeouts) or world)
    monkeypatch.setattr(tuning, "choose_kernels", lambda *_: None)
    monkeypatch.setattr(tuning, "_agreed", lambda *_: turns.pop(0))
    monkeypatch.setattr(tuning, "gather_objects", lambda said, *_: [said])
    tuning.tune(asked, print)  # a recipe without a text fails
    first, again = joined
    assert again["init_timeout"] > again["timeout"] == first["timeout"]


def test_wrong_arguments_are_errors(tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(TINY.replace("failing:FailsOnce", "hetmesh.testing.sources:RandomMedia"))
    path = str(tmp_path / "tiny.toml")
    for arguments, said in (
        (["nowhere.toml"], "nowhere.toml"),
        ([path, "--budget", "0"], "--budget 0.0: must be above 0"),
        ([path, "--fix", "tp"], "--fix tp: write KEY=VALUE"),
        ([path, "--output", f"{path}/out"], "cannot be written"),
    ):
        assert main(["tune", *arguments]) in (1, 2)
        assert said in capsys.readouterr().err


def test_findings_that_are_none_are_an_error(tmp_path):
    path = tmp_path / "tune.json"
    path.write_text('{"of": "a"}')
    with pytest.raises(UsageError, match=r"tune\.json: not one that `hetmesh tune` wrote .*; move it away"):
        Findings.load(path, "a")


def test_a_machine_file_is_read_as_it_was(tmp_path):
    """Every constant, also those that were fitted."""
    machine = with_factors(replace(TRUE, busy_slowdown=(1.0, 1.1)), {"efficiency": 2.0, "busy_slowdown 3": 0.5})
    (tmp_path / "made.toml").write_text(machine_toml(machine, "fitted"))
    assert load_machine(str(tmp_path / "made.toml")) == machine
    assert machine.efficiency == 1.0  # its peak was too low
    assert machine.peak_flops["float32"] > TRUE.peak_flops["float32"]
    assert machine.busy_slowdown[2] > 1.65
