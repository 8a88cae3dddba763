#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Time the audit: one host, many hosts over SSH, one task a check, and pyinfra reading the same; all in one run.

The hosts are sshd processes on ports of their own in one container, so 100 of them share its processors: what is compared
is the work of controller and hosts together, on the same machine, and not a network. Needs Docker, the image of the lab's
nodes (playbooks/lab.yml makes it) and .venv; pyinfra is installed into a throwaway environment where none is named.

  benchmarks/audit/run.py                      100 hosts
  benchmarks/audit/run.py --hosts 5 --without-pyinfra
  benchmarks/audit/run.py --tasks 12           measure 12 of the tasks and reckon all from them; the result says so
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "collections"))
from ansible_collections.metal.serve.plugins.module_utils.checklist.audit import REGISTRY
from ansible_collections.metal.serve.plugins.module_utils.hardware.registry import PROBES

BIN = ROOT / ".venv" / "bin"
NAME = "metalserve-bench-audit"
FIRST_PORT = 22001
PLAIN = "head -c 100000 | LC_ALL=C tr -cd '[:print:]\\n'"


def sh(*words: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. Raises CalledProcessError."""
    return subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True, **more)


@contextmanager
def machine(image: str, hosts: int, folder: Path) -> Iterator[str]:
    """Yield the address of a container with ``hosts`` sshd processes that take the key in ``folder``."""
    sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "key")
    sh("docker", "run", "-d", "--name", NAME, image, "sleep", "infinity")
    try:
        public = (folder / "key.pub").read_text(encoding="utf-8").strip()
        sshd = "/usr/sbin/sshd -o MaxStartups=500 -o StrictModes=no -o UsePAM=no -o PidFile=none -p"
        start = (
            f"mkdir -p /run/sshd /root/.ssh && echo '{public}' > /root/.ssh/authorized_keys && ssh-keygen -A >/dev/null && "
            f"for port in $(seq {FIRST_PORT} {FIRST_PORT + hosts - 1}); do {sshd} $port; done"
        )
        sh("docker", "exec", NAME, "sh", "-c", start)
        yield sh("docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", NAME).stdout.strip()
    finally:
        subprocess.run(["docker", "rm", "-f", NAME], check=False, capture_output=True)


def inventory(folder: Path, address: str, hosts: int) -> Path:
    """Write an inventory of all hosts and return it."""
    common = {
        "ansible_host": address,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(folder / "key"),
        "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    members = {f"host-{number:03}": {"ansible_port": FIRST_PORT + number} for number in range(hosts)}
    path = folder / "hosts.json"
    path.write_text(json.dumps({"all": {"vars": common, "hosts": members}}), encoding="utf-8")
    return path


def sources() -> list[str]:
    """Return one shell command a check, each reading one of the sources that the collector reads."""
    reads = []
    for probe in PROBES:
        for path in probe.paths[:1]:
            if path.startswith("files/"):
                reads.append(f"cat /{path[6:]} 2>/dev/null | {PLAIN}; true")
            elif path.startswith("commands/"):
                reads.append(f"{path[9:-4].replace('_', ' ')} 2>/dev/null | {PLAIN}; true")
    count = len(REGISTRY.all())
    return (reads * (count // len(reads) + 1))[:count]


def play(folder: Path, name: str, tasks: list[dict[str, Any]]) -> Path:
    """Write a playbook beside the inventory and return it."""
    path = folder / name
    path.write_text(
        json.dumps([{"name": name, "hosts": "all", "gather_facts": False, "tasks": tasks}]), encoding="utf-8"
    )
    return path


def timed(book: Path, hosts: Path, *arguments: str) -> tuple[float, dict[str, float]]:
    """Run a playbook; return wall seconds and the CPU seconds of controller processes."""
    before, began = os.times(), time.monotonic()
    done = subprocess.run(
        [str(BIN / "ansible-playbook"), str(book), "-i", str(hosts), *arguments],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, after = time.monotonic() - began, os.times()
    if done.returncode:
        raise SystemExit(f"{book.name}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-500:]}")
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return round(seconds, 1), {"controller_cpu_s": round(cpu, 1)}


BUILD = """
import sys
from ansible_collections.metal.serve.plugins.action.agent_bundle import AUDIT_MAIN, AUDIT_VERSION, audit_members
from ansible_collections.metal.serve.plugins.module_utils.telemetry.bundle import bundle
open(sys.argv[1], "wb").write(bundle(audit_members(), AUDIT_MAIN, AUDIT_VERSION)[0])
"""


def scheduled(folder: Path, address: str, hosts: int) -> float:
    """Let all hosts judge themselves as the monitor's timer does, over SSH and without Ansible; return wall seconds."""
    program = folder / "metalserve-audit.pyz"
    sh(BIN / "python", "-c", BUILD, program, env={**os.environ, "PYTHONPATH": str(ROOT / "collections")})
    node = {"host": "host", "policy": {}, "root": "/var/lib/metalserve", "textfile": ""}
    (folder / "audit.json").write_text(json.dumps(node), encoding="utf-8")
    for name in ("metalserve-audit.pyz", "audit.json"):
        sh("docker", "cp", folder / name, f"{NAME}:/opt/{name}")
    sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "audit")
    public = (folder / "audit.pub").read_text(encoding="utf-8").strip()
    forced = f'command="python3 -I /opt/metalserve-audit.pyz node /opt/audit.json" {public}'
    sh("docker", "exec", NAME, "sh", "-c", f"echo '{forced}' >> /root/.ssh/authorized_keys")
    fleet = {
        "hosts": [
            {"host": f"host-{number:03}", "address": address, "port": FIRST_PORT + number, "strict": False}
            for number in range(hosts)
        ],
        "user": "root",
        "key": str(folder / "audit"),
        "known_hosts": str(folder / "known_hosts"),
        "reports": str(folder),
    }
    (folder / "fleet.json").write_text(json.dumps(fleet), encoding="utf-8")
    began = time.monotonic()
    words = [sys.executable, "-I", str(program), "fleet", str(folder / "fleet.json")]
    subprocess.run(
        words, capture_output=True, check=False
    )  # it ends as the audit does: these hosts are not fit to serve
    seconds = time.monotonic() - began
    judged = json.loads((folder / "audit.json").read_text(encoding="utf-8"))["hosts"]
    missing = [one["host"] + ": " + one["error"] for one in judged if one["error"]]
    if missing or len(judged) != hosts:
        raise SystemExit(f"not judged: {missing[:3]}")
    return round(seconds, 1)


def pyinfra(folder: Path, address: str, hosts: int, reads: list[str], program: str) -> dict[str, Any]:
    """Read the same sources with pyinfra; return its version and wall seconds."""
    if not program:
        sh(sys.executable, "-m", "venv", folder / "venv")
        sh(folder / "venv/bin/pip", "install", "-q", "pyinfra")
        program = str(folder / "venv/bin/pyinfra")
    common = {"ssh_hostname": address, "ssh_user": "root", "ssh_key": str(folder / "key")}
    common["ssh_strict_host_key_checking"] = "off"
    members = [(f"host-{number:03}", {**common, "ssh_port": FIRST_PORT + number}) for number in range(hosts)]
    (folder / "inventory.py").write_text(f"hosts = {members!r}\n", encoding="utf-8")
    deploy = "from pyinfra import host\nfrom pyinfra.facts.server import Command\n"
    deploy += f"for read in {reads!r}:\n    host.get_fact(Command, command=read)\n"
    (folder / "deploy.py").write_text(deploy, encoding="utf-8")
    began = time.monotonic()
    sh(program, "-y", "inventory.py", "deploy.py", cwd=folder)
    seconds = round(time.monotonic() - began, 1)
    return {"version": sh(program, "--version").stdout.strip(), "wall_s": seconds}


def main() -> int:
    """Run all of it and print one JSON object."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--hosts", type=int, default=100)
    made.add_argument("--image", default="", help="image of the hosts; default: the lab's newest")
    made.add_argument("--forks", type=int, default=50)
    made.add_argument("--without-pyinfra", action="store_true")
    made.add_argument("--pyinfra", metavar="PROGRAM", default="", help="an installed pyinfra")
    made.add_argument("--tasks", type=int, default=0, help="how many of one task a check are run on all hosts; 0: all")
    given = made.parse_args()
    image = given.image
    if not image:
        listed = sh("docker", "images", "--format", "{{.Repository}}:{{.Tag}}", "metalserve-lab/node").stdout.split()
        if not listed:
            raise SystemExit("there is no image metalserve-lab/node: build the lab once (playbooks/lab.yml)")
        image = listed[0]
    reads, load = sources(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="metalserve-bench-") as made_folder:
        folder = Path(made_folder)
        with machine(image, given.hosts, folder) as address:
            hosts = inventory(folder, address, given.hosts)
            judge = {"name": "Judge", "metal.serve.host_audit": {}, "register": "__audited"}
            keep = {
                "name": "Keep",
                "ansible.builtin.copy": {
                    "content": "{{ ansible_play_hosts_all | map('extract', hostvars, SECONDS) | list | to_json }}",
                    "dest": str(folder / "seconds.json"),
                },
                "delegate_to": "localhost",
                "run_once": True,
                "vars": {"SECONDS": ["__audited", "seconds"], "ansible_python_interpreter": str(BIN / "python")},
            }
            one_module = play(folder, "module.yml", [judge, keep])
            tasks = [
                {"name": f"Read {n}", "ansible.builtin.shell": read, "changed_when": False}
                for n, read in enumerate(reads)
            ]
            one_task_each = play(folder, "tasks.yml", tasks)
            measured = tasks[:: max(1, len(tasks) // given.tasks)][: given.tasks] if given.tasks else tasks
            some_tasks = play(folder, "some.yml", measured)
            forks = ("-f", str(given.forks))
            timed(one_module, hosts, *forks)  # connections, host keys, Python's compiled files
            single, _cpu = timed(one_module, hosts, "--limit", "host-000")
            alone = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
            single_tasks, _cpu = timed(one_task_each, hosts, "--limit", "host-000")
            all_modules, cpu = timed(one_module, hosts, *forks)
            together = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
            # Each task takes as long as the one before: the rest can be reckoned, and is said to be.
            all_tasks, tasks_cpu = timed(some_tasks, hosts, *forks)
            share = len(tasks) / len(measured)
            result: dict[str, Any] = {
                "hosts": given.hosts,
                "checks": len(REGISTRY.all()),
                "processors": os.cpu_count(),
                "load_before": load,
                "one_host": {"module_s": alone[0], "wall_s": single, "one_task_each_wall_s": single_tasks},
                "all_hosts": {
                    "wall_s": all_modules,
                    **cpu,
                    "module_s_median": sorted(together)[len(together) // 2],
                    "module_s_most": max(together),
                    "tasks_measured": len(measured),
                    "one_task_each_wall_s": round(all_tasks * share, 1),
                    "one_task_each_controller_cpu_s": round(tasks_cpu["controller_cpu_s"] * share, 1),
                    "ratio": round(all_tasks * share / all_modules, 1),
                },
            }
            seconds = scheduled(folder, address, given.hosts)
            result["scheduled"] = {"wall_s": seconds, "ratio_of_one_task_each": round(all_tasks * share / seconds, 1)}
            if not given.without_pyinfra:
                other = pyinfra(folder, address, given.hosts, reads, given.pyinfra)
                result["pyinfra"] = {**other, "ratio": round(other["wall_s"] / all_modules, 1)}
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
