"""Prompt sources, checks of rows, chat templates and the tokenizer without torch."""

import json
import logging
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import date
from pathlib import Path

import datasets
import pyarrow.ipc
import pyarrow.parquet
import pytest

from areal_lite.config import DataConfig
from areal_lite.data.prompts import hf_rows, load_prompts, prompt_source
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.tools.evaluate import end_of_turn
from areal_lite_quickstart import addition
from areal_lite_quickstart.make_model import build_char_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ROWS = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(5)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A checkpoint folder with a character tokenizer and a chat template that leaves traces."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_char_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def jsonl(tmp_path: Path, rows: list[dict], file: str = "data.jsonl", **settings) -> DataConfig:
    return DataConfig(source="jsonl", path=write(tmp_path / file, rows), **settings)


def test_addition_is_unbounded_and_reproducible_with_held_out_problems(model: Path) -> None:
    def made(seed: int) -> DataConfig:
        return DataConfig(source="addition", args={"seed": seed})

    train = load_prompts(made(3), model, "train")
    assert train.num_prompts is None and train.num_too_long == 0
    prompt = train[10**9]
    problem = addition.make_problem("train", 10**9, seed=3)
    assert (prompt.text, prompt.answer) == (addition.prompt(problem), addition.answer(problem))
    assert Tokenizer(model).decode(prompt.tokens) == prompt.text
    assert (
        prompt
        == load_prompts(made(3), model, "train")[10**9]
        != load_prompts(made(4), model, "train")[10**9]
    )
    held_out = load_prompts(made(3), model, "eval")[5]
    assert held_out == load_prompts(made(4), model, "eval")[5]
    assert held_out.text == addition.prompt(addition.make_problem("test", 5))


def test_jsonl_with_and_without_chat(model: Path, tmp_path: Path) -> None:
    plain = load_prompts(jsonl(tmp_path, ROWS, chat=False), model, "train")
    assert plain.num_prompts == 5
    assert (plain[2].prompt_id, plain[2].text, plain[2].answer) == (
        "data.jsonl:3",
        "What is 2 + 2?",
        "#### 4",
    )
    chat = load_prompts(jsonl(tmp_path, ROWS, system_prompt="Be brief."), model, "train")
    assert chat[2].text == "<bos>system: Be brief.\nuser: What is 2 + 2?\nassistant: "
    # <bos> is one token, and a special one.
    assert Tokenizer(model).decode(chat[2].tokens) == chat[2].text.removeprefix("<bos>")
    assert len(chat[2].tokens) == len(chat[2].text) - len("<bos>") + 1


def test_a_prompt_may_be_a_conversation_and_an_answer_a_number(model: Path, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "2+2"},
    ]
    own_system = [{"role": "system", "content": "Count."}, turns[0]]
    rows = [{"messages": turns, "gold": 4}, {"messages": own_system, "gold": 0.5}]
    config = jsonl(
        tmp_path, rows, prompt_key="messages", answer_key="gold", system_prompt="Be brief."
    )
    prompts = load_prompts(config, model, "train")
    assert (
        prompts[0].text
        == "<bos>system: Be brief.\nuser: Hi\nassistant: Yes?\nuser: 2+2\nassistant: "
    )
    assert prompts[1].text == "<bos>system: Count.\nuser: Hi\nassistant: "
    assert [prompts[0].answer, prompts[1].answer] == ["4", "0.5"]


def test_rows_come_as_data_sets_have_them(model: Path, tmp_path: Path) -> None:
    """A mark of byte order, keys within objects, parts of contents, messages as JSON, one file."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"text": "2"}]}]
    rows = [
        {"prompt": prompt, "gold": {"truth": "4"}}
        for prompt in ("2+2", parts, json.dumps(parts), json.dumps(parts, indent=2))
    ]
    config = jsonl(tmp_path, rows, prompt_key="prompt", answer_key="gold.truth")
    Path(config.path).write_bytes(b"\xef\xbb\xbf" + Path(config.path).read_bytes())
    for source in ("jsonl", "hf"):
        prompts = load_prompts(replace(config, source=source), model, "train")
        assert {prompts[i].text for i in range(4)} == {"<bos>user: 2+2\nassistant: "}
        assert [prompts[i].answer for i in range(4)] == ["4"] * 4


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"at": "Rome"}},
}


def conversation(arguments: object, content: object) -> list[dict]:
    """Return messages with a call of a tool and its result."""
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is it warm in Rome?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "31", "tool_call_id": "c1"},
    ]


def test_a_conversation_with_tools_is_rendered_as_transformers_does(tmp_path: Path) -> None:
    """Calls may have their arguments as OpenAI sends them, and no text."""
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
        "{% if m.tool_call_id is defined %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    built = build_char_tokenizer()
    built.chat_template = template
    built.save_pretrained(tmp_path)
    expected = built.apply_chat_template(
        conversation({"at": "Rome"}, ""), tools=[WEATHER], tokenize=False
    )
    rows = [
        {"messages": conversation('{"at": "Rome"}', None), "tools": [WEATHER], "answer": "no"},
        {"messages": conversation({"at": "Rome"}, ""), "tools": json.dumps([WEATHER]), "answer": 1},
    ]
    prompts = load_prompts(jsonl(tmp_path, rows, prompt_key="messages"), tmp_path, "train")
    for index in range(2):
        assert prompts[index].text == expected
        assert prompts[index].tools == [WEATHER]
        assert prompts[index].messages == conversation({"at": "Rome"}, "")
        assert prompts[index].info == {}
    rows[0]["tools"] = "weather"
    with pytest.raises(ValueError, match=r"data.jsonl:1: 'tools' must be a list of JSON schemas"):
        load_prompts(jsonl(tmp_path, rows, prompt_key="messages"), tmp_path, "train")


INFO = {"info": {"level": 3, "tags": ["a", None]}, "weight": 0.5, "nan": None, "ü": "ß\n"}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "file.arrow", "stream.arrow"])
def test_other_columns_come_with_the_prompt(model: Path, tmp_path: Path, kind: str) -> None:
    """Parquet and Arrow give every message every key: no null of theirs reaches the template."""
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?", "name": "x"},
    ]
    chat.append({"role": "user", "content": "2+2"})
    rows = [{"question": chat, "answer": [4, 5], **INFO}, {"question": chat, "answer": [6], **INFO}]
    path = tmp_path / f"train.{kind}"
    table = pyarrow.Table.from_pylist(rows)
    if kind == "jsonl":
        write(path, rows)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        new = pyarrow.ipc.new_file if kind == "file.arrow" else pyarrow.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    for place in (path, tmp_path):
        prompts = load_prompts(DataConfig(source="hf", path=str(place)), model, "train")
        assert prompts.num_prompts == 2
        for prompt, answer in zip((prompts[0], prompts[1]), ("[4, 5]", "[6]")):
            assert prompt.messages == chat
            assert (prompt.answer, prompt.info) == (answer, INFO)


def test_columns_that_json_lacks_are_named_and_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"question": "2+2", "answer": 4, "day": date(2026, 1, 2), "raw": b"x", "level": 1}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    prompts = load_prompts(DataConfig(source="hf", path=str(tmp_path)), model, "train")
    assert prompts[0].info == {"level": 1}
    assert "columns day, raw are in no prompt's info" in caplog.text
    rows = [{"question": "2+2", "answer": 4, "huge": 2**64, "half": "\ud800"}]
    prompts = load_prompts(jsonl(tmp_path, rows), model, "train")
    assert prompts[0].info == {} and "columns half, huge" in caplog.text


def test_a_row_needs_no_answer_if_the_reward_uses_none(model: Path, tmp_path: Path) -> None:
    prompts = load_prompts(jsonl(tmp_path, [{"question": "Hi"}], answer_key=""), model, "train")
    assert prompts[0].answer == ""


def test_a_system_prompt_is_only_for_rows_without_one(model: Path, tmp_path: Path, caplog) -> None:
    own = [{"role": "system", "content": "Count."}, {"role": "user", "content": "Hi"}]
    config = jsonl(tmp_path, [{"question": own, "answer": "4"}], system_prompt="Be brief.")
    with caplog.at_level(logging.WARNING):
        load_prompts(config, model, "train")
    assert "1 prompts have a system message of their own" in caplog.text


def test_tokens_that_the_model_lacks_are_refused(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "copy")
    (folder / "config.json").write_text('{"vocab_size": 98}')  # one fewer than with <bos>
    with pytest.raises(ValueError, match=r"data\.jsonl:1: token 98 is not one of the model's 98"):
        load_prompts(jsonl(tmp_path, ROWS), folder, "train")


@pytest.mark.parametrize(
    ("verifier", "answer", "complaint"),
    [
        ("gsm8k:gsm8k_reward", "none", "there is no number in the answer 'none'"),
        ("math:math_reward", " ", "there is no mathematics"),
        ("program:program_reward", "42", "the answer has no tests: its statements assert nothing"),
    ],
)
def test_an_answer_that_nothing_can_match_is_refused(
    model: Path, tmp_path: Path, verifier: str, answer: str, complaint: str
) -> None:
    rows = [{"question": "2+2", "answer": "assert 4"}, {"question": "2+2", "answer": answer}]
    reward = f"areal_lite.rewards.{verifier}"
    with pytest.raises(
        ValueError, match=rf"data\.jsonl:2: {complaint}.*; correct 'answer', or set"
    ):
        load_prompts(jsonl(tmp_path, rows), model, "train", reward)
    assert load_prompts(jsonl(tmp_path, rows), model, "train", "my_reward:reward").num_prompts == 2


def test_chat_equals_apply_chat_template(model: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "user", "content": "a <eos> b"}]
    reference = AutoTokenizer.from_pretrained(model).apply_chat_template(
        messages, add_generation_prompt=True
    )
    assert Tokenizer(model).chat(messages) == reference["input_ids"]


SIMPLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
USER, TOOL = {"role": "user", "content": "1+1?"}, {"role": "tool", "content": "it is <2>"}
FUNCTION = {"type": "function", "function": {"name": "add", "parameters": {}}}


def templated(model: Path, template: str, **variables) -> Tokenizer:
    tokenizer = Tokenizer(model, variables)
    tokenizer.chat_template = template
    return tokenizer


def test_a_template_that_leaves_something_out_is_refused(model: Path) -> None:
    users = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    tokenizer = templated(model, users)
    assert tokenizer.render([USER]) == "1+1?"
    for role in ("system", "developer", "tool"):
        with pytest.raises(ValueError, match=f"leaves out a message of role '{role}': 'it is <2>'"):
            tokenizer.render([USER, TOOL | {"role": role}])
    with pytest.raises(ValueError, match="leaves out the tool 'add'"):
        tokenizer.render([USER], [FUNCTION])
    as_json = users + "{{ tools | tojson }}{{ messages[-1].content.strip() | tojson }}"
    quoted = [USER, TOOL | {"content": ' say "two"\n '}]
    assert "add" in templated(model, as_json).render(quoted, [FUNCTION])


def test_a_template_that_rewrites_answers_ends_no_turn(model: Path) -> None:
    assert templated(model, SIMPLE).render_after_answer([TOOL]) == "<eos>[tool]it is <2><eos>"
    for change in ("replace('-', '_')", "upper", "replace('a', '')"):
        tokenizer = templated(model, SIMPLE.replace("m.content", f"(m.content | {change})"))
        with pytest.raises(ValueError, match="does not write an answer as it is"):
            tokenizer.render_after_answer([])


def test_a_template_has_variables(model: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if think is defined and think %} Think!{% endif %}"
    assert templated(model, template).render([USER]) == "1+1?"
    assert templated(model, template, think=True).render([USER]) == "1+1? Think!"
    config = jsonl(tmp_path, ROWS[:1], chat_template_kwargs={"bos_token": "Hi. "})
    assert load_prompts(config, model, "train")[0].text.startswith("Hi. user: ")


DATED = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d.%m.%y') %}{% endif %}"
    "{{ date_string }}: {{ messages[0].content }}"
)


def test_prompts_have_the_same_date_on_every_day(model: Path) -> None:
    assert templated(model, DATED).render([USER]) == "26.07.24: 1+1?"
    assert templated(model, DATED, today="2025-01-31").render([USER]) == "31.01.25: 1+1?"
    assert templated(model, DATED, date_string="May").render([USER]) == "May: 1+1?"
    with pytest.raises(
        ValueError, match=r"chat_template_kwargs\.today=tomorrow: write a date as 2"
    ):
        Tokenizer(model, {"today": "tomorrow"})


@pytest.mark.parametrize(
    ("template", "settings", "warned"),
    [
        (DATED, {}, True),
        (TEMPLATE, {}, False),
        (DATED, {"chat": False}, False),
        (DATED, {"chat_template_kwargs": {"today": "2025-01-31"}}, False),
        (DATED, {"chat_template_kwargs": {"date_string": "May"}}, False),
    ],
)
def test_a_template_that_writes_the_date_is_a_caution(
    model: Path, tmp_path: Path, caplog, template, settings, warned
) -> None:
    dated = shutil.copytree(model, tmp_path / "model")
    (dated / "chat_template.jinja").write_text(template)
    with caplog.at_level(logging.WARNING):
        load_prompts(jsonl(tmp_path, ROWS[:1], **settings), dated, "train")
    assert ("data.chat_template_kwargs.today=DATE" in caplog.text) == warned


def test_the_end_of_a_turn_is_an_end_of_answers(model: Path) -> None:
    assert end_of_turn(templated(model, SIMPLE)) is None
    other = templated(model, SIMPLE.replace("<eos>", "!"))
    assert "ends a turn with '!', and answers end at '<eos>'" in (end_of_turn(other) or "")
    assert end_of_turn(other, raw=True) is None
    other.eos_ids = ()
    assert "no token ends an answer" in (end_of_turn(other) or "")


@pytest.mark.parametrize(
    ("generation", "config", "agree"),
    [
        ([5, 1], 5, True),  # a file names all
        (1, None, True),
        (5, 5, False),  # the tokenizer says 1
        ([5, 7], [1, 5], False),
    ],
)
def test_files_that_disagree_about_the_end_of_an_answer_are_named(
    model: Path, tmp_path: Path, generation, config, agree
) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    for name, ids in (("generation_config", generation), ("config", config)):
        (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": ids}))
    caution = end_of_turn(Tokenizer(folder), raw=True)
    if agree:
        assert caution is None
    else:
        assert caution is not None and "'<eos>' (" in caution and "\n" not in caution
        assert "tokenizer_config.json)" in caution and "(generation_config.json" in caution


def test_too_long_prompts_are_left_out_and_counted(model: Path, tmp_path: Path, caplog) -> None:
    rows = [ROWS[0], {"question": "x" * 15, "answer": "1"}, ROWS[2]]
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(
            jsonl(tmp_path, rows, chat=False, max_prompt_tokens=14), model, "train"
        )
    assert [p.prompt_id for p in prompts] == ["data.jsonl:1", "data.jsonl:3"]
    assert prompts.num_too_long == 1
    assert "left out 1 of 3 prompts" in caplog.text and "the longest has 15" in caplog.text
    with pytest.raises(ValueError, match="max_prompt_tokens=5"):
        load_prompts(jsonl(tmp_path, rows, chat=False, max_prompt_tokens=5), model, "train")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", r"data\.jsonl:2: not JSON"),
        ("[1, 2]", r"data\.jsonl:2: a list, not an object"),
        (
            '{"prompt": "1+1", "answer": "2"}',
            r"data\.jsonl:2: no key 'question', only \['answer', 'prompt'\]",
        ),
        ('{"question": "1+1"}', r"data\.jsonl:2: no key 'answer'"),
        (
            '{"question": 11, "answer": "2"}',
            r"data\.jsonl:2: 'question' must be a string or a list of messages",
        ),
        ('{"question": [{"role": "user"}], "answer": "2"}', r"data\.jsonl:2: 'question' must be"),
        (
            '{"question": [{"role": "assistant", "content": "4"}], "answer": "2"}',
            r"data\.jsonl:2: the last message is the assistant's",
        ),
        ('{"question": [], "answer": "2"}', r"data\.jsonl:2: 'question' must be"),
        (
            '{"question": "1+1", "answer": null}',
            r"data\.jsonl:2: 'answer' must be a string, a number, .* or a list, not NoneType",
        ),
        (
            '{"question": "1+1", "answer": true}',
            r"data\.jsonl:2: 'answer' must be a string, a number, an object or a list, not bool",
        ),
    ],
)
def test_a_bad_line_is_named(model: Path, tmp_path: Path, line: str, complaint: str) -> None:
    config = jsonl(tmp_path, ROWS[:1])
    with open(config.path, "a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=complaint):
        load_prompts(config, model, "train")


def test_settings_that_cannot_work_are_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").touch()
    messages = [{"question": [{"role": "user", "content": "1+1"}], "answer": "2"}]
    cases = [
        (DataConfig(source="csv"), "train", "data.source=csv"),
        (DataConfig(source="jsonl"), "train", "data.path=null: no such file"),
        (jsonl(tmp_path, ROWS), "eval", "data.eval_path=null: no such file"),
        (
            DataConfig(source="jsonl", path="nowhere.jsonl"),
            "train",
            "data.path=nowhere.jsonl: no such file",
        ),
        (DataConfig(source="hf"), "train", "needs data.path"),
        (
            DataConfig(source="hf", path=str(tmp_path / "one.jsonl")),
            "eval",
            "one file, to train on",
        ),
        (
            DataConfig(source="hf", path=str(tmp_path), args={"train_split": "validation"}),
            "train",
            r"no validation\*\.jsonl",
        ),
        (DataConfig(source="addition", args={"max_digits": 99}), "train", "max_digits"),
        (jsonl(tmp_path, ROWS), "test", "split must be"),
        (
            jsonl(tmp_path, messages, "messages.jsonl", chat=False),
            "train",
            "data.chat=false cannot take",
        ),
        (jsonl(tmp_path, [], "empty.jsonl"), "train", "has no rows"),
    ]
    for config, split, complaint in cases:
        with pytest.raises(ValueError, match=complaint):
            load_prompts(config, model, split)


def test_a_source_may_be_your_own(model: Path, tmp_path: Path, monkeypatch) -> None:
    """The settings accept `module:name`, and the prompts are those that it returns."""
    (tmp_path / "my_source.py").write_text(
        "def prompts(config, tokenizer, split, *, size=3):\n    return [split, size]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = DataConfig(source="my_source:prompts")
    assert load_prompts(config, model, "eval") == ["eval", 3]
    config.args = {"size": 5}
    assert load_prompts(config, model, "eval") == ["eval", 5]
    for wrong, message in (
        (DataConfig(source="csv"), "data.source=csv: choose one of jsonl, hf, .* module:function"),
        (replace(config, args={"sise": 5}), "data.args=.* do not fit data.source=my_source:prom"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_source(wrong)


def test_folders_laid_out_as_on_the_hub(model: Path, tmp_path: Path) -> None:
    (tmp_path / "main").mkdir()
    datasets.Dataset.from_list(ROWS[:3]).to_parquet(
        tmp_path / "main" / "train-00000-of-00002.parquet"
    )
    datasets.Dataset.from_list(ROWS[3:]).to_parquet(
        tmp_path / "main" / "train-00001-of-00002.parquet"
    )
    write(tmp_path / "main" / "test.jsonl", ROWS[:2])
    config = DataConfig(source="hf", path=str(tmp_path), args={"name": "main"}, chat=False)
    train, held_out = load_prompts(config, model, "train"), load_prompts(config, model, "eval")
    assert [p.text for p in train] == [row["question"] for row in ROWS]
    assert [train[0].prompt_id, train[3].prompt_id] == [
        "train-00000-of-00002.parquet:1",
        "train-00001-of-00002.parquet:1",
    ]
    assert [p.answer for p in held_out] == [row["answer"] for row in ROWS[:2]]


def test_data_sets_saved_to_disk(model: Path, tmp_path: Path) -> None:
    splits = {
        "train": datasets.Dataset.from_list(ROWS),
        "test": datasets.Dataset.from_list(ROWS[:2]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "both")
    splits["train"].save_to_disk(tmp_path / "one")
    both = DataConfig(source="hf", path=str(tmp_path / "both"), chat=False)
    one = DataConfig(source="hf", path=str(tmp_path / "one"), chat=False)
    assert [p.text for p in load_prompts(both, model, "train")] == [row["question"] for row in ROWS]
    assert load_prompts(both, model, "eval").num_prompts == 2
    assert load_prompts(one, model, "train")[4].prompt_id == "train:5"
    with pytest.raises(ValueError, match="no split 'validation'"):
        load_prompts(
            DataConfig(
                source="hf", path=str(tmp_path / "both"), args={"train_split": "validation"}
            ),
            model,
            "train",
        )


def test_eos_ids_come_from_generation_config_and_tokenizer(model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((model / name).read_text())
    assert Tokenizer(tmp_path).eos_ids == (1,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert Tokenizer(tmp_path).eos_ids == (5, 1)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    assert Tokenizer(tmp_path).eos_ids == (7, 1, 5), "a server stops at each of them"
    with pytest.raises(ValueError, match="data.chat=false"):
        Tokenizer(tmp_path).chat([{"role": "user", "content": "no template here"}])
    with pytest.raises(ValueError, match="tokenizer.json"):
        Tokenizer(tmp_path / "nowhere")


def test_saved_truncation_is_ignored(model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_file(str(model / "tokenizer.json"))
    fast.enable_truncation(3)
    fast.enable_padding(length=8)
    fast.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(tmp_path).encode("12345")) == 5


def test_special_tokens_are_left_out_of_text(model: Path) -> None:
    tokenizer = Tokenizer(model)
    assert tokenizer.decode([*tokenizer.encode("ab c"), *tokenizer.eos_ids]) == "ab c"


def test_prompts_need_no_torch(model: Path, tmp_path: Path) -> None:
    """Torch takes seconds to import, which a controller that only loads prompts must not pay."""
    config = f"DataConfig(source='jsonl', path={write(tmp_path / 'data.jsonl', ROWS)!r})"
    code = (
        "import sys; from areal_lite.config import DataConfig;"
        "from areal_lite.data.prompts import load_prompts;"
        "import areal_lite.data.sampler, areal_lite.rewards.pool;"
        f"load_prompts({config}, {str(model)!r}, 'train')[0]; sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3]).returncode == 0
    )


def test_a_missing_library_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "train.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    config = DataConfig(source="hf", path=str(tmp_path))
    with pytest.raises(ValueError, match=r"pyarrow.parquet is not installed: pip install datasets"):
        list(hf_rows(config, "train", "", "train"))
