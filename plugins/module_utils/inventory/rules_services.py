# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""What stands around the engines: client keys, image registry, TLS, alert receivers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ansible_collections.metal.serve.plugins.module_utils.checklist.audit import policy_of
from ansible_collections.metal.serve.plugins.module_utils.checklist.policy import PolicyError
from ansible_collections.metal.serve.plugins.module_utils.gateway.plan import TOKEN
from ansible_collections.metal.serve.plugins.module_utils.inventory import values
from ansible_collections.metal.serve.plugins.module_utils.inventory.model import (
    WARNING,
    Path,
    Setting,
    Unresolved,
)
from ansible_collections.metal.serve.plugins.module_utils.inventory.schema import MAKE_A_KEY
from ansible_collections.metal.serve.plugins.module_utils.inventory.values import did_you_mean, listed, show
from ansible_collections.metal.serve.plugins.module_utils.inventory.view import (
    View,
    at,
    text,
)

SHORTEST_KEY = 16


_DEFAULT_LIKE = re.compile(
    r"change[\s_-]*(me|it|this)|replace[\s_-]*me|placeholder|example|default|todo|fixme|your[\s_-]|dummy|<.*>|"
    r"\A(secret|password|passwd|admin|letmein|test|token|key|api[_-]?key)[\s_-]*\d*\Z|\A(.)\3*\Z|\A(0?123456\d*)\Z",
    re.IGNORECASE,
)


def api_keys(view: View) -> None:
    """Client keys: one of key and sha256 each, no name or key twice, nothing that looks like an example."""
    setting = view.setting("metalserve_api_keys")
    entries = view.wide("metalserve_api_keys")
    engine_key = text(view.wide("metalserve_engine_api_key"))
    if isinstance(entries, (list, tuple)):
        if not entries:
            view.add_at(
                setting,
                (),
                "is empty: no client could use the gateway",
                'add one: {name: <who>, key: "{{ vault_<who>_key }}"}; make the key with: '
                + MAKE_A_KEY.format(name="vault_<who>_key"),
                "[]",
                view.lenient(),
            )
        elif "verify_api_key" not in view.settings and not any(
            "key" in entry for entry in entries if isinstance(entry, Mapping)
        ):
            view.add_at(
                setting,
                (),
                "has no entry with key itself, so the last play could not ask the gateway anything",
                "give one entry its key, or set verify_api_key, both from a vault",
                "",
                view.lenient(),
            )
        names: dict[str, int] = {}
        secrets: dict[str, int] = {}
        for index, entry in enumerate(entries):
            if not isinstance(entry, Mapping):
                continue
            given = [name for name in ("key", "sha256") if name in entry]
            if len(given) != 1:
                problem = "has neither key nor sha256" if not given else "has both key and sha256"
                view.add_at(setting, (index,), problem, "give exactly one of them", "")
            name, secret = text(entry.get("name")), text(entry.get("key"))
            if name and names.setdefault(name, index) != index:
                view.add_at(
                    setting,
                    (index, "name"),
                    f"is also the name of entry {names[name]}",
                    "give each client a name of its own",
                    show(name),
                )
            if "key" in given:
                _judge_secret(view, setting, (index, "key"), entry["key"], f"vault_{name or '<who>'}_key")
            if secret and not _DEFAULT_LIKE.search(secret) and secrets.setdefault(secret, index) != index:
                view.add_at(
                    setting,
                    (index, "key"),
                    f"is the same key as that of entry {secrets[secret]}",
                    "give each client a key of its own",
                    values.SECRET,
                )
            if secret and secret == engine_key and not _DEFAULT_LIKE.search(secret):
                view.add_at(
                    setting,
                    (index, "key"),
                    "is the same key as metalserve_engine_api_key",
                    "give clients other keys than the engines",
                    values.SECRET,
                )
    engine = view.setting("metalserve_engine_api_key")
    if engine is not None:
        _judge_secret(view, engine, (), engine.variable.value, "vault_engine_key")


def _judge_secret(view: View, setting: Setting | None, path: Path, secret: Any, vault_name: str) -> None:
    """Note a secret that is empty, short, or looks like an example."""
    if not isinstance(secret, str):
        return
    right = "make a real one with:\n" + MAKE_A_KEY.format(name=vault_name)
    if not secret.strip():
        view.add_at(setting, path, "is empty", right, "(empty)", view.lenient())
    elif _DEFAULT_LIKE.search(secret):
        view.add_at(
            setting, path, "looks like an example or a default, not like a secret", right, values.SECRET, view.lenient()
        )
    elif len(secret) < SHORTEST_KEY:
        view.add_at(
            setting, path, f"is too short: fewer than {SHORTEST_KEY} characters", right, values.SECRET, view.lenient()
        )
    # What only stands around it is told where the text is looked at.
    elif not TOKEN.match(secret.strip()):
        view.add_at(
            setting,
            path,
            "has characters that cannot stand in an HTTP header (letters, digits and ._~+/=- can)",
            right,
            values.SECRET,
        )


def registry(view: View) -> None:
    """The registry's login is whole and its CA file exists."""
    setting = view.setting("metalserve_registry")
    value = view.wide("metalserve_registry")
    if not isinstance(value, Mapping):
        return
    for one, other in (("username", "password"), ("password", "username")):
        if text(value.get(one)) and not value.get(other):
            view.add_at(
                setting,
                (other,),
                f"is missing, but {one} is given",
                'give both, or neither; the password from a vault: "{{ vault_registry_password }}"',
                "",
            )
    for name in ("username", "ca_file"):
        if text(value.get(name)) and not value.get("address"):
            view.add_at(setting, ("address",), f"is missing, but {name} is given", "write the registry's host:port", "")
            break
    _file(view, setting, ("ca_file",))


def tls(view: View) -> None:
    """Certificate and key come together and exist; names are host names."""
    setting = view.setting("metalserve_tls")
    value = view.wide("metalserve_tls")
    if not isinstance(value, Mapping):
        return
    for one, other in (("certificate", "private_key"), ("private_key", "certificate")):
        if text(value.get(one)) and not value.get(other):
            view.add_at(
                setting,
                (other,),
                f"is missing, but {one} is given",
                "give both, or neither (then a certificate is generated)",
                "",
            )
    for name in ("certificate", "private_key"):
        _file(view, setting, (name,))
    given = value.get("names")
    names = given if isinstance(given, (list, tuple)) else ()
    whole_names = [name for name in names if text(name) and not name.startswith("*")]
    if text(value.get("certificate")) and not whole_names and "verify_server_name" not in view.settings:
        view.add_at(
            setting,
            ("names",),
            "has no name without *, but certificate is given: the last play asks the gateway by the first",
            "write a name that the certificate is for, such as llm.example.com",
            severity=view.lenient(),
        )
    for index, name in enumerate(names):
        if text(name) and not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9a-fA-F:.]+", name):
            view.add_at(
                setting,
                ("names", index),
                "is not a host name or address",
                "write it without https:// and path, such as llm.example.com",
            )


def _file(view: View, setting: Setting | None, path: Path) -> None:
    """Note a file on the controller that does not exist."""
    name = text(at(setting.variable.value, path)) if setting is not None else ""
    if name and view.exists is not None and not view.exists(name):
        view.add_at(
            setting,
            path,
            "is a file that does not exist on this machine",
            "write the path of a file on the controller",
            severity=view.lenient(),
        )


_RECEIVER_KINDS = [
    "discord",
    "email",
    "incidentio",
    "jira",
    "mattermost",
    "msteams",
    "msteamsv2",
    "opsgenie",
    "pagerduty",
    "pushover",
    "rocketchat",
    "slack",
    "sns",
    "telegram",
    "victorops",
    "webex",
    "webhook",
    "wechat",
]


def alerts(view: View) -> None:
    """There is a receiver; receivers and routes fit together. Their secrets are never shown."""
    receivers = view.wide("metalserve_alert_receivers")
    if isinstance(receivers, Unresolved) or not view.inventory.hosts:
        return
    setting = view.setting("metalserve_alert_receivers")
    if not receivers:
        if receivers is None or isinstance(receivers, (list, tuple)):
            where = setting.variable.origin(()) if setting is not None else ""
            view.add(
                "metalserve_alert_receivers",
                "[]" if setting is not None else "",
                "no alert receiver: alerts fire, but nobody gets them",
                'add one, such as [{name: oncall, webhook_configs: [{url: "https://…"}]}]',
                where=where or view.inventory.source,
                severity=WARNING,
            )
        return
    kinds = [f"{kind}_configs" for kind in _RECEIVER_KINDS]
    names: list[str] = []
    for index, receiver in enumerate(receivers if isinstance(receivers, (list, tuple)) else ()):
        if not isinstance(receiver, Mapping):
            continue
        name = text(receiver.get("name"))
        if name and name in names:
            view.add_at(
                setting,
                (index, "name"),
                "is the name of two receivers",
                "give each receiver a name of its own",
                show(name),
            )
        names.append(name)
        for key in receiver:
            if key != "name" and key not in kinds:
                view.add_at(
                    setting,
                    (index, key),
                    "is not known to Alertmanager here",
                    did_you_mean(str(key), ["name", *kinds], f"kinds are {', '.join(kinds)}"),
                    values.SECRET,
                )
        if not any(receiver.get(kind) for kind in kinds):
            view.add_at(
                setting,
                (index,),
                "has a name but no way to send anything",
                'add one, such as webhook_configs: [{url: "https://…"}]',
                show(name),
                WARNING,
            )
    routes = view.wide("metalserve_alert_routes")
    for index, route in enumerate(routes if isinstance(routes, (list, tuple)) else ()):
        target = route.get("receiver") if isinstance(route, Mapping) else None
        if text(target) and target not in names:
            view.add_at(
                view.setting("metalserve_alert_routes"),
                (index, "receiver"),
                "is not the name of a receiver",
                did_you_mean(text(target), names, f"receivers are {listed(names, 'and')}"),
            )


def audit_policy(view: View) -> None:
    """The audit's thresholds and waivers are such as the audit takes, and waivers name hosts that there are."""
    for setting in view.settings.get("metalserve_audit_policy", []):
        policy = setting.variable.value
        if not isinstance(policy, Mapping):
            continue
        try:
            policy_of(policy)
        except PolicyError as error:
            for fault in error.faults:
                view.add_at(setting, fault.place, fault.what, fault.right)
            continue
        for index, waiver in enumerate(policy.get("waivers") or []):
            for place, host in enumerate(waiver.get("hosts") or []):
                if not any(fnmatchcase(name, host) for name in view.inventory.hosts):
                    view.add_at(
                        setting,
                        ("waivers", index, "hosts", place),
                        "is no host of this inventory, so the waiver does not cover it",
                        did_you_mean(host, view.inventory.hosts, "write a host's inventory name"),
                        severity=WARNING,
                    )
