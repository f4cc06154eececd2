"""The sections of a run's config: each setting once, with its unit, its effect and the reason for its default."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

from ratchet.bounded_numbers import LARGEST_INTEGER, Fraction, NotNegative, Positive, Seconds
from ratchet.storable_values import find_unstorable
from ratchet.types import OpenedUse, TurnKind


class Section(BaseModel):
    """Base of all sections: immutable, unknown keys and values that cannot be stored are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        if problem := find_unstorable(value):
            raise ValueError(str(problem))
        return value


class EngineConfig(Section):
    """Settings of the vLLM engines that serve the policy."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """Data type of the engine's weights. `auto`, the default, takes the one that the model's own config names."""
    max_num_seqs: Positive = 64
    """Number of requests that one engine decodes at once. 64 keeps a CPU or a small GPU busy without exhausting its KV
    cache; raise it on a large GPU."""
    kv_cache_gib: Positive = 1
    """Size of the KV cache on CPU, in GiB; 1 suits the tiny policy. On a GPU vLLM takes a share of the memory."""
    num_threads: Positive = 1
    """Number of OpenMP threads of the engine on CPU. The default is 1, because learner and boxes share the cores."""
    keep_cache: bool = False
    """Keep the KV cache of calls in progress when new weights arrive. False, the default, recomputes the cache, so that
    every logprob belongs to the weights it is labelled with. True saves that work, which matters for long contexts, and
    mixes weights within the context of a call."""
    tool_parser: str = "qwen3_coder"
    """vLLM's name of the parser that reads tool calls from the output. The default suits Qwen3 and the tiny policy."""
    reasoning_parser: str | None = None
    """vLLM's name of the parser that separates reasoning from the answer. None, the default, means that the model
    produces no reasoning."""
    stop_token_ids: list[NotNegative] = []
    """Further token ids that end an answer. Empty by default: those of the model's generation_config.json and of its
    chat template end it."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables passed to the model's chat template, such as `enable_thinking`. Each rollout records them with the
    template's digest. Empty by default: the template's own defaults apply."""
    restore_reasoning: bool | None = None
    """Put reasoning back that an agent omits; None, the default, does so if the chat template shows reasoning."""
    images: Literal["placeholder", "refuse"] = "placeholder"
    """`placeholder`, the default: the model reads a text such as `[image, 640x480, omitted]`. `refuse`: an error."""
    lora_runs: Positive = 1
    """Number of runs with `training.lora` that share these engines, each with its own adapter. 1 is the default."""
    args: list[str] = []
    """Further command-line arguments, passed to vLLM unchanged. Empty by default."""


class EndpointConfig(Section):
    """A server with OpenAI's Chat Completions that answers the agents instead of the policy.

    A run with an endpoint only evaluates. With `tokens`, another run can train its solved rollouts by the loss `sft`.
    """

    url: str
    """Base address, to which `/chat/completions` is appended: usually it ends with `/v1`."""
    model: str
    """Name of the model in requests."""
    key: str | None = None
    """Reference `${NAME}` to the API key, which adapters and workers look up in secrets.env of the state directory or
    in their environment, so that the key is not stored. None, the default, sends no key."""
    body: dict[str, Any] = {}
    """Fields that are added to each request, or replace the adapter's, such as `reasoning_effort`; null leaves a field
    out. Empty by default."""
    tokens: bool = False
    """Store each answer as the tokens that the chat template of `model` writes for it, without logprobs, so that
    `ratchet train --from-store` can train them by the loss `sft`. False, the default, stores no tokens."""
    silent_seconds: Seconds = 600
    """Time without a byte of the answer after which a call is made again. 600 s lets a model think for long."""

    @field_validator("url")
    @classmethod
    def _plain_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected an address that begins with http:// or https://")
        if parts.username or parts.password or parts.query:
            raise ValueError("an address is stored with the run, so name the key by `key: ${NAME}`, not in the address")
        return url.rstrip("/")


class DatasetConfig(Section):
    """One dataset and how its columns are named."""

    path: str
    """Path of a JSONL or parquet file, or of a folder of Harbor tasks. A relative path is resolved against the
    directory of the config file first, then against the working directory."""
    use: Literal["train", "eval"] = "train"
    """`train`, the default: groups are made from the tasks. `eval`: the tasks are held out and only evaluated."""
    weight: Annotated[float, Field(ge=0)] | None = None
    """Share of the groups that are made from this dataset, relative to the other weights; 0 makes none. None, the
    default, means 1 if another training dataset has a weight, else all tasks take turns, as one list."""
    limit: Positive | None = None
    """Number of rows to take from the start of the file. None, the default, takes all."""
    input_key: str = "prompt"
    """Name of the column with the problem statement; the default is that of the bundled datasets."""
    label_key: str = "label"
    """Name of the column with the task's label, which names the task in reports and on the command line."""
    metadata_key: str = "metadata"
    """Name of the column with the task's image, working directory and grader (docs/tasks.md)."""
    renderer: str | None = None
    """Function as `package.module:function` that adds the tasks' own view to the viewer's page of a rollout
    (viewer/renderers/registry.py). None, the default, means that of the grader, if there is one."""


def _box_user(name: str) -> str:
    if name == "root" or not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", name):
        raise ValueError(f"expected the name of a user other than root, found {name!r:.60}")
    return name


BoxUser = Annotated[str, AfterValidator(_box_user)]
TestsUser = Annotated[str, AfterValidator(lambda name: name if name == "root" else _box_user(name))]


class HarnessConfig(Section):
    """The agent program that works on the tasks, and its limits."""

    name: str = "bash_agent"
    """Name of the agent program: bash_agent, claude_code, codex, mini_swe_agent, opencode, qwen_code, or the import
    path of a class as `package.module:Class`. bash_agent is the default because it needs nothing to be fetched. The
    others have long prompts of their own, for which `sampling.max_context_tokens` must have room."""
    generate: str | None = None
    """A function `generate(args, sample, sampling_params)` as `package.module:function`, which makes a rollout from its
    first box to its samples (examples/own_generate.py). If its worker dies, the whole function is repeated in new
    boxes, instead of one stage. None, the default, runs the stages of a rollout."""
    user: BoxUser = "agent"
    """User of the box that runs the agent's program and owns the repository, unless the task has `metadata.agent_user`.
    Not root, whose processes could not all be ended before the diff. `agent` is made if the image has none, and owns
    nothing else. It costs trust to name another: what the image lets that user read or start, the agent can."""
    prompt: str | None = None
    """Template of the user message, in which `{problem_statement}` and `{workdir}` are replaced. None, the default,
    uses the prompt of activities/harnesses/base.py."""
    system_prompt: str | None = None
    """System prompt, or for claude_code a text that is appended to it. None, the default, uses the program's own."""
    max_turns: Positive | None = 50
    """Number of model calls, those of sub-agents among them, after which the agent ends with `turn_limit`. 50 bounds
    the cost of an agent that loops; None leaves that to `limits.agent_seconds`."""
    step_timeout_seconds: Seconds | None = 120
    """Time limit of one tool call, in seconds. 120 s lets a usual test suite finish; None leaves it to the agent's
    program, if that has a limit of its own, and to `limits.agent_seconds`."""
    extra_args: str | None = None
    """Arguments appended to the agent's command line, in shell syntax. None, the default, uses the harness's own
    (variable VIME_AGENT_CC_EXTRA_ARGS for claude_code)."""
    extra_env: dict[str, str] = {}
    """Environment variables of the agent's program, which override all others (variable VIME_AGENT_CC_EXTRA_ENVS for
    claude_code). Each value is a reference `${NAME}`, which the worker looks up in secrets.env of the state directory
    or in its environment, so that no value is stored. Empty by default."""
    options: dict[str, Any] = {}
    """Options that only this harness has. The harness refuses unknown ones when the run starts. Empty by default."""

    def all_options(self) -> dict[str, Any]:
        """Return `options`, with `system_prompt` among them if it is set."""
        return self.options if self.system_prompt is None else {**self.options, "system_prompt": self.system_prompt}


class SandboxConfig(Section):
    """The number and size of a run's boxes.

    The provider and its image metadata key are set by environment variables (docs/sandboxes.md).
    """

    max_boxes: Annotated[int, Field(ge=2, le=LARGEST_INTEGER)] = 48
    """Number of boxes of this provider that may exist at once; one tenth of them is reserved for grading. 48 stays
    below the agent slots of temporal.yaml."""
    adaptive: bool = True
    """Run fewer agents at once while engines, sandbox service, memory or this machine are full, the default:
    `ratchet status` shows the present number and its cause. False always allows max_boxes."""
    memory_mib: Annotated[int, Field(ge=64, le=LARGEST_INTEGER)] | None = None
    """Memory limit of one box, in MiB. None, the default, leaves it to the service (docker: 2048). Only docker accepts
    this limit and the next two."""
    cpus: Annotated[float, Field(gt=0)] | None = None
    """CPU limit of one box, in cores. None, the default, leaves it to the service (docker: no limit)."""
    max_processes: Annotated[int, Field(ge=64, le=LARGEST_INTEGER)] | None = None
    """Limit of processes and threads of one box. None, the default, leaves it to the service (docker: 512)."""

    network: list[OpenedUse] = []
    """Boxes with an open network, beside those that a task's `metadata.network` names: agent, grade, or pre_commands,
    which opens it in both boxes and closes it after them. It costs trust: an agent can download a solution, a grading
    box can tell the tests to somebody or get its verdict from the internet, and with pre_commands a host that they ask
    can send a solution. Empty by default. The local gateway cannot open a network."""

    @property
    def max_open_rollouts(self) -> int:
        """Number of a run's rollouts that are open at once: those with a box, and as many that wait for one.

        A rollout that waits costs polls, heartbeats and queries, and only the next ones to run need to wait.
        """
        return 2 * self.max_boxes


class SamplingConfig(Section):
    """Sampling of the policy, and the token limits of one model call."""

    temperature: Annotated[float, Field(gt=0, le=2)] = 1.0
    """Sampling temperature of training rollouts; values that a client sends are ignored. 1, the default, samples from
    the policy itself, which is what the loss assumes."""
    max_response_tokens: Positive = 8192
    """Largest number of tokens that one model call may sample (rollout_max_response_len)."""
    max_context_tokens: Positive = 32768
    """Largest number of tokens of prompt and output of one model call together (rollout_max_context_len)."""
    min_response_tokens: Positive = 16
    """Number of output tokens that must fit behind the prompt. A call with less room is refused as too long, because a
    shorter answer could not hold a tool call."""


DEFAULT_BIN_TOKENS = 32768
ADVANTAGES = ("mean", "std", "leave_one_out", "batch", "shuffled")


class LoraConfig(Section):
    """Low-rank adapters (LoRA) that are trained instead of the model's own weights."""

    rank: Annotated[int, Field(gt=0, le=512)] = 16
    """Rank of each adapter. 16 suits RL, whose rewards carry little information; it costs a few per mille of the
    model's memory."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale: an adapter adds alpha / rank times its product. The default of twice the rank is common."""
    target_modules: Annotated[list[str], Field(min_length=1)] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    """Names of the linear layers that get an adapter. The default is all of them in attention and MLP of Qwen and
    Llama; embedding and output layer cannot have one."""

    @field_validator("target_modules")
    @classmethod
    def _linear_layers(cls, names: list[str]) -> list[str]:
        if outer := sorted({"lm_head", "embed_tokens"} & set(names)):
            raise ValueError(f"{', '.join(outer)}: embedding and output layer have no adapter; name layers of the body")
        return sorted(set(names))


class ForksConfig(Section):
    """Training groups whose rollouts do again what an earlier one did before a turn, and sample from there."""

    share: Fraction = 0.0
    """Share of the training groups that are forks of a graded rollout whose group is at most max(1, `max_staleness`)
    steps old. A group without such a source stays a plain one. 0, the default, makes no forks."""
    turn: Literal["uniform", "mixed", "entropy", "first_edit"] = "uniform"
    """Turn that is sampled anew: `uniform`, the default, takes any behind the first; `mixed` the same, of groups whose
    rewards differ; `entropy` the one with the lowest mean logprob; `first_edit` the first one that writes a file by an
    editing tool or, as far as the words of a command tell, in a shell."""


class TrainingConfig(Section):
    """Steps, groups and the optimiser."""

    steps: NotNegative = 100
    """Number of steps of the run; the checkpoint of the last one is the result. 0 only evaluates the initial
    weights."""
    groups_per_step: Positive = 8
    """Number of groups with signal, that is with different rewards, that one step trains on."""
    min_groups: Positive = 1
    """Smallest number of groups with signal that a step is planned on once `max_groups_seen` groups are ready. 1 lets a
    run go on if most tasks are always or never solved."""
    max_groups_seen: Positive | None = None
    """Number of ready groups, with or without signal, after which a step is planned on fewer than `groups_per_step`.
    None, the default, means twice `groups_per_step`."""
    group_size: Positive = 8
    """Number of rollouts of one task whose rewards are compared; at least 2."""
    min_graded: Positive | None = None
    """Smallest number of graded rollouts of a group that is trained on. None, the default, means half of `group_size`,
    at least 2."""
    max_replacements: NotNegative = 2
    """Number of rollouts of a group that may be replaced after they ended without a verdict. 0 replaces none."""
    max_staleness: NotNegative = 1
    """Largest age of the weights that sampled a token, in steps; tokens of older weights get no loss weight. 0 means
    synchronous training. 1, the default, lets rollouts run while a step is trained."""
    solve_rates: tuple[Fraction, Fraction] | None = None
    """Lower and upper bound of a task's recent mean reward; tasks outside get no group. [0.05, 0.95] leaves out tasks
    that are always or never solved. None, the default, takes all tasks in turn."""
    solve_rate_steps: Positive = 10
    """Window, in steps, of the recent mean reward for `solve_rates`. A task without a group in the window is tried
    again."""
    forks: ForksConfig = ForksConfig()
    """Share and kind of the groups that are forks of earlier rollouts; none by default."""
    updates_per_step: Positive = 1
    """Number of optimiser updates of one step; all members of a group are in the same update. 1, the default, keeps
    every update on-policy with respect to the step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Learning rate of AdamW after warm-up. 1e-6 suits models of some billion parameters."""
    warmup_steps: NotNegative = 0
    """Length of the linear warm-up of the learning rate, in optimiser updates. 0, the default, means none."""
    lora: LoraConfig | None = None
    """Trains adapters instead of the weights. None, the default, trains all weights. `{}` takes the defaults below; set
    `learning_rate` about ten times as high as without."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay. 0, the default, means none, as usual in RL fine-tuning."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Norm to which the gradient of an update is clipped."""
    max_skipped_steps: NotNegative = 3
    """Number of steps in a row of which an update may be left out because its gradient is not finite; the next one
    pauses the run and keeps its batch. 0 pauses at the first."""
    advantage: str = "mean"
    """Computation of advantages from a group's rewards: mean, std, leave_one_out, batch (training/advantage.py names
    the papers), a function as `package.module:function`, or `shuffled`, which permutes the advantages within each group
    and serves as a control that must not learn."""
    negative_weight: Fraction = 1.0
    """Factor of every advantage below 0. 1, the default, leaves them unchanged; 0 trains only rollouts that were better
    than their group's mean."""
    truncated: Literal["train", "mask", "exclude"] = "train"
    """Use of rollouts that a limit ended: `train` trains them, `mask` counts them in the baseline without loss,
    `exclude` does neither."""
    train_kinds: list[TurnKind] = [TurnKind.MAIN, TurnKind.SUB_AGENT, TurnKind.COMPACTION]
    """Kinds of turns that may be trained. Auxiliary calls, such as titles, are left out by default."""
    bin_tokens: Positive = DEFAULT_BIN_TOKENS
    """Number of tokens of one forward pass of a rank; at least `sampling.max_context_tokens`. It bounds the learner's
    memory. If a config does not name it, it is 32768, or the context if that is larger."""
    packing: Literal["auto", "tree", "packed", "padded"] = "auto"
    """Layout of chains in a forward pass: `tree` computes equal prefixes once, `packed` puts chains side by side,
    `padded` makes padded rows. `auto`, the default, takes tree if the architecture allows it."""
    router_replay: bool = False
    """Send each token in the learner through the experts that the engine chose for it. Engines record them, at layers x
    experts per token x 1 or 2 bytes per token (docs/models.md). False, the default, suits dense models."""
    workers: Positive | None = None
    """Number of learner ranks. None, the default, means one per GPU of `gpus`; without it one on a machine with a GPU
    or up to three cores, else two."""
    num_threads: Positive = 1
    """Compute threads of a rank on a CPU. A step that is trained again with another number is equal but for rounding.
    1, the default, leaves the other cores to engine and boxes, which work beside it."""
    gpus: dict[str, list[NotNegative]] | None = None
    """GPUs of the learner's ranks: host -> indexes, such as `{local: [4, 5, 6, 7]}`. Only `local` or IP addresses of
    nodes of the Ray cluster. None, the default, means the GPUs of this machine that no engine was given."""
    shard_ranks: Positive | None = None
    """Number of ranks that hold one copy of the weights together. None, the default, means all ranks; the number of
    GPUs of one node keeps the gathering of weights within a node, at the memory of one copy per node."""
    expert_parallel: Positive = 1
    """Number of ranks among which the experts of each layer are divided; tokens travel to them (docs/fleet.md). It
    divides the number of experts and `shard_ranks`, or the number of ranks. 1, the default, gathers whole layers."""
    sequence_parallel: Positive = 1
    """Number of ranks that share a bin, each with a part of its tokens, for chains that one GPU cannot hold
    (docs/fleet.md). It divides the number of ranks and of heads. 1, the default: every rank has bins of its own."""
    checkpoint_every: Positive = 5
    """Number of steps between checkpoints; the last step makes one, too. A killed learner replays at most so many."""
    kept_versions: Positive | None = 4
    """Number of published weights whose files are kept, beside step 0 and those of kept checkpoints. None keeps all."""
    weights_address: str | None = None
    """Address below which every published version is stored, too, in the form of fsspec: `s3://BUCKET/DIRECTORY`,
    `gs://…`, `file:///DIRECTORY`. Engines on hosts that do not share the state directory fetch it from there before
    they are paused. Credentials come from the environment. None, the default, stores nothing: all hosts then read the
    learner's files on a path that they share."""
    full_weights_every: Positive = 1
    """Every so many versions one is stored whole at `weights_address`, the others as what changed since the version
    before. 1, the default, stores every version whole, so that each can be read without another."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of the learner's computation. `auto`, the default, means bfloat16 on a GPU and float32 on a CPU. Master
    weights, optimiser moments and gradient sums are always float32."""
    fp32_head: bool = False
    """Compute logits in float32 although `dtype` is not float32; this brings logprobs closer to the engine's. False by
    default, because it costs memory."""
    activation_checkpointing: bool | None = None
    """Compute each layer again in the backward pass instead of keeping its activations. True takes about a third more
    computation and far less memory. None, the default, means true on a GPU."""
    fused_kernels: bool | None = None
    """Compute norms, rotary positions and gated MLPs with the kernels of the package liger-kernel, on GPUs. None, the
    default, does so if the package is installed and the kernels were tried with this type of model."""


class EvaluationConfig(Section):
    """The times and settings of evaluations on the held-out tasks."""

    at: list[Literal["start", "end"]] = ["start", "end"]
    """Times at which held-out tasks are evaluated: before the first step, after the last one, or both, the default."""
    every: Positive | None = None
    """Number of steps between further evaluations, for which training waits. None, the default, means none, because
    each takes as long as all held-out rollouts."""
    temperatures: list[float] = [1.0, 0.0]
    """Temperatures of the evaluations; 0 is greedy decoding. The default compares sampled and greedy rewards."""
    start_temperatures: list[float] = []
    """Further temperatures of the evaluation at the start. They show what sharpening of the initial policy alone would
    give. Empty by default."""
    samples: Positive = 1
    """Number of rollouts of each held-out task at those `temperatures` that are above 0. Greedy evaluations and
    `start_temperatures` take one."""
    forked_turn_id: Positive | None = None
    """Id of a stored turn, set by `ratchet fork`: each rollout then does again what that turn's rollout did before it,
    and samples from there, on its task alone. None by default."""


METRIC_SINKS = ("tensorboard", "wandb")
"""The sinks that `training/metric_sinks` has."""


class MetricSinkConfig(Section):
    """One tool that gets a copy of the learner's metrics."""

    name: str = "tensorboard"
    """`tensorboard`, the default, `wandb`, or a class of your own as `package.module:Class`."""
    options: dict[str, Any] = {}
    """Arguments of the tool's client, such as `project` or `mode: offline` of wandb. Keys of accounts are not
    written here: the client reads them from the learner's environment. Any other secret is written as `${NAME}`, as in
    `harness.extra_env`. Empty by default."""


class MetricsConfig(Section):
    """Copies of the learner's metrics, beside those in Postgres. A sink cannot stop or slow the learner: it loses
    points instead, and the metric `sink_lost_NAME` counts them."""

    sinks: list[MetricSinkConfig] = [MetricSinkConfig()]
    """The tools that get a copy. The default writes TensorBoard's event files to the state directory."""


class GradingConfig(Section):
    """Judgement and reward of patches."""

    user: TestsUser = "agent"
    """User of the box that runs the tests and owns the repository, unless the task has `metadata.tests_user`. `agent`,
    the default, is made if the image has none. `root` is what some tasks need, and costs trust: a patch's code runs as
    this user, and root can read and write what the runner keeps."""
    reward: str = "solved"
    """Name of the reward function: `solved`, `fraction`, `weighted`, or a function as `module:function`. The default
    gives 1 to a solved task and 0 to any other, or the number of the task's own reward file."""
    control_share: Fraction = 1.0
    """Share of solved verdicts that control runs check; all by default: each costs up to five more grades. They
    run the patch against hidden tests that a correct solution fails, which `ratchet tasks admit` makes, and once more
    against the true ones."""
    admission: Literal["required", "optional", "ignored"] = "optional"
    """Tasks that a run takes, by what `ratchet tasks admit` has found under the present grader versions: `optional`,
    the default, all but those that it has refused; `required` only those that it has admitted; `ignored` all, and
    believes the exit code of a test command that prints nothing of tests. Verdicts of a task that is not admitted are
    not compared with runs of a gold patch, and each says so."""


class LimitsConfig(Section):
    """Time and size limits of a rollout."""

    agent_seconds: Seconds = 1800
    """Time budget of the agent's program, in seconds of the box's clock. Time in which it waits for an engine or an
    adapter does not count (SWE_AGENT_TIME_BUDGET_SEC)."""
    eval_seconds: Seconds = 600
    """Time limit of the tests of one grade, in seconds (SWE_EVAL_TIMEOUT_SEC)."""
    guard_seconds: Seconds | None = None
    """Longest time in seconds for which a rollout may have boxes, outages and waits for us not counted; beyond it the
    rollout gets no further box. None, the default, means agent_seconds + eval_seconds + the margin in temporal.yaml
    (SWE_ROLLOUT_GUARD_SEC)."""
    stall_seconds: Seconds | None = 900
    """Time in seconds without a model call after which the agent is ended with `time_budget`. It must be above
    harness.step_timeout_seconds. None leaves it to agent_seconds."""
    workspace_seconds: Seconds = 300
    """Time limit of a task's pre_commands, in seconds."""
    max_patch_bytes: Positive = 5_000_000
    """Largest size of a diff, in bytes. A larger one is not stored and the rollout is not solved, with the reason."""
