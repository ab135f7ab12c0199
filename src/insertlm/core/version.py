"""The version of the package, for whatever is written down about a run."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]

try:
    VERSION = version("insertlm")
except PackageNotFoundError:  # the sources are on the path, not installed
    VERSION = "0+unknown"
