#!/usr/bin/env python3
# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Write a tokenizer of N words into a folder: one word is one token, so a prompt has exactly the tokens it should have.

A token holds the space before its word: vLLM refuses a prompt with more characters per token than the longest token has.

python3 benchmarks/serving/make_tokenizer.py FOLDER [N]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPACE = "\u2581"


def main() -> int:
    """Write tokenizer.json and tokenizer_config.json; 0 when done."""
    folder, size = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 152064
    folder.mkdir(parents=True, exist_ok=True)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"{SPACE}w{number}": number for number in range(3, size)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1000000}
    settings.update(unk_token="<unk>", bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
