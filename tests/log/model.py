"""A second fold, written from the format's rules alone, over exchange forms.

It shares nothing with the package: plain dicts in, plain dicts out, one rule after another. What
it gives for one item is ``("never", None)``, ``("damaged", code)`` or ``("found", state)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]
POSITION = ("step_name", "step_kind", "step_index", "enclosing_step", "selector_step")


def without_bytes(event: Event) -> Event:
    """An event as reads give it: blobs without their bytes."""
    value = event["value"]
    if value is not None and value["kind"] == "blob":
        return {**event, "value": {**value, "bytes": None}}
    return event


def key_of(value: Any) -> str:
    """A text that tells contents apart, also NaN and the zeros."""
    return repr(value)


def fold(events: Iterable[Event]) -> tuple[str, Any]:
    distinct: dict[str, Event] = {}
    for event in events:
        known = distinct.setdefault(event["event_id"], event)
        if key_of(known) != key_of(event):
            return "damaged", "event_id_reused"
    ordered = sorted(distinct.values(), key=lambda e: (e["item_seq"], e["event_id"]))
    numbers = [event["item_seq"] for event in ordered]
    if len(set(numbers)) < len(numbers):
        return "damaged", "conflicting_item_seq"
    if all(event["event_type"] != "ITEM_CREATED" for event in ordered):
        return "never", None
    first = ordered[0]
    if first["event_type"] != "ITEM_CREATED":
        return "damaged", "created_not_first"
    fields: dict[str, list[Event]] = {}
    status, tags = "running", None
    for event in ordered:
        kind = event["event_type"]
        if kind == "ITEM_CREATED":
            status, tags = "running", event["query_tags"]
        elif kind == "TERMINAL":
            status = event["status"]
        elif kind in ("FIELD_SET", "FIELD_APPEND"):
            earlier = fields.setdefault(event["field_name"], [])
            if earlier:
                before = earlier[-1]
                if before["event_type"] != kind:
                    return "damaged", "mixed_set_append"
                if before["value"]["kind"] != event["value"]["kind"]:
                    return "damaged", "field_kind_change"
                codecs = [(e["field_type"], e["codec_version"]) for e in (before, event)]
                if kind == "FIELD_APPEND" and codecs[0] != codecs[1]:
                    return "damaged", "append_codec_change"
            if kind == "FIELD_SET":
                earlier.clear()
            earlier.append(event)
    steps = [event for event in ordered if event["event_type"] == "STEP_COMPLETED"]
    starts = [event for event in ordered if event["event_type"] == "STEP_STARTED"]
    return "found", {
        "item_id": first["item_id"],
        "root_item_id": first["root_item_id"],
        "parent_item_id": first["parent_item_id"],
        "status": status,
        "fields": {name: _field(values) for name, values in fields.items()},
        "blob_event_ids": {
            name: values[-1]["event_id"]
            for name, values in fields.items()
            if values[-1]["value"]["kind"] == "blob"
        },
        "started": _positions(starts),
        "completed": _positions(steps),
        "trajectory": [{**_position(event), "item_seq": event["item_seq"]} for event in steps],
        "last_item_seq": max(numbers),
        "last_attempt": max(event["attempt"] for event in ordered),
        "query_tags": tags,
    }


def _field(values: list[Event]) -> dict[str, Any]:
    last = values[-1]
    data = {"field_type": last["field_type"], "codec_version": last["codec_version"]}
    if last["event_type"] == "FIELD_SET":
        return {"mode": "set", **data, "value": last["value"]}
    return {"mode": "append", **data, "values": [event["value"] for event in values]}


def _position(event: Event) -> dict[str, Any]:
    return {name: event[name] for name in POSITION}


def _positions(events: list[Event]) -> list[dict[str, Any]]:
    distinct = {key_of(_position(event)): _position(event) for event in events}
    return list(distinct.values())
