"""The model of the digits recipes as a plain loop over transformers modules, written without hetmesh: an oracle that
shares no code with what it judges. One sample at a time, no batch, no padding, no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RMSNorm
from transformers.models.siglip.configuration_siglip import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionModel


@dataclass(frozen=True)
class PlainSample:
    """One sample as its source gives it: an image is one token yet.

    Attributes:
        tokens: token ids.
        images: `[1, 8, 8]` each, in the order of their tokens.
        answer: index of the first token that is predicted; all from there on are.
    """

    tokens: tuple[int, ...]
    images: tuple[Tensor, ...]
    answer: int


class PlainModel(nn.Module):
    """SigLIP, two linear layers, Qwen3; parameters are called `vision.`, `projector.`, `llm.` and so on.

    Args:
        vision, llm: keys of SiglipVisionConfig and Qwen3Config.
        hidden: width between the two linear layers.
        image_token: the token that an image's rows replace.
        mask: `causal`; `isolated_media`, an image's tokens see that image and nothing else; or `bidirectional_media`,
            they see all of it and what comes before.
    """

    def __init__(
        self, vision: Mapping[str, Any], hidden: int, llm: Mapping[str, Any], image_token: int, mask: str = "causal"
    ) -> None:
        super().__init__()
        self.vision = SiglipVisionModel(SiglipVisionConfig(**vision, vision_use_head=False, attn_implementation="sdpa"))
        self.llm = Qwen3ForCausalLM(Qwen3Config(**llm, attn_implementation="sdpa"))
        self.projector = nn.Module()
        self.projector.linear_1 = nn.Linear(vision["hidden_size"], hidden)
        self.projector.linear_2 = nn.Linear(hidden, llm["hidden_size"])
        self.image_token, self.mask = image_token, mask
        self.theta = self.llm.config.rope_parameters["rope_theta"]
        self.to(torch.float64)
        _exact(self.llm, self.theta)

    def loss(self, question: PlainSample) -> Tensor:
        """The summed cross-entropy of the answer's tokens."""
        images = iter(question.images)
        pieces: list[Tensor] = []
        ids: list[int] = []
        items: list[int] = []  # which image a token is of, counted from 1; text counts on
        for token in question.tokens:
            rows = self.llm.model.embed_tokens(torch.tensor([token]))
            if token == self.image_token:
                seen = self.vision(pixel_values=next(images)[None].double()).last_hidden_state[0]
                projector: Any = self.projector
                rows = projector.linear_2(nn.functional.gelu(projector.linear_1(seen)))
            item = items[-1] + 1 if items else 1
            items += [item] * len(rows)
            pieces.append(rows)
            ids += [token] * len(rows)
        extra = len(ids) - len(question.tokens)
        embedded = torch.cat(pieces)[None]
        hidden = self.llm.model(inputs_embeds=embedded, attention_mask=self._visible(ids, items)).last_hidden_state[0]
        scores = torch.log_softmax(self.llm.lm_head(hidden), dim=-1)
        total = embedded.new_zeros(())
        for at in range(question.answer + extra, len(ids)):
            total = total - scores[at - 1, ids[at]]
        return total

    def _visible(self, ids: Sequence[int], items: Sequence[int]) -> Tensor:
        n = len(ids)
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        for i in range(n):
            if self.mask == "causal" or ids[i] != self.image_token:
                continue
            own = torch.tensor(items) == items[i]
            visible[i] = own if self.mask == "isolated_media" else own | visible[i]
        return visible[None, None]


def train(
    model: PlainModel, steps: Sequence[Sequence[PlainSample]], lr: float
) -> tuple[list[float], dict[str, Tensor | None], dict[str, Tensor]]:
    """SGD on the mean loss per answer token of each step's questions.

    Returns:
        The loss of every step, the gradients of the first, the parameters after the last.
    """
    losses: list[float] = []
    first: dict[str, Tensor | None] = {}
    for questions in steps:
        targets = sum(len(q.tokens) - q.answer for q in questions)
        total = torch.stack([model.loss(q) for q in questions]).sum() / targets
        model.zero_grad(set_to_none=True)
        if total.requires_grad:  # where there are images, or the LLM is trained
            total.backward()
        losses.append(total.item())
        if not first:
            first = {name: _gradient(p) for name, p in model.named_parameters()}
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-lr)
    return losses, first, {name: p.detach().clone() for name, p in model.named_parameters()}


def _gradient(p: nn.Parameter) -> Tensor | None:
    """Zeros for what is trained and no sample reached; None for what is frozen."""
    if not p.requires_grad:
        return None
    return torch.zeros_like(p) if p.grad is None else p.grad.clone()


def _exact(llm: Any, theta: float) -> None:
    """Replace what transformers computes in fp32 inside an fp64 Qwen3: norms and rotary angles."""

    def norm(module: Any, x: Tensor) -> Tensor:
        return module.weight * x / (x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()

    def rotary(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        width = llm.config.head_dim
        powers = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = torch.outer(position_ids[0].double(), theta**-powers).repeat(1, 2)[None]
        return angles.cos(), angles.sin()

    for module in llm.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = norm.__get__(module)
    llm.model.rotary_emb.forward = rotary
