"""The verifier of programs: forms of tests, where the program is, and how it may end."""

import asyncio
import json
import sys
from collections.abc import Iterator

import pytest

from areal_lite.rewards.program import extract_program, parse_tests, program_reward

ADD = "def add(a, b):\n    return a + b"
DOUBLE = "print(int(input()) * 2)"
ASSERT = "assert add(1, 2) == 3"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
ANY_ORDER = "def check(given, expected, result):\n    return sorted(result) == sorted(expected)"


def fenced(*sources: str, language: str = "python") -> str:
    return "\n\nThen:\n\n".join(f"```{language}\n{source}\n```" for source in sources)


def io(inputs: list, outputs: list, **more) -> str:
    return json.dumps({"inputs": inputs, "outputs": outputs, **more})


def reward(completion: str, answer: str) -> float:
    return asyncio.run(program_reward(completion, answer))


FORMS = {  # each holds for a program that defines `add`
    "statements": ASSERT,
    "a list of them": json.dumps([ASSERT, "assert add(0, 0) == 0"]),
    "a list of Python": repr([ASSERT]),
    "tests": json.dumps({"tests": ASSERT}),
    "tests, a list": json.dumps({"tests": [ASSERT]}),
    "MBPP": json.dumps(
        {"test_list": [ASSERT], "test_setup_code": "", "test_imports": ["import re"]}
    ),
    "HumanEval": json.dumps({"test": CHECK, "entry_point": "add"}),
    "calls": io([[1, 2], [3, 4]], [3, 7], fn_name="add"),
    "calls of APPS": io([[1, 2]], [[3]], fn_name="add"),
    "calls of LiveCodeBench": io(["1\n2"], ["3"], func_name="add"),
    "a list of calls": json.dumps(
        [{"input": [1, 2], "output": 3, "testtype": "functional", "fn_name": "add"}]
    ),
    "a checker": io([[1, 2]], [3], fn_name="add", checker=ANY_ORDER.replace("sorted", "repr")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_pays_the_right_program_alone(form: str) -> None:
    assert reward(fenced(ADD), FORMS[form]) == 1.0
    assert reward(fenced("pass"), FORMS[form]) == 0.0
    assert reward(fenced(ADD.replace("+", "-")), FORMS[form]) == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        io(["1", 2], ["2\n\n", 4]),
        json.dumps([{"input": "1", "output": "2", "testtype": "stdin"}]),
        json.dumps({"input": "1", "output": "2"}),
        json.dumps({"test_cases": [{"input": ["1"], "output": [2]}]}),
    ],
)
def test_every_form_of_input_pays_the_right_program_alone(answer: str) -> None:
    assert reward(fenced(DOUBLE), answer) == 1.0
    assert reward(fenced("print(2 * 3)"), answer) == 0.0
    assert reward(fenced("pass"), answer) == 0.0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "assert nothing"),
        ("42", "assert nothing"),
        ("The sum of both.", "neither JSON nor Python"),
        ("{", "never closed"),
        ("[]", "0 inputs"),
        ("[42]", "test 0 must be an object"),
        ("{'assert True'}", "assert nothing"),  # a set of Python
        ("[1], [2]", "assert nothing"),  # a tuple of Python
        ('{"tests": ""}', "assert nothing"),
        ('{"tests": "pass"}', "assert nothing"),
        ('{"tests": 3}', "not a list"),
        (CHECK, "nothing calls"),
        ('{"inputs": ["1"], "outputs": []}', "1 inputs, 0 outputs"),
        ('{"inputs": [["1", true]], "outputs": ["2"]}', "functions need fn_name"),
        ('[{"input": "1", "output": "2", "testtype": "functional"}]', "need fn_name"),
        ("{'inputs': [[{1: 2}]], 'outputs': [2], 'fn_name': 'f'}", "no sets, and texts as keys"),
        ("{'inputs': [[[{1}]]], 'outputs': [2], 'fn_name': 'f'}", "no sets, and texts as keys"),
        ("{'inputs': [[1]], 'outputs': [{1}], 'fn_name': 'f'}", "not JSON serializable"),
        ('[{"input": "1", "output": "2", "testtype": "other"}]', "neither stdin nor functional"),
        ('{"private_test_cases": "eJw"}', "'private_test_cases' is unknown"),
        ('{"tests": "assert True", "test": "assert True"}', "repeats another key"),
    ],
)
def test_an_answer_without_tests_is_an_error_of_the_data(answer: str, reason: str) -> None:
    with pytest.raises(ValueError, match="the answer has no tests") as error:
        parse_tests(answer)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "completion",
    [
        DOUBLE,
        fenced(DOUBLE),
        fenced("nonsense (", language="") + "\n\n" + fenced(DOUBLE, language="py"),
        f"Here is the code: {fenced(DOUBLE)}",
        f"```python\n{DOUBLE}",
        f"```python\n{DOUBLE}```",
        f"~~~python\n{DOUBLE}\n~~~",
        "1. First:\n   ```python\n   x = int(input())\n   print(2 * x)\n   ```\n",
        fenced(DOUBLE) + "\n\nOutput:\n\n" + fenced("3", language=""),
        fenced(DOUBLE) + "\n\n" + fenced("python double.py", language="bash"),
        fenced("x = 0", DOUBLE),
        fenced("x = 0\nprint(x)", "def f(x):\n    return 2 * x\nprint(f(int(input())))"),
        fenced("import math\nprint(math.pi)", DOUBLE),
        fenced("def double(x):\n    return 2 * x", "print(double(int(input())))"),
        fenced("def main():\n    print(2 * int(input()))", "main()"),
        fenced("def main():\n    print(2 * int(input()))\nmain()", "main()\nmain()"),
        fenced(
            f'def f():\n    """Double.\n\n    ```\n    f()\n    ```\n    """\n    {DOUBLE}\nf()'
        ),
        f"<think>\n{fenced('print(3)')}\n</think>\n{fenced(DOUBLE)}",
        f"```python {DOUBLE}```",
        f"Here:\n{fenced(DOUBLE)}\nIt doubles a number.".replace("\n", "\r\n"),
    ],
)
def test_the_program_of_a_completion(completion: str) -> None:
    assert reward(completion, io(["1", "4"], ["2", "8"])) == 1.0


@pytest.mark.parametrize(
    "completion", ["", "I do not know.", "```python\n```", fenced("print(2 * 4)", DOUBLE + " + 1")]
)
def test_no_program_or_the_wrong_one(completion: str) -> None:
    assert reward(completion, io(["1"], ["2"])) == 0.0


def test_an_example_of_use_is_no_part_of_the_program() -> None:
    assert reward(fenced(ADD, "print(add(1, 'x'))"), ASSERT) == 1.0
    assert (
        reward(fenced(f"{ADD}\nif __name__ == '__main__':\n    add(int(input()), 1)"), ASSERT)
        == 1.0
    )


def test_many_fences_cost_little() -> None:
    assert extract_program("```\n" * 50_000) == ""
    assert "print" in extract_program("x ```python\nprint(" * 2_000)


ENDS = {
    "exit": "print(3)\nexit()\nprint(4)",
    "quit": "print(3); quit()",
    "sys.exit": "import sys\nprint(3)\nsys.exit(0)",
    "os._exit": "import os\nprint(3, flush=True)\nos._exit(0)",
    "thread": "import threading\nthreading.Thread(target=print, args=(3,)).start()",
    "atexit": "import atexit\natexit.register(print, 3)",
    "errors": "import sys\nprint(3)\nprint(4, file=sys.stderr)",
    "descriptor": "import os\nos.write(1, b'3')",
    "elsewhere": "import os\nos.makedirs('d', exist_ok=True)\nos.chdir('d')\nprint(3)",
    "state": "import math\nprint(3 if math.pi > 3 else 4)\nmath.pi = 0",
    "closed": "import sys\nprint(3)\nsys.stdin.close()\nsys.stdout.close()",
}


@pytest.mark.parametrize(
    "checker", [None, "def check(given, expected, result): return '3' in result"]
)
@pytest.mark.parametrize("end", ENDS)
def test_a_program_may_end_in_any_way(end: str, checker: str | None) -> None:
    more = {"checker": checker} if checker else {}
    assert reward(fenced(ENDS[end]), io(["", "", ""], ["3", "3", "3"], **more)) == 1.0


def test_each_run_of_a_program_that_ends_its_process_is_checked() -> None:
    program = fenced("import os\nn = input()\nprint(n, flush=True)\nos._exit(n == 'bad')")
    checker = "def check(given, expected, result): return int(result) < int(expected)"
    assert reward(program, io(["1", "2", "3"], ["2", "3", "4"], checker=checker)) == 1.0
    assert reward(program, io(["1", "2", "3"], ["2", "3", "3"], checker=checker)) == 0.0
    assert reward(program, io(["1", "bad"], ["2", "3"], checker=checker)) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "print(3)\n1 / 0",
        "print(3)\nraise SystemExit(1)",
        "import sys\nprint(3)\nsys.exit('bad')",
        "print(3)\nwhile True: pass",
        "print(3)\nimport time\ntime.sleep(60)",
        "print(3 * '3333333333' * 1_000_000)",
    ],
)
def test_a_program_may_not_fail(program: str) -> None:
    assert reward(fenced(program), io([""], ["3"], time_limit_s=0.3)) == 0.0


@pytest.mark.parametrize(
    "read",
    ["input()", "open(0).read()", "__import__('os').read(0, 9)", "__import__('sys').stdin.read()"],
)
def test_every_way_to_read_gets_the_input_of_its_test(read: str) -> None:
    program = f"print(2 * int({read}))"
    assert reward(fenced(program), io(["1", "25", "3"], ["2", "50", "6"])) == 1.0


@pytest.fixture
def long_numbers() -> Iterator[None]:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


def test_long_numbers_and_long_outputs_are_right(long_numbers: None) -> None:
    number = 10**5000
    assert reward(fenced("print(int(input()) + 1)"), io([str(number)], [str(number + 1)])) == 1.0
    assert reward(fenced("print('x' * 1_500_000)"), io([""], ["x" * 1_500_000])) == 1.0


def test_long_inputs_and_outputs_in_any_script_are_whole() -> None:
    assert reward(fenced("print(len(input()))"), io(["x" * 6_000_000], ["6000000"])) == 1.0
    assert reward(fenced("print('█' * 400_000)"), io([""], ["█" * 400_000])) == 1.0


def test_starting_is_not_charged_to_the_tests() -> None:
    tests = io([str(i) for i in range(300)], [str(2 * i) for i in range(300)], time_limit_s=0.1)
    assert reward(fenced(DOUBLE), tests) == 1.0


@pytest.mark.parametrize(
    ("printed", "tolerance", "paid"),
    [("0.333333", None, 0.0), ("0.333333", 1e-5, 1.0), ("0.3333", 1e-5, 0.0), ("nan", 1e-5, 0.0)],
)
def test_numbers_are_exact_unless_the_data_say_otherwise(printed, tolerance, paid) -> None:
    tests = {} if tolerance is None else {"tolerance": tolerance}
    assert reward(fenced(f"print('{printed} x')"), io([""], ["0.33333333 x"], **tests)) == paid
    call = io([[]], [0.33333333], fn_name="f", **tests)
    assert reward(fenced(f"def f():\n    return float('{printed}')"), call) == paid


@pytest.mark.parametrize("infinite", ["inf", "-inf", "7" * 400])
def test_a_tolerance_accepts_no_number_in_place_of_an_infinite_one(infinite: str) -> None:
    assert reward(fenced(f"print('{infinite}')"), io([""], [infinite], tolerance=1e-6)) == 1.0
    assert reward(fenced("print(3)"), io([""], [infinite], tolerance=1e-6)) == 0.0
    call = io([[]], [float(infinite)], fn_name="f", tolerance=1e-6)
    assert reward(fenced("def f():\n    return 3"), call) == 0.0


@pytest.mark.parametrize(
    ("returned", "expected", "paid"),
    [
        ("(1, 2)", [1, 2], 1.0),
        ("1.0", 1, 1.0),
        ("True", 1, 0.0),
        ("'1'", 1, 0.0),
        ("[1, [2, 3]]", [1, [2, 3]], 1.0),
        ("{'a': 1}", {"a": 1}, 1.0),
        ("__import__('numpy').int64(1)", 1, 1.0),
        ("__import__('numpy').arange(3)", [0, 1, 2], 1.0),
        ("__import__('numpy').arange(3)", [0, 1, 3], 0.0),
        ("[__import__('numpy').bool_(1)]", [True], 1.0),
        ("object()", 1, 0.0),
        ("float('inf')", 1, 0.0),
    ],
)
def test_values_that_functions_return(returned: str, expected, paid: float) -> None:
    assert (
        reward(fenced(f"def f():\n    return {returned}"), io([[]], [expected], fn_name="f"))
        == paid
    )


@pytest.mark.parametrize("returned", ["(1, 2)", "{1: (2,)}", "[{'a': (1, 2)}]"])
def test_results_may_be_written_in_python(returned: str) -> None:
    tests = f"{{'inputs': [[(3, 4)]], 'outputs': [{returned}], 'fn_name': 'f'}}"
    assert reward(fenced(f"def f(pair):\n    return {returned}"), tests) == 1.0
    assert reward(fenced("def f(pair):\n    return [2, 1]"), tests) == 0.0


def test_a_method_of_solution_is_a_function() -> None:
    program = "class Solution:\n    def add(self, a, b):\n        return a + b"
    assert reward(fenced(program), io([[1, 2]], [3], fn_name="add")) == 1.0


def test_a_checker_accepts_several_right_results() -> None:
    tests = io(
        ["ab", "abc"], ["ba", "cba"], checker=ANY_ORDER.replace("(result)", "(result.strip())")
    )
    assert reward(fenced("print(input())"), tests) == 1.0
    assert reward(fenced("print('ab')"), tests) == 0.0


def test_what_a_program_prints_is_no_verdict() -> None:
    for program in (
        "print('\"x\"')",
        'print(open("program.py").read()[-99:])\nimport os\nos._exit(0)',
    ):
        assert reward(fenced(program), "assert False") == 0.0
