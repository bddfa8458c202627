"""`python -m hirank.bench`: the benchmark where only PyTorch, Transformers and PEFT are there."""

import sys

from hirank.bench.options import main


def say(line: str) -> None:
    """A line of text at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], say))
