"""Nodes of the process engine, shared by the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.node import Node


@pytest.fixture(scope="module")
def walled_node() -> Iterator[Node]:
    """Yield a node whose sandboxes have namespaces."""
    node = Node("auto")
    yield node
    node.end()


@pytest.fixture(scope="module")
def open_node() -> Iterator[Node]:
    """Yield a node whose sandboxes are bare processes."""
    node = Node("none")
    yield node
    node.end()
