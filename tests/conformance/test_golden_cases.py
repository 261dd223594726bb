"""Every golden case against the real store.

A call gives exactly what the reference gave, unless ``deviations.json`` names it with the decision
that makes us differ. The file is exact in both directions: a call that is listed must differ, and
one that is not must not. ``python -m tests.conformance.test_golden_cases`` writes it anew, for
review, after a decision changed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.golden import CASES, DECISIONS, Case, Outcome, load, same, untag

DEVIATIONS = Path(__file__).parent / "deviations.json"
# Answers that differ because of what an earlier append did, which itself gave what was recorded.
_BY_HAND = {
    ("lifecycle_defaults", 1): "an absent status is filled in: Q04",
    ("lifecycle_defaults", 3): "an absent status is filled in: Q04",
    ("storage_columns", 1): "an absent status is filled in: Q04",
    ("storage_columns", 2): "an absent status is filled in: Q04",
    ("storage_duplicates_on_disk", 2): "an identical retry writes nothing: Q21",
}
_BULK = {"item_tree", "root_item_statuses", "overview"}


def matches(call: dict[str, Any], outcome: Outcome) -> bool:
    if "error" in call:
        return outcome.error is not None
    return outcome.error is None and same(untag(call["expect"]), outcome.result, call["method"])


def run(path: Path, folder: Path) -> Iterator[tuple[int, dict[str, Any], Outcome]]:
    data = load(path)
    case = Case(str(folder / "log.lance"), data)
    try:
        for index, call in enumerate(data["calls"]):
            outcome = case.call(call)
            yield index, call, outcome
            refused = call["method"].startswith("append") and outcome.code in DECISIONS
            if refused and "error" not in call and DECISIONS[outcome.code or ""] != "Q21":
                case.put_unchecked(call["args"]["events"])
    finally:
        case.store.close()


def deviations() -> dict[str, dict[str, str]]:
    return json.loads(DEVIATIONS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_golden_case(path: Path, tmp_path: Path) -> None:
    listed = deviations().get(path.stem, {})
    for index, call, outcome in run(path, tmp_path):
        shown = f"call {index} {call['method']} {call['args']}: {outcome.error or outcome.result}"
        if str(index) in listed:
            assert not matches(call, outcome), f"no longer a deviation: {shown}"
        else:
            assert matches(call, outcome), shown


def test_every_case_of_the_suite_is_here() -> None:
    assert len(CASES) == 175


def test_every_deviation_is_explained_by_a_decision() -> None:
    known = set(DECISIONS.values()) | {
        "Q01",
        "Q07",
        "Q12",
        "Q22",
        "Q23",
        "Q28",
        "Q31",
        "Q35",
        "Q38",
    }
    for case, calls in deviations().items():
        for index, reason in calls.items():
            assert reason.split(" ")[-1] in known, (case, index, reason)


def _explain(call: dict[str, Any], outcome: Outcome, earlier: str | None) -> str:
    if "quirk" in call:
        return str(call["quirk"])
    if outcome.code in DECISIONS:
        return DECISIONS[outcome.code]
    if "error" in call and call["method"] in _BULK:
        return "Q23"
    return f"follows from {earlier}" if earlier else "UNEXPLAINED"


def _write_deviations() -> int:
    found: dict[str, dict[str, str]] = {}
    for path in CASES:
        earlier: str | None = None
        with tempfile.TemporaryDirectory() as folder:
            for index, call, outcome in run(path, Path(folder)):
                same_code = outcome.code in DECISIONS and "error" not in call
                if not matches(call, outcome):
                    reason = _BY_HAND.get((path.stem, index)) or _explain(call, outcome, earlier)
                    found.setdefault(path.stem, {})[str(index)] = reason
                if same_code or ("quirk" in call and not matches(call, outcome)):
                    earlier = earlier or str(call.get("quirk") or DECISIONS.get(outcome.code or ""))
    DEVIATIONS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return sum("UNEXPLAINED" in calls.values() for calls in found.values())


if __name__ == "__main__":
    sys.exit(_write_deviations())
