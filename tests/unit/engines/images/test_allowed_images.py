"""Images given by an id: allowed by the names that they have on the node."""

from __future__ import annotations

import pytest

from aenv_ray.engines.images.node_images import check_names
from aenv_ray.errors import PolicyRefused
from aenv_ray.policy import STRICT, Policy

ID = "sha256:" + "0a" * 32
OTHERS = ("registry.internal/secret/tool:1", "registry.internal/secret/tool@" + ID)


@pytest.mark.parametrize("reference", [ID, "0a" * 32, "0a0a0a0a0a0a", "cafe"])
def test_an_id_needs_an_allowed_name(reference: str) -> None:
    """Invariant 15: an id, or its beginning, could be that of any image on the node."""
    for names in ((), OTHERS):
        with pytest.raises(PolicyRefused, match="by its id"):
            check_names(STRICT, reference, names, "it")
    check_names(STRICT, reference, (*OTHERS, "ghcr.io/acme/tool:1"), "it")
    check_names(Policy(), reference, (), "it")


@pytest.mark.parametrize("reference", ["cafe:1", "acme/cafe", f"cafe@{ID}", "python"])
def test_a_name_is_no_id(reference: str) -> None:
    """`Policy.check_image` has decided about it."""
    check_names(STRICT, reference, (), "it")
