# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Xid events: from the kernel's log where it can be read, else from NVML.

The log has all since boot, so a restart of the agent loses none; NVML tells only what happens while it is asked.

DCGM's gauge holds only the last code; a second Xid of the same code is invisible there. Here they are counted.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections import Counter
from typing import Callable

import pynvml

from .nvml import normal_bus_id, reason_of
from .readings import Errors, Reading

SOURCE = "xid"
KMSG = "/dev/kmsg"
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


def parse_kmsg(record: str) -> tuple[str, int] | None:
    """Return bus id and code of an Xid line of the kernel log, None for any other line."""
    match = _XID.search(record)
    return (normal_bus_id(match.group(1)), int(match.group(2))) if match else None


class XidWatcher:
    """Counts Xid events by GPU in a thread of its own. ``bus_ids`` tells which GPUs there are, to begin at zero."""

    def __init__(self, errors: Errors, bus_ids: Callable[[], tuple[str, ...]], kmsg: str = KMSG) -> None:
        self._errors = errors
        self._bus_ids = bus_ids
        self._kmsg = kmsg
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._last: dict[str, int] = {}
        self._source = ""
        self._stop = threading.Event()
        self._reading = threading.Event()

    def read(self) -> list[Reading]:
        """Return the counts so far. No source (neither kernel log nor NVML): no readings at all."""
        with self._lock:
            if not self._source:
                return []
            known = {*self._bus_ids(), *self._counts}
            found = [Reading("metalserve_gpu_xid_source_info", (self._source,), 1)]
            found += [Reading("metalserve_gpu_xid_events_total", (bus,), self._counts[bus]) for bus in sorted(known)]
            found += [Reading("metalserve_gpu_xid_last", (bus,), code) for bus, code in sorted(self._last.items())]
            return found

    def run(self) -> None:
        """Follow the events until :meth:`stop`; for a daemon thread."""
        try:
            handle = os.open(self._kmsg, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self._follow_nvml()
            return
        try:
            self._follow_kernel_log(handle)
        finally:
            os.close(handle)

    def wait(self, seconds: float) -> None:
        """Return once the past is read (or NVML listens), after ``seconds`` at the latest."""
        self._reading.wait(seconds)

    def stop(self) -> None:
        """End :meth:`run` within a second."""
        self._stop.set()

    def count(self, bus_id: str, code: int) -> None:
        """Count one event."""
        with self._lock:
            self._counts[bus_id] += 1
            self._last[bus_id] = code

    def _set_source(self, source: str) -> None:
        with self._lock:
            self._source = source
        if source:
            self._reading.set()

    def _follow_kernel_log(self, handle: int) -> None:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        while not self._stop.is_set():
            try:
                record = os.read(handle, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                self._set_source("kernel_log")  # the past is read: the counts are whole from here on
                poller.poll(1000)
                continue
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next read goes on
            except OSError:
                self._errors.add(SOURCE, "kernel_log")
                self._follow_nvml()
                return
            if not record:  # a plain file in a test: at its end
                self._set_source("kernel_log")
                self._stop.wait(0.2)
                continue
            for line in record.splitlines():
                event = parse_kmsg(line)
                if event:
                    self.count(*event)

    def _follow_nvml(self) -> None:
        while not self._stop.is_set():
            try:
                self._wait_for_events()
            except pynvml.NVMLError as error:
                self._errors.add(SOURCE, reason_of(error))
                self._set_source("")
            self._stop.wait(10)

    def _wait_for_events(self) -> None:
        pynvml.nvmlInit()
        events = pynvml.nvmlEventSetCreate()
        try:
            for index in range(pynvml.nvmlDeviceGetCount()):
                device = pynvml.nvmlDeviceGetHandleByIndex(index)
                pynvml.nvmlDeviceRegisterEvents(device, pynvml.nvmlEventTypeXidCriticalError, events)
            self._set_source("nvml")
            while not self._stop.is_set():
                try:
                    event = pynvml.nvmlEventSetWait_v2(events, 1000)
                except pynvml.NVMLError_Timeout:
                    continue
                bus_id = pynvml.nvmlDeviceGetPciInfo(event.device).busId
                text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
                self.count(normal_bus_id(text), int(event.eventData))
        finally:
            pynvml.nvmlEventSetFree(events)
