"""Every snippet of the guide runs, in order, as it stands."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "pipelines.md"
SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_snippet_of_the_guide_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text(encoding="utf-8")
    snippets = list(SNIPPET.finditer(text))
    assert len(snippets) == text.count("```python") > 10
    guide = types.ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", guide)
    for snippet in snippets:
        line = text.count("\n", 0, snippet.start(1))
        # Blank lines in front, so that a failure names the line of the page.
        code = compile("\n" * line + snippet[1], str(GUIDE), "exec", dont_inherit=True)
        exec(code, vars(guide))
