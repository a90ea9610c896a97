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
    (r"\boxed{50\%}", "50"),
    (r"\boxed{50}", r"50\%"),
    (r"\boxed{0.5}", r"50\%"),
    (r"\boxed{\frac12}", r"50\%"),
    (r"\boxed{50\%}", "50%"),
    (r"\boxed{50\%}", r"50 \%"),
    (r"\boxed{120°}", "120"),
    (r"\boxed{120\degree}", "120"),
    (r"\boxed{120^\circ}", "120"),
    (r"\boxed{120}", r"120^{\circ}"),
    (r"\boxed{1\,000}", "1000"),
    (r"\boxed{5}", "5."),
    (r"\boxed{12}", "12."),
    (r"\boxed{x+1}", "x+1."),
    (r"x=\boxed{1} and x=\boxed{2}", "1,2"),
    (r"\boxed{6{:}30}", "6:30"),
    (r"\boxed{6:30}", "6:30"),
    (r"\boxed{\varnothing}", r"\emptyset"),
    (r"\boxed{\frac12}", r"\sin 30^\circ"),
    (r"\boxed{\sin 30^\circ}", r"\frac12"),
    (r"\boxed{–5}", "-5"),
    (r"\fbox{3}", "3"),
    (r"\boxed{pi/2}", r"\pi/2"),
    (r"\boxed{14.0 + -1.0i}", "14-i"),
    (r"\boxed{1000000}", "1 000 000"),
    (r"\boxed{1 000 000}", "1000000"),
    ("<answer>34</answer>", "34"),
    (r"<think>\boxed{35}</think> The answer is 34.", "34"),
    ("Answer: B", "B"),
    ("The answer is (B).", "B"),
    (r"\boxed{B}", "B"),
    (r"\boxed{\text{(B)}}", "B"),
    ("B", "(B)"),
    (r"\boxed{C}", r"\text{(C)}"),
    ("**B**", "B"),
    (r"\boxed{\textbf{B}}", "B"),
    (r"\boxed{1.6\times10^{-19}}", r"1.6\times 10^{-19}"),
    (r"\boxed{1.6e-19}", r"1.6\times 10^{-19}"),
    (r"\boxed{2^{-99}}", r"\frac{1}{2^{99}}"),
    (r"\boxed{5}", "101_2"),
    (r"\boxed{101_{2}}", "101_2"),
    (r"\boxed{26}", "1A_{16}"),
    (r"\boxed{5}", r"5\text{ cm}"),
    (r"\boxed{5\text{ cm}}", "5"),
    (r"\boxed{5 centimeters}", r"5\text{ cm}"),
    (r"\boxed{10\text{ h}}", r"10\text{ hours}"),
    (r"\boxed{3}", "x=3"),
    (r"\boxed{x=1+2=3}", "3"),
    (r"\boxed{3=3=3}", "3"),
    (r"\boxed{0.333333}", "1/3"),
    (r"\boxed{\frac13}", "0.333333"),
    (r"\boxed{100000.0}", "100000"),
    (r"\boxed{2, 1}", r"\{1,2\}"),
    (r"\boxed{1:2}", "1:2"),
    (r"\boxed{7:32}", "7:32"),
    (r"\boxed{1, 2, \ldots, n}", r"1,2,\dots,n"),
    (r"\boxed{9 pm}", r"9 \text{ pm}"),
    (r"<answer>\boxed{34}</answer>", "34"),
    ("<answer> 34 </answer> ok", "34"),
    (r"\boxed{5}", "5"),
    (r"\boxed{0.5}", r"$\frac{1}{2}$"),
    ("I think the answer is $2$.", "2"),
    (r"so \boxed{255}. Final Answer: The final answer is $10,455$. I hope it is correct.", "10455"),
    (r"\boxed{28\%}", r"28\%"),
    (r"\boxed{(1.6\times 10^{-19},2)}", "(1.6e-19,2)"),
    (r"\boxed{\frac{\pi}{6}}", r"\frac{\pi}{6}"),
    (r"\boxed{30^{\circ}}", "30"),
    (r"\boxed{90}", r"90^\circ"),
    (r"\boxed{12 apples}", "12"),
    (r"\boxed{1+x^2}", "x^2+1"),
    (r"\boxed{2} \quad \text{and} \quad \boxed{3}", "2,3"),
    (r"\boxed{(3, 3)} \text{ for part (a) and } \boxed{(1, 1)}", "(3, 3), (1, 1)"),
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
    (r"\boxed{9.1\times 10^{-31}}", r"1.6\times 10^{-19}"),
    (r"\boxed{0.0}", r"1.6\times10^{-19}"),
    (r"\boxed{0.0000002}", "0.0000001"),
    (r"\boxed{0.0000001}", "0.00000045"),
    (r"\boxed{\frac{1}{2^{98}}}", r"\frac{1}{2^{99}}"),
    (r"\boxed{2^{-60}}", r"\frac{1}{2^{99}}"),
    (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}"),
    (r"\boxed{\frac{1}{3\cdot 2^{2006}}}", r"\frac{2^{2005}+1}{3\cdot 2^{2006}}"),
    (r"\boxed{1/2^{21}}", "1/2^{20}"),
    (r"\boxed{10^{-8}}", "10^{-7}"),
    (r"\boxed{4343_7}", "4343_6"),
    (r"\boxed{1001_3}", "1001_2"),
    (r"\boxed{1001}", "1001_2"),
    (r"\boxed{1, 3, 5, \ldots, 2n-1}", r"1, 2, \ldots, n"),
    (r"\boxed{5\text{ m}}", r"5\text{ cm}"),
    (r"\boxed{9\text{ am}}", r"9\text{ pm}"),
    (r"\boxed{10\text{ minutes}}", r"10\text{ hours}"),
    (r"\boxed{1=2=3}", "3"),
    ("The answer is not 3.", "3"),
    (r"\boxed{\frac15}", "6:30"),
    (r"\boxed{6:30}", "1/5"),
    (r"\boxed{6:31}", "6:30"),
    ("Answer: C", "B"),
    ("The answer is (A).", "B"),
    (r"\boxed{C}", "B"),
    (r"\boxed{51\%}", "50"),
    (r"\boxed{50}", r"0.5\%"),
    (r"<think>\boxed{34}</think> The answer is 35.", "34"),
    (r"\boxed{5\text{ cm}^2}", r"5\text{ cm}^3"),
    (r"\boxed{(9e-31,2)}", "(1.6e-19,2)"),
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
