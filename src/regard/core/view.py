"""View: what is special of a mechanism for some inputs, as rows of values over its tokens."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class View:
    """What each query of the first image has to do with the tokens: a set of them, or a number for each.

    - name: what a row shows, with "its" for the query's: "keys of its expert".
    - rows: (H, R, T) over T tokens; True and False for a set, numbers for a map.
    - row_of: (H, N), the row of each query, where queries share rows; None where query i has row i.
    """

    name: str
    rows: Tensor
    row_of: Tensor | None = None
