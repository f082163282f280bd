"""Tests that are Python code: they run in the judge, and what they call runs in the solution."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from collections.abc import Collection
from typing import Any

from judge.link import Link

_EQUAL = "__aenv_equal__"


class Unequal(AssertionError):
    """An ``assert a == b`` has failed; the arguments are both values."""


class Namespace(dict[str, Any]):
    """The global variables of a test.

    Names of the solution stand for its objects. Builtins and modules of the standard library are
    the judge's, so that a solution cannot replace what decides a test.

    Args:
        link: The connection to the solution.
        names: What the tests use of the solution.
    """

    def __init__(self, link: Link, names: Collection[str]) -> None:
        super().__init__({"__name__": "test", "__builtins__": builtins, _EQUAL: _assert_equal})
        self._link = link
        self._names = names

    def __missing__(self, name: str) -> Any:
        if name in self._names:
            try:
                self[name] = self._link.ask("name", name)
            except KeyError:
                raise NameError(f"the solution does not define {name!r}") from None
        elif hasattr(builtins, name) or name not in sys.stdlib_module_names:
            raise KeyError(name)
        else:
            self[name] = importlib.import_module(name)
        return self[name]


def run(setup: str, source: str, names: Collection[str], link: Link) -> None:
    """Run a test.

    Args:
        setup: Code that runs first, such as the task's own functions; `names` that it defines are
            replaced by those of the solution.
        source: The code of the test.
        names: What the test uses of the solution.
        link: The connection to the solution.

    Raises:
        Unequal: An equality that is asserted does not hold.
        BaseException: What the test, its setup or the solution raised.
    """
    namespace = Namespace(link, names)
    exec(compile(setup, "setup", "exec"), namespace)
    for name in names:
        namespace.pop(name, None)
    tree = _Equalities().visit(ast.parse(source, "test"))
    exec(compile(ast.fix_missing_locations(tree), "test", "exec"), namespace)


class _Equalities(ast.NodeTransformer):
    """Replaces ``assert a == b`` by a call that reports both values."""

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        test = node.test
        if not isinstance(test, ast.Compare) or [type(op) for op in test.ops] != [ast.Eq]:
            return node
        function = ast.Name(_EQUAL, ast.Load())
        call = ast.Call(function, [test.left, test.comparators[0]], [])
        return ast.copy_location(ast.Expr(call), node)


def _assert_equal(got: Any, expected: Any) -> None:
    if not got == expected:
        raise Unequal(got, expected)
