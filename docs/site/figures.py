"""Draws the figures of docs/reference/concepts.md: `python -m docs.site figures`.

The curves are the project's own law (`sweeps.fit.family`), so a figure shows what a fit means. Written as SVG on a
light card, which reads on a dark page too; the same bytes every time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

INK, BLUE, ORANGE, GREEN, GREY = "#1f2933", "#0072b2", "#d55e00", "#009e73", "#7b8794"
CARD = "#fbfbf9"


def curve(compute: Any, r0: float, a: float, b: float, c_mid: float) -> Any:
    """Return the reward R0 + (A - R0) / (1 + (C_mid / C)^B) at each compute."""
    from sweeps.fit.family import FAMILIES

    family = FAMILIES["sigmoid"]
    u, v = family.coordinates(np.array([b]), np.array([c_mid]))
    return r0 + (a - r0) * family.at(np.log(np.asarray(compute, dtype=float)), float(u[0]), float(v[0]))


def draw(folder: Path) -> list[Path]:
    """Write every figure below `folder` and return their paths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = {
        "svg.hashsalt": "lightning-scalerl",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": GREY,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": CARD,
        "figure.facecolor": CARD,
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with pyplot.rc_context(settings):
        for name, make in FIGURES.items():
            figure = make(pyplot)
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None})
            pyplot.close(figure)
            written.append(path)
    return written


def _compute_axis(axes: Any) -> None:
    axes.set_xscale("log")
    axes.set_xlabel("compute C (logarithmic)")
    axes.set_ylabel("reward R")
    axes.set_xticks([])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, 1)


def asymptote(pyplot: Any) -> Any:
    """Draw one curve with R0, A and C_mid, and the same curve with another B."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    compute = np.geomspace(1, 1e5, 400)
    axes.plot(compute, curve(compute, 0.15, 0.75, 1.2, 300), color=BLUE, lw=2.2, label="recipe 1: A = 0.75, B = 1.2")
    axes.plot(compute, curve(compute, 0.15, 0.75, 0.7, 300), color=GREEN, lw=1.8, ls="--",
              label="recipe 2: the same A, lower B")  # fmt: skip
    axes.plot(compute, curve(compute, 0.15, 0.55, 1.2, 100), color=ORANGE, lw=1.8, ls="-.",
              label="recipe 3: ahead early, lower A")  # fmt: skip
    axes.axhline(0.75, color=GREY, lw=0.8, ls=":")
    axes.text(1.1, 0.77, "A: the asymptote, the ceiling of the recipe")
    axes.axhline(0.15, color=GREY, lw=0.8, ls=":")
    axes.text(1.1, 0.085, "R0: the reward before training")
    axes.plot([300, 300], [0, 0.45], color=GREY, lw=0.8, ls=":")
    axes.plot([300], [0.45], "o", color=BLUE)
    axes.text(340, 0.03, "C_mid: half of the way from R0 to A is gained")
    axes.legend(loc="upper left", bbox_to_anchor=(0.0, 0.72), frameon=False)
    _compute_axis(axes)
    return figure


def verdict(pyplot: Any) -> Any:
    """Draw three windows of one curve: too short, not yet closed, and enough to name A."""
    figure, panels = pyplot.subplots(1, 3, figsize=(9, 3), layout="constrained", sharey=True)
    random = np.random.default_rng(4)
    compute = np.geomspace(1, 1e5, 400)
    for axes, (end, name, said) in zip(
        panels,
        [
            (120, "pre_inflection", "the bend may lie ahead:\nrun longer"),
            (900, "open", "the bend is in, the ceiling is not\nbounded: run longer, add seeds"),
            (3e4, "identifiable", "A may be named,\nwith its interval"),
        ],
        strict=True,
    ):
        axes.axvspan(1, end, color="#e4e7eb", lw=0)
        seen = np.geomspace(1.5, end, 14)
        noisy = curve(seen, 0.15, 0.75, 1.2, 300) + random.normal(0, 0.012, seen.size)
        axes.plot(compute, curve(compute, 0.15, 0.75, 1.2, 300), color=GREY, lw=1, ls="--")
        axes.plot(seen, noisy, "o", ms=4, color=BLUE)
        axes.set_title(name, fontsize=11, family="monospace")
        axes.text(1.3, 0.83, said, fontsize=9)
        _compute_axis(axes)
        axes.label_outer()
    return figure


def staleness(pyplot: Any) -> Any:
    """Draw rollouts of a pipeline under the weights that sample them, and the step that trains them."""
    figure, axes = pyplot.subplots(figsize=(8, 2.5), layout="constrained")
    tones = ["#cfe3f1", "#9cc7e3", "#5fa3d0", "#0072b2"]
    for row, (start, end) in enumerate([(0.0, 2.4), (0.3, 1.5), (0.7, 3.4)]):
        at = start
        while at < end:
            until = min(end, np.floor(at) + 1)
            axes.barh(row, until - at, left=at, height=0.55, color=tones[int(at)], edgecolor=CARD)
            at = until
        axes.plot([end, 4], [row, row], color=GREY, lw=1, ls=":")
        axes.plot([4], [row], ">", color=ORANGE)
    for version in range(4):
        axes.text(version + 0.5, 2.75, f"weights {version}", ha="center")
        if version:
            axes.axvline(version, color=GREY, lw=0.8)
    axes.axvline(4, color=ORANGE, lw=1.6)
    axes.text(4.08, 1, "step 4 trains\nthese rollouts", color=ORANGE, va="center")
    axes.text(4.08, 0.1, "dotted: finished, waits\nfor its batch", color=GREY, va="center", fontsize=9)
    axes.set_ylim(-0.6, 3.1)
    axes.set_xlim(0, 5.4)
    axes.set_yticks(range(3), ["rollout a", "rollout b", "rollout c"])
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    return figure


# The data path with the axes that act at each stage, as in lightning_scalerl/choices.py.
PATH = [
    ("prompts", ("resampling", "curriculum", "allocation")),
    ("generator", ("async_mode", "precision", "length_control")),
    ("rewards", ("truncated", "filter")),
    ("credit", ("advantage", "normalization", "critic")),
    ("loss", ("correction", "loss", "kl", "entropy")),
    ("update", ("aggregation", "epochs", "adapter")),
]


def recipe(pyplot: Any) -> Any:
    """Draw the data path, and below each stage the axes whose choices act there."""
    figure, axes = pyplot.subplots(figsize=(9, 2.4), layout="constrained")
    for number, (station, names) in enumerate(PATH):
        axes.text(number, 1, station, ha="center", va="center", fontsize=11, weight="bold",
                  bbox={"boxstyle": "round,pad=0.5", "fc": "#e8f1f8", "ec": BLUE})  # fmt: skip
        axes.text(number, 0.72, "\n".join(names), ha="center", va="top", family="monospace", fontsize=9)
        if number:
            axes.annotate("", (number - 0.38, 1), (number - 0.62, 1), arrowprops={"arrowstyle": "->", "color": GREY})
    axes.text(2.5, 1.36, "weights go back to the generator", ha="center", color=GREY, fontsize=9)
    axes.annotate("", (1, 1.16), (5, 1.16),
                  arrowprops={"arrowstyle": "->", "color": GREY, "connectionstyle": "bar,fraction=0.035"})  # fmt: skip
    axes.set_xlim(-0.5, 5.5)
    axes.set_ylim(0.3, 1.45)
    axes.axis("off")
    return figure


FIGURES: dict[str, Callable[[Any], Any]] = {
    "recipe": recipe,
    "asymptote": asymptote,
    "verdict": verdict,
    "staleness": staleness,
}
