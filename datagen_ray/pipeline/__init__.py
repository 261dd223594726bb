"""Steps and pipelines, and running the tree of one item against a log.

What a user writes, lowest first::

    results    Append, Filtered, Permanent
    retry      Retry
    codecs     Codec, declared fields
    steps      step: leaves
    nodes      Sequence, Loop, MapReduce, Branch, SubPipeline, Conditional, Router
    pipeline   Pipeline: the checked tree

What runs it::

    item       the read-only view of an item, lazy blobs, sub-items
    context    ctx
    calls      user code: threads, permits, retries, timeouts, batches
    replay     what the log has of a root, and the cursor along it
    emitter    rows on their way into the log
    walk       one stream: replay, then live
    births     how items come into the log
    fanout     sub-items, side by side, and their reduce
    executor   roots
    local      a whole run in one process; the one module here that knows the store
"""
