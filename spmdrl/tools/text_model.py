"""`python -m spmdrl.tools.text_model SOURCE DIR`: extracts the text model from a checkpoint for text and images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, AutoModelForImageTextToText

from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.faults.text import Parser, say
from spmdrl.model.few_bits import method_of, quantization_of
from spmdrl.model.trunk import has_language_model, model_class
from spmdrl.model.weight_files import open_to_readers
from spmdrl.tools.program import program
from spmdrl.types import UserError


def save_text_model(source: Path, destination: Path) -> int:
    """Write the text model and its tokenizer in the dtype of the source, and return the number of parameters.

    Raises UserError when the source is a text model already, or transformers has no text model for it.
    """
    if not (source / "config.json").is_file():
        raise UserError(f"{source} is not a model directory: it has no config.json")
    config = AutoConfig.from_pretrained(source)
    text_config = config.get_text_config()
    if text_config is config:
        raise UserError(f"{source} holds a text model already ({config.model_type})")
    if not has_language_model(text_config.model_type):
        raise UserError(f"{source}: transformers has no text model for {config.model_type}")
    if quantization := quantization_of(source):
        raise UserError(
            f"{source} has weights of few bits ({method_of(quantization)}); make them bfloat16 with spmdrl dequantize, "
            "and save the text model of that"
        )
    if destination.exists():
        raise UserError(f"{destination} exists; name a new directory")
    tokenizer = load_tokenizer(str(source), trust_remote_code=False)
    whole = AutoModelForImageTextToText.from_pretrained(source, dtype="auto")
    head = whole.get_output_embeddings()
    # Only the outer config, which is not saved, says whether they are tied.
    text_config.tie_word_embeddings = head.weight is whole.get_input_embeddings().weight
    text = model_class(text_config).from_config(text_config, dtype=whole.dtype)
    text.base_model.load_state_dict(whole.get_decoder().state_dict())
    text.get_output_embeddings().load_state_dict(head.state_dict())
    text.generation_config = whole.generation_config
    text.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    open_to_readers(destination)
    return text.num_parameters()


@program("cannot extract")
def main(argv: Sequence[str] | None = None) -> None:
    """Run the program and return its exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("source", type=Path, help="a directory that holds a model of text and images")
    parser.add_argument("dir", type=Path, help="a new directory")
    arguments = parser.parse_args(argv)
    count = save_text_model(arguments.source, arguments.dir)
    say(f"{arguments.dir}: {count:,} parameters")


if __name__ == "__main__":
    sys.exit(main())
