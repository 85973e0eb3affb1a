"""A model's processor as SGLang keeps it on machines without torchvision: for text and images."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from transformers import AutoImageProcessor, AutoTokenizer


def without_torchvision(manager: ModuleType) -> None:
    """Let SGLang's tokenizer manager do without the processor of videos, for which transformers needs torchvision."""
    manager.get_processor = _load_processor  # type: ignore[attr-defined]


def _load_processor(path: str, *_: Any, trust_remote_code: bool = False, **__: Any) -> SimpleNamespace:
    return SimpleNamespace(
        tokenizer=AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code),
        image_processor=AutoImageProcessor.from_pretrained(path, backend="pil", trust_remote_code=trust_remote_code),
        video_processor=None,
    )
