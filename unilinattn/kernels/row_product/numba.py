"""The row product on a CPU with Numba, from blocks of rows of its reduced map."""

from functools import partial

from unilinattn.kernels.reduced_map.numba import reduced_rows
from unilinattn.kernels.row_product import tiled

row_product = partial(tiled.row_product, map_rows=reduced_rows)
