"""Modules after the LLM have its microbatches, whatever shares their ranks."""

from hetmesh.balance import BalanceOptions, plan_batch
from hetmesh.balance.co_located import leaders, led_modules
from hetmesh.graph import BoundarySpec, LossSpec, MediaItem, ModuleGraph, ModuleSpec, SampleMeta
from hetmesh.layout import MeshSpec

BOTH = MeshSpec.make([0, 1], dp_replicate=2)
GRAPH = ModuleGraph(
    (
        ModuleSpec("vision", BOTH, media="image", features=4),
        ModuleSpec("vae", BOTH, media="drawing", features=4),
        ModuleSpec("llm", MeshSpec.make([2], dp_replicate=1), features=4),
        ModuleSpec("drawer", BOTH, media="drawing", loss=LossSpec("flow_matching", unit="latents")),
    ),
    (
        BoundarySpec("vision", "llm", "image"),
        BoundarySpec("llm", "drawer", "drawing", "drawing"),
        BoundarySpec("vae", "drawer"),
    ),
)


def sample(i):
    rows = {"vision": 1 + 7 * i % 12, "vae": 4, "drawer": 6, "llm.drawing": 2}
    media = MediaItem("image", (1,), 0, rows["vision"]), MediaItem("drawing", (1,), rows["vision"], 2)
    return SampleMeta(str(i), rows["vision"] + 2 + 9 * i % 17, media, (), rows)


def test_an_encoder_goes_along_with_the_module_after_the_llm_that_it_feeds():
    assert leaders(GRAPH) == {"vision": "vision", "vae": "drawer", "llm": "llm", "drawer": "drawer"}
    assert led_modules(GRAPH) == ("vision", "drawer", "llm")


def test_modules_after_the_llm_have_its_microbatches():
    options = BalanceOptions("entrain", deferral=True, microbatch_sizes={"vision": 1})
    plan = plan_batch(GRAPH, [sample(i) for i in range(16)], 4, options)
    of = {name: plan.microbatch_of(name).tolist() for name in GRAPH.order}
    assert of["drawer"] == of["llm"] == of["vae"]
    assert of["vision"] != of["llm"]
