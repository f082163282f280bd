"""The copy of tau2-bench that the project carries: on the path, in memory, and what it offers.

It is imported when the project is loaded. What it reads from its data directory is kept, because
the project's files, with the expected actions of the tasks, are hidden from instances.
"""

from __future__ import annotations

import builtins
import importlib
import io
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

import chat_module

ROOT: Final = Path(__file__).resolve().parent.parent / "bench"
DOMAINS: Final = ("mock", "retail", "airline", "telecom")
_USED: Final = (
    "agent.llm_agent", "evaluator.evaluator", "orchestrator.orchestrator", "registry",
    "user.user_simulator",
)  # fmt: skip
_READERS: Final = ("tau2.utils.io_utils", "tau2.user.user_simulator", "tau2.domains.")
"""Beginnings of the names of modules that read data files."""
_DATA: Final = {
    "mock": ("db.json", "user_db.json"),
    "retail": ("db.json", "tasks.json"),
    "airline": ("db.json", "tasks.json"),
    "telecom": ("db.toml", "user_db.toml", "tasks.json"),
}
"""Files without which a domain is left out."""
_UNSOLVABLE: Final = frozenset({("mock", "update_task_with_user_tools")})
"""In solo mode: the assertion needs a change of the user's data that the expected actions, with
whose data the evaluator compares, do not make."""


class Mode(StrEnum):
    """Who the agent works with."""

    SOLO = "solo"
    """Nobody: a ticket describes the case, and the agent has the user's tools too."""
    MODEL = "model"
    """tau2-bench's simulated user, a chat model."""
    SCRIPT = "script"
    """A user without a model, who tells the whole scenario at once."""


@dataclass(frozen=True)
class Case:
    """One task of tau2-bench, to be worked on in one mode."""

    domain: str
    mode: Mode
    task: Any
    """tau2's ``Task``."""

    @property
    def id(self) -> str:
        """``domain:mode:id``."""
        return f"{self.domain}:{self.mode}:{self.task.id}"

    @property
    def needs_judge(self) -> bool:
        """Whether a model judges assertions in natural language."""
        criteria = self.task.evaluation_criteria
        if criteria is None or not criteria.nl_assertions:
            return False
        return "NL_ASSERTION" in {basis.value for basis in criteria.reward_basis}


class _Memory:
    """Files that were read once, by their paths."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def open(self, path: Any, mode: str = "r", **options: Any) -> Any:
        """Return a file as the built-in ``open`` does; read from memory if it was read before."""
        name = os.path.realpath(path)
        if mode not in ("r", "rt") or not name.startswith(f"{ROOT}/"):
            return builtins.open(path, mode, **options)
        if name not in self._texts:
            self._texts[name] = Path(name).read_text(encoding="utf-8")
        return io.StringIO(self._texts[name])


def _load() -> None:
    """Import tau2-bench, and read the data of its domains.

    Raises:
        RuntimeError: The project carries no copy of it.
    """
    if not (ROOT / "src" / "tau2").is_dir():
        raise RuntimeError(
            f"{ROOT} has no copy of tau2-bench: start this environment by its name, tau2, with "
            "AENV_TAU2 set to a checkout"
        )
    os.environ["TAU2_DATA_DIR"] = str(ROOT / "data")
    sys.path.insert(0, str(ROOT / "src"))
    chat_module.install()
    with suppress(ImportError):
        from loguru import logger

        logger.remove()  # tau2-bench logs each message
    # All that is used later: then the files are hidden.
    for name in _USED:
        importlib.import_module(f"tau2.{name}")

    memory = _Memory()
    for name, module in list(sys.modules.items()):
        if name.startswith(_READERS):
            module.open = memory.open  # type: ignore[attr-defined]
    _keep_databases()
    from tau2.user.user_simulator import UserSimulator

    for domain in domains():
        environment(domain)
        tasks(domain)
        if Mode.SOLO in modes(domain):
            environment(domain, is_solo=True)
    for tools in (None, []):
        _ = UserSimulator(llm="", instructions="", tools=tools).system_prompt


def _keep_databases() -> None:
    """Parse each database only once: an episode needs three or four copies of one."""
    try:
        from tau2.environment.db import DB
    except ImportError:  # another version keeps it elsewhere, and parses it each time
        return
    parse, texts = DB.load.__func__, {}

    def load(cls: type[DB], path: Any) -> Any:
        key = cls, str(path)
        if key not in texts:
            first = parse(cls, path)
            text = first.model_dump_json()
            is_same = cls.model_validate_json(text).get_hash() == first.get_hash()
            texts[key] = text if is_same else None
        text = texts[key]
        return parse(cls, path) if text is None else cls.model_validate_json(text)

    DB.load = classmethod(load)


@cache
def domains() -> tuple[str, ...]:
    """Return the domains whose data the copy has."""
    data = ROOT / "data" / "tau2" / "domains"
    return tuple(d for d in DOMAINS if all((data / d / name).is_file() for name in _DATA[d]))


def modes(domain: str) -> tuple[Mode, ...]:
    """Return the modes that tau2-bench has for a domain, and the scripted user."""
    return tuple(Mode) if domain in ("mock", "telecom") else (Mode.MODEL, Mode.SCRIPT)


def environment(domain: str, *, is_solo: bool = False) -> Any:
    """Return a new ``Environment`` of a domain."""
    from tau2.registry import registry

    constructor = registry.get_env_constructor(domain)
    return constructor(solo_mode=True) if is_solo else constructor()


@cache
def tasks(domain: str) -> dict[str, Any]:
    """Return the tasks of a domain's base split, by id."""
    from tau2.registry import registry

    return {task.id: task for task in registry.get_tasks_loader(domain)()}


def find(domain: str, mode: str, task_id: str) -> Case:
    """Return a case.

    Raises:
        ValueError: The domain, the mode or the task is unknown, or they do not go together.
    """
    if domain not in domains():
        raise ValueError(f"unknown domain {domain!r}; this copy of tau2-bench has data for: "
                         f"{', '.join(domains())}")  # fmt: skip
    if mode not in modes(domain):
        raise ValueError(f"domain {domain!r} has no mode {mode!r}, but: {', '.join(modes(domain))}")
    task = tasks(domain).get(task_id)
    if task is None:
        some = ", ".join(list(tasks(domain))[:3])
        raise ValueError(f"unknown task {task_id!r} of domain {domain!r}: {some} …")
    case = Case(domain, Mode(mode), task)
    if case.mode is Mode.SOLO and not can_be_solo(domain, task):
        raise ValueError(f"task {task_id!r} of domain {domain!r} cannot be solved in solo mode: it "
                         "has no ticket, or needs a user")  # fmt: skip
    return case


def can_be_solo(domain: str, task: Any) -> bool:
    """Return whether a task has a ticket, and asks for nothing that only a user can be told."""
    if (domain, task.id) in _UNSOLVABLE:
        return False
    from tau2.agent.llm_agent import LLMSoloAgent

    criteria = task.evaluation_criteria
    if not task.ticket or criteria is None or not LLMSoloAgent.check_valid_task(task):
        return False
    told = {basis.value for basis in criteria.reward_basis} & {"COMMUNICATE", "NL_ASSERTION"}
    return not (told and criteria.communicate_info) and not (
        "NL_ASSERTION" in told and criteria.nl_assertions
    )


def cases(*, with_model: bool) -> list[Case]:
    """Return what an agent can be given here.

    Args:
        with_model: A chat model is available, as user and as judge.
    """
    found = []
    for domain in domains():
        for task in tasks(domain).values():
            is_solo = Mode.SOLO in modes(domain)
            mode = Mode.SOLO if is_solo else Mode.SCRIPT
            if not is_solo or can_be_solo(domain, task):
                found.append(Case(domain, mode, task))
            if with_model:
                found.append(Case(domain, Mode.MODEL, task))
    return [case for case in found if with_model or not case.needs_judge]


_load()
