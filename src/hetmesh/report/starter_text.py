"""A first recipe as commented TOML: what lines mean that are likely to be changed, and why its layout is as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetmesh.formatting import counted, toml
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.records.metrics import amount
from hetmesh.report.plan_text import layout_lines
from hetmesh.resolve.init_recipe import Starter

_FIRST = ("job", "model", "modules", "parallelism", "balance", "data", "training", "activation_checkpoint", "optimizer")
ORDER = (*_FIRST, "lr_scheduler", "checkpoint", "validation", "metrics")
"""Tables in the order of a recipe; any others come after them."""

COMMENTS: Mapping[str, str] = {
    "job.dump_folder": "metrics, checkpoints and a copy of this recipe; every run takes a folder of its own",
    "model.hf_path": "stands for modules, tokenizer, processor and placeholders: `hetmesh check` prints them",
    "modules.*.activation_checkpoint": "none, or full: computes blocks again in the backward, which saves memory",
    "modules.*.trainable": "false: frozen; a list: of regular expressions, which find the names of what is trained",
    "modules.*.lr": "in place of that of [optimizer]",
    "parallelism.pipeline_parallel_schedule": "or 1F1B, Interleaved1F1B, zero_bubble, three_phase, bubble_fill",
    "parallelism.*.ranks": "processes; with GPUs, one each",
    "parallelism.*.data_parallel_replicate_degree": "replicas that take different samples",
    "parallelism.*.data_parallel_shard_degree": "FSDP: as replicas, each with a part of the weights",
    "parallelism.*.tensor_parallel_degree": "ranks that share each matrix",
    "parallelism.*.context_parallel_degree": "ranks that share the tokens of a sample",
    "parallelism.*.pipeline_parallel_degree": "ranks that share the layers",
    "parallelism.*.module_fqns_per_model_part": "layers of each stage",
    "balance.microbatch_sizes": "samples per lane of modules that take fewer at a time than the LLM",
    "balance.microbatch_shares": "microbatches that each lane takes whole",
    "data.source": "random tokens and images: give your own with `hetmesh init DIR --data FOLDER`",
    "data.num_workers": "processes per rank that load samples ahead",
    "data.on_bad_sample": "stop, or skip: leaves out what cannot be read, and counts it",
    "data.on_no_target": "samples without an assistant's turn are named and counted; or stop",
    "data.options.path": "conversations",
    "data.options.media_folder": "where relative names of images start",
    "data.options.validation_path": "held-out conversations",
    "training.local_batch_size": "samples at a time, per data-parallel coordinate of the LLM",
    "training.global_batch_size": "samples per optimizer step",
    "training.max_norm": "of the gradient over all modules; 0 does not clip",
    "training.mixed_precision_param": "what is computed in; parameters and optimizer state stay in float32",
    "optimizer.lr": "of all modules; [modules.<name>] lr is one of its own",
    "optimizer.name": 'AdamW, Adam, SGD or "package.module:Class"',
    "lr_scheduler.warmup_steps": "linear, from 0",
    "lr_scheduler.decay_type": "linear, sqrt or cosine",
    "checkpoint.enable": "the last step is always saved; the same command resumes a run that was killed",
    "checkpoint.interval": "steps",
    "validation.freq": "steps between two evaluations; 0: only after the last step",
    "metrics.log_freq": "steps between two lines of the console",
    "metrics.machine": "whose peak MFU refers to, and predictions",
}
"""By key, `*` for the name of a module."""

WIDTH = 120  # characters of a line


def starter_text(starter: Starter) -> str:
    """The recipe, with the layouts beside its own. Raises AssertionError: it does not say what the tables say."""
    order = dict.fromkeys((*ORDER, *starter.tables))
    tables = {name: starter.tables[name] for name in order if name in starter.tables}
    ranks = f"{counted(starter.problem.ranks, 'rank')} of {starter.problem.machine.name}"
    lines = [f"# Written by `hetmesh init` for {ranks}. Check it, look at it, train it:"]
    lines += [f"#     hetmesh {verb} RECIPE.toml" for verb in ("check", "explain", "train")]
    lines += ["# Any key can be overridden there: --training.steps 20", ""]
    for section, table in tables.items():
        if section == "parallelism":
            lines += [f"# {line}".rstrip() for line in _reason(starter)]
        lines += [*_table((section,), table, starter), *_hints(section, starter), ""]
    text = "\n".join(lines[:-1]) + "\n"
    assert parse_recipe(text) == parse_recipe("\n".join(_table((), tables, starter)))
    return text


def _reason(starter: Starter) -> Iterator[str]:
    problem, fastest = starter.problem, starter.found.fastest
    assert fastest is not None
    limit = f", of {amount(problem.limit)}B that a rank may hold" if problem.limit else ""
    yield f"Layout: the fastest of {starter.found.considered} by simulation, {fastest.plan.placement}. Predicted:"
    memory = f"{amount(fastest.peak_bytes)}B on the rank that holds most{limit}"
    yield f"{fastest.step_s:.3g} s per step of {problem.global_batch_size} samples, {memory}."
    if starter.tried:
        yield f"On {' and '.join(map(str, starter.tried))} ranks no layout holds the model."
    yield f"The best of each placement (`hetmesh plan RECIPE.toml --ranks {problem.ranks}` searches again):"
    yield from layout_lines(problem, starter.found)


def _hints(section: str, starter: Starter) -> Iterator[str]:
    """What might be written, too."""
    if section == "modules" or (section == "model" and "modules" not in starter.tables):
        yield "# `trainable = false` in a module's table freezes it; a table [modules.llm.lora] trains adapters in the"
        yield "# LLM; an empty table [modules.projector] makes the projector a module of its own, where that can be."
    if section == "data" and "validation" not in starter.tables and starter.tables["data"].get("source") is None:
        yield '# validation_path = "held_out.jsonl" # conversations for [validation]'
    if section == "checkpoint" and "validation" not in starter.tables:
        yield "# A table [validation] with freq = 100 evaluates on held-out samples: [data.options] validation_path"


def _table(path: tuple[str, ...], table: Mapping[str, Any], starter: Starter) -> Iterator[str]:
    """A table and those inside it, each under its header."""
    values = {k: v for k, v in table.items() if not isinstance(v, Mapping) or path[:1] == ("balance",)}
    if values:
        yield f"[{'.'.join(path)}]"
    for key, value in values.items():
        line = f"{key} = {toml(value)}"
        comment = _comment((*path, key), starter)
        yield f"{line} # {comment}" if comment and len(line) + len(comment) + 3 <= WIDTH else line
    for key, value in table.items():
        if key not in values:
            yield from ("", *_table((*path, key), value, starter)) if values else _table((*path, key), value, starter)
            values = values or {key: value}


def _comment(path: Sequence[str], starter: Starter) -> str:
    key = ".".join(path)
    if key == "training.seq_len":
        longest = f"the longest of those looked at has {starter.longest:,}"
        return f"tokens of the longest sample allowed, with images; {longest}"
    if key == "data.on_bad_sample" and starter.unreadable:
        return f"{starter.unreadable} of {starter.looked_at} samples looked at cannot be read: left out, and counted"
    if key == "data.on_no_target" and starter.without_target:
        return f"{starter.without_target} of {starter.looked_at} samples looked at add nothing to the loss; or stop"
    if key == "training.steps":
        steps, size = (starter.tables["training"][name] for name in ("steps", "global_batch_size"))
        return f"passes through {starter.samples:,} samples: {steps * size / starter.samples:.2g}"
    any_module = ".".join((path[0], "*", *path[2:]))
    return COMMENTS.get(key) or COMMENTS.get(any_module, "")
