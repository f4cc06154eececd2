"""Make the default policy: a small Qwen3 with its own tokenizer and chat template, warm-started and checked.

It is made here because no download of weights can be assumed, and a laptop must run real reinforcement learning. That
of the quickstart with seed 0 lies in `shipped`, as `build_policy` made it, and is copied: making it takes two cores
four minutes.
"""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from examples.tiny_policy.conversation import Piece
from examples.tiny_policy.settings import QUICKSTART, Recipe, TinyPolicySettings, recipe_digest, template_text
from examples.tiny_policy.solve_tasks import measure_solve_rate, play_tasks
from examples.tiny_policy.tokenizer import train_tokenizer
from examples.tiny_policy.warm_start import fresh_model, warm_start
from ratchet.errors import MachineError, UserError
from ratchet.make_once import making

REPORT_FILE = "tiny_policy.json"
SHIPPED = Path(__file__).parent / "shipped"

Progress = Callable[[str], None]


class WeakPolicyError(UserError):
    """The warm start's solve rate is too low or too high for verdicts to teach it anything."""


@dataclass(frozen=True, slots=True)
class TinyPolicyReport:
    """The measurements of a made policy, stored beside it as `tiny_policy.json`. Rates are fractions, on tasks outside
    the dataset.

    `clean_exact`: share of correct transcripts that the model follows to the last token, measured before it was
    trained on the expert's errors.
    """

    recipe: str
    """The digest of the settings; the key in the file keeps its first name."""
    seed: int
    num_parameters: int
    num_vocabulary: int
    clean_exact: float
    solve_rate_sampled: float
    solve_rate_greedy: float
    seconds: float


def make_tiny_policy(out: Path, seed: int, progress: Progress, recipe: Recipe = QUICKSTART) -> TinyPolicyReport:
    """Make the policy at `out`, or return at once if the same recipe and seed have made it already.

    The directory appears complete or not at all. Raises WeakPolicyError if a gate is missed, MachineError if `out`
    holds something other than a tiny policy or cannot be written.
    """
    digest = recipe_digest(recipe)
    if (existing := _made_already(out, digest, seed, progress)) is not None:
        return existing
    try:
        with making(out, progress) as scratch:
            if (existing := _made_already(out, digest, seed, progress)) is not None:
                return existing
            made = scratch / "policy"
            report = read_report(SHIPPED)
            if report is not None and (report.recipe, report.seed) == (digest, seed):
                shutil.copytree(SHIPPED, made)
            else:
                report = build_policy(made, recipe, digest, seed, progress)
            made.chmod(0o755)
            for file in made.iterdir():
                file.chmod(0o644)  # a narrow umask lets only the owner read, and the engine may run as another user
            if out.exists():
                out.rename(scratch / "old")
            made.rename(out)
            shutil.rmtree(scratch / "old", ignore_errors=True)
    except OSError as error:
        raise MachineError(f"cannot write the tiny policy to {out}: {error.strerror or error}") from error
    return report


def _made_already(out: Path, digest: str, seed: int, progress: Progress) -> TinyPolicyReport | None:
    """Return the report of the policy at `out` if it has these settings and this seed. Raises MachineError if `out`
    holds something else than a tiny policy."""
    existing = read_report(out)
    if existing is not None and (existing.recipe, existing.seed) == (digest, seed):
        progress(f"the tiny policy exists already: {out}")
        return existing
    if existing is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise MachineError(f"{out} exists and is not a tiny policy; name another directory or remove it")
    return None


def read_report(folder: Path) -> TinyPolicyReport | None:
    try:
        return TinyPolicyReport(**json.loads((folder / REPORT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def build_policy(folder: Path, recipe: Recipe, digest: str, seed: int, progress: Progress) -> TinyPolicyReport:
    started = time.monotonic()
    settings = recipe.settings
    rng = random.Random(seed)
    tasks = recipe.new_tasks(rng)

    def write(mix: Mapping[str, float]) -> list[Piece]:
        return recipe.write_transcript(next(tasks), rng, mix)

    progress("training the tokenizer")
    texts = (
        "".join(piece.text for piece in write(settings.noisy_mix)) for _ in range(settings.num_tokenizer_transcripts)
    )
    tokenizer = train_tokenizer(texts, settings.max_vocabulary, template_text(), settings.max_context_tokens)
    with seeded_torch(seed, settings.num_threads):
        model = fresh_model(settings, tokenizer)
        progress(f"warm start of {model.num_parameters():,} parameters")
        clean_exact = warm_start(model, tokenizer, recipe, write, progress)
        progress("checking the policy")
        report = TinyPolicyReport(
            recipe=digest,
            seed=seed,
            num_parameters=model.num_parameters(),
            num_vocabulary=len(tokenizer),
            clean_exact=clean_exact,
            solve_rate_sampled=checked_solve_rate(model, tokenizer, recipe, seed, 1.0),
            solve_rate_greedy=checked_solve_rate(model, tokenizer, recipe, seed, 0.0),
            seconds=0.0,
        )
    check_gates(report, settings)
    save_policy(folder, model, tokenizer)
    report = replace(report, seconds=round(time.monotonic() - started, 1))
    (folder / REPORT_FILE).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def checked_solve_rate(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, seed: int, temperature: float
) -> float:
    """Measure the solve rate on tasks drawn for this check, the same ones at every temperature."""
    settings = recipe.settings
    tasks = recipe.new_tasks(random.Random(f"check {seed}"))
    drawn = [next(tasks) for _ in range(settings.num_solve_checks)]
    plays = play_tasks(
        model,
        tokenizer,
        drawn,
        temperature=temperature,
        max_turns=settings.max_turns,
        max_tokens_per_turn=settings.max_tokens_per_turn,
    )
    return measure_solve_rate(plays)


def check_gates(report: TinyPolicyReport, settings: TinyPolicySettings) -> None:
    if report.clean_exact <= settings.min_clean_exact:
        raise WeakPolicyError(
            f"the warm start with seed {report.seed} follows only {report.clean_exact:.0%} of the correct transcripts "
            f"(needed: more than {settings.min_clean_exact:.0%}); try another seed"
        )
    if not settings.min_solve_rate <= report.solve_rate_sampled <= settings.max_solve_rate:
        raise WeakPolicyError(
            f"the warm start with seed {report.seed} solves {report.solve_rate_sampled:.0%} of the tasks when sampled "
            f"(needed: {settings.min_solve_rate:.0%} to {settings.max_solve_rate:.0%}); try another seed"
        )


def save_policy(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write a complete Hugging Face directory with float32 weights."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
    )
    transformers_logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def seeded_torch(seed: int, num_threads: int) -> Iterator[None]:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads_before)
