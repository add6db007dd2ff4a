"""`python -m launcher`: the command line from a checkout, nothing installed."""

from launcher.cli import main

main()
