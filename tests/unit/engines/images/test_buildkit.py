"""BuildKit: which daemons have it, and how its progress report is parsed."""

from __future__ import annotations

import pytest

from aenv_ray.engines.images.buildkit import ProgressReport, daemon_lack
from aenv_ray.errors import ConfigError, FabricUnavailable, Unauthorized

_DOCKER = {"Components": [{"Name": "Engine"}], "ApiVersion": "1.41", "Os": "linux"}
# From `docker build --progress plain`, Docker 20.10: two stages; the second one fails.
_BUILDKIT = """\
#1 [internal] load build definition from Dockerfile
#1 sha256:98de793eeb22bc1c147c0617c7dbdb10316bc877ff0609a0a42bc622fa980125
#1 transferring dockerfile: 219B done
#1 DONE 0.0s

#4 [one 1/2] FROM docker.io/library/base:1
#4 DONE 0.0s

#5 [one 2/2] RUN echo x; echo err >&2
#5 0.316 x

#6 [internal] load build context
#6 DONE 0.1s

#5 [one 2/2] RUN echo x; echo err >&2
#5 0.317 err
#5 DONE 0.6s

#7 [linux/amd64 stage-1 1/2] COPY Dockerfile /d
#7 CACHED

#8 [stage-1 2/2] RUN echo last words; exit 3
#8 0.468 last words
#8 ERROR: executor failed running [/bin/sh -c echo last words; exit 3]: exit code: 3
------
 > [stage-1 2/2] RUN echo last words; exit 3:
#8 0.468 last words
------
executor failed running [/bin/sh -c echo last words; exit 3]: exit code: 3
"""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({}, ""),
        ({"ApiVersion": "1.39"}, ""),
        ({"ApiVersion": "1.38"}, "1.38 is older"),
        ({"ApiVersion": ""}, "older"),
        ({"Os": "windows"}, "windows"),
        ({"Components": [{"Name": "Podman Engine"}]}, "Podman"),
    ],
)
def test_a_daemon_without_buildkit_is_recognized(answer, words):
    lack = daemon_lack({**_DOCKER, **answer})
    assert bool(lack) == bool(words)
    assert words in lack


def parse(text: str) -> tuple[ProgressReport, list[tuple[int, int, str]], list[str]]:
    steps: list[tuple[int, int, str]] = []
    output: list[str] = []
    report = ProgressReport(lambda *step: steps.append(step), output.append)
    for line in text.splitlines():
        report.feed(line)
    return report, steps, output


def test_steps_and_their_output_are_reported_as_they_come():
    _, steps, output = parse(_BUILDKIT)
    assert [text for _, _, text in steps] == [
        "FROM docker.io/library/base:1", "RUN echo x; echo err >&2", "COPY Dockerfile /d",
        "RUN echo last words; exit 3",
    ]  # fmt: skip
    assert [(number, total) for number, total, _ in steps] == [(1, 2), (2, 2), (3, 4), (4, 6)]
    assert output[:3] == ["x", "err", "last words"]


def test_the_error_names_the_failed_step_and_shows_its_output():
    report, _, _ = parse(_BUILDKIT)
    error = report.failure("Dockerfile does not build", report.error)
    assert isinstance(error, ConfigError)
    first, *rest = error.message.splitlines()
    assert first == ("Dockerfile does not build at step stage-1 2/2 : RUN echo last words; exit 3:")
    assert rest[0] == "last words"
    assert rest[-1].endswith("exit code: 3")


def test_the_error_of_buildx_is_not_its_excerpt_of_the_dockerfile():
    """Docker 23 and newer show the lines of the Dockerfile around the failed step."""
    report, _, _ = parse(
        '#0 building with "default" instance using docker driver\n\n'
        "#1 [internal] load build definition from Dockerfile\n#1 DONE 0.0s\n\n"
        "#5 [2/2] RUN echo last words; exit 3\n#5 0.120 last words\n"
        '#5 ERROR: process "/bin/sh -c echo last words; exit 3" did not complete successfully: '
        "exit code: 3\n------\n > [2/2] RUN echo last words; exit 3:\n0.120 last words\n------\n"
        "Dockerfile:2\n--------------------\n   1 |     FROM base\n"
        "   2 | >>> RUN echo last words; exit 3\n   3 |     \n--------------------\n"
        'ERROR: failed to solve: process "/bin/sh -c echo last words; exit 3" did not complete '
        "successfully: exit code: 3\n"
    )
    assert report.error.startswith("ERROR: failed to solve: process")
    assert report.failure("x", report.error).message.startswith(
        "x at step 2/2 : RUN echo last words; exit 3:\nlast words\nERROR: failed"
    )


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("failed with status code [manifests 1]: 401 Unauthorized", Unauthorized),
        ("failed to do request: dial tcp: connection refused", FabricUnavailable),
        ("localhost:1/a:1: not found", ConfigError),
    ],
)
def test_a_base_image_that_cannot_be_pulled_is_not_a_mistake_in_the_dockerfile(words, kind):
    name = "localhost:1/a:1"
    report, _, _ = parse(
        f"#3 [internal] load metadata for {name}\n#3 ERROR: {words}\n------\n{words}"
    )
    error = report.failure("it does not build", report.error)
    assert type(error) is kind
    assert name in error.message
    assert words in error.message


def test_a_base_image_can_also_fail_at_its_from_step():
    report, _, _ = parse("#2 [linux/amd64 one 1/2] FROM a:1\n#2 ERROR: dial tcp")
    assert type(report.failure("x", "dial tcp: connection refused")) is FabricUnavailable


def test_the_output_of_a_step_is_not_taken_for_that_of_a_registry():
    step = "#2 [2/2] RUN curl http://localhost:1 # : FROM x\n#2 ERROR: connection refused"
    report, _, _ = parse(step)
    assert type(report.failure("x", "connection refused")) is ConfigError


def test_a_full_disk_is_not_a_mistake_in_the_dockerfile():
    report, _, _ = parse("#2 [2/2] RUN x\n#2 ERROR: no space left on device")
    error = report.failure("x", "no space left on device")
    assert type(error) is FabricUnavailable
