"""A dry run: a rank's real step on a fake device."""

import json
from functools import partial

import pytest

from support import tiny_vlms
from support.dry_run_cases import FOLDER, dry, grouped, left_behind, printed

KINDS = ("digits_cp_pp",)
OTHERS = sorted({path.stem for path in FOLDER.glob("digits*.toml")} - set(KINDS))
SHARED = ("context_parallel_degree=1", "tensor_parallel_degree=2", "enable_sequence_parallel=true")


def waits_within(run):
    """Where the host waits for its device inside an action."""
    return [(wait, times) for wait, times in run.waits if wait.within]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)])
def test_a_step_leaves_parameters_and_optimizer_state(apart, name):
    run, block_masks = apart(dry, name, 0)
    # Masks of attention are kept for the microbatches to come; nothing else is left.
    assert run.live - run.state <= block_masks
    assert run.live == run.state or block_masks
    frozen = name in ("digits_frozen", "digits_lora")  # all that rank 0 has
    assert run.state == run.built if frozen else run.state > run.built
    assert run.built >= run.built_peak / 1.2
    assert run.peak >= max(span.peak for span in run.actions)
    assert run.timed_waits == 0
    assert waits_within(run) == []
    assert sum(work.flops for work in run.work.values()) > 0


EXPERTS = {
    "as it is": ((), 3),
    "microbatches": (("--parallelism.llm.pipeline_parallel_microbatch_size=8",), 3 * 4),
    "CP 2": (("--parallelism.llm.ranks=0-3", "--parallelism.llm.context_parallel_degree=2"), 3),
    "TP 2": (("--parallelism.llm.ranks=0-3", "--parallelism.llm.tensor_parallel_degree=2"), 3),
    "FSDP 4": (
        (
            *("--parallelism.llm.ranks=0-3", "--parallelism.llm.data_parallel_replicate_degree=1"),
            "--parallelism.llm.data_parallel_shard_degree=4",
        ),
        3,
    ),
    "recomputed": (("--activation_checkpoint.mode=full",), 3 * 2),  # and routed again
}
"""Changes of digits_moe.toml, and how often a rank routes: its blocks times its microbatches."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each if each == "microbatches" else pytest.param(each, marks=pytest.mark.exhaustive) for each in EXPERTS]
)
def test_the_host_reads_the_sizes_of_each_mixture_of_experts_once_and_nothing_else(apart, case):
    changes, times = EXPERTS[case]
    run, _ = apart(dry, "digits_moe", 3, *changes)
    within = [(wait.line, wait.what) for wait, count in run.waits if wait.within for _ in range(count)]
    assert len(within) == times
    assert {(line.partition(":")[0], what) for line, what in within} == {
        ("parallel/experts/token_exchange.py", "tolist")
    }
    assert sum(each.messages for each in run.traffic if "sizes" in each.edge) == times
    assert run.waiting("host_to_device") == run.timed_waits == 0


MUON = (
    "--optimizer.name=torch.optim:Muon",
    "--optimizer.param_groups=[{ pattern = 'norm|bias|embed|lm_head', optimizer_name = 'AdamW', optimizer_kwargs = { "
    "eps = 0.1 } }]",
)


@pytest.mark.exhaustive  # training/test_custom_optimizers.py has it on ranks
@pytest.mark.slow
def test_optimizers_by_class_update_shards_and_gather_what_they_need_whole(apart):
    """On each rank: the meshes of one dry run are not those of the next."""
    groups = apart(grouped, "digits_fsdp", *MUON).groups
    assert len(groups) > 1
    for group in groups:
        assert group.run.state > group.run.built
        assert group.memory_error < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("keys", [(), SHARED], ids=["context parallel", "sequence parallel"])
def test_the_host_knows_where_rows_and_features_go(apart, keys):
    run, _ = apart(dry, "digits_qwen3vl", 2, *(f"--parallelism.llm.{key}" for key in keys))
    assert {edge.edge for edge in run.traffic} >= {"vision->llm forward", "vision.deepstack.1->llm backward"}
    assert waits_within(run) == []


@pytest.mark.slow
def test_equal_ranks_are_one_group_and_the_predicted_peak_is_near(apart):
    runs = apart(grouped, "digits")
    assert [group.ranks for group in runs.groups] == [(0,), (1,), (2, 3)]
    assert runs.machine == "h100"
    assert max(group.memory_error for group in runs.groups) < 0.2
    edges = {each.edge for group in runs.groups for each in group.run.traffic}
    assert edges == {"vision->projector forward", "vision->projector backward"}


WIDE = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128}
SHARED_BY_TWO = '[parallelism.vision]\nranks = "0-1"\n[parallelism.llm]\nranks = "0-1"\ncontext_parallel_degree = 2\n'
AGAIN = '[activation_checkpoint]\nmode = "full"'


@pytest.mark.exhaustive  # what a layer keeps is compared in tests/cost/test_recurrence_costs.py
@pytest.mark.slow
@pytest.mark.parametrize("more", ["", AGAIN])
def test_the_predicted_peak_of_layers_with_a_recurrence_is_near(apart, tmp_path, monkeypatch, more):
    """States and inputs of convolutions are most of what such an LLM keeps. The second rank has the middle of each
    row, and so maps of all of its rows."""
    wide = partial(tiny_vlms._qwen3_5, **WIDE, linear_value_head_dim=128)
    monkeypatch.setattr(tiny_vlms, "MODELS", {**tiny_vlms.MODELS, "qwen3_5": wide})
    text = tiny_vlms.recipe_text(tiny_vlms.save("qwen3_5", tmp_path), SHARED_BY_TWO + more)
    (tmp_path / "recipe.toml").write_text(text.replace("float64", "float32").replace("max_text = 12", "max_text = 700"))
    status, text = apart(printed, ["dryrun", str(tmp_path / "recipe.toml"), "--rank", "1", "--json"])
    assert status == 0, text
    (group,) = json.loads(text[text.index("{") :])["groups"]  # behind what transformers says of kernels
    assert group["memory_error"] < 0.1


IN_GAPS = (
    *("--parallelism.pipeline_parallel_schedule=bubble_fill", "--parallelism.pipeline_parallel_microbatch_size=8"),
    *("--parallelism.llm.tensor_parallel_degree=1", "--parallelism.llm.pipeline_parallel_degree=2"),
    "--parallelism.drawer.ranks=0-1",
)


@pytest.mark.exhaustive  # tests/simulate/test_measured_memory.py has a generator beside a pipeline
@pytest.mark.slow
def test_what_a_generator_keeps_in_gaps_does_not_grow_with_the_microbatches(apart):
    """Beside what other modules on its rank hold meanwhile, of which schedules have more or less."""
    counts = 6, 12
    runs = [apart(dry, "digits_draw", 1, *IN_GAPS, f"--training.local_batch_size={8 * n}")[0] for n in counts]
    actions = [[span for span in run.actions if str(span.label).startswith("drawer.0 ")] for run in runs]
    assert [len(own) for own in actions] == [2 * n + 1 for n in counts]  # forwards, backwards, one sum
    few, many = (held_by(own) for own in actions)
    assert many < 1.1 * few


def held_by(actions):
    """The most bytes that some actions hold, with what those before them have left."""
    left = most = 0
    for span in actions:
        most = max(most, left + span.peak - span.before)
        left += span.after - span.before
    return most


@pytest.mark.slow
def test_a_device_is_given_encoders_before_the_llm_in_whose_collectives_they_run(apart):
    run, _ = apart(dry, "digits_gaps", 0)
    places = {str(span.label): place for place, span in reversed([*enumerate(run.actions)])}
    for m in range(3):
        assert places[f"vision.0 F{m + 1}"] < places[f"llm.0 F{m}"]
    assert waits_within(run) == []


@pytest.mark.exhaustive
def test_rows_of_all_to_alls_are_let_go_of_within_the_step(apart):
    """Those of 32 microbatches would be 1.7 of the predicted peak of the last rank."""
    runs = apart(grouped, "digits_pipeline", "--parallelism.llm.pipeline_parallel_microbatch_size=2")
    assert max(group.memory_error for group in runs.groups) < 0.1


@pytest.mark.slow
def test_the_command_prints_text_and_json(apart):
    status, text = apart(printed, ["dryrun", "recipes/digits.toml", "--rank", "2"])
    assert status == 0
    assert "B llm.0" in text
    assert "fits h100" in text
    assert max(map(len, text.splitlines())) <= 160
    status, text = apart(printed, ["dryrun", "recipes/digits.toml", "--json"])
    assert status == 0
    assert json.loads(text)["fits"] is True
    status, text = apart(printed, ["dryrun", "recipes/digits.toml", "--rank", "7"])
    assert status == 2
    assert "ranks 0-3" in text


@pytest.mark.slow
def test_offloaded_parameters_stay_on_the_host(apart):
    given = ["dryrun", "recipes/digits_fsdp.toml", "--training.enable_cpu_offload=true", "--json"]
    status, text = apart(printed, given)
    assert status == 0, text
    group = json.loads(text)["groups"][0]
    assert group["built"] < 1024  # but for buffers
    waits = [each for each in group["waits"] if each["line"] == "" and each["model"] == ""]
    assert {each["what"] for each in waits} == {"an event"}, "FSDP's own copies are pinned; it waits for gradients"


@pytest.mark.slow
def test_a_caller_finds_all_as_it_was(apart):
    assert apart(left_behind) == {}
