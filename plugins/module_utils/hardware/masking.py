# Copyright: the Metalserve authors
# SPDX-License-Identifier: Apache-2.0
"""Hides what must not leave a machine: secrets always, identities (names, addresses, serial numbers) in snapshots.

Identities get stable stand-ins: the same address is the same stand-in in every file of a snapshot, so that joins
still work.
"""

from __future__ import annotations

import re

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"(?:\A|[_\-.])(?:api[_-]?keys?|keys?|tokens?|secrets?|passwords?|passwd|passphrase|credentials?|auth|bearer)\Z"
    r"|api[_-]?key|secret|password|passwd|credential|access[_-]?key|private[_-]?key|(?:hf|hub|auth|access|bearer|api)[_-]?token",
    re.IGNORECASE,
)
_HARMLESS_NAME = re.compile(
    r"key[_-]?(?:id|file|path|name|s?[_-]?file)\Z|(?:_|-)(?:file|path|dir)\Z|tokenizer|max[_-]|num[_-]|[_-]tokens\Z",
    re.IGNORECASE,
)

_SECRET_VALUES = (
    re.compile(r"\bsk-[A-Za-z0-9_-]{8,}"),
    re.compile(r"\bhf_[A-Za-z0-9]{8,}"),
    re.compile(r"\bgh[pousr]_[A-Za-z0-9]{16,}"),
    re.compile(r"\bgithub_pat_[A-Za-z0-9_]{16,}"),
    re.compile(r"\bglpat-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\bnvapi-[A-Za-z0-9_-]{16,}"),
    re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*"),
)
_BEARER = re.compile(r"\b(Bearer|Basic)(\s+)([A-Za-z0-9._~+/=-]{6,})", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(\b[a-z][a-z0-9+.-]*://)([^/\s:@\"']*):([^/\s@\"']+)@", re.IGNORECASE)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


def looks_secret_name(name: str) -> bool:
    """Tell whether a variable or option of this name usually carries a secret (``VLLM_API_KEY``; not
    ``max-num-batched-tokens``).
    """
    return _SECRET_NAME.search(name) is not None and _HARMLESS_NAME.search(name) is None


def mask_secrets(text: str) -> str:
    """Return ``text`` with everything that has the shape of a secret replaced by ``***``."""
    for pattern in _SECRET_VALUES:
        text = pattern.sub(HIDDEN, text)
    text = _BEARER.sub(lambda match: match.group(1) + match.group(2) + HIDDEN, text)
    text = _URL_PASSWORD.sub(lambda match: f"{match.group(1)}{HIDDEN}:{HIDDEN}@", text)
    return _PEM.sub(HIDDEN, text)
