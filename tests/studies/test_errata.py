"""Which errata belong to which study."""

import pytest

from regard.studies import ANALYSES, STUDIES, load_analysis, load_study
from regard.studies.errata import ERRATA, errata_of


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("MiTA, arXiv 2602.01219, Table 6", {"Table 6, compress only"}),
        ("Static Key Attention in Vision, Figure 5", set()),
        ("An Empirical Study of Spatial Attention Mechanisms in Deep Networks, Table 3",
         {"All tables", "Tables 2 and 3, deformable rows"}),
        ("An Empirical Study of Spatial Attention Mechanisms in Deep Networks, Figure 3", set()),
        ("Regard", set()),
        ("the four papers", set()),
    ],
)  # fmt: skip
def test_errata_of_a_source(source: str, wanted: set[str]) -> None:
    assert {one.where for one in errata_of(source)} == wanted


def test_ranges_and_pairs_of_tables_are_read() -> None:
    title = next(paper for paper in ERRATA if paper.startswith("Rethinking"))
    assert "Tables 2 to 4" in {one.where for one in errata_of(f"{title}, Table 3")}
    assert "Tables 2 to 4" not in {one.where for one in errata_of(f"{title}, Table 6 and Figure 4")}
    several = {one.where for one in errata_of("MiTA, arXiv 2602.01219, Tables 1 to 3")}
    assert {"Table 2, MHLA-T", "Table 3, InLine-DeiT-S", "Tables 2 and 3"} <= several
    both = {
        one.where for one in errata_of("Static Key Attention in Vision, Tables 1 and 2; the embedding paper, Table 5")
    }
    assert {"Table 1, FLOPs of CvT-13", "Table 2, CAFormer-S18", "Table 5, F-SNE 8*"} <= both
    assert "Table 6, SepConv" not in both


def test_studies_and_analyses_have_the_errata_of_their_tables() -> None:
    shown = {name: errata_of(load_study(name).source) for name in STUDIES}
    shown |= {name: errata_of(load_analysis(name).source) for name in ANALYSES}
    assert {one.where for one in shown["ska_table1"]} == {
        "Table 1, SKA-ViT-S a", "Table 1, FLOPs of the a rows", "Table 1, FLOPs of CvT-13", "Table 1, FLOPs of CSKA",
        "Table 1, CSKA-CvT, CIFAR-100",
    }  # fmt: skip
    of_tables = {one for found in ERRATA.values() for one in found if one.where.startswith(("Table", "All"))}
    missing = of_tables - {one for found in shown.values() for one in found}
    assert {one.where for one in missing} == {"Table 9, Swin and CvT"}
