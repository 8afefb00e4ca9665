"""The places of two ranks; the test's name says whether they share a GPU."""

from __future__ import annotations

import pytest

from tests.gpu.places import Places, how, places


@pytest.fixture(params=[2], ids=how)
def two_places(request: pytest.FixtureRequest) -> Places:
    """Places for two ranks, see :func:`tests.gpu.places.places`."""
    return places(request.param)
