"""Steps and pipelines, and running the tree of one item against a log."""
