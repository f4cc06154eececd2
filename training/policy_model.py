"""The trained policy: a causal language model that returns the logprobs of given tokens.

Logits are computed at trained positions only, a chunk at a time; with a real vocabulary all of them would need far more
memory than the model.

Shape legend: B = rows of a bin, T = its length, H = hidden size, V = vocabulary, M = predicted tokens, m = those of one
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from training import router_replay
from training.attention_blocks import TreeLayout, group_blocks
from training.packing import Packing
from training.policy_inputs import PolicyInputs
from training.router_replay import LayerRouter
from training.sequence_parallel import SequenceRanks


def chunk_logits(device: torch.device) -> int:
    """Return the number of logits in memory at once: 256 MiB in float32, on a GPU 1 GiB.

    Each chunk adds to a gradient of the size of the whole output layer, which costs as much as some hundred rows; on a
    GPU 2**26 logits would be 441 rows of a vocabulary of 151,936.
    """
    return 1 << (28 if device.type == "cuda" else 26)


_DELTA_NETS = frozenset({"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"})
SEGMENT_ARCHITECTURES = _DELTA_NETS | {
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
}
"""Architectures that can share prefixes; each is tested for exactness.

Their tokens interact only in causal, unlimited attention through transformers' attention interface, or in Gated
DeltaNet layers, whose states fork (`training/delta_net.py`).
"""


class _ChosenLogprobs(torch.autograd.Function):
    """Logprob of the chosen token and entropy of the whole distribution, from hidden states, by chunks of logits.

    The backward pass computes the logits again, so that neither pass holds more than one chunk of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        target_M: Tensor,
        temperature: float,
        wide: bool,
        chunk_logits: int,
    ) -> tuple[Tensor, Tensor]:
        logprob_M, entropy_M = (torch.empty(len(target_M), device=hidden_MH.device) for _ in range(2))
        for part in _chunks(hidden_MH, weight_VH, chunk_logits):
            logprobs_mV = _logits(hidden_MH[part], weight_VH, temperature, wide).log_softmax(-1, torch.float32)
            logprob_M[part] = logprobs_mV.gather(-1, target_M[part, None])[:, 0]
            entropy_M[part] = -logprobs_mV.exp().mul_(logprobs_mV).sum(-1)
        ctx.save_for_backward(hidden_MH, weight_VH, target_M, logprob_M, entropy_M)
        ctx.set_materialize_grads(False)  # so that an entropy without a gradient is known without a look at zeros
        ctx.temperature = temperature
        ctx.wide = wide
        ctx.chunk_logits = chunk_logits
        return logprob_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden_MH, weight_VH, target_M, logprob_M, entropy_M = ctx.saved_tensors
        d_hidden_MH = torch.empty_like(hidden_MH)
        is_trained = ctx.needs_input_grad[1]  # with adapters it is frozen
        d_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if is_trained else None
        for part in _chunks(hidden_MH, weight_VH, ctx.chunk_logits):
            logits_mV = _logits(hidden_MH[part], weight_VH, ctx.temperature, ctx.wide)
            known = (target_M[part], logprob_M[part], entropy_M[part])
            d_logits_mV = _logit_gradients(logits_mV, *known, *(None if grad is None else grad[part] for grad in grads))
            if ctx.temperature != 1.0:
                d_logits_mV /= ctx.temperature
            if ctx.wide:
                d_hidden_MH[part] = (d_logits_mV @ weight_VH.float()).to(hidden_MH.dtype)
                if d_weight_VH is not None:
                    d_weight_VH.addmm_(d_logits_mV.T, hidden_MH[part].float())
            else:
                narrow_mV = d_logits_mV.to(weight_VH.dtype)
                d_hidden_MH[part] = narrow_mV @ weight_VH
                if d_weight_VH is not None:
                    d_weight_VH += narrow_mV.T @ hidden_MH[part]
        d_weight = None if d_weight_VH is None else d_weight_VH.to(weight_VH.dtype)
        return d_hidden_MH, d_weight, None, None, None, None


def _logit_gradients(
    logits_mV: Tensor,
    target_m: Tensor,
    logprob_m: Tensor,
    entropy_m: Tensor,
    grad_m: Tensor | None,
    grad_entropy_m: Tensor | None,
) -> Tensor:
    """Return the gradient (m, V) of the logits, in their dtype unless entropies have a gradient, then in float32.

    The pass over all logits is bound by memory, so it reads and writes them as rarely as PyTorch's operators allow.
    """
    if grad_m is None:
        grad_m = torch.zeros_like(logprob_m)
    if grad_entropy_m is not None:
        logprobs_mV = logits_mV.log_softmax(-1, torch.float32)
        scale_mV = (logprobs_mV + entropy_m[:, None]).mul_(grad_entropy_m[:, None]).add_(grad_m[:, None])
        d_logits_mV = logprobs_mV.exp_().mul_(scale_mV).neg_()
        return d_logits_mV.scatter_add_(-1, target_m[:, None], grad_m[:, None])
    probabilities_mV = logits_mV.softmax(-1, torch.float32)
    d_logits_mV = torch.mul(probabilities_mV, -grad_m[:, None], out=logits_mV)
    # The target's share is (1 - p) of its gradient, which rounding of p would lose if p is almost 1.
    return d_logits_mV.scatter_(-1, target_m[:, None], (grad_m * -logprob_m.expm1())[:, None].to(logits_mV.dtype))


class TokenScores(NamedTuple):
    """Logprobs of the predicted tokens and entropies of their distributions, float32 (M,) each."""

    logprobs: Tensor
    entropies: Tensor


def chosen_logprobs(
    hidden_MH: Tensor, weight_VH: Tensor, target_M: Tensor, temperature: float, wide: bool = False
) -> TokenScores:
    """Return logprobs of the targets and entropies of softmax(hidden weight^T / temperature).

    `wide` computes the logits in float32 throughout.
    """
    found = _ChosenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_MH, weight_VH, target_M, temperature, wide, chunk_logits(hidden_MH.device)
    )
    return TokenScores(*found)


def _chunks(hidden_MH: Tensor, weight_VH: Tensor, chunk_logits: int) -> list[slice]:
    size = max(1, chunk_logits // len(weight_VH))
    return [slice(start, start + size) for start in range(0, len(hidden_MH), size)]


def _logits(hidden_mH: Tensor, weight_VH: Tensor, temperature: float, wide: bool) -> Tensor:
    """Return the logits (m, V) over the temperature: in float32 if `wide`, or if they are divided, else as computed."""
    logits_mV = hidden_mH.float() @ weight_VH.float().T if wide else hidden_mH @ weight_VH.T
    return logits_mV if temperature == 1.0 else logits_mV.float() / temperature


class TrainablePolicy(nn.Module):
    """A causal language model of transformers; its parameters keep their names, behind the prefix `model.`.

    `own_call_from_pairs`: from how many pairs of a query and a key on a block of attention has a kernel call of its
    own; None: no block has. 0 is right for a CPU, which computes block by block. `sequence_ranks`: those that
    share a bin with this one, for which `training.policy_inputs` cuts it.
    """

    def __init__(self, model: Any, fp32_head: bool = False) -> None:
        super().__init__()
        self.model = model
        self.fp32_head = fp32_head
        self.routers: list[LayerRouter] = []
        self.own_call_from_pairs: int | None = 0
        self.sequence_ranks: SequenceRanks | None = None

    def forward(self, inputs: PolicyInputs, temperature: float) -> TokenScores:
        """Return, per prediction of the bin, the logprob of its target after its source, and the entropy there.

        Both are at the sampling temperature. Without segments, rows are padded on the right and attention is causal: no
        prefix holds padding, so no mask is needed. The `routers` choose recorded experts, also in the backward pass; it
        must come before the next forward pass. Ranks that share a bin all return the scores of the whole bin.
        """
        router_replay.replay(self.routers, inputs.experts)
        more: dict[str, Any] = {}
        joining = inputs.joining
        if inputs.segments is not None:
            groups = group_blocks(inputs.segments, inputs.ids.device, self.own_call_from_pairs)
            tree = TreeLayout(inputs.segments, groups, None if joining is None else joining.ranks)
            more = {"position_ids": inputs.positions, "tree": tree}
        hidden_BTH = self.model.get_decoder()(input_ids=inputs.ids, use_cache=False, **more).last_hidden_state
        hidden_MH = hidden_BTH.flatten(0, 1)[inputs.sources]
        weight_VH = self.model.get_output_embeddings().weight
        scores = chosen_logprobs(hidden_MH, weight_VH, inputs.targets, temperature, self.fp32_head)
        return scores if joining is None else TokenScores(*joining.join(*scores))

    def plain_logprobs(self, ids_T: Tensor) -> Tensor:
        """Return the logprobs (T - 1,) of a chain's tokens after the first, from the model's own logits."""
        logprobs_TV = self.model(input_ids=ids_T[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found: Tensor = logprobs_TV.gather(-1, ids_T[1:, None])[:, 0].clone()  # FSDP warns of outputs that are views
        return found


def why_no_segments(model: Any) -> str | None:
    """Return why this model of transformers cannot share prefixes exactly, or None if it can."""
    name = type(model).__name__
    settings = model.config
    if name not in SEGMENT_ARCHITECTURES:
        return (
            f"{name} is not registered for segment attention (registered: {', '.join(sorted(SEGMENT_ARCHITECTURES))})"
        )
    known = {"full_attention", "linear_attention"} if name in _DELTA_NETS else {"full_attention"}
    if not known.issuperset(getattr(settings, "layer_types", None) or []):
        return (
            f"{name} has layers of types {sorted(set(settings.layer_types))}; "
            f"only {' and '.join(sorted(known))} can be segmented"
        )
    if getattr(settings, "sliding_window", None) and getattr(settings, "use_sliding_window", True):
        return f"{name} has a sliding window of {settings.sliding_window} tokens"
    if getattr(settings, "attention_dropout", 0.0):
        return f"{name} has attention dropout {settings.attention_dropout}"
    if getattr(settings, "output_router_logits", False) and getattr(settings, "router_aux_loss_coef", 0.0):
        return (
            f"{name} has an auxiliary loss over routed tokens (output_router_logits), "
            "which depends on how often a token is computed"
        )
    return None


_ROTARY_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary positions whose frequencies transformers takes from the longest chain of a pass."""


class PositionsLimit(NamedTuple):
    """Rotary positions of this kind do not depend on other chains up to so many tokens."""

    kind: str
    num_tokens: int


def positions_limit(settings: Any) -> PositionsLimit | None:
    """Return the smallest limit, None if there is none. `settings`: transformers' of the text model."""
    found = getattr(settings, "rope_parameters", None) or {}
    limits = []
    for one in (found, *(each for each in found.values() if isinstance(each, dict))):  # of each type of layers
        if (kind := one.get("rope_type")) in _ROTARY_BY_LENGTH:
            limit = one.get("original_max_position_embeddings") or settings.max_position_embeddings
            limits.append(PositionsLimit(str(kind), int(limit)))
    return min(limits, key=lambda one: one.num_tokens, default=None)


def why_no_positions(settings: Any, num_tokens: int) -> str | None:
    """Return why a chain's logprobs would depend on the other chains of its pass, None if they do not.

    `settings`: transformers' of the text model. `num_tokens`: of the longest chain.
    """
    found = positions_limit(settings)
    if found is None or num_tokens <= found.num_tokens:
        return None
    return (
        f"its rotary positions ({found.kind}) depend on the longest chain of a pass if one has more than "
        f"{found.num_tokens} tokens; set sampling.max_context_tokens to {found.num_tokens} or less"
    )


def why_quantised(settings: Any) -> str | None:
    """Return why a directory's weights cannot be trained if they are quantised, None if they are not."""
    either = (settings, settings.get_text_config())
    found = next(filter(None, (getattr(one, "quantization_config", None) for one in either)), None)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    return f"its weights are quantised ({method or 'see quantization_config'}); use the model's bfloat16 weights"


def why_no_training(settings: Any, num_tokens: int) -> str | None:
    """Return why a model cannot be trained with chains of up to `num_tokens`, None if it can.

    `settings`: transformers' of the directory.
    """
    return why_quantised(settings) or why_no_positions(settings.get_text_config(), num_tokens)


def choose_packing(wanted: str, model: Any) -> Packing:
    """Return the packing; `auto` is `padded` if segments are not exact for this model.

    Raises ValueError if the wanted packing is not exact for it.
    """
    reason = why_no_segments(model)
    if reason and wanted not in ("auto", "padded"):
        raise ValueError(f"training.packing: {wanted} cannot be used: {reason}; use auto or padded")
    return "padded" if reason else wanted  # type: ignore[return-value]


def pair_cost(policy: TrainablePolicy) -> float:
    """Return the cost of attention to one earlier token, in units of one token's linear layers.

    Weights count as often as a token uses them: of a mixture of experts, only those of the chosen experts.
    """
    settings = policy.model.config
    linear = 2 * active_weights(policy)
    return float(4 * settings.num_attention_heads * head_size(settings) * attention_layers(settings) / linear)


def active_weights(policy: TrainablePolicy) -> int:
    """Return the number of weights that one token passes; a model without memory (`meta`) will do."""
    settings = policy.model.config
    used = getattr(settings, "num_experts_per_tok", None) or 1
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    available = next((found for name in names if (found := getattr(settings, name, None))), 1)
    parameters = list(policy.named_parameters())
    in_experts = sum(weights.numel() for name, weights in parameters if ".experts." in name)
    return sum(weights.numel() for _, weights in parameters) - in_experts + in_experts * used // available


def attention_layers(settings: Any) -> int:
    """Return the number of attention layers; the work of a recurrent layer grows with tokens, not with pairs."""
    kinds = getattr(settings, "layer_types", None)
    return int(settings.num_hidden_layers) if kinds is None else sum(kind != "linear_attention" for kind in kinds)


def head_size(settings: Any) -> int:
    return int(getattr(settings, "head_dim", None) or settings.hidden_size // settings.num_attention_heads)


@dataclass(slots=True, frozen=True)
class ForwardWork:
    """FLOPs of forward and backward, by the usual count: 6 per weight and token, 12 per layer, head dimension and pair.

    Frozen weights have no gradient of their own, so that they count 4; adapters, which are small, are left out.

    `body`: weights that a computed token passes; the embedding is a look-up. `head`: weights of the output
    layer, used by predicted tokens only. Recomputation (activation checkpointing, chunked logits) does not count.
    """

    body: int
    head: int
    per_pair: int
    per_weight: float = 6.0

    @classmethod
    def of(cls, policy: TrainablePolicy, is_frozen: bool = False) -> ForwardWork:
        """Count the weights of a policy, before it gets adapters and is sharded."""
        settings = policy.model.config
        embedding = policy.model.get_input_embeddings().weight
        head = policy.model.get_output_embeddings().weight
        body = active_weights(policy) - embedding.numel() - (0 if head is embedding else head.numel())
        per_pair = 12 * attention_layers(settings) * settings.num_attention_heads * head_size(settings)
        return cls(body, head.numel(), per_pair, 4.0 if is_frozen else 6.0)

    def flops(self, num_tokens: int, num_predictions: int, num_pairs: int) -> float:
        weights = self.body * num_tokens + self.head * num_predictions
        return self.per_weight * weights + float(self.per_pair) * num_pairs


_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bfloat16 FLOPs per second, by a part of the device's name."""


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's peak FLOPs per second; None for a CPU, an unknown card or float32."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for part, flops in _PEAK_FLOPS.items() if part in name), None)
