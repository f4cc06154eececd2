"""The contract of a dataset format: given a path, yield rows of the store's `task` table one at a time.

Every format yields the same kind of row, validated by the same model, so that graders and stages handle one shape. A
reader does not raise for a bad row but yields a `Problem`, so that `ratchet tasks check` can list all of them.
"""

import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from grading.broken_oracles import BrokenOracle, spec_sources
from ratchet.config import DatasetConfig
from ratchet.config_sections import BoxUser
from ratchet.errors import DatasetError
from ratchet.storable_values import find_unstorable
from ratchet.types import OpenedUse
from sandboxes.build_context import BUILD_CONTEXT
from store.tasks import NewTask, TaskFields

_MAX_LISTED = 100
GRADER_KEYS = ("swepro", "swe_bench", "eval_cmd", "f2p_script")


@dataclass(slots=True, frozen=True)
class Problem:
    """A row that cannot be used. `row` counts from 1; 0 means the whole file. `field` may be empty."""

    file: str
    row: int
    field: str
    message: str

    def __str__(self) -> str:
        where = self.file + (f", row {self.row}" if self.row else "")
        return f"{where}{', field ' + self.field if self.field else ''}: {self.message}"


@dataclass(slots=True, frozen=True)
class RawRow:
    """A row as its format gives it, before it is validated. `number` counts from 1."""

    number: int
    label: Any
    prompt: Any
    metadata: Any
    file: str


_TestName = Annotated[str, Field(pattern=r"\S")]
_Amount = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]


class NeededSettings(BaseModel):
    """`metadata.needed_settings`: settings of a run, by name, that have to offer at least as much. 0: no need."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    eval_seconds: _Amount = Field(0, alias="limits.eval_seconds")
    agent_seconds: _Amount = Field(0, alias="limits.agent_seconds")
    memory_mib: _Amount = Field(0, alias="sandbox.memory_mib")
    cpus: _Amount = Field(0, alias="sandbox.cpus")
    network: list[OpenedUse] = Field([], alias="sandbox.network")
    user: Literal["root"] | None = Field(None, alias="grading.user")


def check_variable_name(name: str) -> str:
    """Return the name of a task's variable. Raises ValueError for one that is no shell variable, or that is ours."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name.startswith("RATCHET_"):
        raise ValueError(
            f"expected a name of letters, digits and _ that does not begin with RATCHET_, found {name!r:.60}; rename it"
        )
    return name


def _check_base64(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9+/]*={0,2}", text) or len(text) % 4:
        raise ValueError(f"expected base64, found {text!r:.60}; encode it without line ends")
    return text


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class RemoteEnvInfo(_Part):
    """`metadata.remote_env_info`: the Python file that the grader f2p_script runs."""

    f2p_script: str | None = Field(default=None, min_length=1)


class SwePro(_Part):
    """`metadata.swepro`, with upstream's field names. `run_script` and `parser_script`: texts of the two files."""

    before_repo_set_cmd: str
    selected_test_files_to_run: list[str] = Field(min_length=1)
    fail_to_pass: list[_TestName] = Field(min_length=1)
    pass_to_pass: list[_TestName]
    run_script: str = Field(min_length=1)
    parser_script: str = Field(min_length=1)
    env_cmds: str | None = None


class SweBench(_Part):
    """`metadata.swe_bench`: the tests of the row, how they run and how their log is read."""

    fail_to_pass: list[_TestName] = Field(min_length=1)
    pass_to_pass: list[_TestName] = []
    test_cmd: str = Field(min_length=1)
    test_patch: str = ""
    log_parser: str = "pytest"


class Integrity(BaseModel):
    """`metadata.integrity`. `allow`, `deny`: patterns beside the rule table's. `witness` False: no pytest plugin."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    allow: list[str] = []
    deny: list[str] = []
    witness: bool = True


class Metadata(_Part):
    """`metadata` of one row; docs/tasks.md describes the fields. Unknown keys are kept."""

    image: str = Field(min_length=1)
    workdir: str = Field(pattern=r"^/.+")
    problem_statement: str | None = None
    pre_commands: list[str] | str = []
    network: list[OpenedUse] = []
    agent_environment: dict[Annotated[str, AfterValidator(check_variable_name)], str] = {}
    agent_user: BoxUser | None = None
    tests_user: BoxUser | None = None
    repository_archive: str | None = None
    gold_patch: str | None = None
    empty_patch_fails: bool = Field(default=False, strict=True)
    solution_archive: Annotated[str, AfterValidator(_check_base64)] | None = None
    solution_cmd: str | None = Field(default=None, min_length=1)
    needed_settings: NeededSettings = NeededSettings()
    test_files: list[str] | None = None
    tests_archive: str | None = None
    expected_tests: list[str] = []
    verifier: Literal["harbor"] | None = None
    integrity: Integrity = Integrity()
    broken_oracles: list[BrokenOracle] = []
    eval_cmd: str | None = Field(default=None, min_length=1)
    swepro: SwePro | None = None
    swe_bench: SweBench | None = None
    remote_env_info: RemoteEnvInfo | None = None

    @property
    def graders(self) -> list[str]:
        """The graders that the row has data for; a valid row has exactly one."""
        found = [name for name in GRADER_KEYS if name != "f2p_script" and getattr(self, name) is not None]
        return found + (["f2p_script"] if self.remote_env_info and self.remote_env_info.f2p_script else [])

    @model_validator(mode="after")
    def _one_grader(self) -> Self:
        if len(self.graders) != 1:
            found = ", found " + (", ".join(self.graders) or "none")
            for name in self.model_extra or {}:
                if near := difflib.get_close_matches(name, GRADER_KEYS, 1):
                    found += f"; `{name}` may be meant as `{near[0]}`"
            raise ValueError(f"expected exactly one grader of: {', '.join(GRADER_KEYS)}{found}")
        return self

    @model_validator(mode="after")
    def _solution_is_whole(self) -> Self:
        if self.solution_cmd is not None and not self.solution_archive:
            raise ValueError("expected solution_archive beside solution_cmd, found none; add it, or give gold_patch")
        return self

    @model_validator(mode="after")
    def _broken_oracles_fit(self) -> Self:
        sources = spec_sources(self.model_dump(include={"eval_cmd", "swe_bench", "remote_env_info"}))
        for number, broken in enumerate(self.broken_oracles):
            if not broken.is_valid:
                raise ValueError(f"broken_oracles.{number} names no test that must fail (must_fail or exit_fails)")
            if not broken.fits(sources):
                raise ValueError(f"broken_oracles.{number} was made for other test commands than this row's")
        return self


_EXPECTED = {
    "missing": "a value",
    "string_type": "a string",
    "string_pattern_mismatch": "an absolute path",
    "list_type": "a list",
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "float_type": "a number",
    "extra_forbidden": "no such name",
}


def validate_row(raw: RawRow, dataset: DatasetConfig) -> TaskFields | Problem:
    """Return the row's fields, or its first problem: file, row, field, what was expected and what was found."""

    def problem(field: str, message: str) -> Problem:
        return Problem(raw.file, raw.number, field, message)

    for key, value in ((dataset.label_key, raw.label), ("metadata", raw.metadata)):
        if unstorable := find_unstorable(value, only_json=True):
            return problem(".".join((key, *unstorable.path)), unstorable.message)
    if not isinstance(raw.label, str) or not raw.label:
        return problem(dataset.label_key, f"expected a string, found {raw.label!r:.60}")
    if not isinstance(raw.metadata, dict):
        return problem(dataset.metadata_key, f"expected an object, found {type(raw.metadata).__name__}")
    try:
        parsed = Metadata.model_validate(raw.metadata)
    except ValidationError as error:
        item = error.errors()[0]
        place = ".".join(("metadata", *(str(part) for part in item["loc"])))
        if item["type"] == "value_error":
            return problem(place, item["msg"].removeprefix("Value error, "))
        found = "nothing" if item["type"] == "missing" else f"{item['input']!r:.60}"
        return problem(place, f"expected {_EXPECTED.get(item['type'], item['msg'])}, found {found}")
    statement = parsed.problem_statement or raw.prompt
    if not isinstance(statement, str) or not statement:
        return problem(
            dataset.input_key,
            f"expected a string where metadata.problem_statement is missing, found {raw.prompt!r:.60}",
        )
    if unstorable := find_unstorable(statement):
        return problem(dataset.input_key, unstorable.message)
    pre_commands = [parsed.pre_commands] if isinstance(parsed.pre_commands, str) else parsed.pre_commands
    spec = {**raw.metadata, "problem_statement": statement, "pre_commands": pre_commands}
    return {
        "label": raw.label,
        "image": parsed.image,
        "workdir": parsed.workdir,
        "grader": parsed.graders[0],
        "spec": spec,
    }


def with_identity(row: TaskFields, path: Path, digest: str, number: int) -> NewTask:
    """Return the row for import. Equal rows of a dataset have equal digests, so that a second import adds nothing."""
    # Without an archive, whose bytes depend on the version of zlib; the image's name is the digest of its contents.
    known = {**row, "spec": {name: value for name, value in row["spec"].items() if name != BUILD_CONTEXT}}
    row_digest = hashlib.sha256(orjson.dumps(known, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return {"dataset": str(path), "dataset_digest": digest, "row_digest": row_digest, "row_no": number, **row}


def rows_of(raws: Iterator[RawRow | Problem], dataset: DatasetConfig, digest: str) -> Iterator[NewTask]:
    """Yield rows for the store, in order, up to the first that cannot be used. Raises DatasetError at the end, with
    file, row (from 1), field and expectation of each row that cannot be used."""
    problems: list[str] = []
    for row in checked_rows(raws, dataset, digest):
        if isinstance(row, Problem):
            problems.append(str(row))
        elif not problems:
            yield row
    if problems:
        more = [f"and {len(problems) - _MAX_LISTED} more"] if len(problems) > _MAX_LISTED else []
        raise DatasetError("\n".join(problems[:_MAX_LISTED] + more))


def checked_rows(raws: Iterator[RawRow | Problem], dataset: DatasetConfig, digest: str) -> Iterator[NewTask | Problem]:
    """Yield every row, or its problem."""
    for number, raw in enumerate(raws):
        if dataset.limit is not None and number >= dataset.limit:
            return
        row = raw if isinstance(raw, Problem) else validate_row(raw, dataset)
        yield row if isinstance(row, Problem) else with_identity(row, Path(dataset.path), digest, number)
