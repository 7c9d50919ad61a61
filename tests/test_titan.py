"""Contracts with torchtitan: every name that `hetmesh._titan` takes from it, as it is used."""

import inspect

import torch
from torch import nn

from hetmesh import _titan


def parameters(function):
    return set(inspect.signature(function).parameters)


def optimizer(name):
    group = _titan.param_group_config()(pattern="^weight$", optimizer_name=name, optimizer_kwargs={"lr": 0.5})
    container = _titan.optimizers_container({name: getattr(torch.optim, name)})
    return container(container.Config(param_groups=[group]), model_parts=[nn.Linear(2, 1, bias=False)])


def test_optimizers_container_and_param_group_config():
    for name in ("SGD", "AdamW", "Adam"):
        (made,) = list(optimizer(name))
        assert type(made) is getattr(torch.optim, name)
        assert made.param_groups[0]["lr"] == 0.5


def test_lr_schedulers_container():
    config = _titan.lr_schedulers_container().Config(
        warmup_steps=2, decay_ratio=None, decay_type="linear", min_lr_factor=0.0
    )
    schedulers = config.build(optimizers=optimizer("SGD"), training_steps=4)
    (scheduler,) = schedulers.schedulers
    assert len(scheduler.lr_lambdas) == 1


def test_tensorboard_logger(tmp_path):
    logger = _titan.tensorboard_logger()(str(tmp_path), None)
    logger.log({"loss": 1.0}, 3)
    logger.close()
    assert list(tmp_path.iterdir())


def test_wandb_logger():
    made = _titan.wandb_logger()
    assert {"log_dir", "config_dict", "tag"} <= parameters(made)
    assert {"metrics", "step"} <= parameters(made.log)
    assert hasattr(made, "close")
