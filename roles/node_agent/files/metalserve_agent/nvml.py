# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""GPU readings through NVML (pynvml). One failing read costs its own sample and is counted; it never becomes a zero.

Each read is one function handle -> readings. "Not supported" is an answer (no sample, listed as unsupported), all else
that NVML says is an error. Reads that newer drivers renamed are tried under both names.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, Callable

import pynvml

from .readings import Errors, Reading

SOURCE = "nvml"
MEMORY_MAX_AGE_S = 30.0

THROTTLE_REASONS = (
    (0x1, "idle"),
    (0x2, "applications_clocks"),
    (0x4, "sw_power_cap"),
    (0x8, "hw_slowdown"),
    (0x10, "sync_boost"),
    (0x20, "sw_thermal"),
    (0x40, "hw_thermal"),
    (0x80, "hw_power_brake"),
    (0x100, "display_clocks"),
)
_ECC = (
    ("corrected", "volatile", 0, 0),
    ("uncorrected", "volatile", 1, 0),
    ("corrected", "aggregate", 0, 1),
    ("uncorrected", "aggregate", 1, 1),
)
_NVLINK_LINKS = 18
_NVLINK_ERRORS = ((0, "replay"), (1, "recovery"), (2, "crc_flit"), (3, "crc_data"))

Labels = tuple[str, str]
Read = Callable[[Any, Labels], Iterable[Reading]]


class NvmlSource:
    """Reads all GPUs of the node. Initializes NVML when first needed and again after it was lost."""

    def __init__(self, errors: Errors) -> None:
        self._errors = errors
        self._initialized = False
        self._lock = threading.Lock()
        self._memory: dict[str, tuple[float, float]] = {}
        self._memory_at = 0.0
        self._bus_ids: tuple[str, ...] = ()

    def read(self) -> list[Reading]:
        """Return the readings of one round. An NVML that does not start gives none and is counted."""
        try:
            if not self._initialized:
                pynvml.nvmlInit()
                self._initialized = True
            count = pynvml.nvmlDeviceGetCount()
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError as error:
            self._errors.add(SOURCE, reason_of(error))
            self._forget()
            return []
        found: list[Reading] = []
        unsupported: Counter[str] = Counter()
        memory: dict[str, tuple[float, float]] = {}
        bus_ids: list[str] = []
        answering = 0
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                labels = (str(index), _text(pynvml.nvmlDeviceGetUUID(handle)))
                bus_id = normal_bus_id(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId))
                name = _text(pynvml.nvmlDeviceGetName(handle))
                pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
            except pynvml.NVMLError as error:
                self._errors.add(SOURCE, reason_of(error))
                continue
            answering += 1
            bus_ids.append(bus_id)
            found.append(Reading("metalserve_gpu_info", (*labels, name, bus_id, driver), 1))
            for read_name, read in READS:
                try:
                    values = list(read(handle, labels))
                except pynvml.NVMLError_NotSupported:
                    unsupported[read_name] += 1
                    continue
                except pynvml.NVMLError as error:
                    self._errors.add(SOURCE, reason_of(error))
                    continue
                found.extend(values)
                if read_name == "memory":
                    by_name = {value.name: value.value for value in values}
                    memory[labels[1]] = (
                        by_name["metalserve_gpu_memory_used_bytes"],
                        by_name["metalserve_gpu_memory_total_bytes"],
                    )
        found.append(Reading("metalserve_gpus", (), answering))
        found.extend(
            Reading("metalserve_agent_unsupported_reads", (SOURCE, name), devices)
            for name, devices in unsupported.items()
        )
        with self._lock:
            self._memory = memory
            self._memory_at = time.monotonic()
            self._bus_ids = tuple(bus_ids)
        return found

    def memory(self) -> dict[str, tuple[float, float]]:
        """Return used and total frame buffer in bytes by UUID of the last round; nothing once it is 30 seconds old."""
        with self._lock:
            return dict(self._memory) if time.monotonic() - self._memory_at < MEMORY_MAX_AGE_S else {}

    def bus_ids(self) -> tuple[str, ...]:
        """Return the bus ids (``0000:00:06``) of the GPUs that answered in the last round."""
        with self._lock:
            return self._bus_ids

    def _forget(self) -> None:
        if self._initialized:
            self._initialized = False
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                self._errors.add(SOURCE, reason_of(error))
        with self._lock:
            self._memory = {}


def reason_of(error: Any) -> str:
    """Return a short fixed word for an NVML error: its return code's name in lower case (``gpu_is_lost``)."""
    code = getattr(error, "value", None)
    for name in dir(pynvml):
        if name.startswith("NVML_ERROR_") and getattr(pynvml, name) == code:
            return name[len("NVML_ERROR_") :].lower()
    return "unknown"


def normal_bus_id(bus_id: str) -> str:
    """Return ``00000000:00:06.0`` (NVML) and ``0000:00:06`` (kernel log) in one form: ``0000:00:06``, lower case."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest.partition('.')[0]}" if rest else bus_id.lower()


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _memory(handle: Any, labels: Labels) -> Iterable[Reading]:
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        yield Reading("metalserve_gpu_memory_reserved_bytes", labels, info.reserved)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_ArgumentVersionMismatch):
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)  # before driver 510: used includes the reserve
    yield Reading("metalserve_gpu_memory_total_bytes", labels, info.total)
    yield Reading("metalserve_gpu_memory_used_bytes", labels, info.used)
    yield Reading("metalserve_gpu_memory_free_bytes", labels, info.free)


def _bar1(handle: Any, labels: Labels) -> Iterable[Reading]:
    info = pynvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    yield Reading("metalserve_gpu_bar1_total_bytes", labels, info.bar1Total)
    yield Reading("metalserve_gpu_bar1_used_bytes", labels, info.bar1Used)


def _utilization(handle: Any, labels: Labels) -> Iterable[Reading]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    yield Reading("metalserve_gpu_utilization_ratio", labels, rates.gpu / 100)
    yield Reading("metalserve_gpu_memory_activity_ratio", labels, rates.memory / 100)


def _throttle(handle: Any, labels: Labels) -> Iterable[Reading]:
    try:
        mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError_FunctionNotFound:
        mask = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)  # its name before driver 535
    for bit, reason in THROTTLE_REASONS:
        yield Reading("metalserve_gpu_throttle_active", (*labels, reason), 1 if mask & bit else 0)


def _temperature(handle: Any, labels: Labels) -> Iterable[Reading]:
    value = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    yield Reading("metalserve_gpu_temperature_celsius", labels, value)


def _power(handle: Any, labels: Labels) -> Iterable[Reading]:
    yield Reading("metalserve_gpu_power_watts", labels, pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)


def _power_limit(handle: Any, labels: Labels) -> Iterable[Reading]:
    yield Reading("metalserve_gpu_power_limit_watts", labels, pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)


def _energy(handle: Any, labels: Labels) -> Iterable[Reading]:
    value = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    yield Reading("metalserve_gpu_energy_joules_total", labels, value)


def _ecc_mode(handle: Any, labels: Labels) -> Iterable[Reading]:
    yield Reading("metalserve_gpu_ecc_enabled", labels, pynvml.nvmlDeviceGetEccMode(handle)[0])


def _ecc_errors(handle: Any, labels: Labels) -> Iterable[Reading]:
    for kind, period, error_type, counter_type in _ECC:
        value = pynvml.nvmlDeviceGetTotalEccErrors(handle, error_type, counter_type)
        yield Reading("metalserve_gpu_ecc_errors_total", (*labels, kind, period), value)


def _row_remap(handle: Any, labels: Labels) -> Iterable[Reading]:
    correctable, uncorrectable, pending, failure = pynvml.nvmlDeviceGetRemappedRows(handle)
    yield Reading("metalserve_gpu_remapped_rows", (*labels, "correctable"), correctable)
    yield Reading("metalserve_gpu_remapped_rows", (*labels, "uncorrectable"), uncorrectable)
    yield Reading("metalserve_gpu_row_remap_pending", labels, pending)
    yield Reading("metalserve_gpu_row_remap_failure", labels, failure)


def _pcie(handle: Any, labels: Labels) -> Iterable[Reading]:
    yield Reading("metalserve_gpu_pcie_replays_total", labels, pynvml.nvmlDeviceGetPcieReplayCounter(handle))


def _nvlink(handle: Any, labels: Labels) -> Iterable[Reading]:
    for link in range(_NVLINK_LINKS):
        try:
            active = pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            if link == 0:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED) from None
            return  # the links are numbered without gaps: this GPU has no more
        yield Reading("metalserve_gpu_nvlink_active", (*labels, str(link)), active)
        if not active:
            continue
        for counter, kind in _NVLINK_ERRORS:
            value = pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter)
            yield Reading("metalserve_gpu_nvlink_errors_total", (*labels, str(link), kind), value)


READS: tuple[tuple[str, Read], ...] = (
    ("memory", _memory),
    ("bar1", _bar1),
    ("utilization", _utilization),
    ("throttle", _throttle),
    ("temperature", _temperature),
    ("power", _power),
    ("power_limit", _power_limit),
    ("energy", _energy),
    ("ecc_mode", _ecc_mode),
    ("ecc_errors", _ecc_errors),
    ("row_remap", _row_remap),
    ("pcie", _pcie),
    ("nvlink", _nvlink),
)
