"""``python -m midepoch``: the command ``midepoch``."""

from midepoch.cli import main

if __name__ == "__main__":
    main()
