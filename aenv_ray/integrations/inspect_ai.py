"""Instances as sandboxes of Inspect, with their tools, and their reward as scorer.

    Task(
        dataset=samples(tasks),
        solver=react(tools=[EnvironmentToolSource()]),
        sandbox=("aenv", "mini-terminal@1.0.0"),
        scorer=environment_reward(),
    )

The entry point ``inspect_ai`` registers ``aenv``, so no import is needed for the sandbox itself.
An infrastructure failure ends the sample with an error, and Inspect does not score it. With
``fail_on_error=False`` Inspect continues with the other samples, and with ``retry_on_error`` it
tries the sample again. A sandbox that was ended from inside is an outcome: its commands fail, its
files are missing, and the sample is scored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, cast, overload

from pydantic import BaseModel, ConfigDict

from aenv_ray.client.environment import Environment
from aenv_ray.errors import (
    AenvError,
    ConfigError,
    FabricUnavailable,
    FileAccessError,
    SandboxDiedInside,
    ToolInputInvalid,
    ToolNotFound,
    ToolTimeout,
)
from aenv_ray.errors import ToolError as OurToolError
from aenv_ray.integrations.support.requirement import require
from aenv_ray.integrations.support.schemas import check_keywords
from aenv_ray.integrations.support.tools import EnvironmentTools, FrameworkTool, images, model_text
from aenv_ray.models import ExecResult as OurResult
from aenv_ray.trajectories.schema import Call, Task, reward_number

require("inspect-ai", "inspect", "0.3.280", "0.4")

from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import ContentImage, ContentText  # noqa: E402
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr  # noqa: E402
from inspect_ai.solver import TaskState  # noqa: E402
from inspect_ai.tool import Tool, ToolDef, ToolError, ToolParams, ToolSource  # noqa: E402
from inspect_ai.util import (  # noqa: E402
    ExecResult,
    JSONSchema,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandbox,
    sandboxenv,
)

_PART_BYTES: Final = 16 * 1024 * 1024
_KEYWORDS: Final = frozenset(JSONSchema.model_fields)
_RETRY_TIMEOUTS_S: Final = (60, 30)
"""Largest timeouts of the two further attempts that Inspect's contract asks for."""
_TASK: Final = "aenv"
"""Key of a task in the metadata of its sample."""
_NOT_STARTED: Final = frozenset({126, 127})
"""Exit codes of commands that cannot run."""
_KILLED: Final = 137
"""Exit code of a command that SIGKILL ended."""
_NO_RESULT: Final = 254
"""Exit code of a command whose call has no result."""


class AenvSandboxConfig(BaseModel):
    """Which instances to create: ``SandboxEnvironmentSpec("aenv", AenvSandboxConfig(…))``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: str = "mini-terminal"
    """``name@version``, ``name``, or, over Ray, the path of a project."""
    datasource: str = ""
    ttl: str | float | None = None
    """None: the environment's."""
    engine: str | None = None
    """None: chosen by project and cluster."""
    actor: Literal["dedicated", "shared"] = "shared"
    owner: str | None = None
    exec_timeout_s: float = 3600.0
    """The timeout of a command for which Inspect gives no timeout."""


@sandboxenv(name="aenv")
class AenvSandbox(SandboxEnvironment):
    """A sandbox of Inspect that is an instance."""

    def __init__(self, environment: Environment) -> None:
        super().__init__()
        self.environment = environment
        self._users: frozenset[str] | None = None

    @classmethod
    async def sample_init(
        cls, task_name: str, config: BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Create an instance for a sample, and call the setup of its task.

        `task_name` becomes a label.
        """
        chosen, task = _config(config), cast(dict[str, Any], metadata).get(_TASK, {})
        datasource = task.get("datasource") or chosen.datasource
        environment = Environment(
            chosen.environment, datasource, chosen.ttl, timeout=chosen.exec_timeout_s,
            owner=chosen.owner, actor=chosen.actor, engine=chosen.engine,
            labels={"inspect.task": task_name[:63]},
        )  # fmt: skip
        await environment.initialize()
        try:
            if task.get("setup"):
                setup = Call.model_validate(task["setup"])
                await environment.call_function(
                    str(setup.function), setup.arguments, setup.timeout_s
                )
        except BaseException:
            await asyncio.shield(environment.release())
            raise
        return {"default": cls(environment)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """Release the sample's instances."""
        del task_name, config, interrupted
        for environment in environments.values():
            await environment.as_type(cls).environment.release()

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that a log contains."""
        return AenvSandboxConfig.model_validate(config)

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # the framework's word
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command; see `SandboxEnvironment.exec`."""
        del concurrency  # commands run on the node of the instance
        await self._check_user(user)
        stdin = input.encode() if isinstance(input, str) else input
        further = _RETRY_TIMEOUTS_S if timeout is not None and timeout_retry else ()
        timeouts = [timeout, *(min(timeout or 0, seconds) for seconds in further)]
        for seconds in timeouts[:-1]:
            try:
                return await self._run(cmd, stdin, cwd, env, seconds)
            except TimeoutError:
                continue
        return await self._run(cmd, stdin, cwd, env, timeouts[-1])

    async def _run(
        self,
        cmd: list[str],
        stdin: bytes | None,
        cwd: str | None,
        env: dict[str, str] | None,
        timeout_s: float | None,
    ) -> ExecResult[str]:
        try:
            done = await self.environment.exec(
                cmd, cwd=cwd, env=env, stdin=stdin, timeout=timeout_s
            )
        except SandboxDiedInside as exc:
            return ExecResult(False, _KILLED, "", f"{exc.message}\n")
        except ToolTimeout as exc:
            raise TimeoutError(exc.message) from exc
        except FileAccessError as exc:
            raise PermissionError(exc.message) from exc
        except OurToolError as exc:  # such as that the agent has used up its processes
            return ExecResult(False, _NO_RESULT, "", f"{exc.message}\n")
        except AenvError as exc:
            _raise_void(exc)
        if done.exit_code in _NOT_STARTED and done.stderr.endswith(b": Permission denied\n"):
            raise PermissionError(done.stderr.decode(errors="replace").strip())
        _check_output(done)
        return ExecResult(
            done.exit_code == 0, done.exit_code, done.text(), done.stderr.decode(errors="replace")
        )

    async def _check_user(self, user: str | None) -> None:
        """Accept the user that commands run as anyway, by name or number."""
        if user is None:
            return
        if self._users is None:
            script = "/usr/bin/id -u; /usr/bin/id -un"
            asked = await self._run(["/bin/sh", "-c", script], None, "/", None, 30)
            self._users = frozenset(asked.stdout.split())
        if user not in self._users:
            raise SandboxUserUnsupportedError(
                f"commands in {self.environment.instance_id} run as "
                f"{' '.join(sorted(self._users)) or 'an unnamed user'}, not as {user!r}"
            )

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file in parts; see `SandboxEnvironment.write_file`."""
        data = contents.encode() if isinstance(contents, str) else contents
        try:
            for start in range(0, max(len(data), 1), _PART_BYTES):
                part = data[start : start + _PART_BYTES]
                await self.environment.write_file(file, part, append=start > 0)
        except FileAccessError as exc:
            raise _file_error(exc) from exc
        except SandboxDiedInside as exc:
            raise SandboxUnavailableError(exc.message) from exc
        except AenvError as exc:
            _raise_void(exc)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...
    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...
    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file in parts; see `SandboxEnvironment.read_file`."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data = b""
        try:
            while len(data) <= limit:
                part = await self.environment.read_file(file, len(data), _PART_BYTES)
                data += part
                if len(part) < _PART_BYTES:
                    break
        except FileAccessError as exc:
            raise _file_error(exc) from exc
        except SandboxDiedInside as exc:
            raise FileNotFoundError(2, exc.message, file) from exc
        except AenvError as exc:
            _raise_void(exc)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data


def _config(config: BaseModel | str | None) -> AenvSandboxConfig:
    if config is None:
        return AenvSandboxConfig()
    if isinstance(config, str):
        # Inspect takes texts for files, and puts the directory of the task before them.
        path = Path(config)
        is_name = path.is_absolute() and not path.is_dir()
        return AenvSandboxConfig(environment=path.name if is_name else config)
    if isinstance(config, AenvSandboxConfig):
        return config
    raise ConfigError(
        f"the sandbox 'aenv' cannot use a {type(config).__name__}",
        hint='pass ("aenv", "name@version") or an AenvSandboxConfig',
    )


def _check_output(done: OurResult) -> None:
    limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
    largest = max(done.stdout, done.stderr, key=len)
    if done.truncated or len(largest) > limit:
        shown = largest[:limit].decode(errors="replace")
        raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, shown)


def _file_error(error: FileAccessError) -> OSError:
    """Return the error that Inspect expects: the runtime names the cause in words only."""
    words = error.message.lower()
    if "no such file" in words:
        return FileNotFoundError(error.message)
    if "is a directory" in words or "not a regular file" in words:
        return IsADirectoryError(error.message)
    return PermissionError(error.message)


def _raise_void(error: AenvError) -> NoReturn:
    """Raise an error that ends the sample: Inspect shows a `TimeoutError` to the model."""
    if isinstance(error, TimeoutError):
        raise FabricUnavailable(error.message, hint=error.hint) from error
    raise error


def samples(tasks: Iterable[Task | Mapping[str, Any]]) -> list[Sample]:
    """Return tasks of ours as samples, which `AenvSandbox` sets up and `environment_reward` scores.

    Raises:
        ConfigError: A task needs what only `aenv_ray.sample` offers.
    """
    return [_sample(Task.model_validate(task)) for task in tasks]


def _sample(task: Task) -> Sample:
    needs = {
        "archives": any(c is not None and c.archives for c in (task.setup, task.reward)),
        "a submission": task.submission is not None,
        "an instance of its own": task.instance is not None,
        "what is not supported": task.unsupported is not None,
    }
    if wanted := [what for what, is_needed in needs.items() if is_needed]:
        raise ConfigError(
            f"task {task.id!r} needs {wanted[0]}, which a sample of Inspect cannot have",
            hint="play it with aenv_ray.sample",
        )
    data = task.model_dump(mode="json", include={"setup", "reward", "datasource"})
    return Sample(input=task.instruction, id=task.id, metadata={_TASK: data})


class EnvironmentToolSource(ToolSource):
    """The tools of the sample's environment, for `use_tools` or an agent.

    Args:
        only: Names of the tools to offer. None: all.
        timeout_s: Timeout of a call. None: that of the sandbox's configuration.
    """

    def __init__(self, only: Collection[str] | None = None, timeout_s: float | None = None) -> None:
        self._only = only
        self._timeout_s = timeout_s

    async def tools(self) -> list[Tool]:
        """Return the tools of the current sample's instance."""
        ours = EnvironmentTools(
            sandbox().as_type(AenvSandbox).environment, only=self._only, timeout_s=self._timeout_s
        )
        return [_tool(ours, tool) for tool in await ours.load()]


def _tool(ours: EnvironmentTools, tool: FrameworkTool) -> Tool:
    async def execute(**arguments: Any) -> Any:
        try:
            result = await ours.call(tool.name, arguments)
        except SandboxDiedInside as exc:
            raise SandboxUnavailableError(exc.message) from exc
        except AenvError as exc:
            _raise_void(exc)
        if result.is_error:
            raise ToolError(model_text(result))
        shown = images(result)
        if not shown:
            return model_text(result)
        text = [ContentText(text=result.text())] if result.text() else []
        return [*text, *(ContentImage(image=f"data:{kind};base64,{data}") for kind, data in shown)]

    check_keywords(tool.parameters, tool.own_name, allowed=_KEYWORDS)
    parameters = ToolParams(
        properties={
            name: JSONSchema.model_validate({"description": name, **schema})
            for name, schema in tool.parameters["properties"].items()
        },
        required=tool.parameters.get("required", []),
    )
    return ToolDef(execute, tool.name, tool.description or tool.name, parameters).as_tool()


@scorer(metrics=[mean(), stderr()])
def environment_reward(name: str | None = None, arguments: dict[str, Any] | None = None) -> Scorer:
    """Return a scorer that calls a reward of the sample's environment.

    Args:
        name: Name of the reward. None: that of the sample's task, else the default one.
        arguments: Arguments of the reward. None: those of the sample's task.

    A sandbox that was ended from inside and a reward that raises score 0, because an agent may have
    caused that. An infrastructure failure, and a reward that does not exist or take its arguments,
    is an error of the sample.
    """

    async def score(state: TaskState, target: Target) -> Score:
        del target
        environment = sandbox().as_type(AenvSandbox).environment
        call = Call.model_validate(state.metadata.get(_TASK, {}).get("reward") or {})
        given = call.arguments if arguments is None else arguments
        try:
            value = await environment.call_reward(given, call.timeout_s, name or call.name)
            number = reward_number(value)
        except (ToolNotFound, ToolInputInvalid):
            raise
        except (SandboxDiedInside, OurToolError) as exc:
            return Score(value=0.0, explanation=exc.message)
        return Score(value=number, metadata=dict(value) if isinstance(value, Mapping) else {})

    return score
