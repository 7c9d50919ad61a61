"""A disk that does not answer ends the run: whatever is read of samples is watched, and time begins anew on the way."""

from __future__ import annotations

from pathlib import Path

from hetmesh.data.digits import DigitsSource
from hetmesh.recipe.recipe import load_recipe
from hetmesh.resolve.resolved import resolve
from hetmesh.training.trainer import Trainer
from hetmesh.training.validation import free_running

RECIPE = Path(__file__).parents[2] / "recipes" / "digits_single.toml"
HELD_OUT = 10


class Looked(DigitsSource):
    """The digits, which note what is watched whenever one is asked for."""

    world, seen = None, {}

    def __len__(self):
        return HELD_OUT if self.split == "validation" else super().__len__()

    def _look(self, what, index):
        if self.world is not None:
            self.seen.setdefault((self.split, what, index), []).extend(self.world.watchdog._watched[-1:])

    def meta(self, index):
        self._look("meta", index)
        return super().meta(index)

    def load(self, index, kinds=None):
        self._look("tokens" if kinds == () else "load", index)
        return super().load(index, kinds)

    def kind(self, index):
        self._look("kind", index)
        return super().kind(index)


def test_what_is_read_for_an_evaluation_a_checkpoint_or_a_skip_is_watched(world, tmp_path, monkeypatch):
    keys = ("--data.source", f"{__name__}:Looked", "--data.on_bad_sample", "skip", "--training.local_batch_size", "4")
    keys += ("--job.dump_folder", str(tmp_path), "--validation.samples", str(HELD_OUT))
    trainer = Trainer(resolve(load_recipe(RECIPE, keys)), world)
    trainer.train_step()
    trainer.upcoming.settle()  # or its thread would look while this one does
    monkeypatch.setattr(Looked, "world", world)
    monkeypatch.setattr(Looked, "seen", {})
    trainer.validate()
    held_out = range(HELD_OUT)
    of_evaluation = _seen(Looked, "meta", held_out)
    assert of_evaluation[0] == "metadata of the held-out samples 0 to 3"
    assert len(set(of_evaluation)) == 3  # a global batch each
    loaded = _seen(Looked, "load", held_out)
    assert loaded[3] == "loading sample 'digits/validation/3' on rank 0"
    assert len(set(loaded)) == len(set(_seen(Looked, "kind", held_out))) == HELD_OUT

    Looked.seen.clear()
    free_running(trainer.job, Looked("validation"), HELD_OUT, 1, ())
    assert len(set(_seen(Looked, "tokens", held_out))) == HELD_OUT
    assert all(len(watched) > 1 for (_, what, _), watched in Looked.seen.items() if what == "meta")

    Looked.seen.clear()
    trainer.checkpoints.state(trainer.progress)
    watched = {(each.what, each.timeout) for found in Looked.seen.values() for each in found}
    assert watched == {("a look at samples all over the data source", trainer.recipe.checkpoint.timeout_seconds)}
    trainer.reporter.close()


def _seen(source, what, indices):
    """What was watched first when each of these was asked for."""
    return [str(source.seen["validation", what, i][0].what) for i in indices]
