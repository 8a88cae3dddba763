# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Hides what must not leave a machine: secrets always, identities (names, addresses, serial numbers) in snapshots.

Identities get stable stand-ins: the same address is the same stand-in in every file of a snapshot, so that joins still
work.
"""

from __future__ import annotations

import ipaddress
import json
import re
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from collections.abc import Iterable

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(?:\A|[_\-.])(?:api[_-]?keys?|keys?|tokens?|secrets?|passwords?|passwd|passphrase|credentials?|auth|bearer)\Z"
    r"|api[_-]?key|secret|password|passwd|credential|access[_-]?key|private[_-]?key"
    r"|(?:hf|hub|auth|access|bearer|api)[_-]?token",
    re.IGNORECASE,
)
_HARMLESS_NAME = re.compile(
    r"key[_-]?(?:id|name)\Z|[_-](?:file|path|dir)s?\Z|tokenizer|max[_-]|num[_-]|[_-]tokens\Z|\Akeys?\Z.*_by",
    re.IGNORECASE,
)

_SECRET_VALUES = (
    re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"),
    re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{16,}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{16,}"),
    re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\bnvapi-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
)
_BEARER = re.compile(r"\b(Bearer|Basic)(\s+|\\s\+?|\\ )([A-Za-z0-9._~+/=\\-]{6,})", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]{0,30}://)([^/\s:@\"']{0,200}):([^/\s@\"']{1,200})@", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL)


def looks_secret_name(name: str) -> bool:
    """Tell whether a variable or option of this name usually carries a secret.

    ``VLLM_API_KEY`` does; ``max-num-batched-tokens`` and ``api_key_file`` do not.
    """
    return _SECRET_NAME.search(name) is not None and _HARMLESS_NAME.search(name) is None


def mask_secrets(text: str) -> str:
    """Return ``text`` with everything that has the shape of a secret replaced by ``***``."""
    for pattern in _SECRET_VALUES:
        text = pattern.sub(HIDDEN, text)
    text = _BEARER.sub(lambda match: match.group(1) + match.group(2) + HIDDEN, text)
    text = _URL_PASSWORD.sub(lambda match: f"{match.group(1)}{HIDDEN}:{HIDDEN}@", text)
    return _PEM.sub(HIDDEN, text)


_KEY_VALUE = re.compile(
    r"^(?P<head>[ \t]*(?:- |local |export |set )?[\"'$]?(?P<name>[A-Za-z][\w.-]{0,80})[\"']?[ \t]*[:=][ \t]*)"
    r"(?P<value>\S.*)$"
)


def mask_assignments(text: str) -> str:
    """Return ``text`` with the values of lines such as ``api_key: X`` or ``PASSWORD=X`` replaced."""
    lines = []
    for line in text.split("\n"):
        match = _KEY_VALUE.match(line) if len(line) < 10_000 else None
        if match and looks_secret_name(match["name"]) and match["value"] not in ("null", '""', "''", "[]", "{}"):
            line = match["head"] + HIDDEN  # noqa: PLW2901
        lines.append(line)
    return "\n".join(lines)


_KEY_MAP = re.compile(r"\A\s*map\s+\S*(?:authorization|api_?key|token|cookie|arg_key)\S*\s+\S+\s*\{", re.IGNORECASE)
_KEY_HEADER = re.compile(
    r"^(\s*(?:proxy_set_header|fastcgi_param|grpc_set_header|add_header)\s+\S*(?:authorization|api[-_]?key|token)\S*\s+)"
    r"(.+?)(;.*)$",
    re.IGNORECASE,
)


def mask_nginx(text: str) -> str:
    """Return nginx's configuration without API keys: entries of maps on a key, headers that carry one, Lua assignments.

    A header that only passes a variable on stays as it is.
    """
    lines: list[str] = []
    inside, number = False, 0
    for line in text.split("\n"):
        if _KEY_MAP.match(line):
            inside, number = True, 0
        elif inside and re.match(r"\A\s*\}", line):
            inside = False
        elif inside and not re.match(r"\A\s*(?:#.*|default\b.*|hostnames;|volatile;|include\b.*)?\Z", line):
            number += 1
            line = f'    "{HIDDEN}-{number}" client-{number};'  # noqa: PLW2901
        header = _KEY_HEADER.match(line)
        if header and not re.match(r"\A[\"']?\$\w+[\"']?\Z|\A[\"']{2}\Z", header.group(2)):
            line = f'{header.group(1)}"{HIDDEN}"{header.group(3)}'  # noqa: PLW2901
        lines.append(line)
    return mask_secrets(mask_assignments("\n".join(lines)))


def mask_arguments(words: list[str]) -> tuple[list[str], list[str]]:
    """Return a command with secret values as ``***`` and the options that carried them.

    Understands ``--api-key X``, ``--api-key X Y`` and ``--api-key=X``.
    """
    masked: list[str] = []
    options: list[str] = []
    secret_follows = ""
    for word in words:
        option, sign, content = word.partition("=")
        if secret_follows and not word.startswith("--"):
            masked.append(HIDDEN if word else word)
            if word and secret_follows not in options:
                options.append(secret_follows)
            continue
        secret_follows = ""
        if word.startswith("-") and looks_secret_name(option.lstrip("-")):
            if sign:
                masked.append(f"{option}={HIDDEN if content else ''}")
                options += [option] if content else []
            else:
                masked.append(word)
                secret_follows = option
            continue
        clean = mask_secrets(word)
        if clean != word:
            options.append(option if sign else "(argument)")
        masked.append(clean)
    return masked, options


def mask_json(value: Any, depth: int = 0) -> Any:
    """Return a JSON value without secrets: by the names of keys, of ``NAME=value`` texts and of command options."""
    if depth > 100:
        return None
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(one, str) and one and looks_secret_name(str(key)) else mask_json(one, depth + 1)
            for key, one in value.items()
        }
    if isinstance(value, list):
        if value and all(isinstance(one, str) for one in value):
            words, _options = mask_arguments([_mask_variable(one) for one in value])
            return words
        return [mask_json(one, depth + 1) for one in value]
    return mask_secrets(value) if isinstance(value, str) else value


def mask_release(value: Any) -> Any:
    """Return a release.json without secrets; the fingerprints of secrets in it, which tell nothing, stay."""
    masked = mask_json(value)
    content = value.get("content") if isinstance(value, dict) else None
    prints = content.get("secrets") if isinstance(content, dict) else None
    if isinstance(prints, dict) and all(isinstance(one, str) and len(one) in (0, 16) for one in prints.values()):
        masked["content"]["secrets"] = dict(prints)
    return masked


def _mask_variable(word: str) -> str:
    name, sign, content = word.partition("=")
    if sign and content and re.match(r"\A\w+\Z", name) and looks_secret_name(name):
        return f"{name}={HIDDEN}"
    return word


# Identities ----------------------------------------------------------------------------------------------------------

_UUID = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}(?![0-9a-fA-F])")
_PART_UUID = re.compile(r"\b(PARTUUID=)[0-9a-fA-F-]{6,40}")
_MAC = re.compile(r"(?<![0-9a-fA-F:.-])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![0-9a-fA-F:.])")
_GUID = re.compile(r"(?<![0-9a-fA-F:])[0-9a-fA-F]{4}(?::[0-9a-fA-F]{4}){3}(?![0-9a-fA-F:.])")
_SERIAL_LINE = re.compile(
    r"((?:serial[ _]number|serial|\bpdi|board serial|service tag|guid|cluster ?uuid)\b[\w ]{0,20}[:=]\s*)"
    r"(?!n/a|\[n/a\]|none\b|0+\s*$)([\w.-]{4,})",
    re.IGNORECASE,
)
_SERIAL_TAG = re.compile(
    r"(<(serial|pdi|chassis_serial_number|gpu_fabric_guid|host_id|board_serial|module_serial)>)\s*(?!N/A)([^<]{1,200})(</\2>)"
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?::(?:\d{1,3}\.){3}\d{1,3})?(?![\w:])")
_EMAIL = re.compile(r"[\w.+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+[A-Za-z]{2,24}")
_HOME = re.compile(r"(/home/)([A-Za-z_][\w.-]{0,31})")
_DOMAIN = re.compile(
    r"(?<![\w.@/-])((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,8}"
    r"(?:com|net|org|io|local|internal|lan|corp|intra|private|cloud|ai|cn|de|uk|fr|jp|kr|eu|co|example|invalid|gov|edu))"
    r"(?![\w-]|\.\w)",
    re.IGNORECASE,
)
_PUBLIC_DOMAINS = re.compile(
    r"(?:\A|\.)(?:nvidia\.com|docker\.(?:com|io)|github\.com|githubusercontent\.com|nginx\.(?:com|org)|debian\.(?:org|net)|"
    r"ubuntu\.com|launchpad(?:content)?\.net|canonical\.com|kernel\.org|prometheus\.io|grafana\.com|huggingface\.co|w3\.org|quay\.io|"
    r"redhat\.com|fedoraproject\.org|rockylinux\.org|almalinux\.org|centos\.org|opencontainers\.org|pytorch\.org|"
    r"python\.org|freedesktop\.org|gnu\.org|k8s\.io|ghcr\.io|nvcr\.io|gcr\.io|mcr\.microsoft\.com|rc\.local)\Z",
    re.IGNORECASE,
)
_HOST_LABEL = re.compile(
    r"[\"']?\b(?:host|node|nodename|hostname|inventory_hostname)[\"']?\s*[=:]\s*[\"']([A-Za-z][\w.-]{2,62})[\"']"
)

_COMMON = frozenset(
    [
        "localhost",
        "localdomain",
        "host",
        "hosts",
        "node",
        "nodes",
        "server",
        "servers",
        "gateway",
        "gateways",
        "engine",
        "engines",
        "monitor",
        "monitors",
        "default",
        "root",
        "admin",
        "ubuntu",
        "debian",
        "nvidia",
        "docker",
        "containerd",
        "nginx",
        "prometheus",
        "alertmanager",
        "grafana",
        "systemd",
        "kernel",
        "linux",
        "gpu",
        "gpus",
        "cpu",
        "cpus",
        "numa",
        "none",
        "true",
        "false",
        "null",
        "unknown",
        "running",
        "container",
        "containers",
        "image",
        "images",
        "bridge",
        "overlay",
        "private",
        "public",
        "main",
        "master",
        "worker",
        "workers",
        "node0",
        "metal",
        "metalserve",
        "serve",
        "lab",
        "test",
        "prod",
        "production",
        "staging",
        "dev",
        "vllm",
        "sglang",
        "triton",
        "metrics",
        "health",
        "release",
        "releases",
        "model",
        "models",
        "config",
        "state",
        "status",
        "version",
        "name",
        "names",
        "file",
        "files",
        "etc",
        "var",
        "run",
        "proc",
        "sys",
        "lib",
        "usr",
        "bin",
        "opt",
        "tmp",
        "home",
        "data",
        "cache",
        "log",
        "logs",
        "commands",
        "processes",
        "scrapes",
        "disks",
        "stat",
        "listings",
        "certificates",
        "www-data",
        "nobody",
        "ec2-user",
        "centos",
        "rocky",
        "almalinux",
        "cloud-user",
        "vm",
        "instance",
        "machine",
        "computer",
        "desktop",
    ]
)
"""Words that are no identity even where a machine or a user is called so: replacing them would damage the texts."""

_NO_ADDRESSES = frozenset(
    {
        "dpkg",
        "rpm",
        "apt_history",
        "apt_holds",
        "nvidia_smi",
        "nvidia_version",
        "modinfo_nvidia",
        "nginx_version",
        "os_release",
        "uname",
        "virtualization",
        "lspci",
        "pci_devices",
        "pci_bridges",
    }
)
"""Probes in which four numbers with dots between them are a version, never an address."""


class Masker:
    """Replaces secrets and identities in the texts of one snapshot, each identity by the same stand-in everywhere."""

    def __init__(self, hosts: Iterable[str] = (), users: Iterable[str] = ()) -> None:
        """Take the names that are known from elsewhere: of this machine and of people's accounts on it."""
        self.stand_ins: dict[str, dict[str, str]] = {}
        self.hosts: set[str] = set()
        self.users: set[str] = set()
        self.own_names = [name for name in hosts if name]
        for name in self.own_names:
            self.add_host(name)
            self._host(name)  # the machine itself is host-1
        for name in users:
            self.add_user(name)
        self._names: Optional[re.Pattern[str]] = None

    def add_host(self, name: str) -> None:
        """Remember a host's name; its short form too. Common words and addresses are left alone."""
        for part in (name, name.split(".", maxsplit=1)[0]):
            low = part.lower()
            if len(low) >= 3 and low not in _COMMON and re.search(r"[a-z]", low) and not _PUBLIC_DOMAINS.search(low):
                self.hosts.add(low)
        self._names = None

    def add_user(self, name: str) -> None:
        """Remember an account's name; common ones are left alone."""
        if len(name) >= 2 and name.lower() not in _COMMON:
            self.users.add(name.lower())
        self._names = None

    def learn(self, text: str) -> None:
        """Remember the hosts and users that ``text`` itself names (labels, server names, home folders)."""
        for match in _HOST_LABEL.finditer(text):
            self.add_host(match.group(1))
        for match in _HOME.finditer(text):
            self.add_user(match.group(2))
        for match in re.finditer(r"^Requested-By: (\S+) \(\d+\)", text, re.MULTILINE):
            self.add_user(match.group(1))
        for match in re.finditer(r"\bserver_name\s+([^;]{1,500});", text):
            for name in match.group(1).split():
                if re.match(r"\A[A-Za-z][\w.-]{2,100}\Z", name):
                    self.add_host(name)
        for match in re.finditer(r"\bCN\s*=\s*([A-Za-z][\w.-]{2,62})", text):
            self.add_host(match.group(1))

    def mask(self, probe: str, path: str, text: str) -> str:
        """Return the text of one file of the snapshot as it may leave the machine."""
        if path.endswith(".json"):
            try:
                value = json.loads(text)
                masked = mask_release(value) if path.endswith("/release.json") else mask_json(value)
                text = json.dumps(self._json(path, masked), indent=1, ensure_ascii=False) + "\n"
            except (ValueError, RecursionError):
                text = mask_secrets(mask_assignments(text))
        elif probe == "nginx":
            text = mask_nginx(text)
        else:
            text = mask_secrets(mask_assignments(text))
        if probe == "uname":
            words = text.split(" ", 2)
            text = " ".join([words[0], self._host(words[1]), *words[2:]]) if len(words) > 2 else text
        if probe == "proc_net_tcp":
            return self._hex_addresses(text)
        if probe == "access_logs":
            text = re.sub(r'("key": ?")([^"]{1,100})(")', lambda m: m[1] + self._stand_in("client", m[2]) + m[3], text)
        return self.identities(text, probe not in _NO_ADDRESSES)

    def identities(self, text: str, addresses: bool = True) -> str:
        """Return ``text`` with names, addresses, UUIDs and serial numbers replaced."""
        text = _SERIAL_TAG.sub(lambda m: m[1] + re.sub(r"\w", "0", m[3]) + m[4], text)
        text = _SERIAL_LINE.sub(lambda m: m[1] + re.sub(r"\w", "0", m[2]), text)
        text = _UUID.sub(lambda m: self._uuid(m[0]), text)
        text = _PART_UUID.sub(r"\g<1>00000000-01", text)
        text = _MAC.sub(lambda m: self._mac(m[0]), text)
        text = _GUID.sub(lambda m: self._guid(m[0]), text)
        text = _EMAIL.sub("someone@example.com", text)
        if addresses:
            text = _IPV4.sub(lambda m: self.address(m[0]), text)
            text = _IPV6.sub(lambda m: self.address(m[0]), text)
        text = _DOMAIN.sub(lambda m: self._domain(m[1]), text)
        text = _HOME.sub(lambda m: m[1] + self._user(m[2]), text)
        pattern = self._pattern()
        return pattern.sub(lambda m: self._known(m[0]), text) if pattern is not None else text

    def address(self, text: str) -> str:
        """Return the stand-in of an IP address; loopback, unspecified, link-local and netmasks stay as they are."""
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text
        if (
            address.is_loopback
            or address.is_unspecified
            or address.is_link_local
            or address.is_multicast
            or text.startswith(("255.", "0."))
        ):
            return text
        key = str(address)
        if address.version == 6:
            mapped = address.ipv4_mapped
            if mapped is not None:
                return f"::ffff:{self.address(str(mapped))}"
            return self._stand_in("address6", key, "2001:db8::{:x}")
        number = self._number("address4", key)
        if address.is_private:
            return f"10.0.{number // 250}.{number % 250 + 1}"
        return f"203.0.113.{number + 1}" if number < 250 else f"198.18.{number // 250 % 250}.{number % 250 + 1}"

    def _json(self, path: str, value: Any) -> Any:
        """Hide what is an identity by the name of its key."""
        if path == "docker/info.json" and isinstance(value, dict):
            for key in ("ID", "Swarm", "Labels", "HttpProxy", "HttpsProxy", "NoProxy", "RegistryConfig"):
                value.pop(key, None)
            if isinstance(value.get("Name"), str):
                value["Name"] = self._host(value["Name"])
        return value

    def _number(self, kind: str, key: str) -> int:
        known = self.stand_ins.setdefault(kind, {})
        if key not in known:
            known[key] = str(len(known))
        return int(known[key])

    def _stand_in(self, kind: str, key: str, form: str = "") -> str:
        number = self._number(kind, key) + 1
        return form.format(number) if form else f"{kind}-{number}"

    def _uuid(self, text: str) -> str:
        if not text.strip("0-"):
            return text
        return f"00000000-0000-0000-0000-{self._number('uuid', text.lower()) + 1:012d}"

    def _mac(self, text: str) -> str:
        if not text.strip("0:") or text.lower() == "ff:ff:ff:ff:ff:ff":
            return text
        number = self._number("mac", text.lower()) + 1
        return f"02:00:00:00:{number >> 8 & 255:02x}:{number & 255:02x}"

    def _guid(self, text: str) -> str:
        return text if not text.strip("0:") else f"0000:0000:0000:{self._number('guid', text.lower()) + 1:04x}"

    def _host(self, name: str) -> str:
        return self._stand_in("host", name.lower().split(".")[0])

    def _user(self, name: str) -> str:
        return name if name.lower() in _COMMON else self._stand_in("user", name.lower())

    def _domain(self, name: str) -> str:
        if _PUBLIC_DOMAINS.search(name) or re.match(r"\A(?:host|site)-\d+\.example\Z", name):
            return name
        short = name.lower().split(".")[0]
        return (
            f"{self._host(short)}.example" if short in self.hosts else self._stand_in("site", name.lower()) + ".example"
        )

    def _pattern(self) -> Optional[re.Pattern[str]]:
        if self._names is None and (self.hosts or self.users):
            words = sorted(self.hosts | self.users, key=lambda word: (-len(word), word))
            choice = "|".join(re.escape(word) for word in words)
            self._names = re.compile(rf"(?<![A-Za-z0-9])(?:{choice})(?![A-Za-z0-9])", re.IGNORECASE)
        return self._names

    def _known(self, name: str) -> str:
        return self._host(name) if name.lower() in self.hosts else self._user(name)

    def _hex_addresses(self, text: str) -> str:
        """Replace the addresses of /proc/net/tcp, which are hexadecimal in host byte order."""

        def replace(match: re.Match[str]) -> str:
            raw = b"".join(bytes.fromhex(match[1][at : at + 8])[::-1] for at in range(0, len(match[1]), 8))
            stand_in = ipaddress.ip_address(self.address(str(ipaddress.ip_address(raw)))).packed
            if len(stand_in) != len(raw):
                stand_in = b"\0" * 10 + b"\xff\xff" + stand_in
            return b"".join(stand_in[at : at + 4][::-1] for at in range(0, len(raw), 4)).hex().upper() + ":"

        return re.sub(r"\b([0-9A-F]{32}|[0-9A-F]{8}):(?=[0-9A-F]{4}\b)", replace, text)
