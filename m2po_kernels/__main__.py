"""`python -m m2po_kernels`: the same as the command `m2po`."""

from .cli import main

main()
