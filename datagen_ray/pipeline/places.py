"""Places: how many roots may run user code at a time.

A root holds a *place* while user code of its tree runs or could run. While all of its streams wait
for the log it holds none, and needs one again before user code of it is called. Where places would
stand empty for a notable time, since steps are short or the log is slow, more roots are *begun*
than there are places. Otherwise none is, and a root that has begun goes on without delay. Roots
that have begun come before new ones, in the order in which they asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from datagen_ray.pipeline.endings import Drained

if TYPE_CHECKING:
    _Turn = asyncio.Future[None]

SPAN_S = 1.0
"""Over how long the number of waiting roots is averaged."""
WORTH_MORE = 0.01
"""Where more than this part of the places would stand empty on average, more roots are begun."""


def most_begun(count: int) -> int:
    """How many roots may be begun and not walked where ``count`` may run user code, at the most.

    As many again but for one, whatever the log takes: where only one may run, none is begun beside
    it.
    """
    return 2 * count - 1


class Places:
    """The places of one executor. Belongs to its event loop.

    ``when_free`` is called when a root may begin and none asked to.
    """

    def __init__(
        self,
        count: int,
        *,
        when_free: Callable[[], None] | None = None,
        clock_s: Callable[[], float] | None = None,
    ) -> None:
        self._count = count
        self._when_free = when_free
        self._clock_s = clock_s or asyncio.get_running_loop().time
        self._free = count
        self._begun = 0
        self._waiting = 0
        self._mean_waiting = 0.0
        self._known_s = self._clock_s()
        self._returning: deque[Place] = deque()
        self._beginning: deque[_Turn] = deque()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """From here on no user code begins: roots that would call some end with ``Drained``."""
        self._closed = True
        for place in list(self._returning):
            place.refuse()
        while self._beginning:
            turn = self._beginning.popleft()
            if not turn.done():
                turn.set_exception(Drained())

    def try_begin(self) -> Place | None:
        """A place for a root that has not begun, if one may begin now."""
        if not self._may_begin():
            return None
        self._free -= 1
        self._begun += 1
        return Place(self)

    async def begin(self) -> Place:
        """A place for a root that has not begun, in the order of the calls."""
        if self._closed:
            raise Drained
        place = None if self._beginning else self.try_begin()
        if place is not None:
            return place
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._beginning.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                Place(self).end()
            raise
        return Place(self)

    def ask(self, place: Place) -> None:
        """A root that waited for the log is to have its place again: now, or when one is free."""
        self._count_waiting(-1)
        if self._free:
            self._free -= 1
            place.given()
        else:
            self._returning.append(place)
        self._grant()

    def give_up(self, *, held: bool) -> None:
        """A root that held a place, or asked for one, waits for the log now, or ends."""
        self._count_waiting(1)
        if held:
            self._free += 1
            self._grant()

    def end(self) -> None:
        """A root that holds no place, and did not ask for one, will not do so again."""
        self._count_waiting(-1)
        self._begun -= 1
        self._grant()

    def _may_begin(self) -> bool:
        self._count_waiting(0)
        worth_more = self._mean_waiting > WORTH_MORE * self._count
        most = most_begun(self._count) if worth_more else self._count
        return self._free > 0 and self._begun < most and not self._closed

    def _grant(self) -> None:
        while self._free and self._returning:
            place = self._returning.popleft()
            if place.asks:
                self._free -= 1
                place.given()
        while self._beginning and self._may_begin():
            turn = self._beginning.popleft()
            if not turn.done():
                self._free -= 1
                self._begun += 1
                turn.set_result(None)
        if self._when_free is not None and self._may_begin():
            self._when_free()

    def _count_waiting(self, more: int) -> None:
        now_s = self._clock_s()
        weight = min(1.0, (now_s - self._known_s) / SPAN_S)
        self._mean_waiting += weight * (self._waiting - self._mean_waiting)
        self._known_s = now_s
        self._waiting += more


class Place:
    """What one root that has begun holds; its streams share it.

    A stream is *within* while its user code runs or could run. The root's first stream is within
    from the start, the others :meth:`join`. The place is given up when none is left within.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._within = 1
        self._holds = True
        self._asks = False
        self._refused = False
        self._entering: list[_Turn] = []
        self._ended = False

    @property
    def asks(self) -> bool:
        """Whether it asked for a place, has none, and did not give up."""
        return self._asks

    def given(self) -> None:
        """It holds a place from now on."""
        self._holds, self._asks = True, False
        for turn in self._entering:
            if not turn.done():
                turn.set_result(None)
        self._entering.clear()

    def refuse(self) -> None:
        """Let a root that has no place have none any more: its streams end with ``Drained``."""
        self._refused = True
        for turn in self._entering:
            if not turn.done():
                turn.set_exception(Drained())
        self._entering.clear()

    def check(self) -> None:
        """Raise ``Drained`` where no user code is to begin any more."""
        if self._refused or self._places.closed:
            raise Drained

    def join(self) -> None:
        """One more stream is within; only where one is already, and so without waiting."""
        self._within += 1

    def leave(self) -> None:
        """One stream less is within."""
        self._within -= 1
        if not self._within:
            self._give_up()

    async def enter(self) -> None:
        """Return when this stream is within again. Raises ``Drained``."""
        self.check()
        self._within += 1
        if not self._holds and not self._asks:
            self._asks = True
            self._places.ask(self)
        if not self._holds:
            turn: _Turn = asyncio.get_running_loop().create_future()
            self._entering.append(turn)
            try:
                await turn
            except (asyncio.CancelledError, Drained):
                self.leave()
                raise

    def end(self) -> None:
        """No user code of this root will run any more, whatever became of its streams."""
        if not self._ended:
            self._ended = True
            self._give_up()
            self._places.end()

    def _give_up(self) -> None:
        if self._holds or self._asks:
            held = self._holds
            self._holds = self._asks = False
            self._places.give_up(held=held)
