"""Run as a program: read a log in each way but its blobs, and print what that took, as JSON.

``read_bytes`` are the bytes of all read calls of the process. Large WAL entries are mapped rather
than read, which that does not count; ``disk_bytes`` are what came from the disk either way, the
kernel's reading ahead included.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datagen_ray import DatagenStore


def bytes_read() -> tuple[int, int]:
    """By read calls, and from the disk."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    counts = dict(line.split(": ") for line in lines)
    return int(counts["rchar"]), int(counts["read_bytes"])


def main(uri: str, blob_event_id: str) -> None:
    before = bytes_read()
    with DatagenStore.open(uri, read_only=True) as store:
        ids = list(store.root_item_statuses())
        overview = store.overview()
        report = store.verify()
        assert report.is_clean
        folded = [lookup.folded() for lookup in store.fold_items(ids[:1000]).values()]
        trees = store.fold_roots(ids[-100:])
        found = {
            "events": report.events,
            "items": overview.items,
            "folded": sum(item is not None for item in folded) + len(trees),
        }
        read, from_disk = bytes_read()
        found["read_bytes"], found["disk_bytes"] = read - before[0], from_disk - before[1]
        before = bytes_read()
        blob = store.get_blob(blob_event_id)
        found["blob_bytes"] = len(blob or b"")
        found["blob_read_bytes"] = bytes_read()[0] - before[0]
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
