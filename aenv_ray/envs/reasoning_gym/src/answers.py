"""What may be evaluated of an agent's answer.

Some verifiers of reasoning-gym pass the answer to `eval`, or to SymPy's parser, which uses `eval`.
Arbitrary code in an answer could then return any score. These functions replace both: they accept
literals and formulas, and nothing that has effects.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any, Final

MAX_FORMULA: Final = 5_000
"""Characters of a formula."""
_CHARACTERS: Final = re.compile(r"[A-Za-z0-9\s.+\-*/^(),!]*", re.ASCII)
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*", re.ASCII)
_EXPONENT: Final = re.compile(r"(?<=[0-9.])[eE](?=[+-]?[0-9])", re.ASCII)
_FUNCTIONS: Final = frozenset(
    {
        *("Abs", "erf", "exp", "factorial", "ln", "log", "pi", "sign", "sqrt"),
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    }
)
_ATTRIBUTE: Final = re.compile(r"\.\s*[A-Za-z]|[A-Za-z)]\s*\.", re.ASCII)


def literal(source: Any) -> Any:
    """Return the value of a Python literal; replaces `eval`.

    Raises:
        ValueError: `source` is valid Python, but no literal.
        SyntaxError: It is not valid Python.
        TypeError: It is not text.
    """
    if not isinstance(source, str):
        raise TypeError(f"expected text, not {type(source).__name__}")
    return ast.literal_eval(source.strip())


def formula_parser(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `parse` that refuses text that is not a formula.

    Args:
        parse: SymPy's ``parse_expr``.

    The function that is returned raises ValueError for a text with other names than single letters
    and common functions, with attributes, with quotes or brackets, or with more than `MAX_FORMULA`
    characters.
    """

    def parse_formula(source: str, *arguments: Any, **options: Any) -> Any:
        refusal = formula_refusal(source)
        if refusal is not None:
            raise ValueError(refusal)
        return parse(source, *arguments, **options)

    return parse_formula


def formula_refusal(source: str) -> str | None:
    """Return why a text is not evaluated as a formula; None if it may be."""
    if len(source) > MAX_FORMULA:
        return f"a formula has at most {MAX_FORMULA} characters, this has {len(source)}"
    if not _CHARACTERS.fullmatch(source):
        return "a formula has letters, digits and + - * / ^ ( ) , . ! only"
    if _ATTRIBUTE.search(source):
        return "a formula has no attributes"
    for name in _NAME.findall(_EXPONENT.sub(" ", source)):
        if len(name) > 1 and name not in _FUNCTIONS:
            return f"{name} is not a variable of one letter, nor a known function"
    return None
