"""Every snippet of the guide runs, in order, as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "using-the-store.md"
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_snippet_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "guide"}
    snippets = list(SNIPPET.finditer(text))
    assert len(snippets) == text.count("```python")
    assert len(snippets) > 20
    for snippet in snippets:
        line = text.count("\n", 0, snippet.start(1))
        # Padded, so that a traceback names the line of the guide.
        exec(compile("\n" * line + snippet[1], str(GUIDE), "exec"), names)
    names["store"].close()
    assert "TimeoutError at draft[0]" in capsys.readouterr().out
