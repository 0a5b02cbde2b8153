"""Values that are converted without typer are those that typer gives."""

import pytest
from typer.main import get_command

from penstock.cli.app import app
from penstock.cli.values import with_usual_values

VALUES = [
    *(None, "", "a", "x=1", "lines", "auto", "strict", "ddp", "-1", "0", "1", "7", "007", "1_000"),
    *("²", "٣", "1.5", "1e3", "nan", "9" * 18, "9" * 19, " 7", "True", "~/x", "s3://a/b", "text"),
    *(0, 1, -1, 4, 1.5, True, False, (), ("a", "b"), ("",)),
]


def outcome(process, context, value):
    """The value, or the name and text of the error."""
    try:
        found = process(context, value)
    except Exception as error:  # noqa: BLE001  (of any kind, as long as both raise the same)
        return type(error).__name__, str(error)
    if isinstance(found, tuple):
        found = list(found)  # typer 0.19 does that later
    return type(found).__name__, found


@pytest.mark.parametrize("command", get_command(app).commands)
def test_every_parameter_has_the_values_and_the_errors_of_typer(command):
    group = get_command(app)
    ours, theirs = (get_command(app).commands[command] for _ in range(2))
    parent = group.context_class(group)
    context = ours.context_class(ours, parent=parent)
    quick = {each.name: each for each in with_usual_values(ours, ours.params)}
    typers = {each.name: each for each in theirs.params}
    assert quick.keys() == typers.keys()
    for name in typers:
        many = quick[name].multiple or quick[name].nargs == -1
        for value in VALUES:
            # Click gives a list where several values are allowed, and one value elsewhere.
            if value is not None and many != isinstance(value, tuple):
                continue
            expected = outcome(typers[name].process_value, context, value)
            found = outcome(quick[name].process_value, context, value)
            is_same = found == expected or (found[1] != found[1] and expected[1] != expected[1])
            assert is_same, (name, value)
