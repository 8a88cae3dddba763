#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Say what a redeploy of one node takes beyond the engine's own start, the drain and the soak.

Needs the redeploy lab with stand-in engines, which start within a second, on a machine that does nothing else:

  ansible-playbook playbooks/lab.yml -i tests/lab/redeploy/inventory
  ansible-playbook site.yml -i tests/lab/redeploy/inventory --skip-tags monitoring,verify
  .venv/bin/python benchmarks/redeploy/measure.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.lab.redeploy import lab

NOT_OURS = ("wait", "soak", "ready")
"""Phases that last as long as requests run, as configured, and as the engine starts."""


def main() -> int:
    """Deploy a release and take it back; print seconds by phase for each node."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    lab.wait_until_all_serve()
    with tempfile.TemporaryDirectory() as folder:
        for arguments in (["redeploy", *lab.release("next")], ["rollback"]):
            log = Path(folder, f"{arguments[0]}.jsonl")
            with lab.script(*arguments, "--log", str(log)) as process:
                output, _ = process.communicate()
            if process.returncode != 0:
                print(output, file=sys.stderr)
                return 1
            for host, phases in lab.spent(log, lab.ENGINES).items():
                ours = sum(took for name, took in phases.items() if name not in NOT_OURS)
                shown = ", ".join(f"{name} {took:.1f}" for name, took in phases.items())
                print(f"{arguments[0]} {host}: {ours:.1f} s of {sum(phases.values()):.1f} s ({shown})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
