"""Functions that the configuration names."""

import pytest

from areal_lite.extensions import load_object


def test_a_callable_is_found():
    assert load_object("reward.function", "math:sqrt")(9) == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("math", "must be module:name"),
        (":sqrt", "must be module:name"),
        ("no_such_module:f", "cannot import no_such_module"),
        ("math:no_such_function", "math has no callable 'no_such_function'"),
        ("math:pi", "math has no callable 'pi'"),
    ],
)
def test_an_error_names_the_key_and_the_value(name, message):
    with pytest.raises(ValueError, match=f"reward.function={name}.*{message}"):
        load_object("reward.function", name)
