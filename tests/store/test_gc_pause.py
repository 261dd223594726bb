"""The pause of the cyclic collector: over when the last block ends, whoever began it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from datagen_ray.store.gc_pause import collection_paused


@pytest.fixture(autouse=True)
def _collector_as_before() -> Iterator[None]:
    yield
    gc.enable()


def test_collection_goes_on_when_the_last_of_overlapping_blocks_ends() -> None:
    first, second = collection_paused(), collection_paused()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_collection_goes_on_after_an_error() -> None:
    with pytest.raises(ValueError, match="inside"), collection_paused():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_its_owner_turned_off_stays_off() -> None:
    gc.disable()
    with collection_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
