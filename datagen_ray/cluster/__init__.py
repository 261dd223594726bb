"""Running pipelines on Ray: a driver that assigns roots, and workers that own one shard each.

``driver.py`` and ``worker.py`` are plain classes that know nothing of Ray; ``actors.py`` is the
one file that makes actors of them, ``run.py`` the entry that starts or joins a cluster.
"""
