"""Rules between adapters and other tables."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import rule
from spmdrl.config.whole import Config, SftConfig

_WHOLE_ON_EACH_RANK = "keeps the base whole on every rank, on its device"


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


@rule(Config, SftConfig)
def a_quantized_base_is_not_divided(cfg: Config | SftConfig) -> Iterator[str]:
    if cfg.lora is None or cfg.lora.base is None:
        return
    for name in ("tp", "ep"):
        if (size := getattr(cfg.parallel, name)) > 1:
            yield (
                f'lora.base = "{cfg.lora.base}" {_WHOLE_ON_EACH_RANK}, and parallel.{name} = {size} would divide it; '
                f"set parallel.{name} = 1, or remove lora.base"
            )
    if cfg.model.cpu_offload:
        yield (
            f'lora.base = "{cfg.lora.base}" {_WHOLE_ON_EACH_RANK}, and model.cpu_offload = true would keep it on the '
            "host; set one of them only"
        )


@rule(Config)
def a_quantized_base_does_not_sleep(cfg: Config) -> Iterator[str]:
    if cfg.lora is not None and cfg.lora.base is not None and cfg.offload.trainer == "all":
        yield (
            f'lora.base = "{cfg.lora.base}" {_WHOLE_ON_EACH_RANK}, and offload.trainer = "all" would move it to the '
            'host; set offload.trainer = "optimizer" or "none"'
        )
