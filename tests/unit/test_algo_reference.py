"""The page of algorithms is the one in docs/, and the settings can name what it lists."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from docs.gen.algorithms_reference import reference
from spmdrl.algo.formula import ESTIMATORS, POLICY_LOSSES
from spmdrl.algo.kl import KL_ESTIMATORS
from spmdrl.algo.losses import AGGREGATIONS
from spmdrl.config import AdvantageConfig, LossConfig, RewardConfig

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_page_in_docs_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "docs/algorithms.md is out of date: run `make docs`"


def test_no_cell_breaks_its_table() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| ")]
    assert {row.count("|") for row in rows} == {4, 6}  # tables of three columns and of five


def test_settings_name_what_the_tables_hold() -> None:
    def values(section: type, name: str) -> list[str]:
        return list(get_args(section.model_fields[name].annotation))  # type: ignore[attr-defined]

    assert values(LossConfig, "aggregation") == list(AGGREGATIONS)
    assert values(LossConfig, "kl_estimator") == values(RewardConfig, "kl_estimator") == list(KL_ESTIMATORS)
    for section, name, table in ((LossConfig, "kind", POLICY_LOSSES), (AdvantageConfig, "estimator", ESTIMATORS)):
        described = section.model_fields[name].description or ""
        assert [name for name in table if f"`{name}`" not in described] == []


def test_every_setting_of_a_table_is_one_of_the_configuration() -> None:
    assert {name for estimator in ESTIMATORS.values() for name in estimator.settings} <= set(
        AdvantageConfig.model_fields
    )
    used = {name for kind in POLICY_LOSSES.values() for name in (*kind.settings, *kind.cov_selection)}
    assert used <= set(LossConfig.model_fields)
