"""Secrets out of what is written down: journals, ledgers, logs, MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_SECRET_NAME = re.compile(r"(?i)(^|[_.-])(token|secret|password|passwd|credential|credentials|api_?key|access_?key)s?$")
# A tokenizer's, a model's, and numbers of tokens (a grid writes several as one text): no secrets.
_HARMLESS_NAME = re.compile(
    r"(?i)(^|[_.-])((eos|bos|pad|stop|unk|sep|cls|mask|end|begin|start|think\w*|special)_tokens?"
    r"|(max|min|num)_(\w+_)?tokens)$"
)
_URL_LOGIN = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]*://)(?!git@)[^\s/'\"]+@")
_TOKEN = re.compile(r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16})\b")
# Shorter values of a secret's variable are words that occur everywhere.
_MIN_LENGTH = 6


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Text without logins in addresses, without well-known tokens, and without the values of secret variables.

    Args:
        text: to be written down.
        environment: variables whose names say that they are secret are looked for by value; os.environ if None.
    """
    variables = os.environ if environment is None else environment
    secrets = {value for name, value in variables.items() if len(value) >= _MIN_LENGTH and _SECRET_NAME.search(name)}
    for value in sorted(secrets, key=len, reverse=True):  # one may be the beginning of another
        text = text.replace(value, MASK)
    text = _URL_LOGIN.sub(rf"\g<scheme>{MASK}@", text)
    return _TOKEN.sub(MASK, text)


def redact_config(value: Any, key: str = "") -> Any:
    """A configuration with every text redacted, and what stands under a secret's name masked."""
    if isinstance(value, Mapping):
        return {name: redact_config(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_config(item, key) for item in value]
    if isinstance(value, str) and value:
        secret = _SECRET_NAME.search(key) and not _HARMLESS_NAME.search(key)
        return MASK if secret else redact(value)
    return value
