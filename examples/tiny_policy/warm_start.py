"""Train a new model to imitate the scripted expert: first without the expert's errors, then with them.

Reinforcement learning needs a policy that follows the protocol and solves some tasks.

Shapes: B transcripts, T tokens (padded on the right), V vocabulary.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.tiny_policy.conversation import TURN_END, Piece
from examples.tiny_policy.settings import GOOD, Recipe, TinyPolicySettings
from ratchet.progress import CountedLine

VOCABULARY_MULTIPLE = 64
UPDATES_PER_REPORT = 50
SECONDS_PER_REPORT = 15.0
PADDING = "<|endoftext|>"

Encoded = tuple[list[int], list[bool]]
Write = Callable[[Mapping[str, float]], list[Piece]]
"""Writes a transcript of a new task, of a kind drawn by the weights of a mix."""


def fresh_model(settings: TinyPolicySettings, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE,
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.num_heads,
        num_key_value_heads=settings.num_heads,
        head_dim=settings.head_dim,
        intermediate_size=settings.feed_forward_size,
        max_position_embeddings=settings.max_context_tokens,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=settings.initializer_range,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PADDING),
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def encode_pieces(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[Piece]) -> Encoded:
    """Return the ids and, parallel to them, whether the policy produces them. Pieces meet at token boundaries, so the
    ids equal those of the whole text."""
    ids: list[int] = []
    sampled: list[bool] = []
    for piece in pieces:
        encoded = tokenizer.encode(piece.text)
        ids += encoded
        sampled += [piece.sampled] * len(encoded)
    return ids, sampled


def pad_batch(batch: Sequence[Encoded], pad_id: int, context_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids_BT, weights_BT): weight 1 on the policy's tokens, `context_weight` on the rest, 0 on padding."""
    longest = max(len(ids) for ids, _ in batch)
    ids_BT = torch.full((len(batch), longest), pad_id)
    weights_BT = torch.zeros(len(batch), longest)
    for row, (ids, sampled) in enumerate(batch):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        weights_BT[row, : len(ids)] = torch.where(torch.tensor(sampled), 1.0, context_weight)
    return ids_BT, weights_BT


def learning_rate(settings: TinyPolicySettings, update: int) -> float:
    """Linear warm-up, then a cosine decay to a tenth."""
    num_updates = settings.num_clean_updates + settings.num_noisy_updates
    warmup = min(1.0, (update + 1) / settings.num_warmup_updates)
    return settings.learning_rate * warmup * (0.1 + 0.45 * (1 + math.cos(math.pi * update / num_updates)))


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: Recipe,
    write: Write,
    progress: Callable[[str], None],
) -> float:
    """Train in place; return the clean exact match at the end of the first phase, before training on errors."""
    settings = recipe.settings
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        weight_decay=settings.weight_decay,
        foreach=True,
    )
    num_updates = settings.num_clean_updates + settings.num_noisy_updates
    clean_exact = math.nan
    # For sequences this short the fused kernel's backward pass in bfloat16 is slower.
    model.set_attn_implementation("eager")
    reported_at = time.monotonic()
    for update in range(num_updates):
        if update == settings.num_clean_updates:
            clean_exact = clean_exact_match(model, tokenizer, write, settings.num_clean_checks)
            progress("warm start: the second phase begins; its transcripts contain errors, so the loss rises")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, update)
        mix = GOOD if update < settings.num_clean_updates else settings.noisy_mix
        model.train()
        encoded = [encode_pieces(tokenizer, write(mix)) for _ in range(settings.transcripts_per_update)]
        batch = pad_batch(encoded, tokenizer.convert_tokens_to_ids(PADDING), settings.context_loss_weight)
        loss = take_update(model, optimizer, *batch, settings.max_gradient_norm)
        if (update + 1) % UPDATES_PER_REPORT == 0 or time.monotonic() - reported_at > SECONDS_PER_REPORT:
            reported_at = time.monotonic()
            text = f"warm start: update {update + 1} of {num_updates}, loss {loss:.3f}"
            progress(CountedLine(text, "warm start", update + 1, num_updates))
    model.set_attn_implementation("sdpa")
    return clean_exact


def take_update(
    model: Qwen3ForCausalLM,
    optimizer: torch.optim.Optimizer,
    ids_BT: torch.Tensor,
    weights_BT: torch.Tensor,
    max_norm: float,
) -> float:
    """Take one optimiser update and return the mean loss of the policy's tokens."""
    with torch.autocast("cpu", torch.bfloat16):
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
    targets_BT, weights_BT = ids_BT[:, 1:], weights_BT[:, 1:]
    # A vocabulary dimension that is not the last one doubles the time.
    flat_logits = logits_BTV[:, :-1].float().flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(flat_logits, targets_BT.flatten(), reduction="none")
    losses_BT = losses.view_as(weights_BT)
    loss = (losses_BT * weights_BT).sum() / weights_BT.sum()
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    own_BT = weights_BT == 1
    return float(losses_BT.detach()[own_BT].mean())


@torch.no_grad()
def clean_exact_match(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, write: Write, num_checks: int
) -> float:
    """Return the share of correct transcripts in which every token of the policy is the model's first choice."""
    model.eval()
    pad_id = tokenizer.convert_tokens_to_ids(PADDING)
    encoded = [encode_pieces(tokenizer, write(GOOD)) for _ in range(num_checks)]
    ids_BT, weights_BT = pad_batch(encoded, pad_id, 0.0)
    choices_BT = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].argmax(-1)
    right_BT = (choices_BT == ids_BT[:, 1:]) | (weights_BT[:, 1:] == 0)
    return float(right_BT.all(1).float().mean())
