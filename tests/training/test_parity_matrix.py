"""Parity of layouts, schedules and models in any combination: a covering array of pairs, each row against one process.

What the rows are drawn from is `FACTORS`; cases that a pair does not show have tests of their own in the other files.
"""

import math

import pytest

from hetmesh.testing.parity import check
from support.assignments import Deferred, RandomAssignment
from support.covering import covering_rows
from support.parity_cases import POLICIES, SLICES, TRAINED, packed, recipe, table

pytestmark = pytest.mark.slow

LLM = {
    "one rank": {},
    "DP": {"data_parallel_replicate_degree": 2},
    "FSDP": {"fsdp": 2},
    "TP": {"tp": 2},
    "SP": {"tp": 2},
    "FSDP x TP": {"fsdp": 2, "tp": 2},
}
"""Degrees beside those of a schedule, of context and of expert parallelism."""
ENCODER = {"DP": {}, "FSDP": {"data_parallel_shard_degree": -1}, "SP": {"tp": 2}, "TP": {"tp": 2}, "PP": {"pp": 2}}
SHARDED = {"FSDP", "FSDP x TP"}
"""Of these, those for which it counts when gathered parameters are let go."""
ASSIGNMENTS = {
    "as planned": None,
    "random": RandomAssignment(0, most=3),
    "deferred": Deferred(2),
    "deferred, split": Deferred(2, split=True),
}
TOKENS = ("contiguous", "zigzag", "lpt", "balanced")
FACTORS = {
    "schedule": (*POLICIES, "bubble_fill"),
    "llm": tuple(LLM),
    "encoder": tuple(ENCODER),
    "reshard": ("default", "always", "never"),
    "trained": tuple(TRAINED),
    "context": (1, 2),
    "experts": (False, True),
    "packed": (False, True),
    "ranks": ("disjoint", "colocated", "overlapping"),
    "permuted": (False, True),
    "recomputed": ("none", "selective", "attention", "full"),
    "assignment": tuple(ASSIGNMENTS),
    "encoders": (1, 2),
    "tied": (False, True),
    "key_heads": (2, 1),
}


RECOMPUTED = {"selective": 'mode = "selective"', "full": 'mode = "full"'}
RECOMPUTED["attention"] = 'mode = "selective"\nsave_ops = ["aten.scaled_dot_product_attention"]'


def degrees(row):
    """Those of the LLM; experts are spread over two ranks of data parallelism."""
    found = dict(LLM[row.get("llm", "one rank")])
    if row.get("context") == 2:
        found["context_parallel_degree"] = 2
    if row.get("schedule", "sequential") != "sequential":
        found["pp"] = 2
    if row.get("experts"):
        found |= {"expert_parallel_degree": 2} | ({} if "fsdp" in found else {"data_parallel_replicate_degree": 2})
    return found


def size(row):
    """Ranks of the LLM."""
    return math.prod(degree for name, degree in degrees(row).items() if name != "expert_parallel_degree")


def allowed(row):
    """Whether a recipe can have these values, and fits four ranks."""
    return not (
        size(row) > (2 if row.get("ranks") == "disjoint" else 4)
        or (row.get("experts") and row.get("packed") is False)  # experts get no padding
        or (row.get("schedule") == "bubble_fill" and row.get("ranks") == "disjoint")  # no gaps to fill
        or (row.get("reshard", "default") != "default" and row.get("llm", "FSDP") not in SHARDED)
        or (row.get("reshard") == "always" and row.get("schedule") == "zero_bubble")  # refused
    )


def placed(row):
    """Ranks of the encoder and of the LLM."""
    count = size(row)
    if row["ranks"] == "disjoint":
        encoder, llm = [0, 1], [*range(2, 2 + count)]
    elif row["ranks"] == "colocated":
        encoder, llm = [*range(max(count, 2))], [*range(count)]
    else:
        encoder, llm = ([0, 1], [*range(1, 1 + count)]) if count < 4 else ([1, 2], [0, 1, 2, 3])
    if row["permuted"]:
        llm = llm[::-2] + llm[-2::-2]
    return [",".join(map(str, ranks)) for ranks in (encoder, llm)]


def recipe_of(number, row):
    """The recipe of a row, and who handles which sample."""
    encoder, llm = placed(row)
    reshard = f'\nfsdp_reshard_after_forward = "{row["reshard"]}"'
    sequence = "\nenable_sequence_parallel = true"
    keys = [sequence] if row["llm"] == "SP" else []
    if row["context"] == 2:
        keys.append(f'context_parallel_assignment = "{TOKENS[number % len(TOKENS)]}"')
    slices = row["schedule"] == "bubble_fill" and row["ranks"] == "colocated" and row["encoder"] != "PP"
    given = recipe(
        row["schedule"],
        table("vision", encoder, **ENCODER[row["encoder"]]) + reshard + sequence * (row["encoder"] == "SP"),
        "\n".join([table("llm", llm, **degrees(row)) + reshard, *keys]),
        f"[activation_checkpoint]\n{RECOMPUTED.get(row['recomputed'], '')}",
        f"[debug]\nseed = {number}",
        batch=4,
        extra=SLICES if slices else "",
        **{key: row[key] for key in ("trained", "tied", "experts", "encoders", "key_heads")},
    )
    return packed(given) if row["packed"] else given


def name(row):
    """What differs from the plainest row."""
    shown = ("schedule", "llm", "encoder", "trained", "ranks", "recomputed", "assignment")
    plain = ("all", "none", "as planned")
    words = [row[key] for key in shown if row[key] not in plain]
    words += [f"reshard {row['reshard']}"] if row["reshard"] != "default" else []
    words += [key for key in ("experts", "packed", "permuted", "tied") if row[key]]
    words += ["1 key head"] * (row["key_heads"] == 1)
    return ", ".join([*words, *(f"{row[key]} {key}" for key in ("context", "encoders") if row[key] == 2)])


SUMMED = ("llm", "context", "experts")
"""Factors that decide together over which axes a gradient is summed, and how."""
MOST = 8
"""The first rows, which hold 50% of all pairs; the others are `exhaustive`."""
ROWS = [
    pytest.param(number, row, id=name(row), marks=() if number < MOST else pytest.mark.exhaustive)
    for number, row in enumerate(covering_rows(FACTORS, allowed, together=[SUMMED]))
]


@pytest.mark.parametrize(("number", "row"), ROWS)
def test_pairs_of_features_equal_one_process(pool4, number, row):
    check(pool4, recipe_of(number, row), 2, policy=ASSIGNMENTS[row["assignment"]])


@pytest.mark.exhaustive
def test_triples_of_features_equal_one_process(pool4):
    for number, row in enumerate(covering_rows(FACTORS, allowed, 3)):
        try:
            check(pool4, recipe_of(number, row), 2, policy=ASSIGNMENTS[row["assignment"]])
        except Exception as error:
            error.add_note(name(row))
            raise
