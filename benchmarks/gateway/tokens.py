#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Compare the gateway's estimate of tokens with real tokenizers.

Each text is cut into pieces, sent as the prompt of a completion through the gateway (the role's own templates, mode lua)
in UTF-8 and with \\uXXXX escapes, and the access log's estimate is compared with the tokenizer's count of the prompt.

    python3 -m venv counting && counting/bin/pip install tokenizers
    .venv/bin/python benchmarks/gateway/tokens.py --python counting/bin/python \\
        --tokenizer SmolLM2=.cache/lab/models/SmolLM2-135M-Instruct/tokenizer.json \\
        --text English=/usr/share/common-licenses/GPL-3 --text Chinese=/usr/share/man/zh_CN/man1/dpkg.1.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "collections"), str(ROOT)]

from tests.unit.gateway import harness

COUNT = """
import json, sys
from tokenizers import Tokenizer
path, pieces = json.load(sys.stdin)
tokenizer = Tokenizer.from_file(path)
print(json.dumps([len(tokenizer.encode(piece, add_special_tokens=False).ids) for piece in pieces]))
"""
PIECE = 6000


def text_of(path: str) -> str:
    """Return the text of a file, unpacked where it is packed."""
    data = Path(path).read_bytes()
    return (gzip.decompress(data) if path.endswith(".gz") else data).decode("utf-8", "replace")


def pieces_of(text: str) -> list[str]:
    """Return at most eight pieces of a text."""
    return [text[start : start + PIECE] for start in range(0, len(text), PIECE)][:8]


def estimates(gateway: harness.Gateway, pieces: list[str], escaped: bool) -> list[tuple[int, int]]:
    """Return the bytes of each body and what the gateway estimates."""
    found = []
    for piece in pieces:
        body = json.dumps({"model": "smollm2", "prompt": piece}, ensure_ascii=escaped).encode()
        answer, _ = gateway.ask(body=body)
        found.append((len(body), int(gateway.row(answer.headers["X-Request-Id"])["tokens"])))
    return found


def main() -> None:
    """Print a row for each text and tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has the package tokenizers")
    parser.add_argument("--tokenizer", action="append", required=True, metavar="NAME=tokenizer.json")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    options = parser.parse_args()
    port = harness.free_ports(1)
    print("| text | body | tokenizer | bytes a token | estimate / truth: median | least | most |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, harness.standins(port):
        Path(folder).chmod(0o755)
        pools = [harness.pool("short", port, max_model_len=1_000_000)]
        with harness.gateway(
            Path(folder), pools, gateway_rotation_file=f"{folder}/rotation.json", gateway_mode="lua"
        ) as gateway:
            for text in options.text:
                name, _, path = text.partition("=")
                pieces = pieces_of(text_of(path))
                sent = {form: estimates(gateway, pieces, form == "escaped") for form in ("UTF-8", "escaped")}
                for entry in options.tokenizer:
                    tokenizer, _, file = entry.partition("=")
                    command = [options.python, "-c", COUNT]
                    asked = json.dumps([file, pieces])
                    counts = json.loads(
                        subprocess.run(command, input=asked, capture_output=True, text=True, check=True).stdout
                    )
                    for form, found in sent.items():
                        size = sum(one for one, _ in found) / sum(counts)
                        ratios = [estimate / count for (_, estimate), count in zip(found, counts)]
                        spread = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f}"
                        print(f"| {name} | {form} | {tokenizer} | {size:.2f} | {spread} |")


if __name__ == "__main__":
    main()
