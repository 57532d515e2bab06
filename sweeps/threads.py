"""Set the number of threads on which NumPy multiplies matrices."""

from __future__ import annotations

import os


def multiply_on_one_thread() -> None:
    """Let NumPy multiply matrices on one thread, unless the environment sets a number. Call this before NumPy's import.

    A fit's matrices are small. On a busy machine several threads take six times as long as one, because they wait for
    each other. With one thread, moreover, the last digits of a product do not depend on the number of cores.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
