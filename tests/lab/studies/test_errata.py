"""Which errata belong to which study."""

import pytest

from regard.lab.studies import ANALYSES, STUDIES, load_analysis, load_study
from regard.lab.studies.errata import ERRATA, errata_of


@pytest.mark.parametrize(
    ("source", "expected"),
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
def test_errata_of_a_source(source: str, expected: set[str]) -> None:
    assert {erratum.where for erratum in errata_of(source)} == expected


def test_ranges_and_pairs_of_tables_are_read() -> None:
    title = next(paper for paper in ERRATA if paper.startswith("Rethinking"))
    assert "Tables 2 to 4" in {erratum.where for erratum in errata_of(f"{title}, Table 3")}
    assert "Tables 2 to 4" not in {erratum.where for erratum in errata_of(f"{title}, Table 6 and Figure 4")}
    several = {erratum.where for erratum in errata_of("MiTA, arXiv 2602.01219, Tables 1 to 3")}
    assert {"Table 2, MHLA-T", "Table 3, InLine-DeiT-S", "Tables 2 and 3"} <= several
    both = {
        erratum.where
        for erratum in errata_of("Static Key Attention in Vision, Tables 1 and 2; the embedding paper, Table 5")
    }
    assert {"Table 1, FLOPs of CvT-13", "Table 2, CAFormer-S18", "Table 5, F-SNE 8*"} <= both
    assert "Table 6, SepConv" not in both


def test_studies_and_analyses_have_the_errata_of_their_tables() -> None:
    shown = {name: errata_of(load_study(name).source) for name in STUDIES}
    shown |= {name: errata_of(load_analysis(name).source) for name in ANALYSES}
    assert {erratum.where for erratum in shown["ska_table1"]} == {
        "Table 1, SKA-ViT-S a", "Table 1, FLOPs of the a rows", "Table 1, FLOPs of CvT-13", "Table 1, FLOPs of CSKA",
        "Table 1, CSKA-CvT, CIFAR-100", "Section 5.1 on Table 1",
    }  # fmt: skip
    every = {erratum for errata in ERRATA.values() for erratum in errata}
    of_tables = {erratum for erratum in every if erratum.where.startswith(("Table", "All"))}
    missing = of_tables - {erratum for errata in shown.values() for erratum in errata}
    assert {erratum.where for erratum in missing} == {"Table 9, Swin and CvT"}


def test_fact_the_printed_accuracies_contradict_the_statements() -> None:
    """SKA Section 5.1 against Table 1, and SNE Section 5.2 against Table 3."""
    printed = {row.label: row.paper["top1"] for row in load_study("ska_table1").rows("paper") if row.paper}
    losses = {"SKA a": ("Softmax", 1.7), "SKA b": ("Softmax", 1.5), "Swin SKA a": ("Swin", 0.9),
              "Swin CSKA": ("Swin", 0.8)}  # fmt: skip
    for label, (base, loss) in losses.items():
        assert printed[f"CIFAR-100 {base}"] - printed[f"CIFAR-100 {label}"] == pytest.approx(loss)
    speeds = {row.label: row.paper.get("inference_per_second", 0) for row in load_study("ska_table1").rows("paper")}
    assert (speeds["Swin CSKA"], speeds["Swin"], speeds["CaiT SKA b"], speeds["CaiT"]) == (4949, 5105, 6830, 7358)
    distilled = {row.label: row.paper["top1"] for row in load_study("sne_table3").rows("paper")}
    assert distilled["F-SNE 8"] == distilled["linear"]


def test_fact_the_largest_printed_gains() -> None:
    """1.5 points in Table 2 and 2.7 in Table 4 of the embedding paper."""
    table2 = {row.label: row.paper["top1"] for row in load_study("sne_table2").rows("paper") if row.paper}
    assert max(top1 - table2[f"{label[:3]} linear"] for label, top1 in table2.items()) == pytest.approx(1.5)
    table4 = {row.label: row.paper["top1"] for row in load_study("sne_table4").rows("paper")}
    assert table4["N12 F-SNE 32, Cars"] - table4["N12 linear, Cars"] == pytest.approx(2.7)


def test_every_erratum_has_all_four_texts() -> None:
    for errata in ERRATA.values():
        assert all(all(erratum) for erratum in errata)
        assert len({erratum.where for erratum in errata}) == len(errata)
