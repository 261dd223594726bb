"""The cluster file is one that ``ray up`` takes, and keeps what it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER = Path(__file__).resolve().parents[2] / "cluster.yaml"


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CLUSTER.read_text())
    return loaded


def test_ray_up_accepts_it(config: dict[str, Any]) -> None:
    prepared = prepare_config(config)
    validate_config(prepared)
    assert prepared["head_node_type"] == "head"


def test_the_schema_is_really_checked(config: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="many"):
        validate_config({**prepare_config(config), "max_workers": "many"})


def test_workers_are_spot_and_the_head_is_not(config: dict[str, Any]) -> None:
    types = config["available_node_types"]
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    market = types["spot_worker"]["node_config"]["InstanceMarketOptions"]
    assert market["MarketType"] == "spot"


def test_every_node_wants_a_token_and_has_the_package(config: dict[str, Any]) -> None:
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert "RAY_AUTH_MODE=token" in config[commands][-1]
        assert "DATAGEN_RAY_ROOT=s3://" in config[commands][-1]
    assert any("pip install" in each for each in config["setup_commands"])
    assert "~/.ray/auth_token" in config["file_mounts"]


def test_the_dashboard_is_not_public(config: dict[str, Any]) -> None:
    assert "--dashboard-host=127.0.0.1" in config["head_start_ray_commands"][-1]
