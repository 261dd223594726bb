"""Cutting the power at every write: all that a lost machine can find again of a folder.

`PowerCuts` knows, from the fsyncs that are made, which content and which names are durable. Of
what is not, a lost machine may find any part, whatever the order in which it was written, and with
it names of files that were removed since their folder was synced. A *cut* is taken before each
fsync and at each crash point, and stands for these states:

    nothing       of what was not synced
    emptied       its names, without content
    written       all of it
    but one       all of it, but one file without content; for each file
    only one      of it only one file; for each file
    returned      nothing of it, but what was removed is back

A state that was found at an earlier cut is not looked at again.
"""

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from datagen_ray import crashpoints
from datagen_ray.store import commits

Content = str | None
"""Where a whole copy of a file is kept; None for a file without content."""


@dataclass
class State:
    """What a lost machine finds: each file and folder by its path, and what of it is there."""

    cut: str
    variant: str
    folders: frozenset[str]
    files: dict[str, Content]

    def digest(self) -> str:
        text = repr((sorted(self.folders), sorted(self.files.items(), key=str)))
        return hashlib.sha256(text.encode()).hexdigest()

    def build(self, target: Path) -> None:
        for folder in sorted(self.folders):
            (target / folder).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            path = target / name
            if content is None:
                path.touch()
            else:
                # whole files are never written again, so a second name is as good as a copy
                os.link(content, path)


@dataclass
class PowerCuts:
    """Records a folder, and hands each state to ``check``.

    ``at_most``: so many files of one cut are varied one by one, chosen by ``seed``.
    """

    root: Path
    kept: Path
    check: Callable[[State], None]
    seed: int = 0
    at_most: int = 24
    cuts: int = 0
    states: int = 0
    armed: bool = False
    _synced_files: set[int] = field(default_factory=set)
    _synced_names: dict[int, dict[str, int]] = field(default_factory=dict)
    _copies: dict[int, str] = field(default_factory=dict)
    _seen: set[str] = field(default_factory=set)
    _busy: bool = False

    def record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on follow every fsync and crash point of this process."""
        self.kept.mkdir(parents=True, exist_ok=True)
        real = os.fsync

        def fsync(descriptor: int) -> None:
            status = os.fstat(descriptor)
            name = "folder" if stat.S_ISDIR(status.st_mode) else "file"
            self.cut(f"before fsync of a {name}")
            if stat.S_ISDIR(status.st_mode):
                with os.scandir(descriptor) as entries:
                    self._synced_names[status.st_ino] = {e.name: e.inode() for e in entries}
            else:
                self._synced_files.add(status.st_ino)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(commits, "_syncfs", None)  # file by file, so that each can be cut off
        monkeypatch.setattr(crashpoints, "_trigger", _EveryPoint(self))

    def assume_synced(self) -> None:
        """All that is there now is durable."""
        for folder, _, names in os.walk(self.root):
            with os.scandir(folder) as entries:
                self._synced_names[os.stat(folder).st_ino] = {e.name: e.inode() for e in entries}
            self._synced_files.update(os.stat(os.path.join(folder, name)).st_ino for name in names)

    def cut(self, name: str) -> None:
        """Look at all that could be found if the power went now."""
        if not self.armed or self._busy:
            return
        self._busy = True
        try:
            self.cuts += 1
            for state in self._states(name):
                digest = state.digest()
                if digest not in self._seen:
                    self._seen.add(digest)
                    self.states += 1
                    self.check(state)
        finally:
            self._busy = False

    def _states(self, name: str) -> Iterator[State]:
        folders: set[str] = set()
        durable: dict[str, Content] = {}
        unsynced: dict[str, Content] = {}
        removed: dict[str, Content] = {}
        self._walk(self.root, "", True, folders, durable, unsynced, removed)
        durable_folders = frozenset(
            folder for folder in folders if self._name_is_synced(self.root, folder)
        )
        every = frozenset(folders)

        def state(variant: str, files: dict[str, Content]) -> State:
            needed = {os.path.dirname(path) for path in files}
            return State(name, variant, durable_folders | (needed & every) | needed, files)

        yield state("nothing", durable)
        if removed:
            yield state("returned", {**removed, **durable})
        if not unsynced:
            return
        yield state("emptied", {**durable, **dict.fromkeys(unsynced)})
        yield state("written", {**durable, **unsynced})
        chosen = sorted(unsynced)
        if len(chosen) > self.at_most:
            chosen = random.Random(f"{self.seed} {self.cuts}").sample(chosen, self.at_most)
        for path in chosen:
            yield state(f"but {path}", {**durable, **unsynced, path: None})
            yield state(f"only {path}", {**durable, path: unsynced[path]})

    def _walk(
        self,
        folder: Path,
        relative: str,
        is_durable: bool,
        folders: set[str],
        durable: dict[str, Content],
        unsynced: dict[str, Content],
        removed: dict[str, Content],
    ) -> None:
        """``is_durable``: whether the names of the folders above were synced."""
        synced = self._synced_names.get(folder.stat().st_ino, {})
        present = set()
        for entry in os.scandir(folder):
            path = os.path.join(relative, entry.name)
            present.add(entry.name)
            named = is_durable and synced.get(entry.name) == entry.inode()
            if entry.is_dir():
                folders.add(path)
                args = (folders, durable, unsynced, removed)
                self._walk(Path(entry.path), path, named, *args)
                continue
            copy = self._copy(entry)
            if named and entry.inode() in self._synced_files:
                durable[path] = copy
            else:
                unsynced[path] = copy
                if named:
                    durable[path] = None
        for name, inode in synced.items() if is_durable else ():
            if name not in present and inode in self._copies and inode in self._synced_files:
                removed[os.path.join(relative, name)] = self._copies[inode]

    def _copy(self, entry: os.DirEntry[str]) -> str:
        """A second name of the file, which also keeps its inode from being used again."""
        copy = self._copies.get(entry.inode())
        if copy is None:
            copy = str(self.kept / str(entry.inode()))
            os.link(entry.path, copy)
            self._copies[entry.inode()] = copy
        return copy

    def _name_is_synced(self, root: Path, relative: str) -> bool:
        folder = root
        for part in Path(relative).parts:
            names = self._synced_names.get(folder.stat().st_ino, {})
            folder = folder / part
            if names.get(part) != folder.stat().st_ino:
                return False
        return True


class _EveryPoint:
    """Takes the place of the armed crash point: every point is a cut, none kills."""

    def __init__(self, cuts: PowerCuts) -> None:
        self._cuts = cuts
        self.name = self

    def __eq__(self, other: Any) -> bool:
        self._cuts.cut(f"at {other}")
        return False

    __hash__ = None
