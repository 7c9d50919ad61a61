"""`hetmesh simulate` of a layout far larger than any machine here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.data.payloads import SplitSources, Unreadable
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.predictions import notes_on_videos
from hetmesh.resolve.resolved import resolve

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = str(RECIPES / "mllm_22b_175b.toml")


@pytest.mark.exhaustive
def test_a_recipe_of_3072_ranks_is_checked_and_simulated(capsys):
    assert main(["check", RECIPE]) == 0
    assert "3072 ranks" in capsys.readouterr().out
    assert main(["simulate", RECIPE, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["notes"] == []
    assert 3.0 < whole["makespan"] < 8.0
    assert sorted(rank for row in whole["rows"] for rank in row["ranks"]) == list(range(3072))


def test_encoder_kernels_in_collectives_of_the_llm_are_simulated_on_request_and_told_apart(capsys):
    tensor = ("--parallelism.llm.data_parallel_replicate_degree=1", "--parallelism.llm.tensor_parallel_degree=2")
    command = ["simulate", str(RECIPES / "digits_bubble_fill.toml"), "--machine", "h100", *tensor]
    found = []
    for more in ([], ["--beside", "vision"]):
        assert main([*command, *more, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert not any(found[0]["hidden"])
    assert 0 < sum(found[1]["hidden"]) < sum(row["compute"] for row in found[1]["rows"])
    assert found[1]["makespan"] < found[0]["makespan"]
    assert main([*command, "--beside", "vision"]) == 0
    assert "simulated only: " in capsys.readouterr().out
    assert main([*command, "--beside", "audio"]) == 2
    assert "beside = 'audio': only modules before 'llm' can run beside it: vision, projector" in capsys.readouterr().err


@pytest.mark.slow
def test_json_says_what_is_assumed_of_experts(capsys):
    assert main(["simulate", str(Path(RECIPE).with_name("digits_moe.toml")), "--machine", "h100", "--json"]) == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("experts of llm: their routing")


def test_whether_videos_are_prepared_behind_the_step_is_said(monkeypatch):
    load, seconds, asked = SplitSources.load, [9.0, *[0.01] * 4], []

    def timed(self, wanted):
        asked.append(wanted.kinds)
        frames = len((sample := load(self, wanted)).media["video"][0])
        return replace(sample, load_s=frames * seconds[len(asked) - 1])

    monkeypatch.setattr(SplitSources, "load", timed)
    resolved = resolve(load_recipe(RECIPES / "digits_video.toml", ("--data.num_workers", "2")))
    plan = resolved.plan(resolved.loader().batch(0).metas)
    lanes = zip(*plan.lanes["vision"], strict=True)
    rows = [sum(plan.samples[i].rows["vision"] for part in lane for i in part) for lane in lanes]
    most = 0.01 * max(rows)  # rows are frames
    said = f"takes, as tried here, {most:.3g} s for lane {rows.index(max(rows))} of vision, which has most: data.num_w"
    for step, ends in (
        (0.51 * most, "= 2 hides that"),
        (0.3 * most, "= 2 does not hide that behind the step, 4 would"),
    ):
        asked.clear()
        (note,) = notes_on_videos(resolved, step)
        assert said in note
        assert ends in note
    assert asked == [("video",)] * 5
    monkeypatch.setattr(SplitSources, "load", lambda *_: Unreadable("sample 'x': it has no frames"))
    (note,) = notes_on_videos(resolved, 1)
    assert note == "how long the videos of a step take is not known: sample 'x': it has no frames"
    assert notes_on_videos(resolve(load_recipe(RECIPES / "digits.toml")), 1) == []
