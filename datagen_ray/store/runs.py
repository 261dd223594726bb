"""The order of the runs of an experiment: numbered terms, each taken by one run.

A run takes the next term before it claims any shard, and a worker looks for a higher one after
its claim. Whichever of two runs has the higher term goes on; the other ends and names it. Terms
have no gaps and are never removed, so looking for the one after ours is enough.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datagen_ray.clock import Clock, utc_now
from datagen_ray.errors import ConfigError, DamagedLogError, RunSupersededError, StorageError
from datagen_ray.store import layout
from datagen_ray.store.claim import ClosedClaim, claim_all_shards
from datagen_ray.store.storage import LogStorage

__all__ = [
    "ClosedClaim",
    "RunTerm",
    "begin_run",
    "check_not_superseded",
    "check_roots_by",
    "claim_all_shards",
    "latest_run",
    "list_runs",
    "roots_by",
]

_MAX_RACES = 1000


@dataclass(frozen=True)
class RunTerm:
    """One run's place in the order. ``pipeline_tree`` is any JSON value that describes its steps.

    ``origin`` says from where the run was started, ``started_at`` when (RFC 3339, UTC).
    ``roots_by`` says what names its roots, see :func:`roots_by`; empty where it is not known.
    """

    term: int
    run_id: str
    pipeline_tree: Any = None
    fingerprint: str = ""
    started_at: str = ""
    origin: str = ""
    roots_by: str = ""


def roots_by(key: str | None) -> str:
    """What names the roots of a run: a column of its source, or, without one, row numbers."""
    return "row numbers" if key is None else f"the column {key!r}"


def check_roots_by(previous: RunTerm | None, key: str | None) -> None:
    """Raise ConfigError if an experiment's roots were named by something else before.

    The rows of the source would all be new roots, run once more beside those that are there.
    """
    if previous is None or previous.roots_by in ("", roots_by(key)):
        return
    raise ConfigError(
        f"the roots of this experiment are named by {previous.roots_by} (run {previous.run_id}), "
        f"and now by {roots_by(key)}: every row would be run again under another id; keep the key, "
        "or choose another experiment"
    )


def begin_run(
    uri: str,
    run_id: str,
    *,
    pipeline_tree: Any,
    fingerprint: str,
    storage_options: Mapping[str, str] | None = None,
    origin: str,
    roots_by: str = "",
    now: Clock = utc_now,
    fsync: bool = True,
) -> RunTerm:
    """Take the next term of the experiment that a log lies in. Whatever ran before is superseded.

    ``run_id`` must be unique. Raises StorageError when the storage fails.
    """
    storage = _beside(uri, storage_options, fsync=fsync)
    started_at = now().isoformat()
    term = max(_terms(storage), default=0)
    for _ in range(_MAX_RACES):
        term += 1
        run = RunTerm(term, run_id, pipeline_tree, fingerprint, started_at, origin, roots_by)
        text = json.dumps(_to_dict(run), sort_keys=True, indent=1, ensure_ascii=False)
        if storage.put_if_absent(layout.run_key(term), text.encode()):
            return run
        # A put whose answer was lost may have been repeated below us and found itself.
        taken = _read(storage, term)
        if taken is not None and (taken.run_id, taken.started_at) == (run_id, started_at):
            return run
    raise StorageError(f"{_MAX_RACES} other runs of {uri} began at the same time; try again")


def latest_run(uri: str, storage_options: Mapping[str, str] | None = None) -> RunTerm | None:
    """The run with the highest term, or None when none has begun."""
    storage = _beside(uri, storage_options)
    terms = _terms(storage)
    return _read(storage, max(terms)) if terms else None


def list_runs(uri: str, storage_options: Mapping[str, str] | None = None) -> list[RunTerm]:
    """All runs of the experiment, in order."""
    storage = _beside(uri, storage_options)
    runs = (_read(storage, term) for term in sorted(_terms(storage)))
    return [run for run in runs if run is not None]


def check_not_superseded(
    uri: str, term: int | RunTerm, storage_options: Mapping[str, str] | None = None
) -> None:
    """Raise RunSupersededError, naming the run that took over, if a higher term exists."""
    number = term.term if isinstance(term, RunTerm) else term
    storage = _beside(uri, storage_options)
    if not storage.exists(layout.run_key(number + 1)):
        return
    newest = _read(storage, max(_terms(storage)))
    name = newest.run_id if newest is not None else "unknown"
    origin = f" from {newest.origin}" if newest is not None and newest.origin else ""
    raise RunSupersededError(
        f"run {name!r}{origin} took over this experiment (term {number + 1} or later, ours is "
        f"{number}); this run stops, nothing of it is lost"
    )


def _beside(
    uri: str, storage_options: Mapping[str, str] | None, *, fsync: bool = True
) -> LogStorage:
    return LogStorage(layout.experiment_of(uri), storage_options, fsync=fsync)


def _terms(storage: LogStorage) -> list[int]:
    names = (file.name for file in storage.list_files(layout.RUNS_FOLDER))
    return [term for name in names if (term := layout.parse_run_name(name))]


def _to_dict(run: RunTerm) -> dict[str, Any]:
    return {
        "term": run.term,
        "run_id": run.run_id,
        "pipeline_tree": run.pipeline_tree,
        "fingerprint": run.fingerprint,
        "started_at": run.started_at,
        "origin": run.origin,
        "roots_by": run.roots_by,
    }


def _read(storage: LogStorage, term: int) -> RunTerm | None:
    raw = storage.get(layout.run_key(term))
    if raw is None:
        return None
    try:
        data = json.loads(raw)
        return RunTerm(
            term,
            str(data["run_id"]),
            data.get("pipeline_tree"),
            str(data.get("fingerprint", "")),
            str(data.get("started_at", "")),
            str(data.get("origin", "")),
            str(data.get("roots_by", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedLogError(
            f"{storage.uri}/{layout.run_key(term)} cannot be read as a run; restore or remove it"
        ) from error
