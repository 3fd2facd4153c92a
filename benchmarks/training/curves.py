"""Draws results of training: losses over steps, the last ones over rates and batch sizes.

A curve has its name at its end. An optimizer has one colour everywhere; lines of this package's
optimizers are solid, the others dashed. A picture keeps what it shows as the text `Description`.
"""

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence

import matplotlib

matplotlib.use("Agg")

import numpy as np
from matplotlib import colors, ticker
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text
from scipy import optimize  # type: ignore[import-untyped, unused-ignore]

from benchmarks.training import grid, report
from benchmarks.training.optimizers import Optimizer

_NAMES = {
    "adamw": "AdamW",
    "nadamw": "Nesterov AdamW",
    "lion": "Lion",
    "muon": "Muon",
    "mars": "MARS-AdamW",
    "mars_lion": "MARS-Lion",
    "mars_shampoo": "MARS-Shampoo",
    "mars_m": "MARS-M",
    "mars_m_rows": "MARS-M, rows normalized",
    "mars_soap": "MARS-SOAP",
    "corrected_muon": "corrected Muon",
    "storm_adamw": "STORM",
}
# Text in these colours is readable on white (contrast 4.5 or more), and they differ in lightness or
# in blue where red and green look alike.
_COLORS = {
    "adamw": "#595959",
    "nadamw": "#0069a8",
    "lion": "#8a6100",
    "muon": "#007a68",
    "mars": "#c4320a",
    "mars_lion": "#a3548f",
    "mars_shampoo": "#3f7d1e",
    "mars_m": "#7a2fb5",
    "mars_m_rows": "#5b2c8a",
    "mars_soap": "#6b5b00",
    "corrected_muon": "#00607a",
    "storm_adamw": "#a0522d",
}
_PEERS = ("adamw", "nadamw", "lion", "muon")
# Inches, points, and pixels to an inch: 11 points are 10 pixels in a picture of 380 pixels.
_WIDTH, _HEIGHT, _FONT, _DPI = 6.0, 2.5, 11, 150
# Inches that long names leave to the axes, in a wider picture.
_LEAST = 2.8
# What comes before this share of a run would squeeze the differences at its end.
_SHOWN_FROM = 0.45
_NAMES_AT = 1.05  # of the width of the axes


@dataclasses.dataclass(frozen=True)
class Curve:
    """One line: mean, lowest and highest over seeds at each x."""

    optimizer: str
    label: str
    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Axes with curves, over steps, learning rates or batch sizes."""

    title: str
    xlabel: str
    curves: Sequence[Curve]

    @property
    def few(self) -> bool:
        """Whether it is over few values, by factors, and not over steps."""
        return self.xlabel != "step"


def name(optimizer: str) -> str:
    """Words an optimizer for a reader: `mars:gamma=0.1` is `MARS-AdamW, gamma 0.1`."""
    base, *settings = optimizer.split(":")
    return ", ".join([_NAMES.get(base, base), *(text.replace("=", " ") for text in settings)])


def row_name(optimizer: Optimizer) -> str:
    """Words an optimizer with its decay rates and its gamma, given or not.

    `mars:gamma=0.1` of GPT-2 is `MARS-AdamW (0.9, 0.95), gamma 0.1`.
    """
    settings = dict(optimizer.settings)
    betas = [settings[key] for key in ("b1", "beta", "b2") if key in settings]
    numbers = ", ".join(map(str, betas))
    parts = [f"{name(optimizer.base)} ({numbers})" if betas else name(optimizer.base)]
    if "gamma" in settings:
        gamma = settings["gamma"]
        parts.append(f"gamma {gamma if isinstance(gamma, str) else format(gamma, 'g')}")
    for override in optimizer.name.split(":")[1:]:
        key, _, value = override.partition("=")
        if key not in ("b1", "beta", "b2", "gamma"):
            parts.append(f"{key} {value}")
    return ", ".join(parts)


def over_steps(
    summaries: Sequence[report.Summary],
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Panel:
    """Returns the validation curves at the best learning rates, without the untrained model's.

    Args:
      summaries: what to draw.
      title: by default metric and unit.
      labels: of optimizers, by default their `name`. The last mean is put behind.
    """
    curves = []
    for summary in summaries:
        values = list(zip(*(run.validation_loss[1:] for run in summary.runs), strict=True))
        means = [statistics.fmean(each) for each in values]
        label = (labels or {}).get(summary.optimizer, name(summary.optimizer))
        digits = 2 if summary.unit == "percent" else 3
        final = f"{means[-1]:.{digits}f}" if math.isfinite(means[-1]) else "diverged"
        curves.append(
            Curve(
                optimizer=summary.optimizer,
                label=f"{label}: {final}",
                x=summary.runs[0].steps[1:],
                mean=means,
                low=[min(each) for each in values],
                high=[max(each) for each in values],
            )
        )
    return Panel(title or f"{summaries[0].metric} ({summaries[0].unit})", "step", curves)


def over_rates(
    summaries: Sequence[report.Summary],
    title: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> Panel:
    """Returns what decided on the learning rate, at every one, of `summaries` as in `over_steps`.

    The learning rates that were tried are from the lowest to the highest.
    """
    curves = []
    for summary in summaries:
        rates, losses = list(summary.grid), list(summary.grid.values())
        label = (labels or {}).get(summary.optimizer, name(summary.optimizer))
        curves.append(Curve(summary.optimizer, label, rates, losses, losses, losses))
    return Panel(title or f"{summaries[0].chosen_by} at the end", "learning rate", curves)


def describe(panels: Sequence[Panel]) -> str:
    """Says what a picture of these panels shows: titles, labels, and a hash of the numbers."""
    parts = [
        f"{panel.title}: {'; '.join(curve.label for curve in panel.curves)}." for panel in panels
    ]
    numbers = [
        [list(map(float, (*curve.x, *curve.mean, *curve.low, *curve.high)))]
        for panel in panels
        for curve in panel.curves
    ]
    return " ".join([*parts, f"Data {grid.digest(numbers)}."])


def _shades(curves: Sequence[Curve]) -> list[str]:
    """Colours, the first of an optimizer's several curves the lightest."""
    bases = [curve.optimizer.partition(":")[0] for curve in curves]
    shades = []
    for index, base in enumerate(bases):
        several = bases.count(base)
        white = 0.6 * (1 - (bases[: index + 1].count(base)) / several) if several > 1 else 0.0
        rgb = np.array(colors.to_rgb(_COLORS.get(base, "#000000")))
        shades.append(colors.to_hex(tuple(rgb + white * (1 - rgb))))
    return shades


def _limits(panel: Panel) -> tuple[float, float] | None:
    """The range of values that is shown; None where there is none."""
    if panel.few:
        seen = [value for curve in panel.curves for value in (*curve.low, *curve.high)]
    else:
        start = _SHOWN_FROM * max(curve.x[-1] for curve in panel.curves)
        seen = [
            value
            for curve in panel.curves
            for x, low, mean in zip(curve.x, curve.low, curve.mean, strict=True)
            if x >= start
            for value in (low, mean)
        ]
    seen = [value for value in seen if math.isfinite(value)]
    if not seen:
        return None
    low, high = min(seen), max(seen)
    margin = 0.08 * (high - low) or 1.0
    return low - margin, high + margin


def _draw_panel(ax: Axes, panel: Panel) -> list[tuple[Annotation, float]]:
    """Draws the curves, and their names at their heights, which are returned with them."""
    limits = _limits(panel)
    bottom, top = limits or (0.0, 1.0)
    ax.set_ylim(bottom, top)
    if panel.few:
        ax.set_xscale("log", base=2)
        values = sorted({x for curve in panel.curves for x in curve.x})
        ax.xaxis.set_major_locator(ticker.FixedLocator(values))
        ax.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,g}"))
    if bottom < 0 < top:
        ax.axhline(0, color="black", linewidth=0.8)
    texts = []
    for curve, color in zip(panel.curves, _shades(panel.curves), strict=True):
        base = curve.optimizer.partition(":")[0]
        style = (0, (4, 1.5)) if base in _PEERS else "-"
        ax.plot(
            curve.x,
            curve.mean,
            color=color,
            linestyle=style,
            linewidth=2,
            marker="o" if panel.few or len(curve.x) == 1 else None,
        )
        ax.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.25, linewidth=0)
        end = curve.mean[-1] if math.isfinite(curve.mean[-1]) else top
        end = min(max(end, bottom), top)
        text = ax.annotate(
            curve.label,
            xy=(curve.x[-1], end),
            xytext=(_NAMES_AT, (end - bottom) / (top - bottom)),
            textcoords="axes fraction",
            color=_COLORS.get(base, "#000000"),
            verticalalignment="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.8,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )
        texts.append((text, (end - bottom) / (top - bottom)))
    ax.set_title(panel.title, loc="left", fontsize=_FONT, fontweight="bold")
    ax.set_xlabel(panel.xlabel)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    if not panel.few:
        ax.set_xlim(0, max(curve.x[-1] for curve in panel.curves))
        ax.xaxis.set_major_locator(ticker.MaxNLocator(4, integer=True))
        ax.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    return texts


def draw(panels: Sequence[Panel], path: pathlib.Path) -> None:
    """Draws panels below each other.

    Args:
      panels: at least one, each with at least one curve.
      path: the PNG file to write.
    """
    with plt.rc_context({"font.size": _FONT}):
        heights = [max(_HEIGHT, 0.24 * len(panel.curves) + 0.8) for panel in panels]
        figure, axes = plt.subplots(
            nrows=len(panels),
            figsize=(_WIDTH, sum(heights)),
            height_ratios=heights,
            squeeze=False,
            layout="constrained",
        )
        placed = [
            (ax, _draw_panel(ax, panel)) for ax, panel in zip(axes[:, 0], panels, strict=True)
        ]
        # Of the texts alone, without their lines.
        boxes = [Text.get_window_extent(text) for _, texts in placed for text, _ in texts]
        longest = max(box.width for box in boxes) / figure.dpi
        figure.set_figwidth(max(_WIDTH, _LEAST + longest))
        figure.draw_without_rendering()
        for ax, texts in placed:
            # Names move apart to a line's height, in the order of the curves' ends.
            gap = 1.35 * _FONT / 72 * figure.dpi / ax.get_window_extent().height
            texts.sort(key=lambda pair: pair[1])
            steps = gap * np.arange(len(texts))
            heights_now = np.array([height for _, height in texts])
            moved = optimize.isotonic_regression(heights_now - steps).x
            apart = np.clip(moved, 0.0, max(0.0, 1.0 - steps[-1])) + steps
            for (text, _), height in zip(texts, apart, strict=True):
                text.set_position((_NAMES_AT, height))
        figure.savefig(path, dpi=_DPI, metadata={"Description": describe(panels)})
        plt.close(figure)


def plot(summaries: Sequence[report.Summary], path: pathlib.Path) -> None:
    """Draws `over_steps`, and `over_rates` where several learning rates were tried."""
    panels = [over_steps(summaries)]
    if any(len(summary.grid) > 1 for summary in summaries):
        panels.append(over_rates(summaries))
    draw(panels, path)


def plot_measures(summaries: Sequence[report.Summary], path: pathlib.Path) -> bool:
    """Draws what `mars_optax.diagnose` measured, for each optimizer's first seed.

    Args:
      summaries: what to draw.
      path: the PNG file to write.

    Returns:
      Whether there was anything to draw.
    """
    measured = [summary for summary in summaries if summary.runs[0].measures]
    if not measured:
        return False
    names = list(dict.fromkeys(name for summary in measured for name in summary.runs[0].measures))
    figure, axes = plt.subplots(
        nrows=len(names),
        figsize=(6.5, 2.2 * len(names)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, name in zip(axes[:, 0], names, strict=True):
        for summary in measured:
            run = summary.runs[0]
            if name in run.measures:
                ax.plot(run.steps[:-1], run.measures[name], label=summary.optimizer)
        ax.set(ylabel=name.replace("_", " "))
        ax.grid(alpha=0.3)
    axes[0, 0].legend()
    axes[-1, 0].set(xlabel="step")
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True
