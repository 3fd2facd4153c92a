"""Breaks the package in one place at a time, and reports which test notices.

    python -m tests.mutation.run                  # all mutants without a result that still holds
    python -m tests.mutation.run --only shampoo   # those whose name or file matches
    python -m tests.mutation.run --table          # writes docs/mutation.md from the results

Each mutant of `mutants.py` is written into a copy of the working tree, on which the tests that it
lists are run up to the first failure; if none fails, all of `tests/parity` and `tests/contract`.
Before, the listed tests have to pass on an unchanged copy. Results are kept in a file, so that a
run can be cut off: one holds until the mutant, the code of its file or its list of tests changes,
and is kept, as one from before, until there is another.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.mutation.mutants import EQUIVALENT, MUTANTS, Mutant

ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "mutation.md"
RESULTS: Final = ROOT / "tests" / "mutation" / "results.json"
# Programs that a mutant does not change are compiled once for all mutants.
PROGRAMS: Final = ROOT / "build" / "mutation_programs"
EVERYTHING: Final = ("tests/parity", "tests/contract")
# What a copy needs for its tests.
COPIED: Final = ("docs", "mars_optax", "tests", "pyproject.toml")
# A mutant may be slower than the package; one that is this much slower does not end.
SLOWEST: Final = 10.0
START: Final = 60.0  # seconds in which an interpreter has started, on a busy machine
EVERYTHING_S: Final = 3600.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run of pytest said.

    Attributes:
      code: Its exit status; None if it was ended at the limit.
      failed: The first test that failed, or None.
      seconds: Of each test, by its name; empty if it was ended.
      output: The end of what it printed.
    """

    code: int | None
    failed: str | None
    seconds: Mapping[str, float]
    output: str


def source(mutant: Mutant, root: pathlib.Path = ROOT) -> pathlib.Path:
    """The file that a mutant changes."""
    return root / "mars_optax" / "_src" / mutant.file


def mutated(mutant: Mutant) -> str:
    """The file's text with the change; raises where the old text does not stand there once."""
    text = source(mutant).read_text()
    if (count := text.count(mutant.old)) != 1:
        raise ValueError(
            f"mutant '{mutant.name}': expected its old text once in {mutant.file}, got it {count} "
            "times. Adapt tests/mutation/mutants.py to the change of the package."
        )
    if mutant.new == mutant.old:
        raise ValueError(f"mutant '{mutant.name}': its new text is the old one.")
    return text.replace(mutant.old, mutant.new)


def digest(mutant: Mutant) -> str:
    """Changes with the mutant, its file's code and its tests, not with comments and docstrings."""
    tree = ast.parse(mutated(mutant))
    for node in ast.walk(tree):
        may_have_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if may_have_one and ast.get_docstring(node) is not None:
            del node.body[0]
    text = "\0".join((ast.unparse(tree), *mutant.tests))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def copy_tree(to: pathlib.Path) -> None:
    """Copies what the tests need."""
    ignored = shutil.ignore_patterns("__pycache__", "results")
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, to / name)


def pytest(tree: pathlib.Path, tests: Sequence[str], limit: float, *, first: bool) -> Outcome:
    """Runs tests of a copy, with `first` up to the first that fails."""
    report = tree / "report.xml"
    report.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(PROGRAMS),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["--tb=line", f"--junitxml={report}", *(["-x"] if first else []), *tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, None, {}, f"ended after {limit:.0f} s")
    failed, seconds = None, {}
    if report.exists():
        for case in ET.parse(report).iter("testcase"):
            *modules, cls = case.get("classname", "").split(".")
            name = f"{'/'.join(modules)}.py::{cls}::{case.get('name')}"
            seconds[name] = float(case.get("time", 0))
            if failed is None and (
                case.find("failure") is not None or case.find("error") is not None
            ):
                failed = name
    return Outcome(done.returncode, failed, seconds, done.stdout[-3000:])


def limit_of(tests: Sequence[str], seconds: Mapping[str, float]) -> float:
    """Seconds after which a mutant does not end: many times what its tests take unchanged."""
    usual = sum(s for name, s in seconds.items() if any(name.startswith(t) for t in tests))
    return START + SLOWEST * usual


def baseline(mutants: Sequence[Mutant]) -> dict[str, float]:
    """The seconds of every listed test on an unchanged copy, where all have to pass."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    with tempfile.TemporaryDirectory() as name:
        tree = pathlib.Path(name)
        copy_tree(tree)
        found = subprocess.run(
            [sys.executable, "-c", "import mars_optax; print(mars_optax.__file__)"],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if not pathlib.Path(found).resolve().is_relative_to(tree.resolve()):
            raise SystemExit(f"a copy does not import itself, but {found}")
        outcome = pytest(tree, tests, EVERYTHING_S, first=False)
    if outcome.code != 0:
        raise SystemExit(f"the tests fail without a mutant:\n{outcome.output}")
    return dict(outcome.seconds)


def run_mutant(
    mutant: Mutant, seconds: Mapping[str, float], *, listed_only: bool
) -> dict[str, Any]:
    """What becomes of one mutant."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        tree = pathlib.Path(name)
        copy_tree(tree)
        source(mutant, tree).write_text(mutated(mutant))
        outcome = pytest(tree, mutant.tests, limit_of(mutant.tests, seconds), first=True)
        listed = True
        if outcome.code == 0 and not listed_only:
            listed = False
            outcome = pytest(tree, EVERYTHING, EVERYTHING_S, first=True)
    if outcome.code is None:
        # Only the listed tests are known to end.
        status, by = ("killed", "timeout") if listed else ("undecided", None)
    elif outcome.code == 0:
        status, by = ("undecided" if listed else "survived"), None
    elif outcome.code == 1 and outcome.failed is not None:
        status, by = "killed", outcome.failed
    else:
        raise SystemExit(
            f"mutant '{mutant.name}': pytest ended with {outcome.code}:\n{outcome.output}"
        )
    return {
        "digest": digest(mutant),
        "status": status,
        "by": by,
        "listed": listed,
        "seconds": round(time.monotonic() - start, 1),
        **provenance(),
    }


def provenance() -> dict[str, str]:
    """The commit of the tree that is copied, and what it runs on."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.strip()

    itself = f":!{RESULTS.relative_to(ROOT)}"
    changed = git("status", "--porcelain", "--", "mars_optax", "tests", itself)
    return {
        "commit": git("rev-parse", "--short=12", "HEAD") + ("+" if changed else ""),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "optax": importlib.metadata.version("optax"),
    }


def load(path: pathlib.Path) -> dict[str, Any]:
    """The last result of each mutant, whether it holds or not."""
    results = json.loads(path.read_text()) if path.exists() else {}
    decided = {name for name, result in results.items() if result["status"] != "undecided"}
    return {m.name: results[m.name] for m in MUTANTS if m.name in decided}


def holds(mutant: Mutant, results: Mapping[str, Any]) -> bool:
    """Whether there is a result of the present code and tests."""
    return mutant.name in results and results[mutant.name]["digest"] == digest(mutant)


def table(results: Mapping[str, Any]) -> str:
    """The page of the documentation."""
    missing = [m.name for m in MUTANTS if m.name not in results]
    if missing:
        raise SystemExit(f"expected a result of every mutant, none of {missing}: run them first.")
    uncommitted = [m.name for m in MUTANTS if results[m.name]["commit"].endswith("+")]
    if uncommitted:
        raise SystemExit(
            f"expected results of commits, got others of {uncommitted}: commit, and "
            "run them `--again`."
        )
    statuses = [results[m.name]["status"] for m in MUTANTS]
    old = {m.name for m in MUTANTS if not holds(m, results)}

    def all_of(key: str) -> str:
        return ", ".join(sorted({r[key] for r in results.values()}))

    lines = [
        "# Mutation check",
        "",
        "What the tests would notice: each row is one defect put into the package, and the first",
        "test that fails because of it, by the file of the package.",
        "",
        f"- {len(MUTANTS)} defects, of which {statuses.count('killed')} are noticed.",
        f"- Of {len(old)} the code of their file, or their list of tests, changed since: they are",
        '  marked "before".',
        "- They are data in [tests/mutation/mutants.py](../tests/mutation/mutants.py), each with",
        "  the tests that should notice it; if those pass, all of `tests/parity` and",
        "  `tests/contract` are run.",
        "- `python -m tests.mutation.run` runs those without a result that still holds, and with",
        "  `--table` it writes this page.",
        "",
        f"Commits {all_of('commit')}; Python {all_of('python')}, JAX {all_of('jax')}, Optax "
        f"{all_of('optax')}.",
        "",
    ]
    by_file: dict[str, list[Mutant]] = {}
    for mutant in MUTANTS:
        by_file.setdefault(mutant.file, []).append(mutant)
    for file, mutants in by_file.items():
        lines += ["<details>", f"<summary>{file} ({len(mutants)})</summary>", ""]
        lines += ["| defect | noticed by |", "| --- | --- |"]
        for mutant in mutants:
            result = results[mutant.name]
            by = f"**{result['status']}**" if result["by"] is None else _short(result["by"])
            lines.append(f"| {mutant.change} | {by}{', before' * (mutant.name in old)} |")
        lines += ["", "</details>", ""]
    lines += [
        "## Not counted",
        "",
        "Changes that no test can notice, since they change nothing that can be seen.",
        "",
        "| file | change | why |",
        "| --- | --- | --- |",
        *(f"| {e.file} | {e.change} | {e.reason} |" for e in EQUIVALENT),
    ]
    return "\n".join(lines) + "\n"


def _short(test: str) -> str:
    if test == "timeout":
        return "it does not end"
    path, _, name = test.removeprefix("tests/").rpartition("::")
    return f"`{path.split('::')[0]}` {re.sub('([A-Za-z_])[0-9]+$', lambda m: m[1], name)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="regular expression on name or file")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also those with a result")
    parser.add_argument(
        "--listed-only", action="store_true", help="no other tests where the listed ones pass"
    )
    parser.add_argument("--table", action="store_true", help="only write the page")
    options = parser.parse_args(arguments)
    results = load(options.results)
    if options.table:
        PAGE.write_text(table(results))
        return
    chosen = [
        m for m in MUTANTS if re.search(options.only, m.name) or re.search(options.only, m.file)
    ]
    chosen = [m for m in chosen if options.again or not holds(m, results)]
    if not chosen:
        print("nothing to run")
        return
    seconds = baseline(chosen)
    print(f"the {len(seconds)} listed tests pass in {sum(seconds.values()):.0f} s", flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        running = {
            pool.submit(run_mutant, m, seconds, listed_only=options.listed_only): m for m in chosen
        }
        for future in concurrent.futures.as_completed(running):
            mutant, result = running[future], future.result()
            results[mutant.name] = result
            options.results.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
            by = result["by"] or ""
            print(
                f"{result['status']:9} {result['seconds']:6.1f} s  {mutant.name}  {by}", flush=True
            )
    survivors = [m.name for m in chosen if results[m.name]["status"] != "killed"]
    if survivors:
        raise SystemExit(f"not noticed: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
