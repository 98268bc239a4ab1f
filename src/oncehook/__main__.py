"""`python -m oncehook` is `oncehook`."""

from oncehook.cli import main

main()
