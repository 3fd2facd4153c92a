"""Labelled images as arrays: CIFAR's own files, packs, or scikit-learn's digits."""

import dataclasses
import hashlib
import pathlib
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.training import data

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int32]
Path = str | pathlib.Path


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images in three parts.

    Attributes:
      train: images (number, height, width, channels) and labels (number,) to train on.
      validation: those that learning rates are chosen by.
      test: those that are reported.
      classes: every label is below this number.
      description: what the images are, for the report.
    """

    train: tuple[Images, Labels]
    validation: tuple[Images, Labels]
    test: tuple[Images, Labels]
    classes: int
    description: dict[str, str | int]


def _read_cifar(path: pathlib.Path) -> tuple[Images, Labels]:
    """Reads one of CIFAR's binary files: labels, then planes of red, green and blue, row by row."""
    # CIFAR-100 has the coarse label before the fine one.
    labels = 2 if path.stem in ("train", "test") else 1
    raw = np.fromfile(path, np.uint8)
    if not raw.size or raw.size % (labels + 3072):
        raise ValueError(
            f"Expected records of {labels + 3072} bytes in {str(path)!r}, got {raw.size} bytes. "
            "Give the files of CIFAR's binary version, unpacked."
        )
    records = raw.reshape(-1, labels + 3072)
    planes = records[:, labels:].reshape(-1, 3, 32, 32)
    return planes.transpose(0, 2, 3, 1), records[:, labels - 1].astype(np.int32)


def _read_folder(folder: pathlib.Path) -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Reads the folder of CIFAR-10's or CIFAR-100's binary version: training and test images."""
    train, test = sorted(folder.glob("data_batch_*.bin")), folder / "test_batch.bin"
    if not train:
        train, test = [folder / "train.bin"], folder / "test.bin"
    if not (test.is_file() and train[0].is_file()):
        raise FileNotFoundError(
            f"Expected CIFAR's binary files in {str(folder)!r}: data_batch_1.bin and more, and "
            "test_batch.bin; or train.bin and test.bin. Unpack the archive and name the folder in "
            "it."
        )
    parts = [_read_cifar(path) for path in train]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return (images, labels), _read_cifar(test)


def _median_edge(
    left: npt.NDArray[np.int16], up: npt.NDArray[np.int16], corner: npt.NDArray[np.int16]
) -> npt.NDArray[np.int16]:
    """Predicts a pixel from its neighbours as LOCO-I does (Weinberger et al., 2000)."""
    low, high = np.minimum(left, up), np.maximum(left, up)
    plane: npt.NDArray[np.int16] = np.clip(left + up - corner, low, high)
    return plane


def _read_residuals(raw: bytes, path: pathlib.Path) -> tuple[Images, Labels]:
    """Decodes a pack of predicted 32 x 32 images.

    It is the 4 bytes `CFR1`, the number of images (unsigned, 32 bits, little endian), the tolerance
    t (a byte; 0 is lossless), 3 bytes of zero, a byte for each label, and three planes for each
    pixel of each image: green, red minus green, blue minus green. What is stored of a plane is
    what `_median_edge` misses, in units of 2 t + 1, modulo 256; at the left and upper edge the
    neighbour that there is predicts, and at the corner 128 for green and 0 for the others.
    """
    if raw[:4] != b"CFR1" or len(raw) < 12:
        raise ValueError(
            f"Expected an image pack that begins with 'CFR1', got {str(path)!r}, which begins with "
            f"{raw[:4]!r}. Give an .npz file with `images` and `labels` instead."
        )
    count, tolerance = int.from_bytes(raw[4:8], "little"), raw[8]
    if len(raw) != 12 + count + 3 * 1024 * count:
        raise ValueError(
            f"Expected {12 + 3073 * count} bytes for {count} images, got {len(raw)} in "
            f"{str(path)!r}. Make the pack again."
        )
    labels = np.frombuffer(raw, np.uint8, count, 12).astype(np.int32)
    stored = np.frombuffer(raw, np.int8, 3 * 1024 * count, 12 + count)
    # Neighbours are looked at for all images at once: the images go last.
    # NumPy 1 multiplies 8 bits with a scalar of 16 in 8.
    missed = stored.reshape(3, count, 32, 32).transpose(0, 2, 3, 1).astype(np.int16, order="C")
    pixels = np.empty((32, 32, 3, count), np.uint8)
    planes = np.zeros((3, 32, 32, count), np.int16)
    for row in range(32):
        for column in range(32):
            for plane, channel in enumerate((1, 0, 2)):
                seen = planes[plane]
                if row and column:
                    guess = _median_edge(
                        seen[row, column - 1], seen[row - 1, column], seen[row - 1, column - 1]
                    )
                elif row or column:
                    guess = seen[row, column - 1] if column else seen[row - 1, column]
                else:
                    guess = np.full(count, 0 if plane else 128, np.int16)
                green = planes[0, row, column] if plane else np.zeros(count, np.int16)
                value = np.clip(guess + green, 0, 255)
                value = value + missed[plane, row, column] * np.int16(2 * tolerance + 1)
                value = np.clip(value, 0, 255) if tolerance else value & 255
                pixels[row, column, channel] = value
                seen[row, column] = value - green
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), labels


def read(path: Path) -> tuple[Images, Labels]:
    """Reads one file of images and labels.

    Args:
      path: an `.npz` file with `images`, unsigned bytes (number, height, width, channels), and
        `labels` (number,); an `.xz` file, a pack of predicted images as `_read_residuals`
        describes it, compressed; or one of CIFAR's `.bin` files.

    Returns:
      Images and labels.

    Raises:
      FileNotFoundError: If there is no such file.
      ValueError: If it is no such file, or labels are no integers from 0.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"Expected a file of images, got {str(path)!r}, which is not one.")
    if path.suffix == ".xz":
        return _read_residuals(data.read_xz(path), path)
    if path.suffix != ".npz":
        return _read_cifar(path)
    arrays = _read_npz(path)
    if not {"images", "labels"} <= arrays.keys():
        raise ValueError(
            f"Expected `images` and `labels` in {str(path)!r}, got {list(arrays)}. Save them with "
            "np.savez(path, images=..., labels=...)."
        )
    images, labels = arrays["images"], arrays["labels"]
    if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != images.shape[:1]:
        raise ValueError(
            "Expected images of dtype uint8 and shape (number, height, width, channels) and a "
            f"label for each in {str(path)!r}, got {images.dtype}, {images.shape} and labels of "
            f"shape {labels.shape}."
        )
    if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
        raise ValueError(
            f"Expected integers from 0 as labels in {str(path)!r}, got {labels.dtype}, the "
            f"least {np.sort(labels)[:3].tolist()}. Number the classes from 0."
        )
    return images, labels.astype(np.int32)


def _read_npz(path: pathlib.Path) -> dict[str, npt.NDArray[Any]]:
    """Reads the arrays of a file of NumPy's."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            return dict(arrays)
    # Of what is no archive NumPy says that it may be a pickle; one array is no context manager.
    except (ValueError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"Expected an .npz file of arrays, got {str(path)!r}, which cannot be read as one. "
            "Save it again with np.savez(path, images=..., labels=...)."
        ) from error


def _digits() -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Reads scikit-learn's digits; every fifth is for testing."""
    from sklearn import datasets  # type: ignore[import-untyped, unused-ignore]

    digits = datasets.load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.int32)
    tested = np.arange(len(labels)) % 5 == 0
    return (images[~tested], labels[~tested]), (images[tested], labels[tested])


def load(
    train: Sequence[Path] = (), test: Sequence[Path] = (), *, held_out: float = 0.1
) -> Dataset:
    """Reads images and sets a part of those for training aside.

    Args:
      train: files as `read` takes them, or one folder of CIFAR's with the test images in it, too.
        None at all means scikit-learn's digits: 1,797 grey images of 8 x 8, in 10 classes.
      test: files; none where `train` is a folder or empty, which have test images of their own.
      held_out: share of the training images for validation, in [0, 1), the last ones. With 0
        the test images are used, and choose the learning rate.

    Returns:
      The three parts.

    Raises:
      FileNotFoundError: If something is not there.
      ValueError: If files are malformed or do not fit each other, a part is empty, or there would
        be two sets of test images.
    """
    if not 0 <= held_out < 1:
        raise ValueError(f"Expected a share in [0, 1) as --held_out, got {held_out}.")
    for path in train:
        if not pathlib.Path(path).exists():
            raise FileNotFoundError(
                f"Expected images in {str(path)!r}, which is not there. Correct --train_file."
            )
    folder = len(train) == 1 and pathlib.Path(train[0]).is_dir()
    if test and (folder or not train):
        raise ValueError(
            "Expected --test_file beside the files of --train_file, got it beside "
            f"{'a folder, which has' if folder else 'none: the digits have'} test images "
            "already. Give files as --train_file, or leave --test_file out."
        )
    if not train:
        source = "scikit-learn digits"
        training, testing = _digits()
    elif folder:
        source = pathlib.Path(train[0]).name
        training, testing = _read_folder(pathlib.Path(train[0]))
    elif not test:
        raise ValueError(
            "Expected test images beside those for training, got none. Give --test_file, or a "
            "folder of CIFAR's as --train_file."
        )
    else:
        source = ", ".join(pathlib.Path(path).name for path in (*train, *test))
        training, testing = (_joined([read(path) for path in paths]) for paths in (train, test))
    if training[0].shape[1:] != testing[0].shape[1:]:
        raise ValueError(
            f"Expected training and test images of one shape, got {training[0].shape[1:]} and "
            f"{testing[0].shape[1:]}."
        )
    aside = round(len(training[1]) * held_out)
    split = len(training[1]) - aside
    validation = (training[0][split:], training[1][split:]) if aside else testing
    if not split or not len(testing[1]):
        raise ValueError(
            f"Expected images in every part, got {split} for training and {len(testing[1])} for "
            "testing."
        )
    digest = hashlib.sha256()
    for images, labels in (training, testing):
        digest.update(np.ascontiguousarray(images).tobytes())
        digest.update(labels.astype("<i4").tobytes())
    classes = 1 + max(int(labels.max()) for _, labels in (training, testing))
    return Dataset(
        train=(training[0][:split], training[1][:split]),
        validation=validation,
        test=testing,
        classes=classes,
        description={
            "source": source,
            "training_images": split,
            "validation_images": aside,
            "test_images": len(testing[1]),
            "shape": "x".join(map(str, training[0].shape[1:])),
            "classes": classes,
            "sha256": digest.hexdigest(),
        },
    )


def _joined(parts: Sequence[tuple[Images, Labels]]) -> tuple[Images, Labels]:
    shapes = {images.shape[1:] for images, _ in parts}
    if len(shapes) > 1:
        raise ValueError(f"Expected images of one shape in all files, got {sorted(shapes)}.")
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return images, labels
