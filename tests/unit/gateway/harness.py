# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The role's own templates and variables, rendered as Ansible does it, and served by a real nginx."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from ansible_collections.metal.serve.plugins.module_utils.gateway import tree

ROOT = Path(__file__).parents[3]
KEYS = [{"name": "finance", "key": "sk-finance-0123456789"}, {"name": "support", "key": "sk-sup.port/98+7=~"}]
KEY = KEYS[0]["key"]
ENGINE_KEY = "engine-secret-1234"
TIMES = {
    "longest_stream_s": 300,
    "drain_s": 300,
    "engine_keepalive_s": 180,
    "gateway_upstream_keepalive_s": 120,
    "client_keepalive_s": 180,
    "gateway_connect_s": 1,
    "gateway_send_s": 30,
    "gateway_read_s": 60,
    "longest_silent_prefill_s": 9,
    "wedged_after_s": 14,
    "probe_interval_s": 1.25,
    "probe_timeout_s": 1.0,
}
QUICK = {**TIMES, "probe_interval_s": 0.5, "probe_timeout_s": 0.4, "wedged_after_s": 2}
"""The same with a checker in a hurry."""

NGINX = os.environ.get("METALSERVE_TEST_NGINX", "nginx").split()
"""The nginx under test; another distribution's may be named, such as ``chroot /srv/trixie nginx``."""

NGINX_VERSION = (
    subprocess.run([*NGINX, "-v"], capture_output=True, text=True, check=True).stderr.split("/")[1].split()[0]
)


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def pool(name: str, ports: list[int], max_model_len: int = 2048, in_flight: int = 40, **more: Any) -> dict[str, Any]:
    """Return a PoolPlan with one replica per port."""
    return {
        "pool": name,
        "model": "smollm2",
        "served_name": "smollm2",
        "engine": "vllm",
        "replicas": [
            {"replica": f"{name}-0", "host": f"node-{number}", "address": "127.0.0.1", "port": port}
            for number, port in enumerate(ports)
        ],
        "max_model_len": max_model_len,
        "body_limit_bytes": 1048576,
        "times": TIMES,
        "admission": {"max_in_flight": in_flight, "queue": in_flight // 4},
        **more,
    }


@lru_cache(maxsize=1)
def renderer() -> subprocess.Popen[str]:
    """Return the one process that renders; loading Ansible takes a second. It ends with its input."""
    script = str(Path(__file__).with_name("rendering.py"))
    return subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def render(variables: Mapping[str, Any]) -> tree.Tree:
    """Return the tree that the role would write, without certificates. Raises AssertionError with Ansible's words."""
    known = {
        "inventory_hostname": "gateway-a",
        "groups": {"gateways": ["gateway-a"]},
        "metalserve_api_keys": KEYS,
        "metalserve_engine_api_key": ENGINE_KEY,
        "__gateway_nginx": {"version": NGINX_VERSION, "lua_fits": True},
        **variables,
    }
    process = renderer()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(known) + "\n")
    process.stdin.flush()
    rendered = json.loads(process.stdout.readline())
    assert "error" not in rendered, rendered["error"]
    files = {name: text.encode() for name, text in {**rendered["files"], **rendered["secret_files"]}.items()}
    main = (ROOT / "templates" / "gateway" / "nginx.conf.j2").read_bytes()
    return tree.Tree(main=main, files=files, secrets=frozenset(rendered["secret_files"]))


@dataclass
class Gateway:
    """A running nginx with this role's configuration."""

    folder: Path
    https: int
    http: int
    admin: int
    inner: int
    process: subprocess.Popen[bytes]
    context: ssl.SSLContext = field(repr=False)
    mode: str = "lua"

    @contextmanager
    def connection(self, timeout: float = 60) -> Iterator[HTTPConnection]:
        """Yield a connection over TLS."""
        with closing(HTTPSConnection("127.0.0.1", self.https, context=self.context, timeout=timeout)) as client:
            yield client

    def ask(
        self,
        path: str = "/v1/completions",
        body: Any = None,
        key: str = KEY,
        method: str = "",
        **headers: str,
    ) -> tuple[HTTPResponse, Any]:
        """Send one request; return the answer and its body, from JSON where it is JSON."""
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key:
            named.setdefault("Authorization", f"Bearer {key}")
        with self.connection() as client:
            client.request(method or ("GET" if data is None else "POST"), path, body=data, headers=named)
            answer = client.getresponse()
            raw = answer.read()
        try:
            return answer, json.loads(raw)
        except ValueError:
            return answer, raw.decode("utf-8", "replace")

    def workers(self) -> list[str]:
        """Return the process ids of the workers."""
        command = ["pgrep", "-P", str(self.process.pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()

    def log(self) -> list[dict[str, Any]]:
        """Return the rows of the access log."""
        text = (self.folder / "log" / "gateway-access.log").read_text(encoding="utf-8")
        # The last line may be half written.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def row(self, request_id: str) -> dict[str, Any]:
        """Return the row of one request; it is written a moment after the answer."""
        for _ in range(50):
            for row in self.log():
                if row["id"] == request_id:
                    return row
            time.sleep(0.02)
        raise AssertionError(f"no row for {request_id}")

    def errors(self) -> str:
        """Return the error log."""
        return (self.folder / "log" / "gateway-error.log").read_text(encoding="utf-8")


def certificate(folder: Path) -> None:
    """Make a certificate for localhost and 127.0.0.1 in ``folder``."""
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
        "-addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout server.key -out server.crt"
    )
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)


@contextmanager
def standins(ports: list[int]) -> Iterator[None]:
    """Run a stand-in engine on each port."""
    process = subprocess.Popen([sys.executable, str(Path(__file__).with_name("standin.py")), *map(str, ports)])
    try:
        for port in ports:
            wait_for(port)
        yield
    finally:
        process.kill()
        process.wait()


class Engines:
    """One stand-in process per port, so that each can be stopped and killed."""

    def __init__(self, ports: list[int]) -> None:
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        for port in ports:
            self.start(port)
        for port in ports:
            wait_for(port)

    def start(self, port: int) -> None:
        """Start the engine of a port."""
        script = Path(__file__).with_name("standin.py")
        self.running[port] = subprocess.Popen([sys.executable, str(script), str(port)])

    def signal(self, port: int, number: signal.Signals) -> None:
        """Send a signal to the engine of a port."""
        self.running[port].send_signal(number)

    def stop(self) -> None:
        """End all."""
        for process in self.running.values():
            process.kill()
            process.wait()


UNKEPT = {"gateway_rotation_file": f"{tempfile.gettempdir()}/no-such-folder/rotation.json"}
"""For a gateway that is not to keep its rotation: its file can never be written."""


@contextmanager
def gateway(folder: Path, pools: list[dict[str, Any]], **variables: Any) -> Iterator[Gateway]:
    """Serve ``pools`` with the role's configuration from ``folder``."""
    https, http, admin, inner = free_ports(4)
    (folder / "log").mkdir()
    tls = folder / "made"
    tls.mkdir()
    certificate(tls)
    wanted = render(
        {
            "gateway_pools": pools,
            "gateway_https_port": https,
            "gateway_http_port": http,
            "gateway_admin_port": admin,
            "gateway_inner_port": inner,
            "gateway_listen_address": "127.0.0.1",
            "gateway_log_dir": str(folder / "log"),
            "gateway_log_flush_s": 0,
            "__gateway_pid_file": str(folder / "nginx.pid"),
            **variables,
        }
    )
    copied = {f"tls/{name}": (tls / name).read_bytes() for name in ("server.crt", "server.key")}
    wanted = tree.Tree(wanted.main, {**wanted.files, **copied}, wanted.secrets, frozenset(copied))
    staged = tree.stage(str(folder), wanted)
    # Workers of a root nginx run as another user and read what the master has opened; the logs' folder is enough.
    os.chmod(folder, 0o755)
    process = subprocess.Popen([*NGINX, "-c", f"{staged}/nginx.conf", "-g", "daemon off;"], stderr=subprocess.PIPE)
    try:
        wait_for(admin, process)
        context = ssl.create_default_context(cafile=str(tls / "server.crt"))
        yield Gateway(folder, https, http, admin, inner, process, context, str(variables.get("gateway_mode", "lua")))
    finally:
        process.terminate()
        process.wait(10)


def wait_for(port: int, process: subprocess.Popen[bytes] | None = None) -> None:
    """Wait until something listens on a local port; fail with nginx's words where it ends instead."""
    for _ in range(250):
        with closing(socket.socket()) as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        if process is not None and process.poll() is not None:
            raise AssertionError((process.stderr.read() if process.stderr else b"").decode())
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on port {port}")


def admin(gateway: Gateway, path: str, wish: dict[str, Any] | None = None) -> tuple[int, Any]:
    data = None if wish is None else json.dumps(wish).encode()
    try:
        with urlopen(Request(f"http://127.0.0.1:{gateway.admin}{path}", data), timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def replicas(gateway: Gateway) -> dict[str, dict[str, Any]]:
    return {one["replica"]: one for pool in admin(gateway, "/state")[1]["pools"] for one in pool["replicas"]}


def turn(gateway: Gateway, replica: str, wanted_in: bool) -> None:
    status, _ = admin(gateway, "/rotation", {"replica": replica, "in": wanted_in, "by": "test@here", "run": "r1"})
    assert status == 200


def until(condition: Any, seconds: float = 8) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - begin
