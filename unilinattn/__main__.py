"""`python -m unilinattn`: the command line."""

import sys

from unilinattn.cli import main

if __name__ == "__main__":
    sys.exit(main())
