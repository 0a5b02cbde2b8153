"""The public names of `penstock.transforms`."""

import pytest

import penstock.transforms as transforms


def test_public_names_are_pinned_and_importing_the_package_loads_no_numpy(python):
    assert transforms.__all__ == [
        "Chain",
        "Fields",
        "FillInTheMiddle",
        "MaskTokens",
        "TokenDropout",
        "Transform",
        "Transformed",
        "begins_word",
        "collate_masked",
        "row_keys",
    ]
    assert set(transforms.__all__) <= set(dir(transforms))
    assert all(getattr(transforms, name) for name in transforms.__all__)
    code = "import sys, penstock.transforms; print('numpy' in sys.modules)"
    assert python(code).stdout == "False\n"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'penstock\.transforms' has no attribute 'nope'"):
        transforms.nope  # noqa: B018
