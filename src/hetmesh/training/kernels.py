"""Which of torch's kernels a process uses, for training and for what is measured on its behalf."""

from __future__ import annotations

import torch


def choose_attention(device: torch.device) -> None:
    """Keep cuDNN's attention out of this process, where `device` is a CUDA device.

    It makes a plan for every shape that it has not seen, which holds the host up for 3 ms in each forward and backward
    (H100, torch 2.11); ragged batches bring new shapes in every step.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
