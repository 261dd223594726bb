"""Looking at a log, and exporting it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from datagen_ray.cli.main import status_of
from datagen_ray.pipeline.local import run_local
from datagen_ray.pipeline.pipeline import Pipeline
from datagen_ray.pipeline.steps import step
from tests.cli.pipelines import pipeline

ROWS = [{"key": f"k/{n}", "n": n} for n in range(1, 6)]


@pytest.fixture(scope="module")
def log_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three completed roots, one filtered, one that failed three times."""
    root = tmp_path_factory.mktemp("root")
    return run_local(pipeline, ROWS, key="key", root=root, experiment="e", fsync=False).log_uri


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert status_of(arguments) == status
    return capsys.readouterr().out


def test_status_counts_roots_steps_and_failures(
    log_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(said(capsys, "status", log_uri, "--json"))
    assert (found["items"], found["completed"], found["filtered"], found["running"]) == (5, 3, 1, 1)
    assert found["completed_steps"]["check"] == 3
    assert found["failures_by_error_type"] == {"ValueError": 3}
    text = said(capsys, "status", log_uri)
    assert "3 completed, 1 filtered, 1 running" in text


def test_show_tells_all_of_an_item(log_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "show", log_uri, "k%2F1")
    assert text.startswith("k%2F1  completed")
    assert '  text (set, json) = "é 1"' in text
    assert '  log (append, json) = ["looked"]' in text
    assert "  raw (set, blob) = <2 bytes>" in text
    assert "check[1] leaf in main" in text
    assert "  k%2F1/each:1  completed" in text
    assert "fail" not in text


def test_show_takes_a_source_key_too(log_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "show", log_uri, "k/1").startswith("k%2F1  completed")


def test_show_tells_of_open_frames_and_failures(
    log_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "show", log_uri, "k%2F4")
    assert "open  main[0] sequence" in text
    assert text.count("ValueError: four is wrong") == 3
    found = json.loads(said(capsys, "show", log_uri, "k%2F4", "--json"))
    assert [frame["step_name"] for frame in found["open_frames"]] == ["main"]
    assert [failure["attempt"] for failure in found["failures"]] == [0, 1, 2]
    assert found["item"]["status"] == "running"


def test_show_of_a_sub_item_is_about_that_one(
    log_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(said(capsys, "show", log_uri, "k%2F2/each:1", "--json"))
    assert found["item"]["fields"]["y"]["value"] == {"kind": "json", "value": 4}
    assert found["sub_items"] == []


def test_failures_lists_them_all(log_uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in said(capsys, "failures", log_uri, "--json").splitlines()]
    assert [line["item_id"] for line in lines] == ["k%2F4"] * 3
    assert "check[1] leaf in main" in said(capsys, "failures", log_uri)


def test_show_tells_where_and_why_an_item_was_filtered(
    log_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "show", log_uri, "k%2F3")
    assert "filtered at look[0] leaf in main: Filtered: three" in text
    ended = json.loads(said(capsys, "show", log_uri, "k%2F3", "--json"))["ended"]
    assert (ended["status"], ended["at"]["step_name"]) == ("filtered", "look")
    assert ended["error_dump"] == "three"
    assert json.loads(said(capsys, "show", log_uri, "k%2F4", "--json"))["ended"] is None


def test_show_names_an_unknown_item_as_it_was_typed(
    log_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(["show", log_uri, "k/solve:x"]) == 2
    told = capsys.readouterr().err
    assert "no item 'k/solve:x'" in told
    assert "datagen-ray items" in told


def test_items_lists_roots_with_their_status(
    log_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "items", log_uri).splitlines() == [
        "k%2F1  completed",
        "k%2F2  completed",
        "k%2F3  filtered",
        "k%2F4  running",
        "k%2F5  completed",
    ]
    lines = said(capsys, "items", log_uri, "--status", "filtered", "--json").splitlines()
    assert [json.loads(line) for line in lines] == [{"item_id": "k%2F3", "status": "filtered"}]


def test_failures_have_their_tracebacks_where_asked_for(
    log_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "Traceback" not in said(capsys, "failures", log_uri)
    text = said(capsys, "failures", log_uri, "--traceback")
    assert text.count('raise ValueError("four is wrong")') == 3


def test_exhausted_roots_are_listed_with_what_exhausted_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for runs in range(1, 4):
        uri = run_local(
            pipeline, ROWS, key="key", root=tmp_path, experiment="e", fsync=False
        ).log_uri
        told = said(capsys, "failures", uri, "--exhausted")
        if runs < 3:
            assert told == "no exhausted roots\n"
    assert told == (
        "k%2F4  9 failures in 'k%2F4', the last at check[1] (leaf in main): "
        "ValueError: four is wrong\n"
    )
    found = json.loads(said(capsys, "failures", uri, "--exhausted", "--json"))
    assert found["item_id"] == "k%2F4"
    assert status_of(["failures", uri, "--exhausted", "--traceback"]) == 2


def test_failures_of_a_run_that_is_not_there_are_refused(
    log_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_id,) = {
        json.loads(line)["run_id"]
        for line in said(capsys, "failures", log_uri, "--json").split("\n")[:-1]
    }
    assert "ValueError" in said(capsys, "failures", log_uri, "--run", run_id)
    assert status_of(["failures", log_uri, "--run", "nosuch"]) == 2
    assert run_id in capsys.readouterr().err


def test_export_writes_completed_roots(
    log_uri: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "export", log_uri, "--to", str(tmp_path / "rows.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["item_id"] for row in rows] == ["k%2F1", "k%2F2", "k%2F5"]
    assert rows[0]["text"] == "é 1"
    assert rows[0]["raw"] == {"$bytes": "AAE="}
    assert rows[0]["log"] == ["looked"]

    said(capsys, "export", log_uri, "--to", str(tmp_path / "rows.parquet"))
    table = pq.read_table(tmp_path / "rows.parquet")
    kinds = {field.name: str(field.type) for field in table.schema}
    assert (kinds["text"], kinds["half"], kinds["sum"]) == ("string", "double", "int64")
    assert (kinds["raw"], kinds["log"], kinds["mixed"]) == ("binary", "string", "string")
    assert table.column("mixed").to_pylist() == ["1", "2", "5"]
    assert table.column("raw").to_pylist() == [b"\x00\x01"] * 3
    assert sorted(each.name for each in tmp_path.iterdir()) == ["rows.jsonl", "rows.parquet"]


def test_a_failed_export_leaves_the_file_that_was_there(
    log_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "rows.jsonl"
    target.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("datagen_ray.cli.export._write_jsonl", full)
    assert status_of(["export", log_uri, "--to", str(target)]) == 2
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_an_export_has_numbered_roots_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    @step
    def twice(item: Any) -> dict[str, Any]:
        return {"y": item["n"] * 2}

    keys = ["10", "9", "b", "2", "0", "a", "07"]
    rows = [{"k": key, "n": 0.5} for key in keys]
    done = run_local(
        Pipeline("numbers", [twice]), rows, key="k", root=tmp_path / "root", experiment="e"
    )
    target = tmp_path / "rows.parquet"
    assert status_of(["export", done.log_uri, "--to", str(target)]) == 0
    table = pq.read_table(target)
    assert table.column("item_id").to_pylist() == ["0", "2", "9", "10", "07", "a", "b"]
    assert table.column("y").to_pylist() == [1.0] * 7


@step
def odd_fields(item):
    return {"item_id": "X", "item_id_field": "Y", "item_id_field_field": "Z", "\x1b[2J": 1}


def test_an_export_has_every_field_whatever_its_name(tmp_path: Path) -> None:
    done = run_local(
        Pipeline("odd", [odd_fields]), [{"key": "a"}], key="key", root=tmp_path, experiment="e"
    )
    for name in ("rows.jsonl", "rows.parquet"):
        target = tmp_path / name
        assert status_of(["export", done.log_uri, "--to", str(target)]) == 0
        (row,) = (
            pq.read_table(target).to_pylist()
            if name.endswith("parquet")
            else [json.loads(target.read_text())]
        )
        assert row["item_id"] == "a"
        assert row["item_id_field"] == "X"
        assert row["item_id_field_field"] == "Y"
        assert row["item_id_field_field_field"] == "Z"
        assert row["\x1b[2J"] == 1


def test_text_of_the_log_gives_a_terminal_no_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["\x1b[31mred", "two\nlines", "bell\a", "right\u202eleft", "日本 é"]

    @step
    def fails(item):
        raise ValueError("\x1b[2J\tfrom\x07the step")

    done = run_local(
        Pipeline("odd", [odd_fields, fails]),
        [{"key": key} for key in keys],
        key="key",
        root=tmp_path,
        experiment="e",
    )
    listed = said(capsys, "items", done.log_uri)
    assert sorted(listed.splitlines()) == sorted(
        f"{key}  running"
        for key in (r"\x1b[31mred", r"two\nlines", r"bell\x07", r"right\u202eleft", "日本 é")
    )
    exact = said(capsys, "items", done.log_uri, "--json")
    assert {json.loads(line)["item_id"] for line in exact.splitlines()} == set(keys)
    for command in (["failures", "--traceback"], ["show", keys[0]], ["show", keys[1]], ["status"]):
        name, *rest = command
        text = said(capsys, name, done.log_uri, *rest)
        assert all(each.isprintable() or each == "\n" for each in text), command
        assert name == "status" or r"\x1b[2J" in text


def test_maintain_makes_lost_indexes_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_local(
        Pipeline("odd", [odd_fields]), [{"key": "a"}], key="key", root=tmp_path, experiment="e"
    )
    assert status_of(["maintain", done.log_uri, "--once"]) == 0
    shutil.rmtree(Path(done.log_uri) / "_indices")
    assert status_of(["show", done.log_uri, "a"]) == 1
    captured = capsys.readouterr()
    assert f"`datagen-ray maintain {done.log_uri} --once`" in captured.err
    assert "indexed     3 made" in said(capsys, "maintain", done.log_uri, "--once")
    assert said(capsys, "show", done.log_uri, "a").startswith("a  completed")
