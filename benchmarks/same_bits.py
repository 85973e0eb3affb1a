"""Record the bits of short deterministic runs, to prove that a change of the code changed none.

    python benchmarks/same_bits.py before.json
    python benchmarks/same_bits.py after.json --against before.json
    python benchmarks/same_bits.py before.json --device emulated

Each run is two ranks of `python -m spmdrl.train` or `spmdrl.sft` with settings. Nothing inside the package is named
here, so this outlives what is renamed there.
The record has the sha256 of each metric that is no time and no memory, and of every other file of a run, but for
LEFT_OUT. On a CPU a run measures at its start which kernels are fastest, and they decide last bits; so each finds its
kernels in `machine.json`, as a resumed run does. Records of one machine, with the same torch, can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {  # and why
    "versions.json": "the commit",
    "checkpoints/*/manifest.json": "times, the commit, and digests of files that are here themselves",
    "launches/*": "times",
    "logs/*": "times",
    "ranks/*": "times",
    "curves.png": "a drawing of metrics, times among them",
}
OF_THE_MACHINE = ("time/", "speed/", "memory/", "checkpoint/")  # metrics
# A checkpoint's table of tensors has a random one.
UUID = re.compile(rb"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# A step that engines sample ahead is in a checkpoint with the metrics that it has.
TIME = re.compile(rb'"time/\w+": \{[^{}]*\}')
# What is compared, by patterns of its names.
GROUPS = {
    "weights": ("hf/*", "adapter/*"),
    "checkpoints": ("checkpoints/*",),
    "samples": ("*samples.jsonl", "worst_tokens.jsonl", "rollouts/*"),
    "metrics": ("metrics: *",),
    "settings": ("config.toml", "plan.json", "machine.json"),
    "others": ("*",),
}

BASE = """\
[run]
dir = "runs"
seed = 3
deterministic = true
threads_per_rank = 1
[model]
path = "text"
[data]
max_prompt_tokens = 48
sources = [{ kind = "jsonl", path = "sums.jsonl" }]
[optim]
lr = 1e-2
[pack]
max_tokens_per_micro_batch = 256
[checkpoint]
every = 1
[report]
tensorboard = false
samples_per_step = 100
whole_groups = true
"""
RL = """\
eval_samples = 6
[debug]
save_rollouts = "all"
[rollout]
prompts_per_step = 8
group_size = 4
max_response_tokens = 8
[reward]
timeout_s = 600.0
terms = [{ kind = "function", function = "mine.py:digits" }, { kind = "exact", weight = 0.1 }]
[loss]
updates_per_step = 2
[eval]
num_prompts = 6
sources = [{ kind = "jsonl", path = "held-out.jsonl" }]
"""
SFT = """\
[sft]
sequences_per_step = 16
max_response_tokens = 8
[held_out]
num_prompts = 6
sources = [{ kind = "jsonl", path = "held-out.jsonl", response_column = "answer", answer_column = "" }]
"""
# Most tokens end a response, so that a model that knows nothing gets to later turns.
TURNS = [
    *("environment.max_turns=3", "environment.step_timeout_s=600.0", "environment.episode_timeout_s=3600.0"),
    *("rollout.max_response_tokens=96", f"rollout.stop_token_ids={[1, *range(20, 46)]}"),
]
RUNS = {
    "grpo": ["loss.kl_coef=0.01"],
    "ppo": ["advantage.estimator=gae", "debug={}"],
    "reinforce-plus-plus": ["advantage.estimator=reinforce_plus_plus", "reward.kl_coef=0.01"],
    "reinforce-plus-plus-baseline": ["advantage.estimator=reinforce_plus_plus_baseline"],
    "remax": ["advantage.estimator=remax"],
    "rloo": ["advantage.estimator=rloo"],
    "gspo-dynamic": ["loss.kind=gspo", "rollout.dynamic_sampling=true"],
    "disaggregated": ["rollout.placement=disaggregated", "rollout.num_ranks=1"],
    "sft": ['data.sources=[{kind="jsonl", path="sums.jsonl", response_column="answer", answer_column=""}]'],
    "adapters": ["lora.rank=4"],
    "tool": [
        *TURNS,
        'environment.source={kind="tools", tools=[{kind="function", function="mine.py:lookup"}]}',
    ],
    "game": [
        *TURNS,
        'reward.terms=[{kind="environment"}]',
        'environment.source={kind="class", name="mine.py:Guess"}',
    ],
    "images": [
        *("model.path=vision", "data.max_prompt_tokens=64"),
        'data.sources=[{kind="jsonl", path="pictures.jsonl", image_column="images"}]',
        'eval.sources=[{kind="jsonl", path="pictures-held-out.jsonl", image_column="images"}]',
    ],
}
MKL = {"linear_kernels": dict.fromkeys(("few_rows", "many_rows", "weight_gradient"), "mkl"), "layers_in_c": True}
ONEDNN = {"linear_kernels": dict.fromkeys(MKL["linear_kernels"], "onednn"), "layers_in_c": False}
KERNELS = dict.fromkeys(RUNS, MKL) | {"rloo": ONEDNN}

MINE = '''\
def digits(*, prompt, response, answer, metadata):
    return sum(character.isdigit() for character in response) / 8


def lookup(key: str) -> str:
    """Look up a key.

    Args:
        key: A letter.
    """
    return str(ord(key) % 7)


class Guess:
    def reset(self, seed: int) -> None:
        self.number = seed % 10

    def step(self, guess: str) -> tuple[str | None, float, bool]:
        found = str(self.number) in guess
        return (None if found else f"not {len(guess)}"), float(found) + 0.1 * len(guess), found
'''
PROGRAMS = ("spmdrl.train", "spmdrl.sft")
NUM_RANKS = 2
STEPS = {"cpu": "3", "emulated": "2"}  # emulated devices are slow
TOKENS = ["<pad>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
IMAGE_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
CALLS = [f'<tool_call>{{"name": "lookup", "arguments": {{"key": "{key}"}}}}</tool_call>' for key in "abcdef"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content or [] %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_inputs(folder: Path) -> None:
    """Write models, data, and the functions that the settings name."""
    words = [*TOKENS, *IMAGE_TOKENS, *" +=.,-?:!", *"abcdefghijklmnopqrstuvwxyz", *"0123456789", *CALLS]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    longest_first = sorted((re.escape(word) for word in words if len(word) > 1), key=len, reverse=True)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*longest_first, r"[\s\S]"])), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=TEMPLATE
    )
    tokenizer.add_tokens([*TOKENS[3:], *IMAGE_TOKENS], special_tokens=True)
    sizes = {"vocab_size": len(words), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    decoder: dict[str, Any] = sizes | heads | {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    decoder |= {"tie_word_embeddings": True, "initializer_range": 0.1}
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**decoder)).save_pretrained(folder / "text")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    patches = {"patch_size": 4, "temporal_patch_size": 2}
    tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "spatial_merge_size": 2, **patches}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = {name: words.index(token) for name, token in zip(names, IMAGE_TOKENS, strict=True)}
    vision = Qwen3VLConfig(
        text_config=decoder | {"rope_parameters": rope},
        vision_config=tower | {"initializer_range": 0.1},
        tie_word_embeddings=True,
        **ids,
    )
    Qwen3VLForConditionalGeneration(vision).save_pretrained(folder / "vision")
    limits = {"shortest_edge": 64, "longest_edge": 9 * 64}  # pixels of 1 and 9 tokens
    Qwen2VLImageProcessorPil(size=limits, merge_size=2, **patches).save_pretrained(folder / "vision")
    for model in ("text", "vision"):
        tokenizer.save_pretrained(folder / model)
    sums = [{"prompt": f"{a}+{b}=", "answer": f"{a + b}"} for a in range(10) for b in range(10)]
    pictures = []
    for number in range(60):
        rng = random.Random(number)
        images = [f"{number}-{place}.png" for place in range(number % 3)]
        for image in images:
            size = (rng.randint(8, 24), rng.randint(8, 24))
            Image.frombytes("RGB", size, rng.randbytes(3 * size[0] * size[1])).save(folder / image)
        pictures.append({"prompt": "<image>and" * len(images) + f" {number}?", "answer": "7", "images": images})
    files = {"sums": sums[10:], "held-out": sums[:10], "pictures": pictures[10:], "pictures-held-out": pictures[:10]}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(MINE)
    (folder / "spmdrl.train.toml").write_text(BASE + RL)
    (folder / "spmdrl.sft.toml").write_text(BASE + SFT)


def start_runs(names: list[str], folder: Path, checkout: Path, device: str) -> None:
    """Make the runs in the folder, from a process that has the device and imports everything once."""
    path, variables = [str(checkout)], {"OMP_NUM_THREADS": "1"}
    if device == "emulated":
        path.insert(0, str(checkout / "tests/emulated_cuda/startup"))
        variables |= {"EMULATED_CUDA_DEVICES": str(NUM_RANKS), "EMULATED_CUDA_PLAIN_KERNELS": "1"}
    else:
        for name in names:
            (folder / "runs" / name).mkdir(parents=True)
            (folder / "runs" / name / "machine.json").write_text(json.dumps(KERNELS[name]))
    environment = os.environ | variables | {"PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, __file__, "--make", STEPS[device], *names]
    if subprocess.run(command, cwd=folder, env=environment).returncode:
        raise SystemExit(2)


def make_runs(steps: str, names: list[str]) -> None:
    """Make the runs here, one after the other, on ranks that are forked and run the program as torchrun lets them."""
    sys.path[0] = os.getcwd()
    for program in PROGRAMS:
        importlib.import_module(program)
    for name in names:
        began = time.monotonic()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = {os.fork() or make_rank(name, steps, rank, port) for rank in range(NUM_RANKS)}
        while ranks:
            rank, status = os.wait()
            ranks -= {rank}
            if status:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"{name} failed:\n{Path(f'{name}.log').read_text()[-5000:]}")
        print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def make_rank(name: str, steps: str, rank: int, port: int) -> int:
    """Be a rank of the run; does not return."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    log = os.open(f"{name}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    program = PROGRAMS[name == "sft"]
    sys.argv = [program, f"{program}.toml", f"run.name={name}", f"run.num_steps={steps}", *RUNS[name]]
    code = 1
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # gloo may abort a process that ends as others do
    return code


def digests(run: Path) -> dict[str, str]:
    """Hash what a run has left, by the file, and metrics by their names."""
    found: dict[str, str] = {}
    for file in sorted(path for path in run.rglob("*") if path.is_file()):
        name, content = str(file.relative_to(run)), file.read_bytes()
        if any(fnmatch(name, pattern) for pattern in LEFT_OUT):
            continue
        if name == "metrics.jsonl":
            rows = [json.loads(line) for line in content.splitlines()]
            for metric in sorted({key for row in rows for key in row if not key.startswith(OF_THE_MACHINE)}):
                found[f"metrics: {metric}"] = sha256([row.get(metric) for row in rows])
        elif file.suffix == ".safetensors":
            size = int.from_bytes(content[:8], "little")
            header = json.loads(content[8 : 8 + size])  # its order is random
            header.get("__metadata__", {}).pop("plan", None)  # `plan.json`
            found[name] = sha256(header, content[8 + size :])
        else:
            found[name] = sha256(None, TIME.sub(b"", UUID.sub(b"", content)))
    return found


def sha256(value: Any, content: bytes = b"") -> str:
    """Hash a value that JSON can write, and bytes."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode() + content).hexdigest()


def compare(record: dict[str, Any], other: dict[str, Any]) -> bool:
    """Print a line for each run; returns True when nothing differs."""
    about = [key for key in ("device", "torch") if record[key] != other[key]]
    for key in about:
        print(f"{key}: {record[key]} here, {other[key]} there: bits cannot be compared")
    print(f"{'run':30}" + "".join(f"{group:>13}" for group in GROUPS))
    differences: list[str] = []
    for run in record["runs"]:
        one, two, counted = record["runs"][run], other["runs"].get(run, {}), set()
        line = f"{run:30}"
        for patterns in GROUPS.values():
            names = {name for name in one.keys() | two.keys() if any(fnmatch(name, pattern) for pattern in patterns)}
            names -= counted
            counted |= names
            differing = sorted(name for name in names if one.get(name) != two.get(name))
            differences += [f"{run}: {name}" for name in differing]
            line += f"{f'{len(differing)} differ' if differing else f'{len(names)} same':>13}"
        print(line)
    print("\n".join(differences) or "no difference")
    return not about and not differences


def main() -> int:
    """Make the runs, write the record, compare it; returns 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, help="the file to write")
    parser.add_argument("--against", type=Path, metavar="RECORD", help="compare with this one")
    parser.add_argument("--device", choices=("cpu", "emulated"), default="cpu")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="RUN")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose package runs; this one unless given")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the runs here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        write_inputs(folder)
        record: dict[str, Any] = {"device": args.device, "torch": torch.__version__}
        start_runs(args.runs, folder, args.checkout.resolve(), args.device)
        record["runs"] = {name: digests(folder / "runs" / name) for name in args.runs}
        record["commit"] = json.loads((folder / "runs" / args.runs[0] / "versions.json").read_text()).get("git_commit")
    args.record.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if args.against is None or compare(record, json.loads(args.against.read_text())) else 1


if __name__ == "__main__":
    sys.exit(make_runs(sys.argv[2], sys.argv[3:]) if sys.argv[1:2] == ["--make"] else main())
