# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""A real machine, in software: builds a Debian disk and runs it under QEMU with two NUMA nodes and its own kernel.

    machine.py build --cache DIR          the disk, kernel and initial ramdisk, once per recipe
    machine.py start --cache DIR --run DIR   boots it (kvm where that works, else emulated) and waits for SSH
    machine.py reboot --run DIR           asks it to reboot and waits until it has
    machine.py stop --run DIR             ends it and forgets what it wrote

The disk is never written to: each run has its own overlay, which lives as long as the machine and survives its reboots.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

SUITE = "bookworm"
PACKAGES = [
    "ca-certificates",
    "dbus",
    "docker-registry",
    "initramfs-tools",
    "iproute2",
    "kmod",
    "linux-image-cloud-amd64",
    "openssh-server",
    "python3",
    "sudo",
    "systemd-sysv",
    "udev",
]
# Fetched while the disk is built and installed by the role in the machine: an emulated network is slow.
FETCHED = ["apparmor", "docker.io", "nftables", "python3-requests", "rsync"]
# The stand-in engine and what it runs on, as a tar of an image's root: the machine's own Python, so nothing more is fetched.
ENGINE = "roles/lab/files/standin_engine"
ENGINE_TAR = "var/lib/metal/engine.tar"
ENGINE_ROOT = [
    "bin",
    "lib",
    "lib64",
    "usr/bin/cat",
    "usr/bin/dash",
    "usr/bin/mkdir",
    "usr/bin/python3",
    "usr/bin/python3.11",
    "usr/bin/sh",
    "usr/lib/python3.11",
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
]
ENGINE_LIBRARIES = ["c", "m", "z", "expat", "crypto", "ssl", "uuid", "selinux", "pcre2-8"]
ENGINE_WITHOUT = ["ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "unittest"]
TIMERS = ["apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "fstrim.timer"]
DISK_SIZE = "8G"
MEMORY_MIB = 4096
# Far above what it takes (a minute, when nothing else runs): only a machine that never comes up waits that long.
BOOT_SECONDS = 1200
KVM_SECONDS = 8

# The kernel finds its disk with these few drivers; the usual ramdisk with all of them takes seconds to unpack.
INITRAMFS = "MODULES=list\nCOMPRESS=gzip\n"
INITRAMFS_MODULES = "virtio_pci\nvirtio_blk\next4\n"
# Debian's own asks for a password. Nobody but this machine reaches this one.
REGISTRY = """\
version: 0.1
storage: {filesystem: {rootdirectory: /var/lib/docker-registry}}
http: {addr: "127.0.0.1:5000"}
"""
NETWORK = "[Match]\nName=en* eth*\n[Network]\nDHCP=ipv4\n"
# Quiet, because each character on an emulated serial line costs thousands of instructions.
KERNEL_LINE = "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=false mitigations=off net.ifnames=0"
# Most of what a module costs here is compiling the same Ansible sources again, out of a new archive each time. The machine's
# Python keeps what it compiled, by content. Nothing else differs from a usual installation.
PYTHON_SITE = "usr/local/lib/python3.11/dist-packages"
COMPILE_CACHE = """\
import hashlib, marshal, os, zipimport

_compile, _folder = zipimport._compile_source, "/var/cache/compiled"

def _cached(pathname, source):
    place = os.path.join(_folder, hashlib.sha256(source).hexdigest())
    try:
        with open(place, "rb") as stream:
            return marshal.load(stream)
    except OSError:
        code = _compile(pathname, source)
    try:
        os.makedirs(_folder, exist_ok=True)
        with open(f"{place}.{os.getpid()}", "wb") as stream:
            marshal.dump(code, stream)
        os.replace(stream.name, place)
    except OSError:
        pass
    return code

zipimport._compile_source = _cached
"""

# A server image, without documentation.
SSH_CONFIG = """\
Host node-metal
  HostName 127.0.0.1
  Port {port}
  User root
  IdentityFile {key}
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 60
  ServerAliveInterval 60
  ServerAliveCountMax 10
  ControlMaster auto
  ControlPersist 60
  ControlPath /tmp/metalserve-%C
"""

DPKG_OPTIONS = ["force-unsafe-io", "path-exclude=/usr/share/man/*", "path-exclude=/usr/share/doc/*"]


def say(text: str) -> None:
    """Print progress to standard error; standard output is for results."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def host_files() -> dict[str, bytes]:
    """Return the host's own apt settings and certificates that a machine behind the same mirror or proxy needs."""
    found = {}
    for pattern in (
        "etc/apt/apt.conf.d/*proxy*",
        "etc/apt/apt.conf.d/*mirror*",
        "usr/local/share/ca-certificates/*.crt",
    ):
        for path in sorted(Path("/").glob(pattern)):
            found[str(path)] = path.read_bytes()
    return found


def mirror() -> str:
    """Return the Debian mirror: METALSERVE_DEBIAN_MIRROR, else the host's own."""
    if os.environ.get("METALSERVE_DEBIAN_MIRROR"):
        return os.environ["METALSERVE_DEBIAN_MIRROR"]
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.is_file():
            match = re.search(
                r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(https?://\S+/debian)/?(?:\s|$)", path.read_text(), re.M
            )
            if match:
                return match.group(1)
    raise SystemExit("no Debian mirror in this machine's apt sources: set METALSERVE_DEBIAN_MIRROR to its address")


def engine_source() -> Path:
    """Return the folder of the stand-in engine in this checkout."""
    return Path(__file__).resolve().parents[2] / ENGINE


def recipe(public_key: str) -> str:
    """Return the key of the disk: everything that its content depends on, hashed."""
    parts = [inspect.getsource(function).encode() for function in (build, furnish, put_engine)]
    parts += [repr(value).encode() for name, value in sorted(globals().items()) if name.isupper()]
    parts += [mirror().encode(), public_key.encode()]
    parts += [path.read_bytes() for path in sorted(engine_source().rglob("*")) if path.suffix in (".py", ".json")]
    parts += [name.encode() + content for name, content in host_files().items()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def ssh_key(cache: Path) -> Path:
    """Return the private key for this checkout's machines, made once."""
    key = cache / "ssh_key"
    if not key.exists():
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "metal", "-f", str(key)], check=True)
    return key


def remove(folder: Path) -> None:
    """Remove a folder in which a build may have been killed, whose /proc, /sys and /dev of this machine are still mounted there.

    Raises SystemExit, with nothing removed, where one of them cannot be unmounted.
    """
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in sorted((point for point in mounted if point.startswith(f"{folder}/")), reverse=True):
        if subprocess.run(["umount", point], check=False).returncode != 0:
            raise SystemExit(f"{point} is still mounted: unmount it, then run this again")
    shutil.rmtree(folder)


def build(cache: Path) -> Path:
    """Return the folder with disk.img, vmlinuz and initrd.img; build it where this recipe was never built."""
    public = ssh_key(cache).with_suffix(".pub").read_text()
    target = cache / recipe(public)
    if (target / "disk.img").exists():
        return target
    for old in cache.iterdir():
        if old.is_dir() and re.fullmatch(r"[0-9a-f]{16}(\.new)?", old.name):
            remove(old)
    work = target.with_suffix(".new")
    work.mkdir()
    root = work / "root"
    say(f"building a {SUITE} machine from {mirror()}")
    command = ["mmdebstrap", "--variant=apt", "--format=directory", "--include=" + ",".join(PACKAGES)]
    command += [f"--dpkgopt={option}" for option in DPKG_OPTIONS]
    # The package lists and the fetched packages stay, for the role that installs them.
    command += [
        "--skip=cleanup/apt",
        f'--customize-hook=chroot "$1" apt-get install -d -y --no-install-recommends {" ".join(FETCHED)}',
    ]
    command += [f"--setup-hook=copy-in {name} {Path(name).parent}" for name in host_files() if "apt.conf.d" in name]
    command += [SUITE, str(root), f"deb {mirror()} {SUITE} main", f"deb {mirror()} {SUITE}-updates main"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    furnish(root, public)
    put_engine(root)
    for name in ("vmlinuz", "initrd.img"):
        shutil.copy(next((root / "boot").glob(f"{name}-*")), work / name)
    say("writing the disk")
    disk = ["mke2fs", "-q", "-t", "ext4", "-L", "root", "-d", str(root), str(work / "disk.img"), DISK_SIZE]
    subprocess.run(disk, check=True, stdout=sys.stderr)
    remove(root)
    work.rename(target)
    return target


def furnish(root: Path, public_key: str) -> None:
    """Give the machine a network, a name, a key to log in with, and a small ramdisk."""
    for name, content in host_files().items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    texts = {
        "etc/hostname": "node-metal\n",
        "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 node-metal\n",
        "etc/docker/registry/config.yml": REGISTRY,
        "etc/fstab": "/dev/vda / ext4 defaults,noatime 0 1\n",
        "etc/resolv.conf": "nameserver 10.0.2.3\n",
        "etc/systemd/network/20-dhcp.network": NETWORK,
        "etc/initramfs-tools/conf.d/metal.conf": INITRAMFS,
        "etc/initramfs-tools/modules": INITRAMFS_MODULES,
        "root/.ssh/authorized_keys": public_key,
        f"{PYTHON_SITE}/compile_cache.py": COMPILE_CACHE,
        f"{PYTHON_SITE}/compile_cache.pth": "import compile_cache\n",
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(text)
    (root / "root/.ssh").chmod(0o700)
    chroot = ["chroot", str(root)]
    subprocess.run([*chroot, "update-ca-certificates"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*chroot, "systemctl", "--quiet", "enable", "systemd-networkd.service", "ssh.service"], check=True)
    subprocess.run([*chroot, "systemctl", "--quiet", "mask", *TIMERS], check=True)
    subprocess.run([*chroot, "update-initramfs", "-u"], check=True, stdout=subprocess.DEVNULL)


def put_engine(root: Path) -> None:
    """Leave the stand-in engine's image root in the machine as a tar: packed here, since an emulated processor is slow."""
    target = root / ENGINE_TAR
    target.parent.mkdir(parents=True)
    libraries = [f"usr/lib/x86_64-linux-gnu/lib{name}.so.*" for name in ENGINE_LIBRARIES]
    names = [str(path.relative_to(root)) for pattern in libraries for path in sorted(root.glob(pattern))]
    without = [f"--exclude=usr/lib/python3.11/{name}" for name in ENGINE_WITHOUT]
    subprocess.run(["tar", "-C", str(root), *without, "-cf", str(target), *ENGINE_ROOT, *names], check=True)
    move = ["--exclude=__pycache__", "--transform=s,^\\.,opt/engine,"]
    subprocess.run(["tar", "-C", str(engine_source()), *move, "-rf", str(target), "."], check=True)


def qemu(image: Path, accelerator: list[str], *more: str) -> list[str]:
    """Return the command line of a machine with two NUMA nodes, one processor and half of the memory on each."""
    half = MEMORY_MIB // 2
    command = ["qemu-system-x86_64", *accelerator, "-smp", "2", "-m", f"{MEMORY_MIB}M", "-display", "none"]
    for node in (0, 1):
        command += ["-object", f"memory-backend-ram,size={half}M,id=m{node}"]
        command += ["-numa", f"node,nodeid={node},cpus={node},memdev=m{node}"]
    command += ["-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd.img")]
    command += ["-drive", f"file={image / 'disk.img'},if=virtio,format=raw,snapshot=on,cache=unsafe"]
    command += ["-device", "virtio-rng-pci", *more]
    return command


EMULATED = ["-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max"]
KVM = ["-accel", "kvm", "-cpu", "host"]


def accelerator(image: Path) -> list[str]:
    """Return the arguments for kvm if a kernel really gets going under it within seconds, else for emulation."""
    if os.environ.get("METALSERVE_KVM") == "0" or not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return EMULATED
    command = [
        *qemu(image, KVM),
        "-append",
        "console=ttyS0 panic=-1 rdinit=/bin/true",
        "-serial",
        "stdio",
        "-no-reboot",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL) as probe:
        try:
            output = probe.communicate(timeout=KVM_SECONDS)[0]
        except subprocess.TimeoutExpired:
            probe.kill()
            output = probe.communicate()[0]
    works = b"Run /bin/true as init" in output
    say("kvm works" if works else "kvm does not get a kernel going here: emulating")
    return KVM if works else EMULATED


def free_port() -> int:
    """Return a local port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int) -> bool:
    """Return whether an SSH server greets on the local port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.settimeout(30)
            return connection.recv(4) == b"SSH-"
    except OSError:
        return False


def running(run: Path) -> int:
    """Return the process id of this run's machine, or 0."""
    try:
        pid = int((run / "qemu.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return 0
    return pid if b"qemu-system" in command and str(run).encode() in command else 0


def console_tail(run: Path) -> Iterator[str]:
    """Yield the last lines of the console, for a machine that did not come up."""
    with contextlib.suppress(OSError):
        yield from (run / "console.log").read_text(errors="replace").splitlines()[-25:]


def start(cache: Path, run: Path) -> dict[str, object]:
    """Boot the machine where it does not run yet and wait for SSH. Raises SystemExit if it does not come up."""
    image = build(cache)
    if running(run) and answers(int((run / "port").read_text())):
        return {"port": int((run / "port").read_text()), "started": False}
    stop(run)
    run.mkdir(parents=True)
    port = free_port()
    began = time.monotonic()
    network = f"user,model=virtio-net-pci,hostfwd=tcp:127.0.0.1:{port}-:22"
    command = qemu(image, accelerator(image), "-nic", network, "-append", KERNEL_LINE)
    command += ["-serial", f"file:{run / 'console.log'}", "-pidfile", str(run / "qemu.pid"), "-daemonize"]
    subprocess.run(command, check=True)
    (run / "port").write_text(f"{port}\n")
    (run / "ssh_config").write_text(SSH_CONFIG.format(port=port, key=ssh_key(cache)))
    while not answers(port):
        if not running(run) or time.monotonic() - began > BOOT_SECONDS:
            print("\n".join(console_tail(run)), file=sys.stderr)
            raise SystemExit(
                f"the machine did not answer within {BOOT_SECONDS} s; its console is {run / 'console.log'}"
            )
        time.sleep(1)
    took = round(time.monotonic() - began, 1)
    say(f"the machine answers on port {port} after {took} s")
    return {"port": port, "started": True, "boot_seconds": took}


def boot_id(run: Path) -> str:
    """Return the kernel's id of this boot, or nothing while the machine does not answer."""
    command = ["ssh", "-F", str(run / "ssh_config"), "-o", "ControlPath=none", "-o", "ConnectTimeout=30", "node-metal"]
    result = subprocess.run(
        [*command, "cat /proc/sys/kernel/random/boot_id; systemctl is-system-running --wait >/dev/null"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip()


def reboot(run: Path) -> dict[str, object]:
    """Reboot the machine and wait until it is up again. Raises SystemExit if it does not come up."""
    before, began = boot_id(run), time.monotonic()
    subprocess.run(["ssh", "-F", str(run / "ssh_config"), "node-metal", "systemctl reboot"], check=False)
    while time.monotonic() - began < 2 * BOOT_SECONDS:
        now = boot_id(run)
        if now and now != before:
            return {"boot_seconds": round(time.monotonic() - began, 1)}
        time.sleep(2)
    print("\n".join(console_tail(run)), file=sys.stderr)
    raise SystemExit(f"the machine did not come back within {2 * BOOT_SECONDS} s")


def stop(run: Path) -> None:
    """End this run's machine and remove its folder."""
    pid = running(run)
    if pid:
        os.kill(pid, signal.SIGTERM)
        for _ in range(50):
            if not running(run):
                break
            time.sleep(0.1)
        else:
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(run, ignore_errors=True)


def main() -> None:
    """Run one of the commands and print its result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "start", "reboot", "stop"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/metal"))
    parser.add_argument("--run", type=Path, default=Path(".cache/metal/run"))
    options = parser.parse_args()
    cache, run = options.cache.resolve(), options.run.resolve()
    if options.command == "stop":
        stop(run)
        print("{}")
    elif options.command == "reboot":
        print(json.dumps(reboot(run)))
    elif options.command == "build":
        print(json.dumps({"image": str(build(cache))}))
    else:
        print(json.dumps(start(cache, run)))


if __name__ == "__main__":
    main()
