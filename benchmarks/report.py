"""What the benchmarks share: repeated timing, medians, a table, JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("datagen-ray", "pylance", "pyarrow", "ray", "lance-context", "dbos")


@dataclass
class Report:
    """Rows of figures: what was measured, its value, and the ratio to a rival or limit."""

    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, what: str, value: float, unit: str, *, against: str = "", ratio: float | None = None
    ) -> None:
        self.rows.append(
            {"what": what, "value": value, "unit": unit, "against": against, "ratio": ratio}
        )

    def show(self, json_file: Path | None) -> None:
        table = Table(title=self.name, title_justify="left")
        for column in ("what", "value", "unit", "ratio", "against"):
            table.add_column(column, justify="right" if column in ("value", "ratio") else "left")
        for row in self.rows:
            ratio = "" if row["ratio"] is None else f"{row['ratio']:,.2f}x"
            table.add_row(row["what"], f"{row['value']:,.2f}", row["unit"], ratio, row["against"])
        Console(width=110).print(table)
        if json_file is not None:
            self.write(json_file)

    def write(self, json_file: Path) -> None:
        data = {"benchmark": self.name, "machine": machine(), "rows": self.rows}
        json_file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES if _installed(name)},
    }


def _installed(name: str) -> bool:
    try:
        version(name)
    except ModuleNotFoundError:
        return False
    return True


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of neighbours: of figures that were measured in turn."""
    return statistics.median(one / other for one, other in zip(ours, theirs, strict=True))


def parser_of(description: str, *, runs: int = 5) -> argparse.ArgumentParser:
    """``--runs``, ``--json FILE`` and ``--folder DIR`` (where the logs are made)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--runs", type=int, default=runs, help="runs of each figure; the median counts"
    )
    parser.add_argument("--json", type=Path, default=None, help="also write the figures here")
    parser.add_argument("--folder", type=Path, default=None, help="where to make the logs")
    return parser


def options_of(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options given, which must make sense."""
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if options.runs < 1:
        parser.error("--runs must be at least 1")
    return options


def arguments(description: str, *, runs: int = 5) -> argparse.Namespace:
    """The options that every benchmark has."""
    return options_of(parser_of(description, runs=runs))
