r"""Makes Markdown tables and plots of recorded results of the training benchmarks.

    python -m benchmarks.evidence benchmarks/results/gpt2_45m_h100.json --tables=main,mars/gamma

Each table is a section of `NAME.md` beside the JSON file, and a plot `NAME_TABLE.png`. Rows whose
runs are not all there are left out, and named with the reason.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import command, gpt2, grid, optimizers, report, vision

DOMAINS = {"gpt2": gpt2.DOMAIN, "vision": vision.DOMAIN}


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    return "diverged" if math.isinf(value) else f"{value:.4f}"


def _title(tree: Mapping[str, Any]) -> str:
    """Says what was trained, in a heading."""
    task = tree["task"]
    model, size = task["model"], f"{task['parameters'] / 1e6:.1f} million parameters"
    if tree["name"] == "gpt2":
        steps = f"{task['schedule']['steps']:,} steps of {task['tokens_per_step']:,} tokens"
        return f"Language: a GPT of {size}, {steps}"
    kind = "residual network" if model["kind"] == "resnet" else "vision transformer"
    return f"Images: a {kind} of {size}, {task['recipe']['epochs']} epochs"


def markdown_table(summaries: Sequence[report.Summary], baseline: report.Summary) -> str:
    """Formats each optimizer at its best learning rate as a Markdown table.

    Args:
      summaries: the rows.
      baseline: what they are compared with, one of them.

    Returns:
      The table, without a line break at its end.
    """
    versus = f"`{baseline.optimizer}`"
    header = [
        "optimizer",
        "learning rate (tried)",
        baseline.metric,
        "over seeds",
        f"minus {versus}, by seed",
        "outcome",
        f"steps to {versus}'s",
        "ms a step",
        f"seconds to {versus}'s",
        "MB of state",
    ]
    lines = [_row(header), _row(["---"] * len(header))]
    for summary in summaries:
        finite = summary is not baseline and not (
            math.isinf(summary.loss) or math.isinf(baseline.loss)
        )
        each = report.differences(summary, baseline) if finite else []
        seconds = statistics.median(run.seconds_per_step for run in summary.runs)
        edge = ", edge" if summary.at_edge else ""
        lines.append(
            _row(
                [
                    f"`{summary.optimizer}`",
                    f"{summary.learning_rate:g} ({len(summary.grid)}{edge})",
                    _number(summary.loss),
                    f"{_number(min(summary.losses))} to {_number(max(summary.losses))}",
                    f"{min(each):+.4f} to {max(each):+.4f}" if each else "",
                    "" if summary is baseline else report.outcome(summary, baseline),
                    report.when_reached(summary, baseline, ".0f"),
                    report.milliseconds(seconds),
                    report.when_reached(summary, baseline, ".3g", seconds),
                    f"{summary.runs[0].state_bytes / 1e6:.1f}",
                ]
            )
        )
    return "\n".join(lines)


def _flat(tree: Mapping[str, Any]) -> str:
    parts = []
    for key, value in tree.items():
        inner = f"({_flat(value)})" if isinstance(value, Mapping) else str(value)
        parts.append(f"{key} {inner}")
    return ", ".join(parts)


def section(tree: Mapping[str, Any], table: str) -> tuple[str, list[report.Summary]]:
    """Makes the section of one table.

    Args:
      tree: the results of one command.
      table: its name, see `optimizers.table`, or `all`: every optimizer that there is.

    Returns:
      Markdown, and what it shows: nothing where no row is complete.
    """
    domain = DOMAINS[tree["name"]]
    protocol = grid.Protocol(**tree["protocol"])
    texts = (
        list(dict.fromkeys(record["optimizer"] for record in tree["records"]))
        if table == "all"
        else optimizers.table(table)
    )
    chosen, repeated = optimizers.distinct(
        [optimizers.parse_optimizer(text, domain) for text in texts]
    )
    records = grid.named(tree["records"], chosen)
    names = [optimizer.name for optimizer in chosen]
    summaries, left_out = grid.summarize(records, protocol, names)
    parts = [f"### {tree['name']}: {table}"]
    if summaries:
        baseline, control = report.baseline_of(summaries), report.baseline_name(names)
        if baseline.optimizer != control:
            parts.append(
                f"Compared with `{baseline.optimizer}`, as `{control}`, the control, is not there."
            )
        parts.append(markdown_table(summaries, baseline))
        together = {record["together"] for record in records}
        final = ", ".join(map(str, protocol.final_seeds))
        notes = [
            f"Learning rates are chosen by {protocol.chosen_by.replace('_', ' ')} at seeds "
            f"{', '.join(map(str, protocol.seeds))}; the figures are of seeds {final}, "
            f"{protocol.compared.replace('_', ' ')} in {protocol.unit}. `wins` and `loses` are "
            "differences of the means beyond the larger range over seeds."
        ]
        if max(together) > 1:
            notes.append("Times are shares of runs that were made together.")
        parts.append(" ".join(notes))
    parts += repeated
    if left_out:
        parts.append(
            "Not complete: "
            + ", ".join(f"`{name}` ({why})" for name, why in left_out.items())
            + "."
        )
    return "\n\n".join(parts), summaries


def write(path: pathlib.Path, tables: Sequence[str], out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the Markdown and the plots of one file of results.

    Args:
      path: the JSON file.
      tables: names of tables.
      out: the folder to write to.

    Returns:
      The files written.

    Raises:
      ValueError: If these are no results of `DOMAINS`, or there is no such table.
    """
    try:
        tree = json.loads(path.read_text())
        if tree["name"] not in DOMAINS:
            raise ValueError(f"of {tree['name']!r}")
        parts = [f"## {_title(tree)}"]
        ending = [f"Data: {_flat(tree['data'])}.", f"Task: {_flat(tree['task'])}."]
        ending += [f"Made with: {_flat(environment)}." for environment in tree["environments"]]
        grid.Protocol(**tree["protocol"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"Expected results of {' or '.join(DOMAINS)}, got {str(path)!r}: "
            f"{error!r}. Give the results.json of these commands."
        ) from error
    written = []
    for table in tables:
        text, summaries = section(tree, table)
        if summaries:
            plot = out / f"{path.stem}_{table.replace('/', '_')}.png"
            report.plot(summaries, plot)
            written.append(plot)
            text += f"\n\n![Curves of {path.stem}, {table}]({plot.name})"
        parts.append(text)
    fragment = out / f"{path.stem}.md"
    fragment.write_text("\n\n".join([*parts, *ending]) + "\n")
    return [fragment, *written]


def parser() -> command.Flags:
    """Returns the flags."""
    flags = command.Flags("evidence", __doc__, files="results.json of gpt2 or vision")
    flags.add_argument(
        "--tables", type=command.listed, default="main", help="names of tables, or all"
    )
    flags.add_argument("--out", help="folder to write to; by default the file's own")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, writes the files, prints their names."""
    flags = parser()
    args = flags.parse_args(argv)
    try:
        if not args.files:
            raise ValueError("Expected results.json of gpt2 or vision, got no file. Name one.")
        for file in map(pathlib.Path, args.files):
            out = file.parent if args.out is None else report.make_folder(args.out)
            for written in write(file, list(dict.fromkeys(args.tables)), out):
                print(written)
    except (OSError, ValueError, KeyError) as error:
        flags.fail(error)
    return 0


if __name__ == "__main__":
    command.run("evidence", main)
