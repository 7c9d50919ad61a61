"""The tokenizer and processor files beside a tiny model's config, as a user has them.

The tokenizer splits text into bytes; its special tokens are those that the processor's class asks for, at the ids that
the config names. Image, video and audio processors are the family's own classes with sizes that fit the tiny towers.
What these rules do not find out is said by family in `processor_families.py`.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surveying.processor_families import FAMILIES, Family, valued
from surveying.tiny_config import make_tiny
from surveying.tower_sizes import at_path, rows_per_image, tower

ID_KEYS = re.compile(r"(.*)_token_(?:id|index)")
TOKEN = re.compile(r"<[^<>\s{}]+>|\[[A-Z_]+\]|\]<\][^\[\]]+\[>\[|\|[A-Z]+\|")
"""What is a special token among the texts in a processor's source."""
COMMON = {"pad": "<|padding|>", "bos": "<|bos|>", "eos": "<|eos|>", "unk": "<|unk|>"}
"""Tokens that every tokenizer has names for. (Of some families `<|pad|>` is a recording.)"""
ROWS = 4
"""A side of the largest image, in rows of the LLM; images come out between a quarter of it and this."""
FRAMES = 4


def tiny_directory(model_type: str, class_name: str, path: Path, original_form: bool = True) -> Any:
    """Write config, weights, tokenizer and processor of a tiny model with random weights into `path`.

    Args:
        original_form: whether tensors have the names that they have on the Hub.

    Returns:
        The model, in fp32.

    Raises:
        ValueError: with the reason why the family's processor cannot be made here, as `save_processor`.
        Exception: whatever transformers raises where the class cannot be made of a tiny config.
    """
    import torch
    import transformers

    if reason := _family(model_type).reason:
        raise ValueError(f"{model_type}: {reason}")
    errors = []
    for small, axes in ((True, False), (True, True), (False, False), (False, True)):
        torch.manual_seed(7)
        try:
            config = fit_config(model_type, make_tiny(default_config(model_type), small, axes))
            model = getattr(transformers, class_name)(config).eval()
        except Exception as error:
            errors.append(error)
            continue
        try:
            thinker(model)(input_ids=torch.arange(2, 9)[None])
        except (AttributeError, TypeError, ValueError):  # some want more than text
            pass
        except RuntimeError as error:  # keys of a default config do not suit each other
            errors.append(error)
            continue
        break
    else:
        raise errors[0]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path, save_original_format=original_form)
    if hasattr(model, "load_speakers"):
        torch.save({}, path / "spk_dict.pt")  # without which it does not load
    save_processor(model_type, config, path)
    return model


def thinker(model: Any) -> Any:
    """The part of it that reads tokens: of a model that also speaks, its thinker."""
    return getattr(model, "thinker", model)


def default_config(model_type: str) -> Any:
    """The config of the class with all of its towers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**{key: CONFIG_MAPPING[of]() for key, of in _family(model_type).parts.items()})


def fit_config(model_type: str, config: Any) -> Any:
    """`config`, in place, with what its processor needs and a tiny config lacks (ids of placeholders, lengths)."""
    for key, value in valued(_family(model_type).config, config).items():
        *folders, name = key.split(".")
        setattr(at_path(config, folders), name, copy.deepcopy(value))
    return config


def save_processor(model_type: str, config: Any, path: Path) -> None:
    """Write tokenizer, processor and chat template into the directory `path` of a model with `config`.

    Raises:
        ValueError: with the reason why the family's processor cannot be made here, or why none fits.
    """
    family = _family(model_type)
    if family.reason:
        raise ValueError(f"{model_type}: {family.reason}")
    processor_class = _processor_class(model_type, family)
    wanted = _wanted(processor_class) | dict(family.names)
    further = (*_literals(processor_class), *family.further)
    parts = {
        name: _part(name, model_type, config, family)
        for name in processor_class.get_attributes()
        if not name.endswith("tokenizer")
    }

    def made(ids: Mapping[str, int]) -> Any:
        tokenizers = {
            name: _tokenizer(config, wanted, further, ids)
            for name in processor_class.get_attributes()
            if name.endswith("tokenizer")
        }
        return processor_class(**parts, **tokenizers, **_options(processor_class, config, family))

    draft = made({})  # says which of its tokens are the config's
    ids = {}
    for key, number in _config_ids(config):
        text = family.ids.get(key) or wanted.get(key) or getattr(draft, key, None)
        text = getattr(text, "content", text)
        text = COMMON.get(key, text)
        ids[text if isinstance(text, str) else f"<|{key.removesuffix('_token')}|>"] = number
    processor = made(ids)
    most, has = max(processor.tokenizer.get_vocab().values()), config.get_text_config().vocab_size
    if most >= has:
        raise ValueError(f"{model_type}: the tokenizer has ids up to {most}, the vocabulary of the tiny model {has}")
    if family.template and getattr(processor, "chat_template", None) is None:
        processor.chat_template = chat_template(model_type, processor)
    processor.save_pretrained(path)


def placeholder(model_type: str, processor: Any, kind: str) -> str:
    """What a prompt says where an item of `kind` (image, video, audio) is, with what practice puts around it."""
    family = _family(model_type)
    token = family.said.get(kind, getattr(processor, f"{kind}_token", None))
    if token is None:
        raise ValueError(f"{type(processor).__name__} has no {kind}_token")
    return family.around.get(kind, "{}").format(token)


def kinds(processor: Any) -> tuple[str, ...]:
    """Of image, video and audio those that the processor takes."""
    makers = {"image": ("image_processor",), "video": ("video_processor",), "audio": ("feature_extractor",)}
    makers["audio"] += ("audio_processor",)
    return tuple(kind for kind, names in makers.items() if any(getattr(processor, n, None) is not None for n in names))


def chat_template(model_type: str, processor: Any) -> str:
    """Turns between `<|im_start|>` and `<|im_end|>`, items by the processor's own tokens."""
    of_kind = "".join(
        f"{{%- elif part.type == '{kind}' -%}}{{{{ {placeholder(model_type, processor, kind)!r} }}}}"
        for kind in kinds(processor)
    )
    return (
        "{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\\n' }}"
        "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
        "{%- if part.type == 'text' -%}{{ part.text }}" + of_kind + "{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{ '<|im_end|>\\n' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
    )


def _family(model_type: str) -> Family:
    return FAMILIES.get(model_type, Family())


def _processor_class(model_type: str, family: Family) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    name = PROCESSOR_MAPPING_NAMES.get(model_type) or PROCESSOR_MAPPING_NAMES.get(family.like)
    if name is None:
        raise ValueError(f"transformers has no processor class for {model_type}")
    return processor_class_from_name(name)


def _part(name: str, model_type: str, config: Any, family: Family) -> Any:
    from transformers.models.auto import feature_extraction_auto, image_processing_auto, video_processing_auto

    def listed(names: Mapping[str, Any], like: str = "") -> Any:
        return names.get(model_type) or names.get(like or family.like)

    if name == "image_processor":
        names = listed(image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES)
        found = names and (names.get("torchvision") or names.get("pil"))
        made = found and image_processing_auto.get_image_processor_class_from_name(found)
        options = made and image_options(made, config)
    elif name == "video_processor":
        names = listed(video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES)
        found = names and names.get("torchvision")
        made = found and video_processing_auto.video_processor_class_from_name(found)
        options = made and video_options(made, config)
    else:
        found = listed(feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES, family.audio_like)
        made = found and feature_extraction_auto.feature_extractor_class_from_name(found)
        options = made and audio_options(made, config)
    if not made:
        raise ValueError(f"transformers has no {name} class for {model_type}")
    return made(**(options | valued(getattr(family, name.split("_")[0].replace("feature", "audio")), config)))


def image_options(made: Any, config: Any) -> dict[str, Any]:
    """Arguments of an image processor's class such that images fit a tiny config, and make few rows."""
    vision = tower(config)
    patch, side, merge = vision.patch, vision.side, vision.merge or getattr(made, "merge_size", 0)
    found = {
        "encoder_patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": vision.temporal,
        "downsample_factor": vision.read("downsample_factor"),
        "pooling_kernel_size": vision.read("pooling_kernel_size"),
        "image_grid_pinpoints": vision.read("image_grid_pinpoints"),
        "max_patches": 4,
        "max_slice_nums": 3,
        "max_crops": 4,
        "max_num_tiles": 4,
        "max_tiles": 4,
    }
    options: dict[str, Any] = {key: value for key, value in found.items() if value and getattr(made, key, None)}
    if rows := rows_per_image(config):
        options["image_seq_length"] = rows
    if (old := getattr(made, "patch_size", None)) is not None and patch:
        options["patch_size"] = {"height": patch, "width": patch} if isinstance(old, dict) else patch
    sizes = set(getattr(made, "size", None) or ())
    unit = (patch or 1) * (merge or 1)
    if sizes == {"height", "width"} and side:
        options["size"] = {"height": side, "width": side}
    elif sizes == {"shortest_edge", "longest_edge"} and merge:
        options["size"] = {"shortest_edge": ROWS * unit**2, "longest_edge": ROWS**2 * unit**2}
    elif sizes == {"shortest_edge"} and side:
        options["size"] = {"shortest_edge": side}
    elif sizes == {"longest_edge"} and isinstance(getattr(made, "max_image_size", None), dict) and side:
        options |= {"size": {"longest_edge": 2 * side}, "max_image_size": {"longest_edge": side}}
    elif sizes == {"longest_edge"}:
        options["size"] = {"longest_edge": min(ROWS * unit, side or ROWS * unit)}
    if getattr(made, "crop_size", None) is not None and side:
        options["crop_size"] = {"height": side, "width": side}
    return options


def video_options(made: Any, config: Any) -> dict[str, Any]:
    """Arguments of a video processor's class: frames as small as images, and few of them."""
    options = image_options(made, config)
    for name, value in {"min_frames": 2, "max_frames": 2 * FRAMES}.items():
        if getattr(made, name, None) is not None:
            options[name] = value
    if (size := options.get("size")) and {"shortest_edge", "longest_edge"} <= size.keys():
        options["size"] = {key: FRAMES * value for key, value in size.items()}
    return options


def audio_options(made: Any, config: Any) -> dict[str, Any]:
    """Arguments of a feature extractor's class: as many bands as the tower wants."""
    audio = at_path(config, ["audio_config"], at_path(config, ["thinker_config", "audio_config"], None))
    names = inspect.signature(made.__init__).parameters
    bands = next((n for key in ("num_mel_bins", "n_mel_bins", "n_mels") if (n := getattr(audio, key, None))), None)
    options = {name: bands for name in ("feature_size", "num_mel_bins") if bands and name in names}
    if "chunk_length" in names and (positions := getattr(audio, "max_source_positions", None)):
        options["chunk_length"] = max(positions // 50, 1)  # seconds: hops of 10 ms, two of them a position
    return options


def _options(processor_class: Any, config: Any, family: Family) -> dict[str, Any]:
    """Arguments of the processor itself."""
    names = inspect.signature(processor_class.__init__).parameters
    vision = tower(config)
    rows = rows_per_image(config)
    found = {
        "patch_size": vision.patch,
        "spatial_merge_size": vision.merge,
        "img_size": vision.side,
        "num_additional_image_tokens": int(vision.has_class_token),
        "image_seq_len": rows,
        "image_seq_length": rows,
        "num_image_tokens": rows,
    }
    options = {key: vision.read(key) for key in names if not key.endswith("_token")}
    options = {key: value for key, value in options.items() if isinstance(value, int | float | str | list | tuple)}
    options |= {key: value for key, value in found.items() if key in names and value}
    return options | valued(family.processor, config)


def _config_ids(config: Any) -> Iterator[tuple[str, int]]:
    """Name without `_token_id`, and id, of every token that the config and its text part name."""
    seen: set[int] = set()
    config = getattr(config, "thinker_config", config)
    towers = (getattr(config, f"{kind}_config", None) for kind in ("vision", "audio"))
    for part in (config, config.get_text_config(), *(part for part in towers if part is not None)):
        for key, value in vars(part).items():
            if key.startswith("_"):
                continue
            name = key if key.endswith("_id") and "_token" not in key else None
            if match := ID_KEYS.fullmatch(key):
                name = f"{match[1]}_token" if match[1] not in COMMON else match[1]
            if key.endswith("_token_ids") and isinstance(value, list | tuple):
                yield from ((f"{key.removesuffix('_token_ids')}_{i}", number) for i, number in enumerate(value))
            first = value[0] if isinstance(value, list | tuple) and value else value
            if name and isinstance(first, int) and first >= 0 and first not in seen:
                seen.add(first)
                yield name, first


def _wanted(processor_class: Any) -> dict[str, str]:
    """Token by the tokenizer's attribute, for those that the class reads without asking whether it is there."""
    found: dict[str, str] = {}

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.IfExp | ast.If) and re.search(r"(has|get)attr\(", ast.unparse(node.test)):
            return
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("tokenizer", "self.tokenizer"):
            name = node.attr.removesuffix("_id")
            if name.endswith("_token") and not name.startswith("add_") and name.removesuffix("_token") not in COMMON:
                found.setdefault(name, f"<|{name.removesuffix('_token')}|>")
        for child in ast.iter_child_nodes(node):
            visit(child)

    for tree in _sources(processor_class):
        visit(tree)
    return found


def _literals(processor_class: Any) -> list[str]:
    """Special tokens among the texts of the class, such as `<|image_pad|>`."""
    found: dict[str, None] = {}
    for tree in _sources(processor_class):
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            text = node.value if isinstance(node, ast.Constant) and id(node) not in documentation else None
            if isinstance(text, str) and len(text) < 200:  # longer ones are templates
                found |= dict.fromkeys(TOKEN.findall(text))
    return list(found)


def _sources(processor_class: Any) -> Iterator[ast.AST]:
    from transformers import ProcessorMixin

    for each in processor_class.__mro__:
        if issubclass(each, ProcessorMixin) and not each.__name__.endswith("ProcessorMixin"):
            yield ast.parse(textwrap.dedent(inspect.getsource(each)))


def _tokenizer(config: Any, wanted: Mapping[str, str], further: tuple[str, ...], ids: Mapping[str, int]) -> Any:
    """Bytes, and special tokens: those of `ids` there, the others at the highest free ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    turns = ["<|im_start|>", "<|im_end|>"]
    special = list(dict.fromkeys([*ids, *wanted.values(), *further, *COMMON.values(), *turns]))
    of_bytes = sorted(pre_tokenizers.ByteLevel.alphabet())
    free = iter(sorted(set(range(len(special) + len(of_bytes) + max(ids.values(), default=0) + 1)) - set(ids.values())))
    vocabulary = {text: ids[text] for text in special if text in ids}
    vocabulary |= {text: next(free) for text in of_bytes}
    vocabulary |= {text: next(free) for text in special if text not in ids}
    vocabulary |= {f"<|unused_{i}|>": i for i in range(max(vocabulary.values())) if i not in set(vocabulary.values())}
    tokenizer = Tokenizer(models.BPE(dict(sorted(vocabulary.items(), key=lambda item: item[1])), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{key}_token": text for key, text in COMMON.items()},
        extra_special_tokens=dict(wanted),
        model_input_names=["input_ids", "attention_mask"],
    )
