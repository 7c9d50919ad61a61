"""What tests of checkpoints share: a small model with an optimizer, all that a rank has to remember, and a gate."""

import threading

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hetmesh.boundary import World
from hetmesh.checkpoint import checkpointer, writing
from hetmesh.parallel.apply import Root
from hetmesh.recipe.recipe import parse_recipe
from hetmesh.training.optimizers import make_optimizers


def own(value):
    value = value.detach() if isinstance(value, torch.Tensor) else value
    value = value.to_local() if isinstance(value, DTensor) else value
    return value.clone() if isinstance(value, torch.Tensor) else value


def everything(root, optimizers, loader=None):
    """All that a rank has to remember, by the names that a checkpoint should use. Local parts of DTensors."""
    state = {f"model.{name}": own(value) for name, value in root.state_dict().items()}
    if optimizers is not None:
        names = {p: name for name, p in root.named_parameters()}
        (optimizer,), scheduler = optimizers[0].optimizers, optimizers[1].schedulers[0]
        for parameter, values in optimizer.state.items():
            state |= {f"optimizer.state.{names[parameter]}.{k}": own(v) for k, v in values.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                prefix = f"optimizer.param_groups.{names[parameter]}"
                state |= {f"{prefix}.{k}": v for k, v in group.items() if k not in ("params", "param_names")}
        state["lr_scheduler.last_epoch"] = scheduler.last_epoch
    if loader is not None:
        state |= {f"extra.{k}": v for k, v in loader.state_dict().items()}
    state[f"random.{World.current().rank}.cpu"] = torch.get_rng_state()
    return state


def different(one, other):
    return [k for k in {*one, *other} if not (k in one and k in other and equal(one[k], other[k]))]


def equal(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Halves(nn.Module):
    """Two layers, of which a step may use one."""

    def __init__(self, width=3):
        super().__init__()
        self.used, self.unused = nn.Linear(width, 1), nn.Linear(width, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, both):
        self.count += 1
        return self.used(x) + (self.unused(x) if both else 0)


def make(overrides=(), width=3, dtype=torch.float32):
    torch.manual_seed(1)
    root = Root([("llm", Halves(width).to(dtype))])
    recipe = parse_recipe('[modules.llm]\nmodel = "qwen3"', ("--training.steps", "6", *overrides))
    return root, make_optimizers(recipe, root)


def steps(root, optimizers, both):
    for use in both:
        optimizers[0].zero_grad()
        root.llm(torch.ones(2, root.llm.used.in_features, dtype=root.llm.used.weight.dtype), use).sum().backward()
        optimizers[0].step()
        optimizers[1].step()


class Gate:
    """While it is shut, nothing is written; in the body of `with`, it is there."""

    def __init__(self):
        self.open = threading.Event()

    def __enter__(self):
        self.write = checkpointer.write_file
        checkpointer.write_file = writing.write_file = lambda *args: (self.open.wait(60), self.write(*args))[1]
        return self

    def __exit__(self, *_):
        checkpointer.write_file = writing.write_file = self.write
        self.open.set()
