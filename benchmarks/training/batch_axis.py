"""Results of `large_batch` over the batch size: their table, and what is drawn of them."""

import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.training import curves, grid, large_batch, optimizers, report

# Summaries by the tokens of a batch, then by optimizer.
Axis = Mapping[int, Mapping[str, report.Summary]]


@dataclasses.dataclass(frozen=True)
class View:
    """What is shown of results at several batch sizes.

    Attributes:
      labels: of the optimizers that are drawn.
      pairs: of these, whose difference is drawn.
      more: optimizers that are in the table alone.
      more_pairs: differences that are in the table alone.
    """

    labels: Mapping[str, str]
    pairs: Sequence[tuple[str, str]]
    more: Sequence[str] = ()
    more_pairs: Sequence[tuple[str, str]] = ()


_ADAMW, _NADAMW = "adamw:b2=0.99", "nadamw:b2=0.99"
_MARS, _MARS_9 = "mars:b1=0.95:b2=0.99:gamma=0.1", "mars:b2=0.99:gamma=0.1"
_MARS_PUBLISHED = "mars:b1=0.95:b2=0.99"
_EXACT, _EXACT_9 = f"{_MARS}:correction=exact", f"{_MARS_9}:correction=exact"
_MUON, _MARS_M = "muon:b2_1d=0.99", "mars_m:b2_1d=0.99"
_MUON_9, _MARS_M_9 = f"{_MUON}:beta=0.9", f"{_MARS_M}:b1=0.9"
_UNCORRECTED = f"{_MARS_M_9}:gamma=0"
_MARS_M_LARGER = f"{_MARS_M_9}:gamma=0.1"
_MARS_M_EXACT = f"{_MARS_M_LARGER}:correction=exact"
_PLAIN = f"{_MUON_9}:nesterov=false"
# AdamW whose embeddings and norms have so many times the rate of the matrices; and Muon with less.
_TWO_RATES = [
    f"mars:gamma=0:b2=0.99:b2_1d=0.99:matrices=hidden:learning_rate_1d={factor}"
    for factor in (4, 16)
]
_LOW_RATE = f"{_MUON_9}:learning_rate_1d=0.03125"
_ADAPTIVE, _ROWS = f"{_MARS_M}:gamma=adaptive", "mars_m_rows:b2_1d=0.99"
_SOAP = "mars_soap:b1=0.95:b2=0.99:b2_1d=0.99"
# What is shown of the recorded results: at equal numbers of steps, and of tokens.
STEPS = View(
    {
        _ADAMW: "AdamW",
        _NADAMW: "Nesterov AdamW",
        _MARS_9: "MARS, b1 0.9",
        _EXACT_9: "MARS exact, b1 0.9",
        _MUON_9: "Muon, 0.9",
        _MARS_M_9: "MARS-M, b1 0.9",
    },
    [
        (_ADAMW, _NADAMW),
        (_MARS_9, _NADAMW),
        (_EXACT_9, _NADAMW),
        (_MARS_M_9, _MUON_9),
    ],
    [
        "adamw",
        _MARS,
        _MARS_PUBLISHED,
        _EXACT,
        _MUON,
        _MARS_M,
        _UNCORRECTED,
        _MARS_M_LARGER,
        _MARS_M_EXACT,
        _PLAIN,
        _ADAPTIVE,
        _ROWS,
        _SOAP,
        *_TWO_RATES,
        _LOW_RATE,
    ],
    [
        (_MARS, _NADAMW),
        (_MARS_PUBLISHED, _NADAMW),
        (_EXACT, _NADAMW),
        (_EXACT, _MARS),
        (_EXACT_9, _MARS_9),
        (_EXACT_9, _ADAMW),
        (_MARS_9, _ADAMW),
        (_MARS_9, "adamw"),
        (_NADAMW, "adamw"),
        (_PLAIN, _MUON_9),
        (_PLAIN, _UNCORRECTED),
        (_UNCORRECTED, _MUON_9),
        (_MARS_M_9, _UNCORRECTED),
        (_MARS_M_LARGER, _MARS_M_9),
        (_MARS_M_EXACT, _MARS_M_9),
        (_MARS_M_EXACT, _MARS_M_LARGER),
        (_MARS_M_EXACT, _MUON_9),
        (_MARS_M_9, _MARS_M),
        (_MUON_9, _MUON),
        (_MARS_M, _MUON),
        (_ADAPTIVE, _MARS_M),
        (_ROWS, _MARS_M),
        (_SOAP, _MARS_M),
        (_SOAP, _ADAMW),
        *((name, other) for name in _TWO_RATES for other in (_ADAMW, _MUON_9)),
        (_LOW_RATE, _MUON_9),
        (_LOW_RATE, _ADAMW),
    ],
)
TOKENS = View(
    {
        _ADAMW: "AdamW",
        _NADAMW: "Nesterov AdamW",
        _MARS: "MARS, b1 0.95",
        _MARS_9: "MARS, b1 0.9",
        _MUON_9: "Muon, 0.9",
        _MARS_M_9: "MARS-M, b1 0.9",
    },
    [(_MARS_M_9, _ADAMW), (_MARS_M_9, _MUON_9)],
    [_EXACT_9, _MUON, _MARS_M],
    [
        (_ADAMW, _NADAMW),
        (_MARS, _NADAMW),
        (_MARS, _ADAMW),
        (_MARS_9, _NADAMW),
        (_MARS_9, _ADAMW),
        (_EXACT_9, _MARS_9),
        (_EXACT_9, _NADAMW),
        (_EXACT_9, _MUON_9),
        (_MARS_M_9, _MARS_M),
        (_MUON_9, _MUON),
        (_MARS_M, _ADAMW),
        (_MARS_M, _MUON),
    ],
)


def read(paths: Sequence[pathlib.Path]) -> Axis:
    """Reads results of several batch sizes.

    Args:
      paths: `results.json` of `large_batch`, of tasks that differ in the batch size alone, with
        equal schedules or equal numbers of tokens in all steps; several of one size, with different
        optimizers, are joined.

    Returns:
      What is complete in them, in rising order of the batch size.

    Raises:
      ValueError: If they are no such results.
    """
    records: dict[int, list[grid.Record]] = {}
    common: dict[str, Any] = {}
    schedules: list[Any] = []
    totals: set[int] = set()
    for path in paths:
        try:
            tree = json.loads(path.read_text())
            if tree["name"] != "large_batch":
                raise ValueError(f"of {tree['name']!r}")
            task = {"protocol": tree["protocol"], **tree["task"]}
            tokens, schedule = task.pop("tokens_per_step"), task.pop("schedule")
            del task["microbatch"], task["model_flops_per_step"]
            totals.add(tokens * schedule["steps"])
            found = tree["records"]
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"Expected results of large_batch, got {str(path)!r}, which are others: {error!r}."
            ) from error
        common = common or task
        schedules.append(schedule)
        is_one_length = len(totals) == 1 or all(each == schedule for each in schedules)
        if task != common or not is_one_length:
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


def names(axis: Axis) -> list[str]:
    """Returns the optimizers, in order of appearance."""
    return list(dict.fromkeys(name for summaries in axis.values() for name in summaries))


def _reader(name: str) -> str:
    return curves.row_name(optimizers.parse_optimizer(name, large_batch.DOMAIN))


def gains(axis: Axis, candidate: str, baseline: str) -> dict[int, list[float]]:
    """Returns the candidate's loss minus the baseline's, seed by seed, where both are there."""
    return {
        tokens: report.differences(summaries[candidate], summaries[baseline])
        for tokens, summaries in axis.items()
        if candidate in summaries and baseline in summaries
    }


def table(axis: Axis, view: View) -> str:
    """Makes two tables with a column for each batch size, losses and differences, in Markdown."""
    sizes = [f"{tokens:,}" for tokens in axis]

    def rows(first: str, lines: Sequence[tuple[str, Sequence[str]]]) -> str:
        cells = [[first, *sizes], ["---"] * (len(sizes) + 1), *([name, *c] for name, c in lines)]
        return "\n".join("| " + " | ".join(line) + " |" for line in cells)

    losses = []
    for name in [*view.labels, *view.more]:
        cells = []
        for summaries in axis.values():
            found = summaries.get(name)
            edge = ", edge" if found and found.at_edge else ""
            cells.append(f"{found.loss:.3f} ({found.learning_rate:g}{edge})" if found else "")
        losses.append((_reader(name), cells))
    compared = []
    for pair in [*view.pairs, *view.more_pairs]:
        by_size = gains(axis, *pair)
        cells = []
        for tokens, summaries in axis.items():
            if tokens in by_size:
                decided = report.outcome(summaries[pair[0]], summaries[pair[1]])
                # Zero without a sign of its own.
                mean = round(statistics.fmean(by_size[tokens]), 3) + 0.0
                cells.append(f"{mean:+.3f}, {decided}")
            else:
                cells.append("")
        compared.append((" minus ".join(map(_reader, pair)), cells))
    return "\n\n".join(
        [
            rows("loss (rate), tokens a batch:", losses),
            rows("difference, tokens a batch:", compared),
        ]
    )


def panels(axis: Axis, view: View) -> list[curves.Panel]:
    """Returns the losses over batch sizes, and a panel of differences for each baseline."""
    labels, pairs = view.labels, view.pairs

    def curve(name: str, by_size: Mapping[int, Sequence[float]]) -> curves.Curve:
        return curves.Curve(
            optimizer=name,
            label=labels[name],
            x=list(by_size),
            mean=[statistics.fmean(each) for each in by_size.values()],
            low=[min(each) for each in by_size.values()],
            high=[max(each) for each in by_size.values()],
        )

    x = "tokens in a batch"
    losses = [
        curve(name, {tokens: found[name].losses for tokens, found in axis.items() if name in found})
        for name in labels
    ]
    made = [curves.Panel("validation loss (nats per token)", x, losses)]
    for baseline in dict.fromkeys(baseline for _, baseline in pairs):
        differences = [
            curve(one, gains(axis, one, other)) for one, other in pairs if other == baseline
        ]
        made.append(curves.Panel(f"minus {labels[baseline]} (nats per token)", x, differences))
    return made


def parse_pairs(texts: Sequence[str], known: Sequence[str]) -> list[tuple[str, str]]:
    """Reads pairs, CANDIDATE/BASELINE, or raises a `ValueError` that names --pairs."""
    pairs = []
    for text in texts:
        candidate, _, baseline = text.partition("/")
        if not {candidate, baseline} <= set(known):
            raise ValueError(
                f"Expected --pairs of {', '.join(known)}, written like {known[0]}/{known[-1]}, got "
                f"{text!r}."
            )
        pairs.append((candidate, baseline))
    return pairs


def write(axis: Axis, view: View, text: pathlib.Path, picture: pathlib.Path) -> None:
    """Writes the tables to a file of Markdown, and draws the panels; see `table` and `panels`."""
    text.write_text(f"{table(axis, view)}\n")
    curves.draw(panels(axis, view), picture)
