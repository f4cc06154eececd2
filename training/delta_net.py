"""Gated DeltaNet layers (arXiv 2412.06464) over a prefix tree: state and convolution fork where the tree forks.

These layers have no attention that blocks could restrict. A token's past is a state, which is passed here from a
segment to its children, so that each segment is computed once and exactly. `training/policy_model.py` installs it in
the layers of the Qwen3.5 family; `segments` reach them as they reach attention.

Shape legend: T = tokens of the tree, C = channels of the convolution, K = its taps, H = value heads, D = size of a
head.
"""

import sys
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from training.attention_blocks import TreeLayout
from training.prefix_tree import Segment


def earlier_tokens(segments: Sequence[Segment], num_tokens: int, taps: int, device: torch.device) -> Tensor:
    """Return (K, T): for tap k the token k places before along the chain, `num_tokens` before the chain's start."""
    before = torch.arange(-1, num_tokens, device=device)[: num_tokens + 1]
    before[num_tokens] = num_tokens
    for segment in segments:
        before[segment.start] = num_tokens if segment.parent < 0 else segments[segment.parent].end - 1
    found = [torch.arange(num_tokens, device=device)]
    for _ in range(taps - 1):
        found.append(before[found[-1]])
    return torch.stack(found)


def tree_convolution(inputs_TC: Tensor, weight_CK: Tensor, earlier_KT: Tensor) -> Tensor:
    """Return (T, C): the causal depthwise convolution over each token's ancestors. The last tap is the token itself."""
    padded = torch.cat([inputs_TC, inputs_TC.new_zeros(1, inputs_TC.shape[1])])
    taps = len(earlier_KT)
    total = padded[earlier_KT[0]] * weight_CK[:, taps - 1]
    for tap in range(1, taps):
        total = total + padded[earlier_KT[tap]] * weight_CK[:, taps - 1 - tap]
    return total


def tree_delta_rule(
    rule: Any, segments: Sequence[Segment], query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> Tensor:
    """Return (1, T, H, D): the delta rule `rule` over each segment, started from its parent's last state."""
    parents = {segment.parent for segment in segments}
    states: dict[int, Tensor] = {}
    outputs = []
    for number, segment in enumerate(segments):  # parents come before their children
        part = slice(segment.start, segment.end)
        output, state = rule(
            query[:, part],
            key[:, part],
            value[:, part],
            g=g[:, part],
            beta=beta[:, part],
            initial_state=states.get(segment.parent),
            output_final_state=number in parents,
            use_qk_l2norm_in_kernel=True,
        )
        outputs.append(output)
        if number in parents:
            states[number] = state
    return torch.cat(outputs, 1)


def _layer_forward(
    self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **more: Any
) -> Tensor:
    """Replace the layer's forward if a `tree` is among the keywords; call the layer's own without one.

    If ranks share the tree, the hidden states are those of a rank's slice; convolution and states are computed for all
    tokens and the rank's share of the heads.
    """
    tree: TreeLayout | None = more.pop("tree", None)
    if tree is None:
        plain: Tensor = type(self).forward(self, hidden_states, cache_params, attention_mask, **more)
        return plain
    assert cache_params is None and hidden_states.shape[0] == 1, "a tree is one row and has no cache"
    ranks = tree.ranks
    qkv, gate, b, a = (
        project(hidden_states)[0] for project in (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
    )
    taps, a_log, dt_bias = self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias
    if ranks is not None:
        sizes = [self.key_dim, self.key_dim, self.value_dim]
        shares = ranks.to_heads([*torch.split(qkv, sizes, 1), b, a])
        num_heads = self.num_v_heads // ranks.size
        qkv, b, a = torch.split(shares, [sum(sizes) // ranks.size, num_heads, num_heads], 1)
        taps = torch.cat([ranks.own_share(one) for one in torch.split(taps, sizes)])
        a_log, dt_bias = ranks.own_share(a_log), ranks.own_share(dt_bias)
    outputs = _heads_forward(self, tree.segments, tree_inputs=(qkv, b, a), weights=(taps, a_log, dt_bias))
    if ranks is not None:
        outputs = ranks.to_tokens(outputs)
    normed = self.norm(outputs.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
    return self.out_proj(normed.reshape(1, -1, self.value_dim))  # type: ignore[no-any-return]


def _heads_forward(
    layer: Any, segments: Sequence[Segment], tree_inputs: tuple[Tensor, ...], weights: tuple[Tensor, ...]
) -> Tensor:
    """Return the states' outputs (T, values), for all heads or some.

    `tree_inputs`: projections of T tokens, of query, key and value side by side, and of b and a. `weights`: of the
    convolution, A_log and dt_bias.
    """
    qkv_TC, b, a = tree_inputs
    taps_CK, a_log, dt_bias = weights
    num_tokens = len(qkv_TC)
    earlier_KT = earlier_tokens(segments, num_tokens, layer.conv_kernel_size, qkv_TC.device)
    mixed_TC = functional.silu(tree_convolution(qkv_TC, taps_CK, earlier_KT))
    num_values = len(a_log) * layer.head_v_dim
    num_keys = (qkv_TC.shape[1] - num_values) // 2
    query, key, value = torch.split(mixed_TC[None], [num_keys, num_keys, num_values], -1)
    query, key = (part.reshape(1, num_tokens, -1, layer.head_k_dim) for part in (query, key))
    value = value.reshape(1, num_tokens, -1, layer.head_v_dim)
    decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias)
    repeats = layer.num_v_heads // layer.num_k_heads
    query, key = (part.repeat_interleave(repeats, dim=2) for part in (query, key))
    rule = sys.modules[type(layer).__module__].torch_chunk_gated_delta_rule
    return tree_delta_rule(rule, segments, query, key, value, decay[None], b.sigmoid()[None])[0].flatten(1)


def fork_states(model: nn.Module) -> None:
    """Make every Gated DeltaNet layer of `model` follow the segments that it is given."""
    for module in model.modules():
        if type(module).__name__ in ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"):
            module.forward = MethodType(_layer_forward, module)
