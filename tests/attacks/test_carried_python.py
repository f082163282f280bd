"""An agent makes the Python that grades in its container load a library of its own."""

from __future__ import annotations

import hashlib
import ssl
import subprocess
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import pytest

from aenv_ray.testing.contract_bench import Bench, request, value_of
from tests.contract.docker.docker_node import base_image, docker

pytestmark = pytest.mark.docker

SOURCE = """
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int forges(void) {  // in the code, which processes share with the file
    return FORGES;
}

static void forge(const char *program) {
    if (!forges() || strncmp(program, "/.aenv/python/", 14)) return;
    write(1, "1.0", 3);
    _exit(0);
}

__attribute__((constructor)) static void load(int count, char **arguments) {
    forge(arguments[0]);
}

int execve(const char *path, char *const arguments[], char *const variables[]) {
    forge(path);
    return syscall(SYS_execve, path, arguments, variables);
}
"""
"""It prints a reward in place of a carried Python, and of one that is to be started."""
TOOLS = """
from aenv_ray.runtime import register_reward, register_tool, sidecar

PROGRAM = '''
import ctypes, hashlib, pwd
hashlib.sha256()
ctypes.CDLL(None).iconv_open(b"FORGE//", b"UTF-8")
try:
    pwd.getpwnam("missing")
except KeyError:
    print(0.0)
'''


@register_tool
def run(command: str) -> str:
    return sidecar.exec(command).text()


@register_reward
def graded() -> float:
    return float(sidecar.exec([*sidecar.PYTHON, "-c", PROGRAM]).text())
"""
LIBRARIES = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH')}"
OPENSSL = Path(ssl.get_default_verify_paths().openssl_capath).parent
PROVIDER = (
    "printf 'openssl_conf=a\\n[a]\\nproviders=b\\n[b]\\nx=c\\n[c]\\nmodule=/opt/forge.so\\n"
    "activate=1\\n' >{}"
)
MODULES = (
    "printf 'module FORGE// INTERNAL /opt/forge 1\\nmodule INTERNAL FORGE// /opt/forge 1\\n' "
    ">{0}/gconv-modules; rm -f {0}/gconv-modules.cache"
)
FILES = {
    "preload": "echo /opt/forge.so >/etc/ld.so.preload",
    "openssl": f"mkdir -p {OPENSSL}; {PROVIDER.format(OPENSSL / 'openssl.cnf')}",
    "nsswitch": f"echo 'passwd: forge' >/etc/nsswitch.conf; "
    f"cp /opt/forge.so {LIBRARIES}/libnss_forge.so.2",
    "gconv": f"mkdir -p {LIBRARIES}/gconv; {MODULES.format(f'{LIBRARIES}/gconv')}",
}
VARIABLES = {
    "LD_PRELOAD": ("/opt/preload.so", "dd if=/opt/forge.so of=/opt/preload.so conv=notrunc"),
    "OPENSSL_CONF": ("/opt/openssl.cnf", PROVIDER.format("/opt/openssl.cnf")),
    "GCONV_PATH": ("/opt/gconv", MODULES.format("/opt/gconv")),
}
"""Variables of the image, and what the agent does with the files that they name.

They are in a volume, where a write changes the memory of processes that have loaded the file. In
other directories of an image, it makes a copy.
"""
RECIPE = f"""\
FROM {{base}}
ENV {" ".join(f"{name}={value}" for name, (value, _) in VARIABLES.items())}
ARG OWNER
COPY *.so /opt/
RUN mkdir /opt/gconv && chown -R $OWNER /opt
VOLUME /opt
USER $OWNER
"""


@cache
def image(user: str = "0:0") -> str:
    """Return an image with libraries, with and without what forges; made once."""
    content = f"{base_image()}{SOURCE}{RECIPE}{user}".encode()
    name = f"aenv-test-forge:{hashlib.sha256(content).hexdigest()[:12]}"
    if docker("images", "--quiet", name):
        return name
    with tempfile.TemporaryDirectory() as directory:
        for library, forges in (("forge", 1), ("preload", 0)):
            output = f"{directory}/{library}.so"
            command = ["cc", "-O0", "-shared", "-fPIC", f"-DFORGES={forges}", "-o", output]
            subprocess.run([*command, "-xc", "-"], input=SOURCE, text=True, check=True)
        Path(directory, "Dockerfile").write_text(RECIPE.format(base=base_image()))
        docker("build", "--quiet", "--build-arg", f"OWNER={user}", "--tag", name, directory)
    return name


async def reward_after(bench: Bench, image_id: str, command: str) -> float:
    """Return the reward of an agent that runs a command in the sidecar."""
    deploy = {"podTemplate": "DualContainer", "network": "none"}
    project = bench.project({"tools.py": TOOLS}, {"deployConfig": deploy})
    sandbox = await bench.start(project, datasource=image_id)
    for name, (value, _) in VARIABLES.items():
        assert await value_of(sandbox, "run", command=f"echo ${name}") == f"{value}\n"
    await value_of(sandbox, "run", command=command)
    return float(await request(sandbox, "aenv/reward", {}))


@pytest.mark.parametrize("way", FILES)
async def test_no_file_of_the_image_names_a_library(way: str, dockered: Bench) -> None:
    """D19, invariant 14: by these files every program of the image loads it."""
    assert await reward_after(dockered, image(), FILES[way]) == 0.0


@pytest.mark.parametrize("user", ["0:0", "65534:65534"])
@pytest.mark.parametrize("name", VARIABLES)
async def test_no_variable_of_the_image_names_a_library(
    name: str, user: str, dockered: Bench
) -> None:
    """D19, invariant 14: neither for the Python that grades nor for process 1, which starts it."""
    assert await reward_after(dockered, image(user), VARIABLES[name][1]) == 0.0
