"""The backward of one stage, whole or in two parts. The autograd graph ends at the stage's inputs, which are leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from hetmesh._torch_compat import COMPILED, REENTRANT, split_backward
from hetmesh.parallel.activation_checkpoint import keeping


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Add the gradients of all leaves to their `.grad`. `gradients` are those of `outputs`; None for a loss."""
    pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])


_CAST = "ToCopyBackward0"  # autograd's name of what autocast makes of a parameter


class SplitBackward:
    """A backward in two parts: `input_part` now, `weight_part` whenever there is time.

    The weight part needs gradients that the input part passes through each layer; torch keeps them in between.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.groups: list[dict[str, Any]] = []

    def input_part(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]
    ) -> None:
        """Add the gradients of `leaves` to their `.grad`.

        torch cannot split the uses of a parameter that is used twice (in two layers, or by a layer that is called
        twice), nor a backward within the backward (a reentrant checkpoint), nor what torch.compile has made: then the
        whole backward happens here, and `weight_part` has nothing left to do. The same if an output depends on none of
        `leaves`, as that of an LLM does not depend on the rows of a microbatch without media: torch finds weights only
        on the way from leaves.
        """
        # An output that depends on nothing trained (a side output of a frozen layer) has no backward.
        pairs = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
        outputs, gradients = [out for out, _ in pairs], [gradient for _, gradient in pairs]
        torchs = split_backward()
        # per node those that read it, and the nodes on the way from leaves
        readers = torchs.construct_reverse_graph([out.grad_fn for out in outputs if out.grad_fn is not None])
        passed, _ = torchs.reverse_closure([get_gradient_edge(leaf).node for leaf in leaves], set(), readers)
        if uses_twice(outputs, self.parameters) or not (outputs and all(out.grad_fn in passed for out in outputs)):
            backward(outputs, gradients)
            self.parameters = []
            return
        output_gradients = [gradient for gradient in gradients if gradient is not None] or None  # none for a loss
        # torch detaches outputs in place, to free what only the input part needed; views cannot be detached in place
        detachable = [out.clone() if out._is_view() else out for out in outputs]
        with keeping(_nodes_of_weights(passed, readers)):
            _, self.groups = torchs.stage_backward_input(
                detachable, output_gradients, list(leaves), iter(self.parameters)
            )
        _materialise_gradients(leaves)

    def weight_part(self) -> None:
        """Add the gradients of the parameters to their `.grad`."""
        if not self.parameters:
            return
        split_backward().stage_backward_weight(iter(self.parameters), self.groups)
        _materialise_gradients(self.parameters)
        self.groups = []


def _materialise_gradients(tensors: Sequence[Tensor]) -> None:
    """Copy gradients that are expanded views, to which nothing can be added; torch does so only in a whole backward."""
    for tensor in tensors:
        if tensor.grad is not None and 0 in tensor.grad.stride():
            tensor.grad = tensor.grad.contiguous()


def _nodes_of_weights(passed: set[Any], readers: Mapping[Any, Sequence[Any]]) -> set[Any]:
    """Of the nodes on the way from leaves those that also read a parameter, or what was made of parameters alone: they
    run in both parts. All of them where several read the same of the latter: the weights' part then passes others."""
    if any(len(set(each)) > 1 for node, each in readers.items() if node not in passed):
        return passed
    return {node for before, each in readers.items() if before not in passed for node in each}


def uses_twice(outputs: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> bool:
    """Whether the autograd graph of `outputs` reaches one of `parameters`, or its cast, along several edges: autocast
    casts a parameter once, however often it is used. A reentrant checkpoint may use any of them, and a compiled
    function would run for inputs and again for weights, so both count."""
    waiting: list[Any] = [out.grad_fn for out in outputs if out.grad_fn is not None]
    targets, reached, seen = set(map(id, parameters)), set(), set(waiting)
    while waiting:
        if (after := waiting.pop()).name() in (REENTRANT, COMPILED):
            return True
        for node, _ in after.next_functions:
            function = node.next_functions[0][0] if node is not None and node.name() == _CAST else node
            leaf = id(getattr(function, "variable", None))  # of a node that adds to the gradient of a leaf
            if leaf in targets:
                if leaf in reached:
                    return True
                reached.add(leaf)
            elif node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    return False
