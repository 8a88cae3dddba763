# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Whatever goes wrong: the service stays up, capacity is restored or the node is named, and the next run goes through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.redeploy import lab


@pytest.fixture(scope="module")
def found_before() -> set[tuple[str, str]]:
    """What the audit has to say of this lab, which has no monitoring, before anything goes wrong."""
    return lab.not_fine()


@pytest.fixture(autouse=True)
def as_before(found_before: set[tuple[str, str]]) -> Iterator[None]:
    """Each test begins with both replicas in rotation, and ends so: a client that is there all the time notices nothing, and
    the audit finds nothing that it did not find before.
    """
    with lab.unnoticed():
        yield
    assert lab.not_fine() - found_before == set()


@pytest.mark.parametrize(
    ("release", "words"),
    [
        ("crash", "does not serve: "),
        ("garbage", "golden prompt"),
        ("slow", "P99"),
        ("wedge", "does not serve"),
        ("oom", "137"),
    ],
)
def test_a_bad_release_is_taken_back(release: str, words: str) -> None:
    untouched = lab.started("engine2")
    run = lab.playbook("redeploy", *lab.release(release), *lab.QUICK)
    assert run.code != 0
    assert words in run.output, run.end
    assert "engine1 serves again with what served before" in run.output, run.end
    assert lab.started("engine2") == untouched


def test_an_image_that_is_not_there_changes_nothing() -> None:
    before = [lab.started(node) for node in lab.ENGINES]
    run = lab.playbook("redeploy", "-e", f"test_digest=sha256:{'0' * 64}", *lab.QUICK)
    assert run.code != 0
    assert "Nothing was changed" in run.output, run.end
    assert [lab.started(node) for node in lab.ENGINES] == before


def test_a_changed_model_file_changes_nothing() -> None:
    path = "/var/lib/metalserve/models/standin/1/config.json"
    before = [lab.started(node) for node in lab.ENGINES]
    lab.on("engine2", f"cp -a {path} /root/kept && chmod u+w {path} && echo ' ' >> {path}")
    try:
        run = lab.playbook("redeploy", *lab.release("next"), *lab.QUICK)
    finally:
        lab.on("engine2", f"cat /root/kept > {path}")
    assert run.code != 0
    assert "Nothing was changed" in run.output, run.end
    assert [lab.started(node) for node in lab.ENGINES] == before


def test_two_at_once() -> None:
    first = lab.Playbook("redeploy", *lab.release("garbage"), *lab.QUICK)
    first.until("Make ready what it is to become")
    second = lab.playbook("redeploy", *lab.release("next"), *lab.QUICK)
    assert second.code == 2
    assert "is held by" in second.output, second.end
    assert "since" in second.output
    site = lab.playbook("unlocked")
    assert site.code == 2
    assert "is held by" in site.output, site.end
    ended = first.finish(300)
    assert "engine1 serves again with what served before" in ended.output, ended.end


@pytest.mark.parametrize(
    "task",
    [
        "Make ready what it is to become",
        "Lock the node",
        "Send it no new requests",
        "Stop the engine and see",
        "Make the release current",
        "Start the engine",
        "Warm it up",
        "Send it requests again",
        "See that it stays healthy",
    ],
)
def test_a_killed_controller_is_followed_by_one_that_puts_it_right(task: str) -> None:
    killed = lab.Playbook("redeploy", *lab.release("next"), *lab.QUICK)
    killed.until(task)
    killed.kill()
    again = lab.playbook("redeploy", *lab.QUICK)
    assert again.code == 0, again.end


def test_a_lost_connection_in_the_middle_of_a_drain() -> None:
    run = lab.Playbook("redeploy", *lab.release("next"), *lab.QUICK)
    run.until("Send it no new requests")
    lab.on("engine1", "systemctl stop ssh.socket ssh.service; pkill -9 sshd; true", check=False)
    try:
        ended = run.finish(300)
    finally:
        lab.on("engine1", "systemctl start ssh.service")
    assert ended.code != 0
    assert "does not answer over SSH" in ended.output, ended.end
    # Nobody could take the node's lock away; the next run does.
    again = lab.playbook("redeploy", *lab.QUICK)
    assert again.code == 0, again.end


def test_a_configuration_broken_by_hand_is_no_obstacle() -> None:
    path = "/etc/nginx/metalserve/current/http.conf"
    lab.on("gateway2", f"cp {path} /root/http.conf && echo 'nonsense;' >> {path}")
    try:
        run = lab.playbook("redeploy", *lab.release("garbage"), *lab.QUICK)
    finally:
        lab.on("gateway2", f"cat /root/http.conf > {path}")
    assert "engine1 serves again with what served before" in run.output, run.end


def test_a_full_disk_changes_nothing() -> None:
    folder = "/var/lib/metalserve/engines/short-0"
    lab.on(
        "engine2",
        f"mkdir -p /run/full && mount -t tmpfs -o size=256k tmpfs /run/full && cp -a {folder}/. /run/full/ && "
        f"(dd if=/dev/zero of=/run/full/fill bs=4k 2>/dev/null; true) && mount --bind /run/full {folder}",
    )
    try:
        # A release that no other test leaves on the node: it has to be written.
        run = lab.playbook("redeploy", "-e", '{"test_max_num_seqs": 61}', *lab.QUICK)
    finally:
        lab.on("engine2", f"umount {folder} && umount /run/full")
    assert run.code != 0
    assert "No space left on device" in run.output, run.end
    assert "Nothing was changed" in run.output, run.end
