"""The log lines of a part of the stack: plain text, or one JSON object a line with RATCHET_LOG_FORMAT=json.

Lines of structlog and of the standard library's loggers, such as those of uvicorn and Temporal's SDK, look alike. The
ids that `structlog.contextvars` holds for the present activity or model call are in each of them. Secrets become `***`.
"""

import logging
import os
import sys
from typing import Any

import orjson
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from ratchet import secrets

FORMAT_VARIABLE = "RATCHET_LOG_FORMAT"
_SDK_EXTRAS = ("temporal_activity", "temporal_workflow")
"""Keys that Temporal's SDK adds to its lines: ids of the activity or workflow."""


def is_json() -> bool:
    return os.environ.get(FORMAT_VARIABLE, "").lower() == "json"


def configure_logs(part: str) -> None:
    """Send all log lines of this process to its standard output, in the format that the environment names."""
    secrets.note_environment()
    structlog.configure(
        processors=[*_processors(part), _renderer()],
        # No debug lines: one per model call would cost as much as the call.
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(line_formatter(part))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.captureWarnings(True)
    if is_json():  # else vLLM, which the adapter imports, writes lines of its own form
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")


def line_formatter(part: str) -> logging.Formatter:
    """Return the formatter of lines of the standard library's loggers."""
    extras = structlog.stdlib.ExtraAdder(allow=_SDK_EXTRAS)
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[structlog.stdlib.add_logger_name, extras, *_processors(part)],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _renderer()],
    )


def json_object(line: str) -> dict[str, Any] | None:
    """Return the JSON object that a line consists of, None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def text_line(fields: dict[str, Any]) -> str:
    """Return the fields of a line in JSON as a line of text."""
    return str(_TEXT(None, "", dict(fields)))


def _processors(part: str) -> list[Processor]:
    is_text = not is_json()

    def add_part(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
        return fields if is_text else {**fields, "part": part}

    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.StackInfoRenderer(),
        structlog.dev.set_exc_info,
        # Without the values of variables, which may be prompts or keys.
        structlog.processors.format_exc_info,
        structlog.processors.TimeStamper("%Y-%m-%d %H:%M:%S" if is_text else "iso", utc=not is_text),
        add_part,
        _without_secrets,
    ]


def _without_secrets(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    return {name: _redacted(value) for name, value in fields.items()}


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return secrets.without_secrets(value)
    if isinstance(value, dict):
        return {name: _redacted(one) for name, one in value.items()}
    return [_redacted(one) for one in value] if isinstance(value, list | tuple) else value


def _json(value: Any, **_: Any) -> str:
    return orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


_TEXT = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)


def _renderer() -> Processor:
    return structlog.processors.JSONRenderer(serializer=_json) if is_json() else _TEXT
