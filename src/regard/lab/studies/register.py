"""The register of claims of the four papers, in the order of each paper. Needs no torch."""

from collections.abc import Mapping

from .esa.claims import CLAIMS as ESA
from .mita.claims import CLAIMS as MITA
from .paper_claim import PaperClaim
from .ska.claims import CLAIMS as SKA
from .sne.claims import CLAIMS as SNE

REGISTER: Mapping[str, tuple[PaperClaim, ...]] = {"mita": MITA, "ska": SKA, "sne": SNE, "esa": ESA}
