"""Transformers and autoencoders of diffusers by directory, compared with diffusers' own calls, and refusals."""

import json
from types import SimpleNamespace

import pytest
import torch

from hetmesh.errors import RecipeError
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.named.diffusion import DiffusersAdapter, VaeAdapter
from hetmesh.models.weights.build import build_empty
from hetmesh.models.weights.load import load_weights
from hetmesh.models.weights.pretrained import Pretrained
from support import tiny_diffusers

diffusers = pytest.importorskip("diffusers")
CONDITION, ROWS = tiny_diffusers.CONDITION, "llm.image_out"


def vae_request(path, **changes):
    given = {"name": "vae", "model": "diffusers_vae", "media": "image_out", "media_shape": (1, 8, 8)}
    pretrained = Pretrained(path, "modules.vae.initial_load_path")
    return AdapterRequest(**{**given, "consumers": ("drawer",), "pretrained": pretrained, **changes})


def drawer_request(path, **changes):
    given = {
        "name": "drawer",
        "model": "diffusers",
        "config": {"queries": 3},
        "media": "image_out",
        "media_shape": (1, 8, 8),
        "in_features": CONDITION,
        "placeholders": {"llm": "image_out", "vae": None},
        "encoders": {"vae": SimpleNamespace(in_features=None, out_features=4, item_rows=lambda shape: 16)},
        "pretrained": Pretrained(path, "modules.drawer.initial_load_path"),
    }
    return AdapterRequest(**{**given, **changes})


def loaded(adapter, request):
    module = build_empty(adapter, torch.float64)
    load_weights(adapter, module, request.pretrained)
    return module


@pytest.fixture(params=sorted(tiny_diffusers.TRANSFORMERS))
def drawer(request, tmp_path):
    asked = drawer_request(tiny_diffusers.save(request.param, tmp_path))
    adapter = DiffusersAdapter.make(asked)
    return adapter, loaded(adapter, asked)


def drawn_call(items):
    torch.manual_seed(1)
    rows, latents = torch.randn(3 * items, CONDITION).double(), torch.randn(16 * items, 4).double()
    inputs = {ROWS: rows.requires_grad_(), "vae": latents.requires_grad_()}
    return {"noise": torch.randn(16 * items, 4).double(), "time": torch.rand(items).double()}, inputs


def own_call(name, model, noisy, rows, sigma):
    """What diffusers' pipeline of the class gives the transformer for grids of latents."""
    pooled = {"pooled_projections": torch.zeros(len(rows), 6).double()}
    if name == "FluxTransformer2DModel":
        pipeline = diffusers.FluxPipeline
        packed = pipeline._pack_latents(noisy, len(noisy), 4, 4, 4)
        ids = pipeline._prepare_latent_image_ids(len(noisy), 2, 2, "cpu", torch.float64)
        given = {"timestep": sigma, "img_ids": ids, "txt_ids": torch.zeros(rows.shape[1], 3).double()} | pooled
        out = model(packed, encoder_hidden_states=rows, **given).sample
        return pipeline._unpack_latents(out, 4, 4, 1)
    if name in ("AuraFlowTransformer2DModel", "PRXTransformer2DModel"):
        return model(noisy, encoder_hidden_states=rows, timestep=sigma).sample
    extra = {"SD3Transformer2DModel": pooled, "PixArtTransformer2DModel": {"added_cond_kwargs": {}}}.get(name, {})
    return model(noisy, encoder_hidden_states=rows, timestep=1000 * sigma, **extra).sample[:, :4]


def test_velocities_are_those_of_diffusers_own_transformer(drawer, tmp_path):
    adapter, module = drawer
    assert adapter.abilities.draws == 4
    assert (adapter.item_rows((1, 8, 8)), adapter.item_latents((1, 8, 8)), adapter.width) == (3, 16, 4)
    batch, inputs = drawn_call(2)
    found = adapter.forward(module, batch, inputs)
    name = adapter.model_class.__name__
    model = adapter.model_class.from_pretrained(tmp_path / name).double()
    at = batch["time"].repeat_interleave(16)[:, None]
    noisy = ((1 - at) * batch["noise"] + at * inputs["vae"]).view(2, 4, 4, 4).permute(0, 3, 1, 2)
    theirs = -own_call(name, model, noisy, inputs[ROWS].view(2, 3, CONDITION), 1 - batch["time"])
    torch.testing.assert_close(found[""], theirs.permute(0, 2, 3, 1).reshape(32, 4), rtol=1e-9, atol=1e-9)
    assert torch.equal(found["target"], inputs["vae"] - batch["noise"])


def test_no_items_give_zero_gradients_to_every_parameter(drawer):
    adapter, module = drawer
    assert set(adapter.layers()) <= {name for name, _ in module.named_modules()}
    batch, inputs = drawn_call(0)
    found = adapter.forward(module, batch, inputs)
    assert found[""].shape == found["target"].shape == (0, 4)
    (found[""].sum() + found["target"].sum()).backward()
    assert not [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert all(given.grad is not None for given in inputs.values())


@pytest.mark.parametrize("name", sorted(tiny_diffusers.AUTOENCODERS))
def test_latents_are_scaled_as_in_diffusers_pipelines_and_decoded_again(name, tmp_path):
    request = vae_request(tiny_diffusers.save(name, tmp_path))
    adapter = VaeAdapter.make(request)
    assert (adapter.item_rows((1, 8, 8)), adapter.out_features) == (16, 4)
    module, images = loaded(adapter, request), torch.randn(2, 1, 8, 8).double()
    assert not any(parameter.requires_grad for parameter in module.parameters())
    rows = adapter.forward(module, {"media": images}, {})
    model = adapter.model_class.from_pretrained(tmp_path / name).double()
    with torch.no_grad():
        encoded = model.encode(images)
        raw = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        theirs = (raw - (model.config.get("shift_factor") or 0)) * model.config.scaling_factor
        torch.testing.assert_close(rows, theirs.permute(0, 2, 3, 1).reshape(32, 4), rtol=1e-9, atol=1e-9)
        decoded = adapter.decode(module, rows[16:], (1, 8, 8))
        torch.testing.assert_close(decoded, model.decode(raw[1:]).sample[0], rtol=1e-9, atol=1e-9)
    assert adapter.forward(module, {"media": images[:0]}, {}).shape == (0, 4)


def test_an_item_is_drawn_by_diffusers_scheduler(tmp_path):
    request = drawer_request(tiny_diffusers.save("SD3Transformer2DModel", tmp_path))
    adapter = DiffusersAdapter.make(request)
    module, (batch, inputs) = loaded(adapter, request), drawn_call(1)
    with torch.no_grad():
        found = adapter.sample(module, inputs[ROWS], (1, 8, 8), batch["noise"], 5)
        at_once = super(DiffusersAdapter, adapter).sample(module, inputs[ROWS], (1, 8, 8), batch["noise"], 1)
        one = adapter.sample(module, inputs[ROWS], (1, 8, 8), batch["noise"], 1)
    assert found.shape == (16, 4)
    torch.testing.assert_close(one, at_once, rtol=1e-6, atol=1e-6)  # its first sigma is that of pure noise, too
    assert (found - one).abs().max() > 1e-3


def test_images_without_an_autoencoder_are_their_own_latents(tmp_path):
    path = tiny_diffusers.save("SD3Transformer2DModel", tmp_path, in_channels=1, out_channels=1)
    alone = {"placeholders": {"llm": "image_out"}, "encoders": {}}
    adapter = DiffusersAdapter.make(drawer_request(path, **alone))
    assert (adapter.item_latents((1, 8, 8)), adapter.width) == (64, 1)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("SD3Transformer2DModel", {"config": {}}, r"config.queries: must be a positive integer, got None"),
        ("SD3Transformer2DModel", {"config": {"heads": 2}}, r"config.heads: unknown key"),
        (
            "SD3Transformer2DModel",
            {"config": {"queries": 3, "timestep_scale": 0}},
            r"timestep_scale: which timestep is",
        ),
        ("SD3Transformer2DModel", {"media_shape": (1, 8, 12)}, r"16 latents of width 4 of an image \(1, 8, 12\)"),
        ("AutoencoderKL", {}, r"AutoencoderKL does not read \['hidden_states'"),
    ],
)
def test_what_does_not_fit_is_refused(name, changes, message, tmp_path):
    with pytest.raises(RecipeError, match=message):
        DiffusersAdapter.make(drawer_request(tiny_diffusers.save(name, tmp_path), **changes))


def test_what_needs_more_is_refused_by_name(tmp_path):
    path = tiny_diffusers.save("FluxTransformer2DModel", tmp_path, guidance_embeds=True)
    with pytest.raises(RecipeError, match=r"FluxTransformer2DModel needs \['guidance_embeds'\], too"):
        DiffusersAdapter.make(drawer_request(path))
    config = json.loads((path / "config.json").read_text())
    for name, message in (("Lumina2Transformer2DModel", "encoder_attention_mask"), ("Flux", "got 'Flux'")):
        (path / "config.json").write_text(json.dumps({"_class_name": name}))
        with pytest.raises(RecipeError, match=message):
            DiffusersAdapter.make(drawer_request(path))
    (path / "config.json").write_text(json.dumps(config | {"guidance_embeds": False}))
    assert DiffusersAdapter.make(drawer_request(path, in_features=None)).in_features == CONDITION  # for a projector
    assert DiffusersAdapter.make(drawer_request(path, encoders={"vae": None})) is None
    with pytest.raises(RecipeError, match=r"modules.drawer.initial_load_path: missing; give a directory of diffusers"):
        DiffusersAdapter.make(drawer_request(path, pretrained=None))
    with pytest.raises(RecipeError, match=r"FluxTransformer2DModel is no autoencoder"):
        VaeAdapter.make(vae_request(path))
