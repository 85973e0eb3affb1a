"""`python -m tests.helpers.sglang_generate MODEL PROMPTS NUM_TOKENS` prints greedy tokens with logprobs, as JSON.

SGLang's processes import this file once more, so it imports nothing at the top that they would have to wait for.
"""

from __future__ import annotations

import json
import os
import sys

ARGUMENTS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "skip_tokenizer_init": True,
    "max_total_tokens": 1024,
    "max_running_requests": 4,
    "mem_fraction_static": 0.1,
    "random_seed": 1,
    "log_level": "error",
}


def main(model: str, prompts: str, num_tokens: str) -> None:
    from spmdrl.engine.sglang.surroundings import cpu_environment, stand_ins

    stand_ins().enable()
    from sglang.srt.entrypoints.engine import Engine

    before = dict(os.environ)
    os.environ.update(cpu_environment())
    engine = Engine(model_path=model, **ARGUMENTS)
    os.environ.clear()
    os.environ.update(before)
    try:
        sampling = {"temperature": 0, "max_new_tokens": int(num_tokens), "ignore_eos": True}
        answers = engine.generate(input_ids=json.loads(prompts), sampling_params=sampling, return_logprob=True)
    finally:
        engine.shutdown()
    print(json.dumps([[(t, lp) for lp, t, _ in a["meta_info"]["output_token_logprobs"]] for a in answers]))


if __name__ == "__main__":
    main(*sys.argv[1:])
