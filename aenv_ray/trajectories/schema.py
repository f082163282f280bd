"""The schema of trajectories: task, steps, and outcome of an episode."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PrivateAttr,
    field_validator,
    model_validator,
)

from aenv_ray.errors import ConfigError, FunctionFailed
from aenv_ray.trajectories.storable import may_be_deep, storable, storable_text

SCHEMA_VERSION: Final = 1
"""Incremented when the meaning of a field changes. Fields that are added have defaults."""


class Call(BaseModel):
    """A function or reward of the environment, with its arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    function: str | None = None
    """For a setup: name of the function."""
    name: str | None = None
    """For a reward: its name; None is the default reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    archives: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Further arguments, packed when the call is made: base64 of a tar archive of the files, and of
    the content of the directories, at these paths of the node that plays the episode."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds after which it is stopped; None: 60."""


class ToolCall(BaseModel):
    """A tool call of a scripted solution."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    archives: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """As `Call.archives`."""
    timeout_s: float | None = Field(default=None, gt=0)
    """None: 60 seconds."""


class ImageBuild(BaseModel):
    """An image to build on the node that plays the episode, once for each distinct content."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    context: str
    """A directory."""
    dockerfile: str = "Dockerfile"
    """Path in the directory."""
    ignored: tuple[str, ...] = ()
    """Patterns of files that the build does not get, as in a ``.dockerignore``."""
    arguments: dict[str, str] = Field(default_factory=dict)
    timeout_s: float = Field(default=600.0, gt=0)


class InstanceNeeds(BaseModel):
    """Settings of a task's instance that replace those of the run."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    build: ImageBuild | None = None
    """The image is built, and becomes the datasource."""
    cpu: str | None = None
    """As ``deployConfig.cpu``; None: the project's value."""
    memory: str | None = None
    """As ``deployConfig.memory``; None: the project's value."""
    network: Literal["none"] | None = None
    """``none``: no network, even if the project has one."""


class Task(BaseModel):
    """A task for an episode. Unknown fields are kept for the policy."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    id: str
    """Lone surrogates, which no file can hold, are replaced: runs are resumed by ids."""
    instruction: str = ""
    setup: Call | None = None
    """Called before the policy; None if the task needs no setup."""
    seed: int | None = None
    """Seed of the episode: an argument of the environment's reset, if it has one, and
    `current_call().seed` in the environment's code."""
    reward: Call | None = Field(default_factory=Call)
    """Called after the policy; None: no reward is computed."""
    datasource: str = ""
    """Datasource of the instances of its episodes, such as the image of their sidecar; empty: the
    datasource of the run."""
    submission: Call | None = None
    """A function that is called after the policy, and returns what the agent submits. The reward
    then runs on a new instance, which the agent has never touched, with the result as its argument
    ``submission``. None: the reward runs on the agent's instance."""
    reference: tuple[ToolCall, ...] = ()
    """A solution that earns the full reward."""
    wrong: tuple[ToolCall, ...] = ()
    """A plausible but wrong solution, which earns no reward."""
    instance: InstanceNeeds | None = None
    """None: the instances of the run suit the task."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Limit for the policy, unless the run's ``episode_timeout`` is shorter. None: only the run's
    limit applies."""
    unsupported: str | None = None
    """Why the task cannot be played here: its episode is ``refused``. None: it can."""

    @field_validator("id")
    @classmethod
    def _storable(cls, value: str) -> str:
        return storable_text(value)


class Attachment(BaseModel):
    """Content that is too large for a record, or is not text."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    digest: str
    """``sha256:`` and the hexadecimal digest of the content, which is the name of its file."""
    size_bytes: int
    """Size of the content."""
    media_type: str
    """Type of the content, such as ``image/png``, as the tool gave it."""


class Step(BaseModel):
    """One tool call of an episode."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    tool: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """The arguments, empty if they were not a mapping."""
    text: str
    """The text that the policy got; the error message if the call had no result."""
    is_error: bool
    """Whether the tool failed, or the call had no result."""
    error: str | None = None
    """Error code if the call had no result: ``call_cancelled`` if it was cancelled, or under way
    when the policy ended or its time was up."""
    duration_s: float
    """Seconds from the call to its result."""
    call_id: str | None = None
    """Id of the call, under which it ran once."""
    started_s: float | None = None
    """Seconds from the start of the episode to the call."""
    attachments: tuple[Attachment, ...] = ()
    """Images and other data of the result, and its text if `text` is truncated."""
    timeout_s: float | None = None
    """Seconds after which the call would have been stopped; None in records without it."""

    @field_validator("tool", "arguments", "text")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        return storable(value)


class Usage(BaseModel):
    """Requests to the models of an episode, as recorded with `EpisodeEnv.record_usage`."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    requests: int = 0
    """Number of answers."""
    prompt_tokens: int = 0
    """Tokens of the prompts."""
    completion_tokens: int = 0
    """Tokens that the models produced."""
    cost: float | None = None
    """Sum of the known costs; None if none is known."""

    def __add__(self, other: Usage) -> Usage:
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return Usage(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost=sum(costs) if costs else None,
        )


class Generation(BaseModel):
    """The tokens of an episode, for a trainer: what its model read and wrote.

    Raises:
        ValueError: The lengths of the response's fields differ, or a log-probability is not finite:
            JSON has no such number, so the record could not be read.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    prompt_ids: tuple[int, ...]
    """The tokens before the first answer of the model."""
    response_ids: tuple[int, ...]
    """All tokens that follow: answers of the model, and what the environment replied."""
    response_mask: tuple[int, ...]
    """For each token of the response: 1 if the model wrote it, 0 if the environment did."""
    logprobs: tuple[FiniteFloat, ...] | None = None
    """Log-probability of each token of the response under the policy that wrote it, 0 where the
    mask is 0; None if the trainer has none."""

    @model_validator(mode="after")
    def _is_aligned(self) -> Generation:
        lengths = {
            "response_ids": len(self.response_ids),
            "response_mask": len(self.response_mask),
        }
        if self.logprobs is not None:
            lengths["logprobs"] = len(self.logprobs)
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise ValueError(f"the fields of a response need the same number of items: {found}")
        return self


class EpisodeStatus(StrEnum):
    """How an episode ended."""

    COMPLETED = "completed"
    """The policy ended, and the reward was computed if the task has one."""
    DIED_INSIDE = "died_inside"
    """While or after the policy acted, something in the sandbox ended it, or kept it from answering
    or the reward from running: an outcome, counted in means with `reward_on_death`, and not
    restarted."""
    INFRA_FAILED = "infra_failed"
    """The infrastructure failed: void, excluded from means."""
    POLICY_FAILED = "policy_failed"
    """The policy raised: void, excluded from means, unless a call to the sandbox raised it: then
    `reward_on_failure` counts."""
    TIMED_OUT = "timed_out"
    """The policy did not end within `episode_timeout` or the life of the instance; not restarted.
    Counted in means with `reward_on_timeout` if calls to the sandbox took the time, else void."""
    REWARD_FAILED = "reward_failed"
    """The reward raised, or returned no number: counted in means with `reward_on_failure` if the
    policy had acted. Otherwise, and if the setup raised: void, excluded from means."""
    REFUSED = "refused"
    """The task needs something that is not available here, so it was not played: excluded from
    means."""


class Episode(BaseModel):
    """The record of one rollout."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    index: int
    """Number of the episode, from 0."""
    task_id: str
    """Id of the task."""
    status: EpisodeStatus
    """How the episode ended."""
    reward: float | None
    """None if the episode is void: it counts in no mean."""
    reward_detail: Any = None
    """The result of the reward function."""
    steps: tuple[Step, ...] = ()
    """The tool calls, in order."""
    messages: tuple[dict[str, Any], ...] = ()
    """The conversation with a model, in OpenAI's format, if the policy recorded it."""
    tools: Attachment | None = None
    """The tools that the model had, if the policy recorded them: an attachment with a JSON list in
    OpenAI's format, which episodes with the same tools share."""
    usage: Usage | None = None
    """Requests, tokens and cost of the policy's models; None if the policy recorded none."""
    output: Any = None
    """The result of the policy; its repr if it is not JSON."""
    error: str | None = None
    """The error, as ``code: message``; if the policy raised it, with the line that did."""
    instance_id: str | None = None
    """Id of the instance; None if none was created."""
    environment: str | None = None
    """``name@version`` of the instance; None if no instance was created."""
    environment_digest: str | None = None
    """Digest of the environment's content; distinguishes projects that were given by path."""
    attempts: int = 1
    """1 + the number of restarts after infrastructure failures. A last attempt that was repeated
    because its runner was lost while it played other tasks too counts once."""
    create_s: float | None = None
    """Seconds to create the instance; None if none was created."""
    duration_s: float = 0.0
    """Seconds from the start of the episode to its end."""
    schema_version: int = SCHEMA_VERSION
    """Version of this schema."""
    group: str | None = None
    """Id shared by the samples of one task (`samples_per_task`)."""
    sample: int | None = None
    """Number of the episode in its group, from 0."""
    seed: int | None = None
    """Seed given to the environment and the policy; None if the task has none, or the instance runs
    an older aenv-ray that takes none."""
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds spent in each phase: image (until the task's image was built), queue (until an
    instance was available), reset, setup, policy, submission, grader (until the instance for the
    reward ran), reward. In addition, create: how long the instance took to start, before or during
    queue."""
    start_mode: str | None = None
    """How the instance was obtained: ``template``, ``bare: …``, ``container: …`` or ``pod: …``;
    from a warm pool ``warm, …``; ``reset`` if an earlier episode used it."""
    node_id: str | None = None
    """The node that the episode ran on."""
    policy: str | None = None
    """Name of the policy: its attribute `name`, or ``module:function``. None if a trainer acted."""
    policy_versions: tuple[int, ...] = ()
    """Versions of the model's weights during the episode, in order, as the trainer reported them:
    several if the weights were updated meanwhile. The last one is the version at the end of the
    episode, even if it made no call."""
    generation: Generation | None = None
    """The tokens, if the trainer recorded them."""
    unrecorded_calls: int = 0
    """How often the policy ran a command (`exec`) or wrote a file (`write_file`): these are not
    steps, so the episode cannot be replayed."""
    task: Task | None = None
    """The task; None in records without it. Values that JSON cannot represent are replaced by their
    repr, and data that is nested too deeply by a note."""
    _contents: dict[str, bytes] = PrivateAttr(default_factory=dict)

    @field_validator("task_id", "group", "policy", "reward_detail", "messages", "output", "error")
    @classmethod
    def _storable(cls, value: Any) -> Any:
        return tuple(map(storable, value)) if isinstance(value, tuple) else storable(value)

    @property
    def contents(self) -> dict[str, bytes]:
        """Contents of `attachments` by digest, until they are stored; not a part of the record."""
        return self._contents

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The attachments of the record: those of its steps, and the tools."""
        found = tuple(one for step in self.steps for one in step.attachments)
        return found if self.tools is None else (*found, self.tools)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recorded episode, with the description of each field."""
    found = Episode.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema"} | found


def check_version(version: int, where: str) -> None:
    """Check that records are of a version of the schema that is known here.

    Raises:
        ConfigError: They are newer.
    """
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"{where}: schema version {version} is newer than {SCHEMA_VERSION}, the newest that "
            "this aenv-ray reads",
            hint="update aenv-ray",
        )


def recordable_task(task: Task) -> Task:
    """Return the task as a record can hold it: its values are changed as by `storable`."""
    with contextlib.suppress(ValueError):  # JSON cannot represent a value
        if not may_be_deep(task.model_dump_json().encode()):
            return task
    return Task.model_validate(_storable_fields(task))


def _storable_fields(model: BaseModel) -> dict[str, Any]:
    return {name: _storable_field(value) for name, value in model}


def _storable_field(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _storable_fields(value)
    if isinstance(value, tuple):
        return [_storable_field(item) for item in value]
    return storable(value)


def reward_number(detail: Any) -> float:
    """Return the number in a reward function's result.

    The result is a number, or has one under ``score``, ``reward`` or ``total_reward``.

    Raises:
        FunctionFailed: There is no finite number.
    """
    value = detail
    if isinstance(detail, Mapping):
        value = next((detail[k] for k in ("score", "reward", "total_reward") if k in detail), None)
    with contextlib.suppress(OverflowError):  # an int too large for a float
        if isinstance(value, bool | int | float) and math.isfinite(value):
            return float(value)
    raise FunctionFailed(
        f"the reward returned {str(detail)[:200]!r}, which has no finite number",
        hint='return a number or {"score": number}',
    )
