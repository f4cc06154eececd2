"""Write the pages of docs/reference/ from the code; with `--check`, build them elsewhere and look for what is missing.

Generated pages are not committed: `make docs` writes them. `--check` copies the hand-written pages to a temporary
folder, builds the generated ones beside them, and names each dead link and each thing without words.
"""

import argparse
import ast
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_json
from reference_pages import commands_page, http_page, page, tables_page

from tests.benchmarks._runs_table import bench_runs_table
from tests.brief.page import brief_page
from tests.page_checks import dead_links, without_words

SOURCE = Path("ratchet/types.py")
FOLDER = Path("docs/reference")
BESIDE_DOCS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE")


def pages() -> dict[str, str]:
    """Return the text of each generated page by its name in docs/reference/."""
    return {
        "glossary.md": glossary_page(ast.parse(SOURCE.read_text())),
        "configuration.md": config_page(),
        "commands.md": commands_page(),
        "tables.md": tables_page(),
        "http.md": http_page(),
        "fields.md": api_fields_page(),
        "agents.md": agents_page(),
        "vime.md": vime_page(),
        "brief.md": page("The brief, feature by feature", "tests/brief/", brief_page()),
        "integrity.md": integrity_page(),
        "benchmarks.md": page("Benchmark runs", "docs/bench/", bench_runs_table()),
    }


def words(tree: ast.Module) -> list[tuple[str, str]]:
    """(word, sentence) for each line `word: sentence.` of the module docstring."""
    docstring = ast.get_docstring(tree) or ""
    return [(match[1], match[2]) for match in re.finditer(r"^([a-z][a-z ]*): (.+\.)$", docstring, re.M)]


def enums(tree: ast.Module) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """(name, docstring, [(value, sentence)]) for each enum."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "StrEnum" for base in node.bases):
            yield node.name, ast.get_docstring(node) or "", list(_values(node))


def _values(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.Assign) and isinstance(following, ast.Expr):
            yield ast.literal_eval(statement.value), ast.literal_eval(following.value)


def glossary_page(tree: ast.Module) -> str:
    lines = [
        "# Glossary",
        "",
        "For every reader: code, pages and messages use these words. Generated from `ratchet/types.py` by `make docs`.",
        "",
        "| word | meaning |",
        "|---|---|",
        *(f"| {word} | {sentence} |" for word, sentence in words(tree)),
        "",
        "## States and other values",
    ]
    for name, docstring, values in enums(tree):
        lines += ["", f"### {name}", "", docstring, "", "| value | meaning |", "|---|---|"]
        lines += [f"| `{value}` | {' '.join(sentence.split())} |" for value, sentence in values]
    return "\n".join(lines) + "\n"


def api_fields_page() -> str:
    """Return the page of every field that the adapter knows of the three protocols."""
    from tests.unit.adapter.dialects.nested_fields import fields_table, nested_fields_tables

    return page("Fields of the model API", "adapter/dialects/", fields_table() + nested_fields_tables())


def agents_page() -> str:
    from stack.agent_programs import FETCHABLE
    from tests.e2e.adapter.feature_matrix import agents_table

    programs = [make() for make in FETCHABLE.values()]
    return page(
        "Features of the agents", "tests/e2e/adapter/", agents_table({one.name: one.pinned for one in programs})
    )


def integrity_page() -> str:
    from tests.integration.grading.tables import attacks, rules

    tables = f"## Rules\n\n{rules()}\n\n## Attacks\n\n{attacks()}\n"
    return page("Rules and attacks", "grading/rules.toml` and `tests/integration/grading/attacks.py", tables)


def vime_page() -> str:
    from ratchet.vime_names import DUMPS, REFUSED, ROLLOUT_ID, VIME_ARGUMENTS, VIME_VARIABLES

    lines = ["## Variables", "", "`VIME_AGENT_X` may also be called `SWE_X` or `SLIME_AGENT_X`.", ""]
    lines += ["| variable | key | meaning |", "|---|---|---|"]
    for one in VIME_VARIABLES:
        only = f" Only for `{one.harness}`." if one.harness else ""
        key = f"`{one.key}`" if one.key else ""
        lines.append(f"| `{one.name}` | {key} | {_in_cell(one.meaning)}{only} |")
    lines += ["", "## Arguments of `ratchet train`", "", "| argument | key | meaning |", "|---|---|---|"]
    lines += [f"| `{one.name}` | `{one.key}` | {_in_cell(one.meaning)} |" for one in VIME_ARGUMENTS]
    lines.append(
        f"| `{DUMPS}` | | A file per step with all its rollouts, also those without a verdict; `{ROLLOUT_ID}` is the "
        "step, `eval_STEP` for evaluations, `unused` for what a run leaves at its end. |"
    )
    lines.append("| `--vllm-X VALUE`, any other X | `engine.args` | Passed to vLLM as `--X VALUE`. |")
    lines += [f"| `{name}` | | Refused: {_in_cell(reason)}. |" for name, reason in REFUSED.items()]
    return page("Variables and arguments of vime", "ratchet/vime_names.py", "\n".join(lines) + "\n")


def config_page() -> str:
    from ratchet.config import RunConfig
    from ratchet.steering import CHANGEABLE

    lines = [
        "# Configuration of a run",
        "",
        "For the author of a run's config. Generated from `ratchet/config.py` and its sections by `make docs`.",
        "",
        "A key is set in the YAML file, by `--set training.steps=20`, or by `RATCHET_TRAINING__STEPS=20`;",
        "`ratchet admin config FILE` prints the result with every default. Settings of workflows and queues are in",
        "`temporal.yaml`.",
        "",
        "The column *while running* says what `ratchet set RUN KEY=VALUE` acts on. `ratchet set` refuses keys without",
        "an entry and says why; `ratchet set --add-steps` changes `training.steps`. None in a text is `null` in YAML;",
        "N of `datasets.N` is the dataset's number, from 0. A name in parentheses is another name that is accepted.",
    ]
    sections = {"": RunConfig} | {
        name: found for name, one in RunConfig.model_fields.items() if (found := _section(one))
    }
    for section, model in sections.items():
        described = RunConfig.model_fields[section].description if section else "The whole run."
        lines += ["", f"## {section or 'Top level'}", "", " ".join((described or "").split()), ""]
        lines += ["| key | default | meaning | while running |", "|---|---|---|---|"]
        prefix = f"{section}." if section else ""
        if section and _is_list(RunConfig.model_fields[section]):
            prefix += "N."
        lines += _config_rows(model, prefix, CHANGEABLE)
    return "\n".join(lines) + "\n"


def _config_rows(model: type[BaseModel], prefix: str, changeable: Mapping[str, str]) -> Iterator[str]:
    """Yield a row of each key; keys of a section inside a section follow it."""
    for name, one in model.model_fields.items():
        inner = _section(one)
        if inner and not prefix:
            continue  # it has a heading of its own
        key = prefix + name
        acts_on = changeable.get(key.replace(".N.", "."), "")
        yield f"| `{key}` | {_default(one)} | {_in_cell(one.description or '')} | {_in_cell(acts_on)} |"
        if inner:
            yield from _config_rows(inner, f"{key}.N." if _is_list(one) else f"{key}.", changeable)


def _is_list(field: FieldInfo) -> bool:
    return re.search(r"(list|tuple)\[", str(field.annotation)) is not None


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a section, also of an optional one or a list of them; None for a plain value."""
    candidates = [field.annotation, *get_args(field.annotation)]
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, BaseModel)), None)


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "null"
    return f"`{_in_cell(to_json(value).decode())}`"


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def write(root: Path) -> None:
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (folder / name).write_text(text)


def problems(root: Path) -> list[str]:
    """Build all pages of `root` in a temporary folder and return a sentence for each fault."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        shutil.copytree(root / "docs", copy / "docs", ignore=shutil.ignore_patterns(FOLDER.name))
        for beside in BESIDE_DOCS:
            shutil.copy(root / beside, copy)
        write(copy)
        return dead_links(copy) + without_words(copy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page lacks something")
    parser.add_argument("--root", type=Path, default=Path(), help="folder of README.md and docs/")
    asked = parser.parse_args()
    if not asked.check:
        write(asked.root)
        return 0
    found = problems(asked.root)
    print("\n".join(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
