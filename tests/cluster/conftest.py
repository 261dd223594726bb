"""A small Ray that the tests of one module share."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="dgr", dir="/tmp")
    os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}},
        )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
