"""One server of the kitchen-sink project for the tests of a module, and a client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from aenv_ray.client.over_http import HttpInstance
from tests.e2e.serving import PROJECT, Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(PROJECT, tmp_path_factory.mktemp("door")) as server:
        yield server


@pytest.fixture
async def instance(server: Server) -> AsyncIterator[HttpInstance]:
    instance = HttpInstance(server.url)
    yield instance
    await instance.close()
