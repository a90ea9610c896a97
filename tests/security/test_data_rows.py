"""Any file of prompts either loads or is refused in one line with the file and the row."""

import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_lite.config import DataConfig
from areal_lite.data.prompts import TextPrompts, load_prompts
from areal_lite_quickstart.make_model import build_char_tokenizer

GOOD = b'{"question": "1+1=", "answer": "2"}\n'
# name -> (the second line of a file, what its error says)
BAD = {
    "not UTF-8": (b'{"question": "\xff", "answer": "2"}', "not UTF-8"),
    "UTF-16": ('{"question": "1", "answer": "2"}'.encode("utf-16"), "not UTF-8"),
    "byte order mark": (b"\xef\xbb\xbf" + GOOD, "not JSON"),
    "NUL": (b"\0", "not JSON"),
    "deep": (b"[" * 100_000, "nested too deep"),
    "deep answer": (b'{"question": "1", "answer": ' + b"[" * 960 + b"]" * 960 + b"}", "."),
    "5000 digits": (b'{"question": "1", "answer": ' + b"9" * 5000 + b"}", "digits"),
    "NaN": (b'{"question": "1", "answer": NaN}', "'answer' cannot be used"),
    "infinite": (b'{"question": "1", "answer": 1e999}', "'answer' cannot be used"),
    "NaN inside": (b'{"question": "1", "answer": {"inputs": [NaN]}}', "'answer' cannot be used"),
    "surrogate prompt": (b'{"question": "\\ud800", "answer": "2"}', "surrogates not allowed"),
    "surrogate answer": (b'{"question": "1", "answer": "\\ud800"}', "surrogates not allowed"),
    "surrogate inside": (b'{"question": "1", "answer": {"a": ["\\udfff"]}}', "surrogates"),
    "surrogate key": (b'{"question": "1", "answer": {"\\udfff": 1}}', "surrogates"),
    "surrogate role": (
        b'{"question": [{"role": "\\ud800", "content": "x"}], "answer": "2"}',
        "surrogates",
    ),
    "many keys": (json.dumps({str(i): 1 for i in range(100_000)}).encode(), "no key"),
    "empty prompt": (b'{"question": "", "answer": "2"}', "'question' is empty"),
    "no messages": (b'{"question": [], "answer": "2"}', "must be a string or a list"),
    "empty messages": (
        b'{"question": [{"role": "user", "content": ""}], "answer": "2"}',
        "no tokens",
    ),
    "messages of Python": (
        b"{\"question\": \"[{'role': 'user', 'content': 'x'}]\", \"answer\": \"2\"}",
        "as Python prints it: write JSON",
    ),
    "null": (b"null", "a NoneType, not an object"),
    "cut": (GOOD[:20], "not JSON"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build_char_tokenizer().save_pretrained(folder)
    return folder


def load(path: Path, model: Path, **settings) -> TextPrompts:
    return load_prompts(DataConfig(source="jsonl", path=str(path), **settings), model, "train")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_refused_in_one_line(name: str, model: Path, tmp_path: Path) -> None:
    line, complaint = BAD[name]
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + line)
    with pytest.raises(ValueError, match=complaint) as error:
        load(path, model)
    message = str(error.value)
    assert "data.jsonl:2" in message
    assert "\n" not in message and len(message) < 500


def test_unused_keys_do_not_matter(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"question": "1", "answer": "2", "score": NaN, "note": "\\ud800"}\n')
    assert load(path, model)[0].answer == "2"


def test_a_huge_prompt_is_left_out_without_being_tokenized(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD + b'{"question": "%s", "answer": "2"}\n' % (b"1" * 3_000_000))
    start = time.process_time()
    prompts = load(path, model)
    assert time.process_time() - start < 1.0  # tokenizing it takes more than ten
    assert (prompts.num_prompts, prompts.num_too_long) == (1, 1)


def test_a_template_that_fails_names_the_row(model: Path, tmp_path: Path) -> None:
    tokenizer = build_char_tokenizer()
    tokenizer.chat_template = "{{ 1 // (messages[0]['content'] | length - 4) }}x"
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "data.jsonl"
    path.write_bytes(GOOD)
    with pytest.raises(ValueError, match="data.jsonl:1: the chat template refuses"):
        load(path, tmp_path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"garbage" * 100])
def test_a_damaged_parquet_file_is_named(content: bytes, model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(content)
    config = DataConfig(source="hf", path=str(tmp_path))
    with pytest.raises(ValueError, match="train.parquet: not Parquet that can be read") as error:
        load_prompts(config, model, "train")
    assert "\n" not in str(error.value)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["\ud800", "", "user", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "a", "\udfff"]), inner, max_size=3)
    ),
    max_leaves=6,
)
fuzzing = settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@fuzzing
@given(JSON_VALUES, JSON_VALUES, st.booleans())
def test_any_row_loads_or_is_refused(model: Path, tmp_path: Path, question, answer, chat) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"question": question, "answer": answer}))
    _loads_or_is_refused(path, model, chat=chat)


@pytest.mark.parametrize("seed", range(3))
def test_mutated_files_load_or_are_refused(seed: int, model: Path, tmp_path: Path) -> None:
    generator = random.Random(seed)
    path = tmp_path / "data.jsonl"
    for _ in range(150):
        content = bytearray(GOOD * 2)
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(content))
            content[at : at + generator.randint(0, 3)] = generator.choice(
                [b"", b"\xff", b"\\ud800", b'"', b"{", b"[", b"\n", b"NaN", b"\0", b"9" * 5000]
            )
        path.write_bytes(content)
        _loads_or_is_refused(path, model)


def _loads_or_is_refused(path: Path, model: Path, **settings) -> None:
    try:
        prompts = load(path, model, **settings)
    except ValueError as error:
        assert "\n" not in str(error) and "data.jsonl" in str(error)
        return
    for index in range(prompts.num_prompts or 0):
        prompt = prompts[index]
        assert prompt.tokens
        json.dumps([prompt.answer, prompt.text, prompt.messages], ensure_ascii=False).encode()
