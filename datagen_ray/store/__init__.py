"""Where the log is kept: the only layer that knows Lance and object stores.

One experiment is one Lance dataset with a MemWAL. Vocabulary, as Lance uses it:

    shard       one writer's own write path; a slot name maps to one shard for ever
    epoch       counts the claims of a shard; a higher one fences every lower one
    WAL entry   one durable file of rows; never split, positions start at 1 and have no holes
    tail        the WAL entries that no SSTable holds yet
    generation  one MemTable's worth of rows; flushed, it is an SSTable
    base table  where SSTables end up after a merge

Files: ``layout`` builds and parses every path, ``storage`` reads and writes single objects,
``shard`` reads and drains shard manifests and WAL tails, ``creation`` makes and opens the
dataset, ``claim`` takes a shard over, ``writer`` appends to it, ``runs`` orders the runs of an
experiment, and ``lance_errors`` turns Lance's texts into types.
"""

from __future__ import annotations

import os

# Lance configures its logging once, when it is first imported, and reports its own MemWAL index
# as an error on every maintenance call. Being imported before any module of this layer, this is
# the one place early enough to turn that off; a setting of the user's own wins.
os.environ.setdefault("LANCE_LOG", "error,lance::index=off")
