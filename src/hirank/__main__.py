"""`python -m hirank` is `hirank`."""

from hirank.cli import main

if __name__ == "__main__":
    main()
