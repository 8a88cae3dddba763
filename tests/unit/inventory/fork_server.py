# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Loads ansible once, then forks an ansible-playbook for each line it reads, a JSON list of arguments.

Answers with one JSON line each: exit status, output, and CPU seconds of the child.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import tempfile
import warnings
from pathlib import Path

import ansible.executor.playbook_executor as _loaded_before_the_fork  # noqa: F401
import ansible.plugins.loader as plugins
from ansible.cli.playbook import PlaybookCLI
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.utils.vars import load_extra_vars, load_options_vars
from ansible.vars.manager import VariableManager

WARM_UP = "tests/fixtures/inventories/good/one_pool.yml"


def _child(arguments: list[str], output: str) -> None:
    """Become ansible-playbook; never returns."""
    handle = os.open(output, os.O_WRONLY | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (handle, 1), (handle, 2)):
        os.dup2(source, target)
    sys.argv = ["ansible-playbook", *arguments]
    for keeper in (load_options_vars, load_extra_vars):  # they keep what the loaded process had: no options at all
        vars(keeper).clear()
    status = 250
    try:
        PlaybookCLI.cli_executor(sys.argv)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve() -> None:
    """Answer requests until the input ends."""
    plugins.init_plugin_loader()
    warnings.filterwarnings("ignore", message="AnsibleCollectionFinder has already been configured")
    loader = DataLoader()
    inventory = InventoryManager(loader=loader, sources=[WARM_UP])
    VariableManager(loader=loader, inventory=inventory).get_vars(host=inventory.get_host("node-a"))
    for kind in ("cache", "callback", "inventory", "vars", "connection", "shell", "become", "strategy"):
        list(getattr(plugins, f"{kind}_loader").all(class_only=True))
    for kind, name in (
        (plugins.strategy_loader, "linear"),
        (plugins.connection_loader, "ansible.builtin.local"),
        (plugins.shell_loader, "sh"),
        (plugins.lookup_loader, "ansible.builtin.config"),
        (plugins.action_loader, "metal.serve.validate_inventory"),
        (plugins.action_loader, "ansible.builtin.normal"),
    ):
        kind.get(name, class_only=True)
    for name in ("flatten", "map", "regex_replace", "select", "length", "dirname", "bool", "metal.serve.unless_locked"):
        plugins.filter_loader.get(name)
    for name in ("file", "search", "defined"):
        plugins.test_loader.get(name)
    gc.freeze()  # a child that collects garbage would copy every page of what was loaded

    for line in sys.stdin:
        handle, output = tempfile.mkstemp()
        os.close(handle)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = os.fork()
        if child == 0:
            _child(json.loads(line), output)
        _pid, status = os.waitpid(child, 0)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        text = Path(output).read_text(encoding="utf-8", errors="replace")
        os.unlink(output)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "output": text, "cpu_s": cpu}), flush=True)


if __name__ == "__main__":
    _serve()
