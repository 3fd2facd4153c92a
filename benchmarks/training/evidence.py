r"""Makes the tables and the pictures of recorded results of the training benchmarks.

    python -m benchmarks.training.evidence

writes all that is shown: the tables of `TABLES` beside their JSON files, and the `PICTURES` in
`docs/images`. Of results of your own:

    python -m benchmarks.training.evidence runs/gpt2/results.json --tables=main,mars/gamma

writes `results.md` and a picture for each table beside the file. Rows whose runs are not all there
are left out, and named with the reason. Of results of `large_batch`, one file for each batch size,
over which they are compared:

    python -m benchmarks.training.evidence runs/large_batch/batch_*/results.json --out=runs \
        --pairs=mars/nadamw,mars_m/muon

writes `batch_axis.md` and `batch_axis.png`; a pair is an optimizer and what it is compared with.
"""

import dataclasses
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import command, output
from benchmarks.training import (
    batch_axis,
    curves,
    gpt2,
    grid,
    language_model,
    large_batch,
    optimizers,
    report,
    vision,
)

DOMAINS = {
    "gpt2": gpt2.DOMAIN,
    "language_model": language_model.DOMAIN,
    "large_batch": large_batch.DOMAIN,
    "vision": vision.DOMAIN,
}
RESULTS = pathlib.Path(__file__).parents[1] / "results"
IMAGES = RESULTS.parent.parent / "docs" / "images"
# Over batch sizes, by the table made of them: the results, what is shown, and the picture.
AXES = {
    "large_batch_h200": (
        sorted(RESULTS.glob("large_batch_*_h200.json")),
        batch_axis.STEPS,
        IMAGES / "large_batches.png",
    ),
    "equal_tokens_h200": (
        # 320 steps of 131,072 tokens are on both axes.
        [RESULTS / "large_batch_131072_h200.json", *sorted(RESULTS.glob("equal_tokens_*.json"))],
        batch_axis.TOKENS,
        IMAGES / "equal_tokens.png",
    ),
}

# The recorded results whose tables are shown, and these.
TABLES: Mapping[str, Sequence[str]] = {
    "gpt2_33m_1000_h200": ("mars_m/iterations",),
    "gpt2_33m_4000_h200": ("averages", "main", "momenta", "parts", "mars/gamma", "mars_m/gamma"),
    "gpt2_33m_8000_h200": ("all",),
    "gpt2_small_572_h200": ("all",),
    "mars_m_gamma_524288_h200": ("all",),
    "vision_resnet18_1024_h200": ("all",),
    "vision_resnet18_12_h200": ("main", "mars/gamma", "mars_m/gamma", "mars/convolutions"),
    "vision_vit_20_h200": ("all",),
}


@dataclasses.dataclass(frozen=True)
class Shown:
    """A panel of a picture that is shown.

    Attributes:
      results: the stem of the JSON file.
      title: of the panel.
      labels: of the optimizers, in order.
      panel: makes the panel.
    """

    results: str
    title: str
    labels: Mapping[str, str]
    panel: Callable[..., curves.Panel] = curves.over_steps


# The best of what was tried on text in 4,000 steps; betas and gammas are in the captions.
_BEST = {
    "adamw:b2=0.999": "AdamW",
    "nadamw:b2=0.99": "Nesterov AdamW",
    "mars:b1=0.95:gamma=0.1:b2=0.99": "MARS-AdamW",
    "mars_m:b1=0.9:gamma=0.2:b2_1d=0.99": "MARS-M",
    "muon:beta=0.9:b2_1d=0.99": "Muon",
}
_SHOWN_OVER_RATES = ("AdamW", "MARS, b1 0.9", "Muon, 0.9", "MARS-M, b1 0.9")
_AT_LARGE_BATCHES = {
    name: label for name, label in batch_axis.STEPS.labels.items() if label in _SHOWN_OVER_RATES
}
PICTURES: Mapping[str, Sequence[Shown]] = {
    "batch_rates": [
        Shown(
            f"large_batch_{tokens}_h200",
            f"{tokens:,} tokens a batch, 320 steps, one seed: validation loss",
            _AT_LARGE_BATCHES,
            curves.over_rates,
        )
        for tokens in (8192, 131072, 524288)
    ],
    "text": [
        Shown("gpt2_33m_4000_h200", "4,000 steps: validation loss, nats per token", _BEST),
        Shown("gpt2_33m_8000_h200", "8,000 steps: validation loss, nats per token", _BEST),
    ],
    "gamma": [
        Shown(
            "gpt2_33m_4000_h200",
            "MARS-AdamW, betas (0.95, 0.99): validation loss",
            {
                "mars:b1=0.95:gamma=0:b2=0.99": "gamma 0",
                "nadamw:b1=0.95:b2=0.99": "Nesterov AdamW",
                "mars:b1=0.95:gamma=0.1:b2=0.99": "gamma 0.1",
            },
        ),
        Shown(
            "gpt2_33m_4000_h200",
            "MARS-M, b1 0.95: validation loss",
            {
                "mars_m:gamma=0.025": "gamma 0.025",
                "mars_m:gamma=0.05": "gamma 0.05",
                "muon": "Muon",
                "mars_m:gamma=0.1": "gamma 0.1",
                "mars_m:gamma=0.2": "gamma 0.2",
            },
        ),
    ],
    "images": [
        Shown(
            "vision_resnet18_12_h200",
            "ResNet-18: test error, percent",
            {
                "mars_lion": "MARS-Lion",
                "mars": "MARS-AdamW",
                "adamw": "AdamW",
                "lion": "Lion",
                "muon": "Muon",
                "mars_m": "MARS-M",
            },
        ),
        Shown(
            "vision_vit_20_h200",
            "Small vision transformer: test error, percent",
            {
                "adamw": "AdamW",
                "mars:gamma=0": "MARS, gamma 0",
                "nadamw": "Nesterov AdamW",
                "mars:gamma=0.1": "MARS, gamma 0.1",
            },
        ),
    ],
    "gpt2_small": [
        Shown(
            "gpt2_small_572_h200",
            "GPT-2 small, one seed: validation loss, nats per token",
            {
                "mars:b1=0.95:b2=0.99:weight_decay=0.01": "MARS, published",
                "mars:b2=0.99:gamma=0.1": "MARS, b1 0.9",
                "adamw:b2=0.99": "AdamW",
                "muon:b2_1d=0.99": "Muon",
                "mars_m:b2_1d=0.99": "MARS-M",
            },
        ),
    ],
    "learning_rates": [
        Shown(
            "gpt2_33m_4000_h200",
            "4,000 steps, one seed: validation loss",
            _BEST,
            curves.over_rates,
        ),
    ],
}


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:.4f}"


def _title(tree: Mapping[str, Any]) -> str:
    """Says what was trained, in a heading."""
    task = tree["task"]
    model, size = task["model"], f"{task['parameters'] / 1e6:.1f} million parameters"
    if tree["name"] != "vision":
        steps = f"{task['schedule']['steps']:,} steps of {task['tokens_per_step']:,} tokens"
        return f"Language: a GPT of {size}, {steps}"
    kind = "residual network" if model["kind"] == "resnet" else "vision transformer"
    return f"Images: a {kind} of {size}, {task['recipe']['epochs']} epochs"


def markdown_tables(
    summaries: Sequence[report.Summary],
    baseline: report.Summary,
    names: Mapping[str, str] | None = None,
) -> list[str]:
    """Formats each optimizer at its best learning rate: what it reaches, and what that costs.

    Args:
      summaries: the rows.
      baseline: what they are compared with, one of them.
      names: of the optimizers in the tables; by default their own.

    Returns:
      Two Markdown tables, without a line break at their ends.
    """
    quality = [
        "optimizer",
        "learning rate (tried)",
        baseline.metric,
        "difference, by seed",
        "outcome",
    ]
    target = f"the baseline's {baseline.metric.split()[-1]}"
    cost = ["optimizer", f"steps to {target}", "ms a step", f"seconds to {target}", "MB of state"]
    tables = [[_row(header), _row(["---"] * 5)] for header in (quality, cost)]
    for summary in summaries:
        name = (names or {}).get(summary.optimizer, f"`{summary.optimizer}`")
        finite = summary is not baseline and not (
            math.isinf(summary.loss) or math.isinf(baseline.loss)
        )
        each = report.differences(summary, baseline) if finite else []
        seconds = statistics.median(run.seconds_per_step for run in summary.runs)
        edge = ", edge" if summary.at_edge else ""
        lowest, highest = _number(min(summary.losses)), _number(max(summary.losses))
        tables[0].append(
            _row(
                [
                    name,
                    f"{summary.learning_rate:g} ({len(summary.grid)}{edge})",
                    f"{_number(summary.loss)} ({lowest} to {highest})",
                    f"{min(each):+.4f} to {max(each):+.4f}" if each else "",
                    "baseline" if summary is baseline else report.outcome(summary, baseline),
                ]
            )
        )
        tables[1].append(
            _row(
                [
                    name,
                    report.when_reached(summary, baseline, ".0f"),
                    report.milliseconds(seconds),
                    report.when_reached(summary, baseline, ".3g", seconds),
                    f"{summary.runs[0].state_bytes / 1e6:.1f}",
                ]
            )
        )
    return ["\n".join(lines) for lines in tables]


def _flat(tree: Mapping[str, Any]) -> str:
    parts = []
    for key, value in tree.items():
        inner = f"({_flat(value)})" if isinstance(value, Mapping) else str(value)
        parts.append(f"{key} {inner}")
    return ", ".join(parts)


def read(path: pathlib.Path) -> dict[str, Any]:
    """Reads the results of one command.

    Raises:
      ValueError: If these are no results of `DOMAINS`.
    """
    try:
        tree: dict[str, Any] = json.loads(path.read_text())
        if tree.get("name") not in DOMAINS:
            raise ValueError(f"of {tree.get('name')!r}")
        page(tree, [])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"Expected results of {', '.join(DOMAINS)}, got {str(path)!r}: "
            f"{error!r}. Give the results.json of these commands."
        ) from error
    return tree


def summarize(
    tree: Mapping[str, Any], chosen: Sequence[optimizers.Optimizer]
) -> tuple[list[report.Summary], dict[str, str]]:
    """Summarizes some optimizers of the results of one command, see `grid.summarize`."""
    names = [optimizer.name for optimizer in chosen]
    records = grid.named(tree["records"], chosen)
    return grid.summarize(records, grid.Protocol(**tree["protocol"]), names)


def section(tree: Mapping[str, Any], table: str) -> tuple[str, list[report.Summary]]:
    """Makes the section of one table.

    Args:
      tree: the results of one command.
      table: its name, see `optimizers.table`, or `all`: every optimizer that there is.

    Returns:
      Markdown, and what it shows: nothing where no row is complete.
    """
    domain = DOMAINS[tree["name"]]
    texts = (
        list(dict.fromkeys(record["optimizer"] for record in tree["records"]))
        if table == "all"
        else optimizers.table(table)
    )
    chosen, repeated = optimizers.distinct(
        [optimizers.parse_optimizer(text, domain) for text in texts]
    )
    names = {optimizer.name: curves.row_name(optimizer) for optimizer in chosen}
    summaries, left_out = summarize(tree, chosen)
    parts = [f"**Table `{table}`**"]
    if summaries:
        baseline, control = report.baseline_of(summaries), report.baseline_name(list(names))
        if baseline.optimizer != control:
            parts.append(
                f"Compared with {names[baseline.optimizer]}, as {names[control]}, the control, is "
                "not there."
            )
        parts += markdown_tables(summaries, baseline, names)
        if max(record["together"] for record in grid.named(tree["records"], chosen)) > 1:
            parts.append("Times are shares of runs that were made together.")
    parts += repeated
    if left_out:
        parts.append(
            "Not complete: "
            + ", ".join(f"{names[name]} ({why})" for name, why in left_out.items())
            + "."
        )
    return "\n\n".join(parts), summaries


def page(tree: Mapping[str, Any], sections: Sequence[str]) -> str:
    """Puts sections under their title, with how they were made."""
    protocol = grid.Protocol(**tree["protocol"])
    final = ", ".join(map(str, protocol.final_seeds))
    how = (
        f"Learning rates are chosen by {protocol.chosen_by.replace('_', ' ')} at seeds "
        f"{', '.join(map(str, protocol.seeds))}; the figures are of seeds {final}, "
        f"{protocol.compared.replace('_', ' ')} in {protocol.unit}: mean, lowest and highest. "
        "`wins` and `loses` are differences of the means beyond the larger range over seeds."
    )
    ending = [f"Data: {_flat(tree['data'])}.", f"Task: {_flat(tree['task'])}."]
    ending += [f"Made with: {_flat(environment)}." for environment in tree["environments"]]
    return "\n\n".join([f"**{_title(tree)}**", how, *sections, *ending]) + "\n"


def write(path: pathlib.Path, tables: Sequence[str], out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the Markdown and the pictures of one file of results.

    Args:
      path: the JSON file.
      tables: names of tables.
      out: the folder to write to.

    Returns:
      The files written.

    Raises:
      ValueError: If these are no results of `DOMAINS`, or there is no such table.
    """
    tree = read(path)
    sections, written = [], [out / f"{path.stem}.md"]
    for table in tables:
        text, summaries = section(tree, table)
        if summaries:
            picture = out / f"{path.stem}_{table.replace('/', '_')}.png"
            curves.plot(summaries, picture)
            written.append(picture)
            text += f"\n\n![Curves of {path.stem}, {table}]({picture.name})"
        sections.append(text)
    written[0].write_text(page(tree, sections))
    return written


def recorded_page(name: str) -> str:
    """Makes the page of one of `TABLES`, which has no pictures."""
    tree = read(RESULTS / f"{name}.json")
    return page(tree, [section(tree, table)[0] for table in TABLES[name]])


def panels(picture: str) -> list[curves.Panel]:
    """Makes the panels of one of `PICTURES`.

    Raises:
      ValueError: If runs of a curve are not all recorded.
    """
    made = []
    for shown in PICTURES[picture]:
        tree = read(RESULTS / f"{shown.results}.json")
        domain = DOMAINS[tree["name"]]
        chosen = [optimizers.parse_optimizer(text, domain) for text in shown.labels]
        summaries, left_out = summarize(tree, chosen)
        if left_out:
            raise ValueError(
                f"Expected all runs of the curves of {picture!r} in {shown.results}.json, got "
                f"{left_out}. Record them, or take these out of PICTURES."
            )
        made.append(shown.panel(summaries, shown.title, shown.labels))
    return made


def write_recorded() -> list[pathlib.Path]:
    """Writes all `TABLES` and `PICTURES`, and returns the files."""
    written = []
    for name in TABLES:
        written.append(RESULTS / f"{name}.md")
        written[-1].write_text(recorded_page(name))
    IMAGES.mkdir(exist_ok=True)
    for picture in PICTURES:
        written.append(IMAGES / f"{picture}.png")
        curves.draw(panels(picture), written[-1])
    for name, (paths, view, drawn) in AXES.items():
        files = (RESULTS / f"{name}.md", drawn)
        batch_axis.write(batch_axis.read(paths), view, *files)
        written += files
    return written


def write_axis(
    paths: Sequence[pathlib.Path], pairs: Sequence[str], out: pathlib.Path
) -> list[pathlib.Path]:
    """Writes the table and the picture of results at several batch sizes.

    Args:
      paths: the JSON files, see `batch_axis.read`.
      pairs: as --pairs has them.
      out: the folder to write to.

    Returns:
      The files written.

    Raises:
      ValueError: If these are no such results, or a pair is none of their optimizers.
    """
    axis = batch_axis.read(paths)
    labels = {name: curves.name(name) for name in batch_axis.names(axis)}
    view = batch_axis.View(labels, batch_axis.parse_pairs(pairs, list(labels)))
    files = [out / "batch_axis.md", out / "batch_axis.png"]
    batch_axis.write(axis, view, *files)
    return files


def parser() -> command.Flags:
    """Returns the flags."""
    flags = command.Flags(
        "training.evidence",
        __doc__,
        files=f"results.json of {', '.join(DOMAINS)}; by default all shown",
    )
    flags.add_argument(
        "--tables", type=command.listed, help="names of tables, by default main, or all"
    )
    flags.add_argument(
        "--pairs",
        type=command.listed,
        help="over batch sizes: CANDIDATE/BASELINE, several by commas",
    )
    flags.exclude("tables", "pairs")
    flags.add_argument("--out", help="folder to write to; by default the file's own")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, writes the files, prints their names."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        if not args.files and (args.tables, args.pairs, args.out) != (None, None, None):
            raise ValueError("Expected files with --tables, --pairs and --out, got none. Name one.")
        paths = [pathlib.Path(file) for file in args.files]
        out = None if args.out is None else output.make_folder(args.out)
        if not paths:
            written = write_recorded()
        elif args.pairs is not None:
            written = write_axis(paths, args.pairs, out or paths[0].parent)
        else:
            tables = list(dict.fromkeys(args.tables or ["main"]))
            written = [file for path in paths for file in write(path, tables, out or path.parent)]
    except (OSError, ValueError, KeyError) as error:
        flags.fail(error)
    print("\n".join(map(str, written)))
    return 0


if __name__ == "__main__":
    command.run("evidence", main)
