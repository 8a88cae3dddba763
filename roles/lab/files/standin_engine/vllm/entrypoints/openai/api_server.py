# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""The real server's module name, and the stand-in behind it."""

from __future__ import annotations

import sys

from standin_engine import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
