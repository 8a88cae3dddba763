# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads the kernel's log: Xids, other faults of the driver, memory windows without a place."""

from __future__ import annotations

import re
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import BarMessage, KernelLog, Xid

MAX_XIDS = 500
MAX_LINES = 200

_XID = re.compile(r"NVRM:\s*Xid\s*\(PCI:([0-9A-Fa-f:.]+)\):\s*(\d{1,4}),?\s*(.*)")
_FAULT = re.compile(
    r"NVRM:.*(?:API mismatch|fallen off the bus|GPU.*lost|No NVIDIA GPU found|failed|error|fault|timeout)",
    re.IGNORECASE,
)
_BAR = re.compile(
    r"\b(?P<driver>pci|pcieport|nvidia|vfio-pci|pci_bus)\s+(?P<device>[0-9a-f]{4,8}:[0-9a-f]{2}(?::[0-9a-f]{2}\.[0-7])?):?\s+"
    r"(?P<text>(?:BAR|bridge window).*?(?:no space|can't assign|failed to assign|not assigned).*)",
    re.IGNORECASE,
)


def parse_kernel_log(text: str, source: Optional[str] = None) -> KernelLog:
    """Read dmesg's or the journal's kernel lines. The newest are kept where there are very many."""
    xids: list[Xid] = []
    nvrm: list[str] = []
    bars: list[BarMessage] = []
    for line in text.splitlines():
        if "NVRM" not in line and "no space" not in line and "assign" not in line:
            continue
        cut = line[:1000]
        xid = _XID.search(cut)
        window = None if xid else _BAR.search(cut)
        if xid:
            xids.append(Xid(_time(cut[: xid.start()]), _pci(xid.group(1)), int(xid.group(2)), xid.group(3).strip()))
        elif window:
            bars.append(BarMessage(window["device"], window["driver"].lower(), window["text"].strip()))
        elif _FAULT.search(cut):
            nvrm.append(cut.strip())
    return KernelLog(source=source, xids=xids[-MAX_XIDS:], nvrm=nvrm[-MAX_LINES:], bar_messages=bars[-MAX_LINES:])


def _time(prefix: str) -> Optional[str]:
    """Return the time in front of a line: ``[ 12.3]``, ``[Mon Nov 30 …]``, ISO or the journal's short form."""
    bracket = re.match(r"\A\s*(?:<\d+>)?\[\s*([^\]]+?)\s*\]", prefix)
    if bracket:
        return bracket.group(1)
    stamp = re.match(r"\A\s*(\d{4}-\d\d-\d\dT\S+|[A-Z][a-z]{2}\s+\d{1,2}\s+\d\d:\d\d:\d\d)", prefix)
    return stamp.group(1) if stamp else None


def _pci(text: str) -> str:
    """Return the address without function, as nvidia and sysfs both know it (``0000:3b:00``)."""
    return text.lower().split(".")[0]
