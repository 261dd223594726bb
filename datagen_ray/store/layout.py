"""Every path of an experiment, built and parsed; nobody else puts a path together.

    <root>/datagen_checkpoints/<pipeline>/<experiment>/      the experiment's folder
        log.lance/                                           the log
            _mem_wal/<shard uuid>/
                manifest/<bit-reversed version>.binpb
                manifest/version_hint.json
                wal/<bit-reversed position>.arrow
                <8 hex>_gen_<generation>/
        runs/<term>.json                                     run terms
        maintenance/lease-<term>.json                        maintenance leases

Keys are relative to the log for what lies in it, to the experiment's folder for the rest, and
always use ``/``. Whatever does not parse (leftovers of uploads, files of others) is not an
entry: the parsers return None for it.
"""

from __future__ import annotations

import re
import uuid

from datagen_ray.errors import ConfigError

CHECKPOINTS_FOLDER = "datagen_checkpoints"
LOG_FOLDER = "log.lance"
MEM_WAL_FOLDER = "_mem_wal"
RUNS_FOLDER = "runs"
MAINTENANCE_FOLDER = "maintenance"
VERSIONS_FOLDER = "_versions"
BASE_HINT_NAME = "latest_version_hint.json"
DEFAULT_SLOT = "default"

_BITS = 64
_MANIFEST_NAME = re.compile(r"([01]{64})\.binpb")
_WAL_NAME = re.compile(r"([01]{64})\.arrow")
_SSTABLE_NAME = re.compile(r"[0-9a-f]{8}_gen_([1-9][0-9]*)")
_VERSION_NAME = re.compile(r"([0-9]{1,20})\.manifest")
_RUN_NAME = re.compile(r"([1-9][0-9]*)\.json")
_LEASE_NAME = re.compile(r"lease-([1-9][0-9]*)\.json")
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ONLY_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/+")
"""What is left of ``s3://$BUCKET`` when the variable is empty."""
_UNNAMEABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_MAX_NAME_LENGTH = 200


def experiment_uri(root: str, pipeline: str, experiment: str) -> str:
    """The folder of one experiment under a durable root (a path or a URL)."""
    if not root or not is_plain_text(root) or root != root.strip():
        raise ConfigError(f"the durable root {root!r} is not a path; pass a folder or an URL")
    for what, name in (("pipeline", pipeline), ("experiment", experiment)):
        if not _SAFE_NAME.fullmatch(name) or len(name) > _MAX_NAME_LENGTH:
            raise ConfigError(
                f"the {what} name {name!r} cannot be a folder; use letters, digits, '.', '_' and "
                f"'-', start with a letter or digit, at most {_MAX_NAME_LENGTH} characters"
            )
    if _ONLY_SCHEME.fullmatch(root):
        raise ConfigError(
            f"the durable root {root!r} names no bucket; write it as s3://bucket/path"
        )
    base = _trimmed(root)
    slash = "" if base.endswith("/") else "/"
    return f"{base}{slash}{CHECKPOINTS_FOLDER}/{pipeline}/{experiment}"


def log_uri(root: str, pipeline: str, experiment: str) -> str:
    """The log of one experiment: ``<root>/datagen_checkpoints/<pipeline>/<experiment>/log.lance``.

    Raises ConfigError for names that are not safe as folder names.
    """
    return f"{experiment_uri(root, pipeline, experiment)}/{LOG_FOLDER}"


def experiment_of(log: str) -> str:
    """The folder that a log lies in, which also holds its runs and leases."""
    trimmed = _trimmed(log)
    head, slash, tail = trimmed.rpartition("/")
    if not tail or head.endswith(":/"):
        raise ConfigError(f"{log!r} names no log; pass <folder>/{LOG_FOLDER}")
    return (head or slash) if slash else "."


def shard_uuid(name: str) -> str:
    """The shard of a slot name; the same name is the same shard after any restart."""
    if name == "":
        raise ConfigError(f"a shard name cannot be empty; the default is {DEFAULT_SLOT!r}")
    if not is_plain_text(name):
        raise ConfigError(
            f"the shard name {name!r} cannot be stored; name it in text, without control characters"
        )
    return str(uuid.uuid5(uuid.NAMESPACE_OID, name))


def is_plain_text(name: object) -> bool:
    """Whether it is text without lone surrogates and control characters, which names must be."""
    return isinstance(name, str) and not _UNNAMEABLE.search(name)


def bit_reversed(number: int) -> str:
    """The 64-bit binary text of a number, last bit first (spreads object-store prefixes)."""
    return format(number, f"0{_BITS}b")[::-1]


def shard_folder(shard: str) -> str:
    return f"{MEM_WAL_FOLDER}/{shard}"


def manifest_folder(shard: str) -> str:
    return f"{MEM_WAL_FOLDER}/{shard}/manifest"


def manifest_key(shard: str, version: int) -> str:
    return f"{MEM_WAL_FOLDER}/{shard}/manifest/{bit_reversed(version)}.binpb"


def version_hint_key(shard: str) -> str:
    return f"{MEM_WAL_FOLDER}/{shard}/manifest/version_hint.json"


def wal_folder(shard: str) -> str:
    return f"{MEM_WAL_FOLDER}/{shard}/wal"


def wal_key(shard: str, position: int) -> str:
    return f"{MEM_WAL_FOLDER}/{shard}/wal/{bit_reversed(position)}.arrow"


def sstable_key(shard: str, path: str) -> str:
    """The folder of one SSTable, by the path that the shard manifest gives it."""
    return f"{MEM_WAL_FOLDER}/{shard}/{path}"


def run_key(term: int) -> str:
    """Relative to the experiment's folder."""
    return f"{RUNS_FOLDER}/{term}.json"


def lease_key(term: int) -> str:
    """Relative to the experiment's folder."""
    return f"{MAINTENANCE_FOLDER}/lease-{term}.json"


def parse_shard_name(name: str) -> str | None:
    """A folder name under ``_mem_wal`` as a shard id, if it is a canonical UUID."""
    try:
        shard = str(uuid.UUID(name))
    except ValueError:
        return None
    return shard if shard == name else None


def parse_manifest_name(name: str) -> int | None:
    """A file name under ``manifest/`` as a version."""
    return _parse_bits(_MANIFEST_NAME, name)


def parse_wal_name(name: str) -> int | None:
    """A file name under ``wal/`` as a position."""
    return _parse_bits(_WAL_NAME, name)


def parse_sstable_name(name: str) -> int | None:
    """A folder name under a shard as a generation."""
    return _parse_number(_SSTABLE_NAME, name)


def parse_version_name(name: str) -> int | None:
    """A file name under ``_versions/`` as a version of the base table.

    Lance counts 20-digit names down, so that the newest comes first; older logs count up.
    """
    number = _parse_number(_VERSION_NAME, name)
    if number is None:
        return None
    return (1 << _BITS) - 1 - number if len(name.partition(".")[0]) == 20 else number


def parse_run_name(name: str) -> int | None:
    """A file name under ``runs/`` as a run term."""
    return _parse_number(_RUN_NAME, name)


def parse_lease_name(name: str) -> int | None:
    """A file name under ``maintenance/`` as a lease term."""
    return _parse_number(_LEASE_NAME, name)


def _trimmed(uri: str) -> str:
    return uri.rstrip("/") if uri.rstrip("/") else "/"


def _parse_bits(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match.group(1)[::-1], 2) if match else None


def _parse_number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match.group(1)) if match else None
