"""The treatment of the objects inside of honoured fields: messages, parts of content, tools, choices, formats.

An object is named by the field that contains it and by its own type or role, such as `content image`, or by the field
alone if it has neither. An object that is not listed here is refused by its dialect. `test_fields.py` walks the SDKs'
own types through these tables, so that a new member of a union, or a new field of an object, fails until it is decided
on; `make docs` prints them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from adapter.dialects.fields import CHAT_FIELDS, MESSAGES_FIELDS, RESPONSES_FIELDS, FieldRule


@dataclass(frozen=True, slots=True)
class ObjectFields:
    """The fields of one kind of object, by what becomes of them; names are separated by spaces."""

    honoured: str
    no_effect: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class NestedFields:
    """The objects of one protocol.

    `read`: those that are read. `refused` and `left_out`: kinds by containing field, separated by spaces. What is left
    out has no effect, such as a tool that the vendor's own servers run. `same`: fields with the objects of another.
    """

    title: str
    read: Mapping[str, ObjectFields]
    refused: Mapping[str, str]
    left_out: Mapping[str, str] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)


_FORMAT_KINDS = dict.fromkeys(("text", "json_object"), ObjectFields("type"))
_CACHED = "cache_control"
_BREAKPOINT = "prompt_cache_breakpoint"

MESSAGES_OBJECTS = NestedFields(
    "Messages",
    {
        "messages user": ObjectFields("role content"),
        "messages assistant": ObjectFields("role content"),
        "messages system": ObjectFields("role content", "output_config", "clear_at"),
        "content text": ObjectFields("type text", f"{_CACHED} citations"),
        "content image": ObjectFields("type source", f"{_CACHED} transformations"),
        "content document": ObjectFields("type source title context", f"{_CACHED} citations"),
        "content search_result": ObjectFields("type source title content", f"{_CACHED} citations"),
        "content thinking": ObjectFields("type thinking", "signature"),
        "content redacted_thinking": ObjectFields("type", "data"),
        "content tool_use": ObjectFields("type id name input", f"{_CACHED} caller toolset_name"),
        "content tool_result": ObjectFields("type tool_use_id content", f"{_CACHED} is_error toolset_name"),
        "content tool_reference": ObjectFields("type tool_name", _CACHED),
        "source base64": ObjectFields("type data media_type"),
        "source text": ObjectFields("type data", "media_type"),
        "source content": ObjectFields("type content"),
        "source url": ObjectFields("type", "url"),
        "source file": ObjectFields("type", "file_id"),
        "output_config": ObjectFields("format", "effort task_budget"),
        "format json_schema": ObjectFields("type schema"),
        "tool_choice auto": ObjectFields("type disable_parallel_tool_use"),
        "tool_choice any": ObjectFields("type disable_parallel_tool_use"),
        "tool_choice tool": ObjectFields("type name disable_parallel_tool_use"),
        "tool_choice none": ObjectFields("type"),
        "tools custom": ObjectFields(
            "type name description input_schema strict",
            f"{_CACHED} allowed_callers defer_loading eager_input_streaming input_examples",
        ),
        "input_schema object": ObjectFields("type properties required"),
        "context_management": ObjectFields("edits"),
    },
    refused={
        "content": "server_tool_use web_search_tool_result web_fetch_tool_result code_execution_tool_result"
        " bash_code_execution_tool_result text_editor_code_execution_tool_result tool_search_tool_result"
        " container_upload advisor_tool_result mcp_tool_use mcp_tool_result compaction tool_addition tool_removal"
        " mcp_tool_listing fallback browser_state",
        "tools": "bash_20241022 bash_20250124 text_editor_20241022 text_editor_20250124 text_editor_20250429"
        " text_editor_20250728 memory_20250818 computer_20241022 computer_20250124 computer_20251124"
        " browser_toolset_20260801 computer_toolset_20260801",
        "edits": "compact_20260112",
    },
    left_out={
        "edits": "clear_tool_uses_20250919 clear_thinking_20251015",
        "tools": "code_execution_20250522 code_execution_20250825 code_execution_20260120 code_execution_20260521"
        " web_search_20250305 web_search_20260209 web_search_20260318 web_fetch_20250910 web_fetch_20260209"
        " web_fetch_20260309 web_fetch_20260318 tool_search_tool_bm25 tool_search_tool_bm25_20251119"
        " tool_search_tool_regex tool_search_tool_regex_20251119 advisor_20260301 mcp_toolset",
    },
    same={"system": "content"},
)

CHAT_OBJECTS = NestedFields(
    "Chat Completions",
    {
        "messages developer": ObjectFields("role content", "name"),
        "messages system": ObjectFields("role content", "name"),
        "messages user": ObjectFields("role content", "name"),
        "messages tool": ObjectFields("role content tool_call_id"),
        "messages assistant": ObjectFields("role content tool_calls", "name refusal", "audio function_call"),
        "content text": ObjectFields("type text", _BREAKPOINT),
        "content refusal": ObjectFields("type refusal"),
        "content image_url": ObjectFields("type image_url", _BREAKPOINT),
        "content input_audio": ObjectFields("type input_audio", _BREAKPOINT),
        "content file": ObjectFields("type file", _BREAKPOINT),
        "image_url": ObjectFields("url", "detail"),
        "input_audio": ObjectFields("format", "data"),
        "file": ObjectFields("filename", "file_data file_id"),
        "tool_calls function": ObjectFields("type id function"),
        "tool_calls custom": ObjectFields("type id custom"),
        "tools function": ObjectFields("type function"),
        "tools custom": ObjectFields("type custom"),
        "function": ObjectFields("name arguments description parameters strict"),
        "custom": ObjectFields("name input description", "format"),
        "tool_choice function": ObjectFields("type function"),
        "tool_choice custom": ObjectFields("type custom"),
        "tool_choice allowed_tools": ObjectFields("type allowed_tools"),
        "allowed_tools": ObjectFields("mode tools"),
        **{f"response_format {kind}": fields for kind, fields in _FORMAT_KINDS.items()},
        "response_format json_schema": ObjectFields("type json_schema"),
        "json_schema": ObjectFields("schema", "name description strict"),
        "stream_options": ObjectFields("include_usage", "include_obfuscation"),
    },
    refused={"messages": "function"},
)

RESPONSES_OBJECTS = NestedFields(
    "Responses",
    {
        "input message": ObjectFields("type role content", "id phase status"),
        "input reasoning": ObjectFields("type content encrypted_content summary", "id status"),
        "input function_call": ObjectFields("type call_id name namespace arguments", "async caller id status"),
        "input custom_tool_call": ObjectFields("type call_id name namespace input", "async caller id"),
        "input function_call_output": ObjectFields("type call_id output", "caller id name namespace status"),
        "input custom_tool_call_output": ObjectFields("type call_id output", "caller id"),
        "content input_text": ObjectFields("type text", _BREAKPOINT),
        "content output_text": ObjectFields("type text", "annotations logprobs"),
        "content refusal": ObjectFields("type refusal"),
        "content reasoning_text": ObjectFields("type text"),
        "content input_image": ObjectFields("type image_url", f"{_BREAKPOINT} detail file_id"),
        "content input_file": ObjectFields("type filename", f"{_BREAKPOINT} detail file_data file_id file_url"),
        "summary summary_text": ObjectFields("type text"),
        "tools function": ObjectFields(
            "type name description parameters strict", "allowed_callers async defer_loading output_schema"
        ),
        "tools custom": ObjectFields("type name description", "allowed_callers async defer_loading format"),
        "tools namespace": ObjectFields("type name description tools"),
        "tool_choice function": ObjectFields("type name"),
        "tool_choice custom": ObjectFields("type name"),
        "tool_choice allowed_tools": ObjectFields("type mode tools"),
        "text": ObjectFields("format", "verbosity"),
        **{f"format {kind}": fields for kind, fields in _FORMAT_KINDS.items()},
        "format json_schema": ObjectFields("type schema", "name description strict"),
    },
    refused={
        "input": "additional_tools apply_patch_call apply_patch_call_output code_interpreter_call compaction"
        " compaction_trigger computer_call computer_call_output configuration_update file_search_call"
        " image_generation_call item_reference local_shell_call local_shell_call_output mcp_approval_request"
        " mcp_approval_response mcp_call mcp_list_tools program program_output shell_call shell_call_output"
        " tool_search_call tool_search_output web_search_call",
        "tools": "local_shell shell apply_patch computer computer_use_preview",
        "tool_choice": "apply_patch code_interpreter computer computer_use computer_use_preview file_search"
        " image_generation mcp programmatic_tool_calling shell web_search_preview web_search_preview_2025_03_11",
    },
    left_out={
        "tools": "code_interpreter file_search image_generation mcp programmatic_tool_calling tool_search web_search"
        " web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11",
    },
    same={"output": "content"},
)


def fields_table() -> str:
    """Return the table of the top-level fields, for docs/reference/fields.md."""
    lines = ["| field | Messages | Chat Completions | Responses |", "|---|---|---|---|"]
    tables = (MESSAGES_FIELDS, CHAT_FIELDS, RESPONSES_FIELDS)
    for name in sorted({name for table in tables for name in table}):
        cells = [_cell(table.get(name)) for table in tables]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rule: FieldRule | None) -> str:
    if rule is None:
        return ""
    return f"{rule.support}: {rule.note}" if rule.note else str(rule.support)


def nested_fields_tables() -> str:
    """Return the tables of the fields within them."""
    return "\n".join(line for one in (MESSAGES_OBJECTS, CHAT_OBJECTS, RESPONSES_OBJECTS) for line in _table(one)) + "\n"


def _table(objects: NestedFields) -> Iterator[str]:
    yield f"\n| object in {objects.title} | honoured | no effect | refused |\n|---|---|---|---|"
    for name, fields in objects.read.items():
        yield f"| `{name}` | {_code(fields.honoured)} | {_code(fields.no_effect)} | {_code(fields.refused)} |"
    for place, kinds in objects.left_out.items():
        yield f"| `{place}` of the types {_code(kinds)} |  | yes |  |"
    for place, kinds in objects.refused.items():
        yield f"| `{place}` of the types {_code(kinds)} |  |  | yes |"


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())
