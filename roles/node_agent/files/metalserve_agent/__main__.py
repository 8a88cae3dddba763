# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""metalserve-agent [--config /etc/metalserve/agent.json] [--once]"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from types import FrameType

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.exposition import generate_latest

from . import config as configuration
from ._version import VERSION
from .agent import Exporter, Source
from .host import HostSource
from .nvml import NvmlSource
from .readings import Errors
from .replicas import Memory, ReplicaSource
from .xid import XidWatcher

HOST_INTERVAL_S = 30.0
GPU_INTERVAL_S = 10.0
CONFIG_INTERVAL_S = 5.0
XID_ONCE_S = 1.0


class Agent:
    """Runs the sources that a configuration asks for, and others when it changes; GPUs are read once for all."""

    def __init__(self, path: str, version: str) -> None:
        self._path = path
        self._errors = Errors()
        self._seen = configuration.changed(path, (0, 0)) or (0, 0)
        self.config = configuration.load(path)
        self.exporter = Exporter(version, self.config.accelerator, self._errors)
        self._fixed: list[Source] = []
        self._replicas: list[Source] = []
        self._memory: Memory | None = None
        self._errors.declare("config", "invalid")
        if self.config.accelerator == "nvidia":
            gpus = NvmlSource(self._errors)
            self._memory = gpus.memory
            self._xid = XidWatcher(self._errors, gpus.bus_ids)
            self._fixed.append(Source("nvml", GPU_INTERVAL_S, gpus.read, self._errors))
            self._fixed.append(Source("xid", GPU_INTERVAL_S, self._xid.read, self._errors))
        self._plan_sources()

    def _plan_sources(self) -> None:
        host = HostSource(self._errors, self.config.expected_gpus)
        self._replicas = [Source("host", HOST_INTERVAL_S, host.read, self._errors)]
        for replica in self.config.replicas:
            source = ReplicaSource(self.config, replica, self._errors, self._memory)
            name = f"replica:{replica.name}"
            self._replicas.append(Source(name, self.config.probe_interval_s, source.read, self._errors))
        self.exporter.use([*self._fixed, *self._replicas])

    def collect_once(self) -> None:
        """Run one round of every source, one after the other; Xid events get a second to be found."""
        if self.config.accelerator == "nvidia":
            threading.Thread(target=self._xid.run, name="xid-events", daemon=True).start()
            self._xid.wait(XID_ONCE_S)
        for source in [*self._fixed, *self._replicas]:
            source.collect_once()

    def start(self) -> None:
        """Start every source in a thread of its own."""
        if self.config.accelerator == "nvidia":
            threading.Thread(target=self._xid.run, name="xid-events", daemon=True).start()
        for source in [*self._fixed, *self._replicas]:
            threading.Thread(target=source.run, name=source.name, daemon=True).start()

    def follow_config(self) -> None:
        """Take a changed configuration over without a restart; a wrong one is counted and the old one stays."""
        new = configuration.changed(self._path, self._seen)
        if new is None:
            return
        self._seen = new
        try:
            config = configuration.load(self._path)
        except configuration.ConfigError as error:
            self._errors.add("config", "invalid")
            print(f"metalserve-agent: {error}; the old settings stay", file=sys.stderr, flush=True)
            return
        for source in self._replicas:
            source.stop()
        self.config = config
        self._plan_sources()
        for source in self._replicas:
            threading.Thread(target=source.run, name=source.name, daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    """Run the agent. Exit codes: 0 ended by a signal, 2 a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="metalserve-agent", description=__doc__)
    parser.add_argument("--config", default="/etc/metalserve/agent.json", help="settings (JSON)")
    parser.add_argument("--once", action="store_true", help="print one scrape and end")
    parser.add_argument("--version", action="version", version=VERSION)
    options = parser.parse_args(arguments)
    try:
        agent = Agent(options.config, VERSION)
    except configuration.ConfigError as error:
        print(f"metalserve-agent: {error}", file=sys.stderr)
        return 2
    registry = CollectorRegistry()
    registry.register(agent.exporter)
    if options.once:
        agent.collect_once()
        sys.stdout.write(generate_latest(registry).decode("utf-8"))
        return 0
    ended = threading.Event()

    def end(_signal: int, _frame: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    agent.start()
    start_http_server(agent.config.listen_port, addr=agent.config.listen_address, registry=registry)
    while not ended.wait(CONFIG_INTERVAL_S):
        agent.follow_config()
    return 0


if __name__ == "__main__":
    sys.exit(main())
