"""Checks of an application: what its files must contain, and what it must do in a browser.

Checks are data. The trainer passes them to the reward, so an instance has none of them before.
Random values differ in every grading, so that an application cannot know them.
"""

from __future__ import annotations

import ast
import operator
import random
import re
import string
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from webapp import validation
from webapp.browser import KEYS, Browser, Page, PageFailed

MAX_ACTIONS: Final = 200
"""Steps of one check, repetitions included."""
WITHIN_S: Final = 5.0
"""How long an expectation may take to come true, at least."""
MIN_LOOKS: Final = 20
"""How often it is looked at, at least: on a busy node a page needs longer, as does each look."""
_PAUSE_S: Final = 0.1
_VARIABLE: Final = re.compile(r"\{(\w+)\}")

Values = Mapping[str, str | int | float]


class Failed(Exception):
    """A check is not met; the message says what is wrong."""


class _Shape(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Click(_Shape):
    """Click an element, `times` times; with several matches, the one with this `index`."""

    click: str
    times: int | str = 1
    index: int | str = 0


class Fill(_Shape):
    """Replace the text of a field by typing."""

    fill: str
    text: str
    index: int | str = 0


class Type(_Shape):
    """Type a text into what has the focus."""

    type: str


class Press(_Shape):
    """Press a key."""

    press: str
    times: int | str = 1


class Select(_Shape):
    """Choose an option of a select element, by its label or value."""

    select: str
    option: str


class Reload(_Shape):
    """Load the page again; its storage is kept."""

    reload: Literal[True]


class Resize(_Shape):
    """Change the size of the viewport."""

    resize: tuple[Annotated[int, Field(ge=200, le=4000)], Annotated[int, Field(ge=200, le=4000)]]


class Wait(_Shape):
    """Wait some seconds."""

    wait: Annotated[float, Field(gt=0, le=5)]


class Expect(_Shape):
    """Expect something of the elements that match a selector, within five seconds.

    Attributes:
        expect: The selector. Only visible elements count, except for `hidden`.
        index: Which of them.
        text: Its text, with white space collapsed.
        contains: A part of its text.
        number: The only number in its text.
        value: The value of a field.
        checked: Whether a box is ticked.
        disabled: Whether it is disabled.
        attribute: Name and value of an attribute.
        style: Name and value of a computed CSS property.
        count: How many are visible.
        hidden: That none is visible.
    """

    expect: str
    index: int | str = 0
    text: str | None = None
    contains: str | None = None
    number: float | str | None = None
    value: str | None = None
    checked: bool | None = None
    disabled: bool | None = None
    attribute: tuple[str, str] | None = None
    style: tuple[str, str] | None = None
    count: int | str | None = None
    hidden: Literal[True] | None = None


class ExpectPage(_Shape):
    """Expect something of the page.

    Attributes:
        title: Its title.
        no_errors: It has reported no error, exception or failed request.
        fits: Nothing is wider than the viewport.
    """

    title: str | None = None
    no_errors: Literal[True] | None = None
    fits: Literal[True] | None = None

    @model_validator(mode="after")
    def _expects_something(self) -> ExpectPage:
        if not self.model_fields_set:
            raise ValueError(
                f"an empty step; steps are {', '.join(_KINDS)}, title, no_errors, fits"
            )
        return self


_KINDS: Final = ("click", "fill", "type", "press", "select", "reload", "resize", "wait", "expect")


def _kind(data: Any) -> str:
    """Return which step a mapping is, so that an error names the right fields."""
    if isinstance(data, BaseModel):
        data = data.model_dump()
    return next((kind for kind in _KINDS if kind in data), "page")


Step = Annotated[
    Annotated[Click, Tag("click")]
    | Annotated[Fill, Tag("fill")]
    | Annotated[Type, Tag("type")]
    | Annotated[Press, Tag("press")]
    | Annotated[Select, Tag("select")]
    | Annotated[Reload, Tag("reload")]
    | Annotated[Resize, Tag("resize")]
    | Annotated[Wait, Tag("wait")]
    | Annotated[Expect, Tag("expect")]
    | Annotated[ExpectPage, Tag("page")],
    Discriminator(_kind),
]


class Behaviour(_Shape):
    """What the application must do in a browser, on a new page with empty storage.

    Attributes:
        name: What it protects, for the report.
        let: Variables of the texts: ``[low, high]`` for a random number, ``"word"`` for a random
            word, ``"=a * b"`` for a formula. Steps use them as ``{name}``.
        page: The file that is opened.
        steps: What is done and expected, in order.
    """

    name: str
    let: dict[str, tuple[int, int] | str] = {}
    page: str = "index.html"
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]


class Structure(_Shape):
    """What the files must contain. No browser is needed.

    Attributes:
        name: What it protects, for the report.
        file: A file that must exist.
        selector: With `file`: a CSS selector that its elements must match …
        min: … at least this many of them,
        max: and at most this many.
        valid: All files are free of errors.
    """

    name: str
    file: str | None = None
    selector: str | None = None
    min: int = 1
    max: int | None = None
    valid: Literal[True] | None = None

    @model_validator(mode="after")
    def _expects_something(self) -> Structure:
        if self.file is None and self.selector is None and self.valid is None:
            raise ValueError("it expects nothing; give file, selector or valid")
        return self


@dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        name: The check's name.
        kind: ``structure`` or ``browser``.
        passed: Whether it is met.
        reason: What is wrong; empty if nothing is.
    """

    name: str
    kind: str
    passed: bool
    reason: str = ""


_STEPS: Final[TypeAdapter[tuple[Step, ...]]] = TypeAdapter(tuple[Step, ...])
_BEHAVIOURS: Final[TypeAdapter[tuple[Behaviour, ...]]] = TypeAdapter(tuple[Behaviour, ...])
_STRUCTURES: Final[TypeAdapter[tuple[Structure, ...]]] = TypeAdapter(tuple[Structure, ...])


def behaviours(data: list[Any]) -> tuple[Behaviour, ...]:
    """Return the behaviour checks of a task.

    Raises:
        ValueError: They are malformed; the message names the check and the field.
    """
    return _parsed(_BEHAVIOURS, data, "behaviour")


def structures(data: list[Any]) -> tuple[Structure, ...]:
    """Return the structure checks of a task.

    Raises:
        ValueError: They are malformed.
    """
    return _parsed(_STRUCTURES, data, "structure")


def steps(data: list[Any]) -> tuple[Step, ...]:
    """Return steps.

    Raises:
        ValueError: They are malformed.
    """
    return _parsed(_STEPS, data, "steps")


def _parsed(adapter: TypeAdapter[Any], data: list[Any], what: str) -> Any:
    try:
        return adapter.validate_python(data)
    except ValidationError as exc:
        first = exc.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{what}.{place} is malformed: {first['msg']}") from None


# --- values ---------------------------------------------------------------------------------------

_OPERATORS: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def draw(let: Mapping[str, tuple[int, int] | str], source: random.Random) -> Values:
    """Return values for the variables of a check.

    Raises:
        ValueError: A formula is malformed.
    """
    values: dict[str, str | int | float] = {}
    for name, rule in let.items():
        if not isinstance(rule, str):
            values[name] = source.randint(*rule)
        elif rule == "word":
            values[name] = "".join(source.choices(string.ascii_lowercase, k=8))
        elif rule.startswith("="):
            values[name] = _evaluate(rule, values)
        else:
            raise ValueError(
                f"variable {name!r} is {rule!r}: use [low, high], 'word' or '=formula'"
            )
    return values


def _evaluate(formula: str, values: Values) -> int | float:
    def of(node: ast.expr) -> Any:
        match node:
            case ast.Constant(int() | float() as number):
                return number
            case ast.Name(name) if name in values:
                return values[name]
            case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
                return _OPERATORS[type(kind)](of(left), of(right))
        raise ValueError(f"formula {formula!r}: only numbers, variables and + - * / // % are known")

    try:
        number = of(ast.parse(formula[1:].strip(), mode="eval").body)
    except (SyntaxError, TypeError, ZeroDivisionError) as exc:
        raise ValueError(f"formula {formula!r}: {exc}") from None
    if isinstance(number, float):
        return int(number) if number.is_integer() else round(number, 6)
    return int(number)


def _text(template: str, values: Values) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(f"{template!r} uses the unknown variable {match[1]!r}")
        return str(values[match[1]])

    return _VARIABLE.sub(value, template)


def _number(given: float | str, values: Values) -> float:
    return float(given if isinstance(given, int | float) else _text(given, values))


# --- structure ------------------------------------------------------------------------------------


def check_structure(check: Structure, files: Mapping[str, bytes]) -> CheckResult:
    """Return the verdict of a structure check.

    Raises:
        ValueError: Its selector is invalid.
    """
    try:
        _expect_structure(check, files)
    except Failed as exc:
        return CheckResult(check.name, "structure", False, str(exc))
    return CheckResult(check.name, "structure", True)


def _expect_structure(check: Structure, files: Mapping[str, bytes]) -> None:
    if check.file is not None and check.file not in files:
        raise Failed(f"{check.file} does not exist")
    if check.selector is not None:
        found = validation.count(files, check.file or "index.html", check.selector)
        if found < check.min or (check.max is not None and found > check.max):
            most = "" if check.max is None else f" and at most {check.max}"
            raise Failed(f"{found} elements match {check.selector}, not at least {check.min}{most}")
    if check.valid:
        for path in sorted(files):
            for problem in validation.validate(files, path):
                if problem.severity is validation.Severity.ERROR:
                    place = f"{path}:{problem.line}:{problem.column}"
                    raise Failed(f"{place}: {problem.message}")


# --- behaviour ------------------------------------------------------------------------------------


def check_behaviour(
    check: Behaviour, browser: Browser, url: str, source: random.Random
) -> CheckResult:
    """Return the verdict of a behaviour check.

    Raises:
        ValueError: It uses an unknown variable, key or formula.
    """
    values = draw(check.let, source)
    try:
        page = browser.page()
        page.load(url + check.page, url)
        play(page, check.steps, values)
        page.close()
    except (Failed, PageFailed) as exc:
        drawn = f" (with {dict(values)})" if values else ""
        return CheckResult(check.name, "browser", False, f"{exc}{drawn}")
    return CheckResult(check.name, "browser", True)


def play(page: Page, played: tuple[Step, ...], values: Values) -> None:
    """Play steps on a page.

    Raises:
        Failed: An element cannot be used, or an expectation is not met.
        PageFailed: The page crashed, or its scripts do not end.
        ValueError: A step uses an unknown variable or key, or there are too many.
    """
    left = MAX_ACTIONS
    for number, step in enumerate(played, 1):
        times = int(_number(getattr(step, "times", 1), values))
        left -= max(times, 1)
        if left < 0:
            raise ValueError(f"the steps make more than {MAX_ACTIONS} actions")
        try:
            for _ in range(times):
                _do(page, step, values)
        except Failed as exc:
            raise Failed(f"step {number}: {exc}") from None


def _do(page: Page, step: Step, values: Values) -> None:
    match step:
        case Click():
            page.click(*_aim(page, step.click, step.index, values))
        case Fill():
            page.click(*_aim(page, step.fill, step.index, values))
            page.select_all()
            page.press("Delete")
            page.type(_text(step.text, values))
        case Type():
            page.type(_text(step.type, values))
        case Press():
            if step.press not in KEYS:
                raise ValueError(f"unknown key {step.press!r}; known: {', '.join(KEYS)}")
            page.press(step.press)
        case Select():
            problem = page.run(_SELECT, step.select, _text(step.option, values))
            if problem:
                raise Failed(problem)
        case Reload():
            page.reload()
        case Resize():
            page.resize(*step.resize)
        case Wait():
            page.wait(step.wait)
        case _:
            _await(page, step, values)


def _aim(page: Page, selector: str, index: int | str, values: Values) -> tuple[float, float]:
    """Return where to click on an element, which must be visible and not covered."""
    where = int(_number(index, values))
    patience = _Patience()
    while True:
        told = page.run(_AIM, _text(selector, values), where)
        if "problem" not in told:
            return told["x"], told["y"]
        if patience.is_over():
            raise Failed(told["problem"])
        page.wait(_PAUSE_S)


class _Patience:
    """How long to look at a page again."""

    def __init__(self) -> None:
        self._deadline = time.monotonic() + WITHIN_S
        self._looks = 0

    def is_over(self) -> bool:
        """Count a look; whether it was the last one."""
        self._looks += 1
        return self._looks >= MIN_LOOKS and time.monotonic() >= self._deadline


def _await(page: Page, step: Expect | ExpectPage, values: Values) -> None:
    """Wait until an expectation is met."""
    patience = _Patience()
    while True:
        try:
            if isinstance(step, Expect):
                _expect(page, step, values)
            else:
                _expect_page(page, step, values)
        except Failed:
            if patience.is_over():
                raise
            page.wait(_PAUSE_S)
        else:
            return


def _expect(page: Page, step: Expect, values: Values) -> None:
    selector = _text(step.expect, values)
    style = step.style[0] if step.style else ""
    attribute = step.attribute[0] if step.attribute else ""
    found = page.run(_OBSERVE, selector, style, attribute)
    if step.hidden:
        _same(f"visible elements {selector}", len(found), 0)
        return
    if step.count is not None:
        _same(f"visible elements {selector}", len(found), int(_number(step.count, values)))
        if step.count in {0, "0"} or not found:
            return
    index = int(_number(step.index, values))
    if index >= len(found):
        raise Failed(f"{len(found)} visible elements match {selector}, so none is number {index}")
    one = found[index]
    for name in ("text", "value"):
        if (wanted := getattr(step, name)) is not None:
            _same(f"the {name} of {selector}", one[name], _text(wanted, values))
    for name in ("checked", "disabled"):
        if (state := getattr(step, name)) is not None:
            _same(f"{name} of {selector}", one[name], state)
    if step.contains is not None and (part := _text(step.contains, values)) not in one["text"]:
        raise Failed(f"the text of {selector} is {one['text'][:200]!r}, without {part!r}")
    if step.number is not None:
        _same_number(selector, one["text"], _number(step.number, values))
    if step.attribute:
        _same(f"{attribute} of {selector}", one["attribute"], _text(step.attribute[1], values))
    if step.style:
        _same(f"the style {style} of {selector}", one["style"], _text(step.style[1], values))


def _same(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        shown = found[:200] if isinstance(found, str) else found
        raise Failed(f"{what}: {shown!r}, not {wanted!r}")


def _same_number(selector: str, text: str, wanted: float) -> None:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "").replace("\u2212", "-"))
    if len(numbers) != 1 or abs(float(numbers[0]) - wanted) > 1e-6 * max(1.0, abs(wanted)):
        raise Failed(f"the text of {selector} is {text[:200]!r}, not the number {wanted:g}")


def _expect_page(page: Page, step: ExpectPage, values: Values) -> None:
    if step.title is not None:
        _same("the title", page.run(_TITLE), _text(step.title, values))
    if step.no_errors:
        for message in page.messages:
            if message.is_error:
                raise Failed(f"the page reports: {message.text}")
    if step.fits and (wide := page.run(_TOO_WIDE)):
        raise Failed(f"wider than the viewport: {wide}")


# The functions below take every method from its prototype: an element's own properties can be
# covered by the names of others, such as <input name="innerText"> in a form.

_COMMON: Final = """
  const get = (type, name) => Object.getOwnPropertyDescriptor(type.prototype, name).get;
  const textOf = (e) => (e instanceof HTMLElement ? get(HTMLElement, 'innerText')
    : get(Node, 'textContent')).call(e).replace(/\\s+/g, ' ').trim();
  const rectOf = (e) => Element.prototype.getBoundingClientRect.call(e);
  const seen = (e) => {
    const rect = rectOf(e);
    return rect.width > 0 && rect.height > 0 && Element.prototype.checkVisibility.call(
      e, {opacityProperty: true, visibilityProperty: true});
  };
  const all = (selector) => {
    try {
      return [...Document.prototype.querySelectorAll.call(document, selector)];
    } catch (e) {
      throw new Error('invalid selector ' + selector);
    }
  };
"""

_OBSERVE: Final = f"""function (selector, style, attribute) {{{_COMMON}
  const field = (e) => e instanceof HTMLInputElement ? HTMLInputElement
    : e instanceof HTMLTextAreaElement ? HTMLTextAreaElement
    : e instanceof HTMLSelectElement ? HTMLSelectElement : null;
  return all(selector).filter(seen).slice(0, 500).map((e) => ({{
    text: textOf(e),
    value: field(e) ? get(field(e), 'value').call(e) : null,
    checked: e instanceof HTMLInputElement ? get(HTMLInputElement, 'checked').call(e) : null,
    disabled: Element.prototype.matches.call(e, ':disabled'),
    attribute: attribute ? Element.prototype.getAttribute.call(e, attribute) : null,
    style: style ? getComputedStyle(e).getPropertyValue(style) : null,
  }}));
}}"""

_AIM: Final = f"""function (selector, index) {{{_COMMON}
  const found = all(selector).filter(seen);
  if (index >= found.length)
    return {{problem: `${{found.length}} visible elements match ${{selector}}, `
      + `so none is number ${{index}}`}};
  const e = found[index];
  Element.prototype.scrollIntoView.call(e, {{block: 'center', behavior: 'instant'}});
  const rect = rectOf(e);
  const x = rect.left + rect.width / 2, y = rect.top + rect.height / 2;
  const hit = Document.prototype.elementFromPoint.call(document, x, y);
  const contains = (a, b) => Node.prototype.contains.call(a, b);
  if (!hit || !(contains(e, hit) || contains(hit, e)))
    return {{problem: `${{selector}} is covered by another element`}};
  return {{x, y}};
}}"""

_SELECT: Final = f"""function (selector, wanted) {{{_COMMON}
  const found = all(selector).filter(seen);
  if (!found.length || !(found[0] instanceof HTMLSelectElement))
    return `no visible select element matches ${{selector}}`;
  const options = [...get(HTMLSelectElement, 'options').call(found[0])];
  const option = options.find((o) => textOf(o) === wanted || o.value === wanted);
  if (!option) return `${{selector}} has no option ${{wanted}}`;
  option.selected = true;
  for (const type of ['input', 'change'])
    EventTarget.prototype.dispatchEvent.call(found[0], new Event(type, {{bubbles: true}}));
  return '';
}}"""

_TITLE: Final = """function () {
  return Object.getOwnPropertyDescriptor(Document.prototype, 'title').get.call(document);
}"""

_TOO_WIDE: Final = f"""function () {{{_COMMON}
  const width = get(Element, 'clientWidth').call(
    get(Document, 'documentElement').call(document));
  const wide = all('body *').filter((e) => seen(e) && rectOf(e).right > width + 1
    && getComputedStyle(e).position !== 'fixed');
  const scrolls = get(Element, 'scrollWidth').call(
    get(Document, 'documentElement').call(document)) > width + 1;
  return scrolls && wide.length ? wide[0].tagName.toLowerCase() : '';
}}"""
