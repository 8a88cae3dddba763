# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Reads PCI devices: sysfs attributes, ``lspci -D -nn`` and the capability lists of ``lspci -vvv``."""

from __future__ import annotations

import re
from typing import Optional

from ansible_collections.metal.serve.plugins.module_utils.hardware import values
from ansible_collections.metal.serve.plugins.module_utils.hardware.facts import PciBridge, PciDevice

_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"


def parse_sysfs(texts: dict[str, str]) -> list[PciDevice]:
    """Read by snapshot path (``files/sys/bus/pci/devices/<address>/<attribute>``), one device per address."""
    attributes: dict[str, dict[str, str]] = {}
    for path, text in texts.items():
        match = re.search(rf"/devices/({_ADDRESS})/([a-z_0-9]+)\Z", path)
        if match:
            attributes.setdefault(match.group(1), {})[match.group(2)] = text.strip()
    return [_device(address, attributes[address]) for address in sorted(attributes)]


def _device(address: str, attributes: dict[str, str]) -> PciDevice:
    def hexadecimal(name: str, digits: int) -> Optional[str]:
        match = re.match(r"\A0x([0-9a-fA-F]{1,8})\Z", attributes.get(name, ""))
        return match.group(1).lower().zfill(digits) if match else None

    node = values.integer(attributes.get("numa_node"))
    return PciDevice(
        address=address,
        vendor=hexadecimal("vendor", 4),
        device=hexadecimal("device", 4),
        pci_class=hexadecimal("class", 6),
        numa_node=node if node is not None and node >= 0 else None,
        local_cpus=attributes.get("local_cpulist"),
        link_width_current=_width(attributes.get("current_link_width")),
        link_width_max=_width(attributes.get("max_link_width")),
        link_speed_current=_speed(attributes.get("current_link_speed")),
        link_speed_max=_speed(attributes.get("max_link_speed")),
        bar_sizes=_bars(attributes.get("resource", "")),
        driver=attributes.get("driver"),
    )


def _width(text: Optional[str]) -> Optional[int]:
    """Return lanes; sysfs prints 63 or 255 for a link that is down or does not say."""
    lanes = values.integer(text)
    return lanes if lanes is not None and 0 < lanes <= 32 else None


def _speed(text: Optional[str]) -> Optional[float]:
    match = re.match(r"\A(\d{1,3}(?:\.\d)?) GT/s", text or "")
    return float(match.group(1)) if match else None


def _bars(text: str) -> list[int]:
    """Return the sizes of the six standard windows of sysfs' ``resource``; trailing windows that are not there are
    cut off.
    """
    sizes = []
    for line in text.splitlines()[:6]:
        match = re.match(r"\A0x([0-9a-fA-F]{1,16}) 0x([0-9a-fA-F]{1,16}) 0x[0-9a-fA-F]{1,16}\Z", line.strip())
        if match is None:
            break
        start, end = int(match.group(1), 16), int(match.group(2), 16)
        sizes.append(end - start + 1 if end > start else 0)
    while sizes and sizes[-1] == 0:
        sizes.pop()
    return sizes


def parse_lspci(text: str) -> list[PciDevice]:
    """Read ``lspci -D -nn``: address, class, vendor and device of each function."""
    found = []
    for line in text.splitlines():
        match = re.match(r"\A((?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])\s.*?\[([0-9a-f]{4})\]:", line)
        ids = re.findall(r"\[([0-9a-f]{4}):([0-9a-f]{4})\]", line)
        if match and ids:
            address = match.group(1) if match.group(1).count(":") == 2 else f"0000:{match.group(1)}"
            found.append(PciDevice(address, ids[-1][0], ids[-1][1], f"{match.group(2)}00"))
    return found


def is_gpu(device: PciDevice) -> bool:
    """Tell whether a function is an NVIDIA GPU (display or 3D controller)."""
    return device.vendor == "10de" and (device.pci_class or "").startswith(("0300", "0302"))


def is_nvswitch(device: PciDevice) -> bool:
    """Tell whether a function is an NVSwitch (NVIDIA, bridge of the class "other")."""
    return device.vendor == "10de" and (device.pci_class or "").startswith("0680")


def parse_bridges(text: str) -> list[PciBridge]:
    """Read the blocks of ``lspci -D -vvv`` that are PCI bridges."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        lines = block.strip("\n").splitlines()
        match = re.match(rf"\A({_ADDRESS})\s+(PCI bridge.*)\Z", lines[0]) if lines else None
        if match is None:
            continue
        bridge = PciBridge(match.group(1), match.group(2)[:200])
        detailed = False
        for line in lines[1:]:
            words = line.strip()
            bus = re.match(r"\ABus: primary=\w+, secondary=(\w+), subordinate=(\w+)", words)
            if bus:
                bridge.bus = f"{bus.group(1)}-{bus.group(2)}"
            elif words.startswith("Prefetchable memory behind bridge:"):
                bridge.prefetchable_window = words.partition(":")[2].strip()
            elif words.startswith("Capabilities:"):
                # Without root's rights lspci prints "<access denied>": then nothing is known about ACS.
                detailed = "access denied" not in words
            elif words.startswith("ACSCtl:"):
                flags = re.findall(r"([A-Za-z]+)([+-])", words.partition(":")[2])
                bridge.acs = {name: sign == "+" for name, sign in flags}
        if bridge.acs is None and detailed:
            bridge.acs = {}
        found.append(bridge)
    return found
