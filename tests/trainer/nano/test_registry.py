import pytest

from populora_trainer.errors import PopuloraError
from populora_trainer.nano.registry import NOTICES, builtin_folder, builtin_notice


@pytest.mark.parametrize("name", NOTICES)
def test_an_embedded_base_is_found_with_and_without_its_scheme(name):
    assert builtin_folder(name) == builtin_folder(f"builtin://{name}")
    assert (builtin_folder(name) / "config.json").is_file()


def test_only_the_under_elicited_variant_has_a_notice_of_one_line():
    assert builtin_notice("builtin://nano") == ""
    assert "handicap" in builtin_notice("nano-raw")
    assert "\n" not in builtin_notice("nano-raw")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(PopuloraError, match="builtin://nano, builtin://nano-raw"):
        builtin_folder("builtin://mega")
