"""The timeline of a real step, against clocks that know nothing of it."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from hetmesh.boundary import World
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.simulate import Timeline, bubbles
from hetmesh.training.trainer import Trainer

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_colocated.toml"
SLEEPS = {0: 0.1, 1: 0.2}  # seconds before each layer of the LLM, by rank


def queued():
    """Seconds in which this thread waited for a core, so far."""
    return 1e-9 * int(Path("/proc/thread-self/schedstat").read_text().split()[1])


def step_with_known_times(rank, recipe):
    """A recorded step, in which ranks sleep, rank 1 longer: the seconds of the step, of what this rank computed by
    other clocks (of its thread, which does not run while it sleeps or waits, and around each sleep), and in which its
    thread could have run, but other processes had the cores."""
    trainer = Trainer(resolve(recipe), World.current())
    slept, at = [], []

    def sleep(seconds):
        started = time.perf_counter()
        time.sleep(seconds)
        slept.append(time.perf_counter() - started)

    stages = trainer.job.runtime.modules
    for stage, module in stages.items():
        if stage.module == "llm":
            for name, part in module.named_modules():
                if name.rpartition(".")[0].endswith("layers"):
                    part.register_forward_pre_hook(lambda *_: sleep(SLEEPS[rank]))
    recorder, runtime = trainer.recorder, trainer.job.runtime
    begin, end, runs = recorder.begin, recorder.end, dict.fromkeys(stages, 0)

    def begun(step):
        wanted = begin(step)
        if wanted:
            slept.clear()
            at[:] = [time.perf_counter(), time.thread_time(), queued()]
        return wanted

    def ended(planned):
        at[:] = [time.perf_counter() - at[0], time.thread_time() - at[1], queued() - at[2]]
        at[1] += sum(slept)
        end(planned)

    class Late(nn.Module):  # inside the forward, before FSDP gathers
        def __init__(self, stage, module):
            super().__init__()
            self.stage, self.inner = stage, module

        def forward(self, *args):
            runs[self.stage] += 1
            if rank == 1 and self.stage.module == "vision" and runs[self.stage] == 3:
                sleep(0.4)
            return self.inner(*args)

    runtime.modules = {stage: Late(stage, module) for stage, module in stages.items()}
    recorder.begin, recorder.end = begun, ended
    trainer.run()
    return tuple(at)


@pytest.mark.slow
def test_bubbles_of_a_recorded_step_are_what_other_clocks_say(pool, tmp_path):
    """O1: with FSDP and tensor parallelism, gaps of every class add up to the step without what ranks compute by
    another clock, and are what one rank waits for the other. Of other records they are not."""
    layout = {
        **{"vision.ranks": "0-1", "vision.data_parallel_replicate_degree": 1, "vision.data_parallel_shard_degree": 2},
        **{"llm.ranks": "0-1", "llm.data_parallel_replicate_degree": 1, "pipeline_parallel_microbatch_size": 2},
    }
    keys = [word for key, value in layout.items() for word in (f"--parallelism.{key}", str(value))]
    keys += [
        "--training.local_batch_size",
        "4",
        "--training.steps",
        "2",
        "--profiling.timeline_step",
        "2",
        "--validation.enable",
        "false",
    ]
    recipe = load_recipe(RECIPE, (*keys, "--job.dump_folder", str(tmp_path)))
    measured = pool(2).run(step_with_known_times, recipe)
    timeline = json.loads((tmp_path / "timeline.json").read_text())["measured"]
    judge_bubbles(Timeline.from_json(timeline), measured)
    rng = np.random.default_rng(0)
    spoiled = [json.loads(json.dumps(timeline)) for _ in range(4)]
    spoiled[0]["work"][4:6] = np.sort(rng.uniform(0, timeline["makespan"], (2, len(timeline["work"][4]))), 0).tolist()
    spoiled[1]["work"][5] = timeline["work"][4]
    spoiled[2]["collectives"] = [0.0, 0.0]
    spoiled[3]["work"][1] = [0] * len(timeline["work"][1])
    for other in spoiled:
        with pytest.raises(AssertionError):
            judge_bubbles(Timeline.from_json(other), measured)


def judge_bubbles(timeline, measured):
    """That classes are what ranks of `measured` waited for (what `step_with_known_times` returns, of each)."""
    first, second = bubbles(timeline)
    step = max(seconds for seconds, *_ in measured)
    for (_, computed, queued), row in zip(measured, (first, second), strict=True):
        assert step - computed - queued - 0.01 * step < row.idle < step - computed + 0.01 * step
    layers, microbatches = 3, 2
    near = 0.1 + sum(queued for *_, queued in measured)
    assert first.dp_gather - second.dp_gather == pytest.approx(0.4, abs=near)
    assert first.tp - second.tp == pytest.approx(layers * microbatches * (SLEEPS[1] - SLEEPS[0]), abs=near)
    assert min(second.dp_gather, second.dp_scatter) > 0
