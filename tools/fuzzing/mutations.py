"""Changes of a valid file that make it a wrong one, drawn from a seeded generator; each says in words what it did."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Change = tuple[str, bytes]
"""What was done, and what the file holds then."""

NUMBERS = ("-1", "0", "1", "0.5", "-0.0", "1e300", "1e999", "NaN", "Infinity", "-Infinity", "1" * 5000)
NUMBERS += tuple(str(sign * n) for n in (2**31, 2**32, 2**63, 10**12, 10**30) for sign in (1, -1))
TEXTS = (
    "",
    " ",
    "x",
    "x" * 100_000,
    "\u202e\u0301\U0001f600",
    "\x00",
    "<image>",
    "image",
    "user",
    "%s{0}{{1}}",
    "\ufeff",
)
OTHERS = ("true", "false", "null", "[]", "{}", "[[]]", "[null]", '{"a": 1}', '"\\ud800"', '"\\u0000"')
DEEP = tuple(
    left * n + "1" + right * n for n in (90, 400, 900, 100_000) for left, right in (("[", "]"), ('{"a":', "}"))
)
SIZES = (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 10**12, 2**63 - 1)


@dataclass(frozen=True)
class Place:
    """Where a file is changed.

    Attributes:
        file: which.
        outside: a folder that no input may have a file of read.
        named: whether it is a person who names the file, and may give a pipe.
    """

    file: Path
    outside: Path
    named: bool = False

    def names_outside(self) -> list[str]:
        """File names that lead there, absolute and not."""
        found = [self.outside / f"secret{self.file.suffix}", *sorted(self.outside.iterdir())]
        relative = [os.path.relpath(each, self.file.parent) for each in found]
        return [*map(str, found), *relative, *(f"./x/../{each}" for each in relative), *(f"file://{f}" for f in found)]


def drawn_value(rng: random.Random, place: Place) -> str:
    """A value as JSON writes it, seldom a right one."""
    how = rng.randrange(6)
    if how < 2:
        return rng.choice(NUMBERS)
    if how == 2:
        return json.dumps(rng.choice(TEXTS))
    if how == 3:
        return json.dumps(rng.choice(place.names_outside()))
    return rng.choice(OTHERS) if how == 4 else rng.choice(DEEP)


def in_bytes(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of any file: bytes flipped, cut off, doubled, left out or put in."""
    at = rng.randrange(len(data) + 1)
    stop = min(len(data), at + rng.choice((1, 2, 4, 8, 64, 1000)))
    how = rng.choice(("flip", "cut", "double", "drop", "insert", "nulls", "number", "empty"))
    if how == "flip":
        changed = bytearray(data)
        for _ in range(min(rng.choice((1, 1, 3, 30)), len(data))):
            changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return f"bits flipped at {at}", bytes(changed)
    if how == "number":
        form = rng.choice("<>") + rng.choice("HIQ")
        number = rng.choice(SIZES) & ((1 << 8 * struct.calcsize(form)) - 1)
        return f"{number} as {form} at {at}", data[:at] + struct.pack(form, number) + data[at + struct.calcsize(form) :]
    piece = {
        "cut": data[:at],
        "double": data[:stop] + data[at:],
        "drop": data[:at] + data[stop:],
        "insert": data[:at] + rng.randbytes(rng.choice((1, 4, 100))) + data[at:],
        "nulls": data[:at] + b"\0" * (stop - at) + data[stop:],
        "empty": rng.choice((b"", b"\0", b"{}", b"[]", b"null", b"\xff\xfe", b"\xef\xbb\xbf" + data)),
    }
    return f"{how} at {at}", piece[how]


def in_json(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of JSON, or a line of JSON lines: a key removed, given twice or called otherwise, a value of another type."""
    lines = data.split(b"\n") if place.file.suffix == ".jsonl" else [data]
    line = rng.randrange(len(lines))
    try:
        value = json.loads(lines[line])
    except (ValueError, RecursionError):
        return in_bytes(rng, data, place)
    paths = list(_paths(value))
    path = rng.choice(paths)
    how = rng.choice(("value", "value", "value", "remove", "rename", "twice", "wrap"))
    new = drawn_value(rng, place)
    if how in ("rename", "twice"):
        new = json.dumps(rng.choice((*TEXTS, *(str(p[-1]) for p in paths if p)))) + ": " + drawn_value(rng, place)
    try:
        text = _rewritten(value, path, how, new)
    except RecursionError:
        return in_bytes(rng, data, place)
    lines[line] = text.encode("utf-8", errors="surrogatepass")
    return f"{how} {'.'.join(map(str, path))[:80]} {new[:60]}", b"\n".join(lines)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    if len(path) < 60:
        for key, each in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            yield from _paths(each, (*path, key))


def _rewritten(value: Any, path: tuple[Any, ...], how: str, new: str) -> str:
    """The JSON text with the change; `new` is text, for not all of it is JSON."""
    mark = "\ue100mark\ue100"
    node, parent = value, None
    for key in path:
        parent, node = node, node[key]
    if parent is None:
        return f"[{json.dumps(value)}]" if how == "wrap" else new.removeprefix('"": ')
    if how == "remove":
        del parent[path[-1]]
    elif how in ("rename", "twice") and isinstance(parent, dict):
        if how == "rename":
            del parent[path[-1]]
        parent[mark] = 0
        return json.dumps(value, ensure_ascii=False).replace(f'"{mark}": 0', new)
    else:
        parent[path[-1]] = [node] if how == "wrap" else mark
        return json.dumps(value, ensure_ascii=False).replace(f'"{mark}"', new)
    return json.dumps(value, ensure_ascii=False)


def in_toml(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of a recipe: a line removed, given twice, moved, or with another value or key."""
    lines = data.decode("utf-8", errors="replace").split("\n")
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    how = rng.choice(("value", "value", "value", "remove", "twice", "move", "key", "table"))
    old = lines[at]
    if how == "remove":
        del lines[at]
    elif how == "twice":
        lines.insert(other, old)
    elif how == "move":
        lines[at], lines[other] = lines[other], old
    elif how == "table":
        deep = ".".join(["a"] * rng.choice((3, 400, 5000)))
        lines.insert(at, rng.choice((f"[{deep}]", "[modules.x]", "[[boundaries]]", "[modules]", f"{deep} = 1", '[""]')))
    else:
        key, _, value = old.partition("=")
        new = drawn_value(rng, place)
        lines[at] = f"{key}= {_as_toml(new)}" if how == "value" else f"{json.dumps(rng.choice(TEXTS))} = {value}"
    return f"{how}: {old[:60]}", "\n".join(lines).encode("utf-8", errors="surrogatepass")


def _as_toml(value: str) -> str:
    known = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf", '{"a": 1}': "{ a = 1 }", "null": "0x"}
    return known.get(value, value.replace('{"a":', "{a="))


def in_image(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of a PNG: one that says it is huge, is huge when it is opened, or is slender; else its bytes."""
    from PIL import Image

    how = rng.choice(("bytes", "bytes", "bytes", "header", "bomb", "slender"))
    if how == "header" and data[12:16] == b"IHDR":
        sides = struct.pack(">II", rng.choice(SIZES) & 0xFFFFFFFF, rng.choice(SIZES) & 0xFFFFFFFF)
        head = b"IHDR" + sides + data[24:29]
        return "a header of other sides", data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]
    if how in ("bomb", "slender"):
        size = {"bomb": (14000, 14000), "slender": rng.choice(((1, 60000), (60000, 1), (2, 30000)))}[how]
        buffer = io.BytesIO()
        Image.new("1", size).save(buffer, "PNG")
        return f"an image of {size}", buffer.getvalue()
    return in_bytes(rng, data, place)


def in_arrays(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of an npz: arrays of another shape, type or content, missing, or claimed to be larger than they are."""
    if rng.random() < 0.3:
        return in_bytes(rng, data, place)
    try:
        with np.load(io.BytesIO(data)) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception:  # an edit before this one has broken it
        return in_bytes(rng, data, place)
    name = rng.choice(sorted(arrays))
    if "texts" in arrays and rng.random() < 0.25:
        told, text = in_json(rng, arrays["texts"].tobytes(), place)
        arrays["texts"] = np.frombuffer(text, np.uint8)
        return f"texts: {told}", _npz(arrays)
    array = arrays[name]
    how = rng.choice(
        ("element", "element", "element", "cut", "type", "shape", "missing", "more", "claim", "bomb", "object")
    )
    if how == "element" and array.size and array.dtype != np.uint8:
        array = array.copy()
        array.flat[rng.randrange(array.size)] = rng.choice((-1, -(2**62), 2**62, 10**12, 2**31, 0, 1, 7))
    elif how == "cut":
        array = array[: rng.randrange(len(array) + 1)] if array.ndim else array
    elif how == "type":
        array = array.astype(rng.choice(("float32", "U8", "complex64", "bool", "datetime64[s]", ">i2")))
    elif how == "shape":
        array = rng.choice((array[None], array.reshape(-1), array[..., None], np.array(3)))
    elif how == "object":
        array = np.array([{"a": 1}], dtype=object)
    if how in ("claim", "bomb"):
        return f"{how} {name}", _npz(arrays, {name: npy_header((10**12,), "<i8")}, how == "bomb")
    arrays |= {name: array} if how != "more" else {rng.choice(("x", "store_x", "kinds", "unreadable")): array}
    if how == "missing":
        del arrays[name]
    return f"{how} {name}", _npz(arrays)


def _npz(arrays: Mapping[str, np.ndarray], raw: Mapping[str, bytes] | None = None, deflated: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED) as file:
        for name, array in arrays.items():
            each = io.BytesIO()
            np.save(each, array, allow_pickle=True)
            file.writestr(f"{name}.npy", (raw or {}).get(name, each.getvalue()))
    return buffer.getvalue()


def npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    """The header of an npy file, without anything behind it."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def in_npy(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of an npy file: a header that says something else."""
    if rng.random() < 0.4:
        return in_bytes(rng, data, place)
    sides = rng.choice((-1, 0, 1, 10**6, 10**12, 2**63 - 1))
    shape = rng.choice(((sides, 6), (3, sides), (sides,), (), (1,) * 40, (3, 6)))
    dtype = rng.choice(("<f4", "<f4", "|O", "<U9", "<c8", "|V7", "<m8[s]"))
    return f"a header of {shape} {dtype}", npy_header(shape, dtype) + data[-72:]


def in_safetensors(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of safetensors: another header, or another length of it."""
    if rng.random() < 0.3 or len(data) < 9:
        return in_bytes(rng, data, place)
    length = int.from_bytes(data[:8], "little")
    told, header = in_json(rng, data[8 : 8 + length], Place(place.file.with_suffix(".json"), place.outside))
    claimed = rng.choice((len(header), len(header), len(header), 10**12, len(header) + 1, 2**63))
    return f"header: {told}, of length {claimed}", claimed.to_bytes(8, "little") + header + data[8 + length :]


class Opens:
    """Opens a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path,)


def in_pickle(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of DCP's index: sizes, offsets and file names that are not so, and code."""
    how = rng.choice(("bytes", "size", "name", "code", "type", "offset", "memo"))
    if how == "bytes" or b"secret.txt" in data:  # by the edit before: code
        return in_bytes(rng, data, place)
    if how == "memo":  # the one in C makes room for so many objects
        return how, b"\x80\x04Nr" + rng.choice((2**28, 2**31 - 1, 2**32 - 1)).to_bytes(4, "little") + b"0" + data[2:]
    try:
        found = pickle.loads(data)  # of our own making
        tensors = [each for each in found.state_dict_metadata.values() if hasattr(each, "size")]
        parts = [each for each in found.storage_data.values() if hasattr(each, "length")]
        tensor, part = rng.choice(tensors), rng.choice(parts)
    except Exception:  # broken by the edit before
        return in_bytes(rng, data, place)
    if how == "size":
        tensor.size = rng.choice((type(tensor.size)([10**12]), type(tensor.size)([10**6, 10**6]), -3, "x", None))
    elif how == "name":
        part.relative_path = rng.choice([*place.names_outside(), "", ".", "..", 3, None, "\0", "x" * 300])
    elif how == "code":
        rng.choice((found, tensor, part)).extra = Opens(str(place.outside / "secret.txt"))
    elif how == "type":
        setattr(
            found, rng.choice(("state_dict_metadata", "storage_data")), rng.choice((3, None, {}, [], {"a": 1}, {1: 2}))
        )
    else:
        setattr(part, rng.choice(("offset", "length")), rng.choice((-1, 10**12, 2**70, "x", None, float("nan"))))
    return how, pickle.dumps(found)


def in_name(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of arguments, one a line: other values."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    key, _, _ = lines[at].partition(b"=")
    how, words = rng.choice(("value", "value", "key", "bytes")), re.findall(rb"\w+", data)
    if how == "bytes" or not words:
        return in_bytes(rng, data, place)
    value = _as_toml(drawn_value(rng, place)).encode("utf-8", errors="surrogatepass").replace(b"\n", b" ")
    lines[at] = key + b"=" + value if how == "value" else key.replace(rng.choice(words), rng.choice(words)) + b"=1"
    return f"{how} {lines[at][:80]!r}", b"\n".join(lines)


def in_tar(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of tar shards: a field of a header, whose checksum then fits; any of pax, GNU and sparse ones too."""
    at = 512 * rng.randrange(max(len(data) // 512, 1))
    header = bytearray(data[at : at + 512])
    how = rng.choice(("bytes", "name", "size", "type", "type and size"))
    if how == "bytes" or len(header) < 512 or header[257:262] != b"ustar":
        return in_bytes(rng, data, place)
    if how == "name":
        names = (b"../../x.json", b"/etc/x.json", b"\xff\xfe.json", b".json", b"a", b"a." * 40, b"")
        header[:100] = rng.choice(names)[:100].ljust(100, b"\0")
    if "size" in how:
        size = rng.choice((-1, -512, -(10**6), 0, 1, 511, 10**6, 2**40, 2**62))
        octal = b"%011o\0" % size if 0 <= size < 8**11 else b""
        header[124:136] = octal or (b"\x80" if size > 0 else b"\xff") + size.to_bytes(11, "big", signed=True)
    if "type" in how:
        header[156:157] = rng.choice((b"x", b"g", b"X", b"L", b"K", b"S", b"1", b"2", b"3", b"5", b"6", b"7", b"Z"))
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return f"{how} of the header at {at}", data[:at] + bytes(header) + data[at + 512 :]


TEMPLATES = (
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{{ 9 ** 9 ** 9 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{{ loop(messages) }}{% endfor %}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{% include '/etc/hostname' %}",
    "{{ raise_exception('no') }}",
    "{{ messages[9].content }}",
    "{{ undefined.thing }}",
    "{% if true %}" * 300 + "{% endif %}" * 300,
    "{{ " + "(" * 500 + ")" * 500 + " }}",
    "{% generation %}{{ messages }}{% endgeneration %}",
    "{% break %}",
    "<|image_pad|>",
    "\x00\ue000",
)


def in_template(rng: random.Random, data: bytes, place: Place) -> Change:
    """Of a chat template: code that does not end, reaches out, or is none, put in or in its place."""
    if rng.random() < 0.4:
        return in_bytes(rng, data, place)
    new, at = rng.choice(TEMPLATES).encode(), rng.randrange(len(data) + 1)
    whole = rng.random() < 0.5
    return f"template {new[:60]!r} {'' if whole else at}", new if whole else data[:at] + new + data[at:]


Mutate = Callable[[random.Random, bytes, Place], Change]
BY_SUFFIX: Mapping[str, tuple[Mutate, ...]] = {
    ".json": (in_json, in_json, in_bytes),
    ".jsonl": (in_json, in_json, in_bytes),
    ".toml": (in_toml, in_toml, in_bytes),
    ".png": (in_image,),
    ".npz": (in_arrays,),
    ".npy": (in_npy,),
    ".safetensors": (in_safetensors,),
    ".metadata": (in_pickle, in_bytes),
    ".arguments": (in_name,),
    ".tar": (in_tar,),
    ".jinja": (in_template,),
}
"""How files are changed, by the end of their names; those of other names are changed byte by byte."""


def mutate(rng: random.Random, place: Place) -> str:
    """Change a file; says how."""
    if rng.random() < 0.02:
        return f"{place.file.name}: {_replaced(rng, place)}"
    if not place.file.is_file():  # by an edit before this one
        return f"{place.file.name}: nothing"
    data = place.file.read_bytes()
    known = BY_SUFFIX.get(place.file.suffix or place.file.name, (in_bytes,))
    told, changed = rng.choice(known)(rng, data, place)
    place.file.write_bytes(changed)
    return f"{place.file.name}: {told}"


def _replaced(rng: random.Random, place: Place) -> str:
    """By something that is no file."""
    place.file.unlink(missing_ok=True)
    how = rng.choice(("missing", "folder", "loop", *(() if place.named else ("pipe", "device"))))
    if how == "folder":
        place.file.mkdir()
    elif how == "pipe":
        os.mkfifo(place.file)
    elif how != "missing":
        place.file.symlink_to({"loop": place.file, "device": Path("/dev/zero")}[how])
    return how


def linked(place: Place) -> str:
    """Make the file a link to one outside of the folder."""
    place.file.unlink()
    place.file.symlink_to(place.outside / place.file.name)
    return f"{place.file.name}: a link out of the folder"
