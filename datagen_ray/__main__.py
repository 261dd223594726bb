"""``python -m datagen_ray``: the same as ``datagen-ray``."""

from __future__ import annotations

from datagen_ray.cli.main import main

if __name__ == "__main__":
    main()
