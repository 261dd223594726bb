"""What a step may ask about the call that it is in."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datagen_ray.log.events import DatagenStreamPosition

_LOGGER = logging.getLogger("datagen_ray.step")


@dataclass(frozen=True, slots=True)
class StepContext:
    """One call of user code.

    ``attempt`` counts the runs of the item, ``retry`` the calls of this step in this run, both
    from 0. ``seed`` and ``idempotency_key`` depend on neither, so a repeated call repeats them.
    """

    item_id: str
    root_id: str
    attempt: int
    retry: int
    position: DatagenStreamPosition
    run_id: str
    pipeline: str
    base_seed: int

    @property
    def seed(self) -> int:
        """63 bits that are this item's at this place, and the pipeline's seed."""
        return derive_seed(self.base_seed, self.item_id, self.position)

    @property
    def idempotency_key(self) -> str:
        """32 hex digits to hand to services, so that a repeated call is recognised there."""
        return _digest(f"key\0{self.pipeline}\0{self.item_id}\0{_spell(self.position)}", 16).hex()

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose messages name the item and the step, and whose records carry all."""
        tags = {
            "item_id": self.item_id,
            "step": self.position.step_name,
            "position": str(self.position),
            "attempt": self.attempt,
            "run_id": self.run_id,
        }
        return _ItemLogger(_LOGGER, tags)


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # Python 3.10 cannot subscript it


class _ItemLogger(_Adapter):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        extra = self.extra or {}
        kwargs.setdefault("extra", extra)
        return f"[{extra['item_id']} {extra['step']}] {msg}", kwargs


def derive_seed(base_seed: int, item_id: str, position: DatagenStreamPosition) -> int:
    """A number that differs by item and position, and never by attempt or retry."""
    digest = _digest(f"seed\0{base_seed}\0{item_id}\0{_spell(position)}", 8)
    return int.from_bytes(digest, "big") >> 1


def _spell(position: DatagenStreamPosition) -> str:
    enclosing = "" if position.enclosing_step is None else position.enclosing_step
    return f"{position.step_name}\0{position.step_index}\0{enclosing}"


def _digest(text: str, size: int) -> bytes:
    # Lone surrogates cannot get into ids or names, both are checked to be UTF-8.
    return hashlib.blake2b(text.encode(), digest_size=size).digest()
