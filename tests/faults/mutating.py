"""What a careless hand, a bad disk or a bad day does to a file; ``random.Random`` decides, so that a seed names it."""

import io
import json
import math
import struct

import pyarrow as pa
import pyarrow.parquet as pq

NASTY = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, -(2**31), 2**63, 2**64, 10**12, -(10**12), 10**30, 0.0, -0.0, 0.5, 1.5,
    -2.5, 1e-320, 1e308, -1e308, 1e30, math.nan, math.inf, -math.inf, "", " ", "x", "0", "nan", "true", "../..", "/",
    "/proc/self/mem", "/dev/zero", "/dev/null", "/nowhere/at/all", "~", "\0", "\n", "ß", "漢字", "🙂", "\u202e",
    "a" * 5000, "%s{0}", "<b>", "ngram", "train", "test", "bpe", "product", [], [[]], [None], [0], ["x"], [1, "x"],
    [[1], [2]], {}, {"kind": "x"}, {"kind": "ngram"}, {"a": {"b": {}}}, {"": 0}, list(range(300)),
]  # fmt: skip
WORDS = [b"[", b"]", b"{", b"}", b'"', b"'", b"=", b",", b"\n", b"\r", b"\0", b"\xff", b"\xed\xa0\x80", b"\\",
         b"\\ud800", b"#", b"nan", b"inf", b"-", b"0", b"9" * 40, b"9" * 5000, b"[" * 2000, b"null", b"true", b"1e999",
         b"\xef\xbb\xbf", b"[[x]]", b"a.b.c=1", b"kind", b"{" * 2000, b"1979-05-27", b'""""', b"\t"]  # fmt: skip


def nasty(random):
    """A value that nobody asked for."""
    value = random.choice(NASTY)
    for _ in range(random.choice([0] * 20 + [5, 150])):
        value = [value]
    return value


def mutate_bytes(data, random):
    """A few wounds."""
    data = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice([1, 2, 8, 64, 1000]))
        match random.randrange(8):
            case 0:
                del data[at:]
            case 1 | 2 if at < len(data):
                data[at] ^= 1 << random.randrange(8)
            case 3:
                data[at:at] = random.choice(WORDS)
            case 4:
                del data[at:end]
            case 5:
                data[at:at] = data[at:end]
            case 6:
                data[at:end] = bytes(end - at)
            case _:
                data[at:end] = random.randbytes(end - at)
    return bytes(data)


def places(value, path=()):
    """The paths of all values within a value."""
    yield path
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(child, (*path, key))


def mutate_value(value, random):
    """The same JSON with one place changed, left out, renamed or doubled."""
    value = json.loads(json.dumps(value))
    path = random.choice([path for path in places(value) if path] or [()])
    if not path:
        return nasty(random)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    match random.randrange(6):
        case 0:
            del parent[path[-1]]
        case 1 if isinstance(parent, dict):
            parent[random.choice(["x", "", "kind", f"{path[-1]}_"])] = parent.pop(path[-1])
        case 2 if isinstance(parent, list):
            parent.append(parent[path[-1]])
        case 3 if isinstance(parent[path[-1]], int | float):
            parent[path[-1]] = random.choice([-1, 1, 0]) + parent[path[-1]] * random.choice([-1, 1, 2, 10**9])
        case _:
            parent[path[-1]] = nasty(random)
    return value


def mutate_json(data, random):
    """JSON that is still JSON."""
    return json.dumps(mutate_value(json.loads(data), random), ensure_ascii=random.random() < 0.5).encode(
        errors="surrogatepass"
    )


def mutate_lines(data, random):
    """One JSON line is changed."""
    lines = data.splitlines(keepends=True)
    at = random.randrange(len(lines))
    lines[at] = mutate_json(lines[at], random) + b"\n"
    return b"".join(lines)


def mutate_safetensors(data, random):
    """Another header, or other numbers than a model can have."""
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
    match random.randrange(6):
        case 0:
            return struct.pack("<Q", random.choice([0, 1, 2**40, 2**63, 2**64 - 1, size + 8])) + data[8:]
        case 1:
            header = mutate_value(header, random)
        case 2:
            tensor = random.choice([each for name, each in header.items() if name != "__metadata__"])
            tensor["dtype"] = random.choice(["F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3"])
        case 3:
            tensor = random.choice([each for name, each in header.items() if name != "__metadata__"])
            tensor["shape"] = random.choice([tensor["shape"][::-1], [*tensor["shape"], 1], [], [0], [2**40, 2**40]])
        case 4:
            name = random.choice([name for name in header if name != "__metadata__"])
            header[f"{name}2"] = header.pop(name)
        case _:
            tensor = random.choice([each for name, each in header.items() if name != "__metadata__"])
            begin, end = tensor["data_offsets"]
            fill = random.choice([b"\xff", b"\x7f", b"\0", b"\x80"])
            body[begin:end] = fill * (end - begin)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + bytes(body)


def mutate_parquet(data, random):
    """A table of another shape, or with numbers that mean nothing."""
    table = pq.read_table(io.BytesIO(data))
    name = random.choice(table.column_names)
    at = table.column_names.index(name)
    kind, rows = table.schema.field(name).type, table.num_rows
    match random.randrange(6):
        case 0:
            table = table.drop_columns([name])
        case 1:
            table = table.rename_columns([f"{each}2" if each == name else each for each in table.column_names])
        case 2:
            table = table.set_column(at, name, pa.nulls(rows, kind))
        case 3:
            table = table.slice(0, random.randrange(rows + 1))
        case 4:
            values = [random.choice([-1, 10**6, 2**31 - 1])] * rows
            values = [[value] for value in values] if pa.types.is_list(kind) else values
            column = pa.array(values).cast(kind) if not pa.types.is_string(kind) else pa.array(["\0"] * rows)
            table = table.set_column(at, pa.field(name, kind), column)
        case _:
            table = table.set_column(at, name, pa.array(["x"] * rows))
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


KNOWING = {
    ".json": mutate_json, ".safetensors": mutate_safetensors, ".parquet": mutate_parquet, ".jsonl": mutate_lines,
}  # fmt: skip


def mutate_file(path, random):
    """Damage a file in its place, blindly or knowingly; other names for it (links) keep the old bytes."""
    data = path.read_bytes()
    changed = None
    if path.suffix in KNOWING and random.random() < 0.6:
        changed = KNOWING[path.suffix](data, random)
    path.unlink()
    path.write_bytes(mutate_bytes(data, random) if changed is None else changed)


def toml(value):
    """A value as it may stand in a recipe; None, which TOML has not, is an empty string."""
    match value:
        case None:
            return '""'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value)
        case list():
            return "[" + ", ".join(map(toml, value)) + "]"
    return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"
