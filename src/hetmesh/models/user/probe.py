"""Differential probes of a user's module: what it computes of everything at once must equal what it computes of each
piece, joined, in outputs and gradients.

| pieces | probe | tried for |
|---|---|---|
| each sample alone | `check_samples` | every module: lanes and microbatches group samples differently in every layout |
| samples in one row, without padding | `check_packing` | `packed_attention` |
| shares of the tokens | `check_token_shares` | `token_sharded` |
| tensor-parallel ranks | `plan_probe.py` | `tensor_parallel_plan` |

Layers that are known to mix samples are refused by their class (`models/module_shape.py`); this finds the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from hetmesh._torch_compat import TorchDispatchMode, has_gradient_hooks
from hetmesh.attention.context_attention import ContextAttention
from hetmesh.attention.packed_rows import PackedRows
from hetmesh.context import causal, join
from hetmesh.errors import BoundaryError, RecipeError
from hetmesh.graph.sample import SampleMeta
from hetmesh.models.adapter import AdapterRequest
from hetmesh.models.packing import pack_tokens
from hetmesh.models.user.adapters import (
    UserAdapter,
    UserEncoder,
    UserGenerator,
    UserItemsEncoder,
    UserLlm,
    sharded_layers,
)
from hetmesh.models.weights.build import build_module
from hetmesh.parallel.tensor_parallel import matching

MAX_PARAMETERS = 20_000_000
"""Of a module that is probed: a larger one takes more than a second, in every process of a job."""

_OUTPUT_TOLERANCE = 1e-9
_GRADIENT_TOLERANCE = 1e-3  # a module may compute in float32, which rounds sums over samples by their order

Call = tuple[Mapping[str, Any], Mapping[str, Tensor]]
"""Arguments of `adapter.forward` after the module: a batch, and rows by source."""

Forward = Callable[[nn.Module, Mapping[str, Any], Mapping[str, Tensor]], Tensor]


class NotProbed(Exception):
    """Why a module could not be probed."""


@contextmanager
def not_probed_if_it_fails(what: str) -> Iterator[None]:
    """Errors of a module for random inputs become NotProbed: training reports what is wrong for real ones."""
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        raise NotProbed(f"{what} failed: {type(error).__name__}: {error!s:.200}") from error


@dataclass
class ProbeRun:
    """One forward, and in grad mode a backward of its outputs' weighted sum.

    Attributes:
        parameters, inputs: gradients by name; empty without a backward.
        wrote_inputs: whether the forward changed its rows in place.
    """

    output: Tensor
    parameters: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    wrote_inputs: bool = False


def run(module: nn.Module, forward: Forward, call: Call, weights: Tensor | None = None) -> ProbeRun:
    """`forward` of one call. `weights`: of the first `len(output)` outputs in the sum; by default `_weights`."""
    batch, rows = call
    leaves = {source: given.detach().requires_grad_() for source, given in rows.items()}
    copies = {source: leaf.clone() for source, leaf in leaves.items()}
    module.zero_grad()
    output = forward(module, batch, copies)
    output = output[""] if isinstance(output, Mapping) else output
    wrote = any(not torch.equal(copies[source], leaf) for source, leaf in leaves.items())
    if not torch.is_grad_enabled():
        return ProbeRun(output, wrote_inputs=wrote)
    if output.requires_grad:
        weights = _weights(output) if weights is None else weights[: len(output)]
        (output * weights).sum().backward()
    trained = {name: _gradient(p) for name, p in module.named_parameters() if p.requires_grad}
    return ProbeRun(output.detach(), trained, {source: _gradient(leaf) for source, leaf in leaves.items()}, wrote)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense()


def run_pieces(module: nn.Module, forward: Forward, pieces: Sequence[Call], whole: ProbeRun) -> ProbeRun:
    """`forward` of each piece, joined: outputs and gradients of rows one after the other, summed over parameters."""
    weights, runs = _weights(whole.output), list[ProbeRun]()
    for call in pieces:
        runs.append(run(module, forward, call, weights))
        weights = weights[len(runs[-1].output) :]
    return ProbeRun(
        torch.cat([piece.output for piece in runs]),
        {name: torch.stack([piece.parameters[name] for piece in runs]).sum(0) for name in runs[0].parameters},
        {source: torch.cat([piece.inputs[source] for piece in runs]) for source in runs[0].inputs},
    )


def _weights(output: Tensor) -> Tensor:
    """Numbers that differ, and are the same in every run."""
    return torch.arange(output.numel()).cos().view_as(output).to(output.dtype)


def distance(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """The norm of the difference relative to `expected`'s, at least `floor`; 0 of zeros, infinite of other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    size, off = max(float(expected.norm()), floor), float((found - expected).norm())
    return off / size if size else off


def gradient_floor(gradients: Mapping[str, Tensor]) -> float:
    """The norm below which a gradient is compared with this one instead: a hundredth of that of all of them."""
    return 1e-2 * sum(float(gradient.norm()) ** 2 for gradient in gradients.values()) ** 0.5


def first_difference(whole: ProbeRun, joined: ProbeRun) -> tuple[str, float] | None:
    """What differs first, "" for the output or what the gradient is of, and by how much; None if nothing does."""
    off = distance(joined.output, whole.output, 1.0)
    if not off <= _OUTPUT_TOLERANCE:
        return "", off
    floor, joined_gradients = gradient_floor(whole.parameters), _gradients(joined)
    for name, gradient in _gradients(whole).items():
        off = distance(joined_gradients[name], gradient, floor)
        if not off <= _GRADIENT_TOLERANCE:
            return name, off
    return None


def _gradients(given: ProbeRun) -> dict[str, Tensor]:
    return given.parameters | {f"its input {source!r}": gradient for source, gradient in given.inputs.items()}


_DRAWS = {"rand", "randn", "randint", "normal", "uniform", "exponential", "log_normal", "cauchy", "random", "geometric"}


class SameDraws(TorchDispatchMode):
    """While it is entered torch draws 0.5 everywhere, lets every random event happen (so dropout keeps all), and draws
    the reverse as a permutation: what is decided for each sample is then the same whatever is computed with it, and
    what mixes samples still mixes them. What is not drawn by torch stays random."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_").removesuffix("_like")
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        out = func(*args, **(kwargs or {}))
        if name == "randperm":
            return out.sort(descending=True).values
        if name == "bernoulli":
            return out.fill_(1)
        if name in _DRAWS and out.numel():
            out.fill_(0.5 if out.is_floating_point() else out.flatten()[0])
        return out


def sample_calls(adapter: UserAdapter, vocab_size: int) -> tuple[Call, list[Call]]:
    """A call with several samples (two of different lengths for an LLM, three for others), and one with each alone."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(adapter, UserLlm):
        count, call = 2, _language_calls(adapter, vocab_size, generator)
    elif isinstance(adapter, UserGenerator):
        count, call = 3, _generator_calls(adapter, generator)
    else:
        kind, shape = "rows", tuple[int, ...]((adapter.in_features or 1,))
        if isinstance(adapter, UserItemsEncoder):
            kind, shape = "items", adapter.blank
        elif isinstance(adapter, UserEncoder):
            kind, shape = "media", adapter.media_shape
        count, inputs = 3, torch.randn(3, *shape, generator=generator, dtype=torch.float64)

        def call(chosen: list[int]) -> Call:
            if kind == "items":
                return {f"media.{i}": item for i, item in enumerate(inputs[chosen])}, {}
            return ({}, {"rows": inputs[chosen]}) if kind == "rows" else ({"media": inputs[chosen]}, {})

    return call(list(range(count))), [call([i]) for i in range(count)]


def _generator_calls(of: UserGenerator, generator: torch.Generator) -> Callable[[list[int]], Call]:
    """Calls with some of three items."""
    sizes = {"rows": (of.queries, of.in_features), "targets": (of.latents, of.width), "noise": (of.latents, of.width)}
    given = {key: torch.randn(3, *size, generator=generator, dtype=torch.float64) for key, size in sizes.items()}
    time = torch.rand(3, generator=generator, dtype=torch.float64)

    def call(chosen: list[int]) -> Call:
        flat = {key: tensor[chosen].flatten(0, 1) for key, tensor in given.items()}
        inputs = {"rows": flat.pop("rows")} | ({} if of.encoder is None else {of.encoder: flat["targets"]})
        return {**flat, "time": time[chosen]}, inputs

    return call


def _language_calls(adapter: UserLlm, vocab_size: int, generator: torch.Generator) -> Callable[[list[int]], Call]:
    """Calls with some of two samples: a row of each source at their beginning, two targets at their end."""
    placeholders = {at: vocab_size + i for i, at in enumerate(adapter.sources.values())}
    shortest = len(placeholders) + 3
    metas = [
        SampleMeta(str(i), n, targets=((n - 2, n),), rows=dict.fromkeys(adapter.sources, 1))
        for i, n in enumerate((shortest, shortest + 1))
    ]
    samples: list[Any] = []
    for meta in metas:
        tokens = torch.randint(1, vocab_size, (meta.tokens,), generator=generator)
        tokens[: len(placeholders)] = torch.tensor(list(placeholders.values()), dtype=torch.int64)
        samples.append(SimpleNamespace(id=meta.id, tokens=tokens, media={}))
    size = (2, adapter.in_features or 1)
    rows = {source: torch.randn(size, generator=generator, dtype=torch.float64) for source in adapter.sources}

    def call(chosen: list[int]) -> Call:
        some = [samples[i] for i in chosen], [metas[i] for i in chosen]
        batch = adapter.collate(*some, placeholders=placeholders)
        batch["input_ids"].clamp_(max=vocab_size - 1)  # placeholders too are tokens that the module knows
        return batch, {source: given[chosen] for source, given in rows.items()}

    return call


def check_samples(adapter: UserAdapter, example: nn.Module, request: AdapterRequest) -> str | None:
    """Whether what the module makes of a sample, or its gradients, depend on the samples beside it: in float64, with
    random weights, in training and in evaluation. What it draws is the same for every sample. Returns why it could not
    be tried, in training or in evaluation; None if it was."""
    if n_parameters(example) > MAX_PARAMETERS:
        return f"it has more than {MAX_PARAMETERS:,} parameters; try a small one of the class"
    if isinstance(adapter, UserLlm) and request.vocab_size < 2:
        return "its data has no tokens"
    modules = [build_module(adapter, request.name, 0, torch.float64) for _ in range(2)]
    where, notes = f"{request.key}: {type(example).__name__}", list[str]()
    with torch.random.fork_rng(devices=[]):
        for mode in ("training", "evaluation"):
            calls = sample_calls(adapter, request.vocab_size)
            for module in modules:
                module.train(mode == "training")
            try:
                with SameDraws():
                    _compare_samples(adapter, modules, *calls, mode, where)
            except NotProbed as reason:
                if isinstance(reason.__cause__, BoundaryError):  # of another shape than it must, whatever the input
                    raise RecipeError(f"{where}: {reason.__cause__}") from reason
                notes.append(f"in {mode} {reason}")
    return notes[0] if notes else None


def _compare_samples(
    adapter: UserAdapter, modules: Sequence[nn.Module], together: Call, apart: Sequence[Call], mode: str, where: str
) -> None:
    """`check_samples` in one of the modes, of two modules that should be equal."""

    def forward(module: nn.Module, *call: Any) -> Tensor:
        torch.manual_seed(0)
        return adapter.forward(module, *call)

    llm = isinstance(adapter, UserLlm)
    with torch.no_grad():
        with not_probed_if_it_fails("its forward of random inputs"):
            whole, again, other = (run(module, forward, together) for module in (modules[0], *modules))
        if whole.wrote_inputs:
            raise RecipeError(f"{where} writes into its input rows, which others read too: use rows * 2, not mul_")
        if not torch.equal(whole.output, again.output):
            raise NotProbed("two forwards of the same input differ: it draws numbers that are not torch's, or counts")
        if mode == "training" and not torch.equal(whole.output, other.output):
            raise RecipeError(
                f"{where}, constructed twice with the same seeds, computes something else, so replicas would: draw from"
                " torch, numpy.random or random, which are seeded, or give a generator a seed"
            )
        try:
            joined = run_pieces(modules[0], forward, apart, whole)
        except Exception as error:
            reason = f"{type(error).__name__}: {error!s:.200}"
            if llm:  # samples alone have other lengths
                raise NotProbed(f"its forward of one sample failed: {reason}") from error
            raise RecipeError(f"{where} fails on one sample, in {mode}, and not on several: {reason}") from error
    found = first_difference(whole, joined)
    if found is None and mode == "training":  # hooks, autograd functions and grad mode mix samples in other ways
        with torch.enable_grad(), not_probed_if_it_fails("its backward"):
            whole = run(modules[0], forward, together)
            joined = run_pieces(modules[0], forward, apart, whole)
        if hooked := [name for name, parameter in modules[0].named_parameters() if has_gradient_hooks(parameter)]:
            raise RecipeError(f"{where} sets a gradient hook on its parameter {hooked[0]}, which no layout keeps")
        found = first_difference(whole, joined)
    if found is None:
        return
    name, off = found
    if name:
        what, beside = f"gradient of {name} differs", "another sample"
        cause = "a hook or an autograd function normalise gradients, or take a mean over the batch"
    else:
        what = "logits of a sample differ" if llm else "rows of an item differ"
        beside = "a longer sample, or padding," if llm else "another item"
        cause = "it take a mean or a maximum over the batch, or attend to padding"
    raise RecipeError(
        f"{where} mixes samples in {mode}: the {what} by {off:.2g} when {beside} is computed with it. Lanes and "
        "microbatches group samples differently in every layout, so each layout would train something else: does "
        f"{cause}?"
    )


def check_packing(adapter: UserLlm, example: nn.Module, request: AdapterRequest) -> None:
    """Compare two samples, padded, with the same samples in one row: in float64, with random weights."""
    if n_parameters(example) > MAX_PARAMETERS or request.vocab_size < 2:
        return
    module = build_module(adapter, request.name, 0, torch.float64).eval()
    where = f"{request.key}: {type(example).__name__} declares `packed_attention`"
    (batch, rows), apart = sample_calls(adapter, request.vocab_size)
    lengths = [alone["input_ids"].shape[1] for alone, _ in apart]
    attention = ContextAttention(join([causal(length) for length in lengths]), name=f"{request.name} attention")
    in_one_row = PackedRows(pack_tokens(batch, lengths, ((0, sum(lengths)),)), attention)
    try:
        padded = run(module, adapter.forward, (batch, rows))
        joined = run_pieces(module, adapter.forward, [(in_one_row, rows)], padded)
    except Exception as error:
        raise RecipeError(
            f"{where}, but its forward of packed samples failed: {type(error).__name__}: {error}"
        ) from error
    if found := first_difference(padded, joined):
        name, off = found
        raise RecipeError(
            f"{where}, but its {f'gradients of {name}' if name else 'logits'} of two samples in one row differ by "
            f"{off:.2g} from those of the same samples, padded: attention must be hetmesh.attention.attend(..., batch),"
            ' and positions batch["position_ids"]'
        )


class _Nothing(nn.Module):
    """Stands for a part that gets all tokens."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(hidden)


def check_token_shares(adapter: UserAdapter, example: nn.Module, request: AdapterRequest) -> None:
    """Compare the layers of `token_sharded` on all tokens with the same on shares of them, with random weights.

    With sequence parallelism parts of a layer with rowwise linears get all tokens, all else a share: they are left out.
    """
    where = f"{request.key}: {type(example).__name__} declares `token_sharded`"
    styles = {name: style for pattern, style in adapter.plan.items() for name in matching(example, pattern)}
    parents = {name.rpartition(".")[0] for name, style in styles.items() if style == "rowwise"}
    layers = sharded_layers(adapter.layers(), adapter.abilities.token_sharded)
    if not any(f"{parent}.".startswith(f"{layer}.") for parent in parents for layer in layers):
        raise RecipeError(f"{where}, but none of {list(layers)} has a rowwise linear in its tensor_parallel_plan")
    if both := [layer for layer in layers if layer in parents]:
        raise RecipeError(f"{where}, but {both} themselves get all tokens: put them into a layer around them")
    if n_parameters(example) > MAX_PARAMETERS:
        return
    module = build_module(adapter, request.name, 0, torch.float64).eval()
    for parent in parents:
        owner, _, child = parent.rpartition(".")
        setattr(module.get_submodule(owner), child, _Nothing())
    for name in layers:
        layer = module.get_submodule(name)
        activation = adapter.abilities.activation
        width = activation.features if activation else next(layer.parameters()).shape[-1]
        required = sum(p.default is p.empty for p in inspect.signature(layer.forward).parameters.values())

        def forward(layer: nn.Module, _: Any, rows: Mapping[str, Tensor], more: int = required - 1) -> Tensor:
            return layer(rows["tokens"][None], *[None] * more)[0]

        tokens = torch.randn(6, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        try:
            whole = run(layer, forward, ({}, {"tokens": tokens}))
            joined = run_pieces(layer, forward, [({}, {"tokens": share}) for share in tokens.split(3)], whole)
        except Exception as error:
            raise RecipeError(f"{where}, but layer {name!r} failed on some tokens, [1, 3, {width}]: {error}") from error
        if first_difference(whole, joined):
            raise RecipeError(f"{where}, but outside of its parts with rowwise linears layer {name!r} mixes tokens")


def n_parameters(module: nn.Module) -> int:
    """Elements of all parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
