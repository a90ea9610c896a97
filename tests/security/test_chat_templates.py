"""A chat template is text of a checkpoint: whatever it is, it renders or it refuses in words."""

import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.data.tokenizer import Tokenizer
from areal_lite_quickstart.make_model import build_char_tokenizer

PIECES = [
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if m.role == 'user' %}",
    "{% if %}",
    "{% else %}",
    "{% endif %}",
    "{% set x = messages[0] %}",
    "{% macro f(a) %}{{ f(a) }}{% endmacro %}{{ f(1) }}",
    "{{ m['content'] }}",
    "{{ messages[99].content }}",
    "{{ messages[0].content.a.b }}",
    "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "{{ raise_exception('no') }}",
    "{{ messages | tojson }}",
    "{{ tools | length }}",
    "{{ 1 // 0 }}",
    "{{ 'x' | int + [] }}",
    "{{ range(10 ** 9) | list }}",
    "{% generation %}{% endgeneration %}",
    "{% include 'other' %}",
    "{% import '/etc/passwd' as p %}",
    "{{ messages.append(1) }}",
    "{# ",
    "{{",
    "}}",
    "{%",
    "\x00",
    "\ud800",
    "<eos>",
]
_LEAVES_OUT = "the chat template leaves out a message of role 'user'"
MESSAGES = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    build_char_tokenizer().save_pretrained(folder)
    return Tokenizer(str(folder))


def check(tokenizer: Tokenizer, template: str) -> None:
    tokenizer.chat_template = template
    started = time.process_time()
    try:
        assert isinstance(tokenizer.render(MESSAGES), str)
    except ValueError as error:
        message = str(error)
        assert message.startswith(("the chat template refuses these messages: ", _LEAVES_OUT))
    assert time.process_time() - started < 2


@settings(deadline=None, max_examples=300)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8))
def test_malformed_templates(tokenizer: Tokenizer, pieces: list[str]) -> None:
    check(tokenizer, "".join(pieces))


@pytest.mark.slow
@settings(deadline=None, max_examples=20_000)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12))
def test_many_malformed_templates(tokenizer: Tokenizer, pieces: list[str]) -> None:
    check(tokenizer, "".join(pieces))


def test_a_template_reaches_nothing_outside(tokenizer: Tokenizer, tmp_path: Path) -> None:
    witness = tmp_path / "ran"
    reach = "cycler.__init__.__globals__.os.system('touch " + str(witness) + "')"
    for code in (reach, f"messages.__class__.__base__.__subclasses__() or {reach}"):
        with pytest.raises(ValueError, match="refuses these messages: (Security|Undefined)Error"):
            tokenizer.chat_template = "{{ " + code + " }}"
            tokenizer.render(MESSAGES)
    assert not witness.exists()
