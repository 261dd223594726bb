"""Texts that look like something: sentences, addresses, paths, dates, markup.

Each function draws one with the ``random.Random`` that it is given. The words are plain and the
hosts are of the names that are reserved for examples.
"""

from __future__ import annotations

import json
import random
import string
from typing import Any

_WORD_LIST = """
amber anchor apple arrow autumn basil beacon birch breeze brook candle cedar cinder cliff
clover cobalt coral crane dawn delta drift ember fable falcon fern fjord flint forest
frost garnet glade harbor hazel heron indigo iris ivory jade juniper kelp lantern larch
lichen lilac linen lotus maple marble meadow mist moss nectar north oak ochre olive onyx
opal orbit otter pebble pine plume quartz quill rain raven reed river rowan saffron sage
shale slate sparrow spruce stone storm sumac tide thistle timber umber vale velvet violet
walnut willow
"""
WORDS = tuple(_WORD_LIST.split())
_EXOTIC = "éßñÅøŁΩπжЯ中あ½²Ⅳ٣…€™ﬁ"


def word(rng: random.Random) -> str:
    return rng.choice(WORDS)


def words(rng: random.Random, low: int = 2, high: int = 7) -> list[str]:
    return [word(rng) for _ in range(rng.randint(low, high))]


def sentence(rng: random.Random) -> str:
    drawn = words(rng, 3, 9)
    if rng.random() < 0.5:
        drawn[0] = drawn[0].capitalize()
    return " ".join(drawn) + rng.choice(("", ".", "!", "?"))


def paragraph(rng: random.Random) -> str:
    indent = " " * rng.choice((0, 2, 4))
    return "\n".join(
        indent + " " * rng.choice((0, 0, 2)) + " ".join(words(rng, 1, 4))
        for _ in range(rng.randint(2, 4))
    )


def any_text(rng: random.Random) -> str:
    shape = rng.randrange(8)
    if shape < 3:
        return word(rng)
    if shape == 3:
        return sentence(rng)
    if shape == 4:
        return rng.choice((word(rng).upper(), word(rng).title(), "  " + word(rng) + " "))
    if shape == 5:
        return str(rng.randint(0, 9999))
    if shape == 6:
        return rng.choice(("-", "_", ",")).join(words(rng, 2, 4))
    return word(rng) + rng.choice(("!", "123", "\t", "é", "ß", "")) + word(rng)


def host(rng: random.Random) -> str:
    return f"{word(rng)}.{rng.choice(('example', 'test', 'invalid'))}"


def url(rng: random.Random) -> str:
    user = rng.choice(("", "", "", f"{word(rng)}:{word(rng)}@"))
    port = rng.choice(("", "", f":{rng.randint(80, 9000)}"))
    way = "".join("/" + part for part in words(rng, 0, 3))
    question = rng.choice(("", "", "?" + query(rng)))
    fragment = rng.choice(("", "", "#" + word(rng)))
    return (
        f"{rng.choice(('http', 'https', 'ftp'))}://{user}{host(rng)}{port}{way}{question}{fragment}"
    )


def relative_url(rng: random.Random) -> str:
    return rng.choice(("../", "/", "", "./", "?", "#", "//")) + "/".join(words(rng, 1, 3))


def query(rng: random.Random) -> str:
    return "&".join(
        f"{word(rng)}={rng.choice((word(rng), str(rng.randint(0, 99)), '', 'a%20b', 'x+y'))}"
        for _ in range(rng.randint(1, 4))
    )


def quoted(rng: random.Random) -> str:
    return "".join(
        rng.choice((word(rng), "%20", "%2F", "+", "%C3%A9", "%41", "&")) for _ in range(4)
    )


def path(rng: random.Random) -> str:
    parts = [rng.choice((word(rng), word(rng), "..", ".", "")) for _ in range(rng.randint(1, 5))]
    end = rng.choice(("", "/", ".txt", ".tar.gz", ".py"))
    return rng.choice(("/", "", "", "./")) + "/".join(parts) + end


def nt_path(rng: random.Random) -> str:
    parts = words(rng, 1, 4)
    start = rng.choice(("C:\\", "d:/", "", "\\\\server\\share\\", "..\\"))
    return start + rng.choice(("\\", "/")).join(parts) + rng.choice(("", ".txt", "\\"))


def file_name(rng: random.Random) -> str:
    return word(rng) + rng.choice((".txt", ".py", ".csv", ".tar.gz", "", ".PY"))


def glob(rng: random.Random) -> str:
    drawn = word(rng)
    return rng.choice(
        (
            "*.py",
            "*.txt",
            "*",
            f"{drawn[0]}*",
            "?" * len(drawn),
            "[a-m]*",
            f"*{drawn[-1]}*",
            "*.??",
            drawn,
        )
    )


def regex(rng: random.Random) -> str:
    return rng.choice(
        (
            r"\d+",
            r"[aeiou]",
            r"\w+",
            r"\s+",
            r"[a-m]+",
            r"(\w)(\w)",
            r"e",
            r"^\w",
            r"[^a-z]",
            r"an|er",
            r"\b\w",
            r"(?i)[A-F]",
            r"[,\-_ ]",
            r"(.)\1",
            r"\w{3}",
        )
    )


def markup(rng: random.Random) -> str:
    drawn = word(rng)
    return rng.choice(
        (
            f"<b>{drawn}</b>",
            f"{drawn} & {word(rng)}",
            f"<a href='{drawn}'>\"{drawn}\"</a>",
            f"{rng.randint(1, 9)} < {rng.randint(10, 20)} > {rng.randint(1, 9)}",
            f"&lt;{drawn}&gt;",
            f"&amp;{drawn}&#{rng.randint(65, 90)};",
            f"&eacute;{drawn}&copy;",
            f"&#x{rng.randint(65, 90):x};{drawn}",
        )
    )


def json_value(rng: random.Random, depth: int = 2) -> Any:
    if depth and rng.random() < 0.6:
        if rng.random() < 0.5:
            return [json_value(rng, depth - 1) for _ in range(rng.randint(1, 3))]
        return {word(rng): json_value(rng, depth - 1) for _ in range(rng.randint(1, 3))}
    return rng.choice((rng.randint(-99, 999), decimal_number(rng), word(rng), True, False, None))


def literal_text(rng: random.Random) -> str:
    return repr(json_value(rng))


def json_text(rng: random.Random) -> str:
    return json.dumps(json_value(rng), separators=rng.choice(((", ", ": "), (",", ":"))))


def shell(rng: random.Random) -> str:
    return rng.choice(
        (
            f"{word(rng)} -{rng.choice('abc')} '{word(rng)} {word(rng)}'",
            f'{word(rng)} --{word(rng)}="{word(rng)} {rng.randint(1, 9)}"',
            f"{word(rng)} {word(rng)}\\ {word(rng)}",
            f"{word(rng)} | {word(rng)} > {word(rng)}.txt",
            f"{word(rng)} '' \"{word(rng)}\"",
            f"{word(rng)} {rng.randint(1, 99)} # {word(rng)}",
        )
    )


def date(rng: random.Random) -> str:
    return f"{rng.randint(1900, 2100)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def clock_time(rng: random.Random) -> str:
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    return clock + rng.choice(("", f":{rng.randint(0, 59):02}"))


def mail_date(rng: random.Random) -> str:
    day, month = rng.choice(("Mon, ", "Fri, ", "")), rng.choice(("Jan", "Mar", "Aug", "Dec"))
    zone = rng.choice(("+0000", "-0500", "+0130", "GMT"))
    return f"{day}{rng.randint(1, 28)} {month} {rng.randint(1990, 2030)} {clock_time(rng)} {zone}"


def mail_address(rng: random.Random) -> str:
    address = f"{word(rng)}@{host(rng)}"
    name = f"{word(rng).title()} {word(rng).title()}"
    return rng.choice(
        (address, f"{name} <{address}>", f'"{name}" <{address}>', f"{address} ({name})")
    )


def ip4(rng: random.Random) -> str:
    return ".".join(str(rng.choice((0, 1, 10, 192, 168, rng.randint(0, 255)))) for _ in range(4))


def ip(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return ip4(rng)
    return rng.choice(
        (
            f"2001:db8::{rng.randrange(65536):x}",
            "::1",
            f"fe80::{rng.randrange(65536):x}:1",
            ":".join(f"{rng.randrange(65536):04x}" for _ in range(8)),
        )
    )


def network(rng: random.Random) -> str:
    bits = rng.choice((8, 16, 24, 30))
    kept = [rng.randint(1, 223), rng.randint(0, 255), rng.randint(0, 255), rng.choice((0, 4, 64))]
    return (
        ".".join(str(n if i < bits // 8 or bits == 30 else 0) for i, n in enumerate(kept))
        + f"/{bits}"
    )


def digits_in_base(rng: random.Random) -> str:
    number = rng.randint(0, 4095)
    return rng.choice(
        (str(number), f"-{number}", f"{number:b}", f"{number:x}", f"0x{number:x}", f" {number} ")
    )


def number_text(rng: random.Random) -> str:
    return rng.choice(
        (
            str(decimal_number(rng)),
            str(whole_number(rng)),
            f"{whole_number(rng)}e{rng.randint(-3, 3)}",
            f" {decimal_number(rng)} ",
        )
    )


def fraction_text(rng: random.Random) -> str:
    return rng.choice(
        (
            f"{rng.randint(-30, 30)}/{rng.randint(1, 24)}",
            str(decimal_number(rng)),
            f"{whole_number(rng)}",
        )
    )


def char(rng: random.Random) -> str:
    return rng.choice(
        (
            rng.choice(string.ascii_letters + string.digits),
            rng.choice(_EXOTIC),
            rng.choice(string.punctuation + " \t"),
        )
    )


def template(rng: random.Random) -> str:
    return rng.choice(("{}", "{:>8}", "{!r}", "<{:^9}>", "{0}-{0}", "{:*<6}|")) + word(rng)


def quoted_printable(rng: random.Random) -> str:
    return f"{word(rng)}=3D{word(rng)}=20{rng.choice(('=C3=A9', '=41', '_', ' '))}"


def decimal_number(rng: random.Random) -> float:
    return round(rng.uniform(-20, 20), rng.choice((0, 1, 2, 3)))


def whole_number(rng: random.Random) -> int:
    return rng.choice((rng.randint(-9, 9), rng.randint(-50, 120), rng.randint(0, 4096)))
