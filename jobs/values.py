"""Random values by kind. A kind is a word for what an argument means: ``sentence``, ``date``...

``make(kind, rng)`` returns a literal of that kind; ``mutate(value, rng)`` a neighbour of a value,
of the same type wherever that can be. Both depend on nothing but their arguments.
"""

from __future__ import annotations

import base64
import random
import string
from collections.abc import Callable
from typing import Any

_WORDS = (
    "amber anchor apple arrow autumn basil beacon birch breeze brook candle cedar cinder cliff "
    "clover cobalt coral crane dawn delta drift ember fable falcon fern fjord flint forest frost "
    "garnet glade harbor hazel heron indigo iris ivory jade juniper kelp lantern larch lichen "
    "lilac linen lotus maple marble meadow mist moss nectar north oak ochre olive onyx opal orbit "
    "otter pebble pine plume quartz quill rain raven reed river rowan saffron sage shale slate "
    "sparrow spruce stone storm sumac tide thistle timber umber vale velvet violet walnut willow"
).split()
_EXOTIC = "éßñÅøŁΩπжЯ中あ½²Ⅳ٣…€™ﬁ"

Maker = Callable[[random.Random], Any]


def _word(rng: random.Random) -> str:
    return rng.choice(_WORDS)


def _words(rng: random.Random, low: int = 2, high: int = 7) -> list[str]:
    return [_word(rng) for _ in range(rng.randint(low, high))]


def _sentence(rng: random.Random) -> str:
    words = _words(rng, 3, 9)
    if rng.random() < 0.5:
        words[0] = words[0].capitalize()
    return " ".join(words) + rng.choice(("", ".", "!", "?"))


def _text(rng: random.Random) -> str:
    indent = " " * rng.choice((0, 2, 4))
    return "\n".join(
        indent + " " * rng.choice((0, 0, 2)) + " ".join(_words(rng, 1, 4))
        for _ in range(rng.randint(2, 4))
    )


def _str(rng: random.Random) -> str:
    shape = rng.randrange(8)
    if shape < 3:
        return _word(rng)
    if shape == 3:
        return _sentence(rng)
    if shape == 4:
        return rng.choice((_word(rng).upper(), _word(rng).title(), "  " + _word(rng) + " "))
    if shape == 5:
        return str(rng.randint(0, 9999))
    if shape == 6:
        return rng.choice(("-", "_", ",")).join(_words(rng, 2, 4))
    return _word(rng) + rng.choice(("!", "123", "\t", "é", "ß", "")) + _word(rng)


def _float(rng: random.Random) -> float:
    return round(rng.uniform(-20, 20), rng.choice((0, 1, 2, 3)))


def _fraction_of_one(rng: random.Random) -> float:
    return round(rng.random(), 2)


def _int(rng: random.Random) -> int:
    return rng.choice((rng.randint(-9, 9), rng.randint(-50, 120), rng.randint(0, 4096)))


def _list_of(maker: Maker, low: int = 1, high: int = 7) -> Maker:
    return lambda rng: [maker(rng) for _ in range(rng.randint(low, high))]


def _one_of(*values: Any) -> Maker:
    return lambda rng: rng.choice(values)


def _between(low: int, high: int) -> Maker:
    return lambda rng: rng.randint(low, high)


def _bytes(rng: random.Random) -> bytes:
    if rng.random() < 0.6:
        return _str(rng).encode("ascii", "replace")
    return bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))


def _sorted_numbers(rng: random.Random) -> list[float]:
    maker = rng.choice((_between(0, 40), _between(0, 40), _float))
    return sorted(maker(rng) for _ in range(rng.randint(3, 9)))


def _dict(rng: random.Random) -> dict[str, Any]:
    maker = rng.choice((_between(0, 99), _word))
    return {_word(rng): maker(rng) for _ in range(rng.randint(1, 4))}


def _pairs(rng: random.Random) -> list[tuple[str, int]]:
    return [(_word(rng), rng.randint(0, 99)) for _ in range(rng.randint(1, 4))]


def _host(rng: random.Random) -> str:
    return f"{_word(rng)}.{rng.choice(('example', 'test', 'invalid'))}"


def _url(rng: random.Random) -> str:
    user = rng.choice(("", "", "", f"{_word(rng)}:{_word(rng)}@"))
    port = rng.choice(("", "", f":{rng.randint(80, 9000)}"))
    path = "".join("/" + word for word in _words(rng, 0, 3))
    query = rng.choice(("", "", "?" + _query(rng)))
    fragment = rng.choice(("", "", "#" + _word(rng)))
    return f"{rng.choice(('http', 'https', 'ftp'))}://{user}{_host(rng)}{port}{path}{query}{fragment}"


def _relative_url(rng: random.Random) -> str:
    return rng.choice(("../", "/", "", "./", "?", "#", "//")) + "/".join(_words(rng, 1, 3))


def _query(rng: random.Random) -> str:
    return "&".join(
        f"{_word(rng)}={rng.choice((_word(rng), str(rng.randint(0, 99)), '', 'a%20b', 'x+y'))}"
        for _ in range(rng.randint(1, 4))
    )


def _quoted(rng: random.Random) -> str:
    return "".join(
        rng.choice((_word(rng), "%20", "%2F", "+", "%C3%A9", "%41", "&")) for _ in range(4)
    )


def _path(rng: random.Random) -> str:
    parts = [rng.choice((_word(rng), _word(rng), "..", ".", "")) for _ in range(rng.randint(1, 5))]
    end = rng.choice(("", "/", ".txt", ".tar.gz", ".py"))
    return rng.choice(("/", "", "", "./")) + "/".join(parts) + end


def _nt_path(rng: random.Random) -> str:
    parts = _words(rng, 1, 4)
    start = rng.choice(("C:\\", "d:/", "", "\\\\server\\share\\", "..\\"))
    return start + rng.choice(("\\", "/")).join(parts) + rng.choice(("", ".txt", "\\"))


def _file_name(rng: random.Random) -> str:
    return _word(rng) + rng.choice((".txt", ".py", ".csv", ".tar.gz", "", ".PY"))


def _glob(rng: random.Random) -> str:
    word = _word(rng)
    return rng.choice(
        ("*.py", "*.txt", "*", f"{word[0]}*", "?" * len(word), "[a-m]*", f"*{word[-1]}*", "*.??", word)
    )


def _regex(rng: random.Random) -> str:
    return rng.choice(
        (r"\d+", r"[aeiou]", r"\w+", r"\s+", r"[a-m]+", r"(\w)(\w)", r"e", r"^\w", r"[^a-z]",
         r"an|er", r"\b\w", r"(?i)[A-F]", r"[,\-_ ]", r"(.)\1", r"\w{3}")
    )  # fmt: skip


def _html(rng: random.Random) -> str:
    word = _word(rng)
    return rng.choice(
        (f"<b>{word}</b>", f"{word} & {_word(rng)}", f"<a href='{word}'>\"{word}\"</a>",
         f"{rng.randint(1, 9)} < {rng.randint(10, 20)} > {rng.randint(1, 9)}", f"&lt;{word}&gt;",
         f"&amp;{word}&#{rng.randint(65, 90)};", f"&eacute;{word}&copy;", f"&#x{rng.randint(65, 90):x};{word}")
    )  # fmt: skip


def _json_value(rng: random.Random, depth: int = 2) -> Any:
    if depth and rng.random() < 0.6:
        if rng.random() < 0.5:
            return [_json_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {_word(rng): _json_value(rng, depth - 1) for _ in range(rng.randint(1, 3))}
    return rng.choice((rng.randint(-99, 999), _float(rng), _word(rng), True, False, None))


def _literal_text(rng: random.Random) -> str:
    return repr(_json_value(rng))


def _json_text(rng: random.Random) -> str:
    import json

    return json.dumps(_json_value(rng), separators=rng.choice(((", ", ": "), (",", ":"))))


def _shell(rng: random.Random) -> str:
    word = _word
    return rng.choice(
        (f"{word(rng)} -{rng.choice('abc')} '{word(rng)} {word(rng)}'",
         f'{word(rng)} --{word(rng)}="{word(rng)} {rng.randint(1, 9)}"',
         f"{word(rng)} {word(rng)}\\ {word(rng)}", f"{word(rng)} | {word(rng)} > {word(rng)}.txt",
         f"{word(rng)} '' \"{word(rng)}\"", f"{word(rng)} {rng.randint(1, 99)} # {word(rng)}")
    )  # fmt: skip


def _date(rng: random.Random) -> str:
    return f"{rng.randint(1900, 2100)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _clock_time(rng: random.Random) -> str:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return clock + rng.choice(("", f":{rng.randint(0, 59):02}"))


def _mail_date(rng: random.Random) -> str:
    day, month = rng.choice(("Mon, ", "Fri, ", "")), rng.choice(("Jan", "Mar", "Aug", "Dec"))
    zone = rng.choice(("+0000", "-0500", "+0130", "GMT"))
    return f"{day}{rng.randint(1, 28)} {month} {rng.randint(1990, 2030)} {_clock_time(rng)} {zone}"


def _mail_address(rng: random.Random) -> str:
    address = f"{_word(rng)}@{_host(rng)}"
    name = f"{_word(rng).title()} {_word(rng).title()}"
    return rng.choice((address, f"{name} <{address}>", f'"{name}" <{address}>', f"{address} ({name})"))


def _ip4(rng: random.Random) -> str:
    return ".".join(str(rng.choice((0, 1, 10, 192, 168, rng.randint(0, 255)))) for _ in range(4))


def _ip(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return _ip4(rng)
    return rng.choice(
        (f"2001:db8::{rng.randrange(65536):x}", "::1", f"fe80::{rng.randrange(65536):x}:1",
         ":".join(f"{rng.randrange(65536):04x}" for _ in range(8)))
    )  # fmt: skip


def _network(rng: random.Random) -> str:
    bits = rng.choice((8, 16, 24, 30))
    kept = [rng.randint(1, 223), rng.randint(0, 255), rng.randint(0, 255), rng.choice((0, 4, 64))]
    return ".".join(str(n if i < bits // 8 or bits == 30 else 0) for i, n in enumerate(kept)) + f"/{bits}"


def _hex(rng: random.Random) -> str:
    return bytes(rng.randrange(256) for _ in range(rng.randint(1, 8))).hex()


def _char(rng: random.Random) -> str:
    return rng.choice((rng.choice(string.ascii_letters + string.digits), rng.choice(_EXOTIC),
                       rng.choice(string.punctuation + " \t")))  # fmt: skip


def _digits_in_base(rng: random.Random) -> str:
    number = rng.randint(0, 4095)
    return rng.choice((str(number), f"-{number}", f"{number:b}", f"{number:x}", f"0x{number:x}", f" {number} "))


def _number_text(rng: random.Random) -> str:
    return rng.choice((str(_float(rng)), str(_int(rng)), f"{_int(rng)}e{rng.randint(-3, 3)}", f" {_float(rng)} "))


def _fraction_text(rng: random.Random) -> str:
    return rng.choice((f"{rng.randint(-30, 30)}/{rng.randint(1, 24)}", str(_float(rng)), f"{_int(rng)}"))


def _struct(rng: random.Random) -> tuple[str, bytes]:
    form = rng.choice("<>") + "".join(rng.choice("bBhHiI") for _ in range(rng.randint(1, 3)))
    import struct

    return form, bytes(rng.randrange(256) for _ in range(struct.calcsize(form)))


def _complex(rng: random.Random) -> complex:
    return complex(rng.randint(-5, 5), rng.randint(-5, 5))


def _encoded(encode: Callable[[bytes], bytes], *, text: bool = False) -> Maker:
    def maker(rng: random.Random) -> Any:
        data = encode(_str(rng).encode())
        return data.decode() if text else data

    return maker


def _template(rng: random.Random) -> str:
    return rng.choice(("{}", "{:>8}", "{!r}", "<{:^9}>", "{0}-{0}", "{:*<6}|")) + _word(rng)


def _quoted_printable(rng: random.Random) -> str:
    return f"{_word(rng)}=3D{_word(rng)}=20{rng.choice(('=C3=A9', '=41', '_', ' '))}"


def _uu_line(rng: random.Random) -> bytes:
    import binascii

    return binascii.b2a_uu(_word(rng).encode())


_MAKERS: dict[str, Maker] = {
    "int": _int,
    "nat": _between(0, 12),
    "count": _between(1, 6),
    "width": _between(8, 36),
    "small": _between(-6, 12),
    "big": lambda rng: rng.choice((rng.randint(100, 10**6), rng.getrandbits(40))),
    "byte": _between(0, 255),
    "code": lambda rng: rng.choice((rng.randint(32, 126), rng.randint(160, 0x2FFF))),
    "base": _one_of(0, 2, 8, 10, 16, 36),
    "year": _between(1900, 2100),
    "month": _between(1, 12),
    "day": _between(1, 28),
    "hour": _between(0, 23),
    "minute": _between(0, 59),
    "iso_week": _between(1, 52),
    "iso_weekday": _between(1, 7),
    "ordinal": _between(690000, 770000),
    "bool": _one_of(True, False),
    "none": _one_of(None),
    "float": _float,
    "positive": lambda rng: round(rng.uniform(0.1, 30), rng.choice((0, 1, 2))) or 1.0,
    "unit": _fraction_of_one,
    "number": lambda rng: rng.choice((_int, _float))(rng),
    "complex": _complex,
    "word": _word,
    "str": _str,
    "sentence": _sentence,
    "text": _text,
    "char": _char,
    "letter": lambda rng: rng.choice(string.ascii_lowercase),
    "fill": _one_of("*", "-", "0", "."),
    "fill_b": _one_of(b"*", b"-", b"0", b"."),
    "sep": _one_of("-", ",", " ", "_", "e", "an"),
    "sep_b": _one_of(b"-", b",", b" ", b"e", b"an"),
    "prefix": _one_of("> ", "  ", "# ", "* "),
    "bytes": _bytes,
    "list_int": _list_of(_int),
    "list_small": _list_of(_between(-6, 12), 2, 5),
    "list_nat": _list_of(_between(0, 12)),
    "list_bool": _list_of(_between(0, 1), 2, 5),
    "tiny": _between(0, 4),
    "list_dense": _list_of(_between(0, 4), 4, 9),
    "vowel": _one_of(*"aeio"),
    "letter_b": _one_of(b"a", b"e", b"r", b"l", b"n", b"an", b"er"),
    "multiple": lambda rng: rng.choice((6, 10, 12, 35)) * rng.randint(1, 40),
    "numeral": lambda rng: rng.choice("0123456789½²³¾٣७Ⅳ①➄"),
    "qp_escape": lambda rng: f"={rng.randint(32, 126):02X}",
    "many": lambda rng: rng.sample(_WORDS, 12),
    "list_float": _list_of(_float, 2, 6),
    "list_positive": _list_of(lambda rng: round(rng.uniform(0.5, 30), 1), 2, 6),
    "sample": lambda rng: rng.choice((_list_of(_between(0, 20), 3, 8), _list_of(_float, 3, 6)))(rng),
    "series_4": lambda rng: [rng.randint(0, 20) for _ in range(4)],
    "point_3": lambda rng: [rng.randint(-9, 9) for _ in range(3)],
    "sorted": _sorted_numbers,
    "list_str": _list_of(_word, 2, 6),
    "list_any": lambda rng: rng.choice((_list_of(_int), _list_of(_word), _list_of(_char)))(rng),
    "few": lambda rng: rng.sample(_WORDS, rng.randint(2, 4)),
    "list_bytes": _list_of(_bytes, 1, 4),
    "matrix": _list_of(_list_of(_between(0, 9), 1, 3), 2, 3),
    "lines": _list_of(lambda rng: _word(rng) + "\n", 2, 5),
    "delta": lambda rng: [rng.choice(("  ", "- ", "+ ", "? ")) + _word(rng) + "\n" for _ in range(4)],
    "set_int": lambda rng: set(rng.sample(range(16), rng.randint(1, 5))),
    "dict": _dict,
    "pairs": _pairs,
    "list_file": _list_of(_file_name, 2, 5),
    "url": _url,
    "relative_url": _relative_url,
    "host": lambda rng: _host(rng) + rng.choice(("", f":{rng.randint(80, 9000)}")),
    "user_host": lambda rng: f"{_word(rng)}:{_word(rng)}@{_host(rng)}",
    "url_parts_5": lambda rng: ("http", _host(rng), "/" + _word(rng), rng.choice(("", _query(rng))), ""),
    "url_parts_6": lambda rng: ("http", _host(rng), "/" + _word(rng), "", rng.choice(("", _query(rng))), _word(rng)),
    "query": _query,
    "quoted": _quoted,
    "path": _path,
    "paths": lambda rng: [f"/{_WORDS[0]}/" + _path(rng).strip("./") for _ in range(2)],
    "nt_path": _nt_path,
    "nt_paths": lambda rng: [f"C:\\{_WORDS[0]}\\{_word(rng)}" for _ in range(2)],
    "file": _file_name,
    "glob": _glob,
    "regex": _regex,
    "replacement": _one_of("-", "", "<>", "#", "_", r"\g<0>!"),
    "html": _html,
    "json": _json_text,
    "json_value": _json_value,
    "literal": _literal_text,
    "shell": _shell,
    "date": _date,
    "time": _clock_time,
    "datetime": lambda rng: _date(rng) + rng.choice("T ") + _clock_time(rng),
    "mail_date": _mail_date,
    "mail_address": _mail_address,
    "name_address": lambda rng: (f"{_word(rng).title()} {_word(rng)}", f"{_word(rng)}@{_host(rng)}"),
    "ip": _ip,
    "network": _network,
    "interface": lambda rng: f"{_ip4(rng)}/{rng.choice((8, 16, 24, 30))}",
    "hex": _hex,
    "hex_bytes": lambda rng: _hex(rng).encode(),
    "hex_float": lambda rng: rng.choice((_float(rng).hex(), f"0x{rng.randint(1, 255):x}p{rng.randint(-4, 4)}")),
    "digits": _digits_in_base,
    "number_text": _number_text,
    "fraction_text": _fraction_text,
    "struct": lambda rng: _struct(rng)[0],
    "struct_data": lambda rng: bytes(rng.randrange(256) for _ in range(8)),
    "struct_8": _one_of("<BBBBBBBB", ">HHHH", "<2i", ">q", "<bbHI", ">4sI", "<Q", ">hhhh"),
    "struct_2": _one_of("<bH", ">hi", "<Bq", ">HH", "<ii", ">Bb"),
    "complex_text": lambda rng: f"{rng.randint(-9, 9)}{rng.choice('+-')}{rng.randint(1, 9)}j",
    "b64": _encoded(base64.b64encode),
    "b64_text": _encoded(base64.b64encode, text=True),
    "b32": _encoded(base64.b32encode),
    "b16": _encoded(base64.b16encode),
    "a85": _encoded(base64.a85encode),
    "b85": _encoded(base64.b85encode),
    "uu": _uu_line,
    "qp": _quoted_printable,
    "qp_bytes": lambda rng: _quoted_printable(rng).encode(),
    "encoding": _one_of("utf-8", "ascii", "latin-1", "utf-16-le"),
    "codec": _one_of("utf-8", "latin-1", "utf-16-le", "punycode", "unicode_escape"),
    "codec_b": _one_of("hex", "base64", "quopri"),
    "errors": _one_of("replace", "ignore", "backslashreplace"),
    "normal_form": _one_of("NFC", "NFD", "NFKC", "NFKD"),
    "unicode_name": lambda rng: f"{rng.choice(('LATIN SMALL', 'LATIN CAPITAL', 'GREEK SMALL'))} LETTER "
    + rng.choice(("ALPHA", "OMEGA", "A", "B", "E WITH ACUTE", "O WITH STROKE", "PI", "Z")),
    "template": _template,
    "template_map": lambda rng: "{a}" + rng.choice(("-", " ", ":")) + rng.choice(("{b}", "{b:>4}", "{b!r}")),
    "map_ab": lambda rng: {"a": _word(rng), "b": rng.choice((_int(rng), _word(rng)))},
    "format_spec_int": _one_of("d", "x", "08b", ",", "+d", ">10", "e", "o", "#x", "_"),
    "byteorder": _one_of("little", "big"),
    "table": lambda rng: {ord(rng.choice("aeiou")): rng.choice(("*", "", "<>")), ord("r"): "R"},
    "algorithm": _one_of("md5", "sha1", "sha256"),
    "method": _one_of("inclusive", "exclusive"),
    "python_word": _one_of("if", "print", "match", "None", "lambda", "type", "async", "case", "self"),
    "indented": lambda rng: " " * rng.randint(0, 9) + _word(rng),
    "date_format_pair": _date,
    "date_format": _one_of("%Y-%m-%d"),
}  # fmt: skip

KINDS = tuple(sorted(_MAKERS))


def make(kind: str, rng: random.Random) -> Any:
    """A value of ``kind``."""
    return _MAKERS[kind](rng)


def mutate(value: Any, rng: random.Random) -> Any:
    """A small change to ``value``, of the same type unless it is ``None``."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, value * 2, value // 2, -value, value + rng.randint(-9, 9)))
    if isinstance(value, float):
        return rng.choice((-value, value / 2, value + 1, round(value * 1.5, 3), float(round(value))))
    if isinstance(value, complex):
        return complex(mutate(value.real, rng), value.imag)
    if isinstance(value, str):
        return _mutate_text(value, rng)
    if isinstance(value, bytes):
        return _mutate_bytes(value, rng)
    if isinstance(value, list):
        return _mutate_list(value, rng)
    if isinstance(value, tuple):
        return tuple(_mutate_list(list(value), rng, resize=False))
    if isinstance(value, set):
        return value ^ {rng.randrange(16)} or {rng.randrange(16)}
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        return {k: mutate(v, rng) if k == key else v for k, v in value.items()}
    return value


def _mutate_text(text: str, rng: random.Random) -> str:
    if not text:
        return _word(rng)
    at = rng.randrange(len(text))
    same_sort = string.digits if text[at].isdigit() else string.ascii_lowercase
    return rng.choice(
        (text[:at] + rng.choice(same_sort) + text[at + 1 :], text[:at] + text[at + 1 :], text + text[at],
         text.swapcase(), text[::-1], text + " " + _word(rng))
    )  # fmt: skip


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return b"a"
    at = rng.randrange(len(data))
    changed = bytes([rng.choice(b"abcdefghijklmnopqrstuvwxyz0123456789")])
    return rng.choice((data[:at] + changed + data[at + 1 :], data + data[at : at + 1], data[1:], data[::-1]))


def _mutate_list(values: list[Any], rng: random.Random, *, resize: bool = True) -> list[Any]:
    if not values:
        return values
    at = rng.randrange(len(values))
    changed = [mutate(v, rng) if i == at else v for i, v in enumerate(values)]
    if not resize:
        return changed
    shuffled = rng.sample(values, len(values))
    return rng.choice((changed, shuffled, [*values, values[at]], values[:at] + values[at + 1 :]))
