"""Random values by kind. A kind is a word for what an argument means: ``sentence``, ``date``...

``make(kind, rng)`` returns a value of that kind that a literal can be written for; it depends on
nothing but its arguments.
"""

from __future__ import annotations

import base64
import binascii
import random
import string
import struct
from collections.abc import Callable
from typing import Any

from jobs import texts

Maker = Callable[[random.Random], Any]


def _fraction_of_one(rng: random.Random) -> float:
    return round(rng.random(), 2)


def _list_of(maker: Maker, low: int = 1, high: int = 7) -> Maker:
    return lambda rng: [maker(rng) for _ in range(rng.randint(low, high))]


def _one_of(*values: Any) -> Maker:
    return lambda rng: rng.choice(values)


def _between(low: int, high: int) -> Maker:
    return lambda rng: rng.randint(low, high)


def _bytes(rng: random.Random) -> bytes:
    if rng.random() < 0.6:
        return texts.any_text(rng).encode("ascii", "replace")
    return bytes(rng.randrange(256) for _ in range(rng.randint(1, 8)))


def _sorted_numbers(rng: random.Random) -> list[float]:
    maker = rng.choice((_between(0, 40), _between(0, 40), texts.decimal_number))
    return sorted(maker(rng) for _ in range(rng.randint(3, 9)))


def _dict(rng: random.Random) -> dict[str, Any]:
    maker = rng.choice((_between(0, 99), texts.word))
    return {texts.word(rng): maker(rng) for _ in range(rng.randint(1, 4))}


def _pairs(rng: random.Random) -> list[tuple[str, int]]:
    return [(texts.word(rng), rng.randint(0, 99)) for _ in range(rng.randint(1, 4))]


def _hex(rng: random.Random) -> str:
    return bytes(rng.randrange(256) for _ in range(rng.randint(1, 8))).hex()


def _struct(rng: random.Random) -> tuple[str, bytes]:
    form = rng.choice("<>") + "".join(rng.choice("bBhHiI") for _ in range(rng.randint(1, 3)))
    return form, bytes(rng.randrange(256) for _ in range(struct.calcsize(form)))


def _complex(rng: random.Random) -> complex:
    return complex(rng.randint(-5, 5), rng.randint(-5, 5))


def _encoded(encode: Callable[[bytes], bytes], *, text: bool = False) -> Maker:
    def maker(rng: random.Random) -> Any:
        data = encode(texts.any_text(rng).encode())
        return data.decode() if text else data

    return maker


def _uu_line(rng: random.Random) -> bytes:
    return binascii.b2a_uu(texts.word(rng).encode())


_MAKERS: dict[str, Maker] = {
    "int": texts.whole_number,
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
    "float": texts.decimal_number,
    "positive": lambda rng: round(rng.uniform(0.1, 30), rng.choice((0, 1, 2))) or 1.0,
    "unit": _fraction_of_one,
    "number": lambda rng: rng.choice((texts.whole_number, texts.decimal_number))(rng),
    "complex": _complex,
    "word": texts.word,
    "str": texts.any_text,
    "sentence": texts.sentence,
    "text": texts.paragraph,
    "char": texts.char,
    "letter": lambda rng: rng.choice(string.ascii_lowercase),
    "fill": _one_of("*", "-", "0", "."),
    "fill_b": _one_of(b"*", b"-", b"0", b"."),
    "sep": _one_of("-", ",", " ", "_", "e", "an"),
    "sep_b": _one_of(b"-", b",", b" ", b"e", b"an"),
    "prefix": _one_of("> ", "  ", "# ", "* "),
    "bytes": _bytes,
    "list_int": _list_of(texts.whole_number),
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
    "many": lambda rng: rng.sample(texts.WORDS, 12),
    "list_float": _list_of(texts.decimal_number, 2, 6),
    "list_positive": _list_of(lambda rng: round(rng.uniform(0.5, 30), 1), 2, 6),
    "sample": lambda rng: rng.choice(
        (_list_of(_between(0, 20), 3, 8), _list_of(texts.decimal_number, 3, 6))
    )(rng),
    "series_4": lambda rng: [rng.randint(0, 20) for _ in range(4)],
    "point_3": lambda rng: [rng.randint(-9, 9) for _ in range(3)],
    "sorted": _sorted_numbers,
    "list_str": _list_of(texts.word, 2, 6),
    "list_any": lambda rng: rng.choice(
        (_list_of(texts.whole_number), _list_of(texts.word), _list_of(texts.char))
    )(rng),
    "few": lambda rng: rng.sample(texts.WORDS, rng.randint(2, 4)),
    "list_bytes": _list_of(_bytes, 1, 4),
    "matrix": _list_of(_list_of(_between(0, 9), 1, 3), 2, 3),
    "lines": _list_of(lambda rng: texts.word(rng) + "\n", 2, 5),
    "delta": lambda rng: [
        rng.choice(("  ", "- ", "+ ", "? ")) + texts.word(rng) + "\n" for _ in range(4)
    ],
    "set_int": lambda rng: set(rng.sample(range(16), rng.randint(1, 5))),
    "dict": _dict,
    "pairs": _pairs,
    "list_file": _list_of(texts.file_name, 2, 5),
    "url": texts.url,
    "relative_url": texts.relative_url,
    "host": lambda rng: texts.host(rng) + rng.choice(("", f":{rng.randint(80, 9000)}")),
    "user_host": lambda rng: f"{texts.word(rng)}:{texts.word(rng)}@{texts.host(rng)}",
    "url_parts_5": lambda rng: (
        "http",
        texts.host(rng),
        "/" + texts.word(rng),
        rng.choice(("", texts.query(rng))),
        "",
    ),
    "url_parts_6": lambda rng: (
        "http",
        texts.host(rng),
        "/" + texts.word(rng),
        "",
        rng.choice(("", texts.query(rng))),
        texts.word(rng),
    ),
    "query": texts.query,
    "quoted": texts.quoted,
    "path": texts.path,
    "paths": lambda rng: [f"/{texts.WORDS[0]}/" + texts.path(rng).strip("./") for _ in range(2)],
    "nt_path": texts.nt_path,
    "nt_paths": lambda rng: [f"C:\\{texts.WORDS[0]}\\{texts.word(rng)}" for _ in range(2)],
    "file": texts.file_name,
    "glob": texts.glob,
    "regex": texts.regex,
    "replacement": _one_of("-", "", "<>", "#", "_", r"\g<0>!"),
    "html": texts.markup,
    "json": texts.json_text,
    "json_value": texts.json_value,
    "literal": texts.literal_text,
    "shell": texts.shell,
    "date": texts.date,
    "time": texts.clock_time,
    "datetime": lambda rng: texts.date(rng) + rng.choice("T ") + texts.clock_time(rng),
    "mail_date": texts.mail_date,
    "mail_address": texts.mail_address,
    "name_address": lambda rng: (
        f"{texts.word(rng).title()} {texts.word(rng)}",
        f"{texts.word(rng)}@{texts.host(rng)}",
    ),
    "ip": texts.ip,
    "network": texts.network,
    "interface": lambda rng: f"{texts.ip4(rng)}/{rng.choice((8, 16, 24, 30))}",
    "hex": _hex,
    "hex_bytes": lambda rng: _hex(rng).encode(),
    "hex_float": lambda rng: rng.choice(
        (texts.decimal_number(rng).hex(), f"0x{rng.randint(1, 255):x}p{rng.randint(-4, 4)}")
    ),
    "digits": texts.digits_in_base,
    "number_text": texts.number_text,
    "fraction_text": texts.fraction_text,
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
    "qp": texts.quoted_printable,
    "qp_bytes": lambda rng: texts.quoted_printable(rng).encode(),
    "encoding": _one_of("utf-8", "ascii", "latin-1", "utf-16-le"),
    "codec": _one_of("utf-8", "latin-1", "utf-16-le", "punycode", "unicode_escape"),
    "codec_b": _one_of("hex", "base64", "quopri"),
    "errors": _one_of("replace", "ignore", "backslashreplace"),
    "normal_form": _one_of("NFC", "NFD", "NFKC", "NFKD"),
    "unicode_name": lambda rng: (
        f"{rng.choice(('LATIN SMALL', 'LATIN CAPITAL', 'GREEK SMALL'))} LETTER "
        + rng.choice(("ALPHA", "OMEGA", "A", "B", "E WITH ACUTE", "O WITH STROKE", "PI", "Z"))
    ),
    "template": texts.template,
    "template_map": lambda rng: (
        "{a}" + rng.choice(("-", " ", ":")) + rng.choice(("{b}", "{b:>4}", "{b!r}"))
    ),
    "map_ab": lambda rng: {
        "a": texts.word(rng),
        "b": rng.choice((texts.whole_number(rng), texts.word(rng))),
    },
    "format_spec_int": _one_of("d", "x", "08b", ",", "+d", ">10", "e", "o", "#x", "_"),
    "byteorder": _one_of("little", "big"),
    "table": lambda rng: {ord(rng.choice("aeiou")): rng.choice(("*", "", "<>")), ord("r"): "R"},
    "algorithm": _one_of("md5", "sha1", "sha256"),
    "method": _one_of("inclusive", "exclusive"),
    "python_word": _one_of(
        "if", "print", "match", "None", "lambda", "type", "async", "case", "self"
    ),
    "indented": lambda rng: " " * rng.randint(0, 9) + texts.word(rng),
    "date_format": _one_of("%Y-%m-%d"),
}

KINDS = tuple(sorted(_MAKERS))


def make(kind: str, rng: random.Random) -> Any:
    """A value of ``kind``."""
    return _MAKERS[kind](rng)
