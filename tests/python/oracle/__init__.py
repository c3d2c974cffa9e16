"""An independent NumPy implementation of docs/numerics.md: what the library's bytes are compared with.

It is written from that page (and the page sections of include/fold/cache_layout.h) alone and shares no code with the
library. Modules follow the page: `ieee` (conventions, section 4), `planes` (1), `cache` (1, 2 and the pages), `fit`
(9), `reference` (3, 5), `reading` (6), `sums` (7), `decode` (8).
"""

from oracle.cache import Layout, OracleCache, PageSections, page_sections
from oracle.decode import RowGroup, decode_row_group, finish, partial_row_group
from oracle.fit import Fit, fit_tail, is_mark, largest_mark
from oracle.planes import Planes, rotate, split
from oracle.reading import OPEN, GateTable
from oracle.reference import Queries, VisibleKeys, make_queries, reference, sample_keys
from oracle.sums import Sums

__all__ = [
    "OPEN",
    "Fit",
    "GateTable",
    "Layout",
    "OracleCache",
    "PageSections",
    "Planes",
    "Queries",
    "RowGroup",
    "Sums",
    "VisibleKeys",
    "decode_row_group",
    "finish",
    "fit_tail",
    "is_mark",
    "largest_mark",
    "make_queries",
    "page_sections",
    "partial_row_group",
    "reference",
    "rotate",
    "sample_keys",
    "split",
]
