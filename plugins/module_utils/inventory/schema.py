# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Every ``metalserve_*`` variable: type, default, meaning, allowed values, nested keys and where it may stand.

To add a variable, add one ``Key`` to ``VARIABLES`` below (or to the ``keys`` of the mapping it belongs to) and run
``scripts/generate_variable_docs``. Nothing else: the checks, the "did you mean" and docs/variables.md come from here.

What a ``Key`` says is checked for each value alone, in values.py. What must hold between several values (GPUs of a
node, ports, names that refer to each other) is in rules_*.py, one function for each rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class _Unset:
    """Stands for "no default"; ``None`` would be a value."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Any = _Unset()

INVENTORY = "inventory"
"""Scope: one value for all hosts; belongs in group_vars/all.yml."""

HOST = "host"
"""Scope: may differ from host to host or group to group."""

RUN = "run"
"""Scope: meant for a single run, with ``-e`` on the command line."""


@dataclass(frozen=True)
class Key:
    """One variable, or one key inside a mapping.

    ``type`` is ``bool``, ``int``, ``number`` (whole or with a decimal point), ``str``, ``size`` (bytes, or text such
    as ``88G``), ``list`` (of ``each``), ``mapping`` (with ``keys``; ``open``: other keys are somebody else's to
    judge), ``map`` (free names, each value is ``each``) or ``any``. ``several`` allows a second type beside it.
    ``low`` and ``high`` are inclusive and in the unit of the name's ending (``_s`` is seconds). ``pattern`` is a
    regular expression for the whole text (or for the names of a ``map``), ``hint`` says in words what it wants.
    ``variants`` maps the value of the key ``type`` to the keys that go with it. A ``secret`` is never shown.
    ``text_on_command_line``: ``-e name=true``, which Ansible passes on as text, is accepted; who reads such a
    variable writes ``| bool``.
    """

    name: str
    type: str
    description: str
    default: Any = UNSET
    required: bool = False
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    pattern: str = ""
    hint: str = ""
    keys: tuple[Key, ...] = ()
    each: Key | None = None
    variants: Mapping[str, tuple[Key, ...]] | None = None
    several: Key | None = None
    open: bool = False
    empty: bool = True
    secret: bool = False
    scope: str = INVENTORY
    text_on_command_line: bool = False
    example: str = ""

    def key(self, name: str) -> Key | None:
        """Return the nested key called ``name``, or None."""
        return next((key for key in self.keys if key.name == name), None)


ENGINES = ("vllm", "sglang", "triton_vllm")
ACCELERATORS = ("nvidia", "cpu")
PLACEHOLDER = "CHANGE_ME"
"""Stands in inventory/example where a value is the site's own; validate refuses it wherever it is left."""

OS_VARIABLES = ("metalserve_os_family", "ansible_os_family", "ansible_distribution")
MAIN_GROUPS = ("engines", "gateways", "monitors")
VARIABLE_FOLDERS = ("group_vars", "host_vars")

LOWEST_PORT = 1024
LONGEST_CONTEXT = 16 * 1024 * 1024
"""Tokens; the longest context that any published model claims is 10 million. More is a slip of the keyboard."""

MAKE_A_KEY = "openssl rand -hex 32 | tr -d '\\n' | ansible-vault encrypt_string --stdin-name {name}"
"""Command that makes a key and encrypts it, ready to be pasted into a variables file. What encrypt_string reads is encrypted
whole, so the line's end must not come along.
"""

RESERVED_PORTS: Mapping[int, str] = {
    22: "SSH",
    80: "the gateway's redirect",
    443: "the gateway",
    3903: "mtail",
    5000: "the image registry",
    8081: "the gateway's admin endpoint",
    8082: "the gateway's inner door",
    9090: "Prometheus",
    9093: "Alertmanager",
    9100: "the node exporter",
    9113: "the nginx exporter",
    9400: "the DCGM exporter",
    9600: "the engine agent",
}

_NAME = r"[a-z0-9][a-z0-9._-]{0,62}"
_NAME_HINT = "small letters, digits, dots, dashes and underscores, 63 characters at most"
_POOL_NAME = r"[a-z][a-z0-9_-]{0,31}"
_POOL_HINT = "a small letter, then small letters, digits, underscores or dashes, 32 characters at most"
_ABSOLUTE = r"/[^\0]*"
_ABSOLUTE_HINT = "an absolute path, beginning with /"
_CONTROLLER_HINT = 'an absolute path; "{{ inventory_dir }}/…" is one too'
_VERSION = r"\d+\.\d+(\.\d+)?([.+-]?[A-Za-z0-9.]+)?"
_URL = r"https?://[^\s/]+\S*"

COMMIT = r"[0-9a-f]{40}"

_LENGTHS = (
    Key("mean", "number", "Mean, in tokens.", low=1),
    Key("p95", "number", "95th percentile, in tokens; the mean where it is not given.", low=1),
)

WORKLOAD = (
    Key("qps", "number", "Requests a second for the whole pool.", low=0, high=1_000_000, example="50"),
    Key(
        "prompt_tokens",
        "mapping",
        "Length of the prompts, in tokens; a single number is taken as mean and p95.",
        keys=_LENGTHS,
        several=Key("", "number", "", low=1),
        example="{mean: 350, p95: 1000}",
    ),
    Key(
        "output_tokens",
        "mapping",
        "Length of the answers, in tokens; a single number is taken as mean and p95.",
        keys=_LENGTHS,
        several=Key("", "number", "", low=1),
        example="{mean: 128, p95: 512}",
    ),
    Key("longest_context", "int", "Longest prompt plus answer that must work, in tokens.", low=1),
    Key(
        "shared_prefix",
        "number",
        "Share of the prompts that is the same from request to request, 0 to 1.",
        low=0,
        high=1,
    ),
    Key("priorities", "bool", "Whether requests carry priorities.", default=False),
    Key("lengths", "any", "Histogram of prompt lengths, for proposing pools: see docs/planning.md."),
)

SLO = (
    Key(
        "p99_s",
        "number",
        "99th percentile of the whole answer, in seconds; alerts fire above it.",
        default=1.5,
        low=0.001,
    ),
    Key("ttft_s", "number", "Time to the first token, in seconds.", low=0.001),
    Key("tpot_s", "number", "Time per output token, in seconds.", low=0.0001),
)

MINIMUMS = (
    Key(
        "prefill_tokens_per_s",
        "number",
        "Prompt tokens a second that the slowest replica does; time-outs rest on it. Default: 4000, on a CPU 200.",
        low=1,
    ),
)

CONTAINER = (
    Key(
        "memory",
        "size",
        "Memory limit of one replica's container. 88G suits a node of 8 cards with 80 GB.",
        example="88G",
    ),
    Key("memory_swap", "size", "Memory plus swap of one replica's container, so at least `memory`.", example="90G"),
    Key("shm", "size", "Size of /dev/shm; more than one GPU per replica needs at least 1G.", example="16G"),
    Key("ipc_mode", "str", "Shared memory of its own, or the host's.", default="private", choices=("private", "host")),
)

POOL = (
    Key("model", "str", "Name of the model, a key of `metalserve_models`.", required=True, empty=False),
    Key("engine", "str", "Engine kind.", required=True, choices=ENGINES),
    Key(
        "engine_version",
        "str",
        "Version of the engine that the image holds (of vLLM, also for `triton_vllm`).",
        required=True,
        pattern=_VERSION,
        hint='a version in quotes, such as "0.26.0"',
        example='"0.26.0"',
    ),
    Key(
        "image",
        "str",
        "Image of the engine, by digest.",
        required=True,
        empty=False,
        hint="registry/name@sha256: and 64 hexadecimal digits",
        example="10.0.0.5:5000/vllm-openai@sha256:…",
    ),
    Key(
        "served_name",
        "str",
        "Model name that clients send; default: `model`.",
        empty=False,
        pattern=r"[A-Za-z0-9][A-Za-z0-9._/@:+-]{0,255}",
        hint="letters, digits and . _ / @ : + -, beginning with a letter or digit",
    ),
    Key("tensor_parallel", "int", "GPUs that share each layer of a replica.", default=1, low=1, high=64),
    Key("pipeline_parallel", "int", "Stages of layers of a replica.", default=1, low=1, high=64),
    Key(
        "data_parallel",
        "int",
        "Engine ranks behind one address; for mixture-of-experts models only.",
        default=1,
        low=1,
        high=64,
    ),
    Key("nodes_per_replica", "int", "Nodes that one replica spans.", default=1, low=1, high=64),
    Key(
        "replicas_per_node",
        "int",
        "Replicas on each node; default: as many as its GPUs hold, on a CPU 1.",
        low=1,
        high=64,
    ),
    Key(
        "port",
        "int",
        "Port of the first replica; replica i adds i. Default: 8100 + 100 for each earlier pool on any of its nodes.",
        low=LOWEST_PORT,
        high=65535,
    ),
    Key(
        "max_model_len",
        "int",
        "Longest prompt plus answer, in tokens; longer ones go to the model's next pool. Default: 8192, on a CPU 2048.",
        low=1,
        high=LONGEST_CONTEXT,
    ),
    Key(
        "longest_stream_s",
        "number",
        "Longest answer, in seconds; a drain cuts what takes longer.",
        default=300,
        low=1,
        high=86400,
    ),
    Key(
        "queue",
        "int",
        "Requests that may wait in the pool, beyond its batches, before 429. Default: 100, or what 60 s of prefill work off.",
        low=0,
    ),
    Key("workload", "mapping", "The load that is wanted; the plan rests on it.", keys=WORKLOAD),
    Key("slo", "mapping", "What is promised to clients.", keys=SLO),
    Key("minimums", "mapping", "What the slowest replica must do.", keys=MINIMUMS),
    Key("container", "mapping", "Limits of one replica's container.", keys=CONTAINER),
    Key(
        "calibration",
        "str",
        "File on the controller that scripts/plan --calibrate wrote from a start-up log of this pool's engine on its cards.",
        pattern=_ABSOLUTE,
        hint=_ABSOLUTE_HINT,
        example="/srv/calibration/h200.json",
    ),
    Key(
        "settings",
        "map",
        "Fixes planned values, in vLLM's option names with underscores for every engine.",
        each=Key("", "any", ""),
        example="{max_num_seqs: 256}",
    ),
    Key(
        "env",
        "map",
        "More environment variables of the engine; never secrets.",
        each=Key("", "str", ""),
        pattern=r"[A-Za-z_][A-Za-z0-9_]*",
        hint="letters, digits and underscores",
    ),
)

_SHA256 = r"[0-9a-f]{64}"

SOURCES: Mapping[str, tuple[Key, ...]] = {
    "local": (Key("path", "str", "Folder on the controller.", required=True, pattern=_ABSOLUTE, hint=_ABSOLUTE_HINT),),
    "archive": (
        Key(
            "path",
            "str",
            "Tar archive on the controller, or an http(s) address.",
            required=True,
            pattern=r"(/|https?://)\S+",
            hint="an absolute path or an http(s) address",
        ),
        Key("sha256", "str", "SHA-256 of the archive.", pattern=_SHA256, hint="64 hexadecimal digits"),
    ),
    "rsync": (
        Key(
            "path",
            "str",
            "What the node pulls with rsync from another host; a plain path is a folder on the controller.",
            required=True,
            pattern=r"(/|rsync://[^/\s]+/|[\w.@-]+:/)\S*",
            hint="rsync://host/module/path, user@host:/path, or an absolute path on the controller",
            example="rsync://store.example.com/models/deepseek-v2-lite",
        ),
    ),
    "shared": (
        Key(
            "path",
            "str",
            "Folder on a mount that every node has.",
            required=True,
            pattern=_ABSOLUTE,
            hint=_ABSOLUTE_HINT,
        ),
        Key("in_place", "bool", "Serve it from the mount instead of copying it to the node.", default=False),
    ),
    "huggingface": (
        Key(
            "repository",
            "str",
            "Repository.",
            required=True,
            pattern=r"[\w.-]+/[\w.-]+",
            hint="owner/name",
            example="deepseek-ai/DeepSeek-V2-Lite",
        ),
        Key(
            "commit",
            "str",
            "Commit to fetch; default: the model's `revision`, where that is a commit.",
            pattern=COMMIT,
            hint="the 40 hexadecimal digits of the commit",
        ),
        Key("exclude", "list", "Patterns of files that are not fetched.", each=Key("", "str", "", empty=False)),
        Key("endpoint", "str", "Address of a mirror.", pattern=_URL, hint="an http(s) address"),
        Key("token", "str", "Access token.", secret=True, empty=False),
        Key("offline", "bool", "Ask no server; fail where the node does not have it yet.", default=False),
    ),
}

MODEL = (
    Key(
        "revision",
        "str",
        "Name of the folder for this state of the files; files under one revision never change.",
        required=True,
        pattern=_NAME.replace("a-z", "A-Za-z"),
        hint="a folder name in quotes: letters, digits, dots, dashes and underscores",
        example='"604d5664"',
    ),
    Key("source", "mapping", "Where the files come from.", required=True, variants=SOURCES),
    Key("weights", "bool", "Whether the model has weights; false for engines that load dummy ones.", default=True),
)

API_KEY = (
    Key("name", "str", "Who uses it; appears in logs and metrics.", required=True, pattern=_NAME, hint=_NAME_HINT),
    Key("key", "str", "The key itself, from a vault.", secret=True),
    Key(
        "sha256",
        "str",
        "SHA-256 of the key, instead of `key`.",
        pattern=_SHA256,
        hint="64 hexadecimal digits",
        secret=True,
    ),
    Key(
        "vip", "bool", "Whether a share of each pool's room is kept for this key (`gateway_vip_share`).", default=False
    ),
)

REGISTRY = (
    Key(
        "address",
        "str",
        "Host, or host:port, without http://.",
        pattern=r"[A-Za-z0-9.-]+(:\d{1,5})?|\[[0-9a-fA-F:]+\](:\d{1,5})?",
        hint='host or host:port, such as "10.0.0.5:5000"',
        empty=True,
    ),
    Key("username", "str", "Login, where the registry wants one."),
    Key("password", "str", "Password, from a vault.", secret=True),
    Key(
        "ca_file",
        "str",
        "The registry's CA certificate, a file on the controller.",
        pattern=_ABSOLUTE,
        hint=_CONTROLLER_HINT,
    ),
)

TLS = (
    Key(
        "certificate",
        "str",
        "Certificate with its chain, a file on the controller; empty: one is generated.",
        pattern=_ABSOLUTE,
        hint=_CONTROLLER_HINT,
    ),
    Key("private_key", "str", "Its private key, a file on the controller.", pattern=_ABSOLUTE, hint=_CONTROLLER_HINT),
    Key(
        "names",
        "list",
        "Names that the certificate is for.",
        each=Key("", "str", "", empty=False, hint="a host name", example="llm.example.com"),
        example="[llm.example.com]",
    ),
)

RECEIVER = (Key("name", "str", "Name of the receiver.", required=True, empty=False),)

VARIABLES: tuple[Key, ...] = (
    Key(
        "metalserve_pools",
        "map",
        "The pools: which model runs on which engine, for which load. The first takes what no other claims.",
        required=True,
        pattern=_POOL_NAME,
        hint=_POOL_HINT,
        each=Key("", "mapping", "", keys=POOL),
    ),
    Key(
        "metalserve_models",
        "map",
        "The models that pools may name.",
        required=True,
        pattern=_NAME,
        hint=_NAME_HINT,
        each=Key("", "mapping", "", keys=MODEL),
    ),
    Key(
        "metalserve_accelerator",
        "str",
        "What the node computes on.",
        default="nvidia",
        choices=ACCELERATORS,
        scope=HOST,
    ),
    Key(
        "metalserve_expected_gpus",
        "int",
        "GPUs that an engine node must have; fewer stop it before Docker is touched.",
        low=0,
        high=64,
        scope=HOST,
        example="8",
    ),
    Key(
        "metalserve_address",
        "str",
        "Private address of the host, IPv4. Default: `ansible_host`, else its inventory name.",
        empty=False,
        scope=HOST,
        example="10.0.0.11",
    ),
    Key(
        "metalserve_os_family",
        "str",
        "Family of the host's operating system. RedHat can be audited, not set up.",
        default="Debian",
        choices=("Debian", "RedHat"),
        scope=HOST,
    ),
    Key(
        "metalserve_root",
        "str",
        "Folder for models, releases and caches on every node.",
        default="/var/lib/metalserve",
        pattern=r"/[^\0\s]+",
        hint="an absolute path other than /, without spaces",
    ),
    Key("metalserve_registry", "mapping", "The registry that nodes pull images from.", keys=REGISTRY),
    Key(
        "metalserve_api_keys",
        "list",
        "Keys of the clients.",
        required=True,
        each=Key("", "mapping", "", keys=API_KEY),
        secret=True,
        example='[{name: finance, key: "{{ vault_finance_key }}"}]',
    ),
    Key(
        "metalserve_engine_api_key",
        "str",
        "Key between gateway and engines, from a vault.",
        required=True,
        secret=True,
        example='"{{ vault_engine_key }}"',
    ),
    Key("metalserve_tls", "mapping", "The gateway's certificate; nothing given: one is generated.", keys=TLS),
    Key(
        "metalserve_alert_receivers",
        "list",
        "Alertmanager receivers, as in its configuration.",
        default=[],
        each=Key("", "mapping", "", keys=RECEIVER, open=True),
        secret=True,
    ),
    Key(
        "metalserve_alert_routes",
        "list",
        "Alertmanager routes, as in its configuration; empty: all alerts go to the first receiver.",
        default=[],
        each=Key("", "mapping", "", open=True),
    ),
    Key(
        "metalserve_http_proxy",
        "str",
        "Proxy through which nodes fetch models and the key of NVIDIA's package repository; apt and Docker have their own.",
        pattern=_URL,
        hint="an http(s) address",
    ),
    Key(
        "metalserve_no_proxy",
        "str",
        "Names and addresses that are reached without the proxy, with commas between.",
        empty=False,
    ),
    Key(
        "metalserve_audit_strict",
        "bool",
        "Whether warnings of an audit end it with exit code 1.",
        default=False,
        text_on_command_line=True,
        scope=HOST,
    ),
    Key(
        "metalserve_audit_publish",
        "bool",
        "Whether an audit writes its verdicts as metrics on the nodes.",
        default=False,
        text_on_command_line=True,
        scope=HOST,
    ),
    Key(
        "metalserve_audit_policy",
        "mapping",
        "Thresholds and waivers of the audit; checked against schemas/policy.json.",
        open=True,
        scope=HOST,
    ),
    Key(
        "metalserve_allow_outage",
        "bool",
        "Redeploy a pool although its other replicas cannot carry the load.",
        default=False,
        text_on_command_line=True,
        scope=RUN,
    ),
    Key(
        "metalserve_emergency",
        "bool",
        "Skip the soak of a rollback and do all nodes at once; gates stay.",
        default=False,
        text_on_command_line=True,
        scope=RUN,
    ),
)

BY_NAME: Mapping[str, Key] = {key.name: key for key in VARIABLES}
