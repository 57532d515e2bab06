"""Reward functions that misbehave in different ways; tests load them by file and name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lightning_scalerl.sandbox import launch


def obedient(completion: str, answer: str) -> float | None:
    """Misbehave as the first word of the completion demands, or return the reward in the text."""
    word, _, argument = completion.partition(" ")
    if word == "sleep":
        time.sleep(float(argument))
    elif word == "spin":
        while True:
            pass
    elif word == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    elif word == "exit":
        sys.exit(int(argument))
    elif word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif word == "raise":
        raise ValueError(argument)
    elif word == "abstain":
        return None
    elif word == "memory":
        return float(len(bytearray(8 << 30)))
    elif word == "child":
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(300)  # {argument}"])
        time.sleep(300)
    elif word == "folder":
        Path(argument).write_text(launch._new_scratch(None))
        time.sleep(300)
    elif word == "once":
        marker = Path(argument)
        if not marker.exists():
            marker.touch()
            raise OSError("the first time")
    elif word == "alarm":
        return _alarmed()
    elif word == "print":
        print("noise " * 1000)
    elif word == "pid":
        return float(os.getpid())
    elif word == "is":
        return float(argument)
    return 1.0


def _alarmed() -> float:
    """Stop itself with SIGALRM like math-verify, which works only in a main thread."""

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(5)
    except TimeoutError:
        return 0.25
    return 0.0
