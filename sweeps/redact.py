"""Mask secrets in everything that is stored: journals, ledgers, logs, MLflow."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

MASK = "***"
# How names of secrets end, in various styles: HF_TOKEN, db.password, PGPASSWORD, accountKey, MYSQL_PWD.
_SECRET_NAME = re.compile(
    r"(?i)((^|[_.-])(token|secret|credential|passphrase|jwt|authorization|connection_?string"
    r"|(api|access|secret|private|account|auth|encryption|signing|shared|master|ssh)_?key)"
    r"|password|passwd|sshpass)s?$"
    r"|(^|[_.-])pass$|[a-z0-9][_.-]pwd$"
)
# "key" alone may name a column or a position in a table. After a vendor's name it names a secret.
_VENDORS_KEY = re.compile(
    r"(?i)(^|[_.-])(openai|anthropic|wandb|hf|hugging_?face|azure|google|gemini|groq|mistral|cohere|together|fireworks"
    r"|replicate|deepseek|openrouter|github|gitlab|gh|comet|neptune|mlflow|aws|gcp|serpapi|tavily|ngc)_(key|pat)$"
)
# Environment variables do not name columns, so each *_KEY among them is a secret.
_VARIABLES_KEY = re.compile(r"(^|\.)[A-Z0-9][A-Z0-9_]*_(KEY|PAT)$")
# Names that look like those of secrets: tokens of a tokenizer or model, numbers of tokens (a grid writes several
# numbers as one text), keys of tables and caches, passes over data.
_HARMLESS_NAME = re.compile(
    r"(?i)(^|[_.-])((eos|bos|pad|stop|unk|sep|cls|mask|end|begin|start|think\w*|special)_tokens?"
    r"|(max|min|num)_(\w+_)?tokens"
    r"|(public|gpg|sort|primary|foreign|partition|group|cache|dict|hash|row|order|index|object)_key"
    r"|(forward|backward|first|second|third|last|single|multi|one|two|per|by|num|max|min|each|full|low|high|band)_pass"
    r"|(old|cur|current|orig|init|last|prev|saved|work)_pwd)$"
)
_URL_LOGIN = re.compile(r"(?P<scheme>[a-zA-Z][\w+.-]{0,30}://)(?!git@)[^\s/'\"]+@")
_TOKEN = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|[sr]k_(live|test)_[A-Za-z0-9]{16,}|(AKIA|ASIA)[A-Z0-9]{16}"
    r"|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_[A-Za-z0-9_]{22,}|gl[a-z]{2,5}-[A-Za-z0-9_-]{20,}"
    r"|xox[a-z]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{20,}|AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{20,}"
    r"|gsk_[A-Za-z0-9]{40,}|nvapi-[A-Za-z0-9_-]{40,}|dapi[0-9a-f]{32}|wandb_v[0-9]_[A-Za-z0-9_]{20,}"
    r"|npm_[A-Za-z0-9]{36}|pypi-[A-Za-z0-9_-]{50,}"
    r"|eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*)(?![A-Za-z0-9])"
)
_WEBHOOK = re.compile(r"(?P<before>hooks\.slack\.com/services/)[\w/-]+")
# Also matches a key whose end is missing.
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?P<kind>[A-Z ]*PRIVATE KEY)( BLOCK)?-----"
    r"(?:(?s:.)*?-----END (?P=kind)( BLOCK)?-----|(?:[A-Za-z0-9+/=\s]|\\[nr])*)"
)
_HEADER = re.compile(
    r"(?i)(?P<before>\b(?:(?:proxy-)?authorization\s*[:=]\s*(?:(?:bearer|basic|token)\s+|(?=[\w.~+/-]*\d))"
    r"|bearer\s+(?=[\w.~+/-]*\d)"
    r"|(?:x-[\w-]*(?:token|key)|private-token)\s*:\s*))(?P<value>[\w.~+/=-]{8,})"
)
# A word of a shell, parts of which may be quoted. Commas and brackets belong to it, because a password may have them.
_WORD = r"(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s'\"&;|])+"
# Names before a value: a variable or override, an option, a field of a dictionary.
_ASSIGNED = re.compile(r"(?<![\w.$/-])(?P<name>[A-Za-z_][\w.-]*)=")
_OPTION = re.compile(r"(?<![\w-])--(?P<name>[a-zA-Z][\w-]*)(=|\s+(?!-))")
_FIELD = re.compile(r"(?P<quote>['\"])(?P<name>[\w.-]+)(?P=quote)\s*:\s*(?=['\"])")
_VALUE = re.compile(_WORD)
_TEXT = re.compile(r"(?P<edge>['\"])(?:(?!(?P=edge)).)+(?P=edge)")
_SSHPASS = re.compile(rf"(?P<before>\bsshpass\s+-p\s*)(?P<value>{_WORD})")
# Shorter values of secret variables are not masked in texts, because they may be common words.
_MIN_LENGTH = 6
# Values that are not secrets: a reference to a variable, `<...>`, none/true/false, an empty value.
_NO_VALUE = re.compile(r"(?is)\"?\$.*|[\"']?(<[^>]*>|none|null|true|false|[^a-z0-9]*)[\"')\]},.]*")
_NUMBER = re.compile(r"[\"']?-?[\d.,]+[\"')\]},.]*")
# A bare `token` in lower case may be code or a list. It is a secret only after a prefix that says whose token it is.
_ANY_TOKEN = re.compile(r"(^|[_.-])tokens?$")
_WHOSE_TOKEN = re.compile(r"(^|[_.-])(access|auth|api|bearer|refresh|session|hf|wandb|github|gitlab|gh|slack)_?token$")


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether a variable, key or option with this name holds a secret; `HF_TOKEN` does."""
    spelt = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    if _HARMLESS_NAME.search(spelt):
        return False
    return bool(_SECRET_NAME.search(spelt) or _VENDORS_KEY.search(spelt) or _VARIABLES_KEY.search(spelt))


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Mask secrets in a text.

    Secrets are logins in URLs, tokens in well-known formats, values that are assigned to names of secrets, and values
    of environment variables with such names.

    Args:
        text: text to be stored.
        environment: environment variables; None for os.environ.
    """
    variables = os.environ if environment is None else environment
    secrets = {value for name, value in variables.items() if len(value) >= _MIN_LENGTH and _is_secret(name, value)}
    for value in sorted(secrets, key=len, reverse=True):  # longest first, because one secret may contain another
        text = text.replace(value, MASK)
    text = _PRIVATE_KEY.sub(MASK, text)
    text = _URL_LOGIN.sub(rf"\g<scheme>{MASK}@", text)
    text = _TOKEN.sub(MASK, text)
    text = _WEBHOOK.sub(rf"\g<before>{MASK}", text)
    for pattern in (_HEADER, _SSHPASS):
        text = pattern.sub(rf"\g<before>{MASK}", text)
    for names, values in ((_FIELD, _TEXT), (_OPTION, _VALUE), (_ASSIGNED, _VALUE)):
        text = _mask_assigned_values(text, names, values)
    return text


def redact_override(word: str) -> str:
    """Redact an override, such as `hydra.launcher.setup=[...]`. If its key names a secret, mask the whole value."""
    key, separator, value = word.partition("=")
    return f"{key}={MASK}" if separator and value and is_secret_name(key.lstrip("+-~")) else redact(word)


def redact_config(value: Any, key: str = "") -> Any:
    """Return a configuration with all texts redacted. Texts whose key names a secret are masked completely."""
    if isinstance(value, Mapping):
        return {name: redact_config(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_config(item, key) for item in value]
    if isinstance(value, str) and value:
        return MASK if is_secret_name(key) else redact(value)
    return value


def _is_secret(name: str, value: str) -> bool:
    """Return whether a variable's value is a secret. Existing paths are not, nor plain words in `*_KEY`."""
    if not is_secret_name(name):
        return False
    if value.startswith(("/", "~")) and _path_exists(value):
        return False
    return not _VARIABLES_KEY.search(name) or bool(_SECRET_NAME.search(name)) or not re.fullmatch(r"[a-z_ -]+", value)


def _path_exists(path: str) -> bool:
    """Return whether the path exists; False if that cannot be checked, because a secret may look like a path."""
    try:
        return Path(path).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _mask_assigned_values(text: str, names: re.Pattern[str], values: re.Pattern[str]) -> str:
    """Mask the values after names of secrets. `names` matches a name, and `values` the value right after it."""
    parts: list[str] = []
    at = 0
    for match in names.finditer(text):
        name = match["name"]
        if match.start() < at or not is_secret_name(name):
            continue  # inside a value that is already masked, or not a secret
        if names is _ASSIGNED and _ANY_TOKEN.search(name) and not _WHOSE_TOKEN.search(name):
            continue
        value = values.match(text, match.end())
        if value is None or _NO_VALUE.fullmatch(value[0]) or ("token" in name.lower() and _NUMBER.fullmatch(value[0])):
            continue
        edge = value[0][0] if names is _FIELD else ""
        parts += [text[at : value.start()], edge, MASK, edge]
        at = value.end()
    return "".join([*parts, text[at:]])
