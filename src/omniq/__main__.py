"""`python -m omniq` is the command `omniq`."""

import os
import sys

if sys.path[:1] == [os.getcwd()]:
    # `python -m` has put it there: a file in it must not take the place of a package that is imported next.
    sys.path.append(sys.path.pop(0))

from omniq.cli import main  # after the path is in order

if __name__ == "__main__":
    main()
