"""The one exception that means: the input is wrong, and this is how to mend it."""

__all__ = ["HirankError"]


class HirankError(ValueError):
    """Bad input, told in one sentence: what was given, what is wrong, what to do.

    The command line prints the sentence alone and exits with code 2.
    """
