"""Temporal's dev server with the search attributes of this program, for tests of workflows with stand-in activities."""

from collections.abc import Awaitable
from typing import Any

from temporalio.common import SearchAttributeKey
from temporalio.contrib.pydantic import pydantic_data_converter
from temporalio.testing import WorkflowEnvironment

from ratchet.types import SEARCH_ATTRIBUTES

_KEYS = {
    "Keyword": SearchAttributeKey.for_keyword,
    "Double": SearchAttributeKey.for_float,
    "Int": SearchAttributeKey.for_int,
}


def start_dev_server(temporal_cli: str, **dynamic_config: int) -> Awaitable[WorkflowEnvironment]:
    """Start a server. `dynamic_config`: values of the server's dynamic config, with `_` for the dots of their keys."""
    attributes: list[Any] = [_KEYS[kind](name) for name, kind in SEARCH_ATTRIBUTES.items()]
    arguments: list[str] = []
    for name, value in dynamic_config.items():
        arguments += ["--dynamic-config-value", f"{name.replace('_', '.')}={value}"]
    return WorkflowEnvironment.start_local(
        data_converter=pydantic_data_converter,
        dev_server_existing_path=temporal_cli,
        dev_server_extra_args=arguments,
        search_attributes=attributes,
    )
