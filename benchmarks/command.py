"""What all commands have in common: their flags, the first lines they print, and how they end.

Flags are absl's, each command's in a registry of its own: a process may import several commands.
"""

import argparse
import fnmatch
import logging as python_logging
import math
import os
import pathlib
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, Self

from absl import flags, logging

_LARGEST = 2**63 - 1


class _Reader(flags.ArgumentParser):  # type: ignore[type-arg, unused-ignore]
    """Reads a flag's text; an error names the flag."""

    def __init__(self, name: str, read: Callable[[str], Any], choices: tuple[str, ...]) -> None:
        super().__init__()
        self._name, self._read, self._choices = name, read, choices

    def parse(self, argument: Any) -> Any:
        if not isinstance(argument, str):  # a default
            return argument
        # An error shows no more than a line of a long value.
        if self._choices and argument not in self._choices:
            raise ValueError(
                f"Expected --{self._name} out of {', '.join(self._choices)}, got {argument[:99]!r}."
            )
        try:
            return self._read(argument)
        except ValueError as error:
            raise ValueError(f"--{self._name}: {error}") from error


class Flags:
    """The flags of a command.

    Args:
      name: of the command, a module below `benchmarks`: `training.gpt2`.
      doc: its docstring, whose first line says what it does.
      files: what positional arguments are, where there are some.
    """

    def __init__(self, name: str, doc: str | None, *, files: str = "") -> None:
        self.name = name.rpartition(".")[2]
        self._module = name
        self._about = (doc or name).partition("\n")[0]
        self._files = files
        self._values = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
        self._groups: dict[str, dict[str, str]] = {}
        self._exclusive: list[tuple[str, ...]] = []
        self.notes: list[str] = []

    def add_argument_group(self, title: str) -> "Flags":
        """Begins a group of the help, to which flags are added from now on."""
        self._groups.setdefault(title, {})
        return self

    def add_argument(
        self,
        flag: str,
        *,
        type: Callable[[str], Any] = str,
        default: Any = None,
        choices: Sequence[str] = (),
        action: str | None = None,
        help: str,
    ) -> None:
        """Adds a flag, with the parameters of `argparse`.

        Args:
          flag: its name, behind two dashes.
          type: reads its text, and raises a `ValueError` where it cannot; bool is a switch.
          default: its value where it is not given.
          choices: what it may be.
          action: `store_true` is a switch, too, off by default.
          help: one line.
        """
        name = flag.removeprefix("--")
        options: Any = {"flag_values": self._values, "allow_overwrite": False}
        if type is bool or action == "store_true":
            value = False if action else default
            flags.DEFINE_boolean(name, value, help, **options)
        else:
            flags.DEFINE(_Reader(name, type, tuple(choices)), name, default, help, **options)
        if not self._groups:
            self.add_argument_group("flags")
        meaning = f"{', '.join(choices)}: {help}" if choices else help
        list(self._groups.values())[-1][name] = meaning

    def exclude(self, *names: str) -> None:
        """Of these flags no two can be given together."""
        self._exclusive.append(names)

    def read(self, name: str, text: str) -> Any:
        """Returns the value that a text is of a flag, or raises a `ValueError`."""
        if name not in self._values:
            raise ValueError(f"Expected a flag, got {name!r}. --help lists the flags.")
        if self._values[name].boolean and text not in ("true", "false"):
            raise ValueError(f"Expected true or false as --{name}, got {text[:99]!r}.")
        return self._values[name].parser.parse(text)

    def set_defaults(self, **defaults: Any) -> None:
        """Changes defaults."""
        for name, value in defaults.items():
            self._values.set_default(name, value)

    def help(self) -> str:
        """Returns the flags by group, one line each."""
        files = "FILES " * bool(self._files)
        usage = f"python -m benchmarks.{self._module} {files}[--FLAG=VALUE ...]"
        lines = [self._about, "", usage]
        if self._files:
            lines += ["", f"FILES: {self._files}"]
        for title, members in self._groups.items():
            lines += ["", f"{title}:"]
            for name, meaning in members.items():
                default = self._values[name].default
                switch = self._values[name].boolean
                shown = f"--[no]{name}" if switch else f"--{name}"
                if not switch and default is not None:
                    shown += (
                        f"={','.join(map(str, default)) if isinstance(default, list) else default}"
                    )
                lines.append(f"  {shown:<24} {meaning}" + "; on" * (switch and default is True))
        return "\n".join([*lines, *[""][: len(self.notes)], *self.notes])

    def parse_args(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Reads the command line, `sys.argv` by default; ends the process where it cannot be."""
        given = list(sys.argv[1:] if argv is None else argv)
        if {"--help", "-h", "--helpfull", "--helpshort"}.intersection(given):
            try:
                print(self.help(), flush=True)
            except BrokenPipeError:  # the reader, such as `head`, has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        try:
            files = self._values([self.name, *given])[1:]
        except flags.UnrecognizedFlagError as error:
            self.fail(f"{error}. --help lists the flags.")
        except flags.Error as error:
            # What reading raised, without the whole value in front.
            self.fail(error.__context__ or f"{error}. Give it once.")
        if files and not self._files:
            self.fail(f"Expected flags only, got {files}. Write --name=value.")
        for names in self._exclusive:
            both = [f"--{name}" for name in names if self._values[name].present]
            if len(both) > 1:
                self.fail(f"Expected one of {' and '.join(both)}, got both. Leave one out.")
        return argparse.Namespace(**self._values.flag_values_dict(), files=files)

    def fail(self, reason: object) -> NoReturn:
        """Ends the process with a line that says why."""
        sys.exit(f"{self.name}: {reason}")


def whole(least: int, largest: int = _LARGEST) -> Callable[[str], int]:
    """Returns a reader of whole numbers of a range."""

    def read(text: str) -> int:
        # Python reads no number of thousands of digits.
        if not text.isdecimal() or not least <= int(text[:99]) <= largest:
            raise ValueError(
                f"Expected a whole number from {least} to {largest}, got {text[:99]!r}."
            )
        return int(text)

    return read


positive = whole(1)


def number(least: float, largest: float = math.inf) -> Callable[[str], float]:
    """Returns a reader of finite numbers of a range."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and least <= value <= largest):
            raise ValueError(
                f"Expected a finite number from {least:g} to {largest:g}, got {text[:99]!r}."
            )
        return value

    return read


seconds = number(0.0)


def listed(text: str) -> list[str]:
    """Reads a list separated by commas."""
    return text.split(",")


def positives(text: str) -> list[int]:
    """Reads whole numbers from 1, separated by commas."""
    return [positive(one) for one in listed(text)]


def subset(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns a reader of a list of some of the known values."""

    def read(text: str) -> list[str]:
        given = listed(text)
        if set(given) - set(known) or len(set(given)) < len(given):
            raise ValueError(
                f"Expected some of {', '.join(known)}, separated by commas, got {text[:99]!r}."
            )
        return given

    return read


def matching(patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns the names that one of the patterns matches, or raises where there is none.

    Args:
      patterns: names, in which `*` stands for anything.
      names: those that there are.
    """
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"Expected names or patterns of {', '.join(names)}, got {pattern!r}. Correct "
                "--optimizers."
            )
    return [name for name in names if any(fnmatch.fnmatchcase(name, one) for one in patterns)]


def add_output(parser: Flags) -> None:
    """Adds the flags of what is written."""
    group = parser.add_argument_group("output")
    group.add_argument("--out", default=f"runs/{parser.name}", help="folder of the results")
    group.add_argument("--commit", help="what to record as the commit; by default git says")


def announce(name: str, what: str, on: str, out: pathlib.Path) -> None:
    """Prints what runs, on what, and where the results go."""
    print(f"{name}: {what}\non {on}\nresults: {out}", flush=True)


def conclude(tree: Mapping[str, Any], table: str, path: pathlib.Path) -> int:
    """Prints what was measured with, a table, and the file; returns the exit status."""
    about = ", ".join(f"{key} {value}" for key, value in tree["environment"].items())
    print(f"environment: {about}\n\n{table}\n\nWritten: {path}.")
    return 0


def guarded(row: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Adds the figures to a row, or the "error" that came instead.

    Args:
      row: what is known before.
      measure: returns the figures.

    Returns:
      A new row.
    """
    logging.info("%s: compiling and measuring ...", row["name"])
    try:
        return {**row, **measure()}
    # Out of memory comes as a RuntimeError, a refusal as a NotImplementedError; whatever happens
    # to one row, the others should be measured.
    except Exception as error:
        message = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {message[0] if message else 'without a message'}"
        logging.info("%s failed: %s", row["name"], reason)
        return {**row, "error": reason}


class Interrupt:
    """Notes SIGINT and SIGTERM while it is entered; a second one ends the process at once.

    Attributes:
      number: of the signal that came, or 0.
    """

    def __init__(self) -> None:
        self.number = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def __enter__(self) -> Self:
        """Begins to note signals."""
        kinds = (signal.SIGINT, signal.SIGTERM)
        self._before = [(kind, signal.signal(kind, self._note)) for kind in kinds]
        return self

    def __exit__(self, *error: object) -> None:
        """Leaves signals to those who had them before."""
        for kind, handler in self._before:
            signal.signal(kind, handler)


def again() -> str:
    """Returns the command line of this process, for the user to repeat."""
    return shlex.join(["python", *sys.orig_argv[1:]])


def run(name: str, main: Callable[[], int], *, rows: bool = False) -> NoReturn:
    """Runs a command, of `rows` that its log shows; no traceback where it is interrupted."""
    flags.FLAGS([name])
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO if rows else logging.WARNING)
    # JAX says there which backends it looked for in vain. JAX_LOGGING_LEVEL still counts.
    jax_log = python_logging.getLogger("jax")
    if jax_log.level == python_logging.NOTSET:
        jax_log.setLevel(python_logging.WARNING)

    def terminated(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, terminated)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see benchmarks/__init__.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted. What was finished is written.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
