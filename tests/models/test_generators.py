"""Modules after the LLM, one process: what they read, what they predict, without items, in stages, and drawn items."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hetmesh.errors import BoundaryError, RecipeError, SampleError
from hetmesh.graph.sample import MediaItem, SampleMeta
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.named.flow import FlowAdapter
from hetmesh.models.named.mlp import MlpAdapter
from hetmesh.models.user.make import make_user_adapter
from hetmesh.models.user.plan_probe import reason_not_compared
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.parallel.stage_views import PREVIOUS, view

CONFIG = {"queries": 3, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
ROWS = "llm.image_out"


def flow_request(**changes):
    given = {
        "name": "drawer",
        "model": "flow",
        "config": CONFIG,
        "media": "image_out",
        "media_shape": (2, 8, 8),
        "in_features": 5,
        "placeholders": {"llm": "image_out"},
    }
    return AdapterRequest(**{**given, **changes})


def samples_of(items, kind="image_out"):
    metas = [SampleMeta(str(i), 9, (MediaItem(kind, tuple(item.shape), 2, 3),)) for i, item in enumerate(items)]
    return [SimpleNamespace(id=str(i), media={kind: [item]}) for i, item in enumerate(items)], metas


def built(adapter, seed=0):
    torch.manual_seed(seed)
    return adapter.build().double()


def flow_call(adapter, items, seed=1):
    """A batch of a number of random items, and the rows that it is read with."""
    torch.manual_seed(seed)
    images = torch.randn(items, *adapter.media_shape).double()
    batch = adapter.collate(*samples_of(images)) if items else {"targets": torch.zeros(0, adapter.width)}
    noise = torch.randn(items * adapter.latents, adapter.width).double()
    batch |= {"noise": noise, "time": torch.rand(items).double()}
    return batch, {ROWS: torch.randn(items * adapter.queries, adapter.in_features).double().requires_grad_()}


def test_flow_reads_rows_and_patches_and_predicts_the_velocity():
    adapter = FlowAdapter.make(flow_request())
    assert (adapter.item_rows((2, 8, 8)), adapter.item_latents((2, 8, 8)), adapter.width) == (3, 4, 32)
    images = torch.arange(2 * 2 * 64.0).view(2, 2, 8, 8)
    targets = adapter.collate(*samples_of(images))["targets"]
    assert torch.equal(targets[5].view(2, 4, 4), images[1, :, :4, 4:])  # the second patch of the second image
    assert torch.equal(adapter.to_items(targets.view(2, 4, 32)), images)
    batch, inputs = flow_call(adapter, 2)
    found = adapter.forward(built(adapter), batch, inputs)
    assert found[""].shape == (8, 32)
    assert torch.equal(found["target"], batch["targets"] - batch["noise"])


def test_flow_without_items_gives_zero_gradients_to_every_parameter_and_to_what_feeds_it():
    adapter = FlowAdapter.make(flow_request())
    module, (batch, inputs) = built(adapter), flow_call(adapter, 0)
    found = adapter.forward(module, batch, inputs)
    assert (found[""].shape, found["target"].shape) == ((0, 32), (0, 32))
    found[""].sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any()
    assert inputs[ROWS].grad is not None


def gradients(module, loss):
    module.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("items", [0, 3])
def test_stages_of_flow_equal_the_whole(items):
    adapter = FlowAdapter.make(flow_request())
    module, (batch, inputs) = built(adapter), flow_call(adapter, items)
    whole = adapter.forward(module, batch, inputs)
    loss = (whole[""] - whole["target"]).square().sum()
    expected = gradients(module, loss) | {"rows": inputs.pop(ROWS).grad}
    _, inputs = flow_call(adapter, items)
    rows, given, of_stage = inputs[ROWS], inputs, batch
    for layers in (("embed",), ("blocks.0",), ("blocks.1", "head")):
        found = adapter.forward(view(module, adapter.layers(), layers), of_stage, given)
        if layers[-1] != "head":
            per_item = adapter.computed_rows((2, 8, 8)) + adapter.activation.per_item
            assert found.shape == (items * per_item, adapter.activation.features)
        given, of_stage = {PREVIOUS: found}, {}
    assert torch.equal(found[""], whole[""])
    assert torch.equal(found["target"], whole["target"])
    parts = gradients(module, (found[""] - found["target"]).square().sum()) | {"rows": rows.grad}
    for name, gradient in expected.items():
        torch.testing.assert_close(parts[name], gradient, rtol=1e-12, atol=1e-12, msg=name)


def test_every_gradient_of_flow_is_there_from_the_first_step():
    adapter = FlowAdapter.make(flow_request())
    module, (batch, inputs) = built(adapter), flow_call(adapter, 2)
    found = adapter.forward(module, batch, inputs)
    for name, gradient in gradients(module, (found[""] - found["target"]).square().sum()).items():
        if not name.endswith("k_proj.bias"):  # which moves all scores of a query alike
            assert gradient.norm() > 1e-6, name
    assert inputs[ROWS].grad.norm() > 1e-6


def test_latents_of_an_encoder_are_the_targets():
    encoder = SimpleNamespace(in_features=None, out_features=6, item_rows=lambda shape: 4)
    place = {"placeholders": {"llm": "image_out", "vae": None}, "config": {**CONFIG, "patch_size": 1}}
    assert FlowAdapter.make(flow_request(encoders={"vae": None}, **place)) is None
    adapter = FlowAdapter.make(flow_request(encoders={"vae": encoder}, **place))
    assert (adapter.width, adapter.item_latents((2, 8, 8))) == (6, 4)
    assert adapter.collate(*samples_of(torch.randn(2, 2, 8, 8))) == {}
    latents, noise = torch.randn(2, 8, 6).double()
    inputs = {ROWS: torch.randn(6, 5).double(), "vae": latents}
    found = adapter.forward(built(adapter), {"noise": noise, "time": torch.rand(2).double()}, inputs)
    assert torch.equal(found["target"], latents - noise)
    drawn = adapter.sample(built(adapter), inputs[ROWS][:3], (2, 8, 8), noise[:4], 2)
    assert drawn.shape == (4, 6)  # still to be decoded
    with pytest.raises(
        BoundaryError, match=r"'drawer' reads 3 rows of 'llm.image_out' and 4 targets per item, of widths 5 and 6"
    ):
        adapter.noised({"noise": noise, "time": torch.rand(2)}, {**inputs, "vae": latents[1:]})


def test_sampling_gives_the_image_that_was_trained_on():
    adapter = FlowAdapter.make(flow_request(media_shape=(1, 4, 4), config={**CONFIG, "patch_size": 2}))
    torch.manual_seed(0)
    module, rows, image = adapter.build(), torch.randn(3, 5), torch.randn(1, 4, 4)
    batch = adapter.collate(*samples_of(image[None].expand(64, -1, -1, -1)))
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    for _ in range(150):
        drawn = {"noise": torch.randn(64 * 4, 4), "time": torch.rand(64)}
        found = adapter.forward(module, batch | drawn, {ROWS: rows.repeat(64, 1)})
        optimizer.zero_grad()
        (found[""] - found["target"]).square().mean().backward()
        optimizer.step()
    assert adapter.abilities.sampling_steps == 20
    with torch.no_grad():
        drawn = adapter.abilities.sample(module, rows, (1, 4, 4), torch.randn(4, 4), 20)
    assert (drawn - image).abs().max() < 0.35


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": {**CONFIG, "patch_size": 3}}, r"config.patch_size: must divide 8, got 3"),
        ({"config": {**CONFIG, "num_attention_heads": 3}}, r"num_attention_heads: must divide 16, got 3"),
        ({"config": {**CONFIG, "queries": 0}}, r"config.queries: must be a positive integer, got 0"),
        ({"config": {**CONFIG, "image_size": 9}}, r"config.image_size: is 8 here, got 9"),
        ({"config": {**CONFIG, "heads": 3}}, r"config.heads: unknown key"),
        ({"config": {"queries": 3}}, r"config.hidden_size: must be a positive integer, got None"),
        ({"media_shape": (2, 8, 6)}, r"flow makes square images"),
        ({"media_shape": None}, r"'image_out' of the data has none"),
        ({"consumers": ("llm",)}, r"boundary from the LLM"),
        ({"placeholders": {"llm": "image_out", "other": None}}, r"at most one from an encoder"),
    ],
)
def test_flow_is_refused(changes, message):
    with pytest.raises(RecipeError, match=f"modules.drawer.*{message}"):
        FlowAdapter.make(flow_request(**changes))


def test_items_of_another_shape_are_refused():
    with pytest.raises(SampleError, match=r"'drawer' is configured to make 'image_out' of shape \(2, 8, 8\), got"):
        FlowAdapter.make(flow_request()).item_rows((1, 8, 8))


def head_request(**changes):
    given = {"name": "head", "model": "mlp", "config": {"out_features": 3}, "media": "pose", "in_features": 5}
    return AdapterRequest(**{**given, "placeholders": {"llm": "pose"}, **changes})


def test_an_mlp_without_consumers_predicts_the_rows_of_tensors():
    adapter = MlpAdapter.make(head_request())
    assert (adapter.out_features, adapter.width, adapter.in_features) == (None, 3, 5)
    assert [adapter.item_rows(shape) for shape in ((3,), (4, 3), (2, 4, 3))] == [1, 4, 8]
    assert adapter.item_latents((4, 3)) == 4
    items = [torch.randn(3), torch.randn(4, 3)]
    batch = adapter.collate(*samples_of(items, "pose"))
    assert torch.equal(batch["targets"], torch.cat([items[0][None], items[1]]))
    assert adapter.collate([], [])["targets"].shape == (0, 3)
    assert adapter.forward(adapter.build(), batch, {"llm.pose": torch.randn(5, 5)}).shape == (5, 3)
    with pytest.raises(SampleError, match=r"predicts 3 values per token \(modules.head.config.out_features\)"):
        adapter.item_rows((3, 4))
    with pytest.raises(RecipeError, match=r"modules.head.config.out_features: missing"):
        MlpAdapter.make(head_request(config={}))
    assert MlpAdapter.make(head_request(in_features=None)) is None


def test_what_flow_says_of_its_directory_makes_it_again(tmp_path):
    adapter = FlowAdapter.make(flow_request())
    (tmp_path / "config.json").write_text(json.dumps(adapter.abilities.saved_as.config))
    pretrained = Pretrained(tmp_path, "modules.drawer.initial_load_path")
    assert FlowAdapter.make(flow_request(config={}, pretrained=pretrained)).config == adapter.config
    with pytest.raises(RecipeError, match=r"condition_size: is 7 here, got 5"):
        FlowAdapter.make(flow_request(config={}, pretrained=pretrained, in_features=7))


class Head(nn.Module):
    """Of each query a row of the item."""

    queries = 4

    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, rows):
        return self.linear(rows)


class Flow(Head):
    flows, sampling_steps = True, 3
    tensor_parallel_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.up, self.down = nn.Linear(out_features, 6), nn.Linear(6, out_features)

    def forward(self, rows, noisy, time):
        return self.linear(rows) + self.down(self.up(noisy).tanh()) * time[:, None, None]


class Mixes(Head):
    def forward(self, rows):
        return self.linear(rows - rows.mean(0))


class WrongShape(Head):
    def forward(self, rows):
        return self.linear(rows)[:, :-1]


class Staged(Head):
    activation = 3

    def forward(self, rows, hidden=None):
        return super().forward(rows)


class NoQueries(Head):
    queries = None


def user_adapter(kind, **changes):
    given = {"model": f"{__name__}:{kind}", "config": {}, "media_shape": (4, 3)}
    return make_user_adapter(given["model"], flow_request(**{**given, **changes}))


def test_a_users_class_predicts_rows_of_items():
    adapter = user_adapter("Head")
    assert (adapter.reason_not_probed, adapter.abilities.draws, adapter.out_features) == ("", 0, None)
    assert (adapter.item_rows((4, 3)), adapter.item_latents((4, 3))) == (4, 4)
    items = torch.randn(2, 4, 3)
    batch, rows, module = adapter.collate(*samples_of(items)), torch.randn(8, 5), adapter.build()
    assert torch.equal(batch["targets"], items.view(8, 3))
    found = adapter.forward(module, batch, {ROWS: rows})
    assert torch.equal(found[""], module.linear(rows))
    assert torch.equal(found["target"], batch["targets"])
    none = adapter.forward(module, adapter.collate([], []), {ROWS: rows[:0]})
    none[""].sum().backward()
    assert none[""].shape == (0, 3)
    assert not module.linear.weight.grad.any()
    with pytest.raises(RecipeError, match=r"modules.drawer: WrongShape: .* prediction of shape .*, 4, 3\), got .*, 3,"):
        user_adapter("WrongShape")


def test_a_users_class_that_flows_reads_noise_and_times_and_draws():
    adapter = user_adapter("Flow")
    assert (adapter.reason_not_probed, adapter.abilities.draws, adapter.abilities.sampling_steps) == ("", 3, 3)
    module, drawn = adapter.build(), {"noise": torch.randn(8, 3), "time": torch.rand(2)}
    batch = adapter.collate(*samples_of(torch.randn(2, 4, 3))) | drawn
    found = adapter.forward(module, batch, {ROWS: torch.randn(8, 5)})
    assert torch.equal(found["target"], batch["targets"] - batch["noise"])
    assert adapter.abilities.sample(module, torch.randn(4, 5), (4, 3), torch.randn(4, 3), 3).shape == (4, 3)
    assert reason_not_compared(adapter, adapter.tensor_parallel_plan(), 2, 0, "plan") is None
    with pytest.raises(RecipeError, match="plan"):
        reason_not_compared(adapter, {"up": "colwise", "linear": "colwise"}, 2, 0, "plan")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Mixes", r"modules.drawer: Mixes mixes samples"),
        ("Staged", r"Staged declares `activation` or `token_sharded`"),
        ("NoQueries", r"modules.drawer.config.queries: missing"),
    ],
)
def test_a_users_class_is_refused(kind, message):
    with pytest.raises(RecipeError, match=message):
        user_adapter(kind)
