from __future__ import annotations

import sys
from pathlib import Path

import pytest

from datagen_ray.cluster.run import import_paths


def test_folders_of_own_modules_are_passed_on_and_those_of_python_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "jobs").mkdir(parents=True)
    (tmp_path / "lib").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    own = ["", str(tmp_path / "here" / "jobs"), str(tmp_path / "lib"), str(tmp_path / "none")]
    python = [each for each in sys.path if "site-packages" in each or "lib-dynload" in each]
    monkeypatch.setattr(sys, "path", [*own, *python])
    assert import_paths() == (".", "jobs", str(tmp_path / "lib"))
