"""Text as arrays of token ids: the standard library's own source, a text file or a token file."""

import dataclasses
import hashlib
import lzma
import pathlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.unsignedinteger]
Windows = npt.NDArray[np.int32]

BYTES = 256

# Tests are missing from some distributions, the others are mostly generated tables: without them
# the text differs less between two builds of one Python version.
LEFT_OUT = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text split into training and validation tokens.

    Attributes:
      train: token ids, rank 1, an unsigned integer dtype; possibly mapped from a file.
      validation: the same, held out.
      vocabulary_size: every id is below this number.
      description: what the text is, for the report: source, sizes, a hash of all and one of what is
        held out.
    """

    train: Tokens
    validation: Tokens
    vocabulary_size: int
    description: dict[str, str | int]


def is_held_out(relative_path: str, *, one_in: int = 16) -> bool:
    """Whether a file belongs to the validation part, by a hash of its relative path.

    Args:
      relative_path: the path below the root of the text, with forward slashes.
      one_in: the validation part's share is one in this many files.

    Returns:
      The same answer on every machine, whatever other files there are.
    """
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0


def source_files(root: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """Yields relative path and path of the Python files below `root`, in the paths' order."""
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for relative_path in sorted(files):
        if LEFT_OUT.isdisjoint(relative_path.split("/")[:-1]):
            yield relative_path, files[relative_path]


def load_standard_library(root: str | pathlib.Path | None = None) -> Corpus:
    """Reads the source of Python's standard library as bytes: real text that needs no download.

    Validation files are chosen by `is_held_out`, so no file is in both parts.

    Args:
      root: the folder to read; `None` means the running interpreter's standard library.

    Returns:
      The corpus, with 256 symbols. It differs between Python versions, so its description holds
      the version, the number of bytes and a hash.

    Raises:
      ValueError: one of the two parts is empty.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib") if root is None else root)
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for relative_path, path in source_files(root):
        parts[is_held_out(relative_path)].append(path.read_bytes())
    if not (parts[False] and parts[True]):
        raise ValueError(
            f"Expected Python source files below {root}, got {len(parts[False])} files for "
            f"training and {len(parts[True])} for validation. Give a text of your own with "
            "--data_file."
        )
    train, validation = b"".join(parts[False]), b"".join(parts[True])
    return Corpus(
        train=np.frombuffer(train, np.uint8),
        validation=np.frombuffer(validation, np.uint8),
        vocabulary_size=BYTES,
        description={
            "source": "Python standard library source, as bytes",
            "python": platform.python_version(),
            "files": len(parts[False]) + len(parts[True]),
            "training_tokens": len(train),
            "validation_tokens": len(validation),
            "sha256": hashlib.sha256(train + validation).hexdigest(),
            "validation_sha256": hashlib.sha256(validation).hexdigest(),
        },
    )


def read_xz(path: pathlib.Path) -> bytes:
    """Reads what an `.xz` file holds; a `ValueError` that names the file where it is damaged."""
    try:
        with lzma.open(path) as file:
            return file.read()
    except (lzma.LZMAError, EOFError) as error:
        raise ValueError(
            f"Expected a file compressed by xz, got {str(path)!r}, which is none or not whole: "
            f"{error}. Fetch or compress it again."
        ) from error


def read_tokens(path: str | pathlib.Path) -> Tokens:
    """Reads one file: token ids if its name ends in `.bin` or `.bin.xz`, else its bytes.

    Args:
      path: a `.bin` file holds unsigned 16-bit integers, little endian, and nothing else (nanoGPT
        writes such files); `.bin.xz` is the same, compressed; any other file is read as bytes
        whatever its encoding.

    Returns:
      The file's ids, rank 1, mapped rather than loaded where the file is not compressed.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty, a compressed one is damaged, or a token file has an odd number
        of bytes.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected a text or token file, got {str(path)!r}, which is "
            f"{'a folder' if path.is_dir() else 'not there'}. Check --data_file and "
            "--validation_file; without them the standard library's source is used."
        )
    size = path.stat().st_size
    if size == 0:
        raise ValueError(
            f"Expected a file with text or tokens, got {str(path)!r}, which is empty. Write it "
            "again or give another file."
        )
    if path.name.endswith(".bin.xz"):
        unpacked = read_xz(path)
        size = len(unpacked)
    elif path.suffix != ".bin":
        return np.memmap(path, np.uint8, mode="r")
    if size % 2:
        raise ValueError(
            f"Expected a token file of unsigned 16-bit integers (two bytes each), got "
            f"{str(path)!r} with {size} bytes. If it is text, rename it so that it does not end "
            "in '.bin'."
        )
    if path.suffix == ".xz":
        return np.frombuffer(unpacked, np.dtype("<u2"))
    return np.memmap(path, np.dtype("<u2"), mode="r")


def _file_hash(path: str | pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_files(
    data_file: str | pathlib.Path | Sequence[str | pathlib.Path],
    validation_file: str | pathlib.Path | None = None,
    vocabulary_size: int | None = None,
    *,
    held_out: float = 0.05,
) -> Corpus:
    """Reads a user's own text or token files.

    Args:
      data_file: training text, see `read_tokens`; several files of one kind are joined.
      validation_file: text that is held out, of the same kind. `None` holds out the last
        `held_out` of `data_file`.
      vocabulary_size: number of symbols. `None` means 256 for text, and the largest id plus one
        for tokens.
      held_out: share of `data_file` that is held out where there is no `validation_file`.

    Returns:
      The corpus.

    Raises:
      FileNotFoundError: a file is not there.
      ValueError: a file is empty, malformed or of the wrong kind, or holds an id that the
        vocabulary does not have.
    """
    files = [data_file] if isinstance(data_file, (str, pathlib.Path)) else list(data_file)
    parts = [read_tokens(file) for file in files]
    if len({part.dtype for part in parts}) > 1:
        raise ValueError(
            "Expected text files or token files ('.bin', '.bin.xz') as --data_file, got both kinds "
            f"in {[str(file) for file in files]}. Encode all the same way."
        )
    train = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if validation_file is None:
        split = len(train) - max(1, round(len(train) * held_out))
        train, validation = train[:split], train[split:]
        validation_hash = hashlib.sha256(validation.tobytes()).hexdigest()
    else:
        validation = read_tokens(validation_file)
        validation_hash = _file_hash(validation_file)
        if validation.dtype != train.dtype:
            raise ValueError(
                f"Expected two text files or two token files ('.bin'), got {str(files[0])!r} "
                f"and {str(validation_file)!r}. Encode both the same way."
            )
    kind = "tokens" if train.dtype.itemsize == 2 else "bytes"
    largest = max((int(part.max()) for part in (train, validation) if len(part)), default=0)
    if vocabulary_size is None:
        vocabulary_size = BYTES if kind == "bytes" else largest + 1
    if largest >= vocabulary_size:
        raise ValueError(
            f"Expected ids below {vocabulary_size=}, got {largest} in {str(files[0])!r} or its "
            "validation text. Raise --vocabulary_size, or leave it out to have it found."
        )
    return Corpus(
        train=train,
        validation=validation,
        vocabulary_size=vocabulary_size,
        description={
            "source": f"{', '.join(pathlib.Path(file).name for file in files)}, as {kind}",
            "training_tokens": len(train),
            "validation_tokens": len(validation),
            "sha256": ", ".join(map(_file_hash, files)),
            "validation_sha256": validation_hash,
        },
    )


def require_enough(corpus: Corpus, *, context: int, batch_size: int) -> None:
    """Checks that a corpus is large enough to train on.

    Args:
      corpus: the text.
      context: tokens that the model sees at once.
      batch_size: windows in a batch.

    Raises:
      ValueError: the training part is smaller than one batch, or the validation part smaller than
        one window.
    """
    for part, tokens, expected, meaning in (
        ("training", corpus.train, batch_size * context + 1, "one batch"),
        ("validation", corpus.validation, context + 1, "one window"),
    ):
        if len(tokens) < expected:
            raise ValueError(
                f"Expected at least {expected} {part} tokens ({meaning} at {batch_size=}, "
                f"{context=}), got {len(tokens)} from {corpus.description['source']}. Give a "
                "larger file, or lower --batch_size or --context."
            )


def windows_at(tokens: Tokens, starts: npt.NDArray[np.int64], context: int) -> Windows:
    """Cuts windows of `context + 1` tokens: the model's inputs and, one further, its targets.

    Args:
      tokens: token ids, rank 1.
      starts: where the windows begin, any shape.
      context: tokens that the model sees at once.

    Returns:
      Windows of shape `starts.shape + (context + 1,)`.
    """
    windows: Windows = tokens[starts[..., None] + np.arange(context + 1)].astype(np.int32)
    return windows


def training_starts(
    seed: int, *, steps: int, batch_size: int, context: int, length: int
) -> npt.NDArray[np.int64]:
    """Draws where the training windows begin; the seed alone decides, whatever the optimizer.

    Args:
      seed: names the order of the data.
      steps: number of batches.
      batch_size: windows in a batch.
      context: tokens that the model sees at once.
      length: number of training tokens.

    Returns:
      Positions of shape (steps, batch_size).
    """
    generator = np.random.default_rng(seed)
    return generator.integers(0, length - context, size=(steps, batch_size))


def validation_windows(tokens: Tokens, *, context: int, count: int) -> Windows:
    """Cuts the windows on which every run is evaluated: evenly spread and without overlap.

    Args:
      tokens: validation tokens, rank 1.
      context: tokens that the model sees at once.
      count: windows wanted; fewer come back where the text is too short for them.

    Returns:
      Windows of shape (at most count, context + 1).
    """
    count = min(count, (len(tokens) - 1) // context)
    starts = np.linspace(0, len(tokens) - context - 1, count).astype(np.int64)
    return windows_at(tokens, starts, context)
