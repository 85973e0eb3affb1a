"""Prompts are a pure function of (seed, index), held-out questions stay out, and bad files are named by line."""

from __future__ import annotations

import functools
import json
import pickle
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from spmdrl.algo.seeds import mix
from spmdrl.config import FileData, HeldOutConfig, ReasoningGymData, SetData
from spmdrl.data import rows, sources, stream
from spmdrl.data.sources import FileSource, ReasoningGymSource, open_source
from spmdrl.data.stream import (
    AnswerLimit,
    HeldOutPrompts,
    PromptStream,
    Turns,
    held_out_rows,
    make_held_out,
    make_training_stream,
    question_key,
)
from spmdrl.data.tokenizer import decode, encode_prompt, encode_text, load_tokenizer, stop_token_ids
from spmdrl.types import UserError
from tests.helpers.broken_library import break_library
from tests.helpers.prompt_data import byte_tokenizer, data, jsonl

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# 10 x 10 numbers and a sign: 200 questions in all.
FEW_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def sums(**changes: Any) -> ReasoningGymData:
    return ReasoningGymData(**({"kind": "reasoning_gym", "task": "chain_sum", "params": FEW_SUMS} | changes))


def words(**changes: Any) -> ReasoningGymData:
    settings = {"kind": "reasoning_gym", "task": "spell_backward", "params": {"min_word_len": 3, "max_word_len": 3}}
    return ReasoningGymData(**(settings | changes))


def numbered(tmp_path: Path, count: int, **changes: Any) -> FileData:
    records = [{"prompt": f"question {i}", "answer": str(i), "level": i % 3} for i in range(count)]
    return jsonl(tmp_path / "numbered.jsonl", records, **changes)


def training_stream(*entries: FileData | ReasoningGymData, seed: int = 0, **changes: Any) -> PromptStream:
    return make_training_stream(data(*entries, **changes), None, seed=seed, tokenizer=byte_tokenizer())


# The tokenizer


def test_raw_prompts_get_no_special_tokens_and_come_back_unchanged() -> None:
    tokenizer = byte_tokenizer()
    text = "  2 + 2 =\n½ "
    ids, shown = encode_prompt(tokenizer, text, system_prompt=None, chat_template="auto")
    assert shown == text == decode(tokenizer, ids)
    assert not {0, 1} & set(ids)
    assert decode(tokenizer, [*ids, 1]) == text


def test_chat_templates_wrap_strings_and_messages_alike() -> None:
    encode = functools.partial(encode_prompt, byte_tokenizer(chat_template=CHAT_TEMPLATE), chat_template="auto")
    ids, text = encode("hi", system_prompt="be brief")
    assert text == "<|system|>be brief<|end|><|user|>hi<|end|><|assistant|>"
    assert ids.count(1) == 2 and 0 not in ids
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert encode(messages, system_prompt=None) == (ids, text)
    never = encode_prompt(byte_tokenizer(chat_template=CHAT_TEMPLATE), "hi", system_prompt=None, chat_template="never")
    assert never[1] == "hi"


@pytest.mark.parametrize(
    ("prompt", "system_prompt", "message"),
    [
        ([{"role": "user", "content": "hi"}], None, "no chat template"),
        ("hi", "be brief", "data.system_prompt is set"),
        ("", None, "empty"),
    ],
)
def test_prompts_that_cannot_be_encoded(prompt: Any, system_prompt: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        encode_prompt(byte_tokenizer(), prompt, system_prompt=system_prompt, chat_template="auto")


def test_a_refusing_chat_template_is_the_users_error() -> None:
    template = "{{ raise_exception('no system role') }}"
    with pytest.raises(UserError, match="no system role"):
        encode_prompt(byte_tokenizer(chat_template=template), "hi", system_prompt=None, chat_template="auto")


def test_loading_needs_tokenizer_files(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "good")
    assert load_tokenizer(str(tmp_path / "good"))("ab", add_special_tokens=False)["input_ids"]
    with pytest.raises(UserError, match=r"does not exist; set it to a directory\Z"):
        load_tokenizer(str(tmp_path / "absent"))
    with pytest.raises(UserError, match=r'does not exist; .* or to "hf:Qwen/Qwen3-0\.6B"'):
        load_tokenizer("Qwen/Qwen3-0.6B")
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds adapters and no model; set "):
        load_tokenizer(str(tmp_path / "adapters"))
    byte_tokenizer().save_pretrained(tmp_path / "run" / "hf")
    (tmp_path / "run" / "hf" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match=r'is the folder of a run; set it to the model there, ".*/run/hf"'):
        load_tokenizer(str(tmp_path / "run"))
    # transformers would make an empty tokenizer here.
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(UserError, match="has no tokenizer"):
        load_tokenizer(str(tmp_path / "bare"))


@pytest.mark.parametrize(("listed", "stops"), [(None, {1}), (5, {1, 5}), ([5, 7], {1, 5, 7})])
def test_stop_tokens_come_from_tokenizer_and_generation_config(tmp_path: Path, listed: Any, stops: set[int]) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert stop_token_ids(byte_tokenizer(), str(tmp_path)) == stops


def test_no_stop_token_at_all_is_an_error(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="end-of-sequence"):
        stop_token_ids(tokenizer, str(tmp_path))


# Files


def test_every_epoch_has_each_row_once_in_its_own_order(tmp_path: Path) -> None:
    source = FileSource(numbered(tmp_path, 50), seed=3)
    epochs = [[source.row(epoch * 50 + i).answer for i in range(50)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = FileSource(numbered(tmp_path, 50), seed=3)
    backwards = [again.row(i).answer for i in reversed(range(150))]
    assert backwards[::-1] == [answer for epoch in epochs for answer in epoch]
    other_seed = FileSource(numbered(tmp_path, 50), seed=4)
    assert [other_seed.row(i).answer for i in range(50)] != epochs[0]


def test_rows_keep_their_other_columns_and_their_place(tmp_path: Path) -> None:
    prompt = next(p for p in training_stream(numbered(tmp_path, 5)).take(0, 5) if p.answer == "4")
    assert prompt.metadata == {"level": 1} and prompt.text == "question 4" and prompt.task == "default"
    source = FileSource(numbered(tmp_path, 5), seed=0)
    assert {source.row(i).where for i in range(5)} == {f"numbered.jsonl line {n}" for n in range(1, 6)}


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": f"q{i}"}], "gold": i, "note": f"n{i}"} for i in range(8)]
    columns = {"prompt_column": "messages", "answer_column": "gold"}
    lines = jsonl(tmp_path / "data.jsonl", records, **columns)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "data.parquet")
    table = FileData(kind="parquet", path=str(tmp_path / "data.parquet"), **columns)
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    both = [make_training_stream(data(file), None, seed=1, tokenizer=tokenizer).take(0, 20) for file in (lines, table)]
    assert both[0] == both[1]
    assert {prompt.answer for prompt in both[0]} == {str(i) for i in range(8)}


@pytest.mark.parametrize(
    ("lines", "changes", "message"),
    [
        ('{"prompt": "a", "answer": "b"}\n\n{"prompt": "a", \n', {}, r"bad\.jsonl line 3 is not valid JSON"),
        ('{"prompt": "a", "answer": "b"}\n["a"]\n', {}, r"bad\.jsonl line 2 is not a JSON object but list"),
        ('{"promt": "a", "answer": "b"}\n', {}, r'line 1 has no column "prompt" .* did you mean promt\?'),
        ('{"prompt": "a"}\n', {}, r'line 1 has no column "answer" .* set answer_column = ""'),
        ('{"prompt": "a", "answer": null}\n', {}, r'line 1: "answer" must be a string .* not NoneType'),
        ('{"prompt": "a", "answer": true}\n', {}, r'line 1: "answer" must be a string .* not bool'),
        ('{"prompt": 7, "answer": "b"}\n', {}, r'line 1: "prompt" must be a string or a list of chat .* int'),
        ('{"prompt": "", "answer": "b"}\n', {}, r"line 1: .* but it is empty"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}\n', {}, r"line 1: .* but it is list"),
        ('{"prompt": "a", "answer": "b"}\n', {"response_column": "reply"}, r'line 1 has no column "reply"'),
        ("\n", {}, r"bad\.jsonl has no rows"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: str, changes: dict[str, Any], message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(lines)
    with pytest.raises(UserError, match=message):
        FileSource(FileData(kind="jsonl", path=str(tmp_path / "bad.jsonl"), **changes), seed=0)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("not a table")
    for kind, name in (("jsonl", "absent"), ("parquet", "absent"), ("parquet", "text.parquet"), ("jsonl", ".")):
        with pytest.raises(UserError, match=name):
            FileSource(FileData(kind=kind, path=str(tmp_path / name)), seed=0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_order_is_that_of_rows_in_memory(tmp_path: Path, kind: str) -> None:
    """As it was when files were read as a whole: a list of the wanted rows, shuffled again in each epoch."""
    records = [{"prompt": f"question {i}", "answer": str(i), "note": "n" * (i % 7)} for i in range(101)]
    file = (
        jsonl(tmp_path / "rows.jsonl", records)
        if kind == "jsonl"
        else FileData(kind="parquet", path=str(tmp_path / "p"))
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "p", row_group_size=9)
    source = FileSource(file, seed=11).keep(lambda row: row.answer != "7")
    wanted = [record for record in records if record["answer"] != "7"]
    for epoch in range(3):
        order = list(range(100))
        random.Random(mix(11, epoch)).shuffle(order)
        found = [source.row(epoch * 100 + i) for i in range(100)]
        assert [row.answer for row in found] == [wanted[place]["answer"] for place in order]
        assert all(row.metadata == {"note": "n" * (int(str(row.answer)) % 7)} for row in found)


@pytest.mark.parametrize("row_group_size", [7, 64, 300], ids=["many groups", "groups", "one group"])
def test_a_parquet_file_that_is_larger_than_what_is_kept_gives_the_same_rows_in_few_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group_size: int
) -> None:
    """No pass holds a row group whole, and each takes out what will be asked for soon."""
    records = [{"prompt": f"question {i}", "answer": str(i), "notes": ["n" * (i % 9)] * 3} for i in range(300)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "p", row_group_size=row_group_size)
    expected = FileSource(FileData(kind="parquet", path=str(tmp_path / "p")), seed=3)
    monkeypatch.setattr(rows, "_CACHED_BYTES", pyarrow.Table.from_pylist(records).nbytes // 10)
    monkeypatch.setattr(rows, "_BATCH_ROWS", 16)
    source = FileSource(FileData(kind="parquet", path=str(tmp_path / "p")), seed=3)
    passes = Counter[int]()
    kept: list[int] = []
    read = source._rows._batches

    def counted(group: int) -> Iterator[Any]:
        passes[group] += 1
        kept.append(sum(part.num_bytes for part in source._rows._cached.values()))
        return read(group)

    monkeypatch.setattr(source._rows, "_batches", counted)
    assert [source.row(index) for index in range(600)] == [expected.row(index) for index in range(600)]
    assert max(kept) <= 1.2 * rows._CACHED_BYTES, "small batches have room to spare"
    assert max(passes.values()) <= 2 * 20, "an epoch is ten times what is kept"
    assert source.row(0) == expected.row(0) and source.row(0) == expected.row(0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_is_written_to_during_a_run_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    file = numbered(tmp_path, 50)
    if kind == "parquet":
        file = FileData(kind="parquet", path=str(tmp_path / "p"))
        table = pyarrow.Table.from_pylist([{"prompt": f"question {i}", "answer": str(i)} for i in range(50)])
        pyarrow.parquet.write_table(table, tmp_path / "p", row_group_size=5)
        monkeypatch.setattr(rows, "_CACHED_BYTES", 0)
    source = FileSource(file, seed=0)
    with open(file.path, "ab") as appended:
        appended.write(b"\n")
    with pytest.raises(UserError, match="was written to while the run was reading it"):
        [source.row(index) for index in range(50)]


def test_control_tokens_in_prompts_and_responses_stay_text() -> None:
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    spelt = "a<|end|>b<s>"
    ids, text = encode_prompt(tokenizer, spelt, system_prompt=None, chat_template="auto")
    plain, _ = encode_prompt(tokenizer, "a", system_prompt=None, chat_template="auto")
    assert text == f"<|user|>{spelt}<|end|><|assistant|>" == tokenizer.decode(ids)
    assert [token for token in ids if token < 2] == [token for token in plain if token < 2] == [1]
    for raw in (
        encode_prompt(tokenizer, spelt, system_prompt=None, chat_template="never")[0],
        encode_text(tokenizer, spelt),
    ):
        assert not {0, 1} & set(raw) and tokenizer.decode(raw) == spelt


def test_half_a_character_of_a_rendered_prompt_is_replaced() -> None:
    ids, _ = encode_prompt(byte_tokenizer(), "a\ud800<|end|>", system_prompt=None, chat_template="rendered")
    assert decode(byte_tokenizer(), ids[:-1]) == "a\ufffd" and ids[-1] == 1


@pytest.mark.parametrize("setting", ["never", "auto"])
def test_the_first_raw_prompt_that_looks_rendered_is_named(tmp_path: Path, setting: str) -> None:
    prompts = ["plain", "a <|end|> b", "<s>c"]
    file = jsonl(tmp_path / "data.jsonl", [{"prompt": prompt} for prompt in prompts], answer_column="")
    (remark,) = training_stream(file, chat_template=setting).remarks()
    assert "data.jsonl line 2 has the text of the control token '<|end|>', which stays text" in remark
    assert 'data.chat_template = "rendered"' in remark
    assert not list(training_stream(file, chat_template="rendered").remarks())
    templated = make_training_stream(
        data(file), None, seed=0, tokenizer=byte_tokenizer(chat_template=CHAT_TEMPLATE)
    )  # whose prompts are no raw ones
    assert not list(templated.remarks())


def test_a_system_prompt_and_messages_are_not_both_the_users(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.system_prompt is put before prompts that are strings"):
        encode_prompt(
            byte_tokenizer(chat_template=CHAT_TEMPLATE),
            [{"role": "user", "content": "hi"}],
            system_prompt="be brief",
            chat_template="auto",
        )


def test_no_answer_column_means_no_answers(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "data.jsonl", [{"prompt": "a"}], answer_column="")
    assert training_stream(file).take(0, 1)[0].answer is None


def test_long_prompts_are_named_or_dropped(tmp_path: Path) -> None:
    records = [{"prompt": "x" * (10 + 10 * (i == 3)), "answer": str(i)} for i in range(6)]
    file = jsonl(tmp_path / "data.jsonl", records)
    with pytest.raises(UserError, match=r"data\.jsonl line 4: the prompt has 20 tokens.*max_prompt_tokens = 15"):
        training_stream(file, max_prompt_tokens=15)
    prompts = training_stream(file, max_prompt_tokens=15, overlong="drop")
    assert Counter(p.answer for p in prompts.take(0, 50)) == dict.fromkeys("01245", 10)
    assert prompts.dropped == {"overlong_rows": 1}
    with pytest.raises(UserError, match="every one of them"):
        training_stream(file, max_prompt_tokens=5, overlong="drop")


def test_the_first_row_that_is_wrong_is_named_also_where_rows_are_drawn(tmp_path: Path) -> None:
    records = [{"prompt": f"{i:02}" * (10 if i > 3 else 1), "answer": "1"} for i in range(94)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "rows")
    files = {
        "line 5": jsonl(tmp_path / "lines", records),
        "row 5 of 94": FileData(kind="parquet", path=str(tmp_path / "rows")),
    }
    for place, file in files.items():
        held_out_cfg = HeldOutConfig(sources=(file,), num_prompts=3)
        with pytest.raises(UserError, match=f"{place}: the prompt has 20 tokens"):
            make_held_out(data(file, max_prompt_tokens=15), held_out_cfg, tokenizer=byte_tokenizer())


# Generated tasks


def test_seeds_of_a_run_do_not_share_items_by_arithmetic() -> None:
    task = sums(params={"min_digits": 6, "max_digits": 6})
    runs = [{source.row(i).question for i in range(200)} for s in range(4) for source in [open_source(task, seed=s)]]
    assert all(len(run) == 200 for run in runs)
    assert len(set.union(*runs)) == 800


@pytest.mark.parametrize("task", ["spell_backward", "survo"])
def test_an_item_does_not_depend_on_what_was_drawn_before(task: str) -> None:
    source = ReasoningGymSource(ReasoningGymData(kind="reasoning_gym", task=task), seed=5)
    forwards = [source.row(i) for i in range(12)]
    copy = pickle.loads(pickle.dumps(source))
    assert [copy.row(i) for i in reversed(range(12))][::-1] == forwards
    assert len({row.question for row in forwards}) == 12
    assert source.row(3, attempt=1).question != forwards[3].question


def test_data_sets_that_draw_while_they_are_made_are_made_anew() -> None:
    assert ReasoningGymSource(words(), seed=0)._items.can_reseed
    assert not ReasoningGymSource(ReasoningGymData(kind="reasoning_gym", task="survo"), seed=0)._items.can_reseed


def test_numpy_sized_seeds_fit_every_task() -> None:
    source = ReasoningGymSource(ReasoningGymData(kind="reasoning_gym", task="pool_matrix"), seed=2**63 - 1)
    assert len({source.row(i).question for i in range(20)}) == 20


def test_a_library_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = break_library("reasoning_gym", tmp_path, monkeypatch)
    monkeypatch.setattr(sources, "_ITEMS", {})
    with pytest.raises(UserError, match=f'^data of kind = "reasoning_gym" needs packages .*: {lacks}; install'):
        open_source(sums(), seed=0)


def test_metadata_is_what_the_scorer_needs() -> None:
    row = ReasoningGymSource(words(prompt_template="{metadata[word]}? {question}"), seed=0).row(7)
    word = row.metadata["metadata"]["word"]
    assert row.answer == row.response == word[::-1] and len(word) == 3
    assert row.prompt == f"{word}? {row.question}" and row.question == row.metadata["question"]
    assert row.metadata["params"] == {"min_word_len": 3, "max_word_len": 3}
    assert row.where == "spell_backward item 7"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "chain_smu"}, "did you mean chain_sum"),
        ({"params": {"min_term": 2}}, "no parameter min_term; did you mean min_terms"),
        ({"params": {"min_terms": 5, "max_terms": 2}}, "max_terms must be >= min_terms"),
        ({"params": {"seed": 1}}, "params.seed"),
        ({"prompt_template": "{answer}"}, "KeyError: 'answer'"),
        ({"prompt_template": "{metadata[wrod]}"}, r"can use \{question\} and .*\{metadata\[expression\]\}"),
    ],
)
def test_bad_tasks_are_explained(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ReasoningGymSource(sums(**changes), seed=0)


def test_tasks_that_follow_pythons_hash_seed_need_it_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ReasoningGymData(kind="reasoning_gym", task="isomorphic_strings")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match="PYTHONHASHSEED=0"):
        ReasoningGymSource(task, seed=0)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert ReasoningGymSource(task, seed=0).row(0).question


# The stream


def test_turns_are_exact_smooth_and_periodic() -> None:
    turns = Turns([0.5, 0.3, 0.2])
    taken = [turns.at(i) for i in range(1000)]
    served: Counter[int] = Counter()
    for index, (source, earlier) in enumerate(taken):
        assert earlier == served[source]
        served[source] += 1
        assert all(abs(served[s] - (index + 1) * w) < 1 for s, w in enumerate((0.5, 0.3, 0.2)))
    assert served == {0: 500, 1: 300, 2: 200}
    assert Turns([0.5, 0.3, 0.2]).at(999) == taken[999]
    assert Turns([5, 3, 2]).at(10**12 + 7) == (taken[7][0], 10**11 * (5, 3, 2)[taken[7][0]] + taken[7][1])


def test_a_prompt_is_a_function_of_seed_and_index(tmp_path: Path) -> None:
    entries = (sums(), words(weight=2.0), numbered(tmp_path, 7, weight=0.5))
    whole = training_stream(*entries).take(0, 210)
    assert [prompt.prompt_id for prompt in whole] == list(range(210))
    assert Counter(prompt.task for prompt in whole) == {"chain_sum": 60, "spell_backward": 120, "default": 30}
    fresh = training_stream(*entries)
    order = random.Random(0).sample(range(210), 60)
    assert [fresh.take(i, 1)[0] for i in order] == [whole[i] for i in order]
    assert [p.text for p in training_stream(*entries, seed=1).take(0, 210)] != [p.text for p in whole]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_the_slices_of_the_ranks_tile_the_step(tmp_path: Path, num_ranks: int) -> None:
    entries = (words(), numbered(tmp_path, 5))
    per_rank = 24 // num_ranks
    slices = [training_stream(*entries).take(24 + rank * per_rank, per_rank) for rank in range(num_ranks)]
    assert [prompt for part in slices for prompt in part] == training_stream(*entries).take(0, 48)[24:]


def test_held_out_questions_are_never_trained_on() -> None:
    cfg = data(sums(prompt_template="Please: {question}"), words())
    held_out_cfg = HeldOutConfig(sources=(sums(weight=2.0), words(prompt_template="{question}!")), num_prompts=150)
    tokenizer = byte_tokenizer()
    held_out = make_held_out(cfg, held_out_cfg, tokenizer=tokenizer)
    questions = {prompt.metadata["question"] for prompt in held_out}
    assert len(held_out) == len(questions) == 150
    assert Counter(prompt.task for prompt in held_out) == {"chain_sum": 100, "spell_backward": 50}
    assert held_out == make_held_out(cfg, held_out_cfg, tokenizer=tokenizer)

    without = make_training_stream(cfg, None, seed=0, tokenizer=tokenizer).take(0, 1000)
    assert len({p.metadata["question"] for p in without} & questions) > 100  # there is something to exclude
    prompts = make_training_stream(cfg, held_out_cfg, seed=0, tokenizer=tokenizer)
    trained_on = {prompt.metadata["question"] for prompt in prompts.take(0, 10_000)}
    assert not trained_on & questions
    assert len({q for q in trained_on if "arithmetic" in q}) == 100  # all that is left
    assert prompts.dropped["held_out_items"] > 4000
    # Purity holds where draws are replaced.
    fresh = make_training_stream(cfg, held_out_cfg, seed=0, tokenizer=tokenizer)
    again = fresh.take(4321, 50)
    assert again == prompts.take(4321, 50)
    dropped = fresh.dropped
    assert [fresh.metadata(prompt.prompt_id) for prompt in again] == [prompt.metadata for prompt in again]
    assert fresh.dropped == dropped


def test_held_out_rows_of_a_file_leave_it(tmp_path: Path) -> None:
    file = numbered(tmp_path, 40)
    cfg, held_out_cfg = data(file), HeldOutConfig(sources=(file,), num_prompts=10)
    held_out = make_held_out(cfg, held_out_cfg, tokenizer=byte_tokenizer())
    prompts = make_training_stream(cfg, held_out_cfg, seed=0, tokenizer=byte_tokenizer())
    answers = Counter(prompt.answer for prompt in prompts.take(0, 90))
    assert len(answers) == 30 and set(answers.values()) == {3}
    assert not set(answers) & {prompt.answer for prompt in held_out}
    assert prompts.dropped == {"held_out_rows": 10}


def test_held_out_rows_are_the_same_whatever_limits_the_answers_that_are_trained_on(tmp_path: Path) -> None:
    file = numbered(tmp_path, 40)
    cfg, held_out_cfg = data(file, overlong="drop"), HeldOutConfig(sources=(file,), num_prompts=10)
    limit = AnswerLimit(lambda row: int(row.answer or 0), most=19, setting="sft.it", holds_for_held_out=False)
    held_out = {prompt.answer for prompt in make_held_out(cfg, held_out_cfg, tokenizer=byte_tokenizer())}
    short = {str(i) for i in range(20)}
    assert short & held_out < held_out, "of both kinds"
    limited = make_training_stream(cfg, held_out_cfg, seed=0, tokenizer=byte_tokenizer(), answers=limit)
    assert {prompt.answer for prompt in limited.take(0, 20)} == short - held_out
    again = make_held_out(cfg, held_out_cfg, tokenizer=byte_tokenizer(), answers=limit)
    assert {prompt.answer for prompt in again} == held_out


def test_a_set_has_the_same_items_wherever_it_is_named() -> None:
    """So accuracies of two runs that name other sets beside it can be compared."""
    task = SetData(kind="set", name="reasoning_gym/chain_sum")

    def questions(*entries: ReasoningGymData | SetData) -> set[str]:
        held_out = make_held_out(
            data(words()), HeldOutConfig(sources=entries, num_prompts=6 * len(entries)), tokenizer=byte_tokenizer()
        )
        return {prompt.metadata["question"] for prompt in held_out if prompt.task == "chain_sum"}

    assert len(questions(task)) == 6 and questions(task) == questions(words(), task)


def test_questions_are_compared_without_template_and_white_space(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " What is\n 1 + 1? "}]
    rows = [{"prompt": chat}, {"prompt": "What is 1 + 1?"}, {"prompt": "What is 1 + 2?"}]
    source = FileSource(jsonl(tmp_path / "d.jsonl", rows, answer_column=""), seed=0)
    keys = {source.row(i).where[-1]: question_key(source.row(i)) for i in range(3)}
    assert keys["1"] == keys["2"] != keys["3"]
    rows = [{"prompt": "le caf\u00e9"}, {"prompt": "le cafe\u0301"}]  # one letter, or an e and its accent
    source = FileSource(jsonl(tmp_path / "e.jsonl", rows, answer_column=""), seed=0)
    assert question_key(source.row(0)) == question_key(source.row(1))


def test_too_few_questions_are_explained(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    for entry, count, known in ((sums(), 201, 200), (numbered(tmp_path, 12), 13, 12)):
        with pytest.raises(UserError, match=f"num_prompts = {count}.* only {known} distinct"):
            make_held_out(data(entry), HeldOutConfig(sources=(entry,), num_prompts=count), tokenizer=tokenizer)
    everything = make_training_stream(
        data(sums()), HeldOutConfig(sources=(sums(),), num_prompts=200), seed=0, tokenizer=tokenizer
    )
    with pytest.raises(UserError, match="chain_sum has too few distinct questions"):
        everything.take(0, 1)


def test_duplicate_questions_are_held_out_once(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "twice.jsonl", [{"prompt": f"q{i % 5}", "answer": "a"} for i in range(10)])
    encoder = stream._encoder_of(data(file), byte_tokenizer(), (), stream.NO_IMAGES)
    rows = held_out_rows([FileSource(file, seed=0)], weights=[1.0], encoder=encoder, count=5)
    held_out = HeldOutPrompts(rows, encoder)
    assert sorted(prompt.text for prompt in held_out) == [f"q{i}" for i in range(5)]


def test_pairs_have_the_response_to_imitate(tmp_path: Path) -> None:
    records = [{"prompt": f"q{i}", "reply": f"r{i}"} for i in range(6)]
    file = jsonl(tmp_path / "d.jsonl", records, answer_column="", response_column="reply")
    pairs = training_stream(file, words()).pairs(0, 12)
    said = [(pair.prompt, pair.exchanges[0].response) for pair in pairs]
    assert sorted((p.text, r) for p, r in said if p.task == "default") == [(f"q{i}", f"r{i}") for i in range(6)]
    assert all(r == p.metadata["metadata"]["word"][::-1] for p, r in said if p.task == "spell_backward")
    unanswered = training_stream(jsonl(tmp_path / "e.jsonl", [{"prompt": "q", "answer": "a"}]))
    told = "no response_column is set, and the prompt is a text; the row has the columns prompt, answer; set"
    with pytest.raises(UserError, match=rf"e\.jsonl line 1: there is no response to imitate: {told}"):
        unanswered.pairs(0, 1)
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    conversation = jsonl(tmp_path / "c.jsonl", [{"n": 1, "prompt": asked, "reply": "r"}], answer_column="")
    with pytest.raises(
        UserError, match=r'ends with a message of role "user"; the row has the columns n, prompt, reply;'
    ):
        make_training_stream(
            data(conversation), None, seed=0, tokenizer=byte_tokenizer(chat_template=CHAT_TEMPLATE)
        ).pairs(0, 1)


def test_list_of_hash_dependent_tasks_names_real_tasks() -> None:
    from reasoning_gym.factory import DATASETS

    assert set(DATASETS) >= sources._HASH_DEPENDENT


def test_the_answer_is_what_follows_the_last_mark(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "answer": "3 #### 4 is it\n#### 5 "}, {"prompt": "r", "answer": "it is 6"}]
    source = FileSource(jsonl(tmp_path / "a.jsonl", rows[:1], answer_after="####"), seed=0)
    assert source.row(0).answer == "5"
    with pytest.raises(UserError, match=r'line 2: "answer" has no answer after "####" \(answer_after\)'):
        FileSource(jsonl(tmp_path / "a.jsonl", rows, answer_after="####"), seed=0)
    with pytest.raises(UserError, match='cuts the text of answer_column, which is ""'):
        FileSource(jsonl(tmp_path / "a.jsonl", rows, answer_column="", answer_after="####"), seed=0)
