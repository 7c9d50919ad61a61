"""The piece of a drawn recipe that has modules after its LLM, and several losses."""

from __future__ import annotations

from hypothesis import strategies as st

from support.recipe_draft import SINK, Draft, Table, sometimes

IMAGE, VALUES = [1, 8, 8], [2, 4]
"""Shapes of what is made."""


def generators(draw: st.DrawFn, draft: Draft) -> None:
    """A flow-matching transformer, a regression head, or both, of the same hidden states or of others; a connector
    before them, an encoder whose rows are the targets; and losses of the LLM and of encoders."""
    data = draft.tables["data"]
    if not data["source"].endswith(":RandomMedia") or ":" in draft.tables["modules"][SINK]["model"]:
        return
    if not draft.generators and sometimes(draw):
        return
    options, which = data["options"], draw(st.sampled_from(["flow", "head", "both", "both of one"]))
    if options["text_only"] == 1.0:  # which tells nobody of what shape they are
        options["text_only"] = 0.8
    if which != "head":
        flow(draw, draft, 8 if which == "both of one" else draw(st.integers(1, 4)))
    if which != "flow":
        at = "drawing" if which == "both of one" else "values"
        if at == "values":
            options["kinds"]["values"] = VALUES
        _module(draw, draft, "head", "mlp", {"out_features": 8 if at == "drawing" else 4}, at)
        losses = [{"kind": "mse"}, {"kind": "mse", "unit": "frames"}, {"kind": "support.losses:distances"}]
        table = draw(st.sampled_from(losses))
        units = {} if table["kind"] == "mse" else {"unit": draw(st.sampled_from(["items", "latents", "frames"]))}
        draft.table("modules", "head")["loss"] = {**table, **units, "weight": draw(st.sampled_from([1.0, 0.3]))}
    if sometimes(draw):
        kinds = ["cross_entropy", "support.losses:smoothed"]
        loss = {"kind": draw(st.sampled_from(kinds)), "unit": "tokens", "weight": draw(st.sampled_from([0.5, 0.0]))}
        draft.table("modules", SINK)["loss"] = loss
    readers = [name for name in draft.encoders if name != "autoencoder"]
    if readers and sometimes(draw):
        unit = draw(st.sampled_from(["items", "frames"]))
        name = draw(st.sampled_from(readers))
        draft.table("modules", name)["loss"] = {"kind": "support.losses:squares", "unit": unit, "weight": 0.1}


def flow(draw: st.DrawFn, draft: Draft, queries: int) -> None:
    """A drawer of images, or of an encoder's rows of them, which may replace the images' placeholders as well."""
    draft.tables["data"]["options"]["kinds"]["drawing"] = IMAGE
    layers = draw(st.integers(1, 3))
    encoded, read = sometimes(draw, 2), False
    if encoded:
        read = queries != 8 and draw(st.booleans())
        queries = 4 if read else queries
    config: Table = {
        "queries": queries,
        "hidden_size": draw(st.sampled_from([8, 12])),
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    if not encoded:
        config["patch_size"] = draw(st.sampled_from([4, 2]))
    _module(draw, draft, "drawer", "flow", config, "drawing")
    draft.table("modules", "drawer")["loss"] = {"kind": "flow_matching", "weight": draw(st.sampled_from([1.0, 0.7]))}
    draft.layers["drawer"] = ("embed", *(f"blocks.{i}" for i in range(layers)), "head")
    if not encoded:
        return
    tower = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 8}
    draft.table("modules")["autoencoder"] = {
        "model": "siglip",
        "config": {**tower, "patch_size": 4, "image_size": 8, "num_channels": 1},
        "trainable": draw(st.booleans()),
        "media": "drawing",
    }
    draft.heads["autoencoder"] = 4
    draft.layers["autoencoder"] = ("embeddings", "encoder.layers.0", "post_layernorm")
    boundaries = draft.tables["boundaries"]
    boundaries.append({"from": "autoencoder", "to": "drawer"})
    if read:
        draft.table("modules")["widen"] = {"model": "mlp"}
        draft.heads["widen"] = 4
        boundaries += [{"from": "autoencoder", "to": "widen"}, {"from": "widen", "to": SINK, "at": "drawing"}]


def _module(draw: st.DrawFn, draft: Draft, name: str, model: str, config: Table, at: str) -> None:
    """A module that reads hidden states, of any layer, directly or through a connector."""
    draft.table("modules")[name] = {"model": model, "config": config}
    draft.heads[name] = 4
    boundaries = draft.tables.setdefault("boundaries", [])
    to = name
    if sometimes(draw, 4):
        to = f"{name}_connector"
        draft.table("modules")[to] = {"model": "mlp", "config": {"out_features": draw(st.sampled_from([6, 10]))}}
        draft.heads[to] = 4
        boundaries.append({"from": to, "to": name})
    boundary = {"from": SINK, "to": to, "at": at}
    if sometimes(draw):
        boundary["layer"] = draw(st.sampled_from([layer for layer in draft.layers[SINK] if ".layers." in layer]))
    boundaries.append(boundary)
