"""Record what flash-linear-attention's hosts show for the table of coverage: `python tests/fla/record_coverage.py`.

Runs where the package is installed, in Triton's interpreter, with the stand-in for a GPU that the tests use. Takes the
arguments of `python -m tools.coverage`, such as `--check`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fla.conftest import stand_in

if __name__ == "__main__":
    stand_in()

    from tools import coverage

    sys.exit(coverage.main(["--tables", "fla", *sys.argv[1:]]))
