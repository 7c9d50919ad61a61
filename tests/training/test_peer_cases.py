"""Layouts from the test suites of Megatron-LM and Megatron-Bridge, in parity with one process.

Peers assert shapes, "finishes" or 1e-3; here loss, every gradient and the parameters after two SGD steps equal those of
one process to 1e-10. `tp,pp,dp@first`: a module's degrees and its first rank. What a peer rejects and hetmesh runs says
so. Not here: modules after the LLM, the fp16 loss scaler.
"""

from dataclasses import dataclass, replace

import pytest

from hetmesh.errors import RecipeError
from hetmesh.recipe.recipe import Recipe, parse_recipe
from hetmesh.testing.parity import check
from support.often import combinations
from support.recipes import to_toml

SIGLIP = {"hidden_size": 8, "num_attention_heads": 4, "patch_size": 4, "image_size": 8, "intermediate_size": 8}
QWEN3 = {"hidden_size": 12, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4, "intermediate_size": 12}


@dataclass(frozen=True)
class At:
    """A module's degrees and first rank; `ranks` where they are not a run."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    first: int = 0
    cp: int = 1

    def table(self) -> dict:
        size = self.tp * self.pp * self.dp * self.cp
        return {
            "ranks": list(range(self.first, self.first + size)),
            "tensor_parallel_degree": self.tp,
            "pipeline_parallel_degree": self.pp,
            "data_parallel_replicate_degree": self.dp,
            "context_parallel_degree": self.cp,
        }


@dataclass(frozen=True)
class Case:
    """One layout of encoder, LLM and perhaps an audio encoder or a projector of its own."""

    vision: At
    llm: At
    size: int = 1  # samples per LLM lane and microbatch
    microbatches: int = 2
    policy: str = "1f1b"
    audio: At | None = None
    projector: At | None = None
    items: tuple[int, ...] = (1, 0, 2, 1, 0, 3)  # images per sample, repeated
    targets: tuple[int, ...] = (1, 3, 2)

    @property
    def recipe(self) -> Recipe:
        batch = self.size * self.microbatches * self.llm.dp
        kinds = {"image": [1, 8, 8]} | ({"sound": [3, 6]} if self.audio else {})
        modules = {
            "vision": {"model": "siglip", "config": {**SIGLIP, "num_hidden_layers": max(self.vision.pp, 1)}},
            "projector": {"model": "mlp"},
            "llm": {"model": "qwen3", "config": {**QWEN3, "num_hidden_layers": max(self.llm.pp, 2)}},
        }
        boundaries = [{"from": "vision", "to": "projector"}, {"from": "projector", "to": "llm", "at": "image"}]
        parallelism = {
            "pipeline_parallel_schedule": self.policy,
            "pipeline_parallel_microbatch_size": self.size,
            "vision": self.vision.table(),
            "llm": self.llm.table(),
        }
        if self.audio:
            layers = {"encoder_layers": self.audio.pp, "encoder_attention_heads": 2, "encoder_ffn_dim": 8}
            modules["audio"] = {"model": "whisper", "config": {"d_model": 12, **layers}}
            boundaries.append({"from": "audio", "to": "llm", "at": "sound"})
            parallelism["audio"] = self.audio.table()
        if self.projector:
            parallelism["projector"] = self.projector.table()
        return parse_recipe(
            to_toml(
                {
                    "modules": modules,
                    "boundaries": boundaries,
                    "parallelism": parallelism,
                    "data": {
                        "source": "support.counted_media:CountedMedia",
                        "options": {
                            "kinds": kinds,
                            "items": [self.items[i % len(self.items)] for i in range(batch)],
                            "targets": list(self.targets),
                        },
                    },
                    "training": {"local_batch_size": batch // self.llm.dp, "dtype": "float64"},
                }
            )
        )


ONE, AT_4 = At(), At(first=4)
TP2DP2, TP4, TP2 = At(tp=2, dp=2), At(tp=4), At(tp=2)
TP2DP4, TP4DP2 = At(tp=2, dp=4), At(tp=4, dp=2)


def off(at: At, first: int) -> At:
    return replace(at, first=first)


SPLITS = {
    "[0,3,1,2] over 2 receivers": Case(At(dp=2), At(dp=2, first=2), 2, 1, items=(0, 3, 1, 2)),
    "[1,3,2] over 3 receivers": Case(ONE, At(dp=3, first=1), 1, 1, items=(1, 3, 2)),
    "[1,2,3] over 2 receivers (rejected by the peer)": Case(
        ONE, ONE, 3, 1, projector=At(dp=2, first=1), items=(1, 2, 3)
    ),
    "one receiver": Case(At(dp=2), At(first=2), 4, 1, items=(0, 3, 1, 2)),
    "peers with rows 3, 0, 7": Case(At(dp=3), At(first=3), 3, 1, items=(3, 0, 7)),
}
"""Section 1.1: rows over receivers; declared sizes are images per sample."""

TAKING_PART = {
    "2,2 -> 4,1 @4": Case(TP2DP2, off(TP4, 4)),
    "4,1 -> 2,2 @4": Case(TP4, off(TP2DP2, 4)),
    "2,1 -> 2,1 @4": Case(TP2, off(TP2, 4)),
    "2,2 -> 2,2 @4": Case(TP2DP2, off(TP2DP2, 4)),
    "4,1 -> 1,4 @4": Case(TP4, At(dp=4, first=4)),
    "4,1 -> 4,1 @4": Case(TP4, off(TP4, 4)),
}
"""Sections 1.2 and 1.3: source (tp, dp) -> target (tp, dp)."""

LEADERS = {
    "2,1,2,2": At(tp=2, pp=2, dp=2),
    "4,1,2,1": At(tp=4, pp=2),
    "1,1,2,4": At(pp=2, dp=4),
    "2,1,4,1": At(tp=2, pp=4),
}
"""Section 1.2: boundary ranks of (tp, cp, pp, dp); rows come from two encoder lanes on ranks of both ends."""

COLOCATED = {
    "TP2DP4 -> TP4DP2": Case(TP2DP4, TP4DP2),
    "TP4DP2 -> TP2DP4": Case(TP4DP2, TP2DP4),
    "TP4DP2 -> TP4DP2": Case(TP4DP2, TP4DP2),
    "TP2DP2 -> TP1DP4, both @4": Case(off(TP2DP2, 4), At(dp=4, first=4)),
    "DP4 -> DP2, TP the rest": Case(At(tp=2, dp=4), At(tp=4, dp=2), 2),
    "rejected: no TP": Case(At(dp=8), TP4DP2),
    "rejected: 8 and 4 ranks": Case(TP2DP4, TP2DP2),
    "rejected: different offsets": Case(TP2DP2, off(TP2DP2, 2)),
    "rejected: PP 2": Case(TP2DP4, At(tp=2, pp=2, dp=2), policy="three_phase"),
    "rejected: CP 2": Case(TP2DP4, At(tp=2, cp=2, dp=2)),
    "rejected: DP 3 and 2 on 6 ranks": Case(At(tp=2, dp=3), At(dp=2)),
    "rejected: 3 samples over 2": Case(At(dp=2), At(dp=3), 1, 1, items=(1, 2, 3)),
}
"""Section 2."""

MASKS = {"uniform": (2,), "asymmetric": (1, 1, 1, 1, 7, 1, 1, 1)}  # of two LLM lanes, one has most of the loss
PAIRS = {"2,4 | 4,2": (TP2DP4, TP4DP2), "4,2 | 2,4": (TP4DP2, TP2DP4)}
ROWS = {
    1: Case(ONE, At(first=1), 2, 4),
    2: Case(ONE, At(pp=3, first=1), 2, 4),
    3: Case(TP2, At(tp=2, pp=3, first=2), 2, 4),
    4: Case(At(tp=2, pp=2), At(tp=2, pp=2, first=4), 2, 4),
    5: Case(At(dp=4), At(tp=2, pp=2, first=4), 4, 4),
    6: Case(At(tp=2, pp=2), At(dp=4, first=4), 1, 4),
    7: Case(At(dp=2), At(tp=2, pp=3, first=2), 2, 4),
}
"""Section 3: rows of the 1F1B test, four microbatches."""

SEVERAL = {
    "image @0, audio @1, LLM tp2 pp2 @2": Case(ONE, At(tp=2, pp=2, first=2), audio=At(first=1)),
    "image pp2 @0, audio tp2 @2, LLM pp4 @4": Case(At(pp=2), At(pp=4, first=4), 1, 4, audio=At(tp=2, first=2)),
    "two encoders @0, LLM @1": Case(ONE, At(first=1), 1, 4, audio=ONE),
    "two encoders tp2 pp2 @0, LLM tp2 pp2 @4, 16 microbatches": Case(
        At(tp=2, pp=2), At(tp=2, pp=2, first=4), 1, 16, audio=At(tp=2, pp=2)
    ),
}
"""Section 3: several encoders."""

BLOCKS = {
    "2,1,1 -> 2,2,1": Case(TP2, At(tp=2, pp=2, first=4)),
    "2,1,2 -> 4,1,1": TAKING_PART["2,2 -> 4,1 @4"],
    "2,1,2 -> 1,1,4": Case(TP2DP2, At(dp=4, first=4)),
}
"""Section 3: pairs of blocks (tp, pp, dp) that are not among the rows above."""

GRADIENT_SYNC = {
    "4 targets": Case(At(dp=4), At(dp=4), 1, 1, targets=(1,)),
    "half of the ranks text-only": Case(At(dp=4), At(dp=2), 2, 1, items=(2, 1, 0, 0), targets=(1, 2)),
    "one rank with images": Case(At(dp=4), At(tp=2, dp=2), 2, 1, items=(0, 0, 0, 3)),
}
"""Section 4: which ranks have something to add to a gradient."""

OFTEN = (
    "[1,2,3] over 2 receivers (rejected by the peer)",
    "peers with rows 3, 0, 7",
    "2,2 -> 4,1 @4",
    "rejected: DP 3 and 2 on 6 ranks",
    "image @0, audio @1, LLM tp2 pp2 @2",
    "one rank with images",
)
"""The other cases are exhaustive: pairs of features in `test_parity_matrix.py` cover what they do."""


def params(cases):
    return [
        pytest.param(case, id=str(name), marks=() if str(name) in OFTEN else pytest.mark.exhaustive)
        for name, case in cases.items()
    ]


def run(pool, case: Case) -> None:
    check(pool(4 if case.recipe.world_size <= 4 else 8), case.recipe, 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", params(SPLITS))
def test_rows_over_receivers(pool, case):
    run(pool, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", params(TAKING_PART))
def test_who_takes_part(pool, case):
    run(pool, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("llm", params(LEADERS))
def test_boundary_ranks_of_a_pipeline(pool, llm):
    run(pool, Case(At(dp=2, first=3), llm, policy="three_phase"))


@pytest.mark.slow
@pytest.mark.parametrize("case", params(COLOCATED))
def test_colocated_modules(pool, case):
    run(pool, case)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "mask", "microbatches"), combinations({("2,4 | 4,2", "asymmetric", 4)}, PAIRS, MASKS, (1, 4))
)
def test_end_to_end_with_a_loss_mask(pool, pair, mask, microbatches):
    run(pool, Case(*PAIRS[pair], 2, microbatches, targets=MASKS[mask]))


@pytest.mark.slow
@pytest.mark.parametrize("row", params(ROWS))
def test_rows_of_the_1f1b_schedule(pool, row):
    run(pool, row)


@pytest.mark.slow
@pytest.mark.parametrize("case", params(SEVERAL))
def test_several_encoders(pool, case):
    run(pool, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", params(BLOCKS))
def test_pairs_of_blocks(pool, case):
    run(pool, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", params(GRADIENT_SYNC))
def test_gradients_of_ranks_with_and_without_targets_and_images(pool, case):
    run(pool, case)


def test_a_batch_that_does_not_divide_over_the_lanes_of_the_llm_is_refused():
    """Encoders and projectors take any batch; the lanes of the LLM hold equally many samples."""
    text = to_toml({"modules": {"llm": {"model": "qwen3"}}, "parallelism": {"llm": At(dp=2).table()}})
    sizes = "[training]\nlocal_batch_size = 1\nglobal_batch_size = 3"
    with pytest.raises(RecipeError, match=r"global_batch_size = 3 must be a multiple of .* lanes = 1 x 2"):
        parse_recipe(f"{text}\n{sizes}")
