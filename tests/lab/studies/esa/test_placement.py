"""Attention in series or in parallel, and at which place: rows, and what they share with Figure 3b."""

from regard.lab.engine.dry_run import dry_run
from regard.lab.studies import load_study

PLACES = ("1111", "1111 parallel", "1111 in conv4", "1111 in conv5", "1111 without the head's")


def test_every_place_is_built_and_has_the_attention_that_its_label_says() -> None:
    rows = {row.label: row for row in dry_run(load_study("esa_placement"), "smoke")}
    assert [row.error for row in rows.values()] == [""] * 7
    full, parallel, conv4, conv5, headless = (rows[label] for label in PLACES)
    assert parallel.params == full.params
    assert parallel.macs == full.macs
    assert full.params > max(conv4.params, conv5.params, headless.params)
    assert conv4.params + conv5.params + headless.params == 2 * full.params + rows["w/o"].params
