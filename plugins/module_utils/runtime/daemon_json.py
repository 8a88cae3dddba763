# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Docker's ``daemon.json``: read it strictly, merge our settings into it, and say what dockerd must do about it.

Three rules make a shared file safe to own a part of:

* ``settings`` win over what stands in the file; ``defaults`` fill only what is absent or was written by us before.
* Every value that we write is remembered with what stood there before. What we no longer want goes back to that,
  unless somebody has changed it since.
* A file that we cannot read completely is never rewritten.

References: https://docs.docker.com/reference/cli/dockerd/#daemon-configuration-file, moby ``daemon/reload.go``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Path = tuple[str, ...]

# What dockerd takes over on SIGHUP (moby daemon/reload.go, the same from 20.10 to 29). `runtimes` is read there too,
# but a runtime added by reload alone was seen missing until a restart, and `features.cdi` is registered at start only.
RELOADABLE = frozenset(
    {
        "allow-nondistributable-artifacts",
        "debug",
        "insecure-registries",
        "labels",
        "live-restore",
        "max-concurrent-downloads",
        "max-concurrent-uploads",
        "max-download-attempts",
        "registry-mirrors",
        "shutdown-timeout",
    }
)
# A reload that lacks one of these keys resets it to its default; the others keep their value until a restart.
RESET_WHEN_REMOVED = frozenset({"max-concurrent-downloads", "max-concurrent-uploads", "max-download-attempts"})

# Drivers that know the options max-size and max-file; dockerd refuses to start when another one is given them.
ROTATING_LOG_DRIVERS = frozenset({"json-file", "local"})

_MISSING = object()


class DaemonJsonError(ValueError):
    """The file cannot be used as it is; the message names the file, the position and the remedy."""


@dataclass(frozen=True)
class Record:
    """One value that we wrote: where, what, and what stood there before (``had`` says whether anything did).

    For a list, ``value`` holds only the elements that we added.
    """

    path: Path
    value: Any
    had: bool = False
    before: Any = None


@dataclass(frozen=True)
class Merge:
    """The outcome of :func:`merge`: the new content, what to remember, and what differs from the content before."""

    content: dict[str, Any]
    records: tuple[Record, ...]
    changed: tuple[Path, ...]
    kept: tuple[Path, ...]


def parse(text: str, path: str) -> dict[str, Any]:
    """Return the object in ``text``, the content of ``path``; an empty file is an empty object.

    Raises DaemonJsonError for anything that dockerd would not read, with line and column, and for a key that is
    given twice (dockerd silently takes the last one; a rewrite would lose the other).
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise DaemonJsonError(
                    f"{path} gives the key {key!r} twice; keep one of them. The file was left as it is."
                )
            found[key] = value
        return found

    def no_constant(name: str) -> Any:
        raise DaemonJsonError(f"{path} contains {name}, which is not JSON. The file was left as it is.")

    if not text.strip():
        return {}
    try:
        content = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise DaemonJsonError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}."
            " Correct or move the file; it was left as it is."
        ) from None
    except RecursionError:
        raise DaemonJsonError(f"{path} is nested too deeply to be Docker's configuration.") from None
    if not isinstance(content, dict):
        raise DaemonJsonError(
            f"{path} holds a JSON {type(content).__name__} where Docker wants an object such as"
            ' {"live-restore": true}. The file was left as it is.'
        )
    return content


def render(content: Mapping[str, Any]) -> str:
    """Return ``content`` as the text to write; keys keep their order, so what others wrote stays where it was."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def quote_log_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` with every value of ``log-opts`` as a string, the only type dockerd accepts there."""
    options = content.get("log-opts")
    if not isinstance(options, dict):
        return dict(content)
    return {**content, "log-opts": {key: _as_text(value) for key, value in options.items()}}


def log_defaults(content: Mapping[str, Any], max_size: str, max_file: int) -> dict[str, Any]:
    """Return the log settings to fill in: rotation for a driver that knows it, nothing for any other.

    ``max_size`` is a size such as ``100m``; ``max_file`` a count of at least 1.
    """
    driver = content.get("log-driver", "json-file")
    if driver not in ROTATING_LOG_DRIVERS:
        return {}
    return {"log-driver": driver, "log-opts": {"max-size": max_size, "max-file": str(max_file)}}


def merge(
    existing: Mapping[str, Any],
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    records: Sequence[Record] = (),
) -> Merge:
    """Return ``existing`` with ``settings`` and ``defaults`` merged in and what ``records`` no longer covers undone.

    Objects are merged key by key; lists become the union, in the order found, with our elements last; everything else
    is replaced (``settings``) or kept (``defaults``); a null asks for nothing, and in ``settings`` drops the default.
    The function is idempotent: merging its own result with its own records returns the same content and records.
    ``kept`` names the defaults that stood otherwise already.
    """
    base = quote_log_options(existing)
    wanted: dict[Path, tuple[Any, bool]] = {}
    for path, value in _leaves(quote_log_options(defaults or {})):
        wanted[path] = (value, False)
    for path, value in _leaves(quote_log_options(settings)):
        wanted = {
            other: entry
            for other, entry in wanted.items()
            if other[: len(path)] != path and path[: len(other)] != other
        }
        wanted[path] = (value, True)
    wanted = {path: entry for path, entry in wanted.items() if entry[0] is not None}
    remembered = {record.path: record for record in records}

    content = _copy(base)
    for path, record in remembered.items():
        if path not in wanted:
            _undo(content, record)

    new_records: list[Record] = []
    kept: list[Path] = []
    for path, (value, wins) in wanted.items():
        known = remembered.get(path)
        record_or_none = _apply(content, path, value, wins, known)
        if record_or_none is not None:
            new_records.append(record_or_none)
        if not wins and not isinstance(value, list) and _get(content, path) != value:
            kept.append(path)
    return Merge(
        content=content,
        records=tuple(sorted(new_records, key=lambda record: record.path)),
        changed=tuple(_differences(existing, content)),
        kept=tuple(kept),
    )


def daemon_action(changed: Iterable[Path], content: Mapping[str, Any]) -> str:
    """Return what makes dockerd use the changed keys: ``none``, ``reload`` (SIGHUP) or ``restart``."""
    action = "none"
    for path in changed:
        key = path[0]
        if key not in RELOADABLE or (key not in content and key not in RESET_WHEN_REMOVED):
            return "restart"
        action = "reload"
    return action


def flag_conflicts(command: Sequence[str], content: Mapping[str, Any]) -> list[str]:
    """Return the keys of ``content`` that ``command`` (dockerd's own command line) also gives as a flag.

    dockerd refuses to start then ("specified both as a flag and in the configuration file"). List options are named
    in the singular as a flag and in the plural in the file; booleans and short forms are covered.
    """
    names = {"-H": "hosts", "-l": "log-level", "-D": "debug", "-g": "data-root", "-G": "group", "-s": "storage-driver"}
    plural = {
        "allow-nondistributable-artifact": "allow-nondistributable-artifacts",
        "authorization-plugin": "authorization-plugins",
        "default-ulimit": "default-ulimits",
        "dns-opt": "dns-opts",
        "exec-opt": "exec-opts",
        "feature": "features",
        "host": "hosts",
        "insecure-registry": "insecure-registries",
        "label": "labels",
        "log-opt": "log-opts",
        "registry-mirror": "registry-mirrors",
        "add-runtime": "runtimes",
        "storage-opt": "storage-opts",
    }
    found = []
    for word in command:
        flag = word.split("=", 1)[0]
        key = names.get(flag)
        if key is None and flag.startswith("--"):
            key = plural.get(flag[2:], flag[2:])
        if key is not None and key in content and key not in found:
            found.append(key)
    return found


def pointer(path: Path) -> str:
    """Return ``path`` as a JSON pointer (RFC 6901), such as ``/log-opts/max-size``."""
    return "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)


def records_to_json(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return ``records`` as plain values for the state file."""
    listed = []
    for record in records:
        entry: dict[str, Any] = {"path": pointer(record.path), "value": record.value}
        if record.had:
            entry["before"] = record.before
        listed.append(entry)
    return listed


def records_from_json(value: Any, path: str) -> tuple[Record, ...]:
    """Return the records in ``value``, read from the state file ``path``. Raises DaemonJsonError if it is no such
    list."""
    try:
        return tuple(
            Record(
                path=_from_pointer(entry["path"]),
                value=entry["value"],
                had="before" in entry,
                before=entry.get("before"),
            )
            for entry in value
        )
    except (TypeError, KeyError, AttributeError):
        raise DaemonJsonError(
            f"{path} is not the list of owned settings that this module writes; move it away."
            " Settings that were written before stay in daemon.json then."
        ) from None


def _from_pointer(text: str) -> Path:
    return tuple(part.replace("~1", "/").replace("~0", "~") for part in text.split("/")[1:])


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return str(value)
    return value


def _leaves(value: Mapping[str, Any], prefix: Path = ()) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    for key in sorted(value):
        path = (*prefix, key)
        inner = value[key]
        if isinstance(inner, Mapping) and inner:
            found.extend(_leaves(inner, path))
        else:
            found.append((path, inner))
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner) for inner in value]
    return value


def _get(content: Mapping[str, Any], path: Path) -> Any:
    value: Any = content
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _set(content: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        inner = content.get(key)
        if not isinstance(inner, dict):
            inner = {}
            content[key] = inner
        content = inner
    content[path[-1]] = value


def _remove(content: dict[str, Any], path: Path) -> None:
    parents = []
    for key in path[:-1]:
        parents.append((content, key))
        content = content[key]
    content.pop(path[-1], None)
    for parent, key in reversed(parents):
        if parent[key]:
            break
        del parent[key]


def _undo(content: dict[str, Any], record: Record) -> None:
    current = _get(content, record.path)
    if isinstance(record.value, list) and isinstance(current, list):
        rest = [item for item in current if item not in record.value]
        if record.before is not None and not rest:
            _set(content, record.path, _copy(record.before))
        elif rest or record.had:
            _set(content, record.path, rest)
        else:
            _remove(content, record.path)
    elif current is not _MISSING and _same(current, record.value):
        if record.had:
            _set(content, record.path, _copy(record.before))
        else:
            _remove(content, record.path)


def _apply(content: dict[str, Any], path: Path, value: Any, wins: bool, known: Record | None) -> Record | None:
    current = _get(content, path)
    if current is None:
        # To dockerd, null is the same as nothing.
        current = _MISSING
    if isinstance(value, list) and (current is _MISSING or isinstance(current, list)):
        return _apply_list(content, path, value, current if isinstance(current, list) else [], known)
    if current is _MISSING:
        _set(content, path, _copy(value))
        return Record(path, value)
    ours = known is not None and _same(current, known.value)
    if _same(current, value):
        return known if ours else None
    if ours and known is not None:
        _set(content, path, _copy(value))
        return Record(path, value, known.had, known.before)
    if not wins:
        return None
    _set(content, path, _copy(value))
    return Record(path, value, True, current)


def _apply_list(
    content: dict[str, Any], path: Path, value: list[Any], current: list[Any], known: Record | None
) -> Record | None:
    added_before = known.value if known is not None and isinstance(known.value, list) else []
    had = known.had if known is not None else _get(content, path) not in (None, _MISSING)
    before = known.before if known is not None else None
    stays = [item for item in current if item not in added_before or item in value]
    new = [item for item in value if item not in stays]
    _set(content, path, stays + new)
    ours = [item for item in value if item in new or (item in added_before and item in current)]
    return Record(path, ours, had, before) if ours or not had or before is not None else None


def _same(one: Any, other: Any) -> bool:
    # 1 == True in Python, but not to dockerd.
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any], prefix: Path = ()) -> list[Path]:
    found: list[Path] = []
    for key in sorted({*before, *after}):
        old, new = before.get(key, _MISSING), after.get(key, _MISSING)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found.extend(_differences(old, new, (*prefix, key)))
        elif old is _MISSING or new is _MISSING or not _same(old, new):
            found.append((*prefix, key))
    return found
