"""`hetmesh simulate` of a layout far larger than any machine here."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetmesh.cli import main
from hetmesh.data.payloads import SplitSources, Unreadable
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.predictions import notes_on_videos, simulate_recipe
from hetmesh.resolve.resolved import resolve

RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = str(RECIPES / "mllm_22b_175b.toml")


@pytest.mark.exhaustive
def test_a_recipe_of_3072_ranks_is_checked_and_simulated(capsys):
    assert main(["check", RECIPE]) == 0
    assert "3072 ranks" in capsys.readouterr().out
    assert main(["simulate", RECIPE]) == 0
    assert "note: " not in capsys.readouterr().out
    whole = simulate_recipe(resolve(load_recipe(RECIPE)))
    assert 3.0 < whole.makespan < 8.0
    assert sorted(rank for ranks in whole.tracks for rank in ranks) == list(range(3072))


def test_encoder_kernels_in_collectives_of_the_llm_are_told(capsys):
    gaps = str(RECIPES / "digits_gaps.toml")
    share = simulate_recipe(resolve(load_recipe(gaps)), machine="h100").hidden_share
    assert 0.9 < share <= 1  # its collectives are short
    assert main(["simulate", gaps, "--machine", "h100"]) == 0
    said = capsys.readouterr().out
    assert f" ms in collectives, {share:.0%} of the time in these, on the mean rank" in said
    assert re.search(r"^ *in collectives \|.*[0-9A-J]", said, re.MULTILINE)
    assert main(["explain", gaps]) == 0
    assert "predicted for encoders: " in capsys.readouterr().out


@pytest.mark.slow
def test_what_is_assumed_of_experts_is_said(capsys):
    assert main(["simulate", str(Path(RECIPE).with_name("digits_moe.toml")), "--machine", "h100"]) == 0
    assert "\nnote: experts of llm: their routing" in capsys.readouterr().out


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
