"""Single objects of an experiment, on a local disk or an object store, read and written whole.

`LogStorage` hides which of the two it is, except for durability: a local file is durable only
once it and the folders that name it are fsynced, and Lance never does that, so the helpers for
it are here. On an object store they do nothing, since an object that was put is durable.

Local calls go straight to the operating system: the writer's check after each entry is one
``stat``, and must not cost more.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import MemoryStore, ObjectStore, from_url

from datagen_ray.errors import ConfigError, StorageError
from datagen_ray.store import layout

PARALLEL_REQUESTS = 16
"""Requests in flight for one bulk read from an object store."""

# Options that obstore takes for its HTTP client rather than for the store; Lance takes both
# kinds in one mapping.
_CLIENT_OPTIONS = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "http1_only",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "timeout",
        "user_agent",
    }
)
_FLAG_OPTIONS = frozenset({"allow_http", "allow_invalid_certificates", "http1_only", "http2_only"})
_S3_SCHEMES = ("s3", "s3a")

_temporary_numbers = itertools.count()


@dataclass(frozen=True)
class StoredObject:
    """One object of a folder: its name there, size in bytes and time of last change (epoch)."""

    name: str
    size: int
    modified_s: float


class LogStorage:
    """The objects under one URI: a local path, ``file://``, ``s3://`` and what obstore knows.

    ``storage_options`` carry the names that Lance takes. ``fsync=False`` makes local writes
    atomic but not safe from power loss. Everything raises StorageError when the storage fails
    and ConfigError when the URI or an option cannot be used.
    """

    def __init__(
        self,
        uri: str,
        storage_options: Mapping[str, str] | None = None,
        *,
        fsync: bool = True,
    ) -> None:
        if not layout.is_plain_text(uri):
            raise ConfigError(
                f"{uri!r} names no log; pass a path or URL as text, without control characters"
            )
        self.uri = uri.rstrip("/") or "/"
        self.storage_options = dict(storage_options or {})
        self.local_root = local_path(uri)
        self.fsync = fsync and self.local_root is not None
        self._store: ObjectStore | MemoryStore | None = None
        if self.local_root is None:
            self._store = _open_store(self.uri, self.storage_options)

    @property
    def is_local(self) -> bool:
        return self.local_root is not None

    def path(self, key: str = "") -> str:
        """The local path of a key. Only for local storage."""
        if self.local_root is None:
            raise ConfigError(f"{self.uri} is not on a local disk, so it has no path")
        return os.path.join(self.local_root, key) if key else self.local_root

    # -- reading ---------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        """The whole object, or None when there is none."""
        if self.local_root is not None:
            try:
                with open(os.path.join(self.local_root, key), "rb") as file:
                    return file.read()
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise _failed("read", self.path(key), error) from error
        try:
            return bytes(obstore.get(self._store, key).bytes())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as error:
            raise _failed("read", f"{self.uri}/{key}", error) from error

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Several objects at once, in the order asked for; parallel on object stores."""
        if self.local_root is not None or len(keys) < 2:
            return [self.get(key) for key in keys]
        with ThreadPoolExecutor(min(PARALLEL_REQUESTS, len(keys))) as pool:
            return list(pool.map(self.get, keys))

    def exists(self, key: str) -> bool:
        """Whether the object (or, locally, the folder) is there."""
        if self.local_root is not None:
            try:
                os.stat(os.path.join(self.local_root, key))
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as error:
                raise _failed("look up", self.path(key), error) from error
            return True
        try:
            obstore.head(self._store, key)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise _failed("look up", f"{self.uri}/{key}", error) from error
        return True

    def list_files(self, folder: str = "") -> list[StoredObject]:
        """The objects directly in a folder, unordered; none when there is no such folder."""
        if self.local_root is not None:
            return [
                StoredObject(entry.name, stat.st_size, stat.st_mtime)
                for entry, stat in self._scan(folder)
                if entry.is_file()
            ]
        return [
            StoredObject(
                str(found["path"]).rpartition("/")[2],
                int(found["size"]),
                found["last_modified"].timestamp(),
            )
            for found in self._list_objects(folder)["objects"]
        ]

    def list_folders(self, folder: str = "") -> list[str]:
        """The names of the folders directly in a folder, unordered."""
        if self.local_root is not None:
            return [entry.name for entry, _ in self._scan(folder) if entry.is_dir()]
        prefixes = self._list_objects(folder)["common_prefixes"]
        return [str(prefix).rstrip("/").rpartition("/")[2] for prefix in prefixes]

    # -- writing ---------------------------------------------------------------------------

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write an object unless one is there; False when one was. Atomic among any writers.

        With ``fsync`` the object is durable on return, with every folder made on the way.
        """
        if self.local_root is not None:
            return self._put_local(key, data)
        try:
            obstore.put(self._store, key, data, mode="create")
        except AlreadyExistsError:
            return False
        except (BaseError, OSError) as error:
            raise _failed("write", f"{self.uri}/{key}", error) from error
        return True

    def replace(self, key: str, data: bytes) -> None:
        """Write an object over whatever is there; readers see the old one or the new one, whole.

        Not made durable: for what a restart may forget, such as the counter of a lease.
        """
        if self.local_root is not None:
            path = self.path(key)
            temporary = f"{path}#{os.getpid()}-{next(_temporary_numbers)}"
            try:
                _make_folders(os.path.dirname(path))
                with open(temporary, "xb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except OSError as error:
                raise _failed("write", path, error) from error
            return
        try:
            obstore.put(self._store, key, data)
        except (BaseError, OSError) as error:
            raise _failed("write", f"{self.uri}/{key}", error) from error

    def delete(self, key: str) -> bool:
        """Remove an object; False when it was gone already."""
        if self.local_root is not None:
            try:
                os.unlink(os.path.join(self.local_root, key))
            except (FileNotFoundError, NotADirectoryError):
                return False
            except OSError as error:
                raise _failed("delete", self.path(key), error) from error
            return True
        try:
            obstore.delete(self._store, key)
        except FileNotFoundError:
            return False
        except (BaseError, OSError) as error:
            raise _failed("delete", f"{self.uri}/{key}", error) from error
        return True

    def delete_folder(self, key: str) -> None:
        """Remove a folder with all that is in it. What is gone already is no error."""
        for file in self.list_files(key):
            self.delete(f"{key}/{file.name}")
        for name in self.list_folders(key):
            self.delete_folder(f"{key}/{name}")
        if self.local_root is not None:
            try:
                os.rmdir(self.path(key))
            except FileNotFoundError:
                return
            except OSError as error:
                raise _failed("delete", self.path(key), error) from error

    # -- durability of local files that others wrote -------------------------------------------

    def sync_file(self, key: str) -> None:
        """fsync one file, if the storage is local and durable. The folder is not synced."""
        if self.fsync:
            with _sync_errors(self.path(key)):
                fsync_path(self.path(key))

    def sync_folder(self, key: str = "") -> None:
        """fsync one folder, which makes the names in it durable."""
        self.sync_file(key)

    def sync_tree(self, key: str = "", *, skip: Sequence[str] = ()) -> None:
        """fsync every file and folder below a folder, innermost first.

        ``skip`` names folders that are left out. Files that vanish meanwhile are no error:
        only leftovers of uploads do.
        """
        if not self.fsync:
            return
        with _sync_errors(self.path(key)):
            for folder, _, files in _walk_bottom_up(self.path(key), frozenset(skip)):
                for name in files:
                    _fsync_if_there(os.path.join(folder, name))
                _fsync_if_there(folder)

    def sync_ancestors(self, key: str = "") -> None:
        """fsync a folder and all folders above it, up to the first that we may not open."""
        if not self.fsync:
            return
        path = os.path.realpath(self.path(key))
        with _sync_errors(path):
            while True:
                try:
                    fsync_path(path)
                except PermissionError:
                    return  # a folder that we cannot open is not one that we made
                parent = os.path.dirname(path)
                if parent == path:
                    return
                path = parent

    # -- internals ---------------------------------------------------------------------------

    def _put_local(self, key: str, data: bytes) -> bool:
        path = self.path(key)
        folder = os.path.dirname(path)
        # '#' marks it as an upload that did not end, which no parser takes for an entry
        temporary = f"{path}#{os.getpid()}-{next(_temporary_numbers)}"
        try:
            created = _make_folders(folder)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                if self.fsync:
                    os.fsync(file.fileno())
            try:
                # a link fails when the name is taken, where a rename would replace the file
                os.link(temporary, path)
                created_object = True
            except FileExistsError:
                created_object = False
            finally:
                os.unlink(temporary)
            if self.fsync:
                for changed in (folder, *created):
                    fsync_path(changed)
        except OSError as error:
            raise _failed("write", path, error) from error
        return created_object

    def _scan(self, folder: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        path = self.path(folder)
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    try:
                        yield entry, entry.stat()
                    except FileNotFoundError:
                        continue
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _failed("list", path, error) from error

    def _list_objects(self, folder: str) -> Mapping[str, Sequence[Any]]:
        try:
            listing: Mapping[str, Sequence[Any]] = obstore.list_with_delimiter(
                self._store, f"{folder}/" if folder else None
            )
        except FileNotFoundError:
            return {"objects": (), "common_prefixes": ()}
        except (BaseError, OSError) as error:
            raise _failed("list", f"{self.uri}/{folder}", error) from error
        return listing


def local_path(uri: str) -> str | None:
    """The path of a local URI (plain path or ``file://``), or None for an object store."""
    if not uri:
        raise ConfigError("an empty path names no log; pass a folder or a URL")
    parts = urlsplit(uri)
    if "://" not in uri:
        return os.path.abspath(uri)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{uri!r} names another host; use file:///absolute/path")
        return os.path.abspath(unquote(parts.path))
    return None


def fsync_path(path: str) -> None:
    """fsync a file or folder that somebody else wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_if_there(path: str) -> None:
    try:
        fsync_path(path)
    except FileNotFoundError:
        return


def _walk_bottom_up(root: str, skip: frozenset[str]) -> Iterator[tuple[str, list[str], list[str]]]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skip]
        found.append((folder, folders, files))
    return reversed(found)


def _make_folders(folder: str) -> list[str]:
    """Make a folder and those above it; return each folder that gained a name by it."""
    missing = []
    while not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        os.makedirs(path, exist_ok=True)
    return [os.path.dirname(path) for path in missing]


def _open_store(uri: str, options: Mapping[str, str]) -> ObjectStore | MemoryStore:
    scheme = urlsplit(uri).scheme
    config: dict[str, str] = {}
    client: dict[str, object] = {}
    for name, value in options.items():
        lowered = name.lower()
        bare = lowered.removeprefix("aws_")
        if bare in _CLIENT_OPTIONS:
            flag = str(value).lower() in ("1", "true", "yes", "on")
            client[bare] = flag if bare in _FLAG_OPTIONS else value
        elif scheme in _S3_SCHEMES and not lowered.startswith("aws_"):
            config[f"aws_{lowered}"] = value
        else:
            config[lowered] = value
    try:
        return from_url(uri, config=config or None, client_options=client or None)
    except (BaseError, ValueError, TypeError) as error:
        raise ConfigError(
            f"cannot open the storage {uri}: {_first_line(error)}; check the URL and the storage "
            f"options ({', '.join(sorted(options)) or 'none given'})"
        ) from error


@contextmanager
def _sync_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _failed("fsync", path, error) from error


def _failed(action: str, where: str, error: Exception) -> StorageError:
    if isinstance(error, OSError) and error.errno is not None:
        reason = errno.errorcode.get(error.errno, str(error.errno)) + f" ({error.strerror})"
    else:
        reason = _first_line(error)
    return StorageError(
        f"cannot {action} {where}: {reason}; check the storage and its permissions, then try again"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
