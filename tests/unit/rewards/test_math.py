"""The verifier of mathematics: which text is the result, and which results are equal."""

import pytest

from areal_lite.rewards.math import math_reward, stated_result

RIGHT = [
    (r"so it is \boxed{\frac{1}{2}}", "0.5"),
    (r"\[\boxed{\frac{3}{4}}\]", "0.75"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{5} then \boxed{4}", "4"),
    (r"\boxed{\boxed{4}}", "4"),
    (r"\boxed{2x+1}", "y=2x+1"),
    (r"\boxed{\text{(C)}}", "C"),
    (r"\boxed{12,345}", "12345"),
    (r"\boxed{5}\%", "5%"),
    (r"$\boxed{1}$ and $\boxed{2}$", "1,2"),
    (r"\boxed{2}, \boxed{1}", r"\{1,2\}"),
    (r"\boxed{x \in [1,2)}", "[1,2)"),
    (r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    (r"\boxed{72}", "8*9=<<8*9=72>>72\n#### 72"),
    (r"\boxed{1}", "The answer is 1"),
    (r"\boxed{4}" + " and so on" * 900, "4"),
    ("The answer is $4$.", "4"),
    ("Final answer: 12,345.", "12345"),
]
WRONG = [
    (r"\boxed{3}", "$4$"),
    (r"\boxed{2}", "y=2x+1"),
    (r"\boxed{4} then \boxed{5}", "4"),
    (r"\boxed{3}", "1, 2, 3"),
    (r"\boxed{4}" + " and so on" * 1100, "4"),
    (r"\boxed{}", "4"),
    ("no idea", "4"),
    ("", "4"),
]


@pytest.mark.parametrize(("completion", "answer"), RIGHT)
def test_right(completion: str, answer: str) -> None:
    assert math_reward(completion, answer) == 1.0


@pytest.mark.parametrize(("completion", "answer"), WRONG)
def test_wrong(completion: str, answer: str) -> None:
    assert math_reward(completion, answer) == 0.0


@pytest.mark.parametrize(
    ("completion", "result"),
    [
        (r"{ \boxed{a} } \boxed{b}", r"$\boxed{b}$"),
        (r"\boxed{\boxed{a}", r"$\boxed{a}$"),
        (r"\boxed {a_{1}}} }", r"$\boxed {a_{1}}$"),
        (r"\boxed{\{1\}} or $\boxed{2}$.", r"$\boxed{\{1\}} or $\boxed{2}$"),
        (r"\boxed{a", r"\boxed{a"),
    ],
)
def test_the_stated_result(completion: str, result: str) -> None:
    assert stated_result(completion) == result


@pytest.mark.parametrize(
    ("answer", "complaint"), [("", "no mathematics"), ("9^{9^9}", "too large a number")]
)
def test_an_unusable_answer_is_an_error_of_the_data(answer: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        math_reward("4", answer)
