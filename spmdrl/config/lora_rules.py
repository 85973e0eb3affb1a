"""Rules between adapters and other tables."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import rule
from spmdrl.config.whole import Config, SftConfig


@rule(Config, SftConfig)
def merged_belongs_to_adapters(cfg: Config | SftConfig) -> Iterator[str]:
    if cfg.lora is None and not cfg.export.merged:
        yield "export.merged = false leaves nothing to export without [lora]; set export.at_end = false instead"


@rule(Config, SftConfig)
def adapters_freeze_the_whole_model(cfg: Config | SftConfig) -> Iterator[str]:
    if cfg.lora is not None and cfg.model.freeze is not None:
        yield "model.freeze has no meaning with [lora], under which only adapters are trained; remove one of them"


@rule(Config, SftConfig)
def adapters_learn_at_one_rate(cfg: Config | SftConfig) -> Iterator[str]:
    if cfg.lora is not None and cfg.optim.rates:
        yield "optim.rates has no meaning with [lora], under which only adapters are trained; remove one of them"
