# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Every metric of the agent: name, type, labels, help. Nothing else can be exported; the documentation is checked."""

from __future__ import annotations

from dataclasses import dataclass

GPU = ("gpu", "uuid")
REPLICA = ("pool", "replica", "kind")


@dataclass(frozen=True)
class Metric:
    """One metric family. ``kind`` is gauge or counter; a counter's name ends in _total; units are in the name."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


def _gauge(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(name, "gauge", labels, text)


def _counter(name: str, labels: tuple[str, ...], text: str) -> Metric:
    return Metric(name, "counter", labels, text)


_ALL = (
    # The agent itself
    _gauge("metalserve_agent_info", ("version", "accelerator"), "1; the agent's version and what it looks after"),
    _counter(
        "metalserve_agent_errors_total",
        ("source", "reason"),
        "Reads that failed; the sample they would have given is missing, never zero",
    ),
    _gauge(
        "metalserve_agent_unsupported_reads",
        ("source", "read"),
        "Devices that say a read is not supported on them (no error, no sample)",
    ),
    _gauge("metalserve_agent_collect_duration_seconds", ("source",), "Time that the last round of a source took"),
    _gauge("metalserve_agent_last_collect_timestamp_seconds", ("source",), "When a source last finished a round"),
    # Host
    _gauge("metalserve_expected_gpus", (), "GPUs that the inventory says this node has"),
    _gauge("metalserve_numa_balancing", (), "kernel.numa_balancing: 0 off, 1 on, 2 tiering"),
    _gauge("metalserve_numa_nodes", (), "NUMA nodes that have memory or CPUs"),
    # GPU
    _gauge("metalserve_gpus", (), "GPUs that answer; one that fell off the bus is not counted"),
    _gauge("metalserve_gpu_info", (*GPU, "name", "bus_id", "driver"), "1; what the GPU is"),
    _gauge("metalserve_gpu_memory_total_bytes", GPU, "Frame buffer, physical"),
    _gauge(
        "metalserve_gpu_memory_used_bytes", GPU, "Frame buffer allocated by processes (the driver's reserve is apart)"
    ),
    _gauge("metalserve_gpu_memory_free_bytes", GPU, "Frame buffer free"),
    _gauge("metalserve_gpu_memory_reserved_bytes", GPU, "Frame buffer that driver and firmware keep"),
    _gauge("metalserve_gpu_bar1_total_bytes", GPU, "BAR1 aperture"),
    _gauge("metalserve_gpu_bar1_used_bytes", GPU, "BAR1 aperture in use"),
    _gauge(
        "metalserve_gpu_utilization_ratio",
        GPU,
        "Share of time with a kernel running, 0..1, over the driver's last period",
    ),
    _gauge("metalserve_gpu_memory_activity_ratio", GPU, "Share of time with memory read or written, 0..1"),
    _gauge(
        "metalserve_gpu_throttle_active",
        (*GPU, "reason"),
        "1 while the clocks are held down for this reason (idle included)",
    ),
    _gauge("metalserve_gpu_temperature_celsius", GPU, "Core temperature"),
    _gauge("metalserve_gpu_power_watts", GPU, "Power drawn"),
    _gauge("metalserve_gpu_power_limit_watts", GPU, "Power limit enforced"),
    _counter("metalserve_gpu_energy_joules_total", GPU, "Energy since the driver was loaded"),
    _counter(
        "metalserve_gpu_xid_events_total",
        ("bus_id",),
        "Xid events since boot (kernel log) or since the agent's start (NVML)",
    ),
    _gauge("metalserve_gpu_xid_last", ("bus_id",), "Code of the last Xid; absent before the first"),
    _gauge("metalserve_gpu_xid_source_info", ("source",), "1; where Xid events are read: kernel_log or nvml"),
    _gauge("metalserve_gpu_ecc_enabled", GPU, "1 with ECC on"),
    _counter(
        "metalserve_gpu_ecc_errors_total",
        (*GPU, "type", "period"),
        "ECC errors; type corrected or uncorrected, period volatile (since driver load) or aggregate (lifetime)",
    ),
    _gauge("metalserve_gpu_remapped_rows", (*GPU, "type"), "Rows remapped after correctable or uncorrectable errors"),
    _gauge("metalserve_gpu_row_remap_pending", GPU, "1: a row remap waits for a GPU reset"),
    _gauge("metalserve_gpu_row_remap_failure", GPU, "1: a row could not be remapped; the GPU is to be replaced"),
    _counter("metalserve_gpu_pcie_replays_total", GPU, "PCIe packets sent again"),
    _gauge("metalserve_gpu_nvlink_active", (*GPU, "link"), "1 for a link that is up, 0 for one that is down"),
    _counter(
        "metalserve_gpu_nvlink_errors_total",
        (*GPU, "link", "type"),
        "NVLink errors; type replay, recovery, crc_flit or crc_data",
    ),
    # Replicas
    _gauge("metalserve_replica_ready", REPLICA, "1: it lists its model; 0: it does not, or does not answer"),
    _gauge("metalserve_replica_probe_duration_seconds", REPLICA, "Time that the last answered readiness probe took"),
    _gauge("metalserve_replica_container_running", REPLICA, "1: a container of this replica runs"),
    _gauge("metalserve_replica_start_timestamp_seconds", REPLICA, "When the running container started"),
    _gauge(
        "metalserve_replica_start_to_ready_seconds",
        REPLICA,
        "Container start until the engine's log says that it serves",
    ),
    _gauge("metalserve_replica_model_load_seconds", REPLICA, "Loading the weights, from the engine's log"),
    _gauge("metalserve_replica_weights_bytes", REPLICA, "Weights on one device, from the engine's log"),
    _gauge("metalserve_replica_engine_init_seconds", REPLICA, "Profiling, cache and warm-up, from the engine's log"),
    _gauge(
        "metalserve_replica_release_info",
        (*REPLICA, "release", "image", "engine_version", "model", "revision"),
        "1; the release that the node's current link points at",
    ),
    _gauge("metalserve_replica_max_num_seqs", REPLICA, "Planned: sequences in one batch at most"),
    _gauge("metalserve_replica_max_num_batched_tokens", REPLICA, "Planned: tokens in one batch at most"),
    _gauge("metalserve_replica_gpu_memory_planned_bytes", REPLICA, "Planned GPU memory over all GPUs of the replica"),
    _gauge("metalserve_replica_gpu_memory_used_bytes", REPLICA, "Used GPU memory over all GPUs of the replica"),
    _gauge("metalserve_replica_gpu_memory_total_bytes", REPLICA, "Physical GPU memory over all GPUs of the replica"),
    _gauge(
        "metalserve_gpu_memory_unplanned_ratio",
        REPLICA,
        "(used - planned) / planned GPU memory of the replica; negative below the plan",
    ),
)

CATALOGUE: dict[str, Metric] = {metric.name: metric for metric in _ALL}
