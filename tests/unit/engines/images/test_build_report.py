"""What builders say: steps, words, and which error a failure is."""

from __future__ import annotations

import pytest

from aenv_ray.engines.images.build_report import BuildKitReport, PlainReport, buildkit_feature
from aenv_ray.errors import ConfigError, FabricUnavailable, Unauthorized

# Of `docker build --progress plain`, Docker 20.10: two stages, of which the second one fails.
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


def buildkit(text: str) -> tuple[BuildKitReport, list[tuple[int, int, str]], list[str]]:
    steps: list[tuple[int, int, str]] = []
    output: list[str] = []
    report = BuildKitReport(lambda *step: steps.append(step), output.append)
    for line in text.splitlines():
        report.take(line)
    return report, steps, output


def test_buildkits_steps_are_told_as_they_begin_with_their_words():
    _, steps, output = buildkit(_BUILDKIT)
    assert [text for _, _, text in steps] == [
        "FROM docker.io/library/base:1", "RUN echo x; echo err >&2", "COPY Dockerfile /d",
        "RUN echo last words; exit 3",
    ]  # fmt: skip
    assert [(done, total) for done, total, _ in steps] == [(1, 2), (2, 2), (3, 4), (4, 6)]
    assert output[:3] == ["x", "err", "last words"]


def test_the_step_of_buildkit_that_failed_is_named_with_its_words():
    report, _, _ = buildkit(_BUILDKIT)
    error = report.failure("Dockerfile does not build", report.last_words)
    assert isinstance(error, ConfigError)
    first, *rest = error.message.splitlines()
    assert first == ("Dockerfile does not build at step stage-1 2/2 : RUN echo last words; exit 3:")
    assert rest[0] == "last words"
    assert rest[-1].endswith("exit code: 3")


def test_the_words_of_buildx_at_the_end_are_the_reason_and_not_the_excerpt():
    """Docker 23 and newer show the Dockerfile around the step that failed."""
    report, _, _ = buildkit(
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
    assert report.last_words.startswith("ERROR: failed to solve: process")
    assert report.step == "2/2 : RUN echo last words; exit 3"
    assert report.words == ["last words"]


def base_image(error: str) -> BuildKitReport:
    name = "localhost:1/a:1"
    return buildkit(f"#3 [internal] load metadata for {name}\n#3 ERROR: {error}\n------\n{error}")[
        0
    ]


def test_a_base_image_that_is_not_given_is_no_mistake_in_the_dockerfile():
    for words, kind in (
        ("failed with status code [manifests 1]: 401 Unauthorized", Unauthorized),
        ("failed to do request: dial tcp: connection refused", FabricUnavailable),
        ("localhost:1/a:1: not found", ConfigError),
    ):
        report = base_image(words)
        error = report.failure("it does not build", report.last_words)
        assert type(error) is kind
        assert "localhost:1/a:1" in error.message
        assert words in error.message
    report, _, _ = buildkit("#2 [linux/amd64 one 1/2] FROM a:1\n#2 ERROR: dial tcp")
    assert type(report.failure("x", "dial tcp: connection refused")) is FabricUnavailable


def test_words_of_a_step_are_not_taken_for_the_registrys():
    step = "#2 [2/2] RUN curl http://localhost:1 # : FROM x\n#2 ERROR: connection refused"
    report, _, _ = buildkit(step)
    assert type(report.failure("x", "connection refused")) is ConfigError


def test_a_full_disk_is_no_mistake_in_the_dockerfile():
    report, _, _ = buildkit("#2 [2/2] RUN x\n#2 ERROR: no space left on device")
    error = report.failure("x", "no space left on device")
    assert type(error) is FabricUnavailable


def test_the_plain_builders_report():
    steps: list[tuple[int, int, str]] = []
    output: list[str] = []
    report = PlainReport(lambda *step: steps.append(step), output.append)
    for line in (
        {"stream": "Step 1/2 : FROM base"}, {"stream": "\n"}, {"stream": " ---> d29d533c7144\n"},
        {"stream": "Step 2/2 : RUN make"}, {"stream": "one\ntwo\n"},
        {"error": "The command '/bin/sh -c make' returned a non-zero code: 2"},
    ):  # fmt: skip
        report.take(line)
    assert steps == [(1, 2, "FROM base"), (2, 2, "RUN make")]
    assert output == ["one", "two"]
    assert report.image_id == ""
    assert report.failure("x", report.error).message == (
        "x at step 2/2 : RUN make:\none\ntwo\n"
        "The command '/bin/sh -c make' returned a non-zero code: 2"
    )
    report.take({"aux": {"ID": "sha256:00"}})
    assert report.image_id == "sha256:00"


@pytest.mark.parametrize(
    ("dockerfile", "feature"),
    [
        ("FROM x\nRUN --mount=type=cache,target=/c make\n", "--mount"),
        ("FROM x\n  copy --from=a --link b c\n", "--link"),
        ("FROM x\nCOPY --chmod=755 a b\n", "--chmod"),
        ("FROM x\nRUN <<EOF\nmake\nEOF\n", "<<"),
        ("FROM x\nCOPY <<'EOF' /a\nx\nEOF\n", "<<"),
        ("FROM x\nRUN make --mount\n", ""),
        ("FROM x\nCOPY --from=a --chown=1 b c\n# RUN --mount\n", ""),
    ],
)
def test_what_only_buildkit_knows_is_found(dockerfile, feature):
    assert buildkit_feature(dockerfile) == feature
