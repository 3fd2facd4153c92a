r"""Trains a small GPT on real text with several optimizers side by side.

All start from the same weights and see the same batches. From the root of the repository:

    python -m benchmarks.language_model
    python -m benchmarks.language_model --optimizers=adamw,muon,mars_m --seeds=0,1,2 \
        --learning_rates=2e-3,4e-3,8e-3,1.6e-2
    python -m benchmarks.language_model --data_file=train.bin --validation_file=val.bin

At the end there are a table and a verdict on the screen, and `results.json` and `curves.png` in
the folder `--out`, and with `--diagnose` `diagnostics.png`.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import tqdm  # type: ignore[import-untyped]
from absl import app, flags, logging

from benchmarks import curves, data, environment, gpt, optimizers, report, training

_OPTIMIZERS = flags.DEFINE_list(
    "optimizers",
    ["adamw", "mars", "mars_m"],
    f"What to compare, out of {', '.join(optimizers.OPTIMIZERS)}. Settings may follow: "
    "'mars:gamma=0.05:b1=0.9'. 'adamw', or else the first, is the baseline.",
)
_LEARNING_RATES = flags.DEFINE_list(
    "learning_rates",
    None,
    "Peak learning rates that every optimizer is tuned over. Without them each has its default.",
)
_SEEDS = flags.DEFINE_list(
    "seeds", ["0"], "Each decides the initial weights and the order of the data."
)
_SIZE = flags.DEFINE_enum("size", "small", list(gpt.SIZES), "Size of the model.")
_CONTEXT = flags.DEFINE_integer("context", 64, "Tokens that the model sees.", lower_bound=1)
_BATCH_SIZE = flags.DEFINE_integer("batch_size", 16, "Windows in a batch.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 1000, "Number of updates.", lower_bound=1)
_WARMUP = flags.DEFINE_integer(
    "warmup_steps", None, "Updates of the warm-up; a tenth of --steps by default.", lower_bound=0
)
_EVAL_EVERY = flags.DEFINE_integer(
    "eval_every", 50, "Updates between two evaluations.", lower_bound=1
)
_EVAL_WINDOWS = flags.DEFINE_integer(
    "eval_windows", 256, "Windows of validation text.", lower_bound=1
)
_DATA_FILE = flags.DEFINE_string(
    "data_file",
    None,
    "Training text: '.bin' is unsigned 16-bit token ids, anything else is read as bytes. Without "
    "it the source of Python's standard library.",
)
_VALIDATION_FILE = flags.DEFINE_string(
    "validation_file", None, "Held-out text; by default the end of --data_file."
)
_VOCABULARY_SIZE = flags.DEFINE_integer(
    "vocabulary_size", None, "Number of symbols; found in the data by default.", lower_bound=1
)
_DIAGNOSE = flags.DEFINE_bool(
    "diagnose", False, "Record and plot what the correction does, at every evaluation."
)
_OUT = flags.DEFINE_string("out", "runs/language_model", "Folder of the results.")

_FINAL_FRACTION = 0.1


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to compare, and how. `learning_rates` empty: each optimizer's default."""

    optimizers: list[optimizers.Optimizer]
    learning_rates: list[float]
    seeds: list[int]
    config: gpt.GPTConfig
    schedule: training.Schedule
    batch_size: int
    eval_windows: int
    diagnose: bool = False


def compare(corpus: data.Corpus, settings: Settings) -> list[training.Run]:
    """Runs every optimizer at every learning rate and seed, with a progress bar.

    Args:
      corpus: the text.
      settings: what to run.

    Returns:
      All runs.
    """
    held_out = data.validation_windows(
        corpus.validation, context=settings.config.context, count=settings.eval_windows
    )
    jobs = [
        (optimizer, settings.learning_rates or [optimizer.learning_rate])
        for optimizer in settings.optimizers
    ]
    runs = len(settings.seeds) * sum(len(rates) for _, rates in jobs)
    results = []
    with tqdm.tqdm(total=runs * settings.schedule.steps, unit="step", dynamic_ncols=True) as bar:

        def progress(steps: int, loss: float) -> None:
            bar.set_postfix_str(f"training loss {loss:.3f}", refresh=False)
            bar.update(steps)

        for optimizer, rates in jobs:
            trainer = training.Trainer(settings.config, optimizer, settings.schedule)
            for rate in rates:
                for seed in settings.seeds:
                    bar.set_description(f"{optimizer.name}, {rate:g}, seed {seed}")
                    run = trainer.train(
                        corpus,
                        held_out,
                        learning_rate=rate,
                        seed=seed,
                        batch_size=settings.batch_size,
                        diagnose=settings.diagnose,
                        progress=progress,
                    )
                    results.append(run)
                    # A long sweep shows what it has, should it be stopped.
                    bar.write(
                        f"{optimizer.name}, {rate:g}, seed {seed}: validation loss "
                        f"{run.validation_loss[-1]:.4f}",
                        file=sys.stderr,
                    )
    return results


def _schedule() -> training.Schedule:
    steps = _STEPS.value
    warmup = steps // 10 if _WARMUP.value is None else _WARMUP.value
    if warmup >= steps:
        raise ValueError(
            f"Expected a warm-up shorter than the run, got {warmup} of {steps} steps. Lower "
            "--warmup_steps."
        )
    return training.Schedule(steps, warmup, _FINAL_FRACTION, _EVAL_EVERY.value)


def _corpus() -> data.Corpus:
    if _DATA_FILE.value is not None:
        return data.load_files(_DATA_FILE.value, _VALIDATION_FILE.value, _VOCABULARY_SIZE.value)
    if _VALIDATION_FILE.value is not None or _VOCABULARY_SIZE.value is not None:
        raise ValueError(
            "Expected --data_file beside --validation_file or --vocabulary_size, got none. Give "
            "the training text too."
        )
    return data.load_standard_library()


def _described(settings: Settings) -> dict[str, Any]:
    tree = dataclasses.asdict(settings)
    tree["optimizers"] = {
        optimizer.name: {**optimizer.settings, "learning_rate": optimizer.learning_rate}
        for optimizer in settings.optimizers
    }
    return tree


def main(argv: Sequence[str]) -> None:
    """Reads the flags, runs the comparison, writes and prints the report."""
    began = time.perf_counter()
    try:
        if len(argv) > 1:
            raise ValueError(f"Expected flags only, got {list(argv[1:])}. Write --name=value.")
        corpus = _corpus()
        data.require_enough(corpus, context=_CONTEXT.value, batch_size=_BATCH_SIZE.value)
        chosen, notes = optimizers.distinct(optimizers.parse_optimizers(_OPTIMIZERS.value))
        settings = Settings(
            optimizers=chosen,
            learning_rates=(
                []
                if _LEARNING_RATES.value is None
                else optimizers.parse_learning_rates(_LEARNING_RATES.value)
            ),
            seeds=optimizers.parse_seeds(_SEEDS.value, "seeds"),
            config=gpt.sized(
                _SIZE.value, vocabulary_size=corpus.vocabulary_size, context=_CONTEXT.value
            ),
            schedule=_schedule(),
            batch_size=_BATCH_SIZE.value,
            eval_windows=_EVAL_WINDOWS.value,
            diagnose=_DIAGNOSE.value,
        )
        out = report.make_folder(_OUT.value)
    except (OSError, ValueError) as error:
        sys.exit(f"language_model: {error}")

    record = {
        "environment": environment.describe(),
        "data": corpus.description,
        "settings": _described(settings),
    }
    for title, values in record.items():
        logging.info("%s: %s", title, values)

    runs = compare(corpus, settings)
    summaries = report.summarize(runs)
    tree = report.as_json(summaries, runs, record)
    report.write_json(tree, out / "results.json")
    curves.plot(summaries, out / "curves.png")
    written = ["results.json", "curves.png"]
    if curves.plot_measures(summaries, out / "diagnostics.png"):
        written.append("diagnostics.png")
    for title in ("environment", "data"):
        print(f"{title}: " + ", ".join(f"{key} {value}" for key, value in record[title].items()))
    print("\n".join(["", *notes, report.text(summaries), ""]))
    seconds = time.perf_counter() - began
    print(f"{seconds:.0f} s in all. Written to {out}: {', '.join(written)}.")


if __name__ == "__main__":
    app.run(main)
