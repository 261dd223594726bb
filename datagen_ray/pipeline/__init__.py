"""Steps and pipelines, and running the tree of one item against a log.

What a user writes, lowest first::

    results    Append, Filtered, Permanent
    retry      Retry
    codec      Codec; ready_codecs for dataclasses, models and arrays; codecs for declared fields
    limits     RateLimit, and the ledger of what workers share
    placement  steps that run elsewhere, and the protocol for who can run them
    steps      step: leaves
    nodes      Sequence, Loop, MapReduce, Branch, SubPipeline, Conditional, Router
    pipeline   Pipeline: the checked tree

What runs it::

    item       the read-only view of an item, lazy blobs, sub-items
    context    ctx
    calls      user code: set-up, retries, choices
    runner     one step: threads, permits, gates (gate), batches (batching), timeouts
    here       placed steps in this process after all
    sent       items and outcomes between processes
    replay     what the log has of a root, and the cursor along it
    emitter    rows on their way into the log
    stream     one stream: fields, writer, what user code's results and errors mean
    walk       its way through the pipeline: replay, then live
    births     how items come into the log
    fanout     sub-items, side by side, and their reduce
    executor   roots and their numbers (counts), with Python set to suit them (interpreter)
    local      a whole run in one process, with local_run; only these two know the store
"""
