"""Tensor parallelism by plan: FQN patterns -> styles, as transformers' `base_model_tp_plan` names them.

| style | module | parameters | gradient on each tp rank |
|---|---|---|---|
| `colwise` | nn.Linear, output stays sharded | `Shard(0)` | of its shard, complete |
| `colwise_gather_output` | nn.Linear, output on every rank | `Shard(0)` | of its shard, complete |
| `rowwise` | nn.Linear, sharded input, output on every rank | weight `Shard(1)`, bias plain | complete |
| `replicated_with_grad_allreduce` | any module that works on a shard (norms of single heads) | plain | *partial* |
| `OwnRows` (`linear.py`) | a mixer by heads and its fused parts | plain; each rank uses some rows | *partial* |
| `KeyHeads` (`key_heads.py`) | an attention: ranks may share its key heads | none of its own | |
| not in the plan | works on what every rank has in full | plain | complete, and equal on every rank |

Partial gradients must be summed over tp once per step; a `Reduction` does. All others are
complete because every `colwise` layer sums the gradient of its input over tp, so that whatever comes before it gets a
whole gradient. A torch ParallelStyle may stand in a plan for a style name; it must then complete its gradients itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from hetmesh.errors import RecipeError
from hetmesh.parallel.linear import Colwise, ColwiseLinear, Entry, OwnRows, Rowwise

GRAD_ALLREDUCE = "replicated_with_grad_allreduce"
STYLES = ("colwise", "rowwise", "colwise_gather_output", GRAD_ALLREDUCE)


def apply_tensor_parallel(
    module: nn.Module, tp_mesh: DeviceMesh, plan: Mapping[str, str | ParallelStyle]
) -> tuple[str, ...]:
    """Shard `module` in place over a 1-D mesh. Every rank must hold the same full weights; nothing is sent. Returns
    FQNs of the parameters whose gradients are partial over tp."""
    if tp_mesh.ndim != 1:
        raise RecipeError(f"tensor parallelism takes one mesh axis, got {tp_mesh.mesh_dim_names or tp_mesh.ndim}")
    found = check_plan(module, plan)
    partial: list[str] = []
    for pattern, style in plan.items():
        for name in found[pattern]:
            target = module.get_submodule(name)
            if style == GRAD_ALLREDUCE:
                partial += [f"{name}.{p}" for p, _ in target.named_parameters()]
                continue
            if isinstance(style, OwnRows):
                partial += [f"{name}.{p}" for p in style.rows]
            parallelize_module(target, tp_mesh, _style(style), src_data_rank=None)
    _share_entries(module)
    return tuple(partial)


def check_plan(module: nn.Module, plan: Mapping[str, str | ParallelStyle]) -> dict[str, list[str]]:
    """The FQNs that each pattern of `plan` matches in `module`, whose weights are not looked at. Raises RecipeError if
    a pattern that matches no module, an unknown style, a style that does not suit the module."""
    found = {pattern: matching(module, pattern) for pattern in plan}
    for pattern, style in plan.items():
        _check(module, pattern, style, found[pattern])
    return found


def matching(module: nn.Module, pattern: str) -> list[str]:
    """FQNs of the submodules that match `pattern`, in which `*` stands for one name."""
    return [name for name, _ in module.named_modules() if matches(name, pattern)]


def matches(name: str, pattern: str) -> bool:
    """Whether an FQN matches `pattern`."""
    parts, wanted = name.split("."), pattern.split(".")
    return name != "" and len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


def within(name: str, *prefixes: str) -> bool:
    """Whether an FQN is one of `prefixes` or below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def style_name(style: str | ParallelStyle) -> str | None:
    """The name of a style, also of torch's plain `ColwiseParallel` and `RowwiseParallel`; None for others."""
    if not isinstance(style, ParallelStyle):
        return style
    layouts = type(style), getattr(style, "input_layouts", None), getattr(style, "output_layouts", None)
    replicated, last = (Replicate(),), (Shard(-1),)
    plain = {
        "colwise": (ColwiseParallel, replicated, last),
        "colwise_gather_output": (ColwiseParallel, replicated, replicated),
        "rowwise": (RowwiseParallel, last, replicated),
    }
    found = [name for name, known in plain.items() if known == layouts]
    return found[0] if found and getattr(style, "use_local_output", False) else None


def _check(module: nn.Module, pattern: str, style: str | ParallelStyle, found: list[str]) -> None:
    where = f"tensor parallel plan of {type(module).__name__}: {pattern!r}"
    if not found:
        names = sorted({name.rpartition(".")[2] for name, m in module.named_modules() if type(m) is nn.Linear})
        raise RecipeError(f"{where} matches no module; its linear layers are called {names}, write e.g. layers.*.name")
    if isinstance(style, ParallelStyle):
        return
    if style not in STYLES:
        raise RecipeError(f"{where} has unknown style {style!r}; valid are {list(STYLES)}, or a torch ParallelStyle")
    for name in found:
        target = module.get_submodule(name)
        if style != GRAD_ALLREDUCE and type(target) is not nn.Linear:
            raise RecipeError(f"{where}: style {style!r} needs an nn.Linear, {name!r} is a {type(target).__name__}")


def _style(style: str | ParallelStyle) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    return Rowwise() if style == "rowwise" else Colwise(gather_output=style == "colwise_gather_output")


def _share_entries(module: nn.Module) -> None:
    for parent in module.modules():
        siblings = [child for child in parent.children() if isinstance(child, ColwiseLinear)]
        if len(siblings) > 1:
            shared = Entry(siblings[0].group).share(parent)
            for child in siblings:
                child.enter = shared
