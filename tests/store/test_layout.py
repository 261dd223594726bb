from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from datagen_ray.errors import ConfigError
from datagen_ray.store import layout


def test_log_lies_in_the_folder_of_its_pipeline_and_experiment():
    expected = "/data/datagen_checkpoints/io/first/log.lance"
    assert layout.log_uri("/data", "io", "first") == expected
    assert layout.log_uri("/data/", "io", "first") == expected
    assert layout.log_uri("/", "io", "first") == "/datagen_checkpoints/io/first/log.lance"
    assert (
        layout.log_uri("s3://bucket/team", "io", "v1.2-a_b")
        == "s3://bucket/team/datagen_checkpoints/io/v1.2-a_b/log.lance"
    )
    assert layout.log_uri("data", "io", "x") == "data/datagen_checkpoints/io/x/log.lance"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a\0", "-a", "ü", "x" * 201, "a\n"])
def test_names_that_are_no_folder_names_are_refused(name):
    with pytest.raises(ConfigError, match="pipeline name"):
        layout.log_uri("/data", name, "experiment")
    with pytest.raises(ConfigError, match="experiment name"):
        layout.log_uri("/data", "pipeline", name)


def test_runs_and_leases_lie_beside_the_log():
    assert layout.experiment_of("/data/x/log.lance") == "/data/x"
    assert layout.experiment_of("/data/x/log.lance/") == "/data/x"
    assert layout.experiment_of("s3://bucket/x/log.lance") == "s3://bucket/x"
    assert layout.experiment_of("s3://bucket/log.lance") == "s3://bucket"
    assert layout.experiment_of("log.lance") == "."
    assert layout.experiment_of("/log.lance") == "/"
    with pytest.raises(ConfigError):
        layout.experiment_of("s3://bucket")


def test_a_slot_is_the_same_shard_for_ever():
    assert layout.shard_uuid("default") == "02e81b29-f150-54b9-9a08-ce75944f6889"
    assert layout.shard_uuid("worker-1") == str(uuid.uuid5(uuid.NAMESPACE_OID, "worker-1"))
    with pytest.raises(ConfigError):
        layout.shard_uuid("")


@given(st.integers(min_value=1, max_value=2**64 - 1))
def test_bit_reversed_names_parse_back(number):
    shard = layout.shard_uuid("s")
    assert layout.parse_wal_name(layout.wal_key(shard, number).split("/")[-1]) == number
    assert layout.parse_manifest_name(layout.manifest_key(shard, number).split("/")[-1]) == number


def test_bit_reversed_names_put_the_lowest_bit_first():
    assert layout.bit_reversed(1) == "1" + "0" * 63
    assert layout.bit_reversed(6) == "011" + "0" * 61


@pytest.mark.parametrize(
    "name",
    [
        "1" + "0" * 63 + ".arrow#1",
        "1" + "0" * 63 + ".arrow.tmp",
        "." + "1" + "0" * 63 + ".arrow",
        "1" + "0" * 62 + ".arrow",
        "1" + "0" * 63 + ".arrow\n",
        "version_hint.json",
        "tmp",
        "",
    ],
)
def test_leftovers_never_parse_as_entries(name):
    assert layout.parse_wal_name(name) is None
    assert layout.parse_manifest_name(name.replace(".arrow", ".binpb")) is None


def test_folders_of_sstables_and_shards_parse_exactly():
    assert layout.parse_sstable_name("9ea485de_gen_12") == 12
    for name in ("9ea485de_gen_", "9ea485de_gen_0", "9EA485DE_gen_1", "9ea485d_gen_1", "wal"):
        assert layout.parse_sstable_name(name) is None
    shard = layout.shard_uuid("s")
    assert layout.parse_shard_name(shard) == shard
    for name in (shard.upper(), shard.replace("-", ""), "tmp", ""):
        assert layout.parse_shard_name(name) is None


def test_terms_parse_back():
    assert layout.parse_run_name(layout.run_key(7).split("/")[-1]) == 7
    assert layout.parse_lease_name(layout.lease_key(7).split("/")[-1]) == 7
    for name in ("0.json", "01.json", "7.json#1", "lease-7.json", "7.json.tmp"):
        assert layout.parse_run_name(name) is None


@pytest.mark.parametrize("root", ["s3://", "s3:///", "gs:/"])
def test_a_root_that_names_no_bucket_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="names no bucket"):
        layout.log_uri(root, "p", "e")
