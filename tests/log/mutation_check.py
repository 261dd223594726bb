"""Run as a program: break each rule of the log, one at a time, and see a test fail.

A rule is a statement that raises, marks an item as damaged or lists a violation. Each is taken out
in a copy of the package, and the tests run against the copy until one fails. Prints one line for
each rule, survivors last; exit status 1 when there are any.

    python -m tests.log.mutation_check [FILE.py ...]
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICK = ["tests/log", "--ignore=tests/log/test_writes_never_break_reads.py"]
QUICK += ["--ignore=tests/log/test_using_the_store.py"]
WHOLE = [*QUICK, "tests/conformance/test_decisions.py", "tests/store/test_verify.py"]
FIRST = {
    "log/ids.py": ["tests/log/test_ids.py"],
    "log/values.py": ["tests/log/test_values.py"],
    "log/events.py": ["tests/log/test_events.py"],
    "log/validate.py": ["tests/log/test_validate.py"],
    "log/stream.py": ["tests/log/test_stream.py"],
    "log/fold.py": ["tests/log/test_fold.py"],
    "log/violations.py": ["tests/store/test_verify.py"],
    "store/bulk.py": ["tests/log/test_statuses.py"],
    "store/verify.py": ["tests/store/test_verify.py"],
}


@dataclass(frozen=True)
class Rule:
    """A statement of a file, and what it is about."""

    file: str
    first: int
    last: int
    column: int
    about: str


def rules(file: str) -> Iterator[Rule]:
    source = (ROOT / "datagen_ray" / file).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise):
            text = ast.unparse(node)
        elif isinstance(node, (ast.Assign, ast.AugAssign)) and "damaged" in ast.unparse(
            node.targets[0] if isinstance(node, ast.Assign) else node.target
        ):
            text = ast.unparse(node)
            if "zeros" in text:
                continue
        elif isinstance(node, ast.Expr) and ast.unparse(node).startswith(
            ("found.append", "found.add", "findings.add", "damaged.")
        ):
            text = ast.unparse(node)
        else:
            continue
        code = text.rpartition("code=")[2].rstrip(")") if "code=" in text else text
        yield Rule(file, node.lineno, node.end_lineno or node.lineno, node.col_offset, code[:90])


def passes(copy: Path, tests: list[str]) -> bool:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1, 2), done.stdout + done.stderr
    return done.returncode == 0


def main(files: list[str]) -> int:
    survivors, killed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("datagen_ray", "tests", "docs"):
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "cases")
            )
        shutil.copy(ROOT / "pyproject.toml", copy)
        for rule in [rule for file in files for rule in rules(file)]:
            path = copy / "datagen_ray" / rule.file
            source = path.read_text(encoding="utf-8")
            lines = source.splitlines(keepends=True)
            lines[rule.first - 1 : rule.last] = [" " * rule.column + "pass\n"]
            path.write_text("".join(lines), encoding="utf-8")
            try:
                survived = passes(copy, FIRST[rule.file]) and passes(copy, WHOLE)
            finally:
                path.write_text(source, encoding="utf-8")
            line = f"{rule.file}:{rule.first}  {rule.about}"
            sys.stdout.write(f"{'SURVIVED' if survived else 'killed  '}  {line}\n")
            sys.stdout.flush()
            if survived:
                survivors.append(line)
            else:
                killed += 1
    sys.stdout.write(f"{killed} killed, {len(survivors)} survived\n")
    sys.stdout.writelines(f"SURVIVED  {line}\n" for line in survivors)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FIRST)))
