"""What follows an LLM is exported as its library reads it: diffusers' own pipeline draws what hetmesh does."""

import pytest
import torch

from hetmesh.checkpoint.saved_run import saved_run
from hetmesh.export.export import export
from hetmesh.inference.drawn import drawn_item
from hetmesh.models.draws import EVALUATION, Draws
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.resolve.modules import loaded_module
from hetmesh.resolve.resolved import resolve
from hetmesh.training.one_process import OneProcess
from support import tiny_diffusers, tiny_vlms
from support.drawer_parts import BRIDGE, FLOW, LLM
from support.parity_cases import table
from support.tiny_exports import KEPT, save_now, tensors


def kept(folder, *parts):
    """A recipe that leaves a checkpoint of one step in `folder`."""
    training = KEPT.format(steps=1, folder=folder, more="")
    return parse_recipe("\n".join([LLM.replace('dtype = "float64"\n', training), *parts]))


def saved_as_exported(run, name, found):
    saved = run.read(key for key in run.names if key.startswith(f"{name}."))
    return saved.keys() == {f"{name}.{key}" for key in found} and all(
        torch.equal(value, saved[f"{name}.{key}"]) for key, value in found.items()
    )


@pytest.mark.slow
def test_diffusers_pipeline_draws_from_the_exported_directories_what_hetmesh_draws(pool, tmp_path):
    diffusers = pytest.importorskip("diffusers")
    for name in ("SD3Transformer2DModel", "AutoencoderKL"):
        tiny_diffusers.save(name, tmp_path)
    model = BRIDGE.format(folder=tmp_path, vae="AutoencoderKL", drawer="SD3Transformer2DModel")
    layout = table("llm", "0-1", tp=2), table("bridge", "0"), table("drawer", "0-1", fsdp=2), table("vae", "1")
    pool(2).run(save_now, kept(tmp_path / "run", model, *layout), 1, timeout=120)
    run = saved_run(tmp_path / "run")
    lines = export(run, tmp_path / "out")
    assert "  loads with diffusers.SD3Transformer2DModel.from_pretrained" in lines
    assert "  loads with diffusers.AutoencoderKL.from_pretrained" in lines

    parts = {"transformer": (diffusers.SD3Transformer2DModel, "drawer"), "vae": (diffusers.AutoencoderKL, "vae")}
    loaded = {}
    for part, (kind, name) in parts.items():
        loaded[part], told = kind.from_pretrained(tmp_path / "out" / name, output_loading_info=True)
        assert not any(told.values()), told
        assert saved_as_exported(run, name, loaded[part].state_dict())
    before = diffusers.SD3Transformer2DModel.from_pretrained(tmp_path / "SD3Transformer2DModel").state_dict()
    assert not torch.equal(before["proj_out.weight"], loaded["transformer"].state_dict()["proj_out.weight"])

    alone = OneProcess.load(run.recipe, run)
    source = alone.resolved.source
    index = next(i for i in range(20) if source.meta(i).media)
    ours = drawn_item(alone, source, index, seed=3)
    batch = alone.loader(source).drawn([index])
    (meta,) = (each.meta for each in batch)
    (tokens,) = (sample.tokens for sample in alone.loader(source).load(batch))
    latents = [16] * len(meta.media)
    noise = Draws(3, EVALUATION).of("drawer", [meta.id], [len(latents)], [sum(latents)], 4)["noise"][-16:].float()
    at = slice(meta.media[-1].position, meta.media[-1].stop)
    with torch.no_grad():
        hidden = alone.modules["llm"].model(input_ids=tokens[None]).last_hidden_state
        rows = alone.modules["bridge"](hidden[:, at])

    absent = [f"{kind}{i}" for kind in ("text_encoder", "tokenizer") for i in ("", "_2", "_3")]
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    pipeline = diffusers.StableDiffusion3Pipeline(scheduler=scheduler, **loaded, **dict.fromkeys(absent))
    pipeline.set_progress_bar_config(disable=True)
    theirs = pipeline(
        prompt_embeds=rows,
        pooled_prompt_embeds=torch.zeros(1, 6),
        latents=noise.T.view(1, 4, 4, 4),
        height=8,
        width=8,
        num_inference_steps=20,
        guidance_scale=1.0,
        output_type="pt",
    ).images[0]
    torch.testing.assert_close((ours / 2 + 0.5).clamp(0, 1), theirs, rtol=1e-4, atol=1e-4)
    assert float(theirs.std()) > 0.02


@pytest.mark.slow
def test_a_directory_goes_back_with_what_follows_its_llm_inside(pool, tmp_path):
    path = tiny_vlms.save("llava", tmp_path)
    _, items = tiny_vlms.source_of(path)
    seen = '[[boundaries]]\nfrom = "vision"\nto = "llm"\nat = "image"\n'
    more = KEPT.format(steps=1, folder=tmp_path / "run", more=seen + FLOW)
    items = items.replace("kinds = { ", "kinds = { image_out = [1, 8, 8], ")
    given = parse_recipe(tiny_vlms.recipe_text(path, more, items))
    pool(1).run(save_now, given, 1, timeout=120)
    run = saved_run(tmp_path / "run")
    lines = export(run, tmp_path / "out")
    assert "  loads with transformers.LlavaForConditionalGeneration.from_pretrained" in lines
    assert saved_as_exported(run, "drawer", tensors(tmp_path / "out" / "drawer"))
    kind = type(tiny_vlms.build("llava"))
    exported, told = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values())
    assert not torch.equal(exported.lm_head.weight, kind.from_pretrained(path).lm_head.weight)


@pytest.mark.slow
def test_an_exported_flow_transformer_is_where_another_run_starts_from(pool, tmp_path):
    layout = table("llm", "0-1"), table("drawer", "0-1", tp=2)
    pool(2).run(save_now, kept(tmp_path / "run", FLOW, *layout), 1, timeout=120)
    run = saved_run(tmp_path / "run")
    export(run, tmp_path / "out")
    assert saved_as_exported(run, "drawer", tensors(tmp_path / "out" / "drawer"))
    config = FLOW[FLOW.index("[modules.drawer.config]") : FLOW.index("[modules.drawer.loss]")]
    place = f"initial_load_path = '{tmp_path}/out/drawer'\n"
    again = resolve(kept(tmp_path / "again", FLOW.replace(config, place)))
    assert again.adapters["drawer"] == run.resolved.adapters["drawer"]
    module = loaded_module(again.recipe, again.adapters["drawer"], "drawer")
    assert saved_as_exported(run, "drawer", module.state_dict())
