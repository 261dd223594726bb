from __future__ import annotations

import json
from pathlib import Path

from datagen_ray.cli.main import status_of
from datagen_ray.store import layout
from tests.store.maintenance_support import SHARD, log_with_generations, visible_ids
from tests.store.writer_support import new_log


def test_repair_says_what_it_sets_aside_and_the_log_is_whole(tmp_path, capsys):
    uri = log_with_generations(tmp_path, "a")
    before = visible_ids(uri)
    folder = Path(uri) / layout.manifest_folder(SHARD)
    newest = max(folder.glob("*.binpb"), key=lambda path: layout.parse_manifest_name(path.name))
    version = layout.parse_manifest_name(newest.name)
    cut_off = Path(uri) / layout.manifest_key(SHARD, version + 1)
    cut_off.touch()
    assert status_of(["repair", uri, "--dry-run"]) == 0
    assert f"manifest {version + 1}  would be set aside" in capsys.readouterr().out
    assert cut_off.exists()
    assert status_of(["repair", uri, "--json"]) == 0
    (done,) = json.loads(capsys.readouterr().out)["repairs"]
    assert (done["kind"], done["number"], done["shard_id"]) == ("manifest", version + 1, SHARD)
    assert not cut_off.exists()
    assert status_of(["repair", uri]) == 0
    assert capsys.readouterr().out == "nothing to repair\n"
    assert visible_ids(uri) == before


def test_damage_that_rows_are_lost_by_is_one_line_and_status_1(tmp_path, capsys):
    uri = new_log(tmp_path)
    for path in (Path(uri) / layout.VERSIONS_FOLDER).glob("*.manifest"):
        path.write_bytes(b"")
    assert status_of(["repair", uri]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "no version of the base table" in line


def test_a_mistyped_path_is_an_error(tmp_path, capsys):
    assert status_of(["repair", str(tmp_path / "none.lance")]) == 2
    assert "there is no log at" in capsys.readouterr().err
