"""Record flash-linear-attention's hosts for the coverage table: `python tests/fla/record_coverage.py`.

Runs in Triton's interpreter with the GPU substitute of the tests. Takes the arguments of `python -m tools.coverage`,
such as `--check`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.fla.conftest import stand_in

if __name__ == "__main__":
    stand_in()

    from tools import coverage

    sys.exit(coverage.main(["--tables", "fla", *sys.argv[1:]]))
