"""A model directory that is broken is refused in a sentence that names the file and what to do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapter.prompt.renderer import Renderer
from ratchet.errors import ConfigError
from ratchet.model_directory import read_chat_template, require_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 10\n"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors")
Change = Callable[[Path], object]


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the tests' model, to be broken."""
    return Path(shutil.copytree(model, tmp_path / "broken"))


def written(name: str, content: Any) -> Change:
    def change(directory: Path) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (directory / name).write_bytes(data)

    return change


def edited(name: str, **values: Any) -> Change:
    def change(directory: Path) -> None:
        written(name, json.loads((directory / name).read_text()) | values)(directory)

    return change


def cut(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def other_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tiktoken.model")


def as_directory(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").mkdir()


def test_the_model_of_the_tests_is_whole(broken: Path) -> None:
    require_model(broken)


@pytest.mark.parametrize("name", FILES)
def test_a_pointer_of_git_lfs(broken: Path, name: str) -> None:
    if name == "tokenizer_config.json":
        (broken / "chat_template.jinja").unlink()
    written(name, POINTER.encode())(broken)
    with pytest.raises(ConfigError, match=f"{name} is a pointer of Git LFS"):
        require_model(broken)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (written("config.json", []), "config.json has list for a JSON object"),
        (written("config.json", b'{"a": '), "config.json is not JSON"),
        (written("config.json", b"[" * 100_000), "config.json is not JSON"),
        (written("tokenizer.json", "x"), "tokenizer.json has str for a JSON object"),
        (written("tokenizer.json", b"\xff\xfe"), "tokenizer.json is not UTF-8 text"),
        (as_directory, "tokenizer.json cannot be read: Is a directory"),
        (lambda directory: (directory / "tokenizer.json").unlink(), "no tokenizer.json; give a complete"),
        (other_tokenizer, "no tokenizer.json; it has tiktoken.model, which is not read here"),
        (written("chat_template.jinja", b"\xff"), "chat_template.jinja is not UTF-8 text"),
        (written("chat_template.jinja", b""), "has no chat template"),
        (cut, r"model.safetensors has \d+ bytes of \d+; download it again"),
        (written("model.safetensors", b"x"), "less than its header"),
        (written("model.safetensors", b"\x05" + bytes(7) + b"hello"), "is no safetensors file"),
        (written("more.safetensors", b"\x0c" + bytes(7) + b'{"a": [1,2]}'), "is no safetensors file"),
        (
            written("model.safetensors.index.json", {"weight_map": {"a": "model-1.safetensors"}}),
            "lacks model-1.safetensors, which model.safetensors.index.json names",
        ),
    ],
)
def test_a_broken_file(broken: Path, change: Change, says: str) -> None:
    change(broken)
    with pytest.raises(ConfigError, match=says):
        require_model(broken)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (written("tokenizer.json", {}), "describes no tokenizer"),
        (edited("tokenizer.json", model={}), "describes no tokenizer"),
        (edited("tokenizer.json", added_tokens="x"), "describes no tokenizer"),
        (edited("tokenizer.json", added_tokens=[{"id": 1}]), "describes no tokenizer"),
        (edited("config.json", vocab_size=5), "has 400 tokens, and vocab_size in config.json is 5"),
        (edited("config.json", text_config={"vocab_size": 5}), "vocab_size in config.json is 5"),
        (written("tokenizer_config.json", [1]), "tokenizer_config.json has list for a JSON object"),
        (written("chat_template.jinja", b"{% for %}"), "cannot be compiled: .*line 1"),
        (written("chat_template.jinja", b"{{ raise_exception('no') }}"), "shows no question: no"),
        (written("chat_template.jinja", b"{{ 1 / 0 }}"), "shows no question: division by zero"),
        (written("chat_template.jinja", b"{{ messages[7].content }}"), "shows no question: "),
        (written("chat_template.jinja", b"{% for i in range(10**9) %}x{% endfor %}"), "shows no question: Range"),
        (written("chat_template.jinja", b"hello"), "its text is not in the prompt"),
    ],
)
def test_a_tokenizer_or_a_template_that_cannot_be_used(broken: Path, change: Change, says: str) -> None:
    change(broken)
    with pytest.raises(ConfigError, match=says):
        Renderer(broken)


def test_end_tokens_that_the_tokenizer_lacks_end_nothing(broken: Path) -> None:
    known = Renderer(broken).stop_ids
    written("generation_config.json", {"eos_token_id": [10**9, "x", None]})(broken)
    assert set(Renderer(broken).stop_ids) <= set(known)


@pytest.mark.parametrize("place", ["chat_template.json", "tokenizer_config.json", "named"])
def test_where_a_chat_template_may_be(broken: Path, place: str) -> None:
    text = (broken / "chat_template.jinja").read_text()
    (broken / "chat_template.jinja").unlink()
    value: Any = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": text}]
    edited("tokenizer_config.json", chat_template=None)(broken)
    if place == "chat_template.json":
        written(place, {"chat_template": text})(broken)
    else:
        edited("tokenizer_config.json", chat_template=value if place == "named" else text)(broken)
    assert read_chat_template(broken) == text
    require_model(broken)


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize(
    ("texts", "right"),
    [
        ({"default": "plain", "tool_use": "{{ tools }}"}, "tool_use"),
        ({"default": "{{ tools }}", "tool_use": "other {{ tools }}"}, "default"),
        ({"default": "plain", "rag": "{{ tools }}"}, "default"),
        ({"tool_use": "{{ tools }}", "rag": "x"}, "tool_use"),
        ({"default": "You have no tools. {{ x }}", "tool_use": "{%- for one in tools -%}x{%- endfor -%}"}, "tool_use"),
        ({"default": "{# tools: tool_use #}{{ x }}", "tool_use": "{% if tools %}x{% endif %}"}, "tool_use"),
        ({"default": "{% if xml_tools or x.tools %}{% endif %}", "tool_use": "{{ tools | tojson }}"}, "tool_use"),
        ({"default": "{%- if not tools is defined %}x{% endif %}", "tool_use": "{{ tools }}"}, "default"),
    ],
)
def test_of_several_templates_the_one_with_tools(
    broken: Path, texts: dict[str, str], right: str, in_files: bool
) -> None:
    (broken / "chat_template.jinja").unlink()
    listed = [{"name": name, "template": text} for name, text in texts.items()]
    edited("tokenizer_config.json", chat_template=None if in_files else listed)(broken)
    if in_files:
        (broken / "additional_chat_templates").mkdir()
        for name, text in texts.items():
            folder = broken if name == "default" else broken / "additional_chat_templates"
            (folder / f"{'chat_template' if name == 'default' else name}.jinja").write_text(text)
    assert read_chat_template(broken) == texts[right]


def test_templates_of_other_names_are_refused(broken: Path) -> None:
    (broken / "chat_template.jinja").unlink()
    edited("tokenizer_config.json", chat_template=[{"name": "rag", "template": "x"}])(broken)
    with pytest.raises(ConfigError, match=r"has the chat templates rag, neither .* into chat_template\.jinja"):
        require_model(broken)


def test_the_template_of_a_processor_is_the_last_that_is_read(broken: Path) -> None:
    """Qwen2.5-VL has both, and only the tokenizer's shows tools."""
    text = (broken / "chat_template.jinja").read_text()
    (broken / "chat_template.jinja").unlink()
    edited("tokenizer_config.json", chat_template=text)(broken)
    written("chat_template.json", {"chat_template": "another"})(broken)
    assert read_chat_template(broken) == text


def test_a_file_that_the_index_does_not_name_is_not_read(broken: Path) -> None:
    written("model.safetensors.index.json", {"weight_map": {"a": "model.safetensors"}})(broken)
    written("consolidated.safetensors", POINTER.encode())(broken)
    require_model(broken)


def test_a_link_without_its_file(broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    (broken / "model.safetensors").symlink_to(broken / "blobs" / "missing")
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors: it is a link to a file that is missing"):
        require_model(broken)
