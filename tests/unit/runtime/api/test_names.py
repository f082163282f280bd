"""The names that the code of an environment imports."""

from __future__ import annotations

import pytest

from aenv_ray import runtime


def test_published_projects_can_import_the_sidecar_by_its_former_name() -> None:
    assert runtime.__getattr__("second") is runtime.__getattr__("sidecar")
    with pytest.raises(AttributeError, match="third"):
        runtime.__getattr__("third")
