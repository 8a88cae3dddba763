# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""nginx's configuration as nginx -T dumps it."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import find_directives
from ansible_collections.metal.serve.plugins.module_utils.hardware.parse_nginx import (
    BadConfig,
    failures,
    parse_config,
    parse_version,
    split_dump,
)

DUMP = """# configuration file /etc/nginx/nginx.conf:
user www-data; # why
http {
    include conf.d/*.conf;
    log_format x '{"a":"$status"}' ";" 'it''s';
}

# configuration file /etc/nginx/conf.d/pool.conf:
upstream short {
    zone short 64k;
    least_conn;
    server 10.0.0.11:8100 max_fails=3 fail_timeout=30s; # node-a
    keepalive 32;
}
server {
    listen 443 ssl;
    location ~ "^/v1/(chat|completions){0,1}$" { proxy_pass http://short; proxy_set_header Connection ""; }
    access_by_lua_block {
        -- a brace } in a comment
        local s = "}" .. '}' .. [[ } ]]
        if s then ngx.say("{") end
    }
    set $a "${b}c";
}
"""


def test_includes_stand_in_their_places() -> None:
    config = parse_config(split_dump(DUMP))
    assert [one.name for one in config] == ["user", "http"]
    http = config[1]
    assert [one.name for one in http.block or []] == ["upstream", "server", "log_format"]
    upstream = http.find("upstream")[0]
    assert upstream.args == ["short"]
    assert [one.name for one in upstream.block or []] == ["zone", "least_conn", "server", "keepalive"]
    server = upstream.child("server")
    assert server is not None
    assert server.args == ["10.0.0.11:8100", "max_fails=3", "fail_timeout=30s"]
    assert (server.file, server.line) == ("/etc/nginx/conf.d/pool.conf", 4)
    header = find_directives(config, "proxy_set_header")[0]
    assert header.args == ["Connection", ""]
    assert find_directives(config, "set")[0].args == ["$a", "${b}c"]


def test_lua_is_one_argument() -> None:
    (block,) = find_directives(parse_config(split_dump(DUMP)), "access_by_lua_block")
    assert block.args[0].endswith('if s then ngx.say("{") end')
    assert block.block is None


def test_a_file_alone_is_a_configuration() -> None:
    (events,) = parse_config(split_dump("events { worker_connections 1024; }"))
    assert events.find("worker_connections")[0].args == ["1024"]


@pytest.mark.parametrize(
    "text",
    ["http {", "}", "a b", "a 'b;", "; x", "{ }", "x_by_lua_block { a", "x_by_lua_block { [[ }", "a {" * 100,
     "# configuration file /a:\ninclude /b;\n# configuration file /b:\ninclude /a;\n"],
)  # fmt: skip
def test_what_is_no_configuration(text: str) -> None:
    with pytest.raises(BadConfig):
        parse_config(split_dump(text))


@given(st.text(alphabet="ab{};\"'\\\n #$[]-_", max_size=80))
@settings(max_examples=200)
def test_soup_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(BadConfig):
        parse_config(split_dump(text))


@given(st.text(alphabet="ab{}\"'[]=-\n", max_size=60))
@settings(max_examples=100)
def test_lua_soup_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(BadConfig):
        parse_config({"/f": "x_by_lua_block {" + text + "}"})


def test_version() -> None:
    arguments = "--with-http_ssl_module --with-http_v2_module --with-stream=dynamic"
    text = f"nginx version: nginx/1.22.1\nconfigure arguments: {arguments}\n"
    assert parse_version(text) == ("1.22.1", ["http_ssl", "http_v2"])


def test_failures_of_an_access_log() -> None:
    rows = [json.dumps({"status": status, "rt": 1.0}) for status in (200, 504, 0, 302, 499)]
    lines = [
        *rows,
        '10.0.0.1 - - [x] "GET / HTTP/1.1" 502 157',
        '10.0.0.1 - - [x] "GET / HTTP/1.1" 200 157',
        "",
        '{"cut',
    ]
    kept = failures("\n".join(lines), 10)
    assert [json.loads(line)["status"] for line in kept[:3]] == [504, 0, 499]
    assert kept[3].endswith("502 157")
    assert len(kept) == 4
