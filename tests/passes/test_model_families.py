"""Each of transformers' model families equals its reference through ``backend="kivi"``, and docs/models.md says what is rewritten of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

pytest.importorskip("transformers")

from model_families import HEAD, LAYERS, TABLE, TOLERANCE, case_id, cases, row, run


@pytest.mark.parametrize("case", cases(), ids=case_id)
def test_a_family_equals_its_reference_and_its_row_of_the_table(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    family, attention = case
    caplog.set_level(logging.ERROR)
    outcome = run(family, attention)
    assert outcome.error < TOLERANCE
    quantised = LAYERS - len(family.float_layers.get(attention, ()))
    assert len(outcome.reports[0].rewritten) == quantised
    assert outcome.float_error > 10 * TOLERANCE if quantised else outcome.float_error < TOLERANCE
    assert row(family, attention, outcome) in TABLE.read_text().splitlines(), "write the table anew: python tests/passes/model_families.py"


def test_the_table_has_no_other_rows() -> None:
    text = TABLE.read_text()
    rows = text.removeprefix(HEAD).splitlines()
    assert text.startswith(HEAD) and len(rows) == len(cases()), "write the table anew: python tests/passes/model_families.py"
