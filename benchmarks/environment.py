"""What a result was measured with."""

import importlib.metadata
import pathlib
import platform
import subprocess

import jax

import mars_optax


def _commit() -> str:
    """Returns the commit of the checkout, marked where the working tree differs from it."""
    root = pathlib.Path(__file__).parent
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root,
            capture_output=True,
            check=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return answer.stdout.strip()


def describe(commit: str | None = None) -> dict[str, str | int]:
    """Returns the device, the versions of the software, and the commit.

    Args:
      commit: what to record as the commit, where the code lies outside of its checkout; None asks
        git.
    """
    devices = jax.devices()
    packages = ("jax", "jaxlib", "optax", "flax", "numpy")
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in packages},
        "mars_optax": mars_optax.__version__,
        "commit": commit or _commit(),
    }
