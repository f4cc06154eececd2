"""The settings of one adapter process, from which the server and the tests build the same app."""

from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from adapter.dialects.media import MediaPolicy
from ratchet.config_sections import EngineConfig


class AdapterSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    database_url: str
    """SQLAlchemy URL of the store."""
    model_path: Path
    """Directory of the served model. Its tokenizer, chat template and stop ids are read, not its weights."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 18001
    """TCP port to listen on."""
    tool_parser: str | None = "qwen3_coder"
    """vLLM's name of the tool-call parser. None leaves tool calls in the text."""
    reasoning_parser: str | None = None
    """vLLM's name of the reasoning parser. None leaves thinking in the text."""
    template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra variables of the chat template, such as enable_thinking."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end an answer, beside those of the model's own files."""
    restore_reasoning: bool | None = None
    """Put reasoning back into answers that a client sends without it. None: if the template shows it."""
    images: MediaPolicy = "placeholder"
    """The treatment of images and other files: the model reads a placeholder instead, or the request is refused."""
    ping_seconds: float = 2.0
    """Seconds without anything else to send after which a stream gets a ping, or a comment if the store is away."""
    lease_seconds: float = 6.0
    """Seconds after which another process may take over the calls of an adapter that was killed."""
    max_body_bytes: int = 32 << 20
    """Larger requests are refused with 413."""
    body_seconds: float = 120.0
    """Seconds in which a request must have arrived; a slower one is refused with 408."""
    max_held_calls: int = 4096
    """Calls that may wait for the store before they have begun; another one gets 503 or 529."""
    max_held_calls_per_session: int = 256
    """Limit of held calls per session. All sessions unknown to this process share half of `max_held_calls`."""
    max_held_bytes: int = 1 << 30
    """Limit of the bytes of all held calls' bodies together."""
    max_sessions: int = 2000
    """Sessions kept in memory. Others are read from the store again when needed."""
    pool_size: int = 10
    """Half of the largest number of connections to Postgres."""

    def of_model(self, model_path: Path, engine: EngineConfig) -> Self:
        """Return the settings for the calls of this model."""
        names = ("tool_parser", "reasoning_parser", "restore_reasoning", "images")
        changes = {name: getattr(engine, name) for name in names}
        changes |= {"template_kwargs": engine.chat_template_kwargs, "stop_token_ids": tuple(engine.stop_token_ids)}
        return self.model_copy(update=changes | {"model_path": model_path})
