"""The one exception users see: a single clear line that says what, where and what was expected."""

__all__ = ["OUT_OF_MEMORY", "InsertlmError", "is_out_of_memory"]

OUT_OF_MEMORY = "out of memory; expected a smaller model or batch size, or a larger machine"


class InsertlmError(Exception):
    """Bad input of any kind. The command line prints the message as one line and exits with code 2."""


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on the host or on a device."""
    # torch has a class of its own for it on GPUs only; on a CPU there is only the text.
    signs = ("can't allocate memory", "Storage size calculation overflowed")
    return type(error).__name__ in ("MemoryError", "OutOfMemoryError") or any(sign in str(error) for sign in signs)
