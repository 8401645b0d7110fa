"""`python -m omniq` is the command `omniq`."""

from omniq.cli import main

if __name__ == "__main__":
    main()
