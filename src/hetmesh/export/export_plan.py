"""What an export writes: which directories, which tensors in each under which names, and where their values come from.

Nothing is read but the headers of the source directories' files and the checkpoint's index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from hetmesh.checkpoint.saved_run import SavedRun
from hetmesh.errors import CheckpointError, RecipeError
from hetmesh.export import llava
from hetmesh.formatting import listed
from hetmesh.models import Adapter, check_weights, pretrained_of
from hetmesh.models.config_keys import hf
from hetmesh.models.split.whole_model import whole_model
from hetmesh.models.user.adapters import UserAdapter
from hetmesh.models.weights.build import build_on_meta
from hetmesh.models.weights.load import own_tensors, stored_forms
from hetmesh.models.weights.lora import ADAPTER
from hetmesh.models.weights.model_forms import converters_of, saved
from hetmesh.models.weights.pretrained import Pretrained
from hetmesh.models.weights.save import NAME
from hetmesh.models.weights.stored_form import StoredBlock, StoredForm, by_stored, refitted, stored_shape
from hetmesh.recipe.hf_families import class_of
from hetmesh.recipe.recipe import Recipe
from hetmesh.resolve.directories import directory_of, up_to_llm
from hetmesh.resolve.modules import empty_module
from hetmesh.resolve.resolved import adapters_of

COMPUTED = ("max_position_embeddings", "rope_parameters", "sliding_window", "use_sliding_window")
"""Keys that change what is computed, and that a recipe may set otherwise than the directory of its weights."""

_N_NAMES = 8  # in a message


@dataclass(frozen=True)
class Origin:
    """Where the values of a tensor come from.

    Attributes:
        keys: names in the checkpoint: of the tensor and, where an adapter is merged into it, of A and B.
        scale: of the product of B and A.
        source: the directory that has the tensor, where the checkpoint does not.
    """

    keys: tuple[str, ...]
    scale: float = 0.0
    source: Pretrained | None = None


@dataclass(frozen=True)
class Regrouped:
    """A tensor of `shape` whose `parts` are blocks of others: one expert's, where the run has all experts in one."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Origin, StoredBlock], ...]


@dataclass(frozen=True)
class Directory:
    """One directory.

    Attributes:
        place: its path inside the exported one; empty for that itself.
        tensors: by their names in the files.
        config: of config.json; None where there is none.
        source: the directory whose tokenizer and other files are copied.
        loads_with: the class that reads it; empty where only safetensors does.
        left_out: tensors that the class has and the run does not, since nothing in it reads them.
        write_others: writes what else belongs into the directory, and says what, as lines of text.
        file_name: of the weights, without their number and ending.
        has_dtype: whether config.json says the dtype of the weights.
    """

    place: str
    tensors: Mapping[str, Origin | Regrouped]
    config: Mapping[str, Any] | None = None
    source: Pretrained | None = None
    loads_with: str = ""
    left_out: tuple[str, ...] = ()
    write_others: Callable[[Path], Iterator[str]] | None = None
    file_name: str = NAME
    has_dtype: bool = True


@dataclass(frozen=True)
class Adapted:
    """One linear layer with an adapter: its FQN in the model of its directory, keys of A and B in the checkpoint."""

    name: str
    a: str
    b: str
    module: str


@dataclass(frozen=True)
class ExportPlan:
    """Directories to write, and adapters by the place of theirs; `note` says why modules are not one directory."""

    directories: tuple[Directory, ...]
    adapters: Mapping[str, tuple[Adapted, ...]]
    note: str = ""


def export_plan(run: SavedRun, *, merge: bool) -> ExportPlan:
    """What to write of a checkpoint.

    One directory where all modules up to the LLM come from one multimodal model of transformers: its tensors, all of
    them, under the names that they have there; or where they make a LLaVA. A directory inside of it for each module
    after the LLM. Else a directory per module.

    Args:
        merge: adapters are added to their weights; else weights are written without them.

    Raises:
        CheckpointError: the checkpoint has other tensors than the recipe's modules.
        RecipeError: the recipe's directories or data no longer exist.
    """
    recipe = run.recipe
    modules = recipe.modules.items()
    if any(pretrained_of(name, module) is None or module.model.startswith("diffusers") for name, module in modules):
        adapters: Mapping[str, Adapter] = run.resolved.adapters  # looks at the data, where sizes come from there
    else:
        adapters = adapters_of(recipe, vocab_size=0)
    parts = {name: _Part.of(run, name, adapters[name], merge) for name in recipe.modules}
    _check_complete(run, parts)
    read = up_to_llm(recipe)
    plan, together = ExportPlan((), {}), {name: parts[name] for name in read.modules}
    whole, names = directory_of(read), llava.llava_parts(read)
    note = llava.why_not_llava(read, adapters[names[llava.PROJECTOR]]) if names else ""
    if whole is not None:
        plan = _as_directory(read, whole, together)
    elif names and not note:
        plan = _as_llava(run, read, names, together)
    else:
        plan, together = replace(plan, note=f"not one directory of LLaVA: {note}" if note else ""), {}
    alone = {name: part for name, part in parts.items() if name not in together}
    directories = tuple(_as_module(recipe, name, part) for name, part in alone.items())
    loras = {name: part.adapted(name) for name, part in alone.items() if part.lora}
    return replace(plan, directories=(*plan.directories, *directories), adapters={**plan.adapters, **loras})


@dataclass(frozen=True, eq=False)
class _Part:
    """One module without weights, and where each of its tensors comes from.

    Attributes:
        origins: by name in the module without adapters; of tied tensors the first.
        aliases: the others -> the first.
        lora: keys of A and B in the checkpoint by FQN of the linear layer.
        shapes: of all that the checkpoint should have of it, by name there.
    """

    adapter: Adapter
    module: nn.Module
    origins: Mapping[str, Origin]
    aliases: Mapping[str, str]
    lora: Mapping[str, tuple[str, str]]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, run: SavedRun, name: str, adapter: Adapter, merge: bool) -> _Part:
        module, lora = empty_module(run.recipe, adapter, name), run.recipe.modules[name].lora
        own, aliases = own_tensors(module)
        shapes = {f"{name}.{key}": tuple(tensor.shape) for key, tensor in module.state_dict().items()}
        pairs = {}
        for key in sorted(shapes):
            if f".lora_A.{ADAPTER}." in key:
                layer = key.removeprefix(f"{name}.").partition(".lora_A.")[0]
                pairs[layer] = (key, key.replace(".lora_A.", ".lora_B."))
        origins = {}
        for key in own:
            layer, _, last = key.rpartition(".")
            if layer in pairs:
                added = pairs[layer] if merge and last == "weight" else ()
                scale = lora.alpha / lora.rank if lora is not None and added else 0.0
                origins[key] = Origin((f"{name}.{layer}.base_layer.{last}", *added), scale)
            else:
                origins[key] = Origin((f"{name}.{key}",))
        return cls(adapter, module, origins, aliases, pairs, shapes)

    def adapted(self, module: str, fqns: Mapping[str, str] | None = None) -> tuple[Adapted, ...]:
        """Its adapters; `fqns`: name of a tensor in the model of the directory by name in the module."""
        weights = {layer: f"{layer}.weight" if fqns is None else fqns[f"{layer}.weight"] for layer in self.lora}
        return tuple(Adapted(weights[at].removesuffix(".weight"), a, b, module) for at, (a, b) in self.lora.items())


def _check_complete(run: SavedRun, parts: Mapping[str, _Part]) -> None:
    """Raise CheckpointError unless the checkpoint holds the tensors of all modules, in their shapes, and no others."""
    shapes = {key: shape for part in parts.values() for key, shape in part.shapes.items()}
    saved = set(run.names)
    differences = (("missing", shapes.keys() - saved), ("of no module", saved - shapes.keys()))
    wrong = [f"{len(names)} {what}: {listed(sorted(names), _N_NAMES)}" for what, names in differences if names]
    for key, shape in shapes.items():
        if key in saved and run.shape(key) != shape:
            wrong.append(f"{key} is {list(run.shape(key))}, not {list(shape)}")
    if wrong:
        raise CheckpointError(f"checkpoint {run.path} does not fit its recipe: {'. '.join(wrong[:_N_NAMES])}")


def _as_directory(recipe: Recipe, whole: Pretrained, parts: Mapping[str, _Part]) -> ExportPlan:
    written: dict[str, Origin] = {}
    forms: dict[str, StoredForm] = {}
    fqns: dict[str, dict[str, str]] = {}
    for name, part in parts.items():
        _check_config(recipe, name, whole)
        fqns[name] = check_weights(part.adapter, part.module, whole)
        known = stored_forms(part.adapter, whole)
        named = whole.named(own_tensors(part.module)[0], part.adapter.checkpoint_names, known)
        for own, theirs in {**named, **fqns[name]}.items():
            first = part.aliases.get(own, own)
            if first in part.origins:  # else it is another module's, or nobody's
                written[theirs], forms[theirs] = part.origins[first], known[theirs]
    tensors = _as_stored(written, forms, whole)
    places = {theirs: tensors.get(theirs) or Origin((theirs,), source=whole) for theirs in whole.tensors}
    adapters: list[Adapted] = []
    if any(part.lora for part in parts.values()):
        inside = {theirs: ours for ours, theirs in whole_model(whole).checkpoint_names.items()}
        for name, part in parts.items():
            in_model = {own: inside[theirs] for own, theirs in fqns[name].items()}
            adapters += part.adapted(name, in_model)
    directory = Directory("", places, whole.config, whole, f"transformers.{class_of(whole.config)}")
    return ExportPlan((directory,), {"": tuple(adapters)} if adapters else {})


def _check_config(recipe: Recipe, name: str, whole: Pretrained) -> None:
    parts = [whole.config, *(part for part in whole.config.values() if isinstance(part, Mapping))]
    for key, value in recipe.modules[name].config.items():
        if key in COMPUTED and not any(part.get(key) == value for part in parts):
            raise RecipeError(
                f"modules.{name}.config.{key} = {value!r}: {whole.path}/config.json has another value, which an export "
                "would have too, and so compute something else; change it there and train again"
            )


def _as_llava(run: SavedRun, recipe: Recipe, names: Mapping[str, str], parts: Mapping[str, _Part]) -> ExportPlan:
    (at,) = (b.at for b in recipe.boundaries if b.at is not None)
    tower, llm = parts[names[llava.TOWER]], parts[names[llava.LLM]]
    configs: list[Any] = [tower.module.config, llm.module.config]
    config = llava.llava_config(run.resolved.source.placeholders[at], tower.adapter, *configs)
    model: Any = build_on_meta(SimpleNamespace(build=lambda: hf(llava.CLASS)(config)))
    stored = saved(model, own_tensors(model)[0]).names
    tensors, adapters = dict[str, Origin | Regrouped](), list[Adapted]()
    for prefix, name in names.items():
        made = _as_module(recipe, name, parts[name])
        fqns = {own: own if own.startswith("lm_head.") else prefix + own.removeprefix("model.") for own in made.tensors}
        tensors |= {stored[fqn]: made.tensors[own] for own, fqn in fqns.items()}
        adapters += parts[name].adapted(name, fqns)
    absent = tuple(name for name in stored.values() if name not in tensors)
    others, loads = partial(llava.write_processor, recipe, config), f"transformers.{llava.CLASS}"
    directory = Directory("", tensors, config.to_diff_dict(), None, loads, absent, others)
    return ExportPlan((directory,), {"": tuple(adapters)} if adapters else {})


def _as_module(recipe: Recipe, name: str, part: _Part) -> Directory:
    import transformers

    pretrained = pretrained_of(name, recipe.modules[name])
    if (saved_as := part.adapter.abilities.saved_as) is not None:
        directory = Directory(name, part.origins, saved_as.config, pretrained, saved_as.loads_with)
        return replace(directory, file_name=saved_as.file_name, has_dtype=False)
    if recipe.modules[name].model.startswith("hf_"):
        assert pretrained is not None
        names, known = check_weights(part.adapter, part.module, pretrained), stored_forms(part.adapter, pretrained)
        origins = {names[own]: origin for own, origin in part.origins.items()}
        stored = _as_stored(origins, {theirs: known[theirs] for theirs in origins}, pretrained)
        model = whole_model(pretrained)
        if model.towers and model.has_llm:  # a piece of a class, which nothing loads alone
            return Directory(name, stored)
        places = {theirs: stored.get(theirs) or Origin((theirs,), source=pretrained) for theirs in pretrained.tensors}
        return Directory(name, places, pretrained.config, pretrained, f"transformers.{class_of(pretrained.config)}")
    if not isinstance(part.module, transformers.PreTrainedModel) or isinstance(part.adapter, UserAdapter):
        return Directory(name, part.origins)
    kind: Any = type(part.module)
    config: Any = part.module.config
    saved_config = {**config.to_diff_dict(), "architectures": [kind.__name__]}
    whole = build_on_meta(SimpleNamespace(build=lambda: kind(config)))
    every = {} if whole is None else own_tensors(whole)[0]
    absent = sorted(every.keys() - part.origins.keys())
    package = "transformers" if hasattr(transformers, kind.__name__) else kind.__module__
    shapes = own_tensors(part.module)[0]
    tensors: dict[str, Origin | Regrouped] = dict(part.origins)
    if whole is not None and converters_of(kind, config):
        found = saved(whole, {own: every[own] for own in part.origins})
        forms = {own: refitted(found.forms[found.names[own]], shapes[own]) for own in part.origins}
        tensors = _as_stored(part.origins, forms)
    if absent and pretrained is not None:  # which the module has no use for
        there = pretrained.named(shapes, part.adapter.checkpoint_names)
        tensors |= {own: Origin((there[own],), source=pretrained) for own in absent if own in there}
        absent = [own for own in absent if own not in there]
    return Directory(name, tensors, saved_config, pretrained, f"{package}.{kind.__name__}", tuple(absent))


def _as_stored(
    origins: Mapping[str, Origin], forms: Mapping[str, StoredForm], source: Pretrained | None = None
) -> dict[str, Origin | Regrouped]:
    """The tensors that files get, by their names there; `forms` says in which form those of `origins` are stored.
    Raises RecipeError: the run has only a part of a tensor of `source`."""
    tensors: dict[str, Origin | Regrouped] = {}
    for name, blocks in by_stored(forms).items():
        if len(blocks) == 1 and forms[blocks[0][0]].is_whole:
            tensors[name] = origins[blocks[0][0]]
            continue
        shape = stored_shape(blocks)
        if shape is None or (source is not None and shape != source.tensors[name].shape):
            raise RecipeError(f"{source}: {name} holds more than the run has of it, so it cannot be written")
        tensors[name] = Regrouped(shape, tuple((origins[own], block) for own, block in blocks))
    return tensors
