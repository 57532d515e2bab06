"""Number of threads that NumPy multiplies matrices on."""

from __future__ import annotations

import os


def multiply_on_one_thread() -> None:
    """Have NumPy multiply matrices on one thread, unless the environment says on how many; before it is imported.

    A fit's matrices are small: on a machine that does other work, threads that wait for each other take six times as
    long as one. And the last digits of a product then depend on no machine's number of cores.
    """
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
