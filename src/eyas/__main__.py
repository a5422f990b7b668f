"""`python -m eyas` is the console script `eyas`."""

from eyas.cli import main

main()
