# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Open files of sessions: what counts is what the next login gets, and a login that was kept open does not say that."""

from __future__ import annotations

import pytest

from .facts_of import facts, verdict_of
from .hosts import LIMITS

SEEN, TIMES = "processes/session/limits", "processes/session/times"
CONF = "files/etc/security/limits.d/90-metalserve.conf"
SSHD, PAM, COMMON = "files/etc/ssh/sshd_config", "files/etc/pam.d/sshd", "files/etc/pam.d/common-session"
FEW = LIMITS.replace("1048576", "1024   ")
ENOUGH = "*    soft nofile 1048576\n*    hard nofile 1048576\n"
OLDER, NEWER = "login: 1764540000.10\nsettings: 1764540060.20\n", "login: 1764540060.20\nsettings: 1764540000.10\n"
STACK = {SSHD: "UsePAM yes\n", PAM: "@include common-session\nsession required pam_limits.so\n"}
NR_OPEN = "files/proc/sys/fs/nr_open"

CASES: dict[str, tuple[dict[str, str], str]] = {
    "a good login, newer than the file": ({SEEN: LIMITS, TIMES: NEWER, CONF: ENOUGH, **STACK}, "pass"),
    "a poor login that is older than the mend": ({SEEN: FEW, TIMES: OLDER, CONF: ENOUGH, **STACK}, "pass"),
    "a poor login that is newer than the file": ({SEEN: FEW, TIMES: NEWER, CONF: ENOUGH, **STACK}, "fail"),
    "a poor login of unknown age": ({SEEN: FEW, CONF: ENOUGH, **STACK}, "fail"),
    "a good login that is older than the harm": (
        {SEEN: LIMITS, TIMES: OLDER, CONF: ENOUGH.replace("1048576", "1024"), **STACK},
        "fail",
    ),
    "the harm, and a good login of a user with a line of its own": (
        {SEEN: LIMITS, TIMES: NEWER, CONF: ENOUGH.replace("1048576", "1024"), **STACK},
        "fail",
    ),
    "an older login, and the hard limit holds the soft one down": (
        {SEEN: LIMITS, TIMES: OLDER, CONF: "* soft nofile 1048576\n* hard nofile 4096\n", **STACK},
        "fail",
    ),
    "an older login, and no line any more": ({SEEN: LIMITS, TIMES: OLDER, CONF: "# none\n", **STACK}, "fail"),
    "an older login, and sshd without PAM": (
        {SEEN: LIMITS, TIMES: OLDER, CONF: ENOUGH, **STACK, SSHD: "UsePAM no\n", "processes/sshd/limits": FEW},
        "fail",
    ),
    "an older login, and sshd that does not say PAM": (
        {SEEN: LIMITS, TIMES: OLDER, CONF: ENOUGH, **STACK, SSHD: "Port 22\n", "processes/sshd/limits": FEW},
        "fail",
    ),
    "an older login, and no pam_limits in sshd's file": (
        {SEEN: LIMITS, TIMES: OLDER, CONF: ENOUGH, **STACK, PAM: "session required pam_unix.so\n",
         "processes/sshd/limits": FEW},
        "fail",
    ),
    "an older login without pam_limits, and sshd's own limit is unknown": (
        {SEEN: LIMITS, TIMES: OLDER, CONF: ENOUGH, **STACK, PAM: "session required pam_unix.so\n"},
        "unknown",
    ),
    "an older login, and pam_limits two includes away": (
        {SEEN: FEW, TIMES: OLDER, CONF: ENOUGH, SSHD: "UsePAM yes\n", PAM: "session include password-auth\n",
         "files/etc/pam.d/password-auth": "session substack system-auth\n",
         "files/etc/pam.d/system-auth": "session [default=1] pam_limits.so\n"},
        "pass",
    ),
    "an older login, and nothing known of PAM": ({SEEN: FEW, TIMES: OLDER, CONF: ENOUGH}, "unknown"),
    "an older login, and UsePAM said twice": (
        {SEEN: FEW, TIMES: OLDER, CONF: ENOUGH, **STACK, SSHD: "Include /etc/ssh/sshd_config.d/*.conf\nUsePAM yes\n",
         "files/etc/ssh/sshd_config.d/50-site.conf": "UsePAM no\n"},
        "unknown",
    ),
    "an older login, and more than the kernel lets anybody have": (
        {SEEN: LIMITS, TIMES: OLDER, CONF: ENOUGH, NR_OPEN: "65536\n", **STACK},
        "fail",
    ),
    "a container, where sshd's own limit may be the end": (
        {SEEN: LIMITS, TIMES: OLDER, CONF: ENOUGH, **STACK, "processes/sshd/limits": FEW,
         "commands/systemd-detect-virt.txt": "docker\n"},
        "unknown",
    ),
    "unlimited": ({SEEN: LIMITS, TIMES: OLDER, CONF: "* - nofile unlimited\n", NR_OPEN: "1048576\n", **STACK}, "warn"),
    "not over SSH": ({CONF: ENOUGH}, "pass"),
    "not over SSH, and sshd without PAM": ({CONF: ENOUGH, **STACK, SSHD: "UsePAM no\n"}, "unknown"),
    "a session that cannot be understood": ({SEEN: "soup\n", TIMES: OLDER, CONF: ENOUGH, **STACK}, "unknown"),
    "times that cannot be understood": ({SEEN: FEW, TIMES: "login: soup\nsettings: 1\n", CONF: ENOUGH, **STACK}, "fail"),
    "PAM's files may not be read": (
        {SEEN: FEW, TIMES: OLDER, CONF: ENOUGH, **STACK, "index.json": '{"probes": {"session_pam": "denied"}}'},
        "unknown",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "word"), CASES.values(), ids=CASES)
def test_what_the_next_login_gets_is_judged(files: dict[str, str], word: str) -> None:
    assert verdict_of("limits.session_nofile", facts(files)).verdict == word


def test_a_poor_login_says_what_the_files_say() -> None:
    found = verdict_of("limits.session_nofile", facts({SEEN: FEW, TIMES: NEWER, CONF: ENOUGH, **STACK}))
    assert found.evidence == ["the next login: limits.d: 1048576"]


def test_a_login_that_is_older_is_named() -> None:
    found = verdict_of("limits.session_nofile", facts({SEEN: FEW, TIMES: OLDER, CONF: ENOUGH, **STACK}))
    assert found.current == "limits.d (the login that was seen is older): 1048576"
