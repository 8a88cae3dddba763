# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The tree builds into a collection that works where the checkout is not: no committed link, no ansible.cfg."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the committed tree and install it into an empty path; return that path."""
    work = tmp_path_factory.mktemp("collection")
    source, target = work / "source", work / "collections"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
    built = run(str(BIN / "ansible-galaxy"), "collection", "build", "--output-path", str(work), cwd=source)
    assert built.returncode == 0, built.stderr
    tarball = next(work.glob("metal-serve-*.tar.gz"))
    done = run(
        str(BIN / "ansible-galaxy"),
        *("collection", "install", "--offline", "--no-deps", "-p", str(target), str(tarball)),
        cwd=work,
        ANSIBLE_COLLECTIONS_PATH=str(target),  # one that is installed elsewhere on this machine is another
    )
    assert done.returncode == 0, done.stderr
    return target


def test_the_installed_collection_is_small_and_leaves_the_checkout_behind(installed: Path) -> None:
    serve = installed / "ansible_collections" / "metal" / "serve"
    assert not (serve / "collections").exists()
    assert not (serve / "tests").exists()
    assert (serve / "templates").is_dir()


def test_a_playbook_of_the_installed_collection_runs(installed: Path, tmp_path: Path) -> None:
    """The validate playbook runs by its full name and refuses an empty pool, naming the variable."""
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "all:\n  children:\n    gateways:\n      hosts:\n        gw.invalid:\n    engines:\n      hosts: {}\n",
        encoding="utf-8",
    )
    settings = tmp_path / "empty.cfg"
    settings.touch()
    done = run(
        str(BIN / "ansible-playbook"),
        *("-i", str(inventory), "metal.serve.validate"),
        cwd=tmp_path,
        ANSIBLE_COLLECTIONS_PATH=str(installed),
        ANSIBLE_CONFIG=str(settings),
    )
    assert done.returncode != 0
    assert "metalserve_pools" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
