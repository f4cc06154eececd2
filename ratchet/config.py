"""The run's config as one pydantic tree.

Why here: every knob of a run is declared once, with its unit; unknown keys are refused wherever they come from (`config_sources.py`).
Called by: everything that a run's config decides; the tree is stored in the run's row and read from there.
"""

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ratchet.types import TurnKind

TINY = "tiny"

Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class EngineConfig(Section):
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Of the engine's weights."""
    max_num_seqs: Positive = 64
    """Requests that one engine works on at once."""
    kv_cache_gib: Positive = 1
    """Size of the KV cache on CPU, in GiB; without meaning on a GPU."""
    num_threads: Positive = 1
    """OpenMP threads of the engine on CPU, so that it leaves cores to the others."""
    keep_cache: bool = False
    """Whether running calls keep their KV cache when new weights arrive. False: it is computed again, so that every logprob is that of the
    weights it is labelled with; True saves that work where contexts are long, and mixes versions within a call's context."""
    tool_parser: str = "qwen3_coder"
    """vLLM's name of the parser that reads tool calls from the output."""
    reasoning_parser: str | None = None
    """vLLM's name of the reasoning parser; None where the model does not think aloud."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the model's chat template, such as enable_thinking; every rollout records them with the template's digest."""
    args: list[str] = []
    """Further arguments, passed to vLLM as they stand."""


class DatasetConfig(Section):
    path: str
    """A JSONL or parquet file, or a folder of Harbor tasks; a relative path is resolved against the config file's directory, then the working directory."""
    use: Literal["train", "eval"] = "train"
    """`eval`: held out, only ever evaluated."""
    limit: Positive | None = None
    """Take the first rows only; None: all."""
    input_key: str = "prompt"
    label_key: str = "label"
    metadata_key: str = "metadata"


class HarnessConfig(Section):
    name: str = "bash_agent"
    """The agent program: bash_agent, claude_code, codex, mini_swe_agent, or a class of your own as `package.module:Class`."""
    prompt: str | None = None
    """Template of the user message; `{problem_statement}` and `{workdir}` are filled in. None: the harness's own."""
    system_prompt: str | None = None
    """None: the harness's own."""
    max_turns: Positive = 50
    """Model calls after which the agent ends with `turn_limit`."""
    step_timeout_seconds: Seconds = 120
    """For one tool call."""
    extra_args: str | None = None
    """Appended to the agent's command line, in shell syntax; None: the harness's own (VIME_AGENT_CC_EXTRA_ARGS for claude_code)."""
    extra_env: dict[str, str] = {}
    """Environment of the agent's program, merged last (VIME_AGENT_CC_EXTRA_ENVS for claude_code)."""
    options: dict[str, Any] = {}
    """Of the harness itself; it refuses what it does not know."""

    def all_options(self) -> dict[str, Any]:
        return self.options if self.system_prompt is None else {**self.options, "system_prompt": self.system_prompt}


class SandboxConfig(Section):
    """Which service makes the boxes, and how it is told the image, is the environment's matter (docs/sandboxes.md)."""

    max_boxes: Annotated[int, Field(ge=2)] = 48
    """Live boxes of this provider at once; a tenth of them is kept for grading."""
    memory_mib: Annotated[int, Field(ge=64)] | None = None
    """What one box may use; None: what the service gives every box (docker: 2048). Only docker can set this and the next two per run."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """Processors' worth of time of one box; None: the service's (docker: no limit)."""
    max_processes: Annotated[int, Field(ge=64)] | None = None
    """Processes and threads of one box; None: the service's (docker: 512)."""


class SamplingConfig(Section):
    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Of every training rollout; the client's wishes are not asked."""
    max_response_tokens: Positive = 8192
    """Of one model call (rollout_max_response_len)."""
    max_context_tokens: Positive = 32768
    """Prompt and output of one model call (rollout_max_context_len)."""
    min_response_tokens: Positive = 16
    """A call with less room than this is refused as too long."""


class LossConfig(Section):
    preset: str = "icepop"
    """Which token loss: grpo, dr_grpo, dapo, gspo, cispo, tis, icepop, seq_mis, sft (training/loss.py names the papers), or a function of
    your own as package.module:function. A preset also gives defaults to clip_low, clip_high, ratio_cap, reducer and training.advantage."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Clip range of grpo, dr_grpo, dapo and gspo: ratio kept within [1 - clip_low, 1 + clip_high]."""
    mask_low: Annotated[float, Field(ge=0)] = 0.5
    mask_high: Annotated[float, Field(gt=0)] = 5.0
    """`icepop`: tokens whose ratio to the recorded probability is outside get no gradient."""
    ratio_cap: Annotated[float, Field(gt=0)] = 5.0
    """Upper bound of the ratio: of a token in `tis` and `cispo`, of a turn in `seq_mis`."""
    entropy_bonus: Annotated[float, Field(ge=0)] = 0.0
    """Times the policy's entropy at each trained token, taken off the token's loss; 0 computes it for the metrics only."""
    reducer: Literal["token_mean", "rollout_mean", "prompt_mean", "constant"] = "token_mean"
    constant_tokens: Positive = 1024
    """C of the `constant` reducer, in tokens."""


LOSS_PRESET_VALUES: dict[str, dict[str, Any]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.2, "reducer": "rollout_mean", "advantage": "std"},
    "dr_grpo": {"clip_low": 0.2, "clip_high": 0.2, "reducer": "constant", "advantage": "mean"},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "reducer": "token_mean", "advantage": "std"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "reducer": "rollout_mean", "advantage": "std"},
    "cispo": {"ratio_cap": 5.0, "reducer": "token_mean", "advantage": "std"},
    "tis": {"ratio_cap": 2.0},
    "icepop": {"mask_low": 0.5, "mask_high": 5.0},
    "seq_mis": {"ratio_cap": 2.0},
    "sft": {},
}
"""What each paper uses, where the config says nothing else; a key that is missing here keeps the default above."""


ADVANTAGES = ("mean", "std", "leave_one_out", "batch", "shuffled")


class TrainingConfig(Section):
    steps: Positive = 100
    """Steps of the run; the last checkpoint is the result."""
    groups_per_step: Positive = 8
    """Groups with signal that one step trains on."""
    min_groups: Positive = 1
    """With `max_groups_seen` groups ready, a step is planned on at least this many groups with signal."""
    max_groups_seen: Positive | None = None
    """None: twice groups_per_step."""
    group_size: Positive = 8
    """Rollouts of one task whose rewards are compared."""
    min_graded: Positive | None = None
    """A group with fewer graded rollouts is not trained on; None: half of group_size, at least 2."""
    max_replacements: Annotated[int, Field(ge=0)] = 2
    """Rollouts of a group that may be started anew after infrastructure failed them."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """In steps: older tokens get no loss weight; 0 means synchronous."""
    solve_rates: tuple[Fraction, Fraction] | None = None
    """Tasks whose mean reward lately was outside of these bounds get no group; [0.05, 0.95] leaves out what is always or never solved.
    None: all tasks in turn."""
    solve_rate_steps: Positive = 10
    """What lately means: groups that started within so many steps. A task without any is tried again."""
    updates_per_step: Positive = 1
    """Optimiser updates of one step; a group is whole in one of them."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Of linear learning-rate warm-up, in updates."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    advantage: str = "mean"
    """Over the group's rewards: mean, std, leave_one_out, batch (training/advantage.py names the papers), a function of your own as
    package.module:function, or `shuffled`, which permutes the advantages within each group: a control that must not learn."""
    negative_weight: Fraction = 1.0
    """Times every advantage below 0. 0: only what was better than its group is trained, weighted by how much better."""
    truncated: Literal["train", "mask", "exclude"] = "train"
    """What a rollout cut by a limit does: trained, without loss but in the baseline, or neither."""
    train_kinds: list[TurnKind] = [TurnKind.MAIN, TurnKind.SUB_AGENT, TurnKind.COMPACTION]
    """Kinds of turns that may be trained."""
    bin_tokens: Positive = 32768
    """Tokens of one forward pass of a rank; at least sampling.max_context_tokens."""
    packing: Literal["auto", "tree", "packed", "padded"] = "auto"
    """How chains share a forward pass: equal prefixes once, side by side, or as padded rows. auto: tree where the architecture allows."""
    workers: Positive | None = None
    """Learner ranks; None: one on up to three cores, two from four cores on."""
    checkpoint_every: Positive = 5
    """Steps between checkpoints; the last step always makes one."""
    kept_versions: Positive | None = 4
    """Published weights whose files are kept, beside the first and those of kept checkpoints; None: all of them."""
    weight_transport: Literal["disk", "nccl"] = "disk"
    """How running engines get new weights. disk: each reads the published files. nccl: the learner's first rank reads them once and broadcasts
    them from its GPU, which no engine may use; an engine that this misses, or that starts later, reads the files. Not yet measured."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the learner's computation; master weights, moments and gradient sums are float32."""
    fp32_head: bool = False
    """Whether logits are computed in float32 where dtype is not."""
    activation_checkpointing: bool = False
    """Whether each layer is computed again in the backward pass instead of being kept: a third more work, far less memory."""


class EvaluationConfig(Section):
    at: list[Literal["start", "end"]] = ["start", "end"]
    """When the held-out tasks are evaluated."""
    temperatures: list[float] = [1.0, 0.0]
    """Sampled and greedy (0)."""
    start_temperatures: list[float] = []
    """Further temperatures at the start only: what mere sharpening of the initial policy would give."""
    samples: Positive = 1
    """Rollouts of each held-out task at those of `temperatures` that are above 0; greedy and `start_temperatures` take one."""


class GradingConfig(Section):
    reward: str = "solved"
    """A reward function: `solved`, `fraction`, `weighted`, or one of yours as module:function."""
    integrity: Literal["drop", "reject"] = "drop"
    """What a patch with files that could change the runner gets: a grade without those files, or the verdict `rejected`."""
    admission: Literal["required", "ignored"] = "required"
    """Which tasks a run takes: those that `ratchet tasks admit` has admitted under the present graders, or all."""


class LimitsConfig(Section):
    agent_seconds: Seconds = 1800
    """For the agent's program, by the box's clock; waiting for an engine does not count (SWE_AGENT_TIME_BUDGET_SEC)."""
    eval_seconds: Seconds = 600
    """For the tests of one grade (SWE_EVAL_TIMEOUT_SEC)."""
    guard_seconds: Seconds | None = None
    """For a whole rollout; None: agent + eval + the margin in temporal.yaml (SWE_ROLLOUT_GUARD_SEC)."""
    stall_seconds: Seconds | None = 900
    """An agent that makes no model call for so long is ended with `time_budget`; above harness.step_timeout_seconds. None: never."""
    workspace_seconds: Seconds = 300
    """For a task's pre_commands."""
    max_patch_bytes: Positive = 5_000_000
    """A larger diff is kept out of the store and graded as an empty patch, with the reason."""


class RunConfig(Section):
    model: str = TINY
    """A Hugging Face directory, or `tiny`: the small policy that is made on this machine."""
    init_from: str | None = None
    """Weights to start from instead of the model's own: a directory, or RUN@step of a checkpointed run."""
    seed: int = 0
    """Derives task order, update split, shuffles and, for `tiny`, the warm start."""
    drift: Literal["branch", "drop"] = "branch"
    """What happens to a turn that later prompts re-tokenise differently (docs/adapter.md, "Forks, drift, thinking")."""
    engine: EngineConfig = EngineConfig()
    datasets: Annotated[list[DatasetConfig], Field(min_length=1)]
    harness: HarnessConfig = HarnessConfig()
    sandbox: SandboxConfig = SandboxConfig()
    sampling: SamplingConfig = SamplingConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    grading: GradingConfig = GradingConfig()
    limits: LimitsConfig = LimitsConfig()

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        """The preset's own values stand where the config has none: a resolved config says them all."""
        loss = values.get("loss") if isinstance(values, Mapping) else None
        preset = LOSS_PRESET_VALUES.get(str(loss.get("preset"))) if isinstance(loss, Mapping) else None
        if not isinstance(loss, Mapping) or not preset:
            return values
        own = {name: value for name, value in preset.items() if name != "advantage"}
        filled = {**values, "loss": {**own, **loss}}
        training = values.get("training", {})
        if "advantage" in preset and isinstance(training, Mapping):
            filled["training"] = {"advantage": preset["advantage"], **training}
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for key, value, known in (
            ("loss.preset", self.loss.preset, LOSS_PRESET_VALUES),
            ("training.advantage", self.training.advantage, ADVANTAGES),
        ):
            if value not in known and ":" not in value:
                raise ValueError(
                    f"{key}: {value!r} is unknown; expected {', '.join(known)}, or package.module:function"
                )
        if not any(dataset.use == "train" for dataset in self.datasets):
            raise ValueError("datasets: at least one needs use: train")
        if self.sampling.max_response_tokens > self.sampling.max_context_tokens:
            raise ValueError("sampling.max_response_tokens is above sampling.max_context_tokens")
        if self.training.min_graded is not None and self.training.min_graded > self.training.group_size:
            raise ValueError("training.min_graded is above training.group_size: no group could ever be trained on")
        if self.training.solve_rates is not None and self.training.solve_rates[0] > self.training.solve_rates[1]:
            raise ValueError("training.solve_rates: the lower bound is above the upper one")
        if self.training.bin_tokens < self.sampling.max_context_tokens:
            raise ValueError(
                "training.bin_tokens is below sampling.max_context_tokens: the longest chain would not fit into a bin"
            )
        if self.training.group_size < 2:
            raise ValueError("training.group_size must be at least 2: one rollout has nothing to be compared with")
        return self

    def digest(self) -> str:
        """Of the resolved values: two runs with the same digest are asked to do the same."""
        return hashlib.sha256(orjson.dumps(self.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)).hexdigest()
