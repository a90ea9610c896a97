"""A reward of your own: a function of the completion and the right answer.

It runs in processes that are killed when it hangs, so it may be slow or wrong without ending the
run. Whatever the model writes, return a number: an exception costs the trajectory.
"""


def digits_right(completion: str, answer: str) -> float:
    """Return the share of the digits that are right, wherever they stand.

    `answer` is like `x1y3z2`: each digit after the letter of its place. The shipped reward of this
    task is 1 or 0. This one also pays for half of an answer, so it teaches something earlier.
    """
    stated = digits(completion.rpartition("#")[2])
    right = digits(answer)
    hits = sum(stated.get(place) == digit for place, digit in right.items())
    return hits / max(len(right), len(stated))  # a digit too many is a wrong digit


def digits(text: str) -> dict[str, str]:
    """Return the digit of each place."""
    return dict(zip(text[::2], text[1::2]))
