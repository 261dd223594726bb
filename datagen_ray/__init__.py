"""datagen_ray: synthetic-data pipelines on Ray that cannot be lost.

Layers, each importing only those below it::

    cli, jobs      talk to a person
    cluster        Ray: driver, worker, maintainer      the only importer of ray
    pipeline       step kinds, replay, execution of one item
    store          where the log is kept                the only importer of lance and obstore
    log            what the log is: ids, events, fold   pure
"""
