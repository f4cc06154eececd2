"""Router replay: tokens pass the experts that the engine chose for them (R3, arXiv 2510.11370).

Engine and learner round differently, so that their routers choose other experts for a token whose scores are close, and
its logprob then differs by far more than by rounding. With replay the choice is the recorded one. The weights of the
chosen experts are still those of the learner's own router, so that it gets its gradient.

Shape legend: T = tokens of a bin, E = experts of a layer, K = those that a token passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from training.plan_types import TrainingSequence

REPLAY_ARCHITECTURES = frozenset({"Qwen3MoeForCausalLM", "Qwen3_5MoeForCausalLM"})
"""Architectures whose router takes the softmax of its logits first, and then the K largest."""
_ROUTERS = ("Qwen3MoeTopKRouter", "Qwen3_5MoeTopKRouter")


class RecordedExperts(NamedTuple):
    """`ids`: (T, layers, K), as the engine recorded them; `known`: bool (T,)."""

    ids: Tensor
    known: Tensor


class LayerRouter(NamedTuple):
    """The router of the layer `number`, counted from 0 over all layers of the model."""

    number: int
    router: Any


def why_no_replay(model: Any) -> str | None:
    """Return why routing cannot be replayed in this model of transformers, or None if it can."""
    name = type(model).__name__
    if not getattr(model.config, "num_experts_per_tok", None):
        return f"{name} has no experts"
    if name not in REPLAY_ARCHITECTURES:
        known = ", ".join(sorted(REPLAY_ARCHITECTURES))
        return f"{name} is not registered for router replay (registered: {known})"
    return None


def bytes_per_token(model: Any) -> int:
    """Return the size of one token's recorded experts; 0 for a model without experts."""
    settings = model.config
    chosen = getattr(settings, "num_experts_per_tok", None) or 0
    width = 1 if getattr(settings, "num_experts", 0) <= 256 else 2
    return int(settings.num_hidden_layers * chosen * width)


def install(model: Any) -> list[LayerRouter]:
    """Let the model's routers follow `replay`. Raises ValueError if its routing cannot be replayed."""
    if (reason := why_no_replay(model)) is not None:
        raise ValueError(f"training.router_replay: {reason}; leave it out")
    found = []
    for number, layer in enumerate(model.get_decoder().layers):
        router: Any = getattr(layer.mlp, "gate", None)
        if type(router).__name__ in _ROUTERS:  # other layers are dense
            router.recorded = None
            router.forward = MethodType(_router_forward, router)
            found.append(LayerRouter(number, router))
    return found


def require_same_experts(settings: Any, sequences: Sequence[TrainingSequence]) -> None:
    """Raise ValueError if experts were recorded with a model of another shape than that of these settings."""
    for one in sequences:
        if one.experts is None or not one.experts.known.any():
            continue
        layers, chosen = one.experts.ids.shape[1:]
        highest = int(one.experts.ids.max())
        expected = (settings.num_hidden_layers, settings.num_experts_per_tok)
        if (layers, chosen) != expected or highest >= settings.num_experts:
            raise ValueError(
                f"training.router_replay: rollout {one.rollout_id} has experts up to {highest}, {chosen} in each of "
                f"{layers} layers, and the model {settings.num_experts} experts, {expected[1]} in each of "
                f"{expected[0]} layers; it was sampled with another model"
            )


def replay(routers: Sequence[LayerRouter], experts: RecordedExperts | None) -> None:
    """Let the next forward pass choose these experts, and the backward pass, which may compute layers again.

    None: the routers choose by themselves.
    """
    for number, router in routers:
        router.recorded = None if experts is None else RecordedExperts(experts.ids[:, number], experts.known)


def _router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits (T, E), and the weights and ids (T, K) of the chosen experts."""
    recorded: RecordedExperts | None = self.recorded
    if recorded is None:
        own: tuple[Tensor, Tensor, Tensor] = type(self).forward(self, hidden_states)
        return own
    logits_TE = functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    scores_TE = logits_TE.softmax(-1, dtype=torch.float)
    own_TK = scores_TE.topk(self.top_k, dim=-1).indices
    ids_TK = torch.where(recorded.known[:, None], recorded.ids.long(), own_TK)
    weights_TK = scores_TE.gather(-1, ids_TK)
    if getattr(self, "norm_topk_prob", True):  # of Qwen3.5 always
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    return logits_TE, weights_TK.to(logits_TE.dtype), ids_TK
