# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What ``body.lua`` reads of a body without decoding it, against Python's json; in one nginx that only runs Lua and ends."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.gateway import harness

LUA = harness.ROOT / "roles" / "gateway" / "files" / "lua"
WANTED = ("model", "stream", "max_tokens", "max_completion_tokens", "max_output_tokens")
PER_TOKEN = {"letters": 4.6, "digits": 0.95, "punctuation": 1.2, "utf8": 2.9, "escaped": 5.8, "dense": 1.25}
CONF = """
pid {folder}/nginx.pid; error_log stderr error; include /etc/nginx/modules-enabled/*.conf;
daemon off; master_process off; events {{}}
http {{
    lua_package_path "{lua}/?.lua;;";
    init_worker_by_lua_block {{
        local body, cjson = require "metalserve.body", require "cjson"
        local per_token = cjson.decode('{per_token}')
        local file, out = io.open("{folder}/bodies", "rb"), io.open("{folder}/found", "wb")
        while true do
            local size = file:read("*n")
            if not size then break end
            file:read(1)
            local text = file:read(size)
            local found = body.keys(text)
            found.tokens = body.tokens(text, per_token)
            out:write(cjson.encode(found), "\\n")
        end
        out:close()
        os.exit(0)
    }}
}}
"""


def found(bodies: list[bytes]) -> list[dict[str, Any]]:
    """Return keys and tokens of each body."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "bodies").write_bytes(b"".join(b"%d %b" % (len(body), body) for body in bodies))
        conf = CONF.format(folder=folder, lua=LUA, per_token=json.dumps(PER_TOKEN))
        (folder / "nginx.conf").write_text(conf, encoding="utf-8")
        command = [*harness.NGINX, "-c", str(folder / "nginx.conf")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return [json.loads(line) for line in (folder / "found").read_text(encoding="utf-8").splitlines()]


def value(chance: random.Random, depth: int = 0) -> Any:
    """Return something that JSON can say, with what could mislead a reader that does not decode."""
    texts = ["", "model", 'say "model": "x"', "back\\", '\\\\"', "\u4e2d\u6587\n\t", "a,b:{[", "stream", "m" * 1100]
    plain = [0, 64, 9999999, True, False, None, 1.5, -3, 1e30]
    kind = chance.randrange(4 if depth < 3 else 2)
    if kind == 0:
        return chance.choice(texts)
    if kind == 1:
        return chance.choice(plain)
    if kind == 2:
        return [value(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice([*WANTED, *texts[:6]]): value(chance, depth + 1) for _ in range(chance.randrange(4))}


def documents(count: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yield objects and their text, written in different ways."""
    chance = random.Random(5)
    names = [*WANTED, "prompt", "messages", "metadata", 'x"y', "a\\", "\u6a21\u578b", ""]
    for _ in range(count):
        asked = {name: value(chance) for name in chance.sample(names, chance.randrange(len(names)))}
        if chance.random() < 0.6:
            asked["model"] = chance.choice(["m1", "lab/x", 'q"uote', "sl\\ash", "\u4e2d", "\U0001f600"])
        text = json.dumps(
            asked,
            ensure_ascii=chance.random() < 0.5,
            indent=chance.choice([None, None, 2]),
            separators=chance.choice([None, (",", ":"), (" , ", " : ")]),
        )
        yield asked, text.encode()


def expected(asked: dict[str, Any]) -> dict[str, Any]:
    """Return what is to be found in an object."""
    counts = {
        "model": lambda said: isinstance(said, str) and len(said) < 1000,
        "stream": lambda said: said is True,
    }

    def whole(said: Any) -> bool:
        return type(said) is int and said >= 0

    return {name: asked[name] for name in WANTED if counts.get(name, whole)(asked.get(name))}


def test_top_level_keys_are_those_of_the_json() -> None:
    cases = list(documents(1500))
    for (asked, text), got in zip(cases, found([text for _, text in cases])):
        assert {name: got[name] for name in WANTED if got.get(name, False) is not False} == expected(asked), text


def test_the_last_of_two_equal_keys_counts() -> None:
    (got,) = found([b'{"model":"a","max_tokens":1, "model" :\t"b","max_tokens":2}'])
    assert (got["model"], got["max_tokens"]) == ("b", 2)


def test_what_is_no_object_has_no_keys_and_cut_bodies_do_no_harm() -> None:
    text = b'{"prompt":"a\\"b","metadata":{"x":[1,2]},"max_tokens":12345,"model":"m"}'
    cuts = [text[:length] for length in range(len(text))]
    odd = [b"", b"null", b'["model","x"]', b'"model":"x"', b"[" * 5000, b'"' + b"\\" * 999, b"\xff" * 99]
    results = found([*cuts, *odd])
    assert {got.get("model") for got in results} == {None, "m"}
    assert {got.get("max_tokens") for got in results} == {None, 12345}


@pytest.mark.parametrize("length", [8191, 8192, 8193, 200_000])
def test_a_sample_tells_as_much_as_the_whole(length: int) -> None:
    sentence = "The quick brown fox, 42 years old, jumps over it. "
    short, long = found([(sentence * 20).encode(), (sentence * (length // len(sentence) + 1))[:length].encode()])
    assert long["tokens"] / length == pytest.approx(short["tokens"] / 1000, rel=0.03)


def test_an_escape_counts_as_its_character() -> None:
    text = "\u8fd9\u662f\u4e00\u6bb5\u4e2d\u6587\u3002" * 60
    plain, escaped = found([text.encode(), json.dumps(text)[1:-1].encode()])
    assert plain["tokens"] == pytest.approx(len(text) * 3 / PER_TOKEN["utf8"], abs=1)
    assert escaped["tokens"] == pytest.approx(len(text) * 6 / PER_TOKEN["escaped"], abs=1)
