r"""Draws recorded results of `large_batch` against the batch size, and makes their table.

    python -m benchmarks.batch_axis benchmarks/results/large_batch_*_h200.json \
        --pairs=nadamw:b2=0.99/adamw:b2=0.99,mars_m:b2_1d=0.99/muon:b2_1d=0.99

A pair is an optimizer and what it is compared with. Written are `NAME.png` and `NAME.md`.
"""

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt

from benchmarks import grid, report

# Summaries by the tokens of a batch, then by optimizer.
Axis = Mapping[int, Mapping[str, report.Summary]]


def read(paths: Sequence[pathlib.Path]) -> Axis:
    """Reads results of several batch sizes.

    Args:
      paths: `results.json` of `large_batch`, of tasks that differ in the batch size alone; several
        of one size, with different optimizers, are joined.

    Returns:
      What is complete in them, in rising order of the batch size.

    Raises:
      ValueError: If they are no such results.
    """
    records: dict[int, list[grid.Record]] = {}
    common: dict[str, Any] = {}
    for path in paths:
        try:
            tree = json.loads(path.read_text())
            if tree["name"] != "large_batch":
                raise ValueError(f"of {tree['name']!r}")
            task = {"protocol": tree["protocol"], **tree["task"]}
            tokens = task.pop("tokens_per_step")
            del task["microbatch"], task["model_flops_per_step"]
            found = tree["records"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"Expected results of large_batch, got {str(path)!r}, which are others: {error!r}."
            ) from error
        common = common or task
        if task != common:
            raise ValueError(
                f"Expected results that differ in the batch size alone, got {str(path)!r}, which "
                "differ in more."
            )
        records.setdefault(tokens, []).extend(found)
    protocol = grid.Protocol(**common["protocol"])
    return {
        tokens: {summary.optimizer: summary for summary in grid.summarize(found, protocol)[0]}
        for tokens, found in sorted(records.items())
    }


def _names(axis: Axis) -> list[str]:
    return list(dict.fromkeys(name for summaries in axis.values() for name in summaries))


def gains(axis: Axis, candidate: str, baseline: str) -> dict[int, list[float]]:
    """Returns the candidate's loss minus the baseline's, seed by seed, where both are there."""
    return {
        tokens: report.differences(summaries[candidate], summaries[baseline])
        for tokens, summaries in axis.items()
        if candidate in summaries and baseline in summaries
    }


def table(axis: Axis, pairs: Sequence[tuple[str, str]]) -> str:
    """Makes two tables with a column for each batch size: losses, and differences.

    Args:
      axis: the results.
      pairs: of optimizers, see above.

    Returns:
      Markdown.
    """
    sizes = [f"{tokens:,}" for tokens in axis]

    def rows(first: str, lines: Sequence[tuple[str, Sequence[str]]]) -> str:
        cells = [[first, *sizes], ["---"] * (len(sizes) + 1), *([name, *c] for name, c in lines)]
        return "\n".join("| " + " | ".join(line) + " |" for line in cells)

    losses = []
    for name in _names(axis):
        cells = []
        for summaries in axis.values():
            found = summaries.get(name)
            edge = ", edge" if found and found.at_edge else ""
            cells.append(f"{found.loss:.3f} ({found.learning_rate:g}{edge})" if found else "")
        losses.append((f"`{name}`", cells))
    compared = []
    for pair in pairs:
        by_size = gains(axis, *pair)
        cells = []
        for tokens, summaries in axis.items():
            if tokens in by_size:
                decided = report.outcome(summaries[pair[0]], summaries[pair[1]])
                cells.append(f"{statistics.fmean(by_size[tokens]):+.3f}, {decided}")
            else:
                cells.append("")
        compared.append((f"`{pair[0]}` minus `{pair[1]}`", cells))
    return "\n\n".join(
        [
            rows("loss (rate), tokens a batch:", losses),
            rows("difference, tokens a batch:", compared),
        ]
    )


def plot(axis: Axis, pairs: Sequence[tuple[str, str]], path: pathlib.Path) -> None:
    """Draws losses, best rates and differences against the batch size.

    Args:
      axis: the results.
      pairs: of optimizers, see above; their bars reach from the lowest to the highest seed.
      path: the PNG file to write.
    """
    figure, (losses, rates, differences) = plt.subplots(
        ncols=3, figsize=(15, 5.5), layout="constrained"
    )
    for name in _names(axis):
        found = {tokens: s[name] for tokens, s in axis.items() if name in s}
        losses.plot(list(found), [s.loss for s in found.values()], marker="o", label=name)
        rates.plot(list(found), [s.learning_rate for s in found.values()], marker="o")
    for candidate, baseline in pairs:
        by_size = gains(axis, candidate, baseline)
        means = [statistics.fmean(each) for each in by_size.values()]
        below = [m - min(each) for m, each in zip(means, by_size.values(), strict=True)]
        above = [max(each) - m for m, each in zip(means, by_size.values(), strict=True)]
        differences.errorbar(
            list(by_size),
            means,
            [below, above],
            marker="o",
            capsize=3,
            label=f"{candidate}\nminus {baseline}",
        )
    differences.axhline(0, color="black", linewidth=0.8)
    labels = ("validation loss (nats per token)", "best learning rate", "difference (nats)")
    for ax, label in zip((losses, rates, differences), labels, strict=True):
        ax.set(xlabel="tokens a batch", ylabel=label, xscale="log")
        ax.grid(alpha=0.3)
    rates.set(yscale="log")
    for ax in (losses, differences):
        ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Reads the flags, writes the files, prints their names."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", help="results.json of large_batch")
    parser.add_argument("--pairs", default="", help="CANDIDATE/BASELINE, several by commas")
    parser.add_argument("--name", default="large_batch", help="of the files to write")
    parser.add_argument("--out", help="folder to write to; by default the first file's own")
    args = parser.parse_args(argv)
    paths = [pathlib.Path(file) for file in args.files]
    pairs: list[tuple[str, str]] = []
    try:
        axis = read(paths)
        known = _names(axis)
        for text in filter(None, args.pairs.split(",")):
            candidate, _, baseline = text.partition("/")
            if not {candidate, baseline} <= set(known):
                raise ValueError(
                    f"Expected --pairs of {', '.join(known)}, written like "
                    f"{known[0]}/{known[-1]}, got {text!r}."
                )
            pairs.append((candidate, baseline))
        out = paths[0].parent if args.out is None else report.make_folder(args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"batch_axis: {error}")
    plot(axis, pairs, out / f"{args.name}.png")
    image = f"![Losses, best rates and differences by batch size]({args.name}.png)"
    (out / f"{args.name}.md").write_text(f"{table(axis, pairs)}\n\n{image}\n")
    print(out / f"{args.name}.png", out / f"{args.name}.md", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
