"""The GSM8K verifier: what counts as an answer, and which numbers are equal."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.rewards.gsm8k import gsm8k_reward, stated_number

RIGHT = [
    ("She packs 8 boxes of 9 eggs.\n8 * 9 = <<8*9=72>>72\n#### 72", "72"),
    ("####72", "72"),
    ("#### \n72", "72"),
    ("#### 72 eggs. She is done with 9 boxes.", "72"),
    (r"So there are $8 \cdot 9 = \boxed{72}$ eggs in 8 boxes.", "72"),
    (r"\boxed{72\text{ eggs}}", "72"),
    (r"\boxed{x = 72}", "72"),
    (r"\boxed{\$1{,}234.50}", "1234.5"),
    (r"\boxed{\frac{3}{4}}", "0.75"),
    (r"\boxed{-\dfrac{3}{4}}", "-3/4"),
    (r"\boxed{2\frac{1}{2}}", "2.5"),
    ("The answer is $1,234.50.", "1234.5"),
    ("The answer is: 1,234,567", "1234567"),
    ("Therefore, the final answer is **72**.", "72"),
    ("**Answer:** 72 eggs", "72"),
    ("Final Answer = 72", "72"),
    ("The answer in dollars is 72, for 8 boxes.", "72"),
    ("The answer is 8 x 9 = 72 eggs.", "72"),
    ("A: 18", "18"),
    ("**A:** 18", "18"),
    ("Q: 17?\n**A: 18**", "18"),
    ("The answer is 1/2.", "0.5"),
    ("The answer is 2 1/2 hours.", "2.5"),
    ("The answer is 50%.", "50"),
    ("The answer is 50%.", "0.5"),
    (r"\boxed{12.5\%}", "1/8"),
    ("The answer is -5 degrees.", "-5"),
    ("The answer is \u22125.", "-5"),
    ("The answer is -$5.", "-5"),
    ("The answer is $-5.", "-5"),
    ("The answer is .5", "0.50"),
    ("72.00", "72"),
    (" $72. ", "72"),
    ("The answer is 70. Wait, I forgot two eggs. The answer is 72.", "72"),
    ("#### 72\nI hope that my answer is clear.", "72"),
    ("#### 72", "8 boxes of 9 eggs are <<8*9=72>>72 eggs.\n#### 72"),
    ("#### 1080", "#### 1,080"),
    ("7", "3 + 4 = 7"),
    ("7", "After 3 hours there are 4 more. The answer is 7."),
    ("<answer>\n42\n</answer>", "42"),
    ("<think>It is 5? The answer is 5.</think> 42", "42"),
    ("<think>\\boxed{35}</think> The answer is 34.", "34"),
    ("**42**", "42"),
    ("$42$", "42"),
    (r"\(42\)", "42"),
    ("So 4 + 38 are **42** apples.", "42"),
    ("4 + 38 = 42\n\n**42 apples**", "42"),
    ("The answer is <b>42</b>.", "42"),
    (r"\fbox{42}", "42"),
    ("The answer is 42\u4e2a", "42"),
    ("1 234", "1234"),
    (r"#### 1\,234", "1234"),
    ("The answer is 1\u00a0234 eggs", "1234"),
    ("#### - 5", "-5"),
    ("The answer is 7\u00bd.", "7.5"),
    ("The answer is 2 and 1/2", "2.5"),
    ("1e3", "1000"),
    (r"\boxed{10^{3}}", "1000"),
    (r"\boxed{1.5 \times 10^3}", "1500"),
    (r"\boxed{2^4}", "16"),
    ("The answer is 50 percent.", "0.5"),
    ("The answer is 1.5 million.", "1500000"),
    ("The answer is 1.5 million.", "1.5"),
    (r"\boxed{30^{\circ}}", "30"),
    (r"\boxed{5\,\text{cm}}", "5"),
    ("#### 5 cm", "5 m"),  # units are not compared
    (r"\boxed{5~\text{cm}}", "5"),
    ("It is ~5. The answer is ~5.", "5"),
    ("The answer is 5m.", "5"),
    ("The answer is $5/hour.", "5"),
    ("The answer is 18, since 3 * 6 = 18", "18"),
    ("The answer is 18, which is 6 more.", "18"),
    ("The answer is 6. The answer is not 5.", "6"),
    ("The answer is +9 points.", "9"),
    ("+9", "9"),
    (r"\boxed{   \frac{3}{4}   }", "3/4"),
    (r"Together they pay $4 \cdot 6 = 24$.", "24"),
    (r"So $\sqrt{81} = 9$ tiles fit.", "9"),
    ("n = 24", "24"),
    ("The answer is n == 24.", "24"),
]
WRONG = [
    ("", "72"),
    ("There are 72 eggs.", "72"),  # mentioned, not stated
    ("8 boxes of 9 eggs. It could be 70, 71, 72.", "72"),
    ("#### 72\n#### 73", "72"),
    ("#### 172", "72"),
    ("#### 72.5", "72"),
    ("#### -72", "72"),
    ("#### 1,72", "172"),
    ("The answer is 0.333.", "1/3"),
    ("The answer is 50%.", "0.5%"),
    ("The answer is 0.5.", "50"),
    ("The answer is 1/0.", "1"),
    (r"\boxed{}", "72"),
    (r"\boxed{7} 2", "72"),
    (r"\boxed{" * 50, "72"),
    ("The answer is unknown. 72", "72"),
    ("#### " + "7" * 5000, "72"),
    ("#### \u0667\u0662", "72"),  # digits of another script
    *((rf"\boxed{{{it}}}", "3") for it in (r"\sqrt{3}", "3x", "3 x", "3,4", r"\frac{3}{x}", "3/x")),
    *((rf"\boxed{{{it}}}", "3") for it in (r"3\sqrt{2}", r"3\pi", "3!", "3^4", "3_4", "3-i", "3k")),
    *(
        (rf"\boxed{{{it}}}", "3")
        for it in ("x - 3", "y/3", r"3 \times 4", "3(x+1)", "x > 3", "3:4")
    ),
    *(
        (f"The answer is {it}.", "3")
        for it in ("3 + 4", "3*4", "3-4", "3\u20134", "3 or 4", "3 to 4")
    ),
    *(
        (f"The answer is {it}.", "3")
        for it in ("3, 4", "3, 4, and 5", "3 and 4", "3 times 4", "not 3")
    ),
    ("The answer is 8:30", "8"),
    ("The answer isn't 5.", "5"),
    ("The answer is n >= 5", "5"),
    ("The answer is n != 5", "5"),
    (r"\boxed{n \leq 5}", "5"),
    ("n >= 5", "5"),
    (r"So $n = \sqrt{5}$.", "5"),
    ("So $a = 5$ and $b = 6$.", "6"),
    ("The answer is x +5", "5"),
    ("**3** and **4**", "3"),
    ("It costs $5 and $6.", "5"),
    ("<think>The answer is 5.</think> 7", "5"),
    ("<think>The answer is 5.</think>\n", "5"),
    ("9^" * 400, "9"),
]


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_right(completion: str, answer: str) -> None:
    assert gsm8k_reward(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_wrong(completion: str, answer: str) -> None:
    assert gsm8k_reward(completion, answer) == 0.0


@pytest.mark.parametrize("answer", ["", "none", "It is 5. #### none"])
def test_an_answer_without_a_number_is_an_error_of_the_data(answer: str) -> None:
    with pytest.raises(ValueError, match="no number"):
        gsm8k_reward("#### 5", answer)


@settings(deadline=None)
@given(st.text(alphabet="0123456789.,/-%$ #{}\\boxedfracA:answer is=\n", max_size=80))
def test_nothing_a_model_writes_raises(completion: str) -> None:
    assert gsm8k_reward(completion, "72") in (0.0, 1.0)


@settings(deadline=None)
@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["#### {}", "The answer is {}.", r"\boxed{{{}}}", "A: {}\nQ: next"]),
)
def test_any_integer_is_understood_however_it_is_written(number: int, statement: str) -> None:
    for written in (str(number), f"{number:,}", f"{number}.00"):
        assert stated_number(statement.format(written)).value == number


@pytest.mark.skipif(
    "AREAL_LITE_GSM8K" not in os.environ,
    reason="AREAL_LITE_GSM8K names no folder with GSM8K's train.jsonl",
)
def test_the_data_set_agrees_with_itself() -> None:
    lines = (
        (Path(os.environ["AREAL_LITE_GSM8K"]) / "train.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    answers = [json.loads(line)["answer"] for line in lines]
    numbers = [int(answer.rpartition("####")[2].replace(",", "")) for answer in answers]
    for index, answer in enumerate(answers):
        assert gsm8k_reward(answer, answer) == 1.0
        neighbour = (index + 1) % len(answers)
        assert gsm8k_reward(answer, answers[neighbour]) == float(
            numbers[index] == numbers[neighbour]
        )
