"""Tasks from data sets of SWE-bench's form: repositories to repair, for the environment `swebench`.

A row becomes a task when it has no ``id`` but ``instance_id``, or the columns of R2E-Gym. What an
agent must not see is in the arguments of the reward, and in the reference.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from aenv_ray.errors import ConfigError
from aenv_ray.sampling.tasks.rows import file_rows, parsed
from aenv_ray.trajectories.schema import Call, Task, ToolCall
from aenv_ray.validation import problems_of

TESTS_S: Final = 1800.0
"""Longest run of an instance's tests, as in the official harness."""
REST_S: Final = 900.0
"""Longest run of everything else that grading does."""
SETUP_S: Final = 900.0
EXPECTED: Final = "expected_output_json"
COMMIT: Final = "parsed_commit_content"
R2E_TESTS: Final = "bash run_tests.sh"
R2E_HIDDEN: Final = ("/r2e_tests", "/testbed/r2e_tests", "/testbed/run_tests.sh")
"""Where images of R2E-Gym have the hidden tests, and the command that runs them."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m")
PYTEST: Final = "pytest -rA --color=no"
"""Runs the tests of rows without test patch, test command and script."""
SPECIFIED: Final = frozenset({
    "apache/druid", "apache/lucene", "astral-sh/ruff", "astropy/astropy",
    "Automattic/wp-calypso", "axios/axios", "babel/babel", "briannesbitt/carbon",
    "burntsushi/ripgrep", "caddyserver/caddy", "chartjs/Chart.js", "dbt-labs/dbt-core",
    "diegomura/react-pdf", "django/django", "facebook/docusaurus", "faker-ruby/faker",
    "fastlane/fastlane", "fluent/fluentd", "fmtlib/fmt", "gin-gonic/gin", "gohugoio/hugo",
    "google/gson", "hashicorp/terraform", "immutable-js/immutable-js", "javaparser/javaparser",
    "jekyll/jekyll", "jordansissel/fpm", "jqlang/jq", "laravel/framework", "markedjs/marked",
    "marshmallow-code/marshmallow", "matplotlib/matplotlib", "micropython/micropython",
    "mrdoob/three.js", "mwaskom/seaborn", "nlohmann/json", "nushell/nushell", "pallets/flask",
    "php-cs-fixer/php-cs-fixer", "phpoffice/phpspreadsheet", "preactjs/preact",
    "processing/p5.js", "projectlombok/lombok", "prometheus/prometheus", "psf/requests",
    "pvlib/pvlib-python", "pydata/xarray", "pydicom/pydicom", "pylint-dev/astroid",
    "pylint-dev/pylint", "pytest-dev/pytest", "pyvista/pyvista", "reactivex/rxjava",
    "redis/redis", "rubocop/rubocop", "scikit-learn/scikit-learn", "sharkdp/bat",
    "sphinx-doc/sphinx", "sqlfluff/sqlfluff", "swe-bench/humaneval", "sympy/sympy",
    "tokio-rs/axum", "tokio-rs/tokio", "uutils/coreutils", "valkey-io/valkey", "vuejs/core",
})  # fmt: skip
"""Repositories for which swebench 4.1 has specs, and SWE-bench publishes images."""
_TEST_FOLDERS: Final = frozenset({"test", "tests", "Test", "Tests"})
_FILE: Final = re.compile(r'^diff --git "?a/(.*?)"? "?b/(.*?)"?$', re.MULTILINE)
_INSTRUCTION: Final = (
    "The repository in {directory} has a problem, which is described below. Change the repository "
    "so that it is solved. Hidden tests judge the result; changes of tests do not count.\n\n{text}"
)


def _names(value: Any) -> Any:
    """Return a list that a data set may hold as JSON text."""
    return parsed(value, "a list of tests as JSON text") if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_names)]


class _Named(BaseModel):
    """A file of a commit."""

    path: str


class _Header(BaseModel):
    """The first lines of a file's changes; `misc_line` is such as ``new file mode 100644``."""

    file: _Named
    misc_line: str | None = None


class _Range(BaseModel):
    start: int
    length: int | None = None

    def __str__(self) -> str:
        return str(self.start) if self.length is None else f"{self.start},{self.length}"


class _Descriptor(BaseModel):
    old_range: _Range
    new_range: _Range


class _Line(BaseModel):
    content: str
    type: Literal["context", "added", "deleted", "note"]


class _Lines(BaseModel):
    all_lines: tuple[_Line, ...] = ()


class _Hunk(BaseModel):
    descriptor: _Descriptor
    line_group: _Lines

    def __str__(self) -> str:
        marks = {"context": " ", "added": "+", "deleted": "-", "note": "\\ "}
        lines = "".join(f"{marks[one.type]}{one.content}\n" for one in self.line_group.all_lines)
        return f"@@ -{self.descriptor.old_range} +{self.descriptor.new_range} @@\n{lines}"


class _FileDiff(BaseModel):
    """The changes of a file, as R2E-Gym has them."""

    header: _Header
    is_binary_file: bool = False
    minus_file: _Named | None = None
    plus_file: _Named | None = None
    hunks: tuple[_Hunk, ...] = ()

    @property
    def is_of_solution(self) -> bool:
        """Whether a reference needs them: those of tests come with the hidden tests."""
        *folders, name = self.header.file.path.split("/")
        is_test = name.startswith("test_") or name.endswith(("_test.py", ".test"))
        return not (self.is_binary_file or is_test or _TEST_FOLDERS.intersection(folders))

    def __str__(self) -> str:
        path = self.header.file.path
        lines = [f"diff --git a/{path} b/{path}", *filter(None, [self.header.misc_line])]
        if self.minus_file and self.plus_file:
            lines += [f"--- {self.minus_file.path}", f"+++ {self.plus_file.path}"]
        return "".join(f"{line}\n" for line in lines) + "".join(map(str, self.hunks))


class _ParsedCommit(BaseModel):
    """A commit that repairs a repository, as R2E-Gym has it."""

    file_diffs: tuple[_FileDiff, ...]


def _patch_of(commit: Any) -> str:
    """Return the changes of a commit that are not tests; empty without a commit."""
    if not commit:
        return ""
    given = parsed(commit, COMMIT) if isinstance(commit, str) else commit
    try:
        found = _ParsedCommit.model_validate(given)
    except ValidationError as exc:
        raise ConfigError(
            f"{COMMIT}: {problems_of(exc)}",
            hint="without this column, the task has no reference",
        ) from None
    return "".join(str(one) for one in found.file_diffs if one.is_of_solution)


class RepositoryRow(BaseModel):
    """A row of a data set. Columns that grading does not need are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    instance_id: str = Field(min_length=1)
    problem_statement: str = ""
    repo: str = ""
    version: str | None = None
    base_commit: str = ""
    patch: str = ""
    """The reference solution; without `test_patch`, what introduces the bug, as in SWE-smith."""
    test_patch: str = ""
    fail_to_pass: Names = Field(alias="FAIL_TO_PASS", min_length=1)
    """In a row of R2E-Gym: the tests that are expected to pass, without their files."""
    pass_to_pass: Names = Field(alias="PASS_TO_PASS", default=())
    image: str = Field(
        default="", validation_alias=AliasChoices("image", "image_name", "docker_image")
    )
    eval_script: str = ""
    """What runs the tests, as the data sets of swebench 5 have it."""
    test_cmd: str | tuple[str, ...] = ()
    """What runs the tests of data sets without scripts, such as ``pytest -rA``."""
    log_parser: str = ""
    eval_type: str = "pass_and_fail"
    directory: str = "/testbed"
    expected: dict[str, str] = Field(default_factory=dict)
    """For a row of R2E-Gym: the status of each test, by its name without the file."""

    @model_validator(mode="before")
    @classmethod
    def _from_r2e(cls, data: Any) -> Any:
        """Take what a row needs from the columns of R2E-Gym."""
        if EXPECTED not in data:
            return data
        text, commit = data[EXPECTED], str(data.get("commit_hash") or "")
        expected = parsed(text, EXPECTED) if isinstance(text, str) else text
        if not isinstance(expected, Mapping):
            raise ConfigError(
                f"{EXPECTED} is not a JSON object of tests and their statuses",
                hint="correct this column, as in R2E-Gym's dataset",
            )
        plain = {_ANSI.sub("", name).split(" - ")[0]: status for name, status in expected.items()}
        return {
            "instance_id": f"{data.get('repo_name', 'r2e')}-{commit[:12] or 'unknown'}",
            "base_commit": commit,
            "FAIL_TO_PASS": [name for name, status in plain.items() if status == "PASSED"],
            "test_cmd": R2E_TESTS,
            "expected": plain,
            "patch": _patch_of(data.get(COMMIT)),
            **data,
        }

    @model_validator(mode="before")
    @classmethod
    def _from_install_config(cls, data: Any) -> Any:
        """Take the test command and log parser from where SWE-rebench has them."""
        config = data.get("install_config")
        if not isinstance(config, Mapping):
            return data
        found = {name: config[name] for name in ("test_cmd", "log_parser") if config.get(name)}
        return {**found, **data}

    @property
    def is_broken_by_patch(self) -> bool:
        """Whether the image has the correct repository, and `patch` introduces the bug."""
        return not (self.test_patch or self.eval_script or self.expected)

    @property
    def commands(self) -> list[str]:
        """The test commands, if the row or its form has some."""
        if isinstance(self.test_cmd, str):
            return [self.test_cmd]
        return list(self.test_cmd) or ([PYTEST] if self.is_broken_by_patch else [])

    @property
    def lack(self) -> str | None:
        """Why the task cannot be played, though its row is complete; None if it can."""
        if not self.problem_statement.strip():
            return "the row has no problem_statement"
        required = (*self.fail_to_pass, *self.pass_to_pass)
        if self.commands == [PYTEST] and not any("::" in name for name in required):
            return "the row's tests are not pytest's, and it has no test_cmd"
        if not self.image and self.origin not in SPECIFIED:
            return f"the row has no image, and SWE-bench publishes none for {self.origin}"
        if self.repo not in SPECIFIED and not (self.eval_script or self.commands):
            return f"the row has no test_cmd, and swebench has no specs for {self.repo}"
        return None

    @property
    def origin(self) -> str:
        """The repository; if the row has none, the one that its id names, as in SWE-bench."""
        named, _, _ = self.instance_id.rpartition("-")
        return self.repo or named.replace("__", "/", 1) or self.instance_id

    @property
    def datasource(self) -> str:
        """The image of the repository; by default the one that SWE-bench publishes."""
        if self.image:
            return self.image
        name = self.instance_id.lower().replace("__", "_1776_")
        return f"docker.io/swebench/sweb.eval.x86_64.{name}:latest"


def is_row(data: Any) -> bool:
    """Return whether data is a row of such a data set rather than a task."""
    is_known = isinstance(data, Mapping) and ("instance_id" in data or EXPECTED in data)
    return is_known and "id" not in data


def task_of(where: str, data: Mapping[str, Any]) -> Task:
    """Return the task of a row.

    Raises:
        ConfigError: The row is malformed; the message has its place and field.
    """
    given = {name: value for name, value in data.items() if value is not None}
    try:
        row = RepositoryRow.model_validate(given)
    except ValidationError as exc:
        raise ConfigError(
            f"{where}: {problems_of(exc)}",
            hint="a row of SWE-bench's form has instance_id, problem_statement, patch, test_patch, "
            "FAIL_TO_PASS and PASS_TO_PASS (lists, or JSON text), and repo, version and "
            "base_commit, or eval_script and log_parser, or test_cmd",
        ) from None
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc.message}", hint=exc.hint) from None
    _expect_whole(where, row)
    return _task(row)


def _expect_whole(where: str, row: RepositoryRow) -> None:
    """Raise an error for a row that cannot be graded."""
    lack = ""
    if row.is_broken_by_patch:
        if not row.patch:
            lack = "test_patch: neither it nor a patch that introduces the bug is there"
        elif not row.image:
            lack = "test_patch: it is missing; a task without one needs an image"
    elif not row.eval_script and not row.base_commit:
        lack = "base_commit: it is missing"
    elif not (row.eval_script or row.test_cmd) and not (row.repo and row.version):
        lack = "version: repo and version name the official specs; they or test_cmd are needed"
    elif row.eval_script and not row.log_parser:
        lack = "log_parser: it is missing; eval_script needs one, such as parse_log_pytest"
    if not lack:
        for name in ("patch", "test_patch"):
            text = getattr(row, name)
            if text and not re.search(r"^(diff --git|--- )", text, re.MULTILINE):
                lack = f"{name}: it is not a patch"
    if lack:
        raise ConfigError(
            f"{where} ({row.instance_id}): {lack}", hint="complete this row, or leave it out"
        )


def _task(row: RepositoryRow) -> Task:
    bug_patch = row.patch if row.is_broken_by_patch else ""
    hidden = list(R2E_HIDDEN) if row.expected else _files_of(row.fail_to_pass) if bug_patch else []
    instance = {
        "instance_id": row.instance_id,
        "repo": row.repo,
        "version": row.version or "",
        "base_commit": row.base_commit,
        "test_patch": row.test_patch,
        "FAIL_TO_PASS": list(row.fail_to_pass),
        "PASS_TO_PASS": list(row.pass_to_pass),
        "eval_script": row.eval_script,
        "test_cmd": row.commands,
        "log_parser": row.log_parser,
        "eval_type": row.eval_type,
        "directory": row.directory,
        "bug_patch": bug_patch,
        "expected": row.expected,
        "hidden": hidden,
        "gold_files": sorted({name for pair in _FILE.findall(row.patch) for name in pair}),
    }
    prepared: dict[str, Any] = {
        "directory": row.directory,
        "specs": {name: instance[name] for name in ("repo", "version", "log_parser")},
    }
    if bug_patch:
        prepared["bug_patch"] = bug_patch
    if hidden:
        prepared["remove"] = hidden
    if row.eval_script or row.commands:
        prepared["specs"] |= {"repo": "", "log_parser": row.log_parser or "parse_log_pytest"}
    return Task(
        id=row.instance_id,
        instruction=_INSTRUCTION.format(directory=row.directory, text=row.problem_statement),
        datasource=row.datasource,
        setup=Call(function="start_task", arguments=prepared, timeout_s=SETUP_S),
        submission=Call(function="submission", timeout_s=SETUP_S),
        reward=Call(
            name="resolved",
            arguments={"instance": instance, "timeout_s": TESTS_S},
            timeout_s=TESTS_S + REST_S,
        ),
        reference=_reference(row),
        unsupported=row.lack,
    )


def _files_of(tests: Iterable[str]) -> list[str]:
    """Return the files of pytest's names of tests, which an image of SWE-smith contains."""
    files = {name.partition("::")[0] for name in tests if "::" in name}
    return sorted(name for name in files if name and ".." not in name.split("/"))


def _reference(row: RepositoryRow) -> tuple[ToolCall, ...]:
    """Return the calls that apply the reference solution."""
    if not row.patch:
        return ()
    end = f"EOF_{uuid.uuid5(uuid.NAMESPACE_URL, row.patch).hex}"
    reverse = " --reverse" if row.is_broken_by_patch else ""
    text = row.patch if row.patch.endswith("\n") else f"{row.patch}\n"
    command = f"git apply{reverse} - <<'{end}'\n{text}{end}"
    return (
        ToolCall(tool="shell", arguments={"command": command}),
        ToolCall(tool="submit"),
    )


# --- predictions ---------------------------------------------------------------------------------


class Prediction(BaseModel):
    """A prediction in the official format."""

    model_config = ConfigDict(frozen=True, extra="ignore", use_attribute_docstrings=True)

    instance_id: str
    model_patch: str | None = None
    """None or empty: the model gave none, and the instance is not resolved."""
    model_name_or_path: str = ""


def load_predictions(path: str | Path) -> list[Prediction]:
    """Return the predictions of a file: JSON Lines, a JSON list, or a JSON object by id.

    Raises:
        ConfigError: The file cannot be read, a prediction is malformed, or an id occurs twice.
    """
    path = Path(path)
    found: dict[str, Prediction] = {}
    for where, data in _prediction_rows(path):
        try:
            one = Prediction.model_validate(data)
        except ValidationError as exc:
            raise ConfigError(
                f"{where}: {problems_of(exc)}",
                hint='a prediction is {"instance_id": …, "model_patch": …, '
                '"model_name_or_path": …}',
            ) from None
        if one.instance_id in found:
            raise ConfigError(
                f"{where}: there is another prediction for {one.instance_id}",
                hint="leave one prediction for each task",
            )
        found[one.instance_id] = one
    return list(found.values())


def _prediction_rows(path: Path) -> Iterable[tuple[str, Any]]:
    if not path.is_file():
        raise ConfigError(
            f"there is no file of predictions {path}",
            hint="give a .json or .jsonl file of the predictions of swebench",
        )
    try:
        text = path.read_text(encoding="utf-8-sig") if path.suffix == ".json" else ""
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"predictions {path} cannot be read: {exc}",
            hint="give a readable .json or .jsonl file in UTF-8",
        ) from exc
    if text.lstrip().startswith("{"):
        try:
            by_id = json.loads(text)
        except ValueError:
            return file_rows(path)  # one in each line
        if "instance_id" not in by_id:
            return [(f"{path}, {name}", data) for name, data in by_id.items()]
    return file_rows(path)


def with_predictions(tasks: Sequence[Task], predictions: Sequence[Prediction]) -> list[Task]:
    """Return the tasks that grade predictions, in their order.

    Raises:
        ConfigError: No task has the id of a prediction, or a task is not of this form.
    """
    by_id = {task.id: task for task in tasks}
    return [_predicted(by_id, one) for one in predictions]


def _predicted(tasks: Mapping[str, Task], prediction: Prediction) -> Task:
    task = tasks.get(prediction.instance_id)
    if task is None:
        raise ConfigError(
            f"no task has the id {prediction.instance_id!r} of a prediction",
            hint=f"give the data set of the predictions with --tasks; it has {len(tasks)} tasks",
        )
    if task.submission is None or task.reward is None:
        raise ConfigError(
            f"task {task.id} has no submission, which a prediction would replace",
            hint="predictions are for data sets of SWE-bench's form",
        )
    patch = {"submission": {"patch": prediction.model_patch or ""}}
    reward = task.reward.model_copy(update={"arguments": task.reward.arguments | patch})
    return task.model_copy(
        update={
            "setup": None,
            "submission": None,
            "reward": reward,
            "model_name_or_path": prediction.model_name_or_path,
        }
    )
