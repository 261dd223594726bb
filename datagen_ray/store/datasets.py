"""Opening Lance data sets."""

from __future__ import annotations

from typing import Any

import lance

from datagen_ray.store.forks import note_use
from datagen_ray.store.lance_errors import LancePanicError


def open_dataset(uri: str, **options: Any) -> Any:
    """As ``lance.dataset``; a panic of Lance, which some damaged files cause, is an Exception.

    Raises :data:`~datagen_ray.store.lance_errors.LANCE_ERRORS`.
    """
    note_use()
    try:
        return lance.dataset(uri, **options)
    except BaseException as error:
        # Made anew by each extension module, so that it has no name to import.
        if type(error).__name__ == "PanicException":
            raise LancePanicError(f"Lance panicked: {error}") from error
        raise
