"""What tools return through the runtime, the same on every engine."""

from __future__ import annotations

import base64

import pytest

from aenv_ray.engines.base import Sandbox
from aenv_ray.testing.contract_bench import call, value_of

_LIMIT_BYTES = 10 * 1024 * 1024
"""Of a result."""


class ResultTests:
    """What tools return."""

    async def test_huge_text_is_cut_with_a_mark(self, shared: Sandbox) -> None:
        """Invariant 12."""
        result = await call(shared, "echo", {"text": "x", "times": 12_000_000})
        assert result.meta["aenv/truncated"] is True
        assert result.text().endswith("of 12000000 bytes]")
        assert _LIMIT_BYTES < len(result.text()) < _LIMIT_BYTES + 200

    async def test_a_huge_list_is_cut_with_a_mark(self, shared: Sandbox) -> None:
        """Invariant 12."""
        result = await call(shared, "huge_list", {"length": 2_000_000})
        assert result.meta["aenv/truncated"] is True
        assert "[output cut" in result.text()[-100:]

    async def test_a_long_list_below_the_limit_arrives_whole(self, shared: Sandbox) -> None:
        assert await value_of(shared, "huge_list", length=100_000) == list(range(100_000))

    async def test_plain_values_arrive_as_they_are(self, shared: Sandbox) -> None:
        assert await value_of(shared, "value", kind="object") == {"a": [1, 2.5, None, "ü"]}
        nothing = await call(shared, "value", {"kind": "none"})
        assert nothing.content == []
        assert not nothing.is_error

    async def test_numbers_that_json_lacks_are_not_hidden(self, shared: Sandbox) -> None:
        assert await value_of(shared, "value", kind="nan") == {"nan": "NaN", "inf": "Infinity"}

    async def test_models_go_in_and_out(self, shared: Sandbox) -> None:
        assert await value_of(shared, "value", kind="model") == {"x": 1.5, "y": 0.0}
        moved = await value_of(shared, "move", point={"x": 1}, by=[2.0, 3.0])
        assert moved == {"x": 3.0, "y": 3.0}

    async def test_bytes_and_images_are_blocks(self, shared: Sandbox) -> None:
        (block,) = (await call(shared, "value", {"kind": "bytes"})).content
        assert base64.b64decode(block["resource"]["blob"]) == b"\x00\x01\xff"
        (image,) = (await call(shared, "value", {"kind": "image"})).content
        assert image["mimeType"] == "image/png"
        assert base64.b64decode(image["data"]).startswith(b"\x89PNG")
        mixed = (await call(shared, "value", {"kind": "mixed"})).content
        assert [block["type"] for block in mixed] == ["text", "image"]

    async def test_text_that_utf8_cannot_encode_is_repaired(self, shared: Sandbox) -> None:
        text = await value_of(shared, "value", kind="surrogate")
        assert text.startswith("half ")
        assert text.endswith(" a pair")

    @pytest.mark.parametrize("kind", ["cycle", "lock"])
    async def test_what_cannot_be_sent_is_an_error_result(self, shared: Sandbox, kind: str) -> None:
        result = await call(shared, "value", {"kind": kind})
        assert result.is_error
        assert "cannot be sent" in result.text()
        assert await value_of(shared, "echo", text="still here") == "still here"
