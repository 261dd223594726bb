"""The pure functions of the installed standard library, found by looking at it.

Modules are listed, functions are not: what a module offers differs between Python versions. A
function is taken when its module is on the list, it is public, it is the module's own, and
nothing about it is impure: neither its name, nor the names that its code refers to (the clock,
the environment, files, standard streams, settings of the whole process).

``discover()`` gives the functions in the order of their keys, ``module.qualname``, each object
once. What remains impure in spite of this is caught by the sandbox, which runs each call twice.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

MODULES = (
    "ast",
    "base64",
    "binascii",
    "bisect",
    "builtins",
    "calendar",
    "cmath",
    "codecs",
    "collections",
    "colorsys",
    "copy",
    "datetime",
    "decimal",
    "difflib",
    "email.base64mime",
    "email.quoprimime",
    "email.utils",
    "fnmatch",
    "fractions",
    "heapq",
    "hmac",
    "html",
    "inspect",
    "ipaddress",
    "itertools",
    "json",
    "keyword",
    "math",
    "ntpath",
    "operator",
    "posixpath",
    "pprint",
    "quopri",
    "re",
    "reprlib",
    "shlex",
    "statistics",
    "string",
    "stringprep",
    "struct",
    "textwrap",
    "unicodedata",
    "urllib.parse",
    "xml.sax.saxutils",
    "zlib",
)

# What the sandbox imports before it forks: the modules above, and those that their functions
# import only when called, so that a call opens no file.
PRELOAD = (
    *MODULES,
    "_strptime",
    "encodings.aliases",
    "encodings.ascii",
    "encodings.base64_codec",
    "encodings.cp1252",
    "encodings.hex_codec",
    "encodings.idna",
    "encodings.latin_1",
    "encodings.punycode",
    "encodings.quopri_codec",
    "encodings.rot_13",
    "encodings.unicode_escape",
    "encodings.utf_16",
    "encodings.utf_16_le",
    "encodings.utf_32",
    "encodings.utf_8",
    "encodings.utf_8_sig",
    "encodings.zlib_codec",
    "locale",
    "numbers",
    "random",
)

# Modules of which only these are asked for: the rest of them is about other things.
ONLY = {
    "ast": {"literal_eval"},
    "builtins": {
        "abs", "all", "any", "ascii", "bin", "bool", "bytes", "chr", "complex", "dict", "divmod",
        "enumerate", "float", "format", "hex", "int", "len", "list", "max", "min", "oct", "ord",
        "pow", "range", "repr", "reversed", "round", "sorted", "str", "sum", "tuple", "zip",
    },
    "codecs": {"decode", "encode", "escape_decode", "escape_encode"},
    "collections": {"Counter", "OrderedDict"},
    "copy": {"deepcopy"},
    "datetime": {"date", "datetime", "time", "timedelta"},
    "decimal": {"Decimal"},
    "email.utils": {
        "collapse_rfc2231_value", "decode_rfc2231", "encode_rfc2231", "formataddr", "parseaddr",
        "parsedate", "parsedate_tz", "quote", "unquote", "mktime_tz",
    },
    "fractions": {"Fraction"},
    "hmac": {"compare_digest", "digest"},
    "inspect": {"cleandoc", "indentsize"},
    "json": {"dumps", "loads"},
    "pprint": {"pformat", "saferepr", "isreadable", "isrecursive"},
    "re": {"escape", "findall", "split", "sub", "subn"},
    "reprlib": {"repr"},
    "string": {"capwords"},
    "stringprep": {"map_table_b2", "map_table_b3"},
    "struct": {"calcsize", "iter_unpack", "pack", "unpack", "unpack_from"},
    "xml.sax.saxutils": {"escape", "quoteattr", "unescape"},
    "zlib": {"adler32", "crc32"},
}  # fmt: skip

# Classes whose methods are functions too, called with the receiver as the first argument. A
# frozenset is left out: there is no literal for one.
METHODS_OF = {
    "builtins": ("bytes", "complex", "dict", "float", "int", "list", "set", "str",
                 "tuple"),
    "datetime": ("date", "datetime", "time"),
    "fractions": ("Fraction",),
}  # fmt: skip
# Of classes without literals only what makes an instance from literals can be called.
_MAKERS = (classmethod, staticmethod, types.ClassMethodDescriptorType)

# Names of functions that change what they are given, or read or change the world around them.
_IMPURE_NAME = re.compile(
    r"""^(?:
        # change their argument
        append | clear | extend | insert | insort\w* | pop | popitem | remove | discard
        | reverse | setdefault | sort | update | \w+_update | heapify | heappush | copy
        | iadd | iand | iconcat | ifloordiv | ilshift | imatmul | imod | imul | ior | ipow
        | irshift | isub | itruediv | ixor
        # the clock, the time zone, random numbers
        | now | utcnow | today | fromtimestamp | utcfromtimestamp | localtime | mktime\w*
        | make_msgid | formatdate
        # the state of the process, and what is run as a program
        | set(?!s).* | reset\w* | main | test\w* | purge | template | compile
        # files and standard streams
        | pr(?:int\w*|cal|month|week|year|weekday) | exists | lexists | getsize | get[acm]time
        | is(?:file|dir|link|mount|junction|devdrive|reserved) | realpath | abspath | relpath
        | expanduser | expandvars | same\w+ | input | output
    )$""",
    re.VERBOSE,
)
# Names that the code of a pure function has no reason to mention.
_IMPURE_REFERENCES = {
    "getcwd", "getcwdb", "environ", "environb", "getenv", "stat", "lstat", "listdir", "scandir",
    "readlink", "getpid", "open", "print", "urandom", "stdout", "stderr", "stdin", "perf_counter",
    "monotonic", "localtime", "setlocale", "getlocale", "setcontext", "getrandbits", "exec",
    "warn_explicit", "expanduser", "socket",
}  # fmt: skip
# Not impure, but of no use: their answer says nothing, needs a function as its argument, or
# never ends.
_USELESS = {
    "builtins.set.add", "difflib.diff_bytes", "hmac.compare_digest", "itertools.count",
    "itertools.cycle", "itertools.dropwhile", "itertools.filterfalse", "itertools.groupby",
    "itertools.starmap", "itertools.takewhile", "itertools.tee", "operator.attrgetter",
    "operator.call", "operator.delitem", "operator.itemgetter", "operator.methodcaller",
    "operator.setitem", "statistics.kde", "statistics.kde_random", "urllib.parse.clear_cache",
}  # fmt: skip


@dataclass(frozen=True)
class StdlibFunction:
    """A function of the library: where it is, and whether its first argument is a receiver."""

    module: str
    qualname: str
    is_method: bool = False

    @property
    def key(self) -> str:
        return f"{self.module}.{self.qualname}"


@dataclass(frozen=True)
class Parameter:
    """One parameter. ``kind`` is ``positional``, ``keyword``, ``*args`` or ``**kwargs``."""

    name: str
    kind: str
    required: bool
    default: str = ""
    annotation: str = ""


@dataclass(frozen=True)
class Description:
    """What is known of a function without calling it."""

    signature: str
    parameters: tuple[Parameter, ...]
    summary: str
    known_arity: bool  # False: the parameters are a guess that only trying can confirm


def discover(modules: Iterable[str] = MODULES) -> list[StdlibFunction]:
    """All pure functions of ``modules``, ordered by key, each object under one key only."""
    seen: set[int] = set()
    found = []
    for module in sorted(modules):
        for function, target in _of_module(module):
            if id(target) not in seen:
                seen.add(id(target))
                found.append(function)
    return sorted(found, key=lambda function: function.key)


def resolve(function: StdlibFunction) -> Any:
    """The object itself."""
    target: Any = importlib.import_module(function.module)
    for part in function.qualname.split("."):
        target = getattr(target, part)
    return target


def describe(function: StdlibFunction) -> Description:
    """Signature, parameters and summary; for C functions from whatever they say of themselves."""
    target = resolve(function)
    doc = inspect.getdoc(target) or ""
    parameters, known = _parameters(target, doc)
    if not function.is_method and inspect.isclass(target) and parameters[:1]:
        parameters = tuple(p for p in parameters if p.name not in {"self", "cls", "fold", "tzinfo"})
    shown = ", ".join(map(_shown, parameters))
    return Description(
        signature=f"{function.qualname}({shown})",
        parameters=parameters,
        summary=_summary(doc, function.qualname.rpartition(".")[2]),
        known_arity=known,
    )


def _of_module(name: str) -> Iterator[tuple[StdlibFunction, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a deprecated module still has pure functions
        try:
            module = importlib.import_module(name)
        except ImportError:
            return
        for attribute in sorted(vars(module)):
            target = getattr(module, attribute)
            if _takes(name, attribute, target):
                yield StdlibFunction(name, attribute), target
        for owner in METHODS_OF.get(name, ()):
            yield from _methods(name, getattr(module, owner))


def _takes(module: str, name: str, target: Any) -> bool:
    if name.startswith("_") or not _pure(name, target) or f"{module}.{name}" in _USELESS:
        return False
    if module in ONLY:
        return name in ONLY[module] and callable(target)
    if inspect.isclass(target):
        return module == "itertools"
    return inspect.isroutine(target) and _own(module, target)


def _own(module: str, target: Any) -> bool:
    # The accelerator of heapq is _heapq, that of posixpath lies in posix, that of ntpath in nt;
    # some C functions name no module at all.
    owner = getattr(target, "__module__", None) or module
    return owner in {module, f"_{module}", "posix", "nt", "genericpath"} or (
        module == "json" and owner.startswith("json.")
    )


def _methods(module: str, owner: type) -> Iterator[tuple[StdlibFunction, Any]]:
    for name in sorted(vars(owner)):
        raw = vars(owner)[name]
        maker = isinstance(raw, _MAKERS)
        if name.startswith("_") or not (maker or inspect.isroutine(raw)):
            continue
        if module != "builtins" and not maker:
            continue
        # Bound anew at every access, so the raw attribute is what tells one from another.
        function = StdlibFunction(module, f"{owner.__name__}.{name}", is_method=not maker)
        if _pure(name, getattr(owner, name)) and function.key not in _USELESS:
            yield function, raw


def _pure(name: str, target: Any) -> bool:
    if _IMPURE_NAME.match(name):
        return False
    code = getattr(getattr(target, "__func__", target), "__code__", None)
    return code is None or _IMPURE_REFERENCES.isdisjoint(code.co_names)


def _parameters(target: Any, doc: str) -> tuple[tuple[Parameter, ...], bool]:
    try:
        signature = inspect.signature(target)
    except (ValueError, TypeError):
        return _from_doc(target, doc)
    parameters = []
    for parameter in signature.parameters.values():
        empty = parameter.default is parameter.empty
        variadic: dict[Any, str] = {
            parameter.VAR_POSITIONAL: "*args",
            parameter.VAR_KEYWORD: "**kwargs",
        }
        keyword = "keyword" if parameter.kind is parameter.KEYWORD_ONLY else "positional"
        kind = variadic.get(parameter.kind, keyword)
        annotated = parameter.annotation is not parameter.empty
        parameters.append(
            Parameter(
                name=parameter.name,
                kind=kind,
                required=empty and kind in {"positional", "keyword"},
                default="" if empty else _stable(repr(parameter.default)),
                annotation=str(parameter.annotation) if annotated else "",
            )
        )
    return tuple(parameters), True


def _from_doc(target: Any, doc: str) -> tuple[tuple[Parameter, ...], bool]:
    """Parameters as the first line of many C functions' documentation spells them.

    ``max(iterable, *[, default=obj, key=func])`` has one required parameter. Where there is no
    such line, one parameter is assumed and trying it out shows the rest.
    """
    name = getattr(target, "__name__", "")
    match = re.match(rf"(?:\w+\.)?{re.escape(name)}\(([^)]*)\)", doc)
    if match is None or not match.group(1).strip():
        return (Parameter("x", "positional", required=True),), False
    required_part, bracket, optional_part = match.group(1).partition("[")
    parameters = []
    for part, required in ((required_part, True), (optional_part, False)):
        for piece in re.split(r"[\s,\[\]]+", part):
            bare, _, default = piece.partition("=")
            if re.fullmatch(r"[A-Za-z_]\w*", bare) and bare not in {"self", "key"}:
                parameters.append(
                    Parameter(bare, "positional", required and not default, default=default)
                )
            elif piece in {"*", "/"}:
                break
    if not parameters:
        return (Parameter("x", "positional", required=True),), False
    return tuple(parameters), bool(bracket) or bool(parameters)


def _stable(text: str) -> str:
    # A default such as a sentinel object shows its address, which differs between processes.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _shown(parameter: Parameter) -> str:
    stars = {"*args": "*", "**kwargs": "**"}.get(parameter.kind, "")
    default = f"={parameter.default}" if parameter.default else ""
    return f"{stars}{parameter.name}{default}"


def _summary(doc: str, name: str) -> str:
    paragraph = ""
    for block in doc.split("\n\n"):
        lines = [line.strip() for line in block.splitlines()]
        # The usage lines of C functions say what the signature says already.
        kept = [line for line in lines if not re.match(rf"(?:\w+\.)*{re.escape(name)}\(", line)]
        paragraph = " ".join(line for line in kept if line)
        if paragraph:
            break
    sentence = re.match(r".*?[.!?](?=\s|$)", paragraph)
    return (sentence.group(0) if sentence else paragraph)[:200]
