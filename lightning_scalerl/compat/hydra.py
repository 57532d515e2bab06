"""Private members of Hydra. The functions import them when called, because only commands load Hydra."""

from __future__ import annotations

from argparse import Action
from typing import Any


def locate(path: str) -> Any:
    """Import the object with a dotted name. The public `get_object` logs each failure as an error."""
    from hydra._internal.utils import _locate

    return _locate(path)


def flags() -> list[Action]:
    """Return the flags of Hydra's command line. Neither Hydra's parser nor its list of flags has a public name."""
    from hydra._internal.utils import get_args_parser

    return list(get_args_parser()._actions)
