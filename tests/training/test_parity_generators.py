"""Modules after the LLM as ready-made models: every layout gives the losses and gradients of one process."""

import pytest

from hetmesh.boundary import World
from hetmesh.testing import parity
from support import tiny_diffusers
from support.drawer_parts import BRIDGE, DIFFUSERS, FLOW, HEAD, OWN, case
from support.parity_cases import table

CASES = {
    "flow, apart": case(FLOW, table("llm", "0"), table("drawer", "1")),
    "flow, colocated, FSDP 2": case(FLOW, table("llm", "0-1", tp=2), table("drawer", "0-1", fsdp=2)),
    "flow, TP 2": case(FLOW, table("llm", "0-1"), table("drawer", "0-1", tp=2)),
    "flow, PP 2": case(FLOW, table("llm", "0-1", tp=2), table("drawer", "0-1", pp=2)),
    "regression head, TP 2": case(HEAD, table("llm", "0"), table("head", "0-1", tp=2)),
    "a user's head and loss, TP 2": case(
        OWN.format(kind="Head", loss="support.user_generators:absolute_error"),
        table("llm", "0"),
        table("head", "0-1", tp=2),
    ),
    "a user's flow, FSDP 2": case(
        OWN.format(kind="Flow", loss="flow_matching").replace('unit = "frames", ', ""),
        table("llm", "0-1", tp=2),
        table("head", "0-1", fsdp=2),
    ),
    "both": case(
        FLOW.replace("queries = 3", "queries = 8"), HEAD, table("llm", "0"), table("drawer", "1"), table("head", "0-1")
    ),
}


FEW = ("FluxTransformer2DModel",)
OTHERS = sorted(tiny_diffusers.TRANSFORMERS.keys() - FEW)


def run(rank, recipe):
    return parity.run(recipe, World.current())


def judged(pool, recipe):
    expected = parity.reference(recipe)
    assert expected.of_modules[0].keys() > {"llm"}
    return parity.compare(expected, pool(2).run(run, recipe, timeout=120), 1e-10)


AGAIN = "flow, apart", "a user's flow, FSDP 2", "both"
"""Cases of which others cover all but the mix."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n in AGAIN)) for n in CASES])
def test_layouts_of_ready_made_generators(pool, name):
    assert judged(pool, CASES[name]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("drawer", [*FEW, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in OTHERS)])
def test_layouts_of_diffusers_transformers_with_a_frozen_autoencoder(pool, drawer, tmp_path):
    pytest.importorskip("diffusers")
    vae = "AutoencoderDC" if "Sana" in drawer else "AutoencoderKL"
    tiny_diffusers.save(drawer, tmp_path)
    tiny_diffusers.save(vae, tmp_path)
    model = DIFFUSERS.format(folder=tmp_path, vae=vae, drawer=drawer)
    for tables in (
        (table("llm", "0"), table("drawer", "1"), table("vae", "0-1")),
        (table("llm", "0-1", tp=2), table("drawer", "0-1", fsdp=2), table("vae", "0-1")),
    ):
        assert judged(pool, case(model, *tables)) < 1e-10


@pytest.mark.slow
def test_a_projector_between_llm_and_transformer(pool, tmp_path):
    pytest.importorskip("diffusers")
    for name in ("PixArtTransformer2DModel", "AutoencoderKL"):
        tiny_diffusers.save(name, tmp_path)
    model = BRIDGE.format(folder=tmp_path, vae="AutoencoderKL", drawer="PixArtTransformer2DModel")
    layout = table("llm", "0"), table("bridge", "0-1", tp=2), table("drawer", "0-1"), table("vae", "1")
    assert judged(pool, case(model.replace("queries = 3", "queries = 2"), *layout)) < 1e-10
