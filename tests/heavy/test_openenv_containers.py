"""OpenEnv's client starts and reaches containers through the provider."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from openenv.core.generic_client import GenericEnvClient

import aenv_ray
from aenv_ray.errors import ConfigError, SandboxLost
from aenv_ray.integrations.openenv_containers import InstanceProvider
from tests.contract.docker.docker_node import base_image, docker
from tests.fixtures.doc_blocks import doc_blocks
from tests.fixtures.killed_trainers import kill_once_it_acts

EXAMPLE = (
    Path(__file__).parents[2] / "examples" / "integrations" / "trainers" / "openenv_container.py"
)
SERVER = Path(__file__).parents[1] / "fixtures" / "openenv_image_server.py"
COMMAND = "cd /srv && exec python3 server.py"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield an image with a server that speaks OpenEnv's protocol."""
    context = tmp_path_factory.mktemp("image")
    shutil.copytree(Path(websockets.__file__).parent, context / "websockets")
    shutil.copy(SERVER, context / "server.py")
    (context / "Dockerfile").write_text(f"FROM {base_image()}\nCOPY . /srv/\n")
    name = "aenv-test-openenv:1"
    docker("build", "--quiet", "--tag", name, str(context))
    yield name
    docker("rmi", "--force", name)


async def test_a_client_plays_in_a_container(image: str) -> None:
    provider = InstanceProvider(COMMAND, ttl="10m", labels={"of": "openenv"})
    client = await GenericEnvClient.from_docker_image(
        image, provider=provider, env_vars={"GREETING": "welcome"}
    )
    [info] = aenv_ray.list_instances()
    assert (info.id, info.labels["of"]) == (provider.instance_id, "openenv")
    async with client as env:
        begun = await env.reset(seed=7)
        assert begun.observation == {"greeting": "welcome", "seed": 7}
        for number in range(1, 4):
            stepped = await env.step({"add": number})
        assert (stepped.observation["total"], stepped.reward, stepped.done) == (6, 6.0, True)
    assert provider.instance_id is None
    assert not aenv_ray.list_instances()


async def test_the_example_runs(image: str, capsys: pytest.CaptureFixture[str]) -> None:
    await runpy.run_path(str(EXAMPLE))["main"](image, COMMAND, {"add": 6})
    assert "reward 6.0" in capsys.readouterr().out
    assert not aenv_ray.list_instances()


async def test_the_docs_reset(image: str, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {}
    exec(doc_blocks("openenv-container")[0], found)
    await found["main"](image, command=COMMAND)
    assert "greeting" in capsys.readouterr().out
    assert not aenv_ray.list_instances()


def test_a_server_that_does_not_start_says_why(image: str) -> None:
    provider = InstanceProvider("echo no server here; exit 3")
    url = provider.start_container(image)
    with pytest.raises(ConfigError, match=r"runs .* already"):
        provider.start_container(image)
    with pytest.raises(TimeoutError, match="no server here"):
        provider.wait_for_ready(url, 3.0)
    provider.stop_container()
    provider.stop_container()
    with pytest.raises(SandboxLost, match="no container runs"):
        provider.wait_for_ready(url, 3.0)
    assert not aenv_ray.list_instances()


def test_an_image_that_does_not_exist_is_refused() -> None:
    provider = InstanceProvider()
    with pytest.raises(aenv_ray.AenvError, match="no-such-image"):
        provider.start_container("localhost/no-such-image:1")
    assert provider.instance_id is None


def test_a_container_that_is_lost_is_named(image: str) -> None:
    import ray

    provider = InstanceProvider(COMMAND)
    url = provider.start_container(image)
    provider.wait_for_ready(url)
    ray.get(aenv_ray.get(provider.instance_id).release.remote())
    with pytest.raises(SandboxLost, match=str(provider.instance_id)):
        provider.wait_for_ready(url)
    provider.stop_container()
    assert provider.instance_id is None


def test_a_killed_client_leaves_no_container(image: str, tmp_path: Path) -> None:
    program = (
        "import time\n"
        "from aenv_ray.integrations.openenv_containers import InstanceProvider\n"
        f"url = InstanceProvider({COMMAND!r}).start_container({image!r})\n"
        "print('begun')\n"
        "time.sleep(600)\n"
    )
    kill_once_it_acts(program, directory=tmp_path)
